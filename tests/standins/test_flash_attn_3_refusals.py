"""What the stand-in for FlashAttention 3 refuses, by name, and which modules it consists of."""

import importlib.util
import sys

import pytest
from standins.test_flash_attn import given
from standins.test_flash_attn_3 import interface, ints
from standins.test_flash_attn_packed import cumulative

from ringspec.errors import OptionError, RefusedError
from ringspec.standins import installed, standin

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("named", "words", "code"),
    [
        ({"qv": 1}, "qv=None", "not-modelled"),
        ({"k_descale": 1}, "k_descale=None", "not-modelled"),
        ({"page_table": 1}, "page_table=None", "not-modelled"),
        ({"out_": 1}, "out_=None", "not-modelled"),
        ({"scheduler_metadata": 1}, "scheduler_metadata=None", "not-modelled"),
        ({"attention_chunk": 2}, "attention_chunk=0", "not-modelled"),
        ({"num_splits": 2}, "num_splits of at most 1", "not-modelled"),
        ({"window_size_left": 0.5}, "a window of two integers", "refused"),
        ({"seqused_k": [1, 1]}, "seqused_k as an int32 tensor", "refused"),
    ],
)
def test_what_is_not_modelled_or_refused_is_named(named, words, code):
    q, k, v, _ = given((3, 5), (2, 2))
    with pytest.raises(RefusedError, match=words) as caught:
        interface()._flash_attn_forward(q, k, v, **named)
    assert caught.value.code == code


def test_shapes_that_the_kernel_refuses():
    import torch

    fa = interface("flash_attn_interface")
    q, k, v, dy = given((3, 5), (2, 2), dtype="bfloat16")
    for tensors, words in (
        ((q.float(), k, v), "q in float16 or bfloat16"),
        ((q, k.half(), v), "k in the dtype of q"),
        ((q[..., :6], k[..., :6], v[..., :6]), "multiples of 8"),
        ((q[0], k[0], v[0]), "q with 4 axes without cu_seqlens"),
        ((q, k, v[:, :4]), "v in the shape"),
        ((q, k[:1], v[:1]), "as many sequences"),
    ):
        with pytest.raises(RefusedError, match=words):
            fa._flash_attn_forward(*tensors)
    with pytest.raises(RefusedError, match="seqused_q with a number from 0 to its length"):
        fa._flash_attn_forward(q, k, v, seqused_q=ints(3, 4))
    with pytest.raises(RefusedError, match="max_seqlen_q of at least the longest sequence, 3"):
        ends = {"cu_seqlens_q": cumulative((3,)), "cu_seqlens_k": cumulative((5,))}
        fa._flash_attn_forward(q[0], k[0], v[0], **ends, max_seqlen_q=2, max_seqlen_k=5)
    wide = [torch.zeros(1, 2, 1, 256, dtype=torch.bfloat16) for _ in range(4)]
    o, lse, *_ = fa._flash_attn_forward(*wide[:3])
    new = {name: torch.empty_like(o) for name in ("dq", "dk", "dv")}
    fa._flash_attn_backward(wide[3], *wide[:3], o, lse, **new)
    with pytest.raises(RefusedError, match="at most 192 in a deterministic backward pass"):
        fa._flash_attn_backward(wide[3], *wide[:3], o, lse, **new, deterministic=True)


def test_autograd_through_the_low_level_function_of_3_0_0_is_not_modelled():
    q, k, v, _ = given((3, 5), (2, 2))
    q.requires_grad_()
    with pytest.raises(RefusedError, match="_flash_attn_forward without autograd"):
        interface()._flash_attn_forward(q, k, v)


def test_functions_of_caches_exist_and_are_not_modelled():
    for name in ("flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata"):
        with pytest.raises(RefusedError, match=name):
            getattr(interface(), name)(1, 2)


def test_the_package_flash_attn_3_is_that_of_3_0_0_and_is_removed_again():
    with installed("flash_attn_interface", "flash_attn"):
        import flash_attn_3
        from flash_attn_3.flash_attn_interface import _flash_attn_forward

        assert flash_attn_3.__version__ == "3.0.0"
        assert sys.modules["flash_attn_interface"]._flash_attn_forward is _flash_attn_forward
        with pytest.raises(ModuleNotFoundError, match=r"got flash_attn_3\._C"):
            import flash_attn_3._C
    roots = {name.partition(".")[0] for name in sys.modules}
    assert not roots & {"flash_attn", "flash_attn_3", "flash_attn_interface"}
    with (
        installed("flash_attn_interface==3.0.0.b1"),
        pytest.raises(ModuleNotFoundError, match="flash_attn_3"),
    ):
        import flash_attn_3


def test_names_and_versions():
    assert standin("flash_attn_interface").version == "3.0.0"
    assert standin("flash_attn_interface==3.0.0.b1").version == "3.0.0.b1"
    with pytest.raises(OptionError, match=r"3.0.0.b1, 3.0.0; got 3.1"):
        standin("flash_attn_interface==3.1")
    with pytest.raises(OptionError, match="exact; got cuda"):
        standin("flash_attn_interface[cuda]")
    with installed("flash_attn_interface"):
        import flash_attn_interface as fa

        with pytest.raises(AttributeError, match="got 'flash_attn_fun'"):
            fa.flash_attn_fun  # noqa: B018


def test_a_program_may_ask_whether_the_package_that_a_beta_lacks_is_installed():
    """diffusers asks for flash_attn_3 in this way when it is imported."""
    with installed("flash_attn_interface==3.0.0.b1"):
        assert importlib.util.find_spec("flash_attn_3") is None
