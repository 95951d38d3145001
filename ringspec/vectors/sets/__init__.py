"""Sets of golden vectors: open, compare, derive what is not stored."""
