"""What a call consists of.

1. ``model``           tensors, rows, columns, terms, and the tile of a computation
2. ``checks``          each argument in the one form that the rest works with, or an error
3. ``options``         the keywords of every function
"""
