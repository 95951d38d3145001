"""Sets of golden vectors: open, compare, and derive the tensors that are not stored."""
