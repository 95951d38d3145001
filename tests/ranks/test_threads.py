"""The loop of a rank, run by threads: bit-identical to lockstep, and every fault is named."""

import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks.ringcases import W, differences, inputs, option, problems, tokens_of
from refusals import is_refusal, refuses

from ringspec.comm import part
from ringspec.comm.agreement import error_bytes, error_from
from ringspec.comm.ring import ring_over
from ringspec.comm.threads import Hall, ThreadLinks, ring_in_threads
from ringspec.comm.traffic import traffic
from ringspec.comm.wire import Header, check_header, frame_of, pack, side_from
from ringspec.errors import (
    CommunicationError,
    LayoutError,
    LostWorkerError,
    NonFiniteError,
    OptionError,
)
from ringspec.problem.model import Columns
from ringspec.rings.ring import ring
from ringspec.rings.schedules import backward_schedule
from ringspec.rings.validator import SIDES
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.schedule import Schedule, Step, Transfer
from ringspec.spec.worker import KeySide

# Seconds that a link waits for a message that comes and for one that is lost, and a test for its threads.
PLENTY, LOST, END = 60.0, 2.0, 120.0


def test_every_layout_circulation_direction_and_feature_is_bit_identical_to_lockstep():
    wrong = []
    for number, (name, keywords) in enumerate(problems()):
        x = inputs(number, tokens_of(keywords))
        mine = ring_in_threads(**x, workers=W, timeout=PLENTY, **keywords)
        wrong += [f"{name}: {d}" for d in differences(mine, ring(**x, workers=W, **keywords))]
    assert number == 52 and not wrong


def test_messages_are_those_of_lockstep_in_the_order_of_the_senders():
    seen = []
    x = inputs(3)
    ring(**x, workers=3, observer=lambda m: seen.append((m.phase, m.step, m.worker, m.received)))
    mine, lock = [], threading.Lock()

    def observe(moment):
        with lock:
            mine.append((moment.phase, moment.step, moment.worker, moment.received))

    ring_in_threads(**x, workers=3, observer=observe)
    assert len(mine) == len(seen) == 2 * 3 * 3
    for theirs, ours in zip(sorted(seen, key=str), sorted(mine, key=str), strict=True):
        assert str(theirs) == str(ours)


@pytest.mark.parametrize(
    "circulation, inputs_named, added",
    [("kv", "k, v, columns", "dk, dv"), ("q", "q, dy, lse, row_term, rows", "dq, dbias")],
)
def test_inputs_and_accumulators_travel_while_a_block_is_computed(circulation, inputs_named, added):
    """Inputs are posted before the computation; accumulators are awaited after it, added, sent on."""
    expected = []
    for t in range(W):
        travels, arrives = t < W - 1, t > 0
        awaited = f"in backward step {t + 1}" if travels else f"after backward step {t}"
        taken = f"after backward step {t - 1} until rank 1 has taken"
        expected += [f"receive after backward step {t} for {inputs_named} from rank 3"] * travels
        expected += [f"receive {awaited} for {added} from rank 3"]
        expected += [f"waited after backward step {t - 1} for {inputs_named} from rank 3"] * arrives
        expected += [
            f"send after backward step {t} until rank 1 has taken {inputs_named}"
        ] * travels
        expected += ["compute"]
        expected += [f"waited in backward step {t} for {added} from rank 3"] * arrives
        expected += [f"send after backward step {t} until rank 1 has taken {added}"]
        expected += [f"waited {taken} {names}" for names in (inputs_named, added)] * arrives
    expected += [f"waited {awaited} for {added} from rank 3"]
    expected += [f"waited after backward step {W - 1} until rank 1 has taken {added}"]
    assert events_of_rank_0(circulation) == expected


