"""A failing case shrinks to the simplest call that fails in the same way."""

import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from conformance.wrong_targets import Wrong, window_per_block

from ringspec.cli import main
from ringspec.cli.commands import check_run
from ringspec.cli.views import check as check_text
from ringspec.cli.views.shrink import describe, lines
from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.cases.golden import is_asked
from ringspec.conformance.cases.model import Judgement
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.reading import Named
from ringspec.conformance.report.records import Record
from ringspec.conformance.reproduce import shrink as shrink_module
from ringspec.conformance.reproduce.explicit import case_of, explicit_of
from ringspec.conformance.reproduce.reductions import REDUCTIONS, cost
from ringspec.conformance.reproduce.shrink import results, shrink
from ringspec.conformance.run.load import load_target
from ringspec.conformance.target.protocol import TimedOut
from ringspec.errors import OptionError, RingspecError
from ringspec.vectors import open_set

WRONG_RING = "docs/examples/wrong_ring.py:target"
ZIGZAG = "ring/float32-zigzag-w4"
CORE = open_set("core")
# No readout fits into a head dimension of 4.
CLAIMS = {"formats": ("float32",), "head_dims": (1, 2, 3, 4)}


def case(id, profile="smoke"):
    return next(one for one in run_cases(profile) if one.id == id)


@pytest.fixture(scope="module")
def ring():
    return shrink(load_target(WRONG_RING), case(ZIGZAG))


def test_a_wrong_ring_shrinks_to_one_head_and_the_explanation_stays(ring):
    problem = ring.last.problem
    shape = problem.shape
    assert ring.finished and problem.workers <= 3 and shape.Sq <= 2 * problem.workers
    assert (shape.B, shape.H, shape.Hkv, shape.D, shape.Dv) == (1, 1, 1, 1, 1)
    assert "causal" not in problem.terms and problem.ring.layout == "contiguous"
    assert set(ring.last.tensors) <= {"dk", "dv"} == set(ring.first.tensors)
    [sentence] = ring.explanation
    assert sentence.endswith("dk and dv are added to those of the next step's visitor.")
    assert all(set(np.abs(x).ravel()) <= {0.0, 1.0} for x in problem.tensors.values())


def printed_inputs(text):
    """Inputs by name, a matrix for each worker, as the text has them."""
    found, name = {}, None
    for line in text:
        if match := re.match(r"  (\w+)? +worker \d", line):
            name = match[1] or name
            found.setdefault(name, [])
            found[name] += [json.loads(x) for x in re.findall(r"worker \d+ (\[\[.*?\]\])", line)]
    return found


def test_the_text_has_every_input_and_the_call_built_from_it_fails_again(ring):
    text = lines(ring)
    assert len(text) <= 20 and all(len(line) <= 80 for line in text if line.startswith("  "))
    assert text[0].startswith("shrunk from 4 workers x 4 tokens, 2 heads, D = 4, causal, zigzag")
    assert text[1] == "to 2 workers x 1 token, 1 head, D = 1, float32"
    assert text[-1].startswith("explanation: In the backward pass")
    given = printed_inputs(text)
    assert set(given) == {"q", "k", "v", "dy"}
    call = dataclasses.replace(
        ring.last.call,
        tensors={
            name: tuple(np.array(x, np.float32)[None, None] for x in rows)
            for name, rows in given.items()
        },
    )
    again = results(load_target(WRONG_RING), call)
    p = np.exp(np.array(given["q"]).ravel()[:, None] * np.array(given["k"]).ravel())
    dv = (p / p.sum(axis=1, keepdims=True)).T @ np.array(given["dy"]).ravel()
    assert not np.allclose(np.ravel(again["dv"]), dv, atol=1e-3)
    assert np.allclose(np.ravel(again["dv"])[::-1], dv, atol=1e-5)  # each has its neighbour's


