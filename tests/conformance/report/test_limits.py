"""What a run could not have seen: limits of noise cases and of bounds, in reports and in words."""

import dataclasses
import io
import json

import numpy as np
import pytest
from benchmarks.confirm_limits import planted, problem_of
from click.testing import CliRunner
from conformance.report.reports import TARGET, needs

from ringspec.cli import main
from ringspec.cli.commands import check_run
from ringspec.conformance.cases import noise as noise_cases
from ringspec.conformance.cases import profiles
from ringspec.conformance.cases import sharp as larger_cases
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.judge.bounds import limit_of
from ringspec.conformance.report.junit import junit
from ringspec.conformance.report.limits import FormatLimits, Limit, limits_of
from ringspec.conformance.report.limits_text import figure, limit_lines
from ringspec.conformance.report.records import Finding, Record
from ringspec.conformance.report.report import (
    Report,
    ReportWriter,
    make_header,
    read_report,
    report_from,
    report_lines,
)
from ringspec.conformance.run import sharp
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.power import power_of
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.errors import FileFormatError, OptionError
from ringspec.render import page

ID = "noise/causal-contiguous-w1-bf16"
NOISE_CASES = {case.id: case for case in noise_cases.cases()}
NEVER = """
from ringspec.conformance.target.capabilities import Capabilities

class target:
    name = "never"
    capabilities = Capabilities(("ring-forward",), workers=(2,), axes="SHD", lse="base2")

    def run(call):
        raise SystemExit("it was run")
"""


def seen(id="noise/a", inputs="bfloat16", declared=True, **kinds):
    """A passing noise case with limits of o."""
    noise = {"recipe": "bf16", "declared": declared, "limits": {"o": kinds}}
    return Record(id, "pass", needs(inputs=inputs), noise=noise)


def bounded(id, tensor, limit, inputs="bfloat16", kind="ok", outcome="pass"):
    finding = Finding(tensor, 0, kind, limit=limit)
    return Record(id, outcome, needs(inputs=inputs), findings=(finding,))


@pytest.fixture(scope="module")
def judged():
    """The record of one noise case of a correct program."""
    return run_case(REFERENCES["bf16"], NOISE_CASES[ID])


def test_a_passing_noise_case_has_limits_of_every_tensor(judged):
    found = judged.noise["limits"]
    assert list(found) == ["o", "lse", "dq", "dk", "dv"]
    for name in ("o", "dq", "dk", "dv"):
        assert 5e-5 < found[name]["factor"] < 2e-3 and 5e-5 < found[name]["scale"] < 1e-3
        assert 0.005 < found[name]["bias"] < 0.3 and 0 < found[name].get("share", 1) <= 1
    assert set(found["lse"]) == {"scale", "shift"} and found["lse"]["shift"] < 1e-5


