"""``installed("aten_flash")``: ATen's flash-attention operators on a CPU, and their removal."""

import pytest

from ringspec.errors import OptionError
from ringspec.standins import installed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention


def inputs(dtype, heads=4, kv_heads=2, queries=5, keys=5, width=6):
    made = torch.Generator().manual_seed(3)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    return [
        torch.randn(2, *x, width, generator=made, dtype=torch.float64).to(dtype) for x in shapes
    ]


def dense(q, k, v, causal, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(3) @ v, s.logsumexp(3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_both_passes_are_those_of_dense_attention_rounded_once(dtype, causal):
    q, k, v, dy = inputs(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with installed("aten_flash[exact]" if dtype == torch.float64 else "aten_flash"):
        o, lse = OPERATOR(*leaves, is_causal=causal, scale=0.3)[:2]
        o.backward(dy)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, want_lse = dense(*wide, causal, 0.3)
    want.backward(dy.double())
    eps = torch.finfo(dtype).eps
    assert o.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert lse.shape == (2, 4, 5) and o.transpose(1, 2).is_contiguous()
    assert ((o.double() - want).abs() <= eps / 2 * want.abs() + 1e-14).all()
    assert ((lse.double() - want_lse).abs() <= 1e-6).all()
    for leaf, exact in zip(leaves, wide, strict=True):
        # The o that the backward pass is given is rounded.
        assert ((leaf.grad.double() - exact.grad).abs() <= 8 * eps + 1e-13).all()


def test_the_backward_pass_uses_the_lse_and_o_that_it_is_given():
    q, k, v, dy = inputs(torch.float64)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    with installed("aten_flash[exact]"):
        o, lse, *rest = OPERATOR(q, k, v)
        given = (*rest[:4], 0.0, False, rest[4], rest[5])
        right = backward(dy, q, k, v, o, lse, *given)
        half = backward(dy, q, k, v, o, lse + torch.log(torch.tensor(2.0)), *given)
        other = backward(dy, q, k, v, 2 * o, lse, *given)
    for one, twice in zip(right, half, strict=True):
        assert ((one / 2 - twice).abs() <= 1e-6).all()
    assert not torch.equal(right[0], other[0]) and torch.equal(right[2], other[2])


def test_after_the_block_the_operators_have_no_cpu_implementation():
    q, k, v, _ = inputs(torch.bfloat16)
    with pytest.raises(KeyError), installed("aten_flash"):
        OPERATOR(q, k, v)
        raise KeyError("of the program")
    with pytest.raises(NotImplementedError):
        OPERATOR(q, k, v)


def test_a_second_one_is_refused():
    with installed("aten_flash"), pytest.raises(OptionError, match="no CPU implementation"):
        with installed("aten_flash"):
            raise AssertionError


@pytest.mark.parametrize(
    ("sizes", "arguments", "words"),
    [
        ({"dtype": torch.float32}, {}, "float16 or bfloat16"),
        ({"queries": 3}, {"is_causal": True}, "as many queries as keys"),
        ({}, {"dropout_p": 0.5}, "dropout_p"),
        ({}, {"return_debug_mask": True}, "return_debug_mask"),
        ({"heads": 3}, {}, "a multiple of Hkv"),
        ({"width": 264}, {}, "at most 256"),
    ],
)
def test_what_the_kernel_refuses_or_the_stand_in_lacks_is_named(sizes, arguments, words):
    q, k, v, _ = inputs(**({"dtype": torch.bfloat16} | sizes))
    with installed("aten_flash"), pytest.raises(OptionError, match=words):
        OPERATOR(q, k, v, **arguments)
