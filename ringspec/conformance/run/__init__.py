"""Running the suite: cases, calls, processes, expected failures."""
