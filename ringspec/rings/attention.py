"""Public functions for dense attention, its gradients, and the gradients of one block.

Each function checks its arguments and calls a function of the specification. Results are float64. The formulas are in
:mod:`ringspec.spec.dense_forward` and :mod:`ringspec.spec.dense_backward`.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.formats import check_results
from ringspec.problem.options import Options, check, check_gradients, check_lse, takes_options
from ringspec.spec.block import block_backward
from ringspec.spec.dense_backward import Gradients, dense_backward, sink_gradient
from ringspec.spec.dense_forward import Forward, dense_forward


@takes_options
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[Options]) -> Forward:
    """Compute dense softmax attention, as :mod:`ringspec.spec.dense_forward` defines it.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] have any float dtype.
    :class:`~ringspec.problem.options.Options` lists the keywords. Returns :class:`Forward` in float64. Bad input raises
    a subclass of :class:`~ringspec.errors.RingspecError`.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True).o[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    return dense_forward(check(q, k, v, dict(options)))


@takes_options
def attention_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Compute the gradients of a loss L with dy = dL/do [B, H, Sq, Dv] and dlse = dL/dlse [B, H, Sq].

    ``dlse`` None means 0. The other arguments and keywords are as in :func:`attention`. Returns :class:`Gradients` in
    float64. :class:`~ringspec.problem.options.Options` lists the keywords.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = dy = np.ones((1, 1, 2, 4))
    >>> attention_backward(q, k, v, dy, causal=True).dv[0, 0, :, 0].tolist()
    [1.5, 0.5]
    """
    problem = check(q, k, v, dict(options))
    dy, dlse = check_gradients(problem, dy, dlse)
    return as_given(dense_backward(problem, dy, dlse), options)


@takes_options
def attention_block_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    *,
    lse: ArrayLike,
    delta: ArrayLike,
    **options: Unpack[Options],
) -> Gradients:
    """Compute what queries q and one block of keys k, v contribute to the gradients, for given lse and delta (BWD-11).

    ``lse`` and ``delta`` [B, H, Sq] are those of the whole rows, even if k and v are only a part of the keys. delta is
    <dy, o>, or <dy, o> - dlse if the loss depends on lse. p = exp(s - lse) is not renormalised. The other arguments are
    as in :func:`attention_backward`; :class:`~ringspec.problem.options.Options` lists the keywords. The contributions
    of all key blocks add up to the result of :func:`attention_backward`, except for dsinks: each call returns the whole
    dsinks of these rows.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 1, 4)); v = dy = np.ones((1, 1, 1, 4))
    >>> half = attention_block_backward(q, k, v, dy, lse=[[[np.log(2.0)]]], delta=[[[4.0]]])
    >>> half.dv.tolist()  # this key has half of the row's weight
    [[[[0.5, 0.5, 0.5, 0.5]]]]
    """
    problem = check(q, k, v, dict(options))
    dy, delta = check_gradients(problem, dy, delta, "delta")
    lse, sinks = check_lse(problem, lse), problem.terms.sinks
    share = block_backward(problem.q, problem.k, problem.v, dy, lse, delta, problem.tile)
    dsinks = None if sinks is None else sink_gradient(sinks, lse, delta) + 0.0
    check_results(dsinks=dsinks)
    return as_given(Gradients(share.dq, share.dk, share.dv, dsinks, share.dbias), options)


def as_given(result: Gradients, options: Any) -> Gradients:
    """Return gradients in which dsinks and dbias have the shapes in which the caller gave sinks and bias."""
    dsinks, dbias = result.dsinks, result.dbias
    if dsinks is not None:
        dsinks = dsinks.reshape(np.shape(options["sinks"]))
    if dbias is not None:
        dbias = dbias.reshape(np.shape(options["bias"]))
    return Gradients(result.dq, result.dk, result.dv, dsinks, dbias)
