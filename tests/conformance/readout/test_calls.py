"""Faults that show in one circulation, with one number of workers, or as NaN."""

import dataclasses

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.diagnose.mutants.hooks import Hooks
from ringspec.conformance.diagnose.mutants.mutant import REFERENCES, mutant
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.conclusion import Separate
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.proof.all_problems import proved
from ringspec.conformance.readout.reading import Named
from ringspec.conformance.readout.search.not_finite import not_finite

CLAIMS = {
    "layouts": ("contiguous", "zigzag"),
    "masks": ("causal",),
    "features": (),
    "circulations": ("kv", "q", "gather"),
    "directions": (1,),
    "batch": (1,),
}


class Sometimes:
    """A known bug in the calls that ``when`` selects, and the float32 reference in all others."""

    name = "sometimes"

    def __init__(self, bug, when=lambda call: True, **claims):
        self.right, self.wrong, self.when = (
            REFERENCES["float32"],
            MutantTarget(MUTANTS[bug], "float32"),
            when,
        )
        self.capabilities = dataclasses.replace(self.right.capabilities, **{**CLAIMS, **claims})

    def run(self, call):
        return (self.wrong if self.when(call) else self.right).run(call)


@pytest.mark.parametrize(
    ("bug", "circulation", "sentences"),
    [
        ("dq-not-home", "q", ["In the backward pass, in the last step, the share of dq is lost.", "This holds where the queries travel; the same problem with travelling keys is right."]),
        ("stale-queries", "q", ["In the backward pass, queries and dy are those of the worker that computes."]),
        ("dkv-not-reduced", "gather", ["In the backward pass, from step 1 on, the shares of dk and dv are lost.", "This holds where the keys are gathered; the same problem with travelling keys is right."]),
    ],
)  # fmt: skip
def test_every_circulation_that_a_target_claims_is_read(bug, circulation, sentences):
    found = explain_target(Sometimes(bug))
    wrong = [one.problem.id for one in found.runs if not one.right]
    assert f"readout/causal-contiguous-{circulation}" in wrong
    assert all(id.endswith(f"-{circulation}") for id in wrong)
    assert list(found.sentences) == sentences


CHAIN = "those of the visitor in a chain that is not closed (its first worker keeps what it has)"


@pytest.mark.parametrize(
    ("bug", "sentences"),
    [
        ("ring-not-closed", [
            f"In the forward pass, from step 1 on, keys, values and their positions are {CHAIN}.",
            f"In the backward pass, keys, values and their positions are {CHAIN}, and dk and dv travel in this chain, too.",
            f"readout/causal-contiguous-q, readout/full-contiguous-q, readout/causal-zigzag-q: In the forward pass, from step 1 on, keys, values and their positions are {CHAIN}. In the backward pass, queries, dy, lse, delta and their positions are {CHAIN}, and dq travels in this chain, too.",
        ]),
        ("other-workers-unwritten", [
            "In the forward pass, on all workers but 0, o is 0.",
            "The backward pass uses o and lse from before this mistake.",
            "In the backward pass, dq, dk and dv are 0 on all workers but 0.",
        ]),
        ("offset-sign", [
            "In the forward pass, the offset between the positions of two workers has the wrong sign in the mask.",
            "The backward pass is the gradient of this wrong forward pass.",
        ]),
    ],
)  # fmt: skip
def test_a_fault_of_both_passes_is_explained_in_every_problem(bug, sentences):
    masks = ("causal", "window") if bug == "offset-sign" else ("causal",)
    found = explain_target(Sometimes(bug, circulations=("kv", "q"), masks=masks))
    assert list(found.sentences) == sentences
    assert len({*found.conclusion.explained, *found.conclusion.others}) == found.wrong > 0


def test_a_fault_that_shows_with_four_workers_alone_is_said_to_do_so():
    found = explain_target(Sometimes("dkv-not-home", lambda call: call.workers == 4))
    assert found.conclusion.explained == ("readout/causal-contiguous-w4",)
    assert found.sentences == (
        "In the backward pass, dk and dv are added to those of the next step's visitor.",
        "This shows with 4 workers, and not with 3.",
    )


@pytest.mark.parametrize(
    ("layout", "causal", "direction", "id"),
    [
        ("zigzag", False, 1, "full-zigzag"),
        ("striped", False, 1, "full-striped"),
        ("striped", True, -1, "causal-striped-backwards"),
    ],
)
def test_a_fault_that_shows_in_one_of_the_further_problems_alone_is_explained(
    layout, causal, direction, id
):
    def there(call):
        setting = call.layout, call.terms.get("causal", False), call.direction
        return call.workers == 3 and setting == (layout, causal, direction)

    layouts = ("contiguous", "zigzag", "striped")
    target = Sometimes(
        "dkv-not-home", there, layouts=layouts, circulations=("kv",), directions=(1, -1)
    )
    found = explain_target(target)
    assert [one.problem.id for one in found.runs if not one.right] == [f"readout/{id}"]
    assert found.conclusion.explained == (f"readout/{id}",)
    assert (
        found.sentences[0]
        == "In the backward pass, dk and dv are added to those of the next step's visitor."
    )


def test_a_backward_pass_that_reads_what_step_0_saved_is_explained_by_one_sentence():
    found = explain_target(Sometimes("stale-keys"))
    assert len(found.conclusion.explained) == found.wrong > 2
    assert found.sentences == (
        "In the backward pass, every step uses the keys, values, lse and o of step 0.",
    )


