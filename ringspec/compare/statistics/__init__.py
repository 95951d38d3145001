"""Whole-tensor tests of whether errors look like the predicted noise."""
