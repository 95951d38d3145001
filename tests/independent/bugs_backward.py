"""Bugs of the backward's formulas: delta, dS, its seeds, scale, heads, transposes."""

from __future__ import annotations

import torch
from independent import torch_backward as right
from independent import torch_forward
from independent.catalogue import also, bug


@bug(
    "ds_of",
    "B4 I1",
    "dy_o_sum is taken over the block that is at hand, sum_j p dp, where it belongs to the whole row.",
    "plain",
)
def delta_of_each_block(ring, p, dp, delta, keep):
    dp = dp if keep is None else dp * keep
    return p * (dp - (p * dp).sum(dim=-1, keepdim=True))


@bug(
    "probabilities",
    "B4",
    "The backward of a block uses the block's own softmax: its lse and dy_o_sum are those of the "
    "block and not of the merged row.",
    "plain",
)
def backward_of_each_block_alone(ring, s, lse):
    whole = torch.logsumexp(s, dim=-1)
    return torch.exp(s - torch.where(whole == -torch.inf, torch.inf, whole)[..., None])


also("backward_of_each_block_alone", "ds_of")(delta_of_each_block)


@bug(
    "delta",
    "B6",
    "dy is ignored in dy_o_sum: it is the row sum of o, as if the loss were the sum of o.",
    "plain",
)
def delta_as_if_dy_were_1(ring, worker, dy, o, dlse):
    return right.delta(ring, worker, torch.ones_like(dy), o, dlse)


@bug(
    "block_operands",
    "B6",
    "dy is ignored: the gradients are those of the sum of o.",
    "plain",
)
def dy_taken_as_1(ring, worker, own, guest):
    own, guest = ((x[0], torch.ones_like(x[1]), *x[2:]) if len(x) == 4 else x for x in (own, guest))
    return own, guest


also("dy_taken_as_1", "delta")(delta_as_if_dy_were_1)


@bug("delta", "B15", "The gradient that comes in through lse is ignored.", "dlse")
def dlse_ignored(ring, worker, dy, o, dlse):
    return right.delta(ring, worker, dy, o, None)


@bug("delta", "B15", "The gradient that comes in through lse is subtracted, not added.", "dlse")
def dlse_with_the_wrong_sign(ring, worker, dy, o, dlse):
    return right.delta(ring, worker, dy, o, None if dlse is None else -dlse)


@bug("delta", "", "dy_o_sum is not subtracted at all: dS is P times dP.", "plain")
def delta_left_out(ring, worker, dy, o, dlse):
    return right.delta(ring, worker, dy, torch.zeros_like(o), dlse)


@bug(
    "delta",
    "B16",
    "dy_o_sum of the last quarter of a worker's rows is taken from the first half of the head "
    "alone, before dy is whole.",
    "plain",
)
def delta_of_some_rows_from_half_of_dy(ring, worker, dy, o, dlse):
    late = torch.arange(dy.shape[2]) >= dy.shape[2] * 3 // 4
    early = torch.arange(dy.shape[3]) < dy.shape[3] // 2
    return right.delta(ring, worker, torch.where(late[:, None] & ~early, 0.0, dy), o, dlse)


@bug(
    "through_cap",
    "",
    "The derivative of the soft cap is missing: dz is dS.",
    "softcap",
)
def softcap_derivative_missing(ring, ds, s, t):
    return ds


@bug("through_cap", "", "The derivative of the soft cap is taken as 1 - t.", "softcap")
def softcap_derivative_not_squared(ring, ds, s, t):
    return ds if t is None else ds * (1.0 - t)


@bug(
    "through_cap",
    "",
    "The derivative of the soft cap is taken of the capped score: 1 - tanh(s / cap)^2 with s for z.",
    "softcap",
)
def softcap_derivative_of_the_capped_score(ring, ds, s, t):
    return ds if t is None else ds * (1.0 - torch.tanh(t) ** 2)


