"""Correctly rounded attention: the same bits on every machine.

Each result is the real number that the definition (docs/spec/index.md) gives, rounded once, to nearest even, to the
requested format. :func:`attention`, :func:`attention_backward` and :func:`attention_block_backward` take the keywords
of :func:`ringspec.attention`. :func:`forward`, :func:`backward` and :func:`block_backward` take a :class:`Problem`, in
which masks are given as arrays.

>>> import numpy as np
>>> q = k = np.array([[[[1.0], [2.0]]]]); v = np.array([[[[0.0], [1.0]]]])
>>> attention(q, k, v, scale=1.0, causal=False).tensors["o"]["float64"].ravel().tolist()
[0.7310585786300049, 0.8807970779778824]

The method is fixed-point arithmetic on integers, with an error bound for every number. If a bound does not decide
the rounding, the computation is repeated with more bits. The modules prove these bounds. In reading order, they are
``integers`` (exact products), ``elementary`` (exp, log, tanh), ``problem``, ``logits``, ``softmax``, ``head`` (o and
gradients of one head), ``evaluate`` (the whole problem), ``rounding``, ``rational`` (ties), ``ziv`` (more bits),
``row_scale`` (the unit in which errors of a row are measured), ``merge_base2`` (merges whose lse are logarithms to base
2), ``truth`` and ``keywords`` (the public functions).
"""

from ringspec.exact.keywords import attention, attention_backward, attention_block_backward
from ringspec.exact.problem import Problem
from ringspec.exact.truth import Truth, backward, block_backward, forward, merge

__all__ = [
    "Problem",
    "Truth",
    "attention",
    "attention_backward",
    "attention_block_backward",
    "backward",
    "block_backward",
    "forward",
    "merge",
]
