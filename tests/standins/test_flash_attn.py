"""The stand-in for flash_attn against dense float64 and against torch's own attention with autograd."""

import itertools

import numpy as np
import pytest
from standins.by_hand import attention, ulp, visible

from ringspec.standins import installed

pytestmark = pytest.mark.torch

WINDOWS = ((-1, -1), (2, 1), (3, -1), (-1, 2), (0, 0), (50, 50))
LENGTHS = ((7, 7), (3, 9), (1, 5))
HEADS = ((4, 4), (4, 2), (3, 1))
COVERING = [
    (lengths, heads, causal, window)
    for number, (lengths, causal, window) in enumerate(
        itertools.product(LENGTHS, (False, True), WINDOWS)
    )
    for heads in [HEADS[number % 3]]
]
PLAIN = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
TOLERANCE = 1e-12  # float64 against float64; the largest error seen is 3e-15


def given(lengths, heads, dim=8, batch=2, dtype="float64"):
    import torch

    rng = np.random.default_rng(23)
    (queries, keys), (many, few) = lengths, heads
    shapes = ((queries, many), (keys, few), (keys, few), (queries, many))
    arrays = (rng.standard_normal((batch, rows, h, dim)) for rows, h in shapes)
    return [torch.tensor(x).to(getattr(torch, dtype)) for x in arrays]


def interface(name="flash_attn[exact]"):
    with installed(name):
        import flash_attn.flash_attn_interface as found
    return found


def run(fa, q, k, v, dy, causal, window, scale=0.3, softcap=0.0):
    """o, lse, dq, dk, dv by the low-level functions, as rings call them."""
    import torch

    chosen = {
        **PLAIN,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": softcap,
    }
    o, lse, _, _ = fa._flash_attn_forward(q, k, v, return_softmax=False, **chosen)
    new = [torch.full_like(x, 9.0) for x in (q, k, v)]
    fa._flash_attn_backward(dy, q, k, v, o, lse, *new, deterministic=True, **chosen)
    return o, lse, *new


