"""A set of faults is not told if one of them makes what another one says untrue."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.readout.faults.choices import KERNELS, OF_ALL, right_choices
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.places import Place
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.search.fault_sets import (
    Search,
    composed,
    explain,
    undoes,
    with_every_size,
)
from ringspec.conformance.readout.search.forward_search import of_storing

GEOMETRY = Geometry(3, "kv", 1, "contiguous", positions("contiguous", 3, 4), True, None, 4, 2, 0.3)
RIGHT = right_choices(GEOMETRY)
STEPS = GEOMETRY.steps("forward")[:, :, None, None, None]


def fault(slot, value, steps=(0, 1, 2), only=""):
    return Fault(
        "forward",
        Kind(f"{slot} is {value}", ((slot, value),), only=only),
        Place(f"in steps {steps}", np.isin(STEPS, steps), 0.5),
    )


OWNER = RIGHT["v.worker"]
NEXT = np.broadcast_to((OWNER - 1) % 3, (3, 3, 1, 1, 1))


@pytest.mark.parametrize(
    ("first", "second", "undone"),
    [
        (fault("times", 2.0), fault("times", 1.0, (1,)), True),
        (fault("times", 2.0, (0, 1)), fault("times", 1.0, (2,)), False),
        (fault("times", 2.0), fault("times", 0.5, (1,)), False),
        (fault("times", 2.0), fault("count", 1.0, (1,)), False),
        (fault("v.worker", NEXT), fault("v.worker", np.broadcast_to(OWNER, NEXT.shape), (2,)), True),
        (fault("times", 2.0, only=KERNELS[0]), fault("times", 1.0, (1,), KERNELS[0]), True),
        (fault("times", 2.0, only=KERNELS[0]), fault("times", 1.0, (1,), KERNELS[1]), False),
        (fault("started", True), fault("started", False), False),
    ],
    ids=["in-one-step", "elsewhere", "still-wrong", "another-choice", "table", "one-kernel", "other-kernel", "of-the-ring"],
)  # fmt: skip
def test_a_fault_undoes_another_if_it_makes_a_choice_right_again_somewhere(first, second, undone):
    assert undoes(second, first.applied(RIGHT), RIGHT) == undone


def test_choices_of_the_whole_ring_are_ignored_beside_others():
    both = Kind("both", (("started", False), ("times", 1.0)))
    second = Fault("forward", both, Place("", np.ones((1,) * 5, bool), 0.0))
    assert "started" in OF_ALL
    assert not undoes(second, fault("started", True).applied(RIGHT), RIGHT)
    assert undoes(second, fault("times", 2.0).applied(RIGHT), RIGHT)


@dataclasses.dataclass
class Matched:
    """A prediction that explains everything (``whole``), or so many numbers."""

    whole: bool
    count: int
    ours: dict

    def gain(self, plain):
        return self.count - plain.count


class Counted:
    """A model whose evaluations are not counted."""

    evaluations = most = 0.0

    def may_go_on(self):
        return True


@pytest.mark.parametrize("second", [fault("times", 1.0, (1,)), fault("times", 0.5, (1,))])
def test_a_set_in_which_one_fault_undoes_another_is_not_found(second):
    """What is read is what both faults give together; the second alone explains nothing."""
    first = fault("times", 2.0)
    read = composed(RIGHT, (first, second))["times"]

    def predict(choices):
        times = np.broadcast_to(choices["times"], read.shape)
        same = times == read
        return Matched(bool(same.all()), int(same.sum()), {"times": times})

    def proposed(choices, match, last):
        for one in (first, second):
            yield one, predict(one.applied(choices))

    found = explain(Counted(), lambda choices: None, predict, RIGHT, proposed, 100.0, most_faults=2)
    undone = bool((read == 1).any())
    assert [one.kind for one in found.faults] == ([] if undone else [first.kind, second.kind])
    if found.faults:
        assert found.faults[1] is second
        assert not np.logical_and(*(one.place.table for one in found.faults)).any()
        assert np.array_equal(composed(RIGHT, found.faults)["times"], read)


def test_a_fault_that_another_problem_showed_is_tried_beside_those_that_explain_the_most_here():
    """Neither fault is proposed beside the other, as if all that is read were still to be explained."""
    known, here = fault("times", 2.0, (0,)), fault("count", 2.0, (1, 2))
    read = composed(RIGHT, (known, here))

    def predict(choices):
        same = [np.broadcast_to(choices[x] == read[x], STEPS.shape) for x in ("times", "count")]
        return Matched(bool(np.all(same)), int(np.sum(same)), {"same": np.array(same)})

    def proposed(choices, match, last):
        if not last and choices is RIGHT:
            yield here, predict(here.applied(choices))

    found = [
        explain(Counted(), lambda choices: None, predict, RIGHT, proposed, 100.0, known=sets).faults
        for sets in ([], [(known,)])
    ]
    assert found == [(), (known, here)]


def test_a_known_set_is_told_with_every_size_of_tiles_that_fits():
    def tiles(size, steps):
        one = fault("count", 0.0, steps)
        words = f"tiles of 5 queries and {size} keys are lost"
        return dataclasses.replace(one, kind=dataclasses.replace(one.kind, words=words))

    chains = [((tiles("2", (0,)),), 1), ((tiles("3 or 6", (0,)),), 2), ((tiles("7", (1,)),), 3)]
    faults, match = with_every_size(chains)
    assert [one.kind.words for one in faults] == [
        "tiles of 5 queries and 2 or 3 or 6 keys are lost"
    ]
    assert match == 1 and faults[0].place is chains[0][0][0].place


def test_wrong_merges_of_a_set_agree_in_the_hidden_rows_that_they_merge():
    """Which hidden rows are merged is a choice of the whole ring, so one merge would change what the other does."""
    plain, hidden = (
        Fault(
            "forward", Kind("merge", (("merge", 1), *more)), Place("in a step", STEPS == step, 0.5)
        )
        for step, more in ((0, ()), (1, (("hidden_merge", True),)))
    )
    assert undoes(hidden, plain.applied(RIGHT), RIGHT)
    assert undoes(plain, hidden.applied(RIGHT), RIGHT)
    assert not undoes(hidden, RIGHT, RIGHT)
    elsewhere = dataclasses.replace(plain, place=Place("in the last step", STEPS == 2, 0.5))
    assert not undoes(elsewhere, plain.applied(RIGHT), RIGHT)


def test_keys_that_fill_up_tiles_are_not_combined_with_wrong_blocks_or_masks():
    """They are counted in the correct blocks, so no sentence says what both give together."""
    filled = fault("padded", np.ones((3, 3, 1, 4)))
    keys = fault("k.worker", np.broadcast_to((RIGHT["k.worker"] + 1) % 3, (3, 3, 1, 1, 1)))
    for first, second in ((filled, keys), (keys, filled), (fault("mask", 1), filled)):
        assert undoes(second, first.applied(RIGHT), RIGHT)
    assert not undoes(filled, RIGHT, RIGHT)
    assert not undoes(filled, fault("times", 2.0).applied(RIGHT), RIGHT)


def test_a_fault_gets_the_place_that_a_later_one_leaves():
    """Otherwise its words are untrue where the later one makes the same choice in another way."""
    names = [Place("in steps 0 and 2", np.isin(STEPS, (0, 2)), 0.5)]
    search = Search(None, None, None, RIGHT, None, None, names)
    everywhere, there = fault("times", 2.0), fault("times", 0.5, (1,))
    ((faults, match),) = search.true(((everywhere, there), "match"))
    assert [one.place.words for one in faults] == ["in steps 0 and 2", there.place.words]
    assert match == "match"
    assert search.true(((there, everywhere), "match")) == []
    listed = dataclasses.replace(search, places=()).true(((everywhere, there), "match"))
    assert listed[0][0][0].place.words.startswith(
        "in the blocks (queries of worker, keys of worker)"
    )
    other = fault("count", 0.0, (1,))
    assert search.true(((everywhere, other), "match")) == [((everywhere, other), "match")]


def test_faults_in_how_o_and_lse_are_saved_are_told_last():
    """A backward pass may use them from before 'this mistake'."""
    base_2, block = fault("lse_out", 3), fault("times", 2.0)
    assert sorted((base_2, block), key=of_storing) == [block, base_2]
