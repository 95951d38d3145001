"""What a target computes is read from a few problems and told in sentences, or said to be unexplained."""

import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from conformance.readout.tiled_ring import TiledRing

from ringspec.cli import main
from ringspec.cli.views.explain import lines
from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain import explain, read_problems
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.explain.read_problems import run_problem
from ringspec.conformance.readout.conclusion import Conclusion, combined, unexplained
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.faults.masks import masks_of, of_first_sizes
from ringspec.conformance.readout.faults.places import LISTED, block_places, joined, part_places
from ringspec.conformance.readout.model.backward import backward_pass
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.problem import geometry
from ringspec.conformance.readout.problem.chosen import problems_for
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.proof.calls import given_of
from ringspec.conformance.readout.proof.read_proven import read_proven
from ringspec.conformance.readout.proof.replay import gives
from ringspec.conformance.readout.proof.ring_results import RingOf, RingOfFaults
from ringspec.conformance.readout.reading import Named, PassRead, Reading
from ringspec.conformance.readout.search import backward_search, forward_search
from ringspec.conformance.readout.search.backward_search import explain_backward
from ringspec.conformance.readout.search.context import EVALUATIONS, SearchContext
from ringspec.conformance.readout.search.fault_sets import composed
from ringspec.conformance.readout.search.forward_search import explain_forward
from ringspec.conformance.readout.search.matches import ratio_steady
from ringspec.conformance.readout.search.vocabulary import every_kind, fault_named, kinds_of
from ringspec.conformance.target import Capabilities
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load

ROOT = Path(__file__).resolve().parents[3]
WRONG = ROOT / "docs" / "examples" / "wrong_ring.py"
BUGS = {
    "dkv-not-home": "dk and dv are added to those of the next step's visitor",
    "stale-keys-alone": "keys and values are those of the worker that computes",
    "last-step-dropped": "in the last step, the block is not computed",
    "future-not-skipped": "from step 1 on, no pair is masked",
    "diagonal-exclusive": "the causal mask hides each query's own position (key < query)",
    "running-part-not-rescaled": "the running o and l are not rescaled when the maximum rises",
    "merge-averages": "the merge averages all blocks so far with equal weights",
    "lse-without-maximum": "lse is log l without the maximum",
    "block-local-delta": "delta is summed over only the block's keys",
    "block-local-statistics": "p is computed with the block's own lse, and delta is summed over only the block's keys",
    "ds-not-transposed": "dS is not transposed in the product for dk",
    "dy-ignored": "dy is taken as 1 everywhere",
    "scale-missing-in-dk": "dk is not multiplied by the scale",
    "values-one-step-late": "values are those of the previous step's visitor",
}


class Claiming:
    """A target with other claims, and perhaps other results."""

    def __init__(self, target, change=None, **claims):
        self.target, self.change, self.name = target, change, target.name
        self.capabilities = dataclasses.replace(target.capabilities, **claims)

    def run(self, call):
        result = self.target.run(call)
        if self.change is not None:
            self.change(result)
        return result


