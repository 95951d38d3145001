"""Diagnoses: known bugs are named, unknown ones are not, and places are told."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.cases.noise import noise_call
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose import candidates as suspects
from ringspec.conformance.diagnose.candidates import Suspect, View, standardised
from ringspec.conformance.diagnose.localise import localise
from ringspec.conformance.diagnose.match import by_coarse_distance, diagnose
from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget, run_mutant
from ringspec.conformance.diagnose.mutants.variants import USUAL, Way
from ringspec.conformance.diagnose.summary import Diagnoser, kind_of, most_likely, must_fail
from ringspec.conformance.judge.noise_inputs import geometry_of, in_order, question_of
from ringspec.conformance.report.lines import read_record
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import case_line
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.call import outputs_of
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.declared import base_recipe
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import store
from ringspec.render.failures import failure

RIGHT = REFERENCES["bf16"]
SAMPLE = ("stale-keys", "dkv-not-home", "block-local-delta", "positions-not-sharded")
# The tests below name ring-direction, log2-lse and a wrong merge once more, in other forms.
MORE = (
    "ring-direction", "log2-lse", "dy-ignored", "merge-averages", "diagonal-inclusive", "half-of-diagonal", "scale-twice-in-dk", "delta-missing", "buffer-reuse",
    "values-one-step-late", "lse-returned-in-base-2",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    return {case.id: case for case in run_cases("core")}


@pytest.mark.parametrize(
    "id", [*SAMPLE, *(pytest.param(id, marks=pytest.mark.slow) for id in MORE)]
)
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_known_bug_is_named_with_its_links(cases, id, recipe):
    record = run_case(
        MutantTarget(MUTANTS[id], recipe), cases["ring/zigzag-causal-w4"], Diagnoser()
    )
    found = record.diagnosis
    assert id in (found["id"], *found["alike"]), found
    assert found["links"] == list(MUTANTS[found["id"]].links)
    assert found["distance"] < 3 and found["right_distance"] > 2 * found["distance"]


@pytest.mark.parametrize("id", ["stale-keys", "dkv-not-home"])
def test_suspects_come_in_order_of_the_distance_of_all_results(id):
    """``stale-keys`` is wrong in both passes, ``dkv-not-home`` in the backward pass alone."""
    call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    result = MutantTarget(MUTANTS[id], "bf16").run(call)
    got = {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}
    view = View(REFERENCES["bf16"].capabilities, call, got)
    suspects = [Suspect(one) for one in MUTANTS.values() if one.applies(call)]
    found = [one.mutant.id for one in by_coarse_distance([view], suspects)]
    distances = [view.coarse(one) for one in suspects]
    assert found == [suspects[n].mutant.id for n in np.argsort(distances, kind="stable")]
    assert found[0] == id
    # What the order saves rests on this: the forward pass contributes what it does to the whole.
    for one in suspects:
        alone, both = view.forward.of(one), view.of(one)
        assert all(np.array_equal(alone[x], both[x], equal_nan=True) for x in alone), one.key


@pytest.mark.parametrize("id", ["stale-keys", "dkv-not-home", "block-local-delta"])
def test_the_same_bugs_are_named_if_mutants_far_from_the_results_are_not_examined(monkeypatch, id):
    call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    result = MutantTarget(MUTANTS[id], "bf16").run(call)
    got = {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}
    runs = []
    run = View.run
    monkeypatch.setattr(View, "run", lambda *given: (runs.append(given), run(*given))[1])
    found, counts = [], []
    for far in ("always", "if none is near", "never"):
        runs.clear()
        found.append(diagnose(RIGHT.capabilities, [call], [got], far=far))
        counts.append(len(runs))
    assert [one.named.id for one in found] == [id, id, id]
    alike = [[x.id for x in one.alike] for one in found]
    assert alike[0] == alike[1] == alike[2]
    assert counts[2] <= counts[1] < counts[0]


def test_a_result_of_another_shape_is_not_compared_and_the_others_are():
    """All other results are right, so the rounding bugs are compared element by element, too."""
    call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    right = RIGHT.run(call)
    got = {name: getattr(right, name) for name in ("o", "lse", "dq", "dk", "dv")}
    got["lse"] = [x[..., :-1] for x in got["lse"]]
    found = diagnose(RIGHT.capabilities, [call], [got], variants=False)
    assert found is not None and found.named is None


def test_if_no_bug_fits_the_nearest_is_told_if_far_mutants_may_be_examined():
    call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    right = RIGHT.run(call)
    got = {name: [x * x.dtype.type(3) for x in getattr(right, name)] for name in ("o", "dq")}
    found = [
        diagnose(RIGHT.capabilities, [call], [got], variants=False, far=far)
        for far in ("always", "if none is near", "never")
    ]
    assert found[0].named is None
    assert found[0].runner_up is not None
    assert found[0] == found[1]
    assert found[2].named is None
    assert found[2].runner_up is None


def test_what_no_mutant_gives_is_no_known_bug_and_is_located(cases):
    class Wrong:
        name, capabilities = "wrong", RIGHT.capabilities

        def run(self, call):
            result = RIGHT.run(call)
            if "backward" in call.passes:
                dq = [np.array(x) for x in result.dq]
                dq[2][:, 1, 1::2] = -dq[2][:, 1, 1::2] * dq[2].dtype.type(0.75)
                result = dataclasses.replace(result, dq=dq)
            return result

    record = run_case(Wrong(), cases["ring/zigzag-causal-w4"], Diagnoser())
    found = record.diagnosis
    assert found["id"] is None and found["title"] == "no known bug"
    assert found["where"][0] == "wrong: dq; right: o, lse, dk, dv"
    assert "head 1 of 2; worker 2 of 4" in found["where"][1]
    assert "no known bug" in record_text(record)


def test_the_right_program_fits_and_no_bug_is_named():
    call = noise_call("right", "bf16", 3, "zigzag", "causal", tokens=24, head_dim=8)
    outputs = outputs_of(RIGHT.run(call), call, RIGHT.capabilities)
    found = diagnose(RIGHT.capabilities, [call], [outputs])
    assert found.right.fits and found.named is None


def dealt(results):
    """The results of three workers, in the layout contiguous."""
    return {name: tuple(np.split(x, 3, axis=2)) for name, x in results.items()}


@pytest.mark.parametrize("change", ["missing", "twice"])
def test_a_block_that_counts_wrongly_is_told_with_its_step(change):
    call = noise_call("block", "bf16", 3, tokens=24, head_dim=8)
    question, geometry = question_of(call), geometry_of(call)
    outputs = outputs_of(RIGHT.run(call), call, RIGHT.capabilities)
    got = in_order(call, outputs)
    keys = geometry.owner_k == 0
    p, dy = question.attention.p[..., keys], question.attention.dy
    share = (p.swapaxes(2, 3)[..., geometry.owner_q == 1] @ dy[:, :, geometry.owner_q == 1]).sum(
        axis=1, keepdims=True
    )
    got["dv"][:, :, keys] += share if change == "twice" else -share
    lines = localise(RIGHT.capabilities, call, dealt(got))
    words = {"missing": "is missing from", "twice": "is counted twice in"}[change]
    assert f"the block of queries of worker 1 (step 1) {words} dv of worker 0" in lines


@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        ("dq", 2.0, "is counted twice in"),
        ("dq", 0.0, "is missing from"),
        ("o", 0.0, "is missing from"),
    ],
)
def test_a_factor_is_not_told_as_a_block_where_the_block_is_all_of_the_result(name, factor, words):
    """Causal, contiguous: worker 0's queries see its own keys alone."""
    call = noise_call("factor", "bf16", 3, "contiguous", "causal", tokens=24, head_dim=4)
    got = {name: question_of(call).truth[name] * factor}
    lines = [x for x in localise(RIGHT.capabilities, call, dealt(got)) if words in x]
    also = {2.0: ", or a factor 1/2 is missing", 0.0: ", or the whole result is missing"}[factor]
    assert any(f"{words} {name} of worker 0{also}" in line for line in lines)
    assert all(also in line for line in lines)


