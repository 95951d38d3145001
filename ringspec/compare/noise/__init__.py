"""The rounding noise of every element, predicted from a recipe and the truth."""
