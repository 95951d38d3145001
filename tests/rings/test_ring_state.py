"""Every worker's state in the open: one step is a pure function, and a run can be looked at."""

import dataclasses
import html
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringspec as rs
from ringspec.comm.threads import ring_in_threads
from ringspec.errors import NotRecordedError, OptionError
from ringspec.problem.options import check
from ringspec.recipes import recipe
from ringspec.rings.lockstep import Moment
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.ring_backward import backward_finish, backward_start, backward_step, plus
from ringspec.spec.ring_forward import forward_finish, forward_start, forward_step, merge_states
from ringspec.spec.worker import KeySide, Message, send
from ringspec.tensorfile import read_metadata

W, S, H = 3, 12, 2
EXACT = recipe("float64")


def tensors(seed: int = 0):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(1, H, S, 4)) for _ in range(4))


def same(a, b) -> bool:
    """Bit for bit, through dataclasses, tuples and arrays."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def freeze(x) -> None:
    """Make every array inside read-only, so that a step that writes to its inputs fails."""
    if dataclasses.is_dataclass(x):
        for f in dataclasses.fields(x):
            freeze(getattr(x, f.name))
    elif isinstance(x, np.ndarray):
        x.flags.writeable = False
    elif isinstance(x, tuple):
        for part in x:
            freeze(part)


@pytest.mark.rule("RING-1", "RING-4", "RING-5", "RING-6")
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_a_step_needs_only_its_own_state_the_schedule_and_what_it_received(circulation):
    """Each worker runs alone here, on read-only copies: no step is handed anything of another."""
    q, k, v, dy = tensors()
    options = {"causal": True, "bias": np.random.default_rng(1).normal(size=(1, 1, S, S))}
    forward, backward = rs.forward_schedule(circulation, W), rs.backward_schedule(circulation, W)
    whole, n = check(q, k, v, options), S // W
    indices = [np.arange(r * n, (r + 1) * n) for r in range(W)]
    shards = [whole.take(i, i) for i in indices]
    states = [forward_start(r, own, EXACT) for r, own in enumerate(shards)]
    results = [forward_finish(s) for s in post(states, forward, forward_step, block_forward)[0]]
    dlse = np.zeros((1, H, n))
    states = [
        backward_start(r, own, dy[:, :, indices[r]].copy(), dlse, *results[r], EXACT)
        for r, own in enumerate(shards)
    ]
    states, inboxes = post(states, backward, backward_step, block_backward)
    states = [backward_finish(s, backward, inboxes[r]) for r, s in enumerate(states)]
    want = rs.ring(q, k, v, dy, workers=W, circulation=circulation, **options)
    for r in range(W):
        assert same(results[r], (want.worker(r).o, want.worker(r).lse))
        assert same(states[r].dq, want.worker(r).dq)
        assert same(states[r].dk, want.worker(r).dk) and same(states[r].dv, want.worker(r).dv)
        assert same(states[r].query.dbias, want.worker(r).dbias)


def post(states, schedule, step, block):
    """Run every worker's steps; the only thing that passes between workers is a message."""
    inboxes = [() for _ in states]
    for _ in schedule.steps:
        outgoing = []
        for r, state in enumerate(states):
            freeze(state)
            freeze(inboxes[r])
            computed = step(state, schedule, inboxes[r], block)
            freeze(computed)
            states[r], sent = send(computed, schedule)
            outgoing += sent
        inboxes = [tuple(m for m in outgoing if m.target == r) for r in range(len(states))]
    return states, inboxes


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_workers_side_by_side_are_the_workers_one_after_another(circulation):
    q, k, v, dy = tensors()
    keywords = {"workers": W, "circulation": circulation, "causal": True, "record": True}
    want = rs.ring(q, k, v, dy, **keywords)
    meeting = threading.Barrier(W, timeout=200)

    def meet(*arguments):
        """A block that W threads must compute at once."""
        meeting.wait()
        return block_forward(*arguments)

    with ThreadPoolExecutor(W) as executor:
        run = rs.ring(q, k, v, dy, **keywords, block_forward=meet, each=executor.map)
    assert [(m.phase, m.step, m.worker) for m in run.moments] == [
        (m.phase, m.step, m.worker) for m in want.moments
    ]
    assert all(same(a, b) for a, b in zip(run.moments, want.moments, strict=True))
    assert all(same(a, b) for a, b in zip(run.workers, want.workers, strict=True))


