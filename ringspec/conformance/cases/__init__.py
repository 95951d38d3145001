"""The cases of the suite: which calls they make, and how the results are judged."""
