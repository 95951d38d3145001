"""Scripts for a machine with GPUs, run by hand: pytest does not import them."""

collect_ignore_glob = ["*_*.py"]