def test_each_that_gives_too_few_results_is_refused():
    q, k, v, _ = tensors()

    def but_one(function, values):
        return map(function, list(values)[:-1])

    with pytest.raises(OptionError, match="2 results for 3 workers"):
        rs.ring(q, k, v, workers=W, each=but_one)
    with pytest.raises(OptionError, match="each"):
        rs.ring(q, k, v, workers=W, each=4)


def test_nobody_writes_to_a_workers_inputs():
    q, k, v, dy = (x.astype(np.float64) for x in tensors())
    run = rs.ring(q, k, v, dy, workers=W, record=True)
    for moment in run.moments:
        for name in ("q", "k", "v", "dy", "row_term"):
            x = getattr(moment.before, name, None)
            assert x is None or not x.flags.writeable
    assert all(x.flags.writeable for x in (q, k, v, dy, run.o, run.dq, run.worker(1).dk))


def test_a_step_gives_the_same_result_when_it_is_repeated():
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, layout="striped", causal=True, record=True)
    again = list(run.replay())
    assert len(again) == len(run.moments) == 2 * W * W
    for moment, repeated in zip(run.moments, again, strict=True):
        assert same(moment, repeated)


def test_a_replay_merges_and_adds_as_the_run_did():
    """A run that merges and adds in another way, of which the specification's own knows nothing."""
    used = []

    def merge(running, part, recipe):
        used.append("merge")
        return dataclasses.replace(merge_states(running, part, recipe), o=running.o + 2 * part.o)

    def accumulate(total, share, accumulator):
        used.append("accumulate")
        return total + 2 * share

    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, record=True, merge=merge, accumulate=accumulate)
    used.clear()
    for moment, repeated in zip(run.moments, run.replay(), strict=True):
        assert same(moment, repeated)
    # dq, dk and dv of each pair
    assert used == ["merge"] * W * W + ["accumulate"] * 3 * W * W


TINY = 2.0**-9  # half a unit in the last place of 1.0 in bfloat16


