"""Programs that import what the tests' environment may lack: pytest does not import them."""

collect_ignore = ["diagnose_independent.py", "plan_against_mpi.py"]