@pytest.mark.parametrize("declared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_errors_at_their_limit_are_found_and_smaller_ones_pass(declared):
    rng = np.random.default_rng(0)
    given = problem_of(7, "bf16", 64, declared)
    right = given.judged(given.wide)
    assert right.passed
    for name, kind in (("o", "factor"), ("lse", "shift"), ("dv", "factor")):
        limit = right.noise["limits"][name][kind]
        for at in (1.0, 0.2 if declared else 0.1):
            wrong = planted(given, "bf16", name, kind, at * limit, rng)
            assert given.judged(wrong).passed is (at < 1), (name, kind, at)
    assert ("share" in right.noise["limits"]["o"]) is declared


def test_a_failing_result_has_no_limits():
    given = problem_of(7, "bf16", 64, True)
    wrong = given.judged({**given.wide, "o": [1.01 * x for x in given.wide["o"]]})
    assert not wrong.passed and wrong.noise["limits"] == {}


@pytest.mark.parametrize("name", ["o", "lse"])
def test_the_limit_of_a_bound_is_where_the_first_element_fails(name):
    want = np.array([[[1.0, -4.0, 0.0, np.inf]]])
    got, bound = want + np.array([0.1, 0.0, 0.0, 0.0]), np.full(want.shape, 0.4)
    real = np.array([True, True, True, True])
    expected = {"o": 0.1, "lse": 0.4}
    got = np.where(np.isinf(want), want, got)
    assert limit_of(name, got, want, bound, real) == pytest.approx(expected[name])
    assert limit_of(name, got, want, np.zeros(want.shape), real) is None
    only_first = np.array([True, False, False, False])
    assert limit_of(name, got, want, bound, only_first) == pytest.approx(0.5)


def test_the_least_limit_of_the_passing_cases_counts():
    records = [
        seen("noise/a", factor=2e-4, bias=0.1),
        seen("noise/b", factor=1e-4),
        bounded("ring/c", "o", 5e-3),
        bounded("ring/d", "lse", 1e-5),
        bounded("ring/e", "dq", 1e-2, "float64"),
    ]
    bf16, float64 = limits_of(records)
    assert (bf16.format, bf16.recipe, bf16.declared) == ("bfloat16", "bf16", True)
    assert bf16.found["o"]["factor"] == Limit(1e-4, "noise/b", "noise")
    assert bf16.found["lse"]["shift"] == Limit(1e-5, "ring/d", "bounds")
    assert bf16.size("o", "bias") == 0.1 and bf16.size("dq", "factor") is None
    assert (float64.recipe, float64.size("dq", "factor")) == (None, 1e-2)


def test_a_failure_leaves_no_limits_and_an_expected_one_none_of_its_tensors():
    passing = [seen(factor=1e-4), bounded("ring/a", "dq", 1e-2)]
    for outcome in ("mismatch", "crash", "not run", "unexpected pass"):
        assert limits_of([*passing, Record("ring/b", outcome)]) == ()
    known = bounded("ring/b", "o", None, kind="beyond bound", outcome="expected failure")
    (one,) = limits_of([*passing, known])
    assert list(one.found) == ["dq"]
    crash = Record("ring/b", "expected failure", needs(inputs="bfloat16"))
    assert limits_of([*passing, crash]) == ()
    assert limits_of([Record("ring/a", "not claimed")]) == ()


def written(records):
    stream = io.StringIO()
    header = make_header(TARGET, spec="mine.py:target", profile="core")
    writer = ReportWriter(stream, header)
    for record in records:
        writer(record)
    footer = writer.finish(True, limits=limits_of(records))
    return stream.getvalue().encode(), Report(header, tuple(records), footer)


def test_the_footer_has_the_limits_and_a_report_read_from_disk_the_same(judged):
    data, made = written([judged, bounded("ring/a", "o", 1e-2, "float32")])
    read = report_from(data, "memory")
    assert limits_of(read.records) == limits_of(made.records)
    assert read.footer["limits"]["power"] == 0.999
    assert [one["format"] for one in read.footer["limits"]["formats"]] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    "change",
    [
        {"limits": {"o": {"factor": -1.0}}},
        {"limits": {"o": {"factor": "NaN"}}},
        {"limits": {"o": {"factor": [1]}}},
        {"limits": {"o": {"size": 1.0}}},
        {"limits": {"<b>": {"factor": 1.0}}},
        {"limits": {"o": 1}},
        {"limits": []},
        {"declared": 1},
        {"recipe": None},
        {"limits": {"o": {"factor": 2e-4}}},  # not those of the footer
    ],
)
def test_hostile_limits_are_refused(change):
    data, _ = written([seen(factor=1e-4)])
    lines = [json.loads(line) for line in data.splitlines()]
    lines[1]["noise"] |= change
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with pytest.raises(FileFormatError):
        report_from(text.encode(), "memory")


