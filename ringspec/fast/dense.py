"""Dense attention and its gradient, computed in tiles: the results of ``ringspec.attention`` at the speed of BLAS.

Memory grows with the sequence length S, not with S * S. Tests compare the results with the definition in
``ringspec.spec``.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithms 1 and 2).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from ringspec.errors import OptionError, ShapeError, nearest, shown
from ringspec.fast.backward import Seeds
from ringspec.fast.job import Floats, Job, all_finite, is_finite, make_job
from ringspec.fast.passes import Backward, backward_result, forward_result
from ringspec.fast.plan import TileSizes
from ringspec.fast.team import thread_count
from ringspec.formats import check_results, rounded_input
from ringspec.problem.checks import float_array
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import (
    Options,
    check,
    check_gradients,
    default_scale,
    row_array,
    takes_options,
)
from ringspec.rings.attention import as_given
from ringspec.spec.dense_backward import Gradients, sink_gradient
from ringspec.spec.dense_forward import Forward

DTYPES = ("float64", "float32")


@takes_options
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dtype: str = "float64",
    threads: int | None = None,
    sizes: TileSizes | None = None,
    **options: Unpack[Options],
) -> Forward:
    """Compute softmax attention as :func:`ringspec.attention` defines it, with its arguments and options.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] are of any float dtype. Keywords are those of
    :class:`~ringspec.problem.options.Options`, and also:

    ``dtype``    'float64' or 'float32': the type of the computation and of the results
    ``threads``  number of threads; None: one for each core that the process may use. The results are
                 bit-identical for any number of threads
    ``sizes``    lengths of tiles; None: the sizes measured as fastest for the type and the mask

    Returns :class:`~ringspec.spec.dense_forward.Forward`: o [B, H, Sq, Dv] and lse [B, H, Sq], natural log,
    in ``dtype``. A row's bits depend only on the keys visible to it. Bad input raises a subclass of
    :class:`~ringspec.errors.RingspecError`, as in :func:`ringspec.attention`.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True).o[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    count = thread_count(threads)
    problem, job = prepared(q, k, v, dtype, sizes, options, count)
    o, lse, finite = forward_result(job, count)
    if not finite:
        admitted({"q": job.q, "k": job.k, "v": job.v}, dtype, count)
        check_results(o=o)
    return Forward(o, lse.astype(job.dtype, copy=False))


@takes_options
def attention_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    forward: Forward | None = None,
    dtype: str = "float64",
    threads: int | None = None,
    sizes: TileSizes | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Compute gradients as :func:`ringspec.attention_backward` defines them, with its arguments and options.

    dy = dL/do [B, H, Sq, Dv] and dlse = dL/dlse [B, H, Sq] (None: zeros) are of any float dtype. q, k, v,
    ``dtype``, ``threads``, ``sizes`` and keywords of :class:`~ringspec.problem.options.Options` are as in
    :func:`attention`. ``forward``: the result of :func:`attention` on the same input; None: run the forward pass first.

    Returns :class:`~ringspec.spec.dense_backward.Gradients`: dq, dk, dv in ``dtype``, dsinks and dbias in
    float64. Bad input raises a subclass of :class:`~ringspec.errors.RingspecError`; if ``forward`` has other shapes,
    it is ShapeError.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = dy = np.ones((1, 1, 2, 4))
    >>> attention_backward(q, k, v, dy, causal=True).dv[0, 0, :, 0].tolist()
    [1.5, 0.5]
    """
    count = thread_count(threads)
    problem, job = prepared(q, k, v, dtype, sizes, options, count, backward=True)
    seed, dlse_rows = admitted_seeds(problem, dy, dlse, dtype, count)
    if forward is None:
        parts = problem.rows, problem.columns, problem.terms
        ahead = make_job(job.q, job.k, job.v, *parts, dtype, sizes, look=False)
        o, lse, _ = forward_result(ahead, count)
    else:
        o, lse = given(forward, problem, dtype)
    row_term = dy_o_sum(seed, o) - dlse_rows
    share = backward_result(job, Seeds(seed, lse, row_term), count)
    sinks = problem.terms.sinks
    dsinks = None if sinks is None else sink_gradient(sinks, lse, row_term) + 0.0
    refuse_overflow(share, dsinks)
    return as_given(Gradients(share.dq, share.dk, share.dv, dsinks, share.dbias), options)


def dy_o_sum(dy: Floats, o: Floats) -> Array:
    """Return delta = <dy, o> [B, H, n] in float64 (rule BWD-1)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.vecdot(dy, o).astype(np.float64)


def prepared(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: str,
    sizes: TileSizes | None,
    options: Options,
    threads: int = 1,
    backward: bool = False,
) -> tuple[Problem, Job]:
    """Check the problem and build the :class:`~ringspec.fast.job.Job` in the dtype of the computation.

    In a forward pass, tensors that already have this dtype are not searched for NaN and infinity here; the threads of
    the pass search them when they use them.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise OptionError("dtype 'float64' or 'float32'", shown(dtype), nearest(dtype, DTYPES))
    problem = checked(q, k, v, options)
    q, k, v = problem.q, problem.k, problem.v
    look = not backward and all(x.dtype == dtype for x in (q, k, v))
    if not look:
        q, k, v = admitted({"q": q, "k": k, "v": v}, dtype, threads)
    parts = (problem.rows, problem.columns, problem.terms)
    job = make_job(q, k, v, *parts, dtype, sizes, look, backward=backward)
    return problem, job


def checked(q: Any, k: Any, v: Any, options: Options) -> Problem:
    """Check the arguments like ``problem.options.check``, but without its float64 copy of every tensor.

    At S = 4096 these copies took a fifth of the time of a float32 forward pass. For arrays that need no conversion,
    only shapes are checked here; :func:`admitted` or the pass checks the values.
    """
    plain = is_plain(q) and is_plain(k) and is_plain(v)
    if not plain or k.shape[:3] != v.shape[:3] or q.shape[::3] != k.shape[::3] or 0 in q.shape:
        return check(q, k, v, dict(options))  # also says what is wrong with their shapes
    options = cast(Options, dict(options))
    if options.get("scale") is None:
        options["scale"] = default_scale(q.shape[3])
    shapes = [np.broadcast_to(0.0, (*x.shape[:3], 1)) for x in (q, k, v)]
    problem = check(shapes[0], shapes[1], shapes[2], dict(options))
    return dataclasses.replace(problem, q=q, k=k, v=v)


def is_plain(x: Any) -> bool:
    floats = (np.dtype(np.float64), np.dtype(np.float32))
    return type(x) is np.ndarray and x.dtype in floats and x.ndim == 4


def admitted(tensors: dict[str, Floats], dtype: str, threads: int) -> list[Floats]:
    """Round tensors once to the type of the computation; raise an error if a value is or becomes infinite or NaN."""
    if not all_finite(list(tensors.values()), threads):
        for name, x in tensors.items():
            float_array(x, name, rank=4)
    with np.errstate(over="ignore", under="ignore"):
        rounded = [x.astype(dtype, copy=False) for x in tensors.values()]
    for (name, x), y in zip(tensors.items(), rounded, strict=True):
        if y is not x and not is_finite(y):
            rounded_input(x.astype(np.float64), dtype, name)
    return rounded


def refuse_overflow(share: Backward, dsinks: Array | None = None) -> None:
    """Raise an error if gradients overflowed.

    dq, dk and dv are searched only if the backward pass reported that they may not be finite.
    """
    if not share.finite:
        check_results(dq=share.dq, dk=share.dk, dv=share.dv)
    check_results(dsinks=dsinks, dbias=share.dbias)


def admitted_seeds(
    problem: Problem, dy: Any, dlse: ArrayLike | None, dtype: str, threads: int
) -> tuple[Floats, Array]:
    """Check dy and dlse; return dy in the type of the computation, and dlse (None: zeros) in float64."""
    if not is_plain(dy) or dy.shape != (*problem.q.shape[:3], problem.v.shape[3]):
        dy, dlse_rows = check_gradients(problem, dy, dlse)
    elif dlse is None:
        dlse_rows = np.zeros(problem.q.shape[:3])
    else:
        dlse_rows = row_array(problem, float_array(dlse, "dlse", rank=3), "dlse")
    return admitted({"dy": dy}, dtype, threads)[0], dlse_rows


def given(forward: Forward, problem: Problem, dtype: str) -> tuple[Floats, Array]:
    """Check the result of a forward pass that the caller passed, and return o and lse."""
    o, lse = np.asarray(forward.o, dtype), np.asarray(forward.lse)
    want = (*problem.q.shape[:3], problem.v.shape[3])
    if o.shape != want or lse.shape != want[:3]:
        raise ShapeError(
            f"a forward result with o {want} and lse {want[:3]}",
            f"o {o.shape} and lse {lse.shape}",
            "pass what attention returned for the same q, k, v",
        )
    return o, lse.astype(np.float64)
