"""Predict the rounding noise of every element from a recipe and the true values."""
