"""Whole-tensor tests: do the errors look like the predicted noise?"""