def gathered_home(format: str, parts: list[float], accumulate=plus):
    """What worker 0 makes of the parts of its dk and dv that a reduce-scatter brings home."""
    of_format = dataclasses.replace(EXACT, carried_dkv=format)
    q, k, v, dy = (x[:, :, : S // W] for x in tensors())
    problem = check(q, k, v, {})
    zeros = np.zeros(q.shape[:3])
    state = backward_start(0, problem, dy, zeros, q, zeros, of_format)
    messages = tuple(
        Message(source, 0, "reduce_scatter", KeySide(0, dk=k * 0 + 2 * part, dv=v * 0 + part))
        for source, part in enumerate(parts)
    )
    state = dataclasses.replace(state, step=W)
    return backward_finish(state, rs.backward_schedule("gather", W), messages, accumulate).key


@pytest.mark.rule("NUM-2")
def test_a_reduce_scatter_rounds_dk_and_dv_after_every_addition():
    rounded = gathered_home("bfloat16", [1.0, TINY, TINY])
    assert (rounded.dk == 2.0).all() and (rounded.dv == 1.0).all()
    exact = gathered_home("float64", [1.0, TINY, TINY])
    assert (exact.dk == 2.0 + 4 * TINY).all() and (exact.dv == 1.0 + 2 * TINY).all()


def test_a_reduce_scatter_adds_with_the_accumulate_that_the_ring_was_given():
    def larger(total, share, accumulator):
        assert accumulator == "bfloat16"
        return np.maximum(total, share)

    key = gathered_home("bfloat16", [1.0, 3.0, 2.0], larger)
    assert (key.dk == 6.0).all() and (key.dv == 3.0).all()

    formats, recipe_named = [], dataclasses.replace(EXACT, name="other", carried_dkv="bfloat16")

    def counted(total, share, accumulator):
        formats.append(accumulator)
        return plus(total, share, accumulator)

    q, k, v, dy = tensors()
    keywords = {"workers": W, "circulation": "gather", "recipe": recipe_named}
    rs.ring(q, k, v, dy, **keywords, accumulate=counted)
    # Of each worker, dk and dv: W blocks, and W - 1 additions of what W workers send home.
    assert formats.count("bfloat16") == 2 * W * W + 2 * W * (W - 1)
    formats.clear()
    ring_in_threads(q, k, v, dy, **keywords, accumulate=counted)
    assert formats.count("bfloat16") == 2 * W * W + 2 * W * (W - 1)


def test_the_observer_sees_every_step_of_every_worker_in_order():
    q, k, v, dy = tensors()
    seen: list[Moment] = []
    rs.ring(q, k, v, dy, workers=W, observer=seen.append)
    assert [(m.phase, m.step, m.worker) for m in seen] == [
        (phase, t, r) for phase in ("forward", "backward") for t in range(W) for r in range(W)
    ]


@pytest.mark.rule("RING-1", "RING-5")
def test_the_recorded_states_say_who_holds_what():
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, circulation="q", record=True)
    n = S // W
    for t in range(W):
        for r in range(W):
            owner = (r - t) % W
            held = run.moment(r, t).after
            received = run.moment(r, t).received
            assert (
                held.step == t + 1 and held.query.owner == r and run.moment(r, t).pair == (r, owner)
            )
            assert [m.source for m in received] == ([(r - 1) % W] if t else [])
            during = run.state(r, t, when="during")
            assert during.key.owner == owner
            assert (during.k == k[:, :, owner * n : (owner + 1) * n]).all()
            computed = run.state(r, t, when="computed")
            assert (computed.k == during.k).all() and (computed.m == held.m).all()
            assert (computed.lse > during.lse).all()
            # Afterwards the block is gone, except in the last step, which sends nothing.
            assert (held.k is None) == (t < W - 1)
            assert ("sent on" in str(held)) == (t < W - 1)
            backward = run.moment(r, t, "backward")
            assert backward.pair == (owner, r)
            assert (backward.after.k == k[:, :, r * n : (r + 1) * n]).all()
            assert (backward.computed.dq == backward.sent[0].side.dq).all()
            assert backward.after.dq is None
    assert run.moment(0, W - 1, "backward").sent[0].side.owner == 1


def test_the_running_state_reaches_the_dense_result():
    q, k, v, _ = tensors()
    run = rs.ring(q, k, v, workers=W, record=True)
    dense = rs.attention(q, k, v)
    for r in range(W):
        state = run.state(worker=r, step=W - 1)
        rows = slice(r * S // W, (r + 1) * S // W)
        assert np.abs(state.o / state.l[..., None] - dense.o[:, :, rows]).max() <= 1e-15
        assert np.abs(state.m + np.log(state.l) - dense.lse[:, :, rows]).max() <= 2e-15
    before = run.state(worker=0, step=0, when="before")
    assert (before.m == -np.inf).all() and (before.l == 0).all() and (before.lse == -np.inf).all()


def test_what_was_not_recorded_is_refused_with_the_way_to_record_it():
    q, k, v, _ = tensors()
    run = rs.ring(q, k, v, workers=W)
    with pytest.raises(NotRecordedError, match="record=True"):
        run.state(worker=0, step=0)
    with pytest.raises(NotRecordedError, match="record=True"):
        list(run.replay())
    recorded = rs.ring(q, k, v, workers=W, record=True)
    with pytest.raises(NotRecordedError, match="forward"):
        recorded.state(worker=0, step=0, phase="backward")
    with pytest.raises(NotRecordedError):
        recorded.worker(W)
    with pytest.raises(OptionError):
        recorded.state(worker=0, step=0, when="later")


@pytest.mark.parametrize("worker", [W, -1, 0.5, True, "0", None])
def test_a_worker_that_is_not_there_is_told_which_workers_are(worker):
    run = rs.ring(*tensors()[:3], workers=W, record=True)
    for call in (run.worker, lambda r: run.moment(r, 0), lambda r: run.state(worker=r, step=0)):
        with pytest.raises(NotRecordedError) as refused:
            call(worker)
        assert str(refused.value).startswith(f"expected a worker from 0 to 2; got {worker!r}. ")
        assert "forward" not in str(refused.value)


@pytest.mark.parametrize("circulation, last", [("kv", W - 1), ("gather", W)])
def test_a_step_that_is_not_there_is_told_which_steps_are(circulation, last):
    run = rs.ring(*tensors()[:3], workers=W, circulation=circulation, record=True)
    assert run.state(worker=W - 1, step=last).step == last + 1
    with pytest.raises(NotRecordedError, match=f"a step from 0 to {last}; got {last + 1}"):
        run.state(worker=0, step=last + 1)


def test_a_phase_that_was_not_run_is_told_which_phases_were():
    q, k, v, dy = tensors()
    forward, both = (rs.ring(q, k, v, x, workers=W, record=True) for x in (None, dy))
    with pytest.raises(NotRecordedError, match="expected phase 'forward'; got 'backward'.*pass dy"):
        forward.state(worker=0, step=0, phase="backward")
    with pytest.raises(NotRecordedError, match="phase 'forward' or 'backward'; got 'sideways'"):
        both.state(worker=0, step=0, phase="sideways")


def test_print_shows_who_computes_what_and_what_travels():
    q, k, v, dy = tensors()
    text = str(rs.ring(q, k, v, dy, workers=W, causal=True, circulation="q"))
    assert "ring of 3 workers, layout contiguous, recipe float64" in text
    for r in range(W):
        for t in range(W):
            assert f"q{r} x k{(r - t) % W}" in text and f"q{(r - t) % W} x k{r}" in text
    assert "after step 0: k v columns: r -> r+1 mod 3" in text
    assert "after step 2: dq: r -> r+1 mod 3" in text and "dbias" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("workers, hop", [(2, "r+1 mod 2"), (3, "r-1 mod 3"), (4, "r-1 mod 4")])
def test_print_shows_the_hop_of_the_other_direction_and_dbias_of_a_bias(workers, hop):
    q = np.ones((1, 1, 12, 2))
    options = {"circulation": "q", "direction": -1, "bias": np.zeros((12, 12))}
    run = rs.ring(q, q, q, q, workers=workers, **options)
    last = f"after step {workers - 1}: dq dbias: r -> {hop}"
    assert last in str(run) and html.escape(f"dq dbias: r -> {hop}") in run._repr_html_()


def test_the_notebook_rendering_holds_the_same_cells():
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, causal=True)
    page = run._repr_html_()
    assert page.count("<table>") == 2 and "q2 x k1" in page and "<script" not in page


def test_a_saved_run_holds_results_and_every_recorded_state(tmp_path):
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, record=True, recipe="bf16")
    path = tmp_path / "run.safetensors"
    run.save(path)
    saved = rs.read_tensors(path)
    assert (saved["results/dk"] == run.dk).all()
    for r in range(W):
        assert (saved[f"workers/{r}/o"] == run.worker(r).o).all()
        for t in range(W):
            assert (saved[f"forward/step{t}/worker{r}/after/m"] == run.state(r, t).m).all()
            got = saved[f"backward/step{t}/worker{r}/before/dq"]
            assert (got == run.state(r, t, "backward", "before").dq).all()
    assert (saved["inputs/dy"] == dy).all() and (saved["inputs/k"] == k).all()
    assert saved["inputs/rows/position"].tolist() == [list(range(S))]
    meaning = json.loads(read_metadata(path)["ringspec.run"])
    assert meaning["workers"] == W and meaning["recipe"]["p"] == "bfloat16"
    assert meaning["terms"]["scale"] == 0.5 and meaning["terms"]["causal"] is False
    first = path.read_bytes()
    run.save(path)
    assert path.read_bytes() == first


