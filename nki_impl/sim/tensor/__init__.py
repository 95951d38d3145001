"""Tensors as views of storages: dtypes, indices, access patterns, reads and writes."""