def ringspec(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def sentences(one):
    return [fault.sentence() for found in one.passes for fault in (found.sets or [()])[0]]


def read_first(target):
    return run_problem(target, problems_for(target.capabilities)[0][0]).reading


@pytest.mark.parametrize(
    ("recipe", "circulation"),
    [
        ("float32", "kv"),
        ("bf16", "q"),
        *(
            pytest.param(recipe, circulation, marks=pytest.mark.slow)
            for recipe in ("float64", "float32", "bf16", "fp16", "nki_low")
            for circulation in ("kv", "q", "gather")
        ),
    ],
)
def test_a_right_ring_gets_no_explanation(recipe, circulation):
    claims = {"circulations": (circulation,), "lse": "hidden" if circulation == "q" else "natural"}
    told = explain_target(Claiming(REFERENCES[recipe], head_ratios=(2,), **claims))
    assert told.right and len(told.runs) >= 4 and not told.sentences


@pytest.mark.parametrize(
    "id",
    [id if n % 3 == 0 else pytest.param(id, marks=pytest.mark.slow) for n, id in enumerate(BUGS)],
)
def test_a_bug_is_told_in_a_sentence_without_the_catalogue(id):
    target = Claiming(
        MutantTarget(MUTANTS[id], "float32"), formats=("float32",), circulations=("kv",)
    )
    one = read_first(target)
    assert not one.right and one.explained
    assert any(BUGS[id] in sentence for sentence in sentences(one)), sentences(one)


def test_two_faults_are_both_told():
    def twice(result):
        result.dk[1][...] = 0
        for x in result.dv:
            x[...] *= 2

    target = Claiming(REFERENCES["float32"], twice, circulations=("kv",))
    one = read_first(target)
    told = " ".join(sentences(one))
    assert one.explained and "dv is too large by a factor of 2" in told
    assert "for keys of worker 1, the share of dk is lost" in told


def seen_of(context, forward, backward):
    """What results of these faults would show."""
    model = context.model
    one = forward_pass(model, composed(model.right, forward))
    through = one.through
    delta = np.stack(
        [through[a, h, i].reshape(model.heads, model.workers, -1)[h, a, i]
         for a, h, i in np.ndindex(one.lse.shape)]
    ).reshape(one.lse.shape)  # fmt: skip
    matrices = backward_pass(model, composed(model.right, backward), one, one.lse, through)
    return Seen(one.weights, one.lse, delta, through, *matrices)


PAIRS = {
    "forward": [
        (("", "the causal mask hides each query's own position (key < query)"), ("", "lse is in base 2")),
        (("", "the running o is not rescaled when the maximum rises (l is)"), ("in head 1", "all scores are 0")),
        (("", "the row sums (not o) are made as if tiles of 5 queries and 3 keys that should be masked in part are not masked"),
         ("", "between tiles of 3 keys within a block, the running o is not rescaled when the maximum rises (l is)")),
        (("from step 1 on", "values are those of the previous step's visitor"),
         ("", "the two weights are swapped in a merge of normalised o (lse is correct)")),
    ],
    "backward": [
        (("", "lse is multiplied by ln 2"), ("in step 1", "the share of dq is lost")),
        (("", "dk is added to that of key head h mod Hkv"), ("", "the product for dv takes dS in place of p")),
        (("", "delta is taken with the two halves of a block exchanged"), ("from step 1 on", "dq is negated")),
        (("", "dy is taken as in the layout striped"), ("", "dk and dv are exchanged")),
        (("", "keys are those of the worker that computes"), ("in all but the last step", "the share of dq is lost")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "pair"),
    [
        pytest.param(phase, pair, marks=[pytest.mark.slow] if number else [])
        for phase, pairs in PAIRS.items()
        for number, pair in enumerate(pairs)
    ],
    ids=lambda x: x if isinstance(x, str) else x[0][1][:30],
)
def test_two_faults_of_one_pass_are_both_found(phase, pair):
    claims = dataclasses.replace(
        REFERENCES["float32"].capabilities, head_ratios=(2,), circulations=("kv",)
    )
    problem = problems_for(claims)[0][0]
    context = SearchContext(problem.pairs, problem.tolerance, evaluations=500_000)
    here = context.geometry
    faults = [fault_named(here, context.masks, (phase, words, where)) for where, words in pair]
    assert None not in faults
    with np.errstate(all="ignore"):
        seen = seen_of(context, *((faults, ()) if phase == "forward" else ((), faults)))
        found, choices = explain_forward(context, seen)
        if phase == "backward":
            assert found.whole and not found.faults
            found = explain_backward(context, seen, choices, True)
    assert found.whole and len(found.faults) == 2
    told = {fault.kind.words for one in (found.faults, *found.others) for fault in one}
    assert told & {words for _, words in pair}


class OnlyCausal:
    """A target that has a known bug in calls with a causal mask, and none in others."""

    def __init__(self, id):
        self.wrong, self.right = MutantTarget(MUTANTS[id], "float32"), REFERENCES["float32"]
        self.name = id
        self.capabilities = dataclasses.replace(
            self.right.capabilities,
            circulations=("kv",),
            layouts=("contiguous",),
            masks=("causal",),
        )

    def run(self, call):
        return (self.wrong if call.terms.get("causal") else self.right).run(call)


def test_an_explanation_says_where_right_results_show_that_it_does_not_hold():
    told = explain_target(OnlyCausal("dkv-not-home"))
    assert [one.right for one in told.runs][:2] == [False, True]
    assert BUGS["dkv-not-home"] in " ".join(told.sentences)
    wrong = "kv", "backwards", "scale"
    causal = ", ".join(f"readout/causal-contiguous-{one}" for one in wrong)
    where = f"{causal} and readout/batches-contiguous, but not in readout/full-contiguous-kv"
    assert f"This holds in {where}, whose results are right." in told.sentences


def test_other_explanations_that_right_results_refute_are_not_told():
    """Blocks of other workers are right without a mask, so they are not dropped in general: their mask is wrong."""
    told = explain_target(OnlyCausal("last-step-dropped"))
    assert [one.right for one in told.runs][:2] == [False, True] and told.conclusion.faults
    for faults in (told.sentences, told.alternatives):
        assert not any("not computed" in one for one in faults)


def test_a_list_of_pairs_accounts_only_for_problems_with_the_same_list():
    def listing(problem, pairs):
        place = f"for the pairs of queries {pairs} with key 4 (slots of a worker, from 0)"
        fault = Named("forward", "the scores are not computed", place, 1.0, "")
        return Reading(problem, False, PassRead(((fault,),)))

    same = combined([listing("causal", "0-7"), listing("full", "0-7")])
    assert same.explained == ("causal", "full")
    other = combined([listing("causal", "4-7"), listing("full", "0-7")])
    assert other.explained == ("causal",)


def test_what_another_problem_shows_besides_the_told_faults_is_said():
    def reading(problem, *kinds):
        faults = tuple(Named("forward", kind, "", 1.0, "") for kind in kinds)
        return Reading(problem, False, PassRead((faults,)), evaluations=1)

    in_causal = reading("causal", "o is 0")
    beside = combined([in_causal, reading("zigzag", "o is 0", "lse is in base 2")])
    assert (beside.explained, beside.others) == (("causal",), ("zigzag",))
    assert beside.sentences == (
        "In the forward pass, o is 0.",
        "zigzag, also: In the forward pass, lse is in base 2.",
    )
    in_its_place = [reading(x, "lse is in base 2") for x in ("zigzag", "striped")]
    found = combined([in_causal, reading("full", "o is 0"), *in_its_place])
    assert (found.explained, found.others) == (("causal", "full"), ("zigzag", "striped"))
    assert found.sentences[1] == "zigzag, striped: In the forward pass, lse is in base 2."
    fewer = combined([reading("causal", "o is 0", "dq is 0"), reading("full", "dq is 0")])
    assert fewer.sentences[-1] == "full, only: In the forward pass, dq is 0."
    swapped = combined(
        [reading("causal", "o is 0", "dq is 0"), reading("full", "dq is 0", "o is 0")]
    )
    assert swapped.explained == ("causal", "full") and len(swapped.sentences) == 2
    window = reading("window", "the causal mask is ignored and the window kept", "o is 0")
    masked = combined([reading("causal", "no pair is masked"), window])
    assert masked.sentences[-1] == "window, also: In the forward pass, o is 0."
    in_both = [
        reading("causal", "no pair is masked"),
        reading("window", window.forward.sets[0][0].kind),
    ]
    ignored = "In the forward pass, the causal mask is ignored (a window is kept)."
    assert combined(in_both).sentences == (ignored,) and len(combined(in_both).explained) == 2
    many = [reading(f"problem {n}", f"fault {n}") for n in range(4)]
    assert combined([in_causal, *many]).others == ("problem 0", "problem 1", "problem 2")


def test_a_fault_is_told_without_what_a_later_fault_changes_again():
    problem = problems_for(REFERENCES["float32"].capabilities)[0][0]
    ring = RingOf(given_of(problem.proof, 0))
    both, delta = (
        Named("backward", words, place, 1.0, "")
        for words, place in (
            ("lse and delta are those of the visitor", ""),
            ("delta is that of the next worker", "from step 1 on"),
        )
    )
    assert ring.reduced((both, delta), 0).kind == "lse is that of the visitor"
    assert ring.reduced((both, delta), 1) is delta and ring.reduced((both,), 0) is both


def test_what_no_fault_explains_is_said_to_be_unexplained_and_where():
    def spoil(result):
        result.dk[2][0, 0, 3] += np.linspace(0.1, 0.7, result.dk[2].shape[3], dtype=np.float32)

    target = Claiming(REFERENCES["float32"], spoil, circulations=("kv",))
    one = read_first(target)
    assert not one.right and not one.explained and sentences(one) == []
    assert "not explained: dS as used for dk in the blocks" in unexplained([one])[0]


def test_numbers_that_only_the_unread_columns_hold_are_compared_too():
    def spoil(result):
        result.dv[0][..., 0] += 0.5  # the columns of one-hot values, where dy has no entry

    target = Claiming(REFERENCES["float32"], spoil, circulations=("kv",))
    one = read_first(target)
    assert not one.right and not one.explained
    assert "The readout does not see why" in unexplained([one])[0]


@pytest.mark.parametrize("explained", [True, False])
def test_the_search_in_a_problem_gets_what_explained_problems_left_and_ends_after_three_that_it_did_not_explain(
    monkeypatch, explained
):
    shares = []
    fault = Named("forward", "the block is not computed", "", 1.0, "")
    part = PassRead(((fault,),)) if explained else PassRead(left="everything")

    def reading_at_once(problem, outputs, earlier, share, stored):
        shares.append(share * EVALUATIONS)
        return Reading(problem.id, False, part, evaluations=6_000)

    monkeypatch.setattr(read_problems, "read_proven", reading_at_once)
    monkeypatch.setattr(explain, "known_bug", lambda *given: None)  # seconds
    target = Claiming(REFERENCES["float32"], circulations=("kv",))
    count = len(explain_target(target).runs)
    left = [read_problems.EVALUATIONS_OF_ALL - 6_000 * n for n in range(count)]
    most = [
        min(x, read_problems.EVALUATIONS_OF_ONE) if explained or not n else 0
        for n, x in enumerate(left)
    ]
    assert most[0] == read_problems.EVALUATIONS_OF_ONE and count > 4
    expected = [max(x, read_problems.LEAST) for x in most]
    if not explained:
        expected[read_problems.MOST_UNEXPLAINED :] = [0.0] * (
            count - read_problems.MOST_UNEXPLAINED
        )
    assert shares == pytest.approx(expected)


def test_a_thorough_search_is_three_times_as_long_and_offered_where_it_may_help(monkeypatch):
    shares = []

    def unexplained_at_once(problem, outputs, earlier, share, stored):
        shares.append(share * EVALUATIONS)
        return Reading(problem.id, False, PassRead(left="everything"))

    monkeypatch.setattr(read_problems, "read_proven", unexplained_at_once)
    monkeypatch.setattr(explain, "known_bug", lambda *given: None)  # seconds
    usual, thorough = (
        ringspec("explain", f"{WRONG}:target", "--timeout", "0", *more).output
        for more in ((), ("--thorough",))
    )
    assert max(shares) == pytest.approx(read_problems.THOROUGH * read_problems.EVALUATIONS_OF_ONE)
    assert "A longer search, with --thorough, may explain more." in usual
    assert "--thorough" not in thorough


def test_an_explanation_does_not_depend_on_the_speed_of_the_machine(monkeypatch):
    """Neither the search nor the order of problems looks at a clock."""

    def forbidden():
        raise AssertionError("a clock was read")

    target = MutantTarget(MUTANTS["dkv-not-home"], "float32")
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, forbidden)
    problem = problems_for(target.capabilities)[0][0]
    first, again = (run_problem(target, problem).reading for _ in range(2))
    assert first == again and first.explained and first.evaluations > 0


def test_the_searches_end_when_they_have_made_their_evaluations(monkeypatch):
    target = MutantTarget(MUTANTS["other-workers-unwritten"], "float32")
    problem = problems_for(target.capabilities)[0][0]
    made, original, share = [], forward_search.explain, 0.01
    outputs = run_problem(target, problem, share=share).outputs

    def counted(model, *given, **more):
        before = model.evaluations
        found = original(model, *given, **more)
        made.append(model.evaluations - before)
        return found

    for module in (forward_search, backward_search):
        monkeypatch.setattr(module, "explain", counted)
    read_proven(problem, outputs, share=share)
    # One kind of fault is tried to its end before the count is compared.
    most = share * EVALUATIONS * forward_search.OF_FORWARD
    assert len(made) > 1 and all(0 < x < most + 1_000 for x in made)


def test_a_known_bug_has_its_name_and_link_beside_the_sentence():
    printed = ringspec("explain", f"{WRONG}:target", "--timeout", "0")
    assert printed.exit_code == 1
    page = (ROOT / "docs" / "conform" / "readout.md").read_text(encoding="utf-8")
    shown = page.split("target\n", 1)[1].split("```")[0]
    assert printed.output.split()[2:] == shown.split()[2:]
    text = " ".join(printed.output.split())
    assert "dk and dv are added to those of the next step's visitor." in text
    assert "every number in 11 of the 11 problems that failed" in text and "[dkv-not-home]" in text


def test_a_right_target_ends_with_0_and_json_says_what_was_read():
    printed = ringspec("explain", "reference-float32", "--timeout", "0", "--json")
    found = json.loads(printed.output)
    assert printed.exit_code == 0 and found["right"] and not found["sentences"]
    assert {one["right"] for one in found["problems"]} == {True}


def test_a_right_target_is_told_which_of_its_claims_no_problem_reads():
    """A layout of the caller's own could be ignored in every problem."""
    claims = {"layouts": ("contiguous", "table"), "masks": ("causal",), "features": ("positions",)}
    claims |= {"circulations": ("kv",), "directions": (1,)}
    told = explain_target(Claiming(REFERENCES["float32"], **claims))
    left = {"layouts": ("table",), "features": ("positions",)}
    assert told.right and told.claimed_not_read == left
    text = " ".join(lines("mine", "mine", told))
    assert "claimed, but not read: layouts table; features positions. ringspec check tests" in text


def doubled(shards):
    for x in shards:
        x[...] *= 2


class Ignoring:
    """The float32 reference, which ignores a direction or a scale that a call gives."""

    name = "ignoring"

    def __init__(self, **changes):
        self.changes = changes
        self.capabilities = dataclasses.replace(
            REFERENCES["float32"].capabilities,
            circulations=("kv",),
            layouts=("contiguous", "zigzag"),
            masks=("causal",),
            features=("scale",),
            directions=(1, -1),
        )

    def run(self, call):
        wrong = "causal" in call.terms and self.changes["given"](call)
        result = REFERENCES["float32"].run(call)
        if wrong:
            self.changes["change"](call, result)
        return result


def test_gradients_of_an_o_that_is_not_finite_are_not_read():
    def without_first_tile(row, last_row, key, last_key):
        return last_key > last_row

    found = explain_target(TiledRing(rows=3, keys=5, is_skipped=without_first_tile))
    assert not found.conclusion.explained
    assert found.sentences[-1].endswith(
        "the gradients, which the backward pass computes from these results."
    )
    assert not any("delta is summed" in sentence for sentence in found.sentences)


class WithChangedKeys(Ignoring):
    """The float32 reference with changed keys: whole numbers, which the keys of readouts are, stay as they are."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed

    def run(self, call):
        k = tuple(self.changed(load(x)).astype(x.dtype) for x in call.tensors["k"])
        return REFERENCES["float32"].run(
            dataclasses.replace(call, tensors={**call.tensors, "k": k})
        )


def test_a_target_that_is_wrong_for_random_inputs_alone_is_not_called_right():
    found = explain_target(WithChangedKeys(lambda k: np.round(16 * k) / 16))
    assert found.wrong == len(found.runs) and not found.right
    assert "those of random inputs are not" in found.sentences[0] and not found.searched


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_inputs_that_are_rounded_to_16_bits_are_named_although_readouts_hold_whole_numbers():
    found = explain_target(WithChangedKeys(bfloat16))
    assert found.sentences == (
        "In the forward pass, keys are rounded to bfloat16.",
        "In the backward pass, keys are rounded to bfloat16.",
    )
    assert len(found.conclusion.explained) == found.wrong == len(found.runs)


class OfFloat16(Ignoring):
    """A reference that claims float16 alone, whose dq is rounded to bfloat16 first."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed
        self.capabilities = dataclasses.replace(
            REFERENCES["fp16"].capabilities, formats=("float16",)
        )

    def run(self, call):
        found = REFERENCES["fp16"].run(call)
        dq = [self.changed(load(x)).astype(np.float16) for x in found.dq]
        return dataclasses.replace(found, dq=dq)


def test_results_of_float16_that_have_the_bits_of_bfloat16_are_named():
    found = explain_target(OfFloat16(bfloat16))
    assert found.sentences == ("In the backward pass, dq is rounded to bfloat16, not to float16.",)
    assert found.known is not None and found.known["id"] == "dtype-hard-coded"
    assert explain_target(OfFloat16(np.float16)).right


@pytest.mark.parametrize("passes", [("forward",), ("backward",), ("forward", "backward")])
def test_keys_and_values_that_are_rounded_when_they_are_sent_are_said_to_be_rounded_from_step_1_on(
    passes,
):
    layouts = ("contiguous", "zigzag", "striped")
    found = explain_target(TiledRing(layouts, sent=bfloat16, passes=passes, directions=(1, -1)))
    assert found.sentences == tuple(
        f"In the {one} pass, from step 1 on, keys and values are rounded to bfloat16."
        for one in passes
    )
    assert len(found.conclusion.explained) == found.wrong == len(found.runs)


def test_faults_that_need_direction_minus_1_are_read_and_said_to_need_it():
    told = explain_target(
        Ignoring(given=lambda call: call.direction == -1, change=lambda call, r: doubled(r.dk))
    )
    assert told.wrong == 2 == len(told.conclusion.explained)
    assert told.sentences[0] == "In the backward pass, dk is too large by a factor of 2."
    assert told.sentences[1].startswith("This holds with direction -1 alone")


def test_a_scale_that_is_given_and_ignored_is_named():
    def given(call):
        return not np.isclose(call.terms["scale"], call.worker("q", 0).shape[3] ** -0.5)

    def usual(call, result):
        usual = call.worker("q", 0).shape[3] ** -0.5
        terms = dict(call.terms) | {"scale": usual}
        right = REFERENCES["float32"].run(dataclasses.replace(call, terms=terms))
        for name in ("o", "lse", "dq", "dk", "dv"):
            getattr(result, name)[:] = getattr(right, name)

    told = explain_target(Ignoring(given=given, change=usual))
    assert told.wrong == 1 == len(told.conclusion.explained)
    assert any("1/sqrt(D), not by the scale that is given" in one for one in told.sentences)


def test_problems_that_nothing_explains_are_listed():
    one, other = problems_for(REFERENCES["float32"].capabilities)[0][:2]
    failed = [
        explain.Run(x, Reading(x.id, False, PassRead(left="everything"))) for x in (one, other)
    ]
    found = explain.Explained(tuple(failed), Conclusion(stated=("A fault.",), explained=(one.id,)))
    assert found.as_dict()["unexplained"] == [other.id]
    assert f"Not explained: {other.id.removeprefix('readout/')}." in lines("name", "name", found)


def test_a_target_without_a_ring_that_can_be_read_is_told_why():
    small = Claiming(REFERENCES["float32"], head_dims=(8,))
    told = explain_target(small)
    assert not told.right and not told.runs and "head dimension" in told.unread
    assert problems_for(Capabilities(operations=("merge",)))[1].startswith(
        "it needs a forward pass"
    )


def test_a_target_that_raises_has_no_results_and_the_reason():
    class Raising:
        name, capabilities = "raising", REFERENCES["float32"].capabilities

        def run(self, call):
            raise RuntimeError("out of luck")

    told = explain_target(Raising())
    assert told.wrong == len(told.runs) > 0 and "no results (error:" in told.sentences[0]


def test_the_numbers_of_the_problems_never_change():
    problem = problems_for(Capabilities())[0][0]
    assert problem.id == "readout/causal-contiguous-kv"
    assert problem.pairs.g.ravel()[:8].tolist() == FIRST


def same(one, other):
    """Whether two values are equal, arrays by their elements; a repr would leave out most of a large array."""
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize(
    ("layout", "window", "circulation"),
    [
        ("contiguous", None, "q"),
        pytest.param("contiguous", None, "kv", marks=pytest.mark.slow),
        pytest.param("zigzag", (5, 0), "kv", marks=pytest.mark.slow),
        pytest.param("zigzag", (5, 0), "q", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_found_by_its_words_in_every_geometry(layout, window, circulation):
    def geometry_of(workers, slots=8, heads=4, causal=True):
        position = geometry.positions(layout, workers, slots)
        return geometry.Geometry(
            workers, circulation, 1, layout, position, causal, window, heads, 2, 0.125, "queries"
        )

    here = geometry_of(3)
    masks = masks_of(here)
    four, two, short = geometry_of(4), geometry_of(2), geometry_of(3, slots=4, heads=2)
    for phase in ("forward", "backward"):
        kinds = kinds_of(here, phase, masks)
        every = kinds_of(here, phase, masks, False)
        for words in (kinds, every):
            assert len({kind.words for kind in words}) == len(words)
        # A kind may name several sizes of tiles with the same effect here; the first is that of one kind.
        kinds = [dataclasses.replace(x, words=of_first_sizes(x.words)) for x in kinds]
        assert {kind.words for kind in kinds} <= {kind.words for kind in every}
        places = block_places(here, phase, masks[0].pattern)
        places = [joined(x, part) for x in places for part in part_places(here)]
        assert len({place.words for place in places}) == len(places)
        by_kind = {kind.words: kind for kind in every}
        of_four = {kind.words for kind in kinds_of(four, phase, masks_of(four), False)}
        for kind in kinds:
            assert same(by_kind[kind.words], kind) and kind.words in of_four
        for number, place in enumerate(places[::41]):
            fault = Fault(
                phase, next(kind for kind in kinds[number:] if not kind.of_workers), place
            )
            found = fault_named(here, masks, fault.name)
            assert found.name == fault.name and same(found.kind, fault.kind)
            assert np.array_equal(found.place.table, place.table)
            there = fault_named(four, masks_of(four), fault.name)
            assert there.name == fault.name
        previous, following = [
            found
            for owner in (
                "previous step's visitor",
                "next step's visitor",
                "next worker",
                "previous worker",
            )
            if (
                found := fault_named(
                    two, masks_of(two), (phase, f"values are those of the {owner}", "")
                )
            )
        ]
        assert previous.name != following.name
        assert same(previous.kind.changes, following.kind.changes)
        assert fault_named(short, masks_of(short), (phase, kinds[0].words, "in head 3")) is None
        assert fault_named(here, masks, (phase, "values are lost", "")) is None
        assert fault_named(here, masks, (phase, kinds[0].words, "on worker 9")) is None
        assert (
            fault_named(here, masks, (phase, kinds[0].words, f"{LISTED} (0, 1), (2, 1)"))
            is not None
        )


FIRST = [-0.5, -1.5, 0.625, -0.5, -0.875, -1.5, -0.5, 1.25]


def test_the_words_of_a_kind_are_made_by_the_same_function_in_every_ring():
    """``EveryKind.named`` asks only the function that another ring has shown to make a kind."""
    makers = defaultdict(set)
    for problem in problems_for(REFERENCES["float32"].capabilities)[0][::4]:
        geometry = problem.pairs.geometry
        for phase in ("forward", "backward"):
            for part in every_kind(geometry, phase).parts:
                for kind in part:
                    makers[phase, kind.words].add(part.name)
    assert len(makers) > 5000
    assert all(len(names) == 1 for names in makers.values())


def test_scores_without_the_scale_are_found_among_single_faults():
    """They leave weights that count as 0 beside larger ones, which do not speak against them."""
    target = MutantTarget(MUTANTS["scale-missing"], "float32")
    reading = run_problem(target, problems_for(target.capabilities)[0][0]).reading
    assert [fault.kind for fault in reading.forward.sets[0]] == [
        "scores are not multiplied by the scale"
    ]
    assert reading.evaluations < 3_000  # 8,800 if they are found only among sets of two


@pytest.mark.parametrize(
    ("seen", "ours", "same"),
    [
        ([2e-3, 1e-9, 0.0], [0.2, 1e-7, 0.0], True),
        ([2e-3, 0.0, 0.0], [0.2, 0.1, 0.0], False),
        ([1e-9, 1e-9, 0.0], [0.2, 0.2, 0.0], False),
        ([2e-3, 1e-3, 0.0], [0.2, 0.2, 0.0], False),
        ([2e-3, 1e-3, 1e-3], [0.2, 0.1, 0.0], False),
        ([2e-3, 0.0, 0.0], [0.2, 1e-4, 0.0], True),
        ([np.nan, 1e-3, 0.0], [0.2, 0.1, 0.0], False),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], True),
    ],
)
def test_weights_agree_up_to_a_factor_if_it_also_makes_those_small_that_are_0(seen, ours, same):
    assert ratio_steady(np.array(seen), np.array(ours), 1e-3) == same


def test_gradients_are_replayed_only_if_the_forward_pass_fits(monkeypatch):
    target = MutantTarget(MUTANTS["dkv-not-home"], "float32")
    problem = problems_for(target.capabilities)[0][0]
    outputs = run_problem(target, problem).outputs[1]

    def forbidden(self, first):
        raise AssertionError("a backward pass was computed")

    monkeypatch.setattr(RingOfFaults, "backward_pass", forbidden)
    wrong = Conclusion((Named("forward", "scores are not multiplied by the scale", "", 1.0, ""),))
    assert not gives(wrong, problem.proof, outputs).fits
    with pytest.raises(AssertionError, match="a backward pass"):
        gives(Conclusion(), problem.proof, outputs)