def test_replay_prints_it_after_the_report_and_json_has_the_call(ring, monkeypatch):
    arguments = ["replay", WRONG_RING, ZIGZAG, "--shrink", "--timeout", "0"]
    monkeypatch.setattr(check_run, "shrink_case", lambda *_: ring)  # each takes seconds
    monkeypatch.setattr(check_run, "Diagnoser", lambda: None)
    made = CliRunner().invoke(main, arguments)
    assert made.exit_code == 1, made.output
    report, _, shrunk = made.stdout.partition("passed 0 of 1 claimed, 0 not claimed\n\n")
    assert "dk of worker 0" in report and shrunk.startswith("shrunk from 4 workers x 4 tokens")
    made = CliRunner().invoke(main, [*arguments, "--json"])
    last = json.loads(made.stdout.splitlines()[-1])
    assert last["kind"] == "shrunk" and last["case"] == ZIGZAG and last["finished"]
    assert last["first"]["workers"] == 4 and last["last"]["workers"] == 2
    assert last["call"]["inputs"]["q"] == [[[[[1.0]]]], [[[[0.0]]]]]


@pytest.mark.parametrize(
    ("id", "end"), [("seeded/causal/13", "13 --shrink"), ("ring/window-w3", "window-w3")]
)
def test_the_command_that_repeats_a_seeded_failure_shrinks_it(id, end, capsys):
    header = {"target": {"spec": "mine.py:ring"}, "profile": "seeds"}
    check_text.show_record(Record(id, "mismatch"), SimpleNamespace(header=header), False)
    said = capsys.readouterr().out.rstrip()
    assert f"repeat it: ringspec replay mine.py:ring {id}" in said and said.endswith(end)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reference-float32", "ring/contiguous-w2"), "passes: nothing to shrink"),
        ((WRONG_RING, ZIGZAG, "ring/contiguous-w2"), "one id with --shrink"),
        (("dir:results", ZIGZAG), "stored results in results"),
        ((WRONG_RING, "merge/two-parts"), "does not claim (operation merge)"),
    ],
)
def test_what_cannot_be_shrunk_is_bad_input(words, said):
    made = CliRunner().invoke(main, ["replay", *words, "--shrink", "--timeout", "0"])
    assert made.exit_code == 2 and said in " ".join(made.stderr.split()), made.output


def test_a_failing_merge_cannot_be_shrunk():
    def answer(call, result):
        result.o = [-x for x in result.o]

    with pytest.raises(OptionError, match="merges partial results"):
        shrink(Wrong("float32", answer=answer), case("merge/two-parts"))


def raising(call, result):
    raise ValueError("no")


def test_a_target_that_raises_cannot_be_shrunk():
    with pytest.raises(OptionError, match="w2: error"):
        shrink(Wrong("float32", answer=raising), case("ring/contiguous-w2"))


def test_a_verdict_about_several_calls_cannot_be_shrunk():
    one = dataclasses.replace(
        case("ring/contiguous-w2"), judge=lambda *_: Judgement(False, message="unequal")
    )
    with pytest.raises(
        OptionError, match="the results of each single call are within their bounds"
    ):
        shrink(Wrong("float32"), one)


def test_a_fault_of_the_window_keeps_the_window():
    target = Wrong("float32", ask=window_per_block, **CLAIMS)
    found = shrink(target, case("edges/window-left/zigzag", "core"))
    assert "window" in found.last.problem.terms


def doubles_dv(call, result):
    result.dv = [2 * x for x in result.dv]


class SmallRaises(Wrong):
    """Wrong dv; an exception for fewer than three workers or two tokens."""

    def run(self, call):
        if call.workers < 3 or call.index_q.shape[1] < 2:
            raise ValueError("too small")
        return super().run(call)


def test_a_target_that_raises_for_small_shapes_ends_with_the_smallest_that_it_takes():
    found = shrink(SmallRaises("float32", answer=doubles_dv, **CLAIMS), case(ZIGZAG))
    assert found.finished and found.last.problem.workers == 3
    assert found.last.problem.shape.Sq == 6 and set(found.last.tensors) == {"dv"}


def test_no_call_is_made_after_the_time():
    found = shrink(load_target(WRONG_RING), case(ZIGZAG), seconds=0.0)
    assert not found.finished and found.trials == 0 and found.last is found.first
    assert any("the time ran out" in line for line in lines(found))