def test_a_report_of_an_earlier_version_has_no_limits():
    data, _ = written([seen(factor=1e-4)])
    lines = [json.loads(line) for line in data.splitlines()]
    del lines[1]["noise"]["limits"], lines[2]["limits"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    assert limits_of(report_from(text.encode(), "memory").records) == ()


def test_the_text_is_within_80_columns_and_says_what_a_number_means(judged):
    records = [judged, *(bounded(f"ring/{n}", "dq", 1e-16, n) for n in ("float16", "float64"))]
    records.append(dataclasses.replace(judged, id="b", needs=needs(inputs="float32")))
    lines = limit_lines(limits_of(records))
    assert max(map(len, lines)) <= 80 and len(lines) <= 12
    assert lines[0].startswith("not seen by this run")
    assert lines[1].split() == "inputs scale o dq dk dv lse bias wrong".split()
    size = figure(100 * judged.noise["limits"]["o"]["factor"])
    assert f"whose o is too large by less than {size} % may pass" in "\n".join(lines)
    assert "float64*" in lines[5] and "  * not tested by noise cases" in lines[-1]
    assert limit_lines(()) == []


def test_a_kernel_without_a_recipe_is_marked():
    text = "\n".join(limit_lines(limits_of([seen(declared=False, factor=1e-4)])))
    assert "bfloat16+ 1.0e-4" in text and "+ no recipe is declared" in text


def test_lse_alone_has_a_table_too():
    limits = FormatLimits("float32", found={"lse": {"shift": Limit(1e-6, "a", "bounds")}})
    assert "+1.0e-6" in "\n".join(limit_lines([limits]))


def test_the_page_and_junit_show_the_table(judged):
    _, made = written([judged])
    size = figure(judged.noise["limits"]["o"]["factor"])
    text = page(report_lines(made))
    assert "Not seen by this run" in text and f">{size}<" in text
    assert 'name="not seen"' in junit(made) and size in junit(made)
    _, failed = written([judged, Record("ring/a", "mismatch")])
    assert "Not seen" not in page(report_lines(failed)) and "not seen" not in junit(failed)


@pytest.mark.slow
def test_smoke_has_the_limits_of_bounds():
    summary = run(REFERENCES["float32"], run_cases("smoke"))
    one = next(one for one in limits_of(summary.records) if one.format == "float32")
    assert one.recipe is None
    assert {limit.by for kinds in one.found.values() for limit in kinds.values()} == {"bounds"}
    assert 1e-7 < one.size("o", "factor") < 1e-3


@pytest.mark.slow
def test_power_shows_the_table_of_a_correct_program_without_running_the_target(tmp_path):
    claims = Capabilities(("ring-forward",), workers=(2,), axes="SHD", lse="base2")
    file = tmp_path / "mine.py"
    file.write_text(NEVER)
    result = CliRunner().invoke(main, ["power", f"{file}:target", "--profile", "smoke"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("not seen by profile smoke")
    assert "float32* " in result.stdout and "dq" not in result.stdout
    (one,) = power_of(claims, run_cases("smoke"))
    assert f"less than {figure(100 * one.size('o', 'factor'))} %" in result.stdout
    result = CliRunner().invoke(main, ["power", "--recipe", "float23"])
    assert result.exit_code == 2 and "float32" in result.stderr


@pytest.mark.slow
def test_power_is_plain_data_too_and_noise_cases_decide(monkeypatch):
    monkeypatch.setattr(profiles.noise, "cases", lambda: iter([NOISE_CASES[ID]]))
    result = CliRunner().invoke(main, ["power", "--recipe", "bf16", "--profile", "noise", "--json"])
    data = json.loads(result.stdout)
    (one,) = data["formats"]
    assert data["power"] == 0.999 and one["recipe"] == "bf16" and one["declared"]
    assert one["tensors"]["o"]["factor"]["case"] == ID


def test_larger_noise_cases_have_fixed_ids_and_their_own_profile():
    cases = run_cases("sharp")
    assert [case.id for case in cases[:3]] == [
        f"noise/causal-zigzag-w4-bf16-{size}" for size in ("n512-h8", "n512-h32", "n1024-h32")
    ]
    core = {case.id for case in run_cases("core")}
    assert not core & {case.id for case in cases}
    assert {case.id.rsplit("-n", 1)[0] for case in cases} <= core
    call = cases[0].make(REFERENCES["bf16"].capabilities)[0]
    assert call.worker("q", 0).shape == (1, 8, 128, 64)


@pytest.fixture
def larger(monkeypatch):
    """Larger cases that are small, and a usual one that takes a second."""
    monkeypatch.setattr(larger_cases, "SIZES", ((512, 8), (512, 32), (1024, 32)))
    made = Record(ID, "pass", noise={"limits": {"o": {"factor": 2e-4}}}, seconds=1.0)
    monkeypatch.setattr(sharp, "run_case", lambda target, case: made)
    return lambda seconds: sharp.chosen(REFERENCES["bf16"], "mine", seconds)


@pytest.mark.parametrize(
    ("seconds", "size"), [(1, None), (10, "n512-h8"), (30, "n512-h32"), (1000, "n1024-h32")]
)
def test_the_largest_case_that_fits_is_added(larger, seconds, size):
    found = larger(seconds)
    if size is None:
        assert found.case is None and "about 7 s" in found.words
    else:
        assert found.case.id == f"noise/causal-zigzag-w4-bf16-{size}"
        assert found.case.id in found.words and " s, detects an error of about " in found.words


def test_no_larger_case_where_none_is_claimed_or_the_usual_one_fails(larger, monkeypatch):
    float32 = Capabilities(formats=("float32",))
    target = type("Mine", (), {"capabilities": float32})
    assert "claims no larger noise case" in sharp.chosen(target, "mine", 60).words
    with pytest.raises(OptionError, match="dir:calls"):
        sharp.chosen(REFERENCES["bf16"], "dir:calls", 60)
    failed = Record(ID, "mismatch", noise={"limits": {}})
    monkeypatch.setattr(sharp, "run_case", lambda target, case: failed)
    assert larger(60).case is None


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_check_runs_the_larger_case_also_in_processes(monkeypatch, tmp_path, jobs):
    case = next(
        case for case in run_cases("sharp") if case.id.endswith("contiguous-w4-bf16-n512-h8")
    )
    monkeypatch.setattr(check_run, "larger_case", lambda *given: sharp.Sharp(case, "sharp: one"))
    report = tmp_path / "report.jsonl"
    words = ["check", "reference-bf16", "--profile", "smoke", "--only", "ring/*causal-w2"]
    options = ["--sharp", "60", "--jobs", str(jobs), "--report", str(report)]
    result = CliRunner().invoke(main, [*words, *options])
    assert result.exit_code == 0, result.output
    assert "sharp: one" in result.stderr
    *_, last = read_report(report).records
    assert last.id == case.id and last.noise["limits"]["o"]["factor"] < 1.7e-4
