"""The stand-in for FlashAttention 3 against torch's own attention with autograd in float64, with the mask written out."""

import inspect
import math

import numpy as np
import pytest
from standins.test_flash_attn import TOLERANCE, given, worst
from standins.test_flash_attn_packed import cumulative

from ringspec.standins import installed

pytestmark = pytest.mark.torch

# Masks as FlashAttention 3 documents them: 1 where a query (row) sees a key.
MASKS = {
    ((2, 5), True, (-1, -1)): ["11110", "11111"],
    ((5, 2), True, (-1, -1)): ["00", "00", "00", "10", "11"],
    ((3, 3), False, (1, 0)): ["100", "110", "011"],
    ((3, 5), False, (1, 1)): ["01110", "00111", "00011"],
    ((4, 2), False, (1, -1)): ["11", "11", "11", "11"],
    ((5, 2), False, (0, 1)): ["00", "00", "10", "11", "01"],
    ((3, 4), True, (1, 7)): ["1100", "0110", "0011"],
    ((2, 4), False, (-1, 1)): ["1111", "1111"],
    ((4, 2), False, (-1, 0)): ["00", "00", "10", "11"],
    ((1, 3), True, (-1, -1)): ["111"],
    ((3, 2), False, (50, 50)): ["11", "11", "11"],
}
BETA, STABLE = "flash_attn_interface[exact]==3.0.0.b1", "flash_attn_interface[exact]"


def interface(name=STABLE):
    with installed(name):
        import flash_attn_interface as found
    return found


def ints(*numbers):
    import torch

    return torch.tensor(numbers, dtype=torch.int32)


def seen_of(rows):
    import torch

    return torch.tensor([[one == "1" for one in row] for row in rows])


def by_autograd(q, k, v, dy, seen, scale, softcap=0.0):
    """o, lse, dq, dk, dv of [B, S, H, D]; o 0 and lse -inf in rows without keys."""
    import torch

    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    some = seen.any(1)
    p = torch.zeros_like(s)
    p[:, :, some] = torch.softmax(s[:, :, some].masked_fill(~seen[some], -math.inf), 3)
    o = torch.einsum("bhij,bjhd->bihd", p, values)
    o.backward(dy)
    lse = torch.logsumexp(s.masked_fill(~seen, -math.inf), 3).detach()
    return o.detach(), lse, q.grad, k.grad, v.grad