def events_of_rank_0(circulation):
    """What rank 0 posts, awaits and computes in the backward pass, in order."""
    events = []

    class Watched(ThreadLinks):
        def send(self, target, tag, buffer, what):
            events.append(f"send {what.removeprefix('waits ')}")
            return super().send(target, tag, buffer, what)

        def receive(self, source, tag, size, what):
            events.append(f"receive {what.removeprefix('waits ')}")
            return super().receive(source, tag, size, what)

        def wait(self, pending):
            buffer = super().wait(pending)
            events.append(f"waited {pending.what.removeprefix('waits ')}")
            return buffer

    def block(*arguments):
        events.append("compute")
        return block_backward(*arguments)

    named_as(block, block_backward)
    keywords = {"circulation": circulation} | option("bias of all rows")
    assert run_with(Watched, only=0, keywords_of=lambda rank: keywords, block_backward=block) == (
        [None] * W
    )
    return [event for event in events if event == "compute" or "backward step" in event]


@pytest.mark.parametrize("moves", ["keys", "queries"])
def test_schedules_of_any_form_give_the_bits_and_the_moments_of_lockstep(moves):
    """Blocks wander at random, names travel apart, some to the worker itself, and with idle steps."""
    for seed in range(6):
        keywords = {
            "schedule": wandering("keys", False, seed),
            "schedule_backward": wandering(moves, True, seed + 100),
        } | option("bias" if seed % 2 else "causal")
        x, seen, mine, lock = inputs(seed), [], [], threading.Lock()
        expected = ring(**x, workers=W, observer=seen.append, **keywords)

        def observe(moment, mine=mine, lock=lock):
            with lock:
                mine.append(moment)

        got = ring_in_threads(**x, workers=W, observer=observe, timeout=PLENTY, **keywords)
        assert not differences(got, expected)
        mine.sort(key=lambda moment: (moment.phase != "forward", moment.step, moment.worker))
        assert len(mine) == len(seen)
        for ours, theirs in zip(mine, seen, strict=True):
            assert same(ours, theirs), f"seed {seed}: {theirs}"


def wandering(moves, backward, seed):
    """A schedule whose blocks move by random permutations until every pair has met."""
    rng = np.random.default_rng(seed)
    names, added = SIDES[moves]
    added = added if backward else ()
    schedule = Schedule("wandering", W, moves, names, added, ())
    at, left, steps = list(range(W)), set(range(W * W)), []
    while left:
        uses = tuple(b if b + W * r in left else None for r, b in enumerate(at))
        left -= {b + W * r for r, b in enumerate(at)}
        pairs = tuple((r, int(to)) for r, to in enumerate(rng.permutation(W)))
        carried = [Transfer("permute", pairs, names)]
        if added and rng.random() < 0.7:
            carried += [Transfer("permute", pairs, (name,)) for name in added]
            rng.shuffle(carried)
        elif added:
            carried = [Transfer("permute", pairs, added[:1] + names + added[1:])]
        if len(carried) > 1 and rng.random() < 0.5:
            steps.append(Step(uses, tuple(carried[:1])))
            uses, carried = (None,) * W, carried[1:]
        steps.append(Step(uses, tuple(carried)))
        at = [at[source] for source, _ in sorted(pairs, key=lambda pair: pair[1])]
    home = tuple(enumerate(at))
    steps.append(Step((None,) * W, (Transfer("permute", home, added or names),)))
    return dataclasses.replace(schedule, steps=tuple(steps))


def same(one, other):
    """Equal, with every bit of every array."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        fields = [f.name for f in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in fields
        )
    return one == other


def run_with(kind, only=None, timeout=PLENTY, keywords_of=lambda rank: {}, **keywords):
    """A ring of four threads with links of another kind on rank ``only``; the error of each rank."""
    hall, errors, x = Hall(W), [None] * W, inputs(0)

    def one(rank):
        links = (kind if only in (None, rank) else ThreadLinks)(hall, rank, timeout)
        own = keywords if only in (None, rank) else {}
        try:
            ring_over(links, **x | keywords_of(rank) | own)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(W)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return errors


def named_as(function, other):
    """The name of the block computation is part of the agreement: it must be the same everywhere."""
    function.__module__, function.__qualname__ = other.__module__, other.__qualname__


class WrongNeighbour(ThreadLinks):
    """Sends in the ring's other direction."""

    def send(self, target, tag, buffer, what):
        other = (2 * self.rank - target) % W if "forward step 1" in what else target
        return super().send(other, tag, buffer, what)


