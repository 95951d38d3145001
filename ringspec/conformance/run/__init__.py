"""Run the suite: cases, calls, processes, expected failures."""
