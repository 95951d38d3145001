"""Comparison of results with the truth: bounds for each row, noise tests of whole tensors."""
