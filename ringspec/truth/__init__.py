"""Expected values of a checked problem, with their row scales: the one place that computes them.

In reading order: ``problem`` (upstream gradients, some query rows), ``sharded``
(global tensors as workers hold them), ``exactly`` (correctly rounded), ``dense`` (by the definition in float64),
``expected`` (exact where that is affordable, else float64), ``schedule`` (who computes with what, and who sends where).
"""
