"""Costs: visible pairs against brute-force counting, bytes against numbers worked out by hand."""

import numpy as np
import pytest
from covering import covering
from hypothesis import given
from hypothesis import strategies as st

import ringspec as rs
from ringspec.errors import OptionError
from ringspec.problem.options import check
from ringspec.recipes import recipe
from ringspec.rings.layouts import make_layout
from ringspec.rings.ring import invisible_pairs
from ringspec.rings.schedules import skip

B, H, HKV, D, DV = 2, 4, 2, 8, 6


def tensors(n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones((B, H, n_q, D)), np.ones((B, HKV, n_k, D)), np.ones((B, HKV, n_k, DV))


def count(workers, layout, circulation, phase, n_q, n_k, options, name="float64", leave_out=False):
    """The cost of one pass, its schedule, and the two layouts."""
    problem = check(*tensors(n_q, n_k), options)
    documents = options.get("cu_seqlens", [0, 5, min(n_q, n_k)])  # read by one layout only
    layout_q, layout_k = (make_layout(layout, n, workers, documents) for n in (n_q, n_k))
    maker = {"forward": rs.forward_schedule, "backward": rs.backward_schedule}[phase]
    schedule = maker(circulation, workers)
    if leave_out:
        schedule = skip(schedule, invisible_pairs(problem, layout_q, layout_k))
    return (
        rs.cost(problem, schedule, layout_q, layout_k, recipe(name)),
        schedule,
        layout_q,
        layout_k,
    )


# --- visible pairs ----------------------------------------------------------------------------

MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "causal window": {"causal": True, "window": 2},
    "end aligned": {"causal": True, "q_offset": 8},
    "documents": {"causal": True, "cu_seqlens": [0, 5, 12]},
    "padding": {"segments_q": [0] * 9 + [-1] * 7, "segments_k": [0] * 6 + [1] * 10},
    "bounds": {"bound_min": [0, 3] * 8, "bound_max": [4, 3] * 8},
    "positions": {"causal": True, "positions_q": list(range(31, -1, -2))},
    "key bias": {"bias": np.where(np.arange(16) % 3 == 0, -np.inf, 0.5)},
    "head mask": {"mask": np.arange(B * H * 16).reshape(B, H, 16, 1) % 5 > 1},
}


def sees(options: dict, b: int, h: int, i: int, j: int) -> bool:
    """The definition for the masks of the table above."""
    position_q = options.get("positions_q", [n + options.get("q_offset", 0) for n in range(16)])[i]
    window = options.get("window")
    left, right = window if isinstance(window, tuple) else (window, window)
    document_q, document_k = 0, 0
    if "cu_seqlens" in options:
        _, first, second = options["cu_seqlens"]
        document_q, document_k = (0 if n < first else 1 if n < second else -1 for n in (i, j))
    if "segments_q" in options:
        document_q, document_k = options["segments_q"][i], options["segments_k"][j]
    return bool(
        (not options.get("causal") or j <= position_q)
        and (left is None or -left <= j - position_q)
        and (right is None or j - position_q <= right)
        and document_q == document_k >= 0
        and ("bound_min" not in options or options["bound_min"][i] <= j < options["bound_max"][i])
        and ("bias" not in options or options["bias"][j] != -np.inf)
        and ("mask" not in options or options["mask"][b, h, i, 0])
    )


ROWS = covering(
    {
        "mask": list(MASKS),
        "layout": ["contiguous", "striped", "zigzag", "zigzag_per_document"],
        "circulation": ["kv", "q", "gather"],
        "phase": ["forward", "backward"],
        "workers": [4, 1, 2, 8],
        "leave_out": [False, True],
    }
)


@pytest.mark.rule("MASK-9", "RING-2", "RING-11")
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_pairs_are_those_that_counting_finds(number):
    """Per (worker, step) and in all, over batches and query heads; skipped pairs lose nothing."""
    row = ROWS[number]
    options, workers = MASKS[row["mask"]], row["workers"]
    counted, schedule, layout_q, layout_k = count(
        workers, row["layout"], row["circulation"], row["phase"], 16, 16, options,
        leave_out=row["leave_out"],
    )  # fmt: skip
    dense = np.zeros((16, 16), dtype=np.int64)
    for i in range(16):
        for j in range(16):
            dense[i, j] = sum(sees(options, b, h, i, j) for b in range(B) for h in range(H))
    assert counted.pairs.sum() == dense.sum()
    for t in range(len(schedule.steps)):
        for r in range(workers):
            want = 0
            if (pair := schedule.pair(t, r)) is not None:
                for i in layout_q.table[pair[0]]:
                    for j in layout_k.table[pair[1]]:
                        want += dense[i, j] if i >= 0 and j >= 0 else 0
            assert counted.pairs[t, r] == want, (t, r)


