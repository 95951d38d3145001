"""The stand-in for FusedAttention: against autograd of dense attention with explicit masks, in every format."""

import sys

import pytest

from ringspec.errors import RefusedError
from ringspec.standins import installed

pytestmark = pytest.mark.torch

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 6, 9, 4, 2, 8, 16
SCALE = 0.3
# As many tokens as these, of the rooms: the rest is padding.
VALID, ROOMS = {"q": (4, 6), "kv": (9, 5)}, {"q": (6, 6), "kv": (9, 9)}
MASKS = {
    "no_mask": "NO_MASK",
    "causal": "CAUSAL_MASK",
    "causal_bottom_right": "CAUSAL_BOTTOM_RIGHT_MASK",
    "padding": "PADDING_MASK",
    "padding_causal": "PADDING_CAUSAL_MASK",
    "padding_causal_bottom_right": "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
}


@pytest.fixture
def tex():
    with installed("transformer_engine_torch"):
        yield sys.modules["transformer_engine_torch"]


def starts(lengths):
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(dtype):
    import torch

    made = torch.Generator().manual_seed(3)
    sizes = ((QUERIES, HEADS, DIM), (KEYS, KV_HEADS, DIM), (KEYS, KV_HEADS, VALUE_DIM))
    sizes += ((QUERIES, HEADS, VALUE_DIM),)
    drawn = (torch.randn(BATCH, *size, generator=made, dtype=torch.float64) for size in sizes)
    return [x.to(getattr(torch, dtype)) for x in drawn]


def formed(x, form):
    """[B, S, H, D] in a format; packed, every sequence has its room."""
    if form == "SBHD":
        return x.transpose(0, 1).contiguous()
    return x.reshape(-1, *x.shape[2:]).contiguous() if form == "THD" else x


def unformed(x, form):
    return x.transpose(0, 1) if form == "SBHD" else x.reshape(BATCH, -1, *x.shape[-2:])


def allowed(mask, window, bottom_right, queries, keys):
    """The pairs of one sequence with this many tokens that its masks allow, by a loop."""
    import torch

    seen = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = j - i - (keys - queries if bottom_right else 0)
            seen[i, j] = (
                (window[0] == -1 or distance >= -window[0])
                and (window[1] == -1 or distance <= window[1])
                and not ("causal" in mask and distance > 0)
            )
    return seen


