"""The specification, for reading. The order is in the docstring of :mod:`ringspec`."""
