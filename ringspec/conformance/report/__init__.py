"""The report of a run: records of its cases, the report file, the text for a terminal, and JUnit XML."""
