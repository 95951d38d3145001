"""Correctly rounded attention: the truth that does not depend on a machine.

Each result is the real number that the definition (docs/spec/index.md) gives, rounded once, to nearest even, to the
format asked for. The method is fixed-point arithmetic on integers with an error bound for every
number, and more bits where the bound does not decide the rounding. In reading order, each file with
its argument: ``integers`` (exact products), ``elementary`` (exp, log, tanh), ``problem``,
``logits``, ``softmax``, ``head`` (o and gradients of one head), ``evaluate`` (the whole problem),
``rounding``, ``rational`` (ties), ``ziv``, ``row_scale``, ``truth``.

>>> import numpy as np
>>> q = k = np.array([[[[1.0], [2.0]]]]); v = np.array([[[[0.0], [1.0]]]])
>>> forward(Problem(q, k, v, 1.0)).tensors["o"]["float64"].ravel().tolist()
[0.7310585786300049, 0.8807970779778824]
"""

from ringspec.exact.problem import Problem
from ringspec.exact.truth import Truth, backward, block_backward, forward, merge

__all__ = ["Problem", "Truth", "backward", "block_backward", "forward", "merge"]