def test_pairs_are_counted_for_unequal_lengths():
    counted, *_ = count(2, "contiguous", "kv", "forward", 4, 8, {"causal": True, "q_offset": 4})
    # Query i sees keys 0 .. i + 4. Worker 0 has queries 0, 1, its keys are 0 .. 3.
    assert counted.pairs.tolist() == [[8 * B * H, 7 * B * H], [3 * B * H, 8 * B * H]]


# --- bytes, by hand ---------------------------------------------------------------------------
# W = 3, Sq = 6 and Sk = 12, so a worker holds 2 queries and 4 keys. B = 2, H = 4, Hkv = 2, D = 8,
# Dv = 6. One key slot in float64: k 2*2*8*8 = 256, v 2*2*6*8 = 192, its position 8 bytes.

KV_INPUTS = 4 * (256 + 192 + 8)
KV_GRADIENTS = 4 * (256 + 192)


def sent_bytes(circulation, phase, options=None, name="float64", workers=3):
    counted, *_ = count(workers, "contiguous", circulation, phase, 6, 12, options or {}, name)
    assert (counted.sent == counted.sent[:, :1]).all()  # every worker sends alike
    return counted.sent[:, 0].tolist(), counted.hops


def test_kv_ring_sends_keys_and_values_w_minus_1_times():
    assert sent_bytes("kv", "forward") == ([KV_INPUTS, KV_INPUTS, 0], 2)


@pytest.mark.rule("RING-4")
def test_kv_ring_backward_sends_gradients_once_more_than_keys():
    both = KV_INPUTS + KV_GRADIENTS
    assert sent_bytes("kv", "backward") == ([both, both, KV_GRADIENTS], 3)


@pytest.mark.rule("RING-4", "RING-5")
def test_q_ring_backward_sends_the_query_side():
    """A query slot: q 2*4*8*8 = 512, dy 2*4*6*8 = 384, lse and delta 64 each, position 8; dq 512."""
    inputs, gradients = 2 * (512 + 384 + 64 + 64 + 8), 2 * 512
    assert sent_bytes("q", "backward") == ([inputs + gradients, inputs + gradients, gradients], 3)


def test_gathered_keys_go_to_all_others_and_their_gradients_come_back():
    assert sent_bytes("gather", "forward") == ([2 * KV_INPUTS, 0, 0, 0], 1)
    assert sent_bytes("gather", "backward") == ([2 * KV_INPUTS, 0, 0, 2 * KV_GRADIENTS], 2)


def test_segments_travel_with_keys_and_count_once_or_per_batch():
    one_row = {"segments_q": np.zeros(6, int), "segments_k": np.zeros(12, int)}
    assert sent_bytes("kv", "forward", one_row)[0][0] == KV_INPUTS + 4 * 8
    per_batch = {"segments_q": np.zeros((2, 6), int), "segments_k": np.zeros((2, 12), int)}
    assert sent_bytes("kv", "forward", per_batch)[0][0] == KV_INPUTS + 4 * 16
    per_batch = {"positions_k": np.zeros((2, 12), int)}
    assert sent_bytes("kv", "forward", per_batch)[0][0] == KV_INPUTS + 4 * 8


@pytest.mark.rule("RING-6")
def test_what_rows_index_travels_with_the_queries():
    """Bounds 8 bytes each; bias rows 1 head x 12 keys x 8, their gradient alike; masks 12 x 1."""
    plain, _ = sent_bytes("q", "backward")
    low = np.zeros(6, int)
    bounds, _ = sent_bytes("q", "backward", {"bound_min": low, "bound_max": low + 12})
    assert [b - p for b, p in zip(bounds, plain, strict=True)] == [2 * 16, 2 * 16, 0]
    low = np.zeros((B, 6), int)
    bounds, _ = sent_bytes("q", "backward", {"bound_min": low, "bound_max": low + 12})
    assert [b - p for b, p in zip(bounds, plain, strict=True)] == [2 * B * 16, 2 * B * 16, 0]
    bias, _ = sent_bytes("q", "backward", {"bias": np.zeros((6, 12))})
    assert [b - p for b, p in zip(bias, plain, strict=True)] == [4 * 96, 4 * 96, 2 * 96]
    bias, _ = sent_bytes("q", "backward", {"bias": np.zeros((H, 6, 12))})
    assert [b - p for b, p in zip(bias, plain, strict=True)] == [4 * H * 96, 4 * H * 96, 2 * H * 96]
    mask, _ = sent_bytes("q", "backward", {"mask": np.ones((B, 1, 6, 12), dtype=bool)})
    assert [b - p for b, p in zip(mask, plain, strict=True)] == [2 * B * 12, 2 * B * 12, 0]
    broadcast, _ = sent_bytes("q", "backward", {"bias": np.zeros((1, 12))})
    assert broadcast == plain  # the same for all rows: every worker has it
    assert sent_bytes("kv", "forward", {"bias": np.zeros((6, 12))})[0] == [KV_INPUTS, KV_INPUTS, 0]


