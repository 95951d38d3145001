"""Answers against truth: bounds for each row, noise of whole tensors."""