def run(fa, q, k, v, dy, causal, window, scale=0.3, softcap=0.0, **lengths):
    """o, lse, dq, dk, dv by the low-level functions of 3.0.0, whose buffers hold 9."""
    import torch

    shared = {"softmax_scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    shared |= {"softcap": softcap, **lengths}
    o, lse, _, _ = fa._flash_attn_forward(q, k, v, causal=causal, **shared)
    new = [torch.full_like(x, 9.0) for x in (q, k, v)]
    names = {"seqused_q": "sequed_q", "seqused_k": "sequed_k"}
    shared = {names.get(name, name): value for name, value in shared.items()}
    buffers = dict(zip(("dq", "dk", "dv"), new, strict=True))
    fa._flash_attn_backward(dy, q, k, v, o, lse, is_causal=causal, **buffers, **shared)
    return o, lse, *new


@pytest.mark.parametrize(("call", "rows"), MASKS.items())
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_masks_are_aligned_at_the_last_query_and_key(call, rows, heads):
    lengths, causal, window = call
    tensors = given(lengths, heads)
    got = run(interface(), *tensors, causal, window)
    want = by_autograd(*tensors, seen_of(rows), 0.3)
    for one, right in zip(got, want, strict=True):
        assert worst(one, right) <= TOLERANCE


def test_rows_without_keys_have_lse_minus_infinity_and_no_keys_at_all_plus_infinity():
    fa = interface()
    q, k, v, _ = given((4, 2), (2, 2))
    _, lse, *_ = fa._flash_attn_forward(q, k, v, causal=True)
    assert (lse[:, :, :2] == -math.inf).all() and lse[:, :, 2:].isfinite().all()
    o, lse, *_ = fa._flash_attn_forward(q, k[:, :0], v[:, :0])
    assert (o == 0).all() and (lse == math.inf).all()
    q[0, 3, 0, 0] = math.nan
    assert fa._flash_attn_forward(q, k, v)[1][0, 0, 3] == -math.inf


def test_softcap_and_the_default_scale_are_those_of_the_formula():
    tensors = given((4, 6), (2, 1))
    got = run(interface(), *tensors, False, (-1, -1), scale=None, softcap=0.7)
    seen = seen_of(["111111"] * 4)
    want = by_autograd(*tensors, seen, tensors[0].shape[-1] ** -0.5, softcap=0.7)
    for one, right in zip(got, want, strict=True):
        assert worst(one, right) <= TOLERANCE


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_use_their_first_rows_and_leave_the_others_alone(causal):
    """cu_seqlens with padding between sequences: of 5, 3 and 4 queries, 3, 3 and 0 are used; keys likewise."""
    q, k, v, dy = (x[0] for x in given((12, 13), (4, 2), batch=1))
    lengths = {
        "cu_seqlens_q": cumulative((5, 3, 4)),
        "cu_seqlens_k": cumulative((5, 6, 2)),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "seqused_q": ints(3, 3, 0),
        "seqused_k": ints(4, 6, 2),
    }
    o, lse, dq, dk, dv = run(interface(), q, k, v, dy, causal, (-1, -1), **lengths)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(5, 8), slice(5, 11))):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        seen = seen_of(["1" * (m - n + i + 1) + "0" * (n - i - 1) for i in range(n)])
        seen = seen if causal else seen.new_ones(n, m)
        one = [x[None] for x in (q[rows], k[keys], v[keys], dy[rows])]
        want = by_autograd(*one, seen, 0.3)
        got = (o[rows], lse[:, rows], dq[rows], dk[keys], dv[keys])
        for x, right in zip(got, want, strict=True):
            assert worst(x, right[0]) <= TOLERANCE
    unused_q, unused_k = [3, 4, 8, 9, 10, 11], [4]
    assert o[unused_q].isnan().all() and lse[:, unused_q].isnan().all()
    assert (dq[unused_q] == 9).all() and (dk[unused_k] == 9).all() and (dv[unused_k] == 9).all()
    assert (dk[11:] == 0).all() and (dv[11:] == 0).all()  # keys of a sequence without queries


def test_seqused_shortens_dense_tensors_and_moves_the_alignment():
    q, k, v, dy = given((4, 6), (2, 2))
    used = {"seqused_q": ints(4, 2), "seqused_k": ints(5, 6)}
    got = run(interface(), q, k, v, dy, True, (-1, -1), **used)
    masks = (["11000", "11100", "11110", "11111"], ["111110", "111111"])
    for b, (n, m) in enumerate(((4, 5), (2, 6))):
        one = [x[b : b + 1, :size] for x, size in ((q, n), (k, m), (v, m), (dy, n))]
        want = by_autograd(*one, seen_of(masks[b]), 0.3)
        mine = (got[0][b, :n], got[1][b, :, :n], got[2][b, :n], got[3][b, :m], got[4][b, :m])
        for x, right in zip(mine, want, strict=True):
            assert worst(x, right[0]) <= TOLERANCE
    assert (got[2][1, 2:] == 9).all() and (got[3][0, 5:] == 9).all()


def test_the_given_o_and_lse_are_used_so_that_block_gradients_add_up():
    import torch

    fa = interface()
    q, k, v, dy = given((4, 8), (2, 2))
    want = by_autograd(q, k, v, dy, seen_of(["1" * 8] * 4), 0.3)
    total = torch.zeros_like(q)
    for part in (slice(0, 3), slice(3, 8)):
        buffers = [torch.empty_like(x) for x in (q, k[:, part], v[:, part])]
        dq, dk, dv = buffers
        fa._flash_attn_backward(
            *(dy, q, k[:, part], v[:, part], want[0], want[1]),
            dq=dq, dk=dk, dv=dv, softmax_scale=0.3,
        )  # fmt: skip
        total += dq
        assert worst(dk, want[3][:, part]) <= TOLERANCE
        assert worst(dv, want[4][:, part]) <= TOLERANCE
    assert worst(total, want[2]) <= TOLERANCE


def test_an_lse_of_minus_infinity_counts_as_zero_in_the_backward_pass():
    import torch

    fa = interface()
    q, k, v, dy = given((3, 3), (1, 1))
    o = torch.zeros_like(q)
    results = []
    for number in (-math.inf, 0.0):
        new = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
        fa._flash_attn_backward(dy, q, k, v, o, torch.full((2, 1, 3), number).double(), **new)
        results.append(new)
    for name in results[0]:
        assert worst(results[0][name], results[1][name]) == 0