def test_the_block_computation_is_a_parameter():
    q, k, v, dy = tensors()
    calls = []

    def counted_forward(*arguments):
        calls.append("forward")
        return block_forward(*arguments)

    def counted_backward(*arguments):
        calls.append("backward")
        return block_backward(*arguments)

    run = rs.ring(
        q, k, v, dy, workers=W, block_forward=counted_forward, block_backward=counted_backward
    )
    assert same(run.dq, rs.ring(q, k, v, dy, workers=W).dq)
    assert calls == ["forward"] * W * W + ["backward"] * W * W


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("direction", [1, -1])
def test_masked_steps_can_be_left_out_without_a_change(circulation, direction):
    q, k, v, dy = tensors()
    ring = {"workers": W, "causal": True, "circulation": circulation, "direction": direction}
    full = rs.ring(q, k, v, dy, **ring)
    short = rs.ring(q, k, v, dy, **ring, skip_masked=True, record=True)
    assert same((full.o, full.lse, full.dq, full.dk, full.dv),
                (short.o, short.lse, short.dq, short.dk, short.dv))  # fmt: skip
    computed = {m.pair for m in short.moments if m.phase == "forward"}
    assert not computed & {(0, 1), (0, 2), (1, 2)}
    assert short.schedule.skipped == {(0, 1), (0, 2), (1, 2)}


