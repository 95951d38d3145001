"""The packed (varlen) functions of the stand-in for flash_attn, sequence by sequence against dense float64."""

import numpy as np
import pytest
from standins.by_hand import attention, visible
from standins.test_flash_attn import PLAIN, TOLERANCE, interface, worst

from ringspec.standins import installed

pytestmark = pytest.mark.torch

SEQUENCES = [  # lengths of queries and of keys
    ((5, 3, 8), (5, 3, 8)),
    ((1, 6), (4, 7)),
    ((4, 0, 2), (6, 3, 2)),
    ((3, 4), (0, 5)),
]


def packed(queries, keys, heads=(4, 2), dim=8):
    import torch

    rng = np.random.default_rng(29)
    shapes = ((sum(queries), heads[0]), *[(sum(keys), heads[1])] * 2, (sum(queries), heads[0]))
    tensors = [torch.tensor(rng.standard_normal((*shape, dim))) for shape in shapes]
    return tensors, [cumulative(queries), cumulative(keys), max(queries), max(keys)]


def cumulative(lengths):
    import torch

    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def run(fa, tensors, lengths, causal, window):
    import torch

    q, k, v, dy = tensors
    chosen = {
        **PLAIN,
        "softmax_scale": 0.3,
        "causal": causal,
        "window_size_left": window[0],
        "window_size_right": window[1],
    }
    o, lse, _, _ = fa._flash_attn_varlen_forward(q, k, v, *lengths, **chosen)
    new = [torch.full_like(x, 9.0) for x in (q, k, v)]
    fa._flash_attn_varlen_backward(
        dy, q, k, v, o, lse, *new, *lengths, deterministic=False, **chosen
    )
    return o, lse, *new


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (1, 50)])
@pytest.mark.parametrize(("queries", "keys"), SEQUENCES)
def test_each_sequence_is_that_of_dense_float64(queries, keys, causal, window):
    tensors, lengths = packed(queries, keys)
    o, lse, dq, dk, dv = run(interface(), tensors, lengths, causal, window)
    q, k, v, dy = (x.numpy()[None] for x in tensors)
    row = column = 0
    for many, few in zip(queries, keys, strict=True):
        rows, columns = slice(row, row + many), slice(column, column + few)
        row, column = row + many, column + few
        seen = visible(many, few, causal, window)
        want = attention(q[:, rows], k[:, columns], v[:, columns], dy[:, rows], seen, 0.3)
        got = (o[rows], lse[:, rows], dq[rows], dk[columns], dv[columns])
        for one, right in zip(got, want, strict=True):
            assert worst(one, right[0]) <= TOLERANCE


def test_rows_of_no_sequence_are_nan_in_new_tensors_and_untouched_in_buffers():
    tensors, lengths = packed((3, 2), (3, 2))
    short = [lengths[0][:-1], lengths[1][:-1], 3, 3]
    o, lse, dq, dk, _ = run(interface(), tensors, short, False, (-1, -1))
    assert o[3:].isnan().all() and lse[:, 3:].isnan().all()
    assert (dq[3:] == 9).all() and (dk[3:] == 9).all() and not o[:3].isnan().any()


def test_zero_tensors_zeroes_rows_of_no_sequence():
    import torch

    fa = interface()
    (q, k, v, dy), lengths = packed((3, 2), (3, 2))
    short = [lengths[0][:-1], lengths[1][:-1], 3, 3]
    o, lse, _, _ = fa._flash_attn_varlen_forward(
        q, k, v, *short, 0.0, 0.3, False, zero_tensors=True
    )
    assert (o[3:] == 0).all() and (lse[:, 3:] == -np.inf).all()
    new = [torch.full_like(x, 9.0) for x in (q, k, v)]
    chosen = (0.0, 0.3, False, -1, -1, 0.0, None, False)
    fa._flash_attn_varlen_backward(dy, q, k, v, o, lse, *new, *short, *chosen, zero_tensors=True)
    assert all((x[3:] == 0).all() and (x[:3] != 0).any() for x in new)


def test_a_one_sided_window_gets_the_longest_length_as_its_other_side():
    """As in flash-attn, which matters for queries that lie more than this length before the first key."""
    tensors, lengths = packed((6, 3), (2, 3))
    _, lse, *_ = run(interface(), tensors, lengths, False, (1, -1))
    # Query i of the first sequence is at position i - 4 and sees keys up to i - 4 + 3.
    assert [bool(x) for x in lse[0, :6] == np.inf] == [True, False, False, False, False, False]


def test_the_public_functions_give_the_gradients_of_the_low_level_ones():
    import torch

    (q, k, v, dy), lengths = packed((5, 3), (5, 3), heads=(2, 2))
    want = run(interface(), (q, k, v, dy), lengths, True, (-1, -1))
    with installed("flash_attn[exact]"):
        import flash_attn as fa
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse, _ = fa.flash_attn_varlen_func(
        *leaves, *lengths, softmax_scale=0.3, causal=True, return_attn_probs=True
    )
    o.backward(dy)
    assert worst(o.detach(), want[0]) == 0 and worst(lse.detach(), want[1]) == 0
    assert all(worst(x.grad, y) == 0 for x, y in zip(leaves, want[2:], strict=True))
    qkv = torch.stack((q, k, v), dim=1).requires_grad_()
    fa.flash_attn_varlen_qkvpacked_func(
        qkv, lengths[0], lengths[2], softmax_scale=0.3, causal=True
    ).backward(dy)
    assert worst(qkv.grad, torch.stack(want[2:], dim=1)) == 0
    alone, kv = q.clone().requires_grad_(), torch.stack((k, v), dim=1).requires_grad_()
    fa.flash_attn_varlen_kvpacked_func(
        alone, kv, *lengths, softmax_scale=0.3, causal=True
    ).backward(dy)
    assert worst(alone.grad, want[2]) == 0 and worst(kv.grad[:, 1], want[4]) == 0
