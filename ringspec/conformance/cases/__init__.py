"""The cases of the suite: what is called, and how the answer is judged."""
