"""tests/benchmarks/bench.py measures what it says, adds up, and refuses what it cannot use."""

import json

import pytest
from benchmarks import bench
from benchmarks.bench_dense import FLOPS, Setting
from benchmarks.bench_text import against, exponents

TINY = ["--part", "dense", "--part", "ring", "--lengths", "32", "--repeats", "1", "--quick"]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("benchmarks.bench_dense.PAUSE", 0.0)
    monkeypatch.setattr("benchmarks.bench_dense.MATRIX", 32)


def test_every_pass_is_measured_and_a_baseline_is_compared(tmp_path, capsys):
    here = tmp_path / "here.json"
    bench.main([*TINY, "--threads", "1", "-o", str(here)])
    document = json.loads(here.read_text())
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
    capsys.readouterr()
    bench.main([*TINY, "--threads", "1", "--baseline", str(here)])
    printed = capsys.readouterr().out
    assert "here / baseline:" in printed and printed.isascii()


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
    "words",
    [
        ["--part", "danse"],
        ["--lengths", "8,x"],
        ["--lengths", "2"],
        ["--threads", "0"],
        ["--repeats", "0"],
        ["-o", "no/such/folder/file.json"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_before_the_work(words, monkeypatch):
    monkeypatch.setattr(bench, "machine_lines", None)  # no work begins
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    assert ended.value.code == 2


@pytest.mark.slow
def test_memory_is_measured_in_a_separate_process(tmp_path):
    bench.main(["--part", "memory", "--lengths", "512", "-o", str(tmp_path / "here.json")])
    lines = json.loads((tmp_path / "here.json").read_text())["lines"]
    [memory] = [line for line in lines if line["part"] == "memory"]
    assert memory["length"] == 512 and memory["added MiB"] > 0
