"""The stand-in for ``transformer_engine_torch``: packed tensors by plain loops, and what it answers and refuses."""

import importlib.metadata
import math
import os
import subprocess
import sys

import pytest

from ringspec.errors import RefusedError
from ringspec.standins import installed, standin
from ringspec.standins.transformer_engine_torch.host import awaited

pytestmark = pytest.mark.torch

NAME = "transformer_engine_torch"
LENGTHS = (8, 4, 0, 12)  # of the sequences on a worker, padding included
STARTS = (0, 8, 12, 12, 24)
ROWS, HEADS, DIM = 26, 2, 4  # two rows after the last sequence


@pytest.fixture
def tex():
    with installed(NAME):
        yield sys.modules[NAME]


def int32(*values):
    import torch

    return torch.tensor(values, dtype=torch.int32)


def random(*shape, dtype="bfloat16", seed=0):
    import torch

    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64).to(getattr(torch, dtype))


def halves(half):
    """(row, its number among the rows of all these halves) of every sequence, by a loop."""
    found, number = [], 0
    for start, length in zip(STARTS, LENGTHS, strict=False):
        for i in range(length // 2):
            found.append((start + half * (length // 2) + i, number))
            number += 1
    return found


def once(value, dtype):
    """A float64 number rounded once to a 16-bit dtype."""
    import torch

    near = torch.tensor(value, dtype=torch.float64).to(dtype)
    around = [near]
    for direction in (math.inf, -math.inf):
        bound = torch.tensor(direction, dtype=torch.float32).to(dtype)
        around.append(torch.nextafter(near, bound))
    return min(around, key=lambda one: abs(float(one) - value))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_half_of_every_sequence(tex, half, lead):
    x = random(*lead, ROWS, HEADS, DIM)
    found = tex.thd_read_half_tensor(x, int32(*STARTS), half)
    assert found.shape == (*lead, ROWS // 2, HEADS, DIM) and found.dtype == x.dtype
    for row, number in halves(half):
        assert (found[..., number, :, :] == x[..., row, :, :]).all()
    assert found[..., 12, :, :].isnan().all()  # of no sequence


def test_the_lse_of_second_halves_is_added_in_place(tex):
    lse = random(HEADS, ROWS, dtype="float32")
    step = random(HEADS, ROWS // 2, dtype="float32", seed=1)
    before = lse.clone()
    tex.thd_second_half_lse_correction(lse, step, int32(*STARTS), True)
    changed = dict(halves(1))
    for head in range(HEADS):
        for row in range(ROWS):
            want = float(before[head, row])
            if row in changed:
                want = math.log(math.exp(want) + math.exp(float(step[head, changed[row]])))
            assert abs(float(lse[head, row]) - want) <= 2e-7 * max(1.0, abs(want))


def test_the_lse_of_second_halves_is_read_and_the_rest_is_zero(tex):
    lse = random(HEADS, ROWS, dtype="float32")
    found = tex.thd_read_second_half_lse(lse, int32(*STARTS), True, 15)
    assert found.shape == (HEADS, 15)
    for row, number in halves(1):
        assert (found[:, number] == lse[:, row]).all()
    assert (found[:, 12:] == 0).all()


def test_the_lse_of_each_sequence_by_itself(tex):
    lse = random(4, HEADS, 12, dtype="float32")
    found = tex.thd_read_second_half_lse(lse, int32(*STARTS), False, 6)
    corrected = lse.clone()
    tex.thd_second_half_lse_correction(corrected, found, int32(*STARTS), False)
    for sequence, length in enumerate(LENGTHS):
        n = length // 2
        assert (found[sequence, :, :n] == lse[sequence, :, n:length]).all()
        assert (found[sequence, :, n:] == 0).all()
        assert (corrected[sequence, :, :n] == lse[sequence, :, :n]).all()
        added = corrected[sequence, :, n:length] - lse[sequence, :, n:length]
        assert ((added - math.log(2)).abs() <= 1e-6).all()  # twice the sum


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_steps_output_is_merged_and_rounded_once(tex, second, dtype):
    n = ROWS // 2 if second else ROWS
    out, step = random(ROWS, HEADS, DIM, dtype=dtype), random(n, HEADS, DIM, dtype=dtype, seed=1)
    step[0, 0, 0] = 0.0
    old, new = (random(HEADS, ROWS, dtype="float32", seed=seed) for seed in (2, 3))
    lse_step = random(HEADS, n, dtype="float32", seed=4)
    lse_step[0, 0] = math.inf  # with an output of 0, adds 0
    step[0, 0] = 0.0
    before = out.clone()
    given = (old, new, lse_step, int32(*STARTS), second, True)
    assert tex.thd_out_correction(out, step, *given) is None
    places = dict(halves(1)) if second else {row: row for row in range(STARTS[-1])}
    for row in range(ROWS):
        for head in range(HEADS):
            for d in range(DIM):
                want = float(before[row, head, d])
                if row in places:
                    at = places[row]
                    want *= math.exp(float(old[head, row]) - float(new[head, row]))
                    one = float(step[at, head, d])
                    if one != 0:
                        want += one * math.exp(float(lse_step[head, at]) - float(new[head, row]))
                assert out[row, head, d] == once(want, out.dtype)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("add", "none"),
        ("copy", "none"),
        ("none", "add"),
        ("none", "copy"),
        ("add", "copy"),
        ("copy", "add"),
    ],
)
def test_a_steps_gradient_is_added_or_copied_by_halves(tex, first, second):
    whole = "none" not in (first, second)
    grad = random(ROWS, HEADS, DIM)
    step = random(ROWS if whole else ROWS // 2, HEADS, DIM, seed=1)
    before = grad.clone()
    tex.thd_grad_correction(grad, step, int32(*STARTS), first, second)
    want = before.clone()
    for half, operation in enumerate((first, second)):
        for row, number in halves(half):
            one = step[row if whole else number]
            if operation == "copy":
                want[row] = one
            elif operation == "add":
                want[row] = (before[row].float() + one.float()).to(grad.dtype)
    assert (grad == want).all()


def test_the_rows_of_a_worker_are_two_chunks_of_every_sequence(tex):
    """The example in the docstring of TransformerEngine's thd_sequence_order_to_cp_rank_order."""
    import torch

    starts, size = int32(0, 8, 16, 24, 40), 4
    places = torch.cat([torch.arange(8)] * 3 + [torch.arange(16)])
    ranks = [
        [0, 7, 0, 7, 0, 7, 0, 1, 14, 15],
        [1, 6, 1, 6, 1, 6, 2, 3, 12, 13],
        [2, 5, 2, 5, 2, 5, 4, 5, 10, 11],
        [3, 4, 3, 4, 3, 4, 6, 7, 8, 9],
    ]
    for rank, want in enumerate(ranks):
        rows = tex.thd_get_partitioned_indices(starts, 40, size, rank)
        assert rows.dtype == torch.int32 and places[rows.long()].tolist() == want
    x = random(40, HEADS, DIM)
    ordered = tex.thd_sequence_order_to_cp_rank_order(x, starts, size, 40)
    rows = [tex.thd_get_partitioned_indices(starts, 40, size, rank) for rank in range(size)]
    assert (ordered == x[torch.cat(rows).long()]).all()
    back = tex.thd_cp_rank_order_to_sequence_order(ordered, starts, size, 40)
    assert (back == x).all()


def test_valid_rows_are_copied_and_no_others(tex):
    out, x = random(ROWS, HEADS, DIM), random(ROWS, HEADS, DIM, seed=1)
    before = out.clone()
    padded, valid = int32(*STARTS), int32(0, 3, 7, 7, 20)
    tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, x, padded, valid)
    copied = {0, 1, 2, 8, 9, 10, 11, *range(12, 25)}
    for row in range(ROWS):
        assert (out[row] == (x if row in copied else before)[row]).all()


def test_a_function_only_imported_is_refused_when_called(tex):
    with pytest.raises(RefusedError, match="no use of .*convert_thd_to_bshd") as caught:
        tex.convert_thd_to_bshd(1, 2)
    assert caught.value.code == "not-modelled"
    with pytest.raises(AttributeError, match="got 'thd_read_halves'"):
        tex.thd_read_halves  # noqa: B018
    with pytest.raises(TypeError, match="half"):
        tex.thd_read_half_tensor(random(4, 2, 4), int32(0, 4), 0, half=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.thd_read_half_tensor(random(4, 2, 4), int32(0, 4).long(), 0), "int32"),
        (lambda t: t.thd_read_half_tensor(random(4, 2, 4), int32(0, 4), 2), "half_idx"),
        (lambda t: t.thd_read_half_tensor(random(4, 1, 4), int32(0, 4), 0), "16 bytes"),
        (lambda t: t.thd_get_partitioned_indices(int32(0, 6), 6, 2, 0), "multiples of 4"),
        (lambda t: t.thd_get_partitioned_indices(int32(0, 8), 8, 2, 2), "0 <= rank < 2"),
        (
            lambda t: t.thd_grad_correction(
                random(4, 2, 4), random(2, 2, 4), int32(0, 4), "zero", "copy"
            ),
            "'add', 'copy' and 'none'",
        ),
        (
            lambda t: t.thd_grad_correction(
                random(4, 2, 4), random(4, 2, 4), int32(0, 4), "none", "copy"
            ),
            r"grad_per_step \(2, 2, 4\)",
        ),
    ],
)
def test_arguments_that_the_original_refuses(tex, call, words):
    with pytest.raises(RefusedError, match=words):
        call(tex)


def test_what_a_gpu_would_answer_is_given_inside_the_block_only():
    import torch

    names = ("Event", "Stream", "current_stream", "get_device_properties", "stream")
    before = {name: getattr(torch.cuda, name) for name in names}
    options, isend = dict(os.environ), torch.distributed.isend
    finders = list(sys.meta_path)
    with pytest.raises(KeyError), installed("flash_attn==2.7", NAME):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.Event().record(stream)
        assert torch.cuda.get_device_properties(0).major == 9
        assert importlib.metadata.version("flash-attn") == "2.7.4"
        assert torch.distributed.isend is not isend
        import flash_attn_2_cuda

        with pytest.raises(RefusedError, match="varlen_bwd"):
            flash_attn_2_cuda.varlen_bwd()
        raise KeyError("of the program")
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert (dict(os.environ), torch.distributed.isend) == (options, isend)
    assert sys.meta_path == finders
    assert not {NAME, "flash_attn", "flash_attn_2_cuda", "transformer_engine"} & set(sys.modules)


def test_a_transfer_waits_once_and_otherwise_stays_as_it_is():
    """With gloo, a second wait hangs until its time limit; TransformerEngine's backward pass waits twice."""
    waited = []

    class Work:
        source = 3

        def wait(self, timeout=None):
            waited.append(timeout)

    transfer = awaited(lambda x, peer: Work() if peer else None)
    assert transfer("x", 0) is None  # a rank outside the group
    work = transfer("x", peer=1)
    assert work.wait(5) is True and work.wait(5) is True and waited == [5]
    assert work.source == 3


def test_the_note_says_what_a_run_does_not_show():
    words = ("packed tensors", "CUDA streams", "FusedAttention", "placeholders")
    note = standin(NAME).note
    assert all(word in note for word in words) and "2.20" in note


@pytest.mark.transformer_engine
@pytest.mark.slow
def test_the_published_files_are_imported_without_libraries_and_find_flash_attn():
    """In a process of its own, because these modules are not meant to be imported twice."""
    code = f"""
import sys
from ringspec.standins import installed
with installed("flash_attn", {NAME!r}):
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
        attn_forward_func_with_cp,
    )
    from transformer_engine.pytorch.attention.dot_product_attention import backends
    assert backends.fa_utils.is_installed and str(backends.fa_utils.version) == "2.8.3"
    assert backends._flash_attn_fwd is sys.modules["flash_attn.flash_attn_interface"]._flash_attn_forward
    from transformer_engine.pytorch.ops import Sequential
    try:
        Sequential()
    except Exception as error:
        assert "placeholder" in str(error), error
    else:
        raise AssertionError
assert not [name for name in sys.modules if name.startswith("transformer_engine")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