@pytest.mark.parametrize("name", [BETA, STABLE])
def test_public_functions_agree_with_autograd(name):
    import torch

    fa = interface(name)
    q, k, v, dy = given((3, 5), (4, 2))
    want = by_autograd(q, k, v, dy, seen_of(["11100", "11110", "11111"]), 8**-0.5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = fa.flash_attn_func(*leaves, causal=True)
    o.backward(dy)
    for one, right in zip(
        (o.detach(), *(x.grad for x in leaves)), (want[0], *want[2:]), strict=True
    ):
        assert worst(one, right) <= TOLERANCE
    packed = [x.flatten(0, 1).clone().requires_grad_() for x in (q, k, v)]
    ends = (cumulative((3, 3)), cumulative((5, 5)), 3, 5)
    fa.flash_attn_varlen_func(*packed, *ends, causal=True).backward(dy.flatten(0, 1))
    for one, leaf in zip(packed, leaves, strict=True):
        assert worst(one.grad, leaf.grad.flatten(0, 1)) <= TOLERANCE
    same = [x[:, :3].clone().requires_grad_() for x in (q, k, v)]
    fa.flash_attn_func(*same).backward(dy)
    qkv = torch.cat([x.detach() for x in same], 2).requires_grad_()
    fa.flash_attn_qkvpacked_func(qkv, num_heads_q=4).backward(dy)
    assert worst(qkv.grad, torch.cat([x.grad for x in same], 2)) <= TOLERANCE


def test_v_may_have_another_head_dimension():
    import torch

    q, k, v, dy = given((3, 5), (2, 2))
    wide_v, wide_dy = torch.cat((v, v * 2), -1), torch.cat((dy, dy), -1)
    got = run(interface(), q, k, wide_v, wide_dy, False, (-1, -1))
    want = by_autograd(q, k, wide_v, wide_dy, seen_of(["11111"] * 3), 0.3)
    for one, right in zip(got, want, strict=True):
        assert worst(one, right) <= TOLERANCE


def test_each_version_returns_what_the_original_returns():
    import torch

    q, k, v, dy = given((3, 5), (2, 2), dtype="bfloat16")
    for name in ("flash_attn_interface==3.0.0.b1", "flash_attn_interface"):
        fa, stable = interface(name), "b1" not in name
        nothing = [None] * 20
        found = fa._flash_attn_forward(q, k, v, *nothing, 0.3, False)
        o, lse, *rest = found
        assert (o.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (2, 2, 3))
        assert [x.numel() for x in rest] == [0, 0] if stable else rest == [None, None]
        new = [torch.empty_like(x) for x in (q, k, v)]
        back = fa._flash_attn_backward(dy, q, k, v, o, lse, *[None] * 4, 3, 5, *new, 0.3, False)
        assert (
            back.shape == (2, 2, 128)
            if stable
            else all(x is y for x, y in zip(back[:3], new, strict=True))
        )
        names = list(inspect.signature(fa._flash_attn_backward).parameters)
        assert ("is_causal" in names) == stable and ("window_size" in names) != stable
        public = fa.flash_attn_func(q, k, v)
        assert isinstance(public, torch.Tensor)
        assert ("return_attn_probs" in inspect.signature(fa.flash_attn_func).parameters) == stable
    assert len(interface().flash_attn_func(*given((3, 5), (2, 2))[:3], return_attn_probs=True)) == 2
    with pytest.raises(TypeError, match="return_attn_probs"):
        interface(BETA).flash_attn_func(q, k, v, return_attn_probs=True)


def test_16_bit_results_are_rounded_once():
    q, k, v, dy = given((5, 9), (4, 2), dtype="bfloat16")
    o, lse, _, _, dv = run(interface("flash_attn_interface"), q, k, v, dy, False, (-1, -1))
    wide = [x.double() for x in (q, k, v, dy)]
    want = by_autograd(*wide, seen_of(["1" * 9] * 5), 0.3)
    for one, right in ((o, want[0]), (dv, want[4])):
        _, exponent = np.frexp(np.abs(right.numpy()))
        half = 2.0 ** (exponent - 9)
        assert (np.abs(one.double().numpy() - right.numpy()) <= half + 1e-6).all()
    assert worst(lse, want[1]) <= 2e-7
