"""Diagnose a failing case: where its results are wrong, and which known bug gives the same results."""
