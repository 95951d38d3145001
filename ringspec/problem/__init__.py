"""The problem that a call describes: ``model`` defines its parts, and two files check a caller's arguments.

1. ``checks``          convert each argument to the one form that the specification works with, or raise an error
2. ``options``         the keywords that every function accepts
"""
