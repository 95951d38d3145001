"""Attention and its gradients with the keywords of ``ringspec.attention``, correctly rounded.

:mod:`ringspec.problem.options` validates the keywords. :mod:`ringspec.spec` decides only which pairs are
visible (rule MASK-9) and which of them dropout keeps (DROP-1); it computes no number of a result. The functions can
also return *row scales*: for each row, the unit in which its errors are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.exact.problem import Problem
from ringspec.exact.truth import Truth, backward, block_backward, forward
from ringspec.problem import model
from ringspec.problem.options import Options, check, check_gradients, check_lse, takes_options
from ringspec.spec.dropout import keep_mask
from ringspec.spec.masks import visible


@takes_options
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    formats: Sequence[str] = ("float64",),
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    **options: Unpack[Options],
) -> Truth:
    """Compute the correctly rounded result of :func:`ringspec.attention` for the same arguments and keywords.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] are of any float dtype; ``options`` are those of
    :class:`~ringspec.problem.options.Options`. ``formats``, ``statistics`` and ``scales`` are those of :func:`forward`.
    Raises the errors of ``ringspec.attention``; UnknownKeywordError also for keywords of a ring or of the fast path
    (recipe, workers, layout, dtype, threads). Raises UndecidedError if the rounding of an element cannot be decided.

    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True).tensors["o"]["float64"][0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    problem = problem_of(check(q, k, v, dict(options)))
    return forward(problem, formats, statistics=statistics, scales=scales)


@takes_options
def attention_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    formats: Sequence[str] = ("float64",),
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    **options: Unpack[Options],
) -> Truth:
    """Compute the correctly rounded gradients of :func:`ringspec.attention_backward`, with o and lse.

    dy = dL/do [B, H, Sq, Dv], dlse = dL/dlse [B, H, Sq] (None: zeros), both of any float dtype. The other arguments
    and the errors are those of :func:`attention`. dsinks and dbias have the shapes of sinks and bias as given.

    >>> q = k = np.zeros((1, 1, 2, 4)); v = dy = np.ones((1, 1, 2, 4))
    >>> attention_backward(q, k, v, dy, causal=True).tensors["dv"]["float64"][0, 0, :, 0].tolist()
    [1.5, 0.5]
    """
    checked = check(q, k, v, dict(options))
    seeds = check_gradients(checked, dy, dlse)
    problem = problem_of(checked)
    return as_given(
        backward(problem, *seeds, formats, statistics=statistics, scales=scales), options
    )


@takes_options
def attention_block_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    *,
    lse: ArrayLike,
    delta: ArrayLike,
    formats: Sequence[str] = ("float64",),
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    **options: Unpack[Options],
) -> Truth:
    """Compute the correctly rounded result of :func:`ringspec.attention_block_backward` (BWD-11).

    lse (-inf for an empty row) and delta are [B, H, Sq], of any float dtype. They belong to the whole row of keys, of
    which k and v may be only a part. The other arguments and the errors are those of :func:`attention_backward`.

    >>> q = k = np.zeros((1, 1, 1, 1)); v = dy = np.ones((1, 1, 1, 1))
    >>> block = attention_block_backward(q, k, v, dy, lse=[[[1.0]]], delta=[[[0.0]]])
    >>> block.tensors["dv"]["float64"].item()  # 1/e
    0.36787944117144233
    """
    checked = check(q, k, v, dict(options))
    dy, delta = check_gradients(checked, dy, delta, "delta")
    rows = check_lse(checked, lse)
    problem = problem_of(checked)
    truth = block_backward(problem, dy, rows, delta, formats, statistics=statistics, scales=scales)
    return as_given(truth, options)


def problem_of(checked: model.Problem) -> Problem:
    """Return the problem with one visibility mask and one dropout mask, which replace the keywords."""
    rows, columns, terms = checked.rows, checked.columns, checked.terms
    keep = rows.keep
    if keep is None and terms.dropout_p > 0:
        keep = keep_mask(
            rows.position,
            columns.position,
            heads=np.arange(terms.heads, dtype=np.int64),
            batches=np.arange(checked.q.shape[0], dtype=np.int64),
            dropout_p=terms.dropout_p,
            dropout_seed=terms.dropout_seed,
        )
    return Problem(
        checked.q,
        checked.k,
        checked.v,
        terms.scale,
        visible=visible(rows, columns, terms),
        bias=rows.bias,
        softcap=terms.softcap,
        sinks=terms.sinks,
        keep=keep,
        dropout_p=terms.dropout_p,
    )


def as_given(truth: Truth, options: Mapping[str, Any]) -> Truth:
    """Reshape dsinks and dbias, and their row scales, to the shapes of the caller's sinks and bias."""
    shapes = {
        name: np.shape(options[of])
        for name, of in (("dsinks", "sinks"), ("dbias", "bias"))
        if options.get(of) is not None
    }

    def shaped(name: str, x: NDArray) -> NDArray:
        return x.reshape(shapes.get(name, x.shape))

    return Truth(
        {
            name: {format_name: shaped(name, x) for format_name, x in values.items()}
            for name, values in truth.tensors.items()
        },
        {name: shaped(name, x) for name, x in truth.scales.items()},
    )
