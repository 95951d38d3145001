"""The cases of the suite: which calls of the target they make, and how they judge the results."""
