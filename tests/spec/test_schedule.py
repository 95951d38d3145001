"""Schedules as data: the valid ones prove valid, and each broken one is refused for its reason."""

import dataclasses

import pytest
from refusals import refuses

import ringspec as rs
from ringspec.errors import OptionError, ScheduleError
from ringspec.rings.schedules import skip
from ringspec.rings.validator import DEFECTS, find_defects
from ringspec.spec.schedule import (
    KEY_ACCUMULATORS,
    KEY_INPUTS,
    Schedule,
    Step,
    Transfer,
    ring_permute,
    visitor,
)

W = 4
FORWARD = rs.forward_schedule("kv", W)
KV = rs.backward_schedule("kv", W)
Q = rs.backward_schedule("q", W)


def with_step(schedule: Schedule, number: int, **changes) -> Schedule:
    steps = list(schedule.steps)
    steps[number] = dataclasses.replace(steps[number], **changes)
    return dataclasses.replace(schedule, steps=tuple(steps))


def permute(pairs, carries) -> tuple[Transfer, ...]:
    return (Transfer("permute", tuple(pairs), tuple(carries)),)


def reversed_accumulators() -> Schedule:
    """dk, dv travel against k, v: blind at W = 2, wrong from W = 3 (bugs: torch PR 129514)."""
    steps = []
    for step in KV.steps:
        carries = [t.carries for t in step.transfers][0]
        back = Transfer("permute", ring_permute(W, -1), KEY_ACCUMULATORS)
        there = permute(ring_permute(W, 1), KEY_INPUTS) if "k" in carries else ()
        steps.append(dataclasses.replace(step, transfers=(*there, back)))
    return dataclasses.replace(KV, steps=tuple(steps))


def swapped_last_hop() -> Schedule:
    pairs = ((0, 1), (1, 2), (2, 0), (3, 3))
    return with_step(KV, 3, transfers=permute(pairs, KEY_ACCUMULATORS))


def values_left_behind() -> Schedule:
    """k travels without v on the first hop."""
    pairs = ring_permute(W, 1)
    return with_step(FORWARD, 0, transfers=permute(pairs, ("k", "columns")))


def accumulators_left_behind() -> Schedule:
    """dk, dv stay on the first hop, while k, v move on."""
    return with_step(KV, 0, transfers=permute(ring_permute(W, 1), KEY_INPUTS))


def stalled_block() -> Schedule:
    """Nothing is sent after step 1, and step 2 computes with the block that should have come."""
    return with_step(FORWARD, 1, transfers=())


GATHER = rs.backward_schedule("gather", W)


def twice(schedule: Schedule, number: int) -> Schedule:
    """The transfers of one step done twice in it."""
    return with_step(schedule, number, transfers=2 * schedule.steps[number].transfers)


def gather_after_a_computed_step() -> Schedule:
    own = Step(tuple(range(W)), GATHER.steps[0].transfers)
    return dataclasses.replace(GATHER, steps=(own, *GATHER.steps[2:]))


