"""Results of commands as plain data for ``--json``, and as text."""
