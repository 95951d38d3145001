"""Adapters between implementations and the target protocol: lists of arrays, PyTorch, JAX, programs, files."""
