"""Results as plain data for ``--json``, and as text."""
