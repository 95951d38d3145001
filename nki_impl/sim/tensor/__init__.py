"""Tensors as views of a storage: dtypes, indices, access patterns, reads and writes."""
