"""Expected values of a checked problem and their row scales; no other package computes them.

In reading order: ``problem`` (upstream gradients, a problem of some query rows), ``sharded``
(global tensors as workers hold them), ``exactly`` (correctly rounded), ``dense`` (the definition in float64),
``expected`` (exact if affordable, else float64), ``schedule`` (who computes with which block, and who sends where).
"""