BROKEN = {
    "one step sends the same names twice": (twice(FORWARD, 0), "malformed"),
    "a name stands twice in one transfer": (
        with_step(FORWARD, 0, transfers=permute(ring_permute(W, 1), 2 * KEY_INPUTS)),
        "malformed",
    ),
    "gradients are scattered twice": (twice(GATHER, W), "malformed"),
    "gradients are scattered before the end": (
        dataclasses.replace(GATHER, steps=(*GATHER.steps, Step((None,) * W))),
        "malformed",
    ),
    "keys are gathered twice": (
        dataclasses.replace(GATHER, steps=(GATHER.steps[0], *GATHER.steps)),
        "malformed",
    ),
    "keys are gathered after a computed step": (gather_after_a_computed_step(), "malformed"),
    "keys are gathered without their positions": (
        with_step(
            GATHER,
            0,
            transfers=(Transfer("gather", (), ("k", "v")), Transfer("gather", (), ("columns",))),
        ),
        "malformed",
    ),
    "dv is no accumulator": (
        Schedule("dk alone", W, "keys", KEY_INPUTS, ("dk",), FORWARD.steps),
        "malformed",
    ),
    "gradients are not scattered": (with_step(GATHER, W, transfers=()), "accumulator not at home"),
    "one owner's gradients are scattered without dv": (
        with_step(GATHER, W, transfers=(Transfer("reduce_scatter", (), ("dk",)),)),
        "malformed",
    ),
    "no steps": (dataclasses.replace(FORWARD, steps=()), "malformed"),
    "zero workers": (dataclasses.replace(FORWARD, workers=0), "malformed"),
    "nobody moves": (dataclasses.replace(FORWARD, moves="nothing"), "malformed"),
    "v is no input": (dataclasses.replace(FORWARD, inputs=("k", "columns")), "malformed"),
    "dq travels with keys": (dataclasses.replace(KV, accumulators=("dq",)), "malformed"),
    "one worker is not told its step": (with_step(FORWARD, 1, uses=(3, 0, 1)), "malformed"),
    "a block of a worker that does not exist": (
        with_step(FORWARD, 1, uses=(3, 0, 1, 4)),
        "malformed",
    ),
    "an unknown transfer": (
        with_step(FORWARD, 0, transfers=(Transfer("broadcast", (), KEY_INPUTS),)),
        "malformed",
    ),
    "an unknown name travels": (
        with_step(FORWARD, 0, transfers=permute(ring_permute(W, 1), ("k", "weights"))),
        "malformed",
    ),
    "an empty permute": (
        with_step(FORWARD, 0, transfers=permute(ring_permute(W, 1), ())),
        "malformed",
    ),
    "a skipped pair of a worker that does not exist": (
        dataclasses.replace(FORWARD, skipped=frozenset({(0, 7)})),
        "malformed",
    ),
    "two workers send to one": (
        with_step(FORWARD, 0, transfers=permute(((0, 1), (1, 2), (2, 1), (3, 0)), KEY_INPUTS)),
        "not a permutation",
    ),
    "one worker does not send": (
        with_step(FORWARD, 0, transfers=permute(((0, 1), (1, 2), (2, 3)), KEY_INPUTS)),
        "not a permutation",
    ),
    "a target out of range": (
        with_step(FORWARD, 0, transfers=permute(((0, 1), (1, 2), (2, 3), (3, 4)), KEY_INPUTS)),
        "not a permutation",
    ),
    "group-local ranks in a larger world": (
        with_step(FORWARD, 0, transfers=permute(((4, 5), (5, 6), (6, 7), (7, 4)), KEY_INPUTS)),
        "not a permutation",
    ),
    "a hop is missing": (stalled_block(), "absent block"),
    "the ring turns the other way": (
        dataclasses.replace(
            FORWARD,
            steps=tuple(
                dataclasses.replace(
                    step, transfers=permute(ring_permute(W, -1), KEY_INPUTS) if t < W - 1 else ()
                )
                for t, step in enumerate(FORWARD.steps)
            ),
        ),
        "absent block",
    ),
    "v stays while k moves": (values_left_behind(), "torn block"),
    "dk, dv stay while k, v move": (accumulators_left_behind(), "torn block"),
    "dk, dv turn the other way": (reversed_accumulators(), "torn block"),
    "the last step is left out": (
        dataclasses.replace(FORWARD, steps=FORWARD.steps[:-1]),
        "missed pair",
    ),
    "one worker idles once": (with_step(FORWARD, 2, uses=(None, 3, 0, 1)), "missed pair"),
    "the last step is done twice": (
        dataclasses.replace(FORWARD, steps=(*FORWARD.steps, FORWARD.steps[-1])),
        "doubled pair",
    ),
    "dk, dv stop one hop short": (with_step(KV, 3, transfers=()), "accumulator not at home"),
    "dq stops one hop short": (with_step(Q, 3, transfers=()), "accumulator not at home"),
    "dk, dv go one hop too far": (
        dataclasses.replace(KV, steps=(*KV.steps, Step((None,) * W, KV.steps[-1].transfers))),
        "accumulator not at home",
    ),
    "the last hop mixes two owners": (swapped_last_hop(), "accumulator not at home"),
    "a skipped pair is computed": (
        dataclasses.replace(FORWARD, skipped=frozenset({(0, 3)})),
        "skipped pair is computed",
    ),
    "a skip that nothing proves": (skip(FORWARD, [(0, 3)]), "skipped pair is visible"),
}


