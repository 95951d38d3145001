"""The commands and snippets of "on your cluster and in CI" that run on a CPU."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.conformance.report.report import counts_of, read_report
from ringspec.conformance.run.expected import expected_from

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conform" / "cluster.md").read_text(encoding="utf-8")
NAIVE = ROOT / "docs" / "examples" / "naive_ring.py"
FILL = Path(__file__).parent / "adapters" / "programs" / "fill.py"


def program(*command, **keywords):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, **keywords
    )


def ringspec(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.torch
def test_under_torchrun_three_ranks_pass_what_they_claim(tmp_path):
    report = tmp_path / "report.jsonl"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    example = ROOT / "docs" / "conform" / "example_cluster.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = program(*launcher, example, "smoke", report, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    passed, claimed = re.search(r"passed (\d+) of (\d+) claimed", done.stdout).groups()
    assert passed == claimed and int(claimed) >= 5
    written = read_report(report)
    assert written.complete and written.header["capabilities"]["workers"] == [3]
    assert counts_of(written.records)["pass"] == int(passed)


@pytest.mark.torch
@pytest.mark.slow
def test_the_example_for_flex_attention_passes_what_it_claims(monkeypatch):
    monkeypatch.chdir(ROOT)
    done = ringspec("smoke", "docs/conform/example_flex.py:target")
    assert done.exit_code == 0, done.output


def test_calls_that_were_written_and_filled_elsewhere_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "import naive_ring, json; print(json.dumps(naive_ring.CLAIMS))"
    claims = program("-c", source, env=os.environ | {"PYTHONPATH": str(NAIVE.parent)}, input="")
    hello = {"kind": "hello", "name": "naive", "capabilities": json.loads(claims.stdout)}
    Path("target.json").write_text(json.dumps(hello))
    some = ("--only", "ring/zigzag-causal-*")
    written = ringspec(
        "cases", "write", "calls", "--profile", "smoke", "--claims", "target.json", *some
    )
    assert written.exit_code == 0, written.output
    assert program("-I", FILL, NAIVE, tmp_path / "calls").returncode == 0
    checked = ringspec("check", "dir:calls")
    assert checked.exit_code == 0 and "passed" in checked.output.splitlines()[-1]


def test_the_tables_of_the_page_are_read_by_the_programs_that_they_are_for():
    settings, expected = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert set(tomllib.loads(settings)["tool"]["ringspec"]) == {"target"}
    assert expected_from(expected.encode())["ring/zigzag-*"].count == 12
