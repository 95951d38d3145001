"""What a call consists of: ``model`` defines it, and two files check a caller's arguments.

1. ``checks``          each argument in the one form that the rest works with, or an error
2. ``options``         the keywords of every function
"""