def test_a_schedule_of_ones_own_runs_after_it_is_proved():
    q, k, v, dy = tensors()
    backwards = rs.forward_schedule("kv", W, direction=-1)
    run = rs.ring(q, k, v, workers=W, schedule=backwards)
    assert np.abs(run.o - rs.attention(q, k, v).o).max() <= 1e-15
    with pytest.raises(OptionError, match="forward_schedule"):
        rs.ring(q, k, v, workers=W, schedule=rs.backward_schedule("kv", W))
    with pytest.raises(OptionError, match="same number of workers"):
        rs.ring(q, k, v, workers=W, schedule=rs.forward_schedule("kv", W + 1))


def test_a_run_does_not_change_its_inputs():
    arrays = tensors()
    kept = [x.copy() for x in arrays]
    rs.ring(*arrays, workers=W, causal=True, circulation="q", record=True)
    for x, before in zip(arrays, kept, strict=True):
        assert (x == before).all()


def test_a_run_a_schedule_and_a_state_have_a_short_representation():
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=W, record=True)
    assert repr(run).startswith("<Run: ring of 3 workers") and len(repr(run)) < 120
    assert str(run.schedule).splitlines()[2].startswith("step 1: visitors 2 0 1; then k v columns")
    assert str(run.state(1, 0, when="during")) == (
        "worker 1 after 0 steps holds queries of 1, keys of 1"
    )
    assert run.cost().hops == W - 1 and run.cost("backward").hops == W
    with pytest.raises(NotRecordedError):
        rs.ring(q, k, v, workers=W).cost("backward")


@pytest.mark.slow
def test_memory_is_shards_and_one_block_not_the_square_of_the_length():
    """S = 16384, D = 64, one head, W = 8, forward and backward, under 1 GiB for the process."""
    import subprocess
    import sys

    program = (
        "import resource, numpy as np, ringspec as rs\n"
        "random = np.random.default_rng(0)\n"
        "q, k, v, dy = (random.normal(size=(1, 1, 16384, 64)) for _ in range(4))\n"
        "run = rs.ring(q, k, v, dy, workers=8, causal=True, layout='zigzag', circulation='q')\n"
        "assert np.isfinite(run.dk).all()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 2**30