def test_a_run_says_what_most_of_its_diagnoses_say(cases):
    target = MutantTarget(MUTANTS["stale-keys"], "bf16")
    chosen = [cases[id] for id in ("ring/contiguous-causal-w4", "ring/contiguous-w3")]
    summary = run(target, chosen, diagnose=Diagnoser())
    found = most_likely(summary.records)
    assert found["id"] == "stale-keys" and found["count"] == found["of"] == 2
    assert found["links"][0].endswith("huggingface/diffusers/issues/14265")
    one = next(record for record in summary.records if record.diagnosis)
    assert read_record(case_line(one), "line").diagnosis == one.diagnosis
    shown = failure(case_line(one), {"target": {"spec": "x"}}, True)
    assert "keys of step 0" in shown.diagnosis.title


def test_few_explained_failures_are_no_verdict():
    named = {"id": "stale-keys", "title": "t", "alike": []}
    unknown = {"id": None, "title": "no known bug"}
    records = [
        Record(str(n), "mismatch", diagnosis=one) for n, one in enumerate([named] + 4 * [unknown])
    ]
    assert most_likely(records)["id"] is None
    assert most_likely(records[:2])["id"] == "stale-keys"
    assert most_likely([Record("a", "pass")]) is None


def test_a_run_diagnoses_no_more_cases_than_its_budget():
    diagnose_few = Diagnoser()
    diagnose_few.taken["ring"] = 8
    call = noise_call("budget", "bf16", 2, tokens=16, head_dim=8)
    case = dataclasses.replace(run_cases("core")[0], id="ring/any")
    assert kind_of(case.id) == "ring"
    assert diagnose_few(RIGHT.capabilities, case, [call], [{}]) is None


