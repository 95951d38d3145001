"""The formulas of merges, one file each: the formula in the docstring, then the same in float32 operations.

Each function takes the parts in the order in which they are merged, the recipe, the elementary functions and ``own``, the
format of the parts' o. It returns o and lse of all parts as float32 arrays, o before it is rounded to the output format.
"""
