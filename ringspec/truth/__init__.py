"""Expected values of a checked problem, and their row scales: the magnitude by which errors in a row are divided.

In reading order: ``problem`` (upstream gradients, a problem restricted to some query rows), ``sharded``
(global tensors as workers hold them), ``exactly`` (correctly rounded values), ``dense`` (the definition in float64),
``expected`` (exact values for small problems, else float64 values), ``schedule`` (a schedule as tables).
"""