class SmallHangs(Wrong):
    """Wrong dv; no answer within the time limit for one worker."""

    timeout = 120.0
    limits = ()

    def run(self, call):
        self.limits += (self.timeout,)
        if call.workers == 1:
            raise TimedOut(f"no answer within {self.timeout} s")
        return super().run(call)


def test_the_time_limit_of_a_call_is_at_most_the_time_that_is_left():
    target = SmallHangs("float32", answer=doubles_dv, **CLAIMS)
    found = shrink(target, case(ZIGZAG), seconds=20.0)
    assert found.last.problem.workers == 2 and target.timeout == 120.0
    assert target.limits[:2] == (120.0, 120.0) and max(target.limits[2:]) <= 20.0


def test_the_backward_is_dropped_if_o_is_wrong():
    def answer(call, result):
        result.o = [2 * x for x in result.o]

    found = shrink(Wrong("float32", answer=answer, **CLAIMS), case(ZIGZAG))
    assert found.last.call.passes == ("forward",) and found.last.problem.workers == 1
    assert found.last.tensors == ("o",) and "dy" not in found.last.problem.tensors


def test_a_smaller_problem_with_another_wrong_tensor_is_not_accepted():
    """One worker gives a wrong o; more give a wrong dq."""

    def answer(call, result):
        if call.workers == 1:
            result.o = [x + 1 for x in result.o]
        else:
            result.dq = [2 * x for x in result.dq]

    found = shrink(Wrong("float32", answer=answer, **CLAIMS), case(ZIGZAG))
    assert found.last.problem.workers == 2 and set(found.last.tensors) == {"dq"}
    assert lines(found)[-1] == "the same tensors are wrong: dq"


def test_a_smaller_problem_without_the_explanation_is_not_accepted(monkeypatch):
    """The explanation holds for three workers and more only, the wrong dv for two as well."""
    fault = Named("backward", "dv is too large by a factor of 2", "", 1.0, "")
    with_three = lambda conclusion, calls, outputs: calls[0].workers >= 3  # noqa: E731
    monkeypatch.setattr(shrink_module, "explanation_for", lambda *_: Conclusion((fault,)))
    monkeypatch.setattr(shrink_module, "explains", with_three)
    found = shrink(Wrong("float32", answer=doubles_dv, **CLAIMS), case(ZIGZAG))
    assert found.last.problem.workers == 3
    assert (
        lines(found)[-1] == "explanation: In the backward pass, dv is too large by a factor of 2."
    )


CALLED = [one for one in CORE.ids if is_asked(CORE.case(one)) and not one.startswith("merge/")]


@pytest.mark.parametrize("id", [one for one in CALLED if CORE.case(one).storage == "full"])
def test_a_problem_with_explicit_numbers_has_the_same_call(id):
    call = call_of(CORE.case(id), CORE.tensors(id))
    problem = explicit_of(call)
    again = call_of(case_of(problem, id), {})
    assert again.tensors.keys() == call.tensors.keys() and again.terms == call.terms
    assert (again.operation, again.passes, again.layout) == (
        call.operation, call.passes, call.layout,
    )  # fmt: skip
    for name, shards in call.tensors.items():
        for x, y in zip(shards, again.tensors[name], strict=True):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name
    for name in ("index_q", "index_k", "position_q", "position_k"):
        x, y = getattr(call, name), getattr(again, name)
        assert (np.broadcast_to(x, np.broadcast_shapes(x.shape, y.shape)) == y).all(), name


@pytest.mark.parametrize("id", CALLED[::6])
def test_each_reduction_makes_problems_that_cost_less(id):
    claims = Wrong("float32").capabilities
    call = call_of(CORE.case(id), {})
    problem, made = explicit_of(call), 0
    for reduction in REDUCTIONS[:-1]:
        for _, smaller in reduction(problem, call, claims):
            try:
                case_of(smaller, id)
            except RingspecError:
                continue
            made += 1
            assert cost(smaller) < cost(problem), (reduction, describe(smaller))
    assert made
