"""`ringspec bench` measures what it says, adds up, and refuses what it cannot use."""

import json

import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.cli.bench_dense import FLOPS, Setting
from ringspec.cli.bench_text import against, exponents

TINY = [
    "bench",
    "--part",
    "dense",
    "--part",
    "ring",
    "--lengths",
    "32",
    "--repeats",
    "1",
    "--quick",
]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("ringspec.cli.bench_dense.PAUSE", 0.0)
    monkeypatch.setattr("ringspec.cli.bench_dense.MATRIX", 32)


def run(*arguments):
    return CliRunner().invoke(main, [str(x) for x in arguments])


def test_every_pass_is_measured_and_a_baseline_is_compared(tmp_path):
    done = run(*TINY, "--threads", 1, "--json", "-o", tmp_path / "here.json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document == json.loads((tmp_path / "here.json").read_text())
    dense = [line for line in document["lines"] if line["part"] == "dense"]
    rings = [line for line in document["lines"] if line["part"] == "ring"]
    assert {(x["pass"], x["dtype"], x["causal"]) for x in dense} == {
        (p, d, c) for p in FLOPS for d in ("float32", "float64") for c in (False, True)
    }
    assert {(x["pass"], x["workers"]) for x in rings} == {
        (p, w) for p in ("forward", "both") for w in (1, 4)
    }
    for line in dense + rings:
        assert 0 < line["seconds"] < 100 and line["share of bound"] > 0
    assert all(line["times products"] > 0 and line["times naive"] > 0 for line in dense)
    assert {x["in"] for x in document["exponents"]} == {"W"}
    again = run(*TINY, "--threads", 1, "--baseline", tmp_path / "here.json", "--fail-above", 1e-9)
    assert again.exit_code == 1 and "here / baseline:" in again.output
    assert again.output.isascii()


def test_exponents_and_ratios_add_up():
    lines = [
        {
            "part": "dense",
            "pass": "forward",
            "length": n,
            "seconds": 3e-9 * n**2,
            "share of bound": 0.5,
        }
        for n in (100, 200, 400)
    ]
    assert exponents(lines)[0]["exponent"] == pytest.approx(2.0)
    slower = [line | {"seconds": 1.0, "share of bound": 0.25} for line in lines]
    assert [x["ratio"] for x in against(slower, lines)] == [2.0, 2.0, 2.0]
    assert against([lines[0] | {"causal": True}], lines) == []


def test_visible_pairs_are_counted_for_the_bound():
    assert Setting("float64", 4, True, 1, 1, heads=2).pairs == 20
    assert Setting("float64", 4, False, 1, 1, heads=2).pairs == 32


@pytest.mark.parametrize(
    "arguments",
    [
        ["--part", "danse"],
        ["--lengths", "8,x"],
        ["--lengths", "2"],
        ["--threads", "0"],
        ["--repeats", "0", "--part", "core"],
        ["--fail-above", "1.1"],
        ["--baseline", "FILE"],
        ["-o", "no/such/folder/file.json"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_before_the_work(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("ringspec.cli.commands.bench.machine_lines", None)  # no work begins
    broken = tmp_path / "broken.json"
    broken.write_text('{"lines": [{"seconds": "1"}]}')
    done = run("bench", *(str(broken) if x == "FILE" else x for x in arguments))
    assert done.exit_code == 2 and "To mend it" in done.output


@pytest.mark.slow
def test_the_other_parts_run():
    parts = ("memory", "exact", "noise", "nki")
    done = run("bench", *(x for part in parts for x in ("--part", part)), "--quick", "--json")
    assert done.exit_code == 0, done.output
    lines = json.loads(done.output)["lines"]
    assert {line["part"] for line in lines} == {"machine", *parts}
    assert all(line["added MiB"] > 0 for line in lines if line["part"] == "memory")