def dense(q, k, v, dy, seen):
    """o, lse, dq, dk, dv in float64, by autograd; rows without keys are 0."""
    import torch

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(HEADS // KV_HEADS, 2) for x in leaves[1:]]
    s = torch.einsum("bihd,bjhd->bhij", leaves[0], wide[0]) * SCALE
    s = s.masked_fill(~seen[:, None], -torch.inf)
    p = s.softmax(3).masked_fill(~seen.any(2)[:, None, :, None], 0.0)
    o = torch.einsum("bhij,bjhd->bihd", p, wide[1])
    return o.detach(), s.logsumexp(3).detach(), torch.autograd.grad(o, leaves, dy.double())


def both(tex, form, mask, window, bottom_right, tensors, **changed):
    """The forward and the backward call, as TransformerEngine makes them."""
    import torch

    layout = getattr(tex.NVTE_QKV_Layout, f"NVTE_{form}_{form}_{form}")
    style, unset = getattr(tex.NVTE_QKV_Format, f"NVTE_{form}"), tex.NVTE_QKV_Format(8)
    given = {
        "mask": getattr(tex.NVTE_Mask_Type, f"NVTE_{MASKS[mask]}"),
        "bias": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
        "dropout": 0.0,
    } | changed
    kinds = (given["bias"], given["mask"], tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX)
    valid = VALID if "padding" in mask else ROOMS
    lengths = [starts(valid[side]) for side in ("q", "kv")]
    padded = [starts(ROOMS[side]) for side in ("q", "kv")] if form == "THD" else [None, None]
    q, k, v, dy = tensors
    o, statistics, state = tex.fused_attn_fwd(
        *(QUERIES, KEYS, True, SCALE, given["dropout"], True, layout, style, unset, *kinds),
        *(window, bottom_right, *lengths, q, k, v, q.dtype, *padded, None, None, None, None),
        *(None, None, None, 16, False, False),
    )
    gradients = tex.fused_attn_bwd(
        *(QUERIES, KEYS, SCALE, 0.0, True, layout, style, style, layout, unset, unset, *kinds),
        *(window, bottom_right, False, *lengths, q, k, v, o.nan_to_num(), dy, q.dtype),
        *([statistics, state], *padded, None, None, None, False),
    )
    assert gradients[3:] == [None, None] and statistics.dtype == torch.float32
    return o, statistics, gradients[:3]


TAKEN = [
    (form, mask, window)
    for form in ("BSHD", "SBHD", "THD")
    for mask in MASKS
    for window in ((-1, -1), (2, 0), (1, 2))
    if (form != "THD" or "padding" in mask) and ("causal" not in mask or window[1] <= 0)
]


@pytest.mark.parametrize("form,mask,window", TAKEN)
def test_results_are_those_of_dense_attention(tex, form, mask, window):
    import torch

    tensors = inputs("float16")
    for bottom_right in {"bottom_right" in mask, "causal" not in mask}:
        used = [VALID[side] if "padding" in mask else ROOMS[side] for side in ("q", "kv")]
        each = zip(*used, strict=True)
        seen = torch.stack([allowed(mask, window, bottom_right, *one) for one in each])
        o, lse, wants = dense(*tensors, seen)
        given = [formed(x, form) for x in tensors]
        got_o, statistics, gradients = both(tex, form, mask, window, bottom_right, given)
        if form == "THD":
            statistics = statistics.reshape(BATCH, QUERIES, HEADS, 1).transpose(1, 2)
        assert statistics.shape == (BATCH, HEADS, QUERIES, 1)
        for b in range(BATCH):
            rows, keys = (one[b] for one in used)
            lengths = (rows, rows, keys, keys)
            found = [unformed(x, form)[b] for x in (got_o, *gradients)]
            for x, want, length in zip(found, (o, *wants), lengths, strict=True):
                # float16 rounds by 2**-11, and lse by 2**-24
                assert ((x[:length].double() - want[b, :length]).abs() <= 2e-3).all()
                empty = x[length:]
                assert (empty == 0).all() if form == "THD" else empty.isnan().all()
            lses = statistics[b, :, :rows, 0].double()
            near = (lses - lse[b, :, :rows]).abs() <= 1e-5
            assert (near | (lses == lse[b, :, :rows])).all()
            assert statistics[b, :, rows:].isnan().all()


def test_statistics_that_are_given_are_used(tex):
    """A ring passes those of whole rows; the probabilities of a block then sum to less than 1."""
    import torch

    given = inputs("float16")
    layout, style = tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, tex.NVTE_QKV_Format.NVTE_BSHD
    kinds = (tex.NVTE_Bias_Type(0), tex.NVTE_Mask_Type.NVTE_NO_MASK, tex.NVTE_Softmax_Type(0))
    q, k, v, dy = given
    statistics = torch.full((BATCH, HEADS, QUERIES, 1), 40.0)
    lengths = [starts(ROOMS[side]) for side in ("q", "kv")]
    gradients = tex.fused_attn_bwd(
        *(QUERIES, KEYS, SCALE, 0.0, True, layout, style, style, layout, style, style, *kinds),
        *((-1, -1), False, False, *lengths, q, k, v, torch.zeros_like(dy), dy, q.dtype),
        *([statistics, None], None, None, None, None, None, False),
    )
    assert all((x.abs() <= 1e-6).all() for x in gradients[:3])


@pytest.mark.parametrize(
    ("form", "mask", "window", "changed", "words"),
    [
        ("BSHD", "no_mask", (-1, -1), {"dropout": 0.1}, "no dropout"),
        ("BSHD", "no_mask", (-1, -1), {"bias": 2}, "no bias"),
        ("BSHD", "causal", (1, 2), {}, "no tokens on the right"),
        ("THD", "no_mask", (-1, -1), {}, "a mask with padding for packed tensors"),
    ],
)
def test_what_is_not_modelled_or_refused_is_named(tex, form, mask, window, changed, words):
    if "bias" in changed:
        changed = {"bias": tex.NVTE_Bias_Type(changed["bias"])}
    given = [formed(x, form) for x in inputs("bfloat16")]
    with pytest.raises(RefusedError, match=words):
        both(tex, form, mask, window, False, given, **changed)


def test_tensors_that_the_kernel_would_misread_are_refused(tex):
    q, k, v, dy = inputs("bfloat16")
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous, the same numbers
    with pytest.raises(RefusedError, match="Q with 4 axes in torch.bfloat16, contiguous"):
        both(tex, "BSHD", "no_mask", (-1, -1), False, [turned, k, v, dy])
    with pytest.raises(RefusedError, match="Q in float16 or bfloat16"):
        both(tex, "BSHD", "no_mask", (-1, -1), False, [q.float(), k, v, dy])
