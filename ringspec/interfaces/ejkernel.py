"""The interface of ejkernel: ring flash attention, its forward and backward passes, and the flash attention backward.

The functions take the same arguments in the same order as those of ``ejkernel.kernels._triton.ring_attention`` and
``flash_attention``, and refuse at least the same calls. Tensors are [batch, seq, heads, head_dim]; tensors of the ring
functions have one more leading axis of length W, the number of ranks. Values are computed in float64 and rounded once
to the dtype of each result, unless ``recipe=`` selects another arithmetic.

Masks use global positions: rank r of a ring holds tokens r*n + t (contiguous layout). If query and key lengths differ,
their ends are aligned: query i has position i + Sk - Sq. The public ring kernel instead masks the keys of every rank as
if they were local, which is wrong for a causal or a windowed ring on more than one rank. The documentation of ejkernel
says so and names a block-sparse successor. Dropout uses the keep mask of the specification (rule DROP-1), which depends
only on global positions, head, batch and seed. The public backward kernel takes a dropout probability but drops
nothing. A row without visible keys has o = 0, lse = -inf and no gradient.

Source: https://github.com/erfanzar/ejkernel (ejkernel/kernels/_triton/ring_attention and
ejkernel/kernels/_triton/flash_attention/_triton_impl_bwd.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.formats import store
from ringspec.interfaces.ejkernel_arguments import (
    FLASH_AXES,
    RING_AXES,
    Window,
    along_ring,
    check_flash_shapes,
    check_sinks_only,
    heads_first,
    natural_lse,
    options_of,
    packed_lengths,
    read,
    refuse_bias_with_mask,
    refuse_with_packing,
    ring_problems,
    segment_ids,
    whole_lengths,
)
from ringspec.interfaces.ranks import (
    backward_as_given,
    gradients_of,
    rounded,
    same_shape,
    tensor,
)
from ringspec.problem.checks import finite_or_minus_infinity
from ringspec.problem.options import check
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.layouts import make_layout
from ringspec.rings.ring import ring

__all__ = ["RingFlashResiduals", "flash_attention_bwd", "ring_flash_attention_call"]

Gradients = tuple[NDArray, NDArray, NDArray]


class RingFlashResiduals(NamedTuple):
    """The tensors that the forward pass keeps for the backward pass.

    q, k, v, bias, attention_mask and dropout_seed are stored as the caller passed them. ``o`` [W, b, s, h, d] is in q's
    dtype; ``lse`` [W, b, h, s] is natural, float32.
    """

    q: ArrayLike
    k: ArrayLike
    v: ArrayLike
    bias: ArrayLike | None
    attention_mask: ArrayLike | None
    o: ArrayLike
    lse: ArrayLike
    dropout_seed: int | None


def ring_flash_attention_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attention_mask: ArrayLike | None,
    bias: ArrayLike | None,
    softmax_scale: float | None,
    dropout_prob: float,
    causal: bool,
    dropout_seed: int | None,
    fwd_params: Any,
    bwd_params: Any,
    sliding_window: Window,
    logits_soft_cap: float | None,
    axis_name: str | None,
    *,
    recipe: str | Recipe | None = None,
) -> NDArray:
    """Compute ring attention over W ranks: o [W, b, s, h, d] in query's dtype.

    ``query``           [W, b, s, h, d]; bfloat16, float16, float32 or float64
    ``key``, ``value``  [W, b, sk, hkv, d] of the same dtypes; h must be a multiple of hkv
    ``attention_mask``  None or bool [W, b|1, h|1, s, W*sk], True = may attend. The s rows are those of one rank, the
                        W*sk keys those of *all* ranks. Refused together with bias
    ``bias``            None or float [W, b|1, h|1, s, W*sk], added before the soft cap; -inf masks
    ``softmax_scale``   None: 1/sqrt(d)
    ``dropout_prob``, ``dropout_seed``   the probability of dropping an element of P, in [0, 1), and the seed, where
                        None means 0
    ``causal``          True: keys with a later global position than the query's are hidden
    ``fwd_params``, ``bwd_params``   block sizes of the kernels; any value is accepted and has no effect
    ``sliding_window``  int w: (w, 0) if causal, else (w, w); or (left, right), both inclusive;
                        None, 0 and (0, 0) mean no window
    ``logits_soft_cap``  None, or c > 0: s = c * tanh(z / c)
    ``axis_name``       a name: the W ranks form one ring. None: each rank is a separate ring, whose positions start at
                        0 and whose bias and mask have sk keys
    ``recipe``          not an argument of ejkernel: the arithmetic, a name or a :class:`~ringspec.recipes.Recipe`

    Raises RefusedError, ShapeError, DtypeError, OptionError and other subclasses of RingspecError.
    Source: https://github.com/erfanzar/ejkernel (kernels/_triton/ring_attention). In ejkernel
    no argument has a default.

    >>> q = k = np.zeros((2, 1, 1, 1, 2)); v = np.arange(4.0).reshape(2, 1, 1, 1, 2)
    >>> rest = (None, None, None, 0.0, True, None, None, None, None, None)
    >>> ring_flash_attention_call(q, k, v, *rest, "ring").reshape(2, 2).tolist()
    [[0.0, 1.0], [1.0, 2.0]]
    >>> ring_flash_attention_call(q, k, v, *rest, None).reshape(2, 2).tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    """
    o, _ = _ring_flash_attention_fwd(
        query,
        key,
        value,
        attention_mask,
        bias,
        softmax_scale,
        dropout_prob,
        causal,
        dropout_seed,
        fwd_params,
        bwd_params,
        sliding_window,
        logits_soft_cap,
        axis_name,
        recipe=recipe,
    )
    return o


def _ring_flash_attention_fwd(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attention_mask: ArrayLike | None,
    bias: ArrayLike | None,
    softmax_scale: float | None,
    dropout_prob: float,
    causal: bool,
    dropout_seed: int | None,
    fwd_params: Any,
    bwd_params: Any,
    sliding_window: Window,
    logits_soft_cap: float | None,
    axis_name: str | None,
    *,
    recipe: str | Recipe | None = None,
) -> tuple[NDArray, RingFlashResiduals]:
    """Return o and the residuals for :func:`_ring_flash_attention_bwd`.

    Arguments are those of :func:`ring_flash_attention_call`.

    >>> q = k = v = np.zeros((2, 1, 1, 1, 2), np.float32)
    >>> rest = (None, None, None, 0.0, False, None, None, None, None, None, "ring")
    >>> o, residuals = _ring_flash_attention_fwd(q, k, v, *rest)
    >>> residuals.lse.dtype, np.exp(residuals.lse).ravel().tolist()
    (dtype('float32'), [2.0, 2.0])
    """
    options = options_of(
        softmax_scale, dropout_prob, causal, dropout_seed, sliding_window, logits_soft_cap
    )
    stored_q = tensor(query, "query", RING_AXES)
    problems = ring_problems(query, key, value, attention_mask, bias, options, axis_name)
    used = recipe_of("float64" if recipe is None else recipe)
    ranks, batch, length, heads, _ = stored_q.shape
    o, lse = np.zeros(stored_q.shape), np.zeros((ranks, batch, heads, length))
    for problem in problems:
        run = ring(
            problem.q,
            problem.k,
            problem.v,
            workers=len(problem.ranks),
            recipe=used,
            **problem.options,
        )
        for position, rank in enumerate(problem.ranks):
            o[rank] = run.worker(position).o.swapaxes(1, 2)
            lse[rank] = run.worker(position).lse
    stored_o = rounded(o, stored_q)
    residuals = RingFlashResiduals(
        query, key, value, bias, attention_mask, stored_o, store(lse, "float32"), dropout_seed
    )
    return stored_o, residuals


def _ring_flash_attention_bwd(
    softmax_scale: float | None,
    dropout_prob: float,
    causal: bool,
    dropout_seed: int | None,
    fwd_params: Any,
    bwd_params: Any,
    sliding_window: Window,
    logits_soft_cap: float | None,
    axis_name: str | None,
    res: RingFlashResiduals,
    do: ArrayLike,
    *,
    recipe: str | Recipe | None = None,
) -> tuple[NDArray, NDArray, NDArray, None, None]:
    """Return dq, dk, dv in the shapes and dtypes of q, k, v in the residuals, and None for mask and bias.

    The first arguments are those that jax.custom_vjp calls non-differentiable, in the order of
    :func:`ring_flash_attention_call`. ``res`` holds the residuals, and ``do`` [W, b, s, h, d] is the gradient of the
    loss with respect to o. o and lse are taken from the residuals and not recomputed. The seed is ``dropout_seed``; the
    seed in the residuals is ignored. K, V, dK and dV travel around the ring. Source:
    https://github.com/erfanzar/ejkernel (kernels/_triton/ring_attention).

    >>> q = k = v = np.zeros((2, 1, 1, 1, 2), np.float32)
    >>> static = (None, 0.0, True, None, None, None, None, None)
    >>> _, residuals = _ring_flash_attention_fwd(q, k, v, None, None, *static, "ring")
    >>> dq, dk, dv, *rest = _ring_flash_attention_bwd(*static, "ring", residuals, np.ones_like(q))
    >>> dv.reshape(2, 2).tolist(), rest
    ([[1.5, 1.5], [0.5, 0.5]], [None, None])
    """
    options = options_of(
        softmax_scale, dropout_prob, causal, dropout_seed, sliding_window, logits_soft_cap
    )
    query, key, value, bias, attention_mask, o, lse, _ = res
    stored = [tensor(x, name, RING_AXES) for x, name in ((query, "q"), (key, "k"), (value, "v"))]
    problems = ring_problems(query, key, value, attention_mask, bias, options, axis_name)
    used = recipe_of("float64" if recipe is None else recipe)
    ranks, batch, length, heads, _ = stored[0].shape
    given_o, dy = tensor(o, "o", RING_AXES), tensor(do, "do", RING_AXES)
    for x, name in ((given_o, "o"), (dy, "do")):
        same_shape(name, x, stored[0].shape, RING_AXES)
    stats = finite_or_minus_infinity(tensor(lse, "lse", "W b h s"), "lse")
    same_shape("lse", stats, (ranks, batch, heads, length), "W b h s")

    gradients = [np.zeros(x.shape) for x in stored]
    for problem in problems:
        size, n_q, n_k = len(problem.ranks), problem.q.shape[2], problem.k.shape[2]
        workers = backward_as_given(
            check(problem.q, problem.k, problem.v, dict(problem.options)),
            along_ring(heads_first(dy, "do"), problem.ranks),
            along_ring(heads_first(given_o, "o"), problem.ranks),
            along_ring(stats, problem.ranks),
            make_layout("contiguous", n_q, size),
            make_layout("contiguous", n_k, size),
            "kv",
            used,
        )
        for position, rank in enumerate(problem.ranks):
            for total, gradient in zip(gradients, gradients_of(workers[position]), strict=True):
                total[rank] = gradient.swapaxes(1, 2)
    dq, dk, dv = (rounded(x, like) for x, like in zip(gradients, stored, strict=True))
    return dq, dk, dv, None, None


def flash_attention_bwd(
    dO: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    bias: ArrayLike | None,
    attention_mask: ArrayLike | None,
    o: ArrayLike,
    M: ArrayLike,
    dropout_prob: float,
    causal: bool,
    softmax_scale: float | None,
    dropout_seed: int | None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    sliding_window: Window = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    *,
    recipe: str | Recipe | None = None,
) -> Gradients:
    """Compute dq, dk, dv in the shapes and dtypes of q, k, v, on one device; tensors have no axis of ranks.

    ``q``, ``dO``, ``o``    [b, sq, h, d]: queries, gradient of the loss with respect to o, and o
    ``k``, ``v``            [b, sk, hkv, d]; h must be a multiple of hkv; dk and dv are sums over the query heads
                            that share a key head
    ``M``                   [b, h, sq rounded up to a multiple of 128]: lse to base **2**, that
                            is lse / ln 2; rows after sq - 1 are ignored. M and o are
                            not recomputed; a row with M = -inf contributes no gradient
    ``bias``                None or float, broadcastable to [b, h, sq, sk], added before the soft cap
    ``attention_mask``      None or bool, broadcastable to [b, h, sq, sk], True = may attend;
                            refused together with bias
    ``causal``, ``sliding_window``   as in :func:`ring_flash_attention_call`; if sq != sk the ends
                            are aligned: query i has position i + sk - sq
    ``cum_seqlens_q``, ``cum_seqlens_k``   None or ints [b + 1], both or neither. Row i of the padded batch starts with
                            cum[i + 1] - cum[i] tokens; the rest of the row is padding, which is ignored and has
                            gradients of 0. The ends of queries and keys are aligned. Refused with segment
                            ids, bias or mask
    ``softmax_aux``         sink logits [n] or [h, n]; they are checked but have no effect, because M already includes
                            them
    ``q_segment_ids``, ``kv_segment_ids``   ints [b, sq] and [b, sk], negative = padding; if only one of the two is
                            given, it is used for queries and keys
    ``dropout_prob``, ``dropout_seed``, ``softmax_scale``, ``logits_soft_cap``, ``fwd_params``,
    ``bwd_params``, ``recipe``   as in :func:`ring_flash_attention_call`

    Raises the errors of :func:`ring_flash_attention_call`. Source: https://github.com/erfanzar/ejkernel
    (kernels/_triton/flash_attention/_triton_impl_bwd.py, ``_bwd_attention_kernel_call``).

    >>> q = k = v = np.zeros((1, 2, 1, 2)); M = np.zeros((1, 1, 128)); M[..., 1] = 1.0
    >>> dq, dk, dv = flash_attention_bwd(
    ...     np.ones_like(q), q, k, v, None, None, v, M, 0.0, True, None, None)
    >>> dv[0, :, 0, 0].tolist()
    [1.5, 0.5]
    """
    given = {"q": q, "dO": dO, "o": o, "k": k, "v": v}
    stored = {name: tensor(x, name, FLASH_AXES) for name, x in given.items()}
    check_flash_shapes(stored)
    (batch, n_q, heads, _), n_k = stored["q"].shape, stored["k"].shape[1]
    refuse_bias_with_mask(bias, attention_mask)
    check_sinks_only(softmax_aux, heads)
    segments = segment_ids(q_segment_ids, kv_segment_ids, batch, n_q, n_k)
    lengths = packed_lengths(cum_seqlens_q, cum_seqlens_k, batch, n_q, n_k)
    if lengths is not None:
        refuse_with_packing(bias, attention_mask, segments)
        segments = tuple(np.where(inside, 0, -1) for inside in lengths.inside)
    else:
        lengths = whole_lengths(batch, n_q, n_k)
    inside_q, inside_k = lengths.inside

    options = options_of(
        softmax_scale, dropout_prob, causal, dropout_seed, sliding_window, logits_soft_cap
    )
    options["bias"], options["mask"] = bias, attention_mask
    options["positions_q"] = np.arange(n_q) + (lengths.k - lengths.q)[:, None]
    if segments is not None:
        options["segments_q"], options["segments_k"] = segments
    queries, d_o, output = (read(stored[name], name, inside_q) for name in ("q", "dO", "o"))
    keys, values = (read(stored[name], name, inside_k) for name in ("k", "v"))
    (worker,) = backward_as_given(
        check(queries, keys, values, dict(options)),
        d_o,
        output,
        natural_lse(M, inside_q, (batch, heads, n_q)),
        make_layout("contiguous", n_q, 1),
        make_layout("contiguous", n_k, 1),
        "kv",
        recipe_of("float64" if recipe is None else recipe),
    )
    dq, dk, dv = (x.swapaxes(1, 2) for x in gradients_of(worker))
    return rounded(dq, stored["q"]), rounded(dk, stored["k"]), rounded(dv, stored["v"])


# The name of the public kernel's own function.
_bwd_attention_kernel_call = flash_attention_bwd