def test_formats_of_the_recipe_count():
    """bf16: inputs 2 bytes; lse, delta and travelling gradients 4."""
    inputs = 4 * (64 + 48 + 8)
    assert sent_bytes("kv", "forward", name="bf16")[0] == [inputs, inputs, 0]
    both, last = inputs + KV_GRADIENTS // 2, KV_GRADIENTS // 2
    assert sent_bytes("kv", "backward", name="bf16")[0] == [both, both, last]
    query, gradient = 2 * (128 + 96 + 32 + 32 + 8), 2 * 256
    assert sent_bytes("q", "backward", name="bf16")[0] == [
        query + gradient,
        query + gradient,
        gradient,
    ]


def test_travelling_dq_and_dk_have_formats_of_their_own():
    """nki_low: dq float32; dk, dv, lse and delta bfloat16."""
    query, gradient = 2 * (128 + 96 + 16 + 16 + 8), 2 * 256
    sent = sent_bytes("q", "backward", name="nki_low")[0]
    assert sent == [query + gradient, query + gradient, gradient]
    sent = sent_bytes("kv", "backward", name="nki_low")[0]
    assert sent[2] == KV_GRADIENTS // 4


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_one_worker_sends_nothing(circulation):
    for phase in ("forward", "backward"):
        assert set(sent_bytes(circulation, phase, workers=1)[0]) == {0}


def test_padding_slots_travel_as_well():
    problem = check(*tensors(4, 4), {})
    padded = make_layout([[0, 1, -1], [2, -1, 3]], 4, 2)
    counted = rs.cost(problem, rs.forward_schedule("kv", 2), padded, padded, recipe("float64"))
    assert counted.sent.tolist() == [[3 * 456, 3 * 456], [0, 0]]
    assert counted.pairs.sum() == B * H * 16


# --- imbalance --------------------------------------------------------------------------------


