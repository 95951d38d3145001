"""The interface of AWS's NKI library: ring attention forward and backward, and the unpermute (striped to contiguous).

The functions take the same arguments, in the same order and with the same defaults and layouts, as those of
``nkilib.experimental.attention``, and refuse at least the same calls. Every tensor has one more leading axis of length
W, the number of ranks. Values are computed in float64 and rounded once, unless ``recipe=`` selects another arithmetic,
such as "nki" for that of the public kernels.

The forward and the backward pass treat the scale differently. With a causal mask the forward pass uses the scale 1.0,
and the caller must multiply q by the scale beforehand. In the backward pass ``softmax_scale=None`` means 1/sqrt(D),
with and without a causal mask. So after a causal forward pass the caller must pass the same pre-scaled q and
``softmax_scale=1.0``. dq is then the gradient with respect to the pre-scaled q; multiply dq by the scale to obtain the
gradient with respect to the original q. With the defaults in both passes, the scores are scaled twice, without an
error.

Where the definition and the public kernels differ, results follow the definition. A row without visible keys has o = 0,
lse = -inf and no gradient. ``bound_max`` is exclusive in both passes. The bounds of a query row apply on every rank
that computes the row. With several replica groups, each of which is a ring, the unpermute uses the index of a rank
within its group.

Sources: https://github.com/aws-neuron/nki-library (src/nkilib_src/nkilib/experimental/attention);
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/library/api/ring-attention-fwd.html,
ring-attention-bwd.html and ring-attention-unpermute.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import RefusedError, ShapeError
from ringspec.formats import store
from ringspec.interfaces.nkilib_arguments import (
    check_backward_shapes,
    check_forward_shapes,
    check_lnc_size,
    check_masks,
    forward_scale,
    given_scale,
    global_bounds,
    layout_of,
    local_bounds,
    lse_rows,
    rows_first,
)
from ringspec.interfaces.ranks import (
    backward_as_given,
    format_name,
    gradients_of,
    ring_array,
    rings_of,
    rounded,
    tensor,
)
from ringspec.problem.checks import as_array, flag, float_array
from ringspec.problem.model import Array
from ringspec.problem.options import Options, check
from ringspec.recipes import ROUNDING_POINTS, Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.layouts import lse_to_tiles, unpermute
from ringspec.rings.ring import ring
from ringspec.rings.run import WorkerResult
from ringspec.spec.layout import TILE_ROWS, Layout

__all__ = ["ring_attention_spmd_bwd", "ring_attention_spmd_fwd", "ring_attention_unpermute"]


def ring_attention_spmd_fwd(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    replica_groups: Any = None,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    use_causal_mask: bool = False,
    striped_input: bool = False,
    training: bool = False,
    lse_dtype: Any = np.float32,
    tp_q: bool = False,
    tp_k: bool = False,
    bound_min: ArrayLike | None = None,
    bound_max: ArrayLike | None = None,
    *,
    recipe: str | Recipe | None = None,
) -> NDArray | tuple[NDArray, NDArray]:
    """Compute o [W, b, h, s, d] in q's dtype; with ``training`` also lse [W, b, h, 128, s // 128].

    ``q``               [W, b, h, s, d] with tp_q, else [W, b, h, d, s]; bfloat16, float16, float32
                        or float64; d <= 128; s, the length on one rank, must be a multiple of 128
    ``k``               the same with tp_k; as many heads as q
    ``v``               [W, b, h, s, d]
    ``replica_groups``  disjoint tuples of num_workers rank ids; each tuple is a ring, and W is the number of
                        ranks in all tuples. None: one ring of all ranks. The ring position of a rank is
                        its index within the tuple
    ``softmax_scale``   None or 0: 1/sqrt(d). With ``use_causal_mask``, q must be pre-scaled and the scale is 1.0; any
                        other value is refused here, although the public kernel ignores it
    ``striped_input``   True: ring position r holds the tokens t*W + r; requires a causal mask. False: r*s + t
    ``lse_dtype``       a dtype or its name; lse is natural, with row t at [t % 128, t // 128]
    ``bound_min``, ``bound_max``   [W, b, s], whole numbers in any integer or float dtype. Row t may attend only to keys
                        whose index j on their rank satisfies bound_min[t] <= j < bound_max[t]. Pass both or
                        neither; they require a causal mask and striped input
    ``recipe``          not an argument of nkilib: the arithmetic, a name or a :class:`~ringspec.recipes.Recipe`

    A row without visible keys has o = 0 and lse = -inf. Arguments that the public kernel refuses raise
    :class:`~ringspec.errors.RefusedError`; wrong shapes and dtypes raise ShapeError and DtypeError.
    Source: https://github.com/aws-neuron/nki-library (ring_attention_fwd.py).

    >>> q = k = np.zeros((2, 1, 1, 4, 128), np.float32); v = np.ones((2, 1, 1, 128, 4), np.float32)
    >>> o, lse = ring_attention_spmd_fwd(q, k, v, num_workers=2, training=True)
    >>> o.shape, lse.shape, float(o[1, 0, 0, 0, 0]), round(float(np.exp(lse[1, 0, 0, 0, 0])))
    ((2, 1, 1, 128, 4), (2, 1, 1, 128, 1), 1.0, 256)
    """
    striped = flag(striped_input, "striped_input")
    causal = flag(use_causal_mask, "use_causal_mask")
    query, key = rows_first(q, "q", flag(tp_q, "tp_q")), rows_first(k, "k", flag(tp_k, "tp_k"))
    value = tensor(v, "v", "W b h s d")
    check_forward_shapes(query, key, value)
    check_masks(causal, striped, bound_min, bound_max)
    bounds = local_bounds(bound_min, bound_max, query.shape)
    scale = forward_scale(softmax_scale, causal, query.shape[4])
    lse_format = format_name(lse_dtype, "lse_dtype")
    used = recipe_of("float64" if recipe is None else recipe)

    ranks, batch, heads, length, _ = query.shape
    o = np.zeros(query.shape)
    lse = np.zeros((ranks, batch, heads, TILE_ROWS, length // TILE_ROWS))
    for group in rings_of(replica_groups, num_workers, ranks):
        layout = layout_of(striped, length, len(group))
        low, high = global_bounds(bounds, group, layout)
        run = ring(
            *(ring_array(x, group, layout, axis=2) for x in (query, key, value)),
            workers=len(group),
            layout=layout,
            recipe=used,
            causal=causal,
            scale=scale,
            bound_min=low,
            bound_max=high,
        )
        for position, rank in enumerate(group):
            o[rank] = run.worker(position).o
            lse[rank] = lse_to_tiles(run.worker(position).lse)
    if not flag(training, "training"):
        return rounded(o, query)
    return rounded(o, query), store(lse, lse_format)


def ring_attention_spmd_bwd(
    q_ref: ArrayLike,
    k_ref: ArrayLike,
    v_ref: ArrayLike,
    o_ref: ArrayLike,
    dy_ref: ArrayLike,
    lse_ref: ArrayLike,
    use_causal_mask: bool = False,
    mixed_precision: bool = True,
    softmax_scale: float | None = None,
    num_workers: int = 1,
    lnc_size: int = 1,
    replica_groups: Any = None,
    striped_attention: bool = False,
    bound_min: ArrayLike | None = None,
    bound_max: ArrayLike | None = None,
    *,
    recipe: str | Recipe | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """Compute dq, dk, dv [W, B, N, D, S], always float32.

    ``q_ref``, ``k_ref``, ``v_ref``, ``o_ref``, ``dy_ref``   [W, B, N, D, S]: the forward's inputs,
                        its o (which the forward returns as [W, b, h, s, d]) and the gradient of
                        the loss with respect to o; S must be a multiple of 128 and of min(512, S)
    ``lse_ref``         [W, B, N, 128, S // 128], natural, with row t at [t % 128, t // 128]. o and lse
                        are not recomputed; a row with lse = -inf contributes no gradient
    ``mixed_precision`` False: round as :func:`low_precision_recipe` says, with accumulators in the type of q_ref
    ``softmax_scale``   None or 0: 1/sqrt(D), also with a causal mask. After a causal forward pass, pass 1.0 and
                        the pre-scaled q; dq is then the gradient with respect to the pre-scaled q
    ``lnc_size``        number of cores of a rank, 1 or 2; no effect on the result (see :func:`deal`)
    ``num_workers``, ``replica_groups``, ``bound_min``, ``bound_max``   as in the forward pass
    ``striped_attention``   as ``striped_input`` in the forward pass
    ``recipe``          not an argument of nkilib: the arithmetic; if given, it replaces ``mixed_precision``

    Errors are those of the forward pass. Q, dY, LSE, dy_o_sum and dQ travel around the ring. Source:
    https://github.com/aws-neuron/nki-library (ring_attention_bwd.py).

    In this example q is pre-scaled, so that all scores are 1. The second call omits ``softmax_scale=1.0`` and scales
    the scores once more:

    >>> q, k, v, dy = (np.full((1, 1, 1, 4, 128), x) for x in (0.5, 0.5, 0.0, 1.0))
    >>> o, lse = ring_attention_spmd_fwd(q, k, v.swapaxes(3, 4), use_causal_mask=True, training=True)
    >>> back = q, k, v, o.swapaxes(3, 4), dy, lse
    >>> _, _, dv = ring_attention_spmd_bwd(*back, use_causal_mask=True, softmax_scale=1.0)
    >>> _, _, twice = ring_attention_spmd_bwd(*back, use_causal_mask=True)
    >>> print(f"{dv[0, 0, 0, 0, 127] * 128:.3f} {twice[0, 0, 0, 0, 127] * 128:.3f}")
    1.000 0.607
    """
    striped = flag(striped_attention, "striped_attention")
    causal = flag(use_causal_mask, "use_causal_mask")
    given = {"q_ref": q_ref, "k_ref": k_ref, "v_ref": v_ref, "o_ref": o_ref, "dy_ref": dy_ref}
    tensors = {name: tensor(x, name, "W B N D S") for name, x in given.items()}
    stored_q = tensors["q_ref"]
    check_backward_shapes(tensors)
    check_masks(causal, striped, bound_min, bound_max)
    arrays = [float_array(x.swapaxes(3, 4), name) for name, x in tensors.items()]
    ranks, batch, heads, length, head_dim = arrays[0].shape
    lse = lse_rows(lse_ref, (ranks, batch, heads, length))
    bounds = local_bounds(bound_min, bound_max, arrays[0].shape)
    scale = given_scale(softmax_scale, head_dim)
    used = backward_recipe(recipe, flag(mixed_precision, "mixed_precision"), stored_q)

    turns = deal(batch * heads, check_lnc_size(lnc_size))
    results, scratch = (np.zeros((3, *stored_q.shape)) for _ in range(2))
    for group in rings_of(replica_groups, num_workers, ranks):
        layout = layout_of(striped, length, len(group))
        low, high = global_bounds(bounds, group, layout)
        whole = [ring_array(x, group, layout, axis=2) for x in (*arrays, lse)]
        for turn in turns:
            b, n = divmod(turn.item, heads)
            options: Options = {"causal": causal, "scale": scale}
            if low is not None and high is not None:
                options["bound_min"], options["bound_max"] = low[b], high[b]
            workers = item_backward([x[b : b + 1, n : n + 1] for x in whole], options, layout, used)
            target = scratch if turn.is_duplicate else results
            for position, rank in enumerate(group):
                for which, gradient in enumerate(gradients_of(workers[position])):
                    target[which, rank, b, n] = gradient[0, 0].T
    dq, dk, dv = store(results, "float32")
    return dq, dk, dv


def ring_attention_unpermute(
    x: ArrayLike, replica_groups: Any = None, num_workers: int = 1
) -> NDArray:
    """Convert a sequence from the striped to the contiguous layout by moving every row to its new rank (rule LAYOUT-6).

    x [W, bs, s, d] of any dtype: ring position r holds tokens t*W + r, where W is the number of ranks in the ring. s,
    the length on one rank, must be a multiple of num_workers. In the result, of the same shape and dtype, ring position
    r holds tokens r*s + t. No value changes. Raises RefusedError and ShapeError.
    Source: https://github.com/aws-neuron/nki-library (ring_attention_unpermute.py).

    >>> x = np.array([[0, 2], [1, 3]]).reshape(2, 1, 2, 1)
    >>> ring_attention_unpermute(x, num_workers=2).reshape(2, 2).tolist()
    [[0, 1], [2, 3]]
    """
    values = as_array(x, "x")
    if values.ndim != 4:
        raise ShapeError(
            "x of shape [W, bs, s, d]", f"shape {values.shape}", "stack one [bs, s, d] per rank"
        )
    groups = rings_of(replica_groups, num_workers, values.shape[0])
    if values.shape[2] % len(groups[0]) != 0:
        raise RefusedError(
            f"s divisible by num_workers = {len(groups[0])}",
            f"s = {values.shape[2]}",
            "pad the sequence",
        )
    out = np.zeros_like(values)
    for group in groups:
        local = unpermute([values[rank] for rank in group], axis=1)
        for position, rank in enumerate(group):
            out[rank] = local[position]
    return out


def item_backward(
    item: list[Array], options: Options, layout: Layout, recipe: Recipe
) -> list[WorkerResult]:
    """Compute the backward pass of one head of one batch entry, in a ring in which queries travel.

    ``item`` holds q, k, v, o, dy [1, 1, S, D] and lse [1, 1, S], in global order.
    """
    q, k, v, o, dy, lse = item
    problem = check(q, k, v, dict(options))
    return backward_as_given(problem, dy, o, lse, layout, layout, "q", recipe)


@dataclass(frozen=True)
class Turn:
    """What ``core`` computes in a ``round``: item number ``item``, which is one head of one batch entry.

    ``is_duplicate``: True if no item is left for this core. The core then repeats item 0, so that both cores issue the
    same collective operations, and the results are discarded.
    """

    round: int
    core: int
    item: int
    is_duplicate: bool


def deal(items: int, lnc_size: int) -> list[Turn]:
    """Assign ``items`` = B*N items to cores and rounds: core c computes item round*lnc_size + c.

    >>> [(t.round, t.core, t.item, t.is_duplicate) for t in deal(3, 2)]
    [(0, 0, 0, False), (0, 1, 1, False), (1, 0, 2, False), (1, 1, 0, True)]
    """
    turns = []
    for n in range(-(-items // lnc_size)):
        for core in range(lnc_size):
            item = n * lnc_size + core
            spare = item >= items
            turns.append(Turn(n, core, 0 if spare else item, spare))
    return turns


def low_precision_recipe(input_format: str) -> Recipe:
    """Return the rounding points (recipe) of ``mixed_precision=False`` for inputs in the format ``input_format``.

    The recipe is "nki_low" with ``input_format`` in place of bfloat16. P, dS, the lse that the backward pass reads, and
    the accumulators of the gradients have this format; gradients are float32.

    >>> low = low_precision_recipe("float16")
    >>> low.carried_dkv, low.backward_lse, low.gradients
    ('float16', 'float16', 'float32')
    """
    low = recipe_of("nki_low")
    if input_format == "bfloat16":
        return low
    narrow = [point for point in ROUNDING_POINTS if getattr(low, point) == "bfloat16"]
    return low.replace(name=f"nki_low_{input_format}", **dict.fromkeys(narrow, input_format))


def backward_recipe(which: str | Recipe | None, mixed_precision: bool, q: NDArray) -> Recipe:
    if which is not None:
        return recipe_of(which)
    if mixed_precision:
        return recipe_of("float64")
    return low_precision_recipe(format_name(q.dtype, "the dtype of q_ref"))
