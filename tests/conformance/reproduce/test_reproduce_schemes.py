"""Failures of schemes as programs without ringspec: in NumPy and in PyTorch."""

from pathlib import Path

import pytest
from independent.cp_target import target as independent
from refusals import refuses

from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.reproduce.dense_text import check_known
from ringspec.conformance.reproduce.reproduce import reproduce
from ringspec.conformance.run.load import load_target
from ringspec.errors import OptionError

CASES = {case.id: case for case in cases()}
ULYSSES = Path(__file__).parents[3] / "docs" / "conform" / "example_ulysses.py"
# Gathered keys, masked as if they lay in the order of tokens.
GATHERED = """
import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities


def gathered(q, k, v, scale, position_q, position_k, heads_k, mesh, causal=False):
    keys, values = (np.concatenate([np.float64(one) for one in x], axis=2) for x in (k, v))
    columns = np.sort(np.ravel(position_k))
    results = {"o": [], "lse": []}
    for x, rows in zip(q, position_q[:, 0]):
        group = x.shape[1] // len(heads_k[0])
        s = scale * np.float64(x) @ np.repeat(keys, group, axis=1).swapaxes(2, 3)
        if causal:
            s = np.where(columns <= rows[:, None], s, -np.inf)
        lse = np.log(np.exp(s).sum(axis=3))
        o = np.exp(s - lse[..., None]) @ np.repeat(values, group, axis=1)
        results["o"].append(np.float32(o))
        results["lse"].append(np.float32(lse))
    return results


target = NumPyTarget(
    gathered,
    Capabilities(operations="context_parallel-forward", schemes="all_gather", layouts="zigzag"),
)
"""


def shown(spec, id, phrases):
    """The program of a failure; :func:`reproduce` has run it where ringspec cannot be imported."""
    target = load_target(spec)
    try:
        found = reproduce(target, spec, CASES[id], 20.0)
    finally:
        getattr(target, "close", lambda: None)()
    assert "WRONG: " in found.output and len(found.text.splitlines()) <= 120
    assert not any(
        "import ringspec" in line or "from ringspec" in line for line in found.text.splitlines()
    )
    for phrase in phrases:
        assert phrase in found.text
    return found


def test_a_failure_in_numpy_is_shown_without_ringspec(tmp_path):
    (tmp_path / "gathered.py").write_text(GATHERED)
    phrases = ("Attention split by all_gather over 2 ranks, mesh cp 2", "position_q", "heads_k")
    shown(f"{tmp_path / 'gathered.py'}:target", "scheme/all-gather/zigzag-causal-w3", phrases)


@pytest.mark.torch
def test_a_failure_in_torch_gets_a_device_mesh(tmp_path):
    text = ULYSSES.read_text()
    right = "x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)"
    assert right in text
    (tmp_path / "tiled.py").write_text(
        text.replace(right, "x.repeat(1, q.shape[1] // x.shape[1], 1, 1)")
    )
    phrases = ("init_device_mesh('cpu',",)
    found = shown(f"{tmp_path / 'tiled.py'}:target", "scheme/ulysses/gqa-w4", phrases)
    assert found.record.diagnosis["id"] == "scheme-kv-tiled"


@pytest.mark.parametrize("id,what", [
    ("joint/front-w4", "the scheme joint"),
    ("dcp/gqa-group-w4", "the scheme dcp"),
    ("dropout/ring-w3", "dropout_p"),
])  # fmt: skip
def test_what_a_program_cannot_show_is_refused(id, what):
    [call] = CASES[f"scheme/{id}"].make(independent().capabilities)
    with refuses(OptionError, match=what):
        check_known(call, ("o",))
