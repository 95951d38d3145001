"""Comparison of results with the correct values: error bounds for each row, noise tests of whole tensors."""
