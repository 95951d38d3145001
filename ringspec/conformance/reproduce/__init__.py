"""Shrink a failing case, and write it as a program without ringspec."""
