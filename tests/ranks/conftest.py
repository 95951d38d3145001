"""Programs that mpiexec starts are no tests: pytest does not import them."""

collect_ignore_glob = ["programs/*"]
