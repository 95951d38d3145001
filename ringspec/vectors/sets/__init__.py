"""Sets of golden vectors: open and compare them, and derive the tensors that they do not store."""
