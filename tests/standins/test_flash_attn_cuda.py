"""'flash_attn[cuda]': what it passes to PyTorch's kernel, which is emulated here; tests/gpu compares it on a GPU."""

import pytest
from standins.test_flash_attn import given, interface, worst
from standins.test_flash_attn_packed import packed

from ringspec.errors import OptionError, RefusedError
from ringspec.standins import standin
from ringspec.standins.flash_attn import aten, kernel
from ringspec.standins.flash_attn.arguments import lengths, options

pytestmark = pytest.mark.torch

OUTSIDE = 5.0  # what the emulated operators leave in rows of no sequence


class Operators:
    """torch.ops.aten._flash_attention_forward and _backward by the stand-in in float64."""

    def __init__(self):
        self.fa = interface("flash_attn[exact]")

    def call(self, name, tensors, four, rest, left, right):
        packs = four[0] is not None
        function = getattr(self.fa, f"_flash_attn{'_varlen' if packs else ''}_{name}")
        assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in tensors)
        return function(
            *tensors, *(four if packs else ()), *rest[:3], left, right, 0.0, None, False
        )

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale, **window
    ):
        assert (p, debug) == (0.0, False) and (max_q, max_k) != (None, None)
        four, rest = (cu_q, cu_k, max_q, max_k), (p, scale, causal)
        return *self.call("forward", (q, k, v), four, rest, *window.values()), None

    def _flash_attention_backward(self, *given, scale, window_size_left, window_size_right):
        import torch

        (*tensors, lse), four, (p, causal, *state) = given[:6], given[6:10], given[10:]
        assert p == 0.0 and [x.dtype for x in state] == [torch.uint64] * 2
        new = [torch.full_like(x, OUTSIDE) for x in tensors[1:4]]
        packs = four[0] is not None
        function = self.fa._flash_attn_varlen_backward if packs else self.fa._flash_attn_backward
        window = (window_size_left, window_size_right)
        more = four if packs else ()
        function(*tensors, lse, *new, *more, 0.0, scale, causal, *window, 0.0, None, False)
        return new


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    emulated = Operators()
    monkeypatch.setattr(aten, "operators", lambda: emulated)


EXACT = standin("flash_attn[exact]")


@pytest.mark.parametrize("dim", [8, 6])
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (2, 1)), (True, (3, 0))])
def test_dense_calls_give_the_results_of_the_stand_in(causal, window, dim):
    import torch

    q, k, v, dy = given((5, 9), (4, 2), dim=dim)
    chosen = options(0.3, causal, window, 0.0, 0.0, None)
    right = kernel.dense_forward(q, k, v, chosen)
    for one, want in zip(aten.dense_forward(q, k, v, chosen), right, strict=True):
        assert worst(one, want) <= 1e-15
    both = []
    for module in (kernel, aten):
        buffers = [torch.zeros_like(x) for x in (q, k, v)]
        sums = module.dense_backward(EXACT, (dy, q, k, v, right[0]), right[1], buffers, chosen)
        both.append((buffers, sums.shape))
    for one, want in zip(both[1][0], both[0][0], strict=True):
        assert worst(one, want) <= 1e-15
    assert both[0][1] == both[1][1]


def test_packed_calls_leave_rows_of_no_sequence_alone():
    import torch

    (q, k, v, dy), four = packed((3, 4, 2), (3, 5, 2))
    four = [four[0][1:].contiguous(), four[1][1:].contiguous(), 4, 5]
    chosen = options(0.3, True, (-1, -1), 0.0, 0.0, None)
    rows = lengths(tuple(four), q, k)
    right = kernel.packed_forward(q, k, v, rows, chosen)
    got = aten.packed_forward(q, k, v, rows, chosen)
    assert (
        worst(got[0][3:], right[0][3:]) <= 1e-15 and worst(got[1][:, 3:], right[1][:, 3:]) <= 1e-15
    )
    new = [torch.full_like(x, 9.0) for x in (q, k, v)]
    want = [x.clone() for x in new]
    kernel.packed_backward(EXACT, (dy, q, k, v, right[0]), right[1], want, rows, chosen)
    aten.packed_backward(EXACT, (dy, q, k, v, right[0]), right[1], new, rows, chosen)
    for one, wanted in zip(new, want, strict=True):
        assert worst(one, wanted) <= 1e-15 and (one[:3] == 9).all()


def test_lse_reaches_the_operator_as_memory_and_too_little_is_refused():
    import torch

    q, k, v, dy = given((4, 4), (3, 3))
    chosen = options(0.3, False, (-1, -1), 0.0, 0.0, None)
    o, lse = kernel.dense_forward(q, k, v, chosen)
    new = [torch.empty_like(x) for x in (q, k, v)]
    aten.dense_backward(EXACT, (dy, q, k, v, o), lse.transpose(1, 2), new, chosen)
    want = [torch.empty_like(x) for x in (q, k, v)]
    kernel.dense_backward(EXACT, (dy, q, k, v, o), lse, want, chosen)
    assert worst(new[0], want[0]) <= 1e-15
    with pytest.raises(RefusedError, match="the 24 numbers"):
        aten.dense_backward(EXACT, (dy, q, k, v, o), lse[:1].clone(), new, chosen)


def test_softcap_which_the_operators_lack_is_refused():
    q, k, v, _ = given((4, 4), (2, 2))
    with pytest.raises(RefusedError, match=r"softcap=0.0 on a GPU") as caught:
        aten.dense_forward(q, k, v, options(0.3, False, (-1, -1), 5.0, 0.0, None))
    assert caught.value.code == "not-modelled"


def test_tensors_on_a_cpu_are_refused():
    q, k, v, _ = given((4, 4), (2, 2), dtype="bfloat16")
    with pytest.raises(RefusedError, match="q on a CUDA device.*got cpu.*install flash_attn"):
        interface("flash_attn[cuda]").flash_attn_func(q, k, v)


def test_the_note_says_that_the_kernel_computed():
    chosen = standin("flash_attn[cuda]==2.7")
    assert (chosen.cuda, chosen.exact, chosen.version) == (True, False, "2.7")
    assert "PyTorch's own FlashAttention kernels on a GPU" in chosen.note
    assert "float64" not in chosen.note


def test_an_unknown_option_is_refused():
    with pytest.raises(OptionError, match="exact, cuda; got gpu"):
        standin("flash_attn[gpu]")