def causal_cost(layout: str, workers: int, length: int) -> rs.Cost:
    return count(workers, layout, "kv", "forward", length, length, {"causal": True})[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_contiguous_causal_work_grows_with_the_worker(workers):
    """Worker r computes r*n*n + n(n + 1)/2 of the S(S + 1)/2 pairs: imbalance 2 - 1/W and less."""
    n, copies = 6, B * H
    counted = causal_cost("contiguous", workers, workers * n)
    work = [copies * (r * n * n + n * (n + 1) // 2) for r in range(workers)]
    assert counted.pairs.sum(axis=0).tolist() == work
    exact = (2 * (workers - 1) * n + n + 1) / (workers * n + 1)
    assert abs(counted.imbalance - exact) <= 1e-15 * exact
    # In every step but the first some worker computes a full block, and only W - t of them do.
    waits = n * (n + 1) // 2 + (workers - 1) * n * n
    even = (workers * n * (workers * n + 1) // 2) / workers
    assert abs(counted.lockstep_imbalance - waits / even) <= 1e-14


def test_contiguous_causal_of_4_workers_with_6_tokens_each():
    """(6*6 + 7) / 25 = 1.72: worker 3 computes 129 pairs, the mean is 75."""
    counted = causal_cost("contiguous", 4, 24)
    assert counted.imbalance == 129 / 75 == 1.72
    assert counted.pairs[1].tolist() == [0, 36 * B * H, 36 * B * H, 36 * B * H]


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_striped_causal_work_is_even_up_to_one_pair_per_row(workers):
    """Worker r computes the sum over t of t*W + r + 1: neighbours differ by n pairs."""
    n = 6
    work = causal_cost("striped", workers, workers * n).pairs.sum(axis=0)
    for r in range(workers):
        assert work[r] == B * H * sum(t * workers + r + 1 for t in range(n))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_zigzag_causal_work_is_even(workers):
    counted = causal_cost("zigzag", workers, 6 * workers)
    assert len(set(counted.pairs.sum(axis=0).tolist())) == 1
    assert counted.imbalance == 1.0
    # After the first step every worker computes half of each block.
    assert (counted.pairs[1:] == B * H * 18).all()
    assert counted.lockstep_imbalance == 1.0


@pytest.mark.rule("LAYOUT-4")
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
def test_zigzag_per_document_is_even_where_2w_divides_each_document(workers):
    lengths = [2 * workers, 6 * workers, 4 * workers]
    options = {"causal": True, "cu_seqlens": [0, *np.cumsum(lengths).tolist()]}
    total = sum(lengths)
    counted, *_ = count(workers, "zigzag_per_document", "kv", "forward", total, total, options)
    assert counted.imbalance == 1.0
    assert counted.pairs.sum() == B * H * sum(n * (n + 1) // 2 for n in lengths)


def test_no_visible_pair_is_no_imbalance():
    counted, *_ = count(3, "contiguous", "kv", "forward", 6, 6, {"mask": np.zeros((6, 6), bool)})
    assert counted.imbalance == 1.0 and counted.lockstep_imbalance == 1.0


def test_one_busy_worker_is_w_times_the_mean():
    counted = rs.Cost("x", np.array([[12, 0, 0], [0, 0, 0]]), np.zeros((2, 3), int), 0)
    assert counted.imbalance == 3.0 and counted.lockstep_imbalance == 3.0
    taking_turns = rs.Cost("x", np.array([[6, 0], [0, 6]]), np.zeros((2, 2), int), 0)
    assert taking_turns.imbalance == 1.0 and taking_turns.lockstep_imbalance == 2.0


# --- the timeline -----------------------------------------------------------------------------

COUNTS = st.integers(1, 4).flatmap(
    lambda workers: st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=workers, max_size=workers),
            st.lists(st.integers(0, 9), min_size=workers, max_size=workers),
        ),
        min_size=1,
        max_size=5,
    )
)


@given(COUNTS, st.booleans(), st.sampled_from([1, 0.5, 4]), st.sampled_from([1, 8]))
def test_a_timeline_waits_for_everybody_and_does_one_thing_at_a_time(counts, overlap, pairs, sent):
    """Rates are powers of two, so every time is exact."""
    counted = rs.Cost("x", np.array([c for c, _ in counts]), np.array([s for _, s in counts]), 0)
    spans = rs.timeline(counted, pairs_per_second=pairs, bytes_per_second=sent, overlap=overlap)
    steps, workers = counted.pairs.shape
    begin = 0.0
    for t in range(steps):
        ends = [begin]
        for r in range(workers):
            here = {s.what: s for s in spans if (s.worker, s.step) == (r, t)}
            computing = here.pop("compute")
            assert computing.start == begin
            assert computing.stop - computing.start == counted.pairs[t, r] / pairs
            ends.append(computing.stop)
            if counted.sent[t, r]:
                sending = here.pop("send")
                assert sending.start == (begin if overlap else computing.stop)
                assert sending.stop - sending.start == counted.sent[t, r] / sent
                ends.append(sending.stop)
            assert here == {}
        begin = max(ends)  # nobody starts the next step earlier
    assert len(spans) == steps * workers + np.count_nonzero(counted.sent)
    assert max(s.stop for s in spans) == begin


@given(COUNTS)
def test_overlap_never_takes_longer(counts):
    counted = rs.Cost("x", np.array([c for c, _ in counts]), np.array([s for _, s in counts]), 0)
    ends = [
        max(s.stop for s in rs.timeline(counted, pairs_per_second=2, bytes_per_second=4, overlap=o))
        for o in (True, False)
    ]
    assert ends[0] <= ends[1]
    per_step = counted.pairs.max(axis=1) / 2
    assert ends[0] >= per_step.sum() and ends[0] >= (counted.sent.max(axis=1) / 4).sum()


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_rates_are_positive(rate):
    counted = rs.Cost("x", np.ones((1, 1), int), np.ones((1, 1), int), 1)
    with pytest.raises(OptionError):
        rs.timeline(counted, pairs_per_second=rate, bytes_per_second=1)
    with pytest.raises(OptionError):
        rs.timeline(counted, pairs_per_second=1, bytes_per_second=rate)


def test_the_printed_run_shows_the_same_numbers():
    q, k, v = tensors(6, 6)
    run = rs.ring(q, k, v, workers=3, causal=True)
    counted = rs.cost(run.problem, run.schedule, run.layout_q, run.layout_k, run.recipe)
    text = str(run)
    assert f"{counted.hops} hops, {counted.sent.sum()} bytes sent in all" in text
    assert f"imbalance {counted.imbalance:.2f}" in text
    assert f"q2 x k1 ({counted.pairs[1, 2] // counted.copies})" in text
    batch, heads = q.shape[:2]
    assert counted.copies == batch * heads and f"per head, times B H = {batch * heads})" in text


def test_pairs_of_heads_with_different_masks_are_not_divided():
    q, k, v = tensors(6, 6)
    mask = np.ones((1, q.shape[1], 6, 6), dtype=bool)
    mask[0, 0, 3, 2] = False
    run = rs.ring(q, k, v, workers=3, mask=mask)
    counted = rs.cost(run.problem, run.schedule, run.layout_q, run.layout_k, run.recipe)
    assert q.shape[1] > 1 and counted.copies == 1
    assert f"q1 x k1 ({counted.pairs[0, 1]})" in str(run) and "(visible pairs)" in str(run)
