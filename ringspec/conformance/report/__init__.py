"""The report of a run: records of its cases, the file, the text for a terminal, and JUnit XML."""
