"""What imports torch as it is imported is no test, and pytest does not import it by itself."""

collect_ignore_glob = ["torch_*.py", "bugs*.py"]
collect_ignore = [
    "blind_bugs.py",
    "catalogue.py",
    "noise.py",
    "philox.py",
    "problems.py",
    "target.py",
]