class Disguised:
    """A mutant in a guise, in a way of going round, with tiles of its own."""

    def __init__(self, id, n=None, way=USUAL, recipe="bf16"):
        self.program = MUTANTS[id] if n is None else MUTANTS[id].guises[n]
        self.name, self.capabilities, self.way = id, REFERENCES[recipe].capabilities, way

    def run(self, call):
        recipe = base_recipe(self.capabilities.recipe, call.formats["inputs"]).replace(
            tile_q=6, tile_k=5
        )
        results = run_mutant(self.program, call, recipe, self.way)
        due = due_of(call)
        return Result(**{name: [store(x, due[name].format) for x in results[name]] for name in due})


# Bug, guise, way of the kernel, a case.
DISGUISES = [
    ("last-step-dropped", 1, USUAL, "ring/contiguous-w3"),
    ("ring-direction-of-keys", 0, USUAL, "ring/contiguous-causal-w4"),
    ("plus-inf-lse-of-empty", 0, Way(skips=True, first_as_is=True), "ring/striped-causal-w3"),
    pytest.param(
        "sinks-of-first-head", 0, USUAL, "ring/several-sinks-striped-w4", marks=pytest.mark.slow
    ),
    ("merge-weights-exchanged", 0, Way(first_as_is=True, tree=True), "ring/contiguous-w4-batches"),
    ("dq-overwritten", None, Way(skips=True), "ring/contiguous-causal-w4"),
    pytest.param(
        "last-step-alone",
        None,
        Way(skips=True),
        "ring/contiguous-causal-w4",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("id", "n", "way", "case"), DISGUISES)
@pytest.mark.parametrize("recipe", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_known_bug_is_named_in_another_form_and_the_form_is_told(cases, id, n, way, case, recipe):
    record = run_case(Disguised(id, n, way, recipe), cases[case], Diagnoser())
    found = record.diagnosis
    assert found["id"] == id, found
    if n is not None:
        assert MUTANTS[id].guises[n].words in found["forms"][id]
    assert f"in this variant: {found['forms'][id]}" in found["text"]


def test_what_is_spoilt_is_alike_but_an_empty_row_is_not():
    nan, inf, one = np.nan, np.inf, np.ones(4)
    got = np.array([nan, inf, -inf, -inf])
    z = standardised(got, np.array([inf, nan, -inf, nan]), one)
    assert z[:3].tolist() == [0, 0, 0] and z[3] > 100
    assert (standardised(got, np.zeros(4), one) > 100).all()


def test_rounding_is_named_by_its_errors_whatever_the_order_of_the_merge():
    """Results truncated, with parts normalised: the noise of lse is not the recipe's, and that of o is."""
    call = noise_call("size", "bf16", 4, tokens=64, head_dim=16)
    for id, expected in (("truncated-results", "truncated-results"), (None, None)):
        target = Disguised(id or "dtype-hard-coded", way=Way(normalised=True))
        outputs = outputs_of(target.run(call), call, target.capabilities)
        found = diagnose(target.capabilities, [call], [outputs])
        assert found.right.fits
        assert (found.named.id if found.named else None) == expected
        assert all(one.id != "" for one in found.alike)
        if expected:
            assert found.right.distance == 1 and found.named.distance < 0.5
            assert "it explains" in found.how_sure()
        else:
            assert "they differ from the correct results by rounding only" in found.lines()[0]


def diagnosed_record(case, id, *alike, **more):
    about = {"id": id, "title": id or "no known bug", "alike": list(alike)}
    return Record(case, "mismatch", diagnosis=about | more)


def test_a_name_from_few_cases_does_not_stand_against_the_case_that_it_must_fail():
    id = "causal-as-empty-band"
    known = [Record(case, "pass") for case in ("x", "y")]
    because = {"must_fail": {id: ["x", "y"]}}
    one = diagnosed_record("a", id, **because)
    assert most_likely([one])["id"] == id
    refuted = most_likely([one, *known])
    assert refuted["id"] is None
    [also] = refuted["also"]
    assert (also["id"], also["count"], also["refuted_by"]) == (id, 1, ["x", "y"])
    failed = [Record(record.id, "mismatch") for record in known]
    assert most_likely([one, *failed])["id"] == id
    assert most_likely([one, failed[0], known[1]])["id"] == id
    three = [diagnosed_record(case, id, **because) for case in "abc"]
    assert most_likely([*three, *known])["id"] == id
    unseen = diagnosed_record("a", id, must_fail={id: []})
    assert most_likely([unseen, *known])["id"] == id


def test_where_a_name_is_refuted_a_bug_that_is_possible_everywhere_takes_its_place():
    id, other = "no-maximum", "running-max-of-masked-block"
    known, because = [Record("x", "pass")], {"must_fail": {id: ["x"]}}
    found = most_likely([diagnosed_record("a", id, other, **because), *known])
    assert found["id"] == other and found["title"] == MUTANTS[other].title
    assert found["links"] == list(MUTANTS[other].links)
    both = [diagnosed_record("a", id, other, **because), diagnosed_record("b", None)]
    assert most_likely([*both, *known])["id"] is None


def test_a_kernel_with_tiles_smaller_than_a_block_is_diagnosed(cases):
    recipe = {"bfloat16": {"base": "bf16", "tile_k": 3}}
    target = MutantTarget(MUTANTS["scale-twice-in-dk"], "bf16")
    target.capabilities = dataclasses.replace(target.capabilities, recipe=recipe)
    record = run_case(target, cases["ring/bias-of-keys-w3"], Diagnoser())
    assert record.diagnosis["id"] == "scale-twice-in-dk"
    assert "not compared" not in record.diagnosis["text"]


def raising(broken):
    def run(program, *given):
        if getattr(program, "id", None) in broken:
            raise IndexError("a fault of the mutant")
        return run_mutant(program, *given)

    return run


def test_a_mutant_that_raises_is_left_out_and_noted(cases, monkeypatch):
    monkeypatch.setattr(suspects, "run_mutant", raising({"dkv-not-home"}))
    target = MutantTarget(MUTANTS["stale-keys"], "bf16")
    record = run_case(target, cases["ring/zigzag-causal-w4"], Diagnoser())
    assert record.diagnosis["id"] == "stale-keys"
    told = "not compared, because of an error in ringspec: dkv-not-home (IndexError: a fault of the mutant)"
    assert told in record.diagnosis["text"]
    assert read_record(case_line(record), "a line").diagnosis["text"] == record.diagnosis["text"]


def test_a_diagnosis_that_fails_is_noted_and_the_run_goes_on(cases, monkeypatch):
    def broken(*given):
        raise IndexError("a fault of ours")

    monkeypatch.setattr(suspects, "run_right", broken)
    chosen = [cases[id] for id in ("ring/zigzag-causal-w4", "ring/bias-of-keys-w3")]
    found = run(MutantTarget(MUTANTS["stale-keys"], "bf16"), chosen, diagnose=Diagnoser())
    assert [record.outcome for record in found.records] == ["mismatch"] * 2
    for record in found.records:
        assert (
            "the diagnosis failed because of an error in ringspec (IndexError"
            in record.diagnosis["text"]
        )
    assert most_likely(found.records)["id"] is None


def test_a_name_of_one_case_stays_in_the_verdict_of_the_run():
    records = [diagnosed_record("a", "log2-lse"), *(diagnosed_record(x, None) for x in "bcde")]
    found = most_likely(records)
    assert found["id"] is None
    assert [(one["id"], one["count"]) for one in found["also"]] == [("log2-lse", 1)]
    records = [
        diagnosed_record("a", "log2-lse"),
        *(diagnosed_record(x, "dlse-sign") for x in "bcd"),
    ]
    found = most_likely(records)
    assert found["id"] == "dlse-sign" and [one["id"] for one in found["also"]] == ["log2-lse"]


class OnlyWhere:
    """A mutant on some calls, the right program on all others."""

    def __init__(self, id, where, **claims):
        self.wrong, self.where, self.name = MutantTarget(MUTANTS[id], "bf16"), where, id
        self.capabilities = dataclasses.replace(RIGHT.capabilities, **claims)

    def run(self, call):
        return (self.wrong if self.where(call) else RIGHT).run(call)


def test_a_bug_of_the_q_ring_alone_keeps_its_name_where_the_kv_ring_passes(cases):
    id = "last-step-dropped"
    target = OnlyWhere(id, lambda call: call.circulation == "q")
    chosen = [cases[x] for x in ("ring/bias-q-ring-w3", *set(MUTANTS[id].kills.values()))]
    summary = run(target, chosen, diagnose=Diagnoser())
    assert {record.outcome for record in summary.records} == {"pass", "mismatch"}
    assert most_likely(summary.records)["id"] == id


def test_only_what_the_target_claims_and_the_bug_changes_can_refute_a_name():
    call, log2 = (
        noise_call("refuted", "bf16", 2, tokens=16, head_dim=8),
        Suspect(MUTANTS["log2-lse"]),
    )
    known = set(MUTANTS["log2-lse"].kills.values())
    claims = RIGHT.capabilities
    assert set(must_fail(claims, [call], log2)) == known
    assert must_fail(dataclasses.replace(claims, circulations=("q",)), [call], log2) == []
    assert must_fail(claims, [dataclasses.replace(call, circulation="q")], log2) == []
    rebased = Suspect(MUTANTS["lse-rebased-twice"])  # changes lse alone
    assert must_fail(claims, [call], rebased)
    assert must_fail(dataclasses.replace(claims, lse="hidden"), [call], rebased) == []


def test_of_two_names_for_the_same_numbers_the_one_that_supposes_no_mask_is_preferred(cases):
    target = MutantTarget(MUTANTS["ring-direction-of-keys"], "bf16")
    record = run_case(target, cases["ring/contiguous-w3"], Diagnoser())
    assert record.diagnosis["id"] == "ring-direction"
    assert record.diagnosis["alike"] == ["ring-direction-of-keys"]
    record = run_case(target, cases["ring/contiguous-causal-w3"], Diagnoser())
    assert record.diagnosis["id"] == "ring-direction-of-keys"


def test_base_2_weights_of_o_are_named_where_lse_is_hidden(cases):
    """Only o is merged with base-2 lse; the backward is right."""

    class Weights(OnlyWhere):
        def run(self, call):
            forward = [one for one in MUTANTS["log2-lse"].guises if one.words.startswith("only o")]
            results = run_mutant(
                forward[0], call, base_recipe(self.capabilities.recipe, "bfloat16")
            )
            due = due_of(call)
            return Result(
                **{n: [store(x, due[n].format) for x in results[n]] for n in due if n != "lse"}
            )

    target = Weights("log2-lse", None, lse="hidden")
    record = run_case(target, cases["ring/contiguous-causal-w4"], Diagnoser())
    assert record.diagnosis["id"] == "log2-lse"
    assert "only o" in record.diagnosis["forms"]["log2-lse"]


def test_bugs_of_the_independent_ring_are_mapped_to_known_bugs():
    from independent.names import SAME

    assert len(SAME) >= 80
    assert {id for ids in SAME.values() for id in ids} <= set(MUTANTS)
