"""Programs and functions that other processes load are no tests: pytest does not import them."""

collect_ignore_glob = ["programs/*", "*_functions.py"]
