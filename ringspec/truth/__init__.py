"""The expected values of a problem, and their row scales: the magnitude by which the errors of a row are divided.

The modules, in reading order: ``problem`` (upstream gradients, and a problem restricted to some query rows),
``sharded`` (global tensors as the workers of a ring hold them), ``exactly`` (correctly rounded values), ``dense`` (the
definition in float64), ``expected`` (exact values for small problems, else float64 values), ``schedule`` (what each
worker of a ring does in each step, as tables).
"""
