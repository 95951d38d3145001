"""Scripts for a machine with GPUs, run by hand: pytest does not import them."""

collect_ignore_glob = ["[!c]*.py", "check_*.py"]
