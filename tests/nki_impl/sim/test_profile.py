"""The report of a run: counts are facts, the roofline is counts over published rates."""

from __future__ import annotations

import json

import pytest

from nki_impl.__main__ import main
from nki_impl.sim.machine.counters import Counters, Row
from nki_impl.sim.machine.profile import RATES, roofline
from nki_impl.workloads import Shape, find_workload

TOY = '''
import numpy as np
from nki_impl.lang import ncc, nisa, nki, nl


@nki.jit
def toy(x):
    """Send x to the successor and add it there."""
    shape = x.shape
    send = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm, name="send")
    receive = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm, name="receive")
    out = nl.ndarray(shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=send, src=x)
    if nl.program_ndim() != 0:
        nisa.core_barrier(send, (0, 1))
    ncc.collective_permute_implicit([[send]], [[receive]], ncc.ReplicaGroup(()))
    a, b = nl.ndarray(shape, x.dtype), nl.ndarray(shape, x.dtype)
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=receive)
    nisa.tensor_tensor(a, a, b, nl.add)
    nisa.dma_copy(dst=out, src=a)
    return out


def workload(shape):
    x = np.ones((shape.dim, shape.rows), np.float32)
    return [{"x": x} for rank in range(shape.world)]
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_kernel.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_kernel:toy"


@pytest.mark.parametrize("lnc", [1, 2])
def test_profile_counts_what_the_kernel_does(toy, capsys, lnc):
    size = 64 * 32 * 4
    arguments = ["profile", toy, "--world=3", "--dim=64", "--rows=32", f"--lnc={lnc}", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    rank = report["rank"]
    assert rank["dma_bytes"] == lnc * 4 * size
    assert rank["collective_bytes"] == size
    assert rank["hops"] == 1
    assert rank["matmul_flops"] == 0
    assert rank["sbuf_high_bytes_per_partition"] == 2 * 32 * 4
    assert rank["psum_high_bytes_per_partition"] == 0
    assert report["shape"]["world"] == 3
    assert report["simulation"]["instructions"] == 3 * rank["instructions"]
    rows = {(row["engine"], row["operation"]): row for row in rank["operations"]}
    assert rows["vector", "tensor_tensor"]["elements"] == lnc * 64 * 32
    assert "estimate" in report["estimate"]["what"]
    for bound in report["estimate"]["bounds"]:
        assert bound["source"].startswith("https://awsdocs-neuron.readthedocs-hosted.com/")


def test_the_text_has_the_same_facts(toy, capsys):
    assert main(["profile", toy, "--world=2", "--dim=64", "--rows=32"]) == 0
    text = capsys.readouterr().out
    assert "collective_permute_implicit" in text
    assert "collective bytes 8192 in 1 hops" in text
    assert "an estimate for one trn2 core" in text
    assert "per second" in text


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no_such_kernel", "expected ring_attention_spmd_fwd, "),
        ("no.such:kernel", "No module named 'no'"),
        ("json:dumps", "workload"),
    ],
)
def test_an_unknown_kernel_is_refused_with_the_known_ones(name, match, capsys):
    assert main(["profile", name]) == 2
    assert match in capsys.readouterr().err


def test_the_roofline_divides_counts_by_published_rates():
    rows = (
        Row("dma", "dma_copy", 1, 10, 0, 4375),
        Row("gpsimd", "iota", 1, 10, 0, 0),
        Row("tensor", "nc_matmul", 2, 10, 79_000_000, 0),
    )
    found = roofline(Counters(rows, 4, 0, 0, 0))
    assert [bound.engine for bound in found.bounds] == ["tensor", "dma"]
    assert found.bounds[0].seconds == pytest.approx(1e-6)
    assert found.bounds[1].seconds == pytest.approx(1e-8)
    assert found.overlapped == found.bounds[0].seconds
    assert found.in_turn == pytest.approx(1.01e-6)
    assert found.unrated == ("gpsimd",)
    assert roofline(Counters(rows, 4, 0, 0, 0), lnc=2).overlapped == pytest.approx(5e-7)


def test_a_run_that_did_nothing_takes_no_time():
    found = roofline(Counters((), 0, 0, 0, 0))
    assert (found.overlapped, found.in_turn, found.unrated) == (0.0, 0.0, ())


def test_every_rate_says_where_it_is_published():
    for rate in RATES.values():
        assert rate.source.startswith("https://awsdocs-neuron.readthedocs-hosted.com/en/latest/")
        assert rate.says
        assert rate.per_second > 0


def test_workloads_draw_the_same_arguments_for_the_same_seed(toy):
    kernel, arguments = find_workload(toy, Shape(world=2, rows=8, dim=4))
    assert kernel.__name__ == "toy"
    assert len(arguments) == 2