@pytest.mark.rule("RING-2", "RING-3", "RING-4", "RING-5", "RING-11")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_refused_for_its_reason(name):
    schedule, kind = BROKEN[name]
    with pytest.raises(ScheduleError) as caught:
        rs.validate(schedule)
    assert caught.value.problems[0].kind == kind
    assert kind in str(caught.value)


def test_at_least_twenty_schedules_are_broken_and_every_kind_of_defect_is_met():
    assert len(BROKEN) >= 20
    assert {kind for _, kind in BROKEN.values()} == set(DEFECTS)


@pytest.mark.rule("RING-2", "RING-3", "RING-4", "RING-5")
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("direction", [1, -1])
def test_the_constructors_make_valid_schedules(workers, circulation, direction):
    assert find_defects(rs.forward_schedule(circulation, workers, direction)) == []
    assert find_defects(rs.backward_schedule(circulation, workers, direction)) == []


@pytest.mark.rule("RING-2")
def test_the_validator_names_the_missed_and_the_doubled_pair():
    uses = (1, *FORWARD.steps[0].uses[1:])
    defects = find_defects(with_step(dataclasses.replace(FORWARD), 3, uses=(0, 2, 3, 0)))
    named = {(d.kind, d.pair) for d in defects if d.pair}
    assert ("doubled pair", (0, 0)) in named and ("missed pair", (0, 1)) in named
    assert uses  # step 0 of worker 0 would use a block that it does not hold
    assert find_defects(with_step(FORWARD, 0, uses=uses))[0].kind == "absent block"


@pytest.mark.rule("RING-11")
def test_a_skip_is_proved_by_the_mask():
    future = [(a, b) for a in range(W) for b in range(W) if b > a]
    schedule = skip(FORWARD, future)
    rs.validate(schedule, lambda a, b: b <= a)
    with pytest.raises(ScheduleError) as caught:
        rs.validate(schedule, lambda a, b: b <= a + 1)
    assert caught.value.problems[0].pair == (0, 1)


@pytest.mark.rule("RING-1")
def test_the_visitor_is_the_owner_that_the_permutes_bring():
    for direction in (1, -1):
        holds = list(range(W))
        for t in range(W):
            assert holds == [visitor(r, t, W, direction) for r in range(W)]
            holds = [holds[(r - direction) % W] for r in range(W)]


@pytest.mark.rule("RING-4", "RING-5")
def test_inputs_take_w_minus_1_hops_and_accumulators_w():
    for schedule in (KV, Q):
        carries = [step.transfers[0].carries for step in schedule.steps]
        assert carries[:-1] == [schedule.inputs + schedule.accumulators] * (W - 1)
        assert carries[-1] == schedule.accumulators
    assert FORWARD.hops == W - 1 and FORWARD.steps[-1].transfers == ()


def test_a_ring_of_one_worker_sends_nothing():
    for circulation in ("kv", "q"):
        assert rs.backward_schedule(circulation, 1).steps[0].transfers == ()


def test_cp_offset_refuses_layouts_without_one_offset():
    with refuses((OptionError, "unknown-name"), match="zigzag_offsets"):
        rs.cp_offset("zigzag", 0, 1, workers=2, n_q=4, n_k=4)