@bug(
    "ds_of",
    "F3",
    "Dropout: dS uses the P that was dropped and rescaled, and dP without the mask.",
    "dropout",
)
def dropped_p_in_ds(ring, p, dp, delta, keep):
    return (p if keep is None else p * keep) * (dp - delta[..., None])


@bug(
    "update",
    "F2",
    "Dropout: the denominator is summed over what was kept and rescaled.",
    "dropout",
)
def denominator_behind_dropout(ring, state, s, keep, v):
    m, l, acc = torch_forward.update(ring, state, s, keep, v)
    if keep is None:
        return m, l, acc
    base = torch.where(m == -torch.inf, 0.0, m)
    p = torch.exp(s - base[..., None])
    return m, l + (p * keep - p).sum(dim=-1), acc


@bug(
    "gather_heads",
    "F16",
    "Grouped heads: dk and dv are those of the first query head of each group.",
    "heads",
)
def gradient_of_the_first_head_of_each_group(ring, x):
    batch, _, *rest = x.shape
    return x.reshape(batch, ring.key_heads, -1, *rest)[:, :, 0]


@bug(
    "gather_heads",
    "F17",
    "Grouped heads: dk and dv are summed over the first half of the query heads of each group.",
    "one-key-head",
)
def gradient_of_half_of_each_group(ring, x):
    batch, _, *rest = x.shape
    groups = x.reshape(batch, ring.key_heads, -1, *rest)
    return groups[:, :, : max(groups.shape[2] // 2, 1)].sum(dim=2)


@bug("gather_heads", "F16", "Grouped heads: dk and dv are means over a group, not sums.", "heads")
def gradient_averaged_over_the_group(ring, x):
    batch, _, *rest = x.shape
    return x.reshape(batch, ring.key_heads, -1, *rest).mean(dim=2)


@bug("scaled", "", "The scale is applied twice to the scores, in both passes.", "plain")
def scale_applied_twice(ring, what, x):
    return x * ring.scale * (ring.scale if what == "s" else 1.0)


@bug("scaled", "", "The scale is missing in dq.", "plain")
def dq_without_the_scale(ring, what, x):
    return x if what == "dq" else torch_forward.scaled(ring, what, x)


@bug("scaled", "", "The scale is applied to dk twice: q is scaled already.", "plain")
def dk_scaled_twice(ring, what, x):
    return torch_forward.scaled(ring, what, x) * (ring.scale if what == "dk" else 1.0)


@bug(
    "turned",
    "B2",
    "P is not transposed for dv where a block is square, so that no shape reveals it.",
    "plain",
)
def p_not_transposed_when_square(ring, what, x):
    return x if what == "p" and x.shape[-1] == x.shape[-2] else right.turned(ring, what, x)


@bug(
    "turned",
    "B2",
    "dS is not transposed for dk where a block is square, so that no shape reveals it.",
    "plain",
)
def ds_not_transposed_when_square(ring, what, x):
    return x if what == "ds" and x.shape[-1] == x.shape[-2] else right.turned(ring, what, x)


@bug(
    "broadcast_sum",
    "",
    "A bias that is one for all batch entries gets the gradient of the first of them.",
    "bias-of-keys",
)
def bias_gradient_of_the_first_batch(ring, x, shape):
    return right.broadcast_sum(ring, x[:1] if shape[0] == 1 else x, shape)


@bug(
    "add_dbias",
    "A5",
    "The gradient of the bias is put under local indices of the keys.",
    "bias",
)
def bias_gradient_at_local_columns(ring, a, b, total, dz):
    return torch.cat([total[..., : dz.shape[-1]] + dz, total[..., dz.shape[-1] :]], dim=-1)


@bug(
    "gradient",
    "",
    "dq of the second half of a worker's rows is never written and stays 0.",
    "plain",
)
def dq_of_half_of_the_rows(ring, what, worker, x):
    late = torch.arange(x.shape[2]) >= x.shape[2] // 2
    return right.gradient(ring, what, worker, torch.where(late[:, None] & (what == "dq"), 0.0, x))