def worst(got, want):
    """The largest error; NaN and infinities in different places count as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    same = got == want
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    return np.where(np.isnan(error), np.inf, error).max(initial=0.0)


@pytest.mark.parametrize(("lengths", "heads", "causal", "window"), COVERING)
def test_dense_results_are_those_of_dense_float64(lengths, heads, causal, window):
    tensors = given(lengths, heads)
    got = run(interface(), *tensors, causal, window)
    seen = visible(*lengths, causal, window)
    want = attention(*(x.numpy() for x in tensors), seen, 0.3)
    for one, right in zip(got, want, strict=True):
        assert worst(one, right) <= TOLERANCE


@pytest.mark.parametrize("softcap", [0.7, 20.0])
def test_softcap_is_that_of_dense_float64(softcap):
    tensors = given((4, 6), (2, 2))
    got = run(interface(), *tensors, True, (-1, -1), softcap=softcap)
    want = attention(
        *(x.numpy() for x in tensors), visible(4, 6, True, (-1, -1)), 0.3, softcap=softcap
    )
    for one, right in zip(got, want, strict=True):
        assert worst(one, right) <= TOLERANCE


def test_rows_without_keys_have_o_zero_lse_plus_infinity_and_no_gradient():
    tensors = given((9, 4), (2, 2))
    o, lse, dq, dk, dv = run(interface(), *tensors, True, (-1, -1))
    assert (o[:, :5] == 0).all() and (lse[:, :, :5] == np.inf).all() and (dq[:, :5] == 0).all()
    want = attention(*(x.numpy() for x in tensors), visible(9, 4, True, (-1, -1)), 0.3)
    for one, right in zip((o, lse, dq, dk, dv), want, strict=True):
        assert worst(one, right) <= TOLERANCE


def test_no_keys_at_all_give_o_zero_and_lse_plus_infinity():
    q, k, v, _ = given((3, 0), (2, 2))
    o, lse, _, _ = interface()._flash_attn_forward(
        q, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False
    )
    assert (o == 0).all() and (lse == np.inf).all()


@pytest.mark.parametrize(("causal", "heads"), [(False, (4, 2)), (True, (4, 4)), (True, (4, 1))])
def test_public_functions_agree_with_scaled_dot_product_attention_and_autograd(causal, heads):
    import torch

    q, k, v, dy = given((5, 8), heads)
    with installed("flash_attn[exact]"):
        import flash_attn
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flash_attn.flash_attn_func(*leaves, causal=causal)
    o.backward(dy)
    twins = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    mask = torch.tensor(visible(5, 8, causal, (-1, -1)))
    right = torch.nn.functional.scaled_dot_product_attention(
        *twins, attn_mask=mask, enable_gqa=True
    )
    right.backward(dy.transpose(1, 2))
    assert worst(o.detach(), right.detach().transpose(1, 2)) <= TOLERANCE
    for leaf, twin in zip(leaves, twins, strict=True):
        assert worst(leaf.grad, twin.grad.transpose(1, 2)) <= TOLERANCE


def test_packed_tensors_give_the_same_gradients_as_separate_ones():
    import torch

    q, k, v, dy = given((6, 6), (2, 2))
    with installed("flash_attn[exact]"):
        import flash_attn as fa
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    fa.flash_attn_func(*whole, causal=True).backward(dy)
    qkv = torch.stack((q, k, v), dim=2).requires_grad_()
    fa.flash_attn_qkvpacked_func(qkv, causal=True).backward(dy)
    assert worst(qkv.grad, torch.stack([x.grad for x in whole], dim=2)) == 0
    alone, kv = q.clone().requires_grad_(), torch.stack((k, v), dim=2).requires_grad_()
    fa.flash_attn_kvpacked_func(alone, kv, causal=True).backward(dy)
    assert worst(alone.grad, whole[0].grad) == 0
    assert worst(kv.grad, torch.stack([x.grad for x in whole[1:]], dim=2)) == 0


def test_the_given_o_and_lse_are_used_so_that_block_gradients_add_up():
    """The backward pass of two key blocks with the o and lse of the whole row; local ones give other numbers."""
    import torch

    fa = interface()
    q, k, v, dy = given((4, 8), (2, 2))
    o, lse, dq, dk, dv = run(fa, q, k, v, dy, False, (-1, -1))
    sums = torch.zeros_like(q)
    for part in (slice(0, 3), slice(3, 8)):
        new = [torch.empty_like(x) for x in (q, k[:, part], v[:, part])]
        fa._flash_attn_backward(
            dy, q, k[:, part], v[:, part], o, lse, *new, 0.0, 0.3, False, -1, -1, 0.0, None, False
        )
        sums += new[0]
        assert worst(new[1], dk[:, part]) <= TOLERANCE and worst(new[2], dv[:, part]) <= TOLERANCE
    assert worst(sums, dq) <= TOLERANCE
    local = run(fa, q, k[:, :3], v[:, :3], dy, False, (-1, -1))
    assert worst(local[3], dk[:, :3]) > 0.01


def test_lse_is_read_as_contiguous_memory_whatever_its_view():
    fa = interface()
    q, k, v, dy = given((4, 4), (3, 3))
    right = run(fa, q, k, v, dy, False, (-1, -1))
    for view in (right[1].reshape(2, 4, 3), right[1].transpose(1, 2)):
        new = [x.clone() for x in (q, k, v)]
        fa._flash_attn_backward(
            dy, q, k, v, right[0], view, *new, 0.0, 0.3, False, -1, -1, 0.0, None, False
        )
        assert worst(new[0], right[2]) == 0
    moved = right[1].transpose(1, 2).contiguous().transpose(1, 2)  # right values, other memory
    fa._flash_attn_backward(
        dy, q, k, v, right[0], moved, *new, 0.0, 0.3, False, -1, -1, 0.0, None, False
    )
    assert worst(new[0], right[2]) > 0.01


def test_given_buffers_are_written_in_place_and_others_left_alone():
    import torch

    fa = interface()
    q, k, v, dy = given((4, 6), (2, 2))
    right = run(fa, q, k, v, dy, False, (-1, -1))
    room = torch.full((2, 9, 2, 8), 7.0, dtype=torch.float64)
    buffers = (torch.empty_like(q), room[:, 1:7], torch.empty_like(v))
    sums = fa._flash_attn_backward(
        dy, q, k, v, right[0], right[1], *buffers, 0.0, 0.3, False, -1, -1, 0.0, None, False
    )
    assert worst(room[:, 1:7], right[3]) == 0
    assert (room[:, 0] == 7).all() and (room[:, 7:] == 7).all()
    delta = (dy * right[0]).sum(3).transpose(1, 2)
    assert sums.shape == (2, 2, 128) and worst(sums[:, :, :4], delta) <= TOLERANCE


def test_o_has_the_strides_of_q_and_lse_is_contiguous():
    q, k, v, _ = given((5, 6), (4, 2))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    across = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for tensors, strides in ((views, views[0].stride()), (across, q.stride())):
        o, lse, *_ = interface()._flash_attn_forward(
            *tensors, 0.0, 0.3, False, -1, -1, 0.0, None, False
        )
        assert o.stride() == strides and lse.is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "digits", "smallest"), [("bfloat16", 8, -133), ("float16", 11, -24)]
)
def test_16_bit_results_are_rounded_once(dtype, digits, smallest):
    import torch

    tensors = given((5, 9), (4, 2), dtype=dtype)
    o, lse, dq, dk, dv = run(interface("flash_attn"), *tensors, True, (-1, -1))
    assert {x.dtype for x in (o, dq, dk, dv)} == {getattr(torch, dtype)}
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    wide = [x.double().numpy() for x in tensors]
    want = attention(*wide, visible(5, 9, True, (-1, -1)), 0.3)
    assert (np.abs(o.double().numpy() - want[0]) <= ulp(want[0], digits, smallest) / 2).all()
    assert worst(lse, want[1]) <= 2e-7
    # dv does not depend on o: it shows the rounding of gradients, up to the float32 lse.
    half = ulp(want[4], digits, smallest) / 2 + 1e-6
    assert (np.abs(dv.double().numpy() - want[4]) <= half).all()


def test_autograd_does_not_see_the_low_level_functions():
    q, k, v, dy = given((4, 4), (2, 2))
    q.requires_grad_()
    o, lse, *_ = run(interface(), q, k, v, dy, False, (-1, -1))
    assert not o.requires_grad and not lse.requires_grad


def test_2_6_returns_eight_values_forward_and_four_backward_and_pads_heads():
    import torch

    fa = interface("flash_attn==2.6")
    q, k, v, dy = given((4, 4), (2, 2), dim=8, dtype="bfloat16")
    o, *padded, lse, p, _ = fa._flash_attn_forward(
        q[..., :6], k[..., :6], v[..., :6], 0.0, 0.3, True, (-1, -1), 0.0, None, False
    )
    assert o.shape[-1] == 6 and [x.shape[-1] for x in padded] == [8] * 4 and p is None
    eight = fa._flash_attn_forward(q, k, v, 0.0, 0.3, True, (-1, -1), 0.0, None, False)
    new = [torch.empty_like(x) for x in (q, k, v)]
    four = fa._flash_attn_backward(
        dy, q, k, v, eight[0], eight[5], *new, 0.0, 0.3, True, (-1, -1), 0.0, None, False
    )
    assert len(eight) == 8 and all(a is b for a, b in zip(four[:3], new, strict=True))