def test_rows_that_are_nan_are_named_by_what_they_see_and_not_searched():
    found = explain_target(Sometimes("masked-block-nan", circulations=("kv",)))
    first = found.runs[0].reading
    assert first.forward.left == (
        "o and lse are NaN or infinite for queries that see no key of some block "
        "(a block that the mask hides counts), and nowhere else"
    )
    assert first.backward.left.startswith("the gradients, which the backward pass computes")
    assert not found.conclusion.explained and not found.searched
    assert sum(one.reading.evaluations for one in found.runs if one.reading) == 0


def results(change):
    """Return what is said of zeros in a causal zigzag ring, after a change."""
    geometry = Geometry(3, "kv", 1, "zigzag", positions("zigzag", 3, 4), True, None, 4, 2, 0.3)
    right = {name: np.zeros((3, 4, 4, 2)) for name in ("o", "dq", "dk")}
    right["lse"] = np.zeros((3, 4, 4))
    right["lse"][1, :, 2] = -np.inf
    given = {name: x.copy() for name, x in right.items()}
    change(given)
    return not_finite(geometry, given, right)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: None, {}),
        (lambda x: x["lse"].__setitem__((1, 0, 2), np.nan), {}),
        (lambda x: x["dk"].__setitem__((2, 1, slice(1, 3), 0), np.inf), {"backward": "dk is NaN or infinite for keys 1-2 of worker 2"}),
        (lambda x: x["dq"].fill(np.nan), {"backward": "dq is NaN or infinite in all rows"}),
        (lambda x: x["o"].__setitem__((0, slice(None), slice(0, 2), 1), np.nan), {"forward": "o is NaN or infinite for queries 0-1 of worker 0"}),
        (lambda x: [x[name].__setitem__((slice(None), slice(None), 2), np.inf) for name in ("o", "lse")], {"forward": "o and lse are NaN or infinite for query 2 of worker 0, query 2 of worker 1, query 2 of worker 2"}),
    ],
)  # fmt: skip
def test_values_that_are_not_finite_but_should_be_are_listed(change, said):
    assert results(change) == said


def test_a_query_that_is_scaled_in_place_by_each_call_is_told_as_such():
    layouts = ("contiguous", "zigzag", "striped")
    found = explain_target(TiledRing(scaled_again=True, layouts=layouts, directions=(1, -1)))
    assert len(found.conclusion.explained) == found.wrong > 4
    assert found.sentences[0] == (
        "In the forward pass, scores are multiplied by the scale once more with each block that the query sees."
    )


def test_faults_count_only_where_a_ring_with_all_of_them_gives_the_results():
    """A wrong set of the backward pass, as if it came from another problem, and a separate sentence that is wrong."""
    found = explain_target(Sometimes("stale-queries", circulations=("kv", "q")))
    problems = [(one.problem, one.outputs) for one in found.runs if not one.right]
    assert proved(found.conclusion, problems, ()) == found.conclusion
    first, *others = found.conclusion.explained
    wrong = Named("backward", "delta is negated", "", 1.0, "")
    untrue = dataclasses.replace(found.conclusion, faults=(*found.conclusion.faults, wrong))
    assert proved(untrue, problems, ()).sentences == ()
    of_one = Separate((first,), "", "Delta is negated.", (wrong,), "")
    apart = dataclasses.replace(found.conclusion, explained=tuple(others), separate=(of_one,))
    assert proved(apart, problems, ()).separate == ()
    assert (
        proved(untrue, problems, found.conclusion.explained).explained == found.conclusion.explained
    )


def with_both(first, second):
    """Return a mutant with the pieces of two known bugs."""

    def hooks(call, recipe):
        changed = {}
        for bug in (MUTANTS[first], MUTANTS[second]):
            made = bug.hooks(call, recipe) if bug.applies(call) else Hooks()
            pieces = {one.name: getattr(made, one.name) for one in dataclasses.fields(Hooks)}
            changed |= {x: pieces[x] for x in pieces if pieces[x] is not getattr(Hooks, x)}
        return Hooks(**changed)

    return mutant("both", "", "", applies=MUTANTS[first].applies, hooks=hooks)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_window_is_read_in_every_layout_that_a_target_claims(layout):
    claims = {"layouts": ("contiguous", "zigzag", "striped"), "masks": ("causal", "window"), "circulations": ("kv",)}  # fmt: skip
    target = Sometimes("window-one-short", lambda call: call.layout == layout, **claims)
    found = explain_target(target)
    assert [one.problem.id for one in found.runs if not one.right] == [f"readout/window-{layout}"]
    assert (
        found.sentences[0] == "In the forward pass, the window is one key too narrow on the left."
    )


def test_a_wrong_lse_is_not_said_to_be_repeated_by_the_backward_pass_that_reads_it():
    """In the problems with a window, the backward pass repeats the second bug; in the others there is only the lse."""
    target = MutantTarget(with_both("log2-lse", "window-one-short"), "float32")
    claims = CLAIMS | {"layouts": ("contiguous",), "masks": ("causal", "window"), "circulations": ("kv",)}  # fmt: skip
    target.capabilities = dataclasses.replace(target.capabilities, **claims)
    lse = "In the forward pass, the new block's lse is divided by ln 2 before the merge (it is in base 2 and taken for natural)."
    window = "In the forward pass, the window is one key too narrow on the left. The backward pass does the same."
    where = "readout/window-contiguous, readout/band-contiguous"
    assert explain_target(target).sentences == (lse, f"{where}: {lse} {window}")