class Late(ThreadLinks):
    """Sends the block of the step before once more."""

    def send(self, target, tag, buffer, what):
        if "forward step 1" in what:
            buffer = self.last
        self.last = buffer
        return super().send(target, tag, buffer, what)


class Dropped(ThreadLinks):
    """Loses what it sends in one step."""

    def send(self, target, tag, buffer, what):
        target = W + 1 if "backward step 2" in what and "dk" in what else target
        return super().send(target, tag, buffer, what)


def test_a_message_to_the_wrong_neighbour_ends_with_an_error_that_names_step_and_peer():
    errors = run_with(WrongNeighbour, only=1, timeout=LOST)
    # The next message with that tag is of the backward pass, if it comes in time.
    assert errors[2].code in ("lost-worker", "message")
    assert re.search("forward step 1.* (from rank 1|1 to 2)", str(errors[2]))


def test_a_message_of_another_step_is_refused_by_its_header():
    errors = run_with(Late, only=2)
    assert (
        is_refusal(errors[3], (CommunicationError, "message")) and "forward step 0" in errors[3].got
    )


def test_a_lost_message_ends_the_wait_and_names_step_and_peer():
    errors = run_with(Dropped, only=1, timeout=LOST)
    assert isinstance(errors[2], LostWorkerError)
    assert "in backward step 3 for dk, dv from rank 1" in str(errors[2])


def test_an_error_in_the_block_of_one_rank_is_raised_on_every_rank():
    def broken(*arguments):
        raise NonFiniteError("finite numbers", "NaN", "look at it")

    named_as(broken, block_forward)
    errors = run_with(ThreadLinks, only=2, block_forward=broken)
    assert all(isinstance(error, NonFiniteError) and "look at it" in str(error) for error in errors)


def test_an_exception_of_one_ranks_observer_reaches_the_others_by_name():
    def observer(moment):
        if moment.step == 1:
            raise ValueError("broken: here")

    errors = run_with(ThreadLinks, only=2, observer=observer)
    assert isinstance(errors.pop(2), ValueError)
    assert len(errors) == W - 1 and all(
        is_refusal(error, (CommunicationError, "failed-worker")) for error in errors
    )
    assert all(error.got == "ValueError on rank 2: broken: here" for error in errors)


def test_an_exception_of_one_rank_before_it_computes_reaches_the_others_by_name(monkeypatch):
    from ringspec.comm import ring as module

    checked = module.set_up

    def broken(workers, q, k, v, given, options):
        if options.get("causal"):
            raise KeyError("no such array")
        return checked(workers, q, k, v, given, options)

    monkeypatch.setattr(module, "set_up", broken)
    errors = run_with(ThreadLinks, keywords_of=lambda rank: {"causal": rank == 2})
    assert all(is_refusal(error, (CommunicationError, "failed-worker")) for error in errors), errors
    assert all("KeyError on rank 2" in error.got for error in errors)
    assert isinstance(errors[2].__cause__, KeyError)


@pytest.mark.parametrize(
    "expected, changed, named",
    [
        ((CommunicationError, "disagreement"), {"causal": True}, "mask"),
        ((CommunicationError, "disagreement"), {"direction": -1}, "direction"),
        ((CommunicationError, "disagreement"), {"layout": "striped"}, "layout"),
        ((CommunicationError, "disagreement"), {"recipe": "bf16"}, "recipe"),
        ((CommunicationError, "disagreement"), {"q": inputs(1)["q"]}, "another q"),
        ((CommunicationError, "disagreement"), {"dy": inputs(1)["dy"]}, "dy"),
        ((CommunicationError, "disagreement"), option("bounds"), "bounds"),
        ((OptionError, "window"), {"window": -3}, "window"),
    ],
    ids=str,
)
def test_what_one_rank_was_given_otherwise_every_rank_refuses(expected, changed, named):
    errors = run_with(ThreadLinks, keywords_of=lambda rank: changed if rank == 2 else {})
    assert all(is_refusal(error, expected) and named in str(error) for error in errors)
    assert expected == (OptionError, "window") or all("rank 2" in str(error) for error in errors)


