"""DeepSpeed's Ulysses over the stand-in for flash-attn: a case with gradients passes, and the claims.

Needs torch and the package; see its requirements file.
"""

import tomllib
from pathlib import Path

import pytest

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import deepspeed_ulysses
from ringspec.errors import MissingPackageError

FORMS = ("bshd", "sbhd")


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_case_with_gradients_passes(form):
    try:
        target = deepspeed_ulysses.target(form, start_timeout=300.0, timeout=300.0)
    except MissingPackageError as error:
        pytest.skip(str(error))
    only = ("probe/gradient-pattern/causal-contiguous-w2-bf16",)
    try:
        summary = run(target, run_cases("core"), only=only)
    finally:
        target.close()
    assert [one.outcome for one in summary.records] == ["pass"], summary.records


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_divided_among_workers_and_each_form_has_an_entry_point(form):
    claims = deepspeed_ulysses.claims(form)
    assert claims.kv_heads_multiple == "workers" and claims.axes == form.upper()
    assert 1 not in claims.workers and claims.lse == "hidden"
    data = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    points = data["project"]["entry-points"]["ringspec.targets"]
    name = "deepspeed-ulysses" + ("" if form == "bshd" else "-sbhd")
    assert points[name] == f"{deepspeed_ulysses.__name__}:{form}"
