"""What the stand-in for flash_attn refuses: what the kernel refuses, and what the stand-in does not model."""

import pytest
from standins.test_flash_attn import given, interface

from ringspec.errors import RefusedError
from ringspec.standins import installed

pytestmark = pytest.mark.torch

CHOSEN = {
    "dropout_p": 0.0,
    "softmax_scale": 0.3,
    "causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
}


def forward(name="flash_attn", tensors=None, **changes):
    q, k, v = tensors or given((4, 4), (2, 2), dtype="bfloat16")[:3]
    return interface(name)._flash_attn_forward(q, k, v, **(CHOSEN | changes))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"dropout_p": 0.1}, "not-modelled", "dropout_p=0.0.* got 0.1"),
        ({"dropout_p": 1.5}, "refused", "0 <= dropout_p < 1"),
        ({"alibi_slopes": [0.5, 0.5]}, "not-modelled", "alibi_slopes=None"),
        ({"return_softmax": True}, "refused", "return_softmax only with dropout"),
        ({"softmax_scale": None}, "refused", "softmax_scale as a number"),
        ({"causal": None}, "refused", "causal as a bool"),
        ({"window_size_left": -2}, "refused", "a window of two integers"),
    ],
)
def test_options(changes, code, words):
    with pytest.raises(RefusedError, match=words) as caught:
        forward(**changes)
    assert caught.value.code == code


def test_a_dropout_that_drops_nothing_is_accepted_and_its_probabilities_are_nan():
    _, _, p, _ = forward(dropout_p=1e-30, return_softmax=True)
    assert p.shape == (2, 2, 128, 128) and p.isnan().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "q in float16 or bfloat16"),
        (lambda q, k, v: (q, k.half(), v), "k in the dtype of q"),
        (lambda q, k, v: (q[0], k[0], v[0]), "q with 4 axes"),
        (lambda q, k, v: (q, k, v[..., :8]), "v in the shape of k"),
        (lambda q, k, v: (q, k[:1], v[:1]), "the same B in q and k"),
        (lambda q, k, v: (q[..., :8], k, v), "the same D in q and k"),
        (lambda q, k, v: (q[:, :, :1], k, v), "query heads as a multiple"),
        (lambda q, k, v: (q[..., :12], k[..., :12], v[..., :12]), "a multiple of 8"),
        (lambda q, k, v: [x.repeat(1, 1, 1, 17) for x in (q, k, v)], "from 1 to 256"),
        (lambda q, k, v: (q[:, :0], k, v), "at least one sequence and one query"),
        (lambda q, k, v: (None, k, v), "q as a torch tensor"),
    ],
)
def test_tensors(change, words):
    tensors = given((4, 4), (2, 2), dim=16, dtype="bfloat16")[:3]
    with pytest.raises(RefusedError, match=words):
        forward("flash_attn", change(*tensors))


def test_only_the_exact_stand_in_takes_float32_and_other_head_dimensions():
    tensors = given((4, 4), (2, 2), dim=5, dtype="float32")[:3]
    o, lse, *_ = forward("flash_attn[exact]", tensors)
    assert (o.dtype, lse.dtype) == (tensors[0].dtype, tensors[0].dtype)


def backward(tensors, lse=None, buffers=None):
    import torch

    q, k, v, dy = tensors
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1]) if lse is None else lse
    new = buffers or [torch.empty_like(x) for x in (q, k, v)]
    return interface("flash_attn")._flash_attn_backward(
        dy, q, k, v, q, lse, *new, 0.0, 0.3, False, -1, -1, 0.0, None, False
    )


def test_backward_tensors():
    import torch

    tensors = given((4, 6), (2, 2), dtype="float16")
    q, k, v, dy = tensors
    backward(tensors)
    new = [torch.empty_like(x) for x in (q, k, v)]
    across = torch.empty(2, 6, 8, 2, dtype=torch.float16).transpose(2, 3)
    for buffers, words in (
        ((new[0].float(), *new[1:]), "dq in float16"),
        ((new[0], new[1][:, :5], new[2]), "dk in the shape of k"),
        ((*new[:2], across), "dv with its last axis contiguous"),
    ):
        with pytest.raises(RefusedError, match=words):
            backward(tensors, buffers=buffers)
    for lse, words in (
        (torch.zeros(2, 2, 4, dtype=torch.float64), "softmax_lse in torch.float32"),
        (torch.zeros(2, 2, 3), "the 16 numbers that the kernel reads"),
        (None, None),
    ):
        if words:
            with pytest.raises(RefusedError, match=words):
                backward(tensors, lse=lse)
    with pytest.raises(RefusedError, match="dout in the shape of q"):
        backward((q, k, v, dy[:, :3]))
    with pytest.raises(RefusedError, match="at least one key"):
        backward((q, k[:, :0], v[:, :0], dy))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (([0, 4], [0, 4], 3, 4), "max_seqlen_q of at least the longest sequence, 4"),
        (([0, 4], [0, 4], 4, 3), "max_seqlen_k of at least the longest sequence, 4"),
        (([0, 5], [0, 4], 5, 4), "cu_seqlens_q as ascending row numbers"),
        (([0, 3, 2], [0, 2, 4], 3, 3), "cu_seqlens_q as ascending row numbers"),
        (([0, 2, 4], [0, 4], 3, 4), "as many sequences in q as in k"),
        (([0, 0], [0, 4], 0, 4), "max_seqlen_q >= 1"),
    ],
)
def test_lengths(lengths, words):
    import torch

    q, k, v, _ = (x[0] for x in given((4, 4), (2, 2), dtype="bfloat16"))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in lengths[:2])
    with pytest.raises(RefusedError, match=words):
        interface("flash_attn")._flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, *lengths[2:], 0.0, 0.3, False
        )


def test_lengths_in_int64():
    import torch

    q, k, v, _ = (x[0] for x in given((4, 4), (2, 2), dtype="bfloat16"))
    ends = torch.tensor([0, 4])
    with pytest.raises(RefusedError, match="cu_seqlens_q as an int32 tensor"):
        interface("flash_attn")._flash_attn_varlen_forward(
            q, k, v, ends, ends, 4, 4, 0.0, 0.3, False
        )


@pytest.mark.parametrize("name", ["block_table", "leftpad_k", "seqused_k"])
def test_caches_are_not_modelled(name):
    import torch

    q, k, v, _ = (x[0] for x in given((4, 4), (2, 2), dtype="bfloat16"))
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(RefusedError, match=f"{name}=None") as caught:
        interface("flash_attn")._flash_attn_varlen_forward(
            q, k, v, ends, ends, 4, 4, 0.0, 0.3, False, **{name: ends}
        )
    assert caught.value.code == "not-modelled"


def test_flash_attn_with_kvcache_is_not_modelled():
    with installed("flash_attn"):
        from flash_attn import flash_attn_with_kvcache
    with pytest.raises(RefusedError, match="flash_attn_with_kvcache") as caught:
        flash_attn_with_kvcache(1, 2, 3)
    assert caught.value.code == "not-modelled"


@pytest.mark.parametrize("version", ["2.6", "2.7", "2.8"])
def test_an_argument_of_another_version_is_named(version):
    wrong = "window_size_left" if version == "2.6" else "window_size"
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
        interface(f"flash_attn=={version}")._flash_attn_forward(**{wrong: -1})