def test_bad_input_is_refused_with_the_words_of_lockstep():
    x = inputs(0)
    with pytest.raises(LayoutError) as lockstep:
        ring(**x, workers=5)
    with pytest.raises(LayoutError) as threads:
        ring_in_threads(**x, workers=5)
    assert str(threads.value) == str(lockstep.value)
    with pytest.raises(OptionError) as lockstep:
        ring(**x, workers=2, each=4)
    with pytest.raises(OptionError) as threads:
        ring_in_threads(**x, workers=2, each=4)
    assert str(threads.value) == str(lockstep.value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_forward_whose_o_leaves_float64_is_refused_with_the_words_of_lockstep():
    """Sums of two v overflow before they are divided, though every mean of them is a float64."""
    x = inputs(0)
    x = {"q": 0 * x["q"], "k": x["k"], "v": np.full_like(x["v"], 1.7e308)}
    with pytest.raises(NonFiniteError) as lockstep:
        ring(**x, workers=W)
    with pytest.raises(NonFiniteError) as threads:
        ring_in_threads(**x, workers=W)
    assert str(threads.value) == str(lockstep.value)


@pytest.mark.parametrize("feature", ["dropout", "keep", "dlse", "mask", "segments", "bounds"])
def test_two_rings_that_share_a_batch_give_the_bits_of_one(feature):
    """Entry b of the batch is entry b of the whole, whichever ring has it (DROP-2)."""
    x, keywords = inputs(7, batch=4), option(feature, batch=4)
    everyone, rings = Hall(W), [Hall(W // 2), Hall(W // 2)]

    def one(rank):
        links = ThreadLinks(everyone, rank, PLENTY)
        group, worker = divmod(rank, W // 2)
        own = ThreadLinks(rings[group], worker, PLENTY)
        return ring_over(links, **x, ring=own, **keywords)

    with ThreadPoolExecutor(W) as pool:
        runs = list(pool.map(one, range(W)))
    expected = ring(**x, workers=W // 2, **keywords)
    assert not [name for run in runs for name in differences(run, expected)]


def test_a_buffer_keeps_every_bit_and_every_dtype():
    k = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324]).reshape(1, 1, 3, 2)
    side = KeySide(2, k, None, Columns(np.arange(3), np.arange(3)[None], None))
    frame, header = frame_of(side, ("k", "v", "columns")), Header("forward", 1, 2, 3, 0, 2)
    buffer = pack(side, frame, header)
    check_header(buffer, header)
    got = side_from(buffer, frame, side, 2)
    assert got.k.tobytes() == k.tobytes() and got.v is None and got.columns.segment is None
    assert got.columns.index.dtype == np.int64 and got.owner == 2
    with refuses((CommunicationError, "message"), match="step 1"):
        check_header(buffer, Header("forward", 0, 2, 3, 0, 2))


def test_a_long_error_passes_as_a_record():
    error = error_from(error_bytes(OptionError("e" * 9000, "g" * 9000, "m")))
    assert isinstance(error, OptionError) and error.fix == "m" and len(error.expected) > 900


def test_accumulators_and_inputs_of_one_hop_are_two_messages():
    steps = traffic(backward_schedule("q", 3))
    names = [{crossing.names for crossing in crossings} for crossings in steps]
    inputs_first = ("q", "dy", "lse", "row_term", "rows")
    assert names == [{inputs_first, ("dq", "dbias")}] * 2 + [{("dq", "dbias")}]


def test_a_share_of_the_batch_is_cut_out_of_everything_that_has_a_batch_axis():
    rows = np.arange(8).reshape(4, 2)
    got = part.cut(Columns(np.arange(2), rows, rows[:1]), 4, slice(1, 3))
    assert got.position.tolist() == [[2, 3], [4, 5]] and got.segment.tolist() == [[0, 1]]
