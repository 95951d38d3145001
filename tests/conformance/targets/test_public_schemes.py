"""Public packages as targets of schemes: what each claims, and which cases are wrong.

The slow tests need torch and a package. Programs by_hand_*.py, without ringspec, confirm every failure: of yunchang's
USP in test_yunchang.py, of diffusers in test_diffusers.py, of xfuser in test_xfuser.py.
"""

import tomllib
from pathlib import Path

import pytest

from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import public_schemes
from ringspec.conformance.targets.public_schemes import TARGETS, claims
from ringspec.errors import MissingPackageError

MARKS = {
    "yunchang": pytest.mark.yunchang,
    "diffusers": pytest.mark.diffusers,
    "deepspeed": pytest.mark.deepspeed,
    "transformer": pytest.mark.transformer_engine,
    "xfuser": pytest.mark.xfuser,
}
ALL = {"o", "dq", "dk", "dv"}


def wrong_by_hand(name, case):
    """What is wrong in a case, as the programs by_hand_*.py show; diffusers' unified attention depends on the version."""
    needs = case.needs_of(claims(name))
    if name == "xfuser-long":
        return ALL if "window" in needs["masks"] else set()
    if not name.startswith("yunchang-usp"):
        return set()
    windowed, causal = "window" in needs["masks"], "causal" in needs["masks"]
    swapped = needs["mesh"] == "ulysses x ring" and not name.endswith("zigzag")
    return ALL if windowed or (causal and swapped) else set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=MARKS[x.partition("-")[0]]) for x in TARGETS]
)
def test_the_cases_of_a_target_are_wrong_only_where_a_program_without_ringspec_shows_it(name):
    if name == "diffusers-unified":
        pytest.skip("its gradients depend on the version: test_diffusers.py")
    try:
        target = public_schemes.target(name)
    except MissingPackageError as error:
        pytest.skip(str(error))
    chosen = [case for case in cases() if case.why_not(target.capabilities) is None]
    try:
        records = run(target, chosen).records
    finally:
        target.close()
    for case, record in zip(chosen, records, strict=True):
        wrong = {finding.tensor for finding in record.findings if finding.kind != "ok"}
        assert wrong == wrong_by_hand(name, case), (record.id, record.message)


def test_every_target_claims_several_cases_and_has_an_entry_point():
    project = Path(__file__).parents[3] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]["ringspec.targets"]
    for name in TARGETS:
        assert points[f"{name}-scheme"] == f"{public_schemes.__name__}:{name.replace('-', '_')}"
        claimed = sum(case.why_not(claims(name)) is None for case in cases())
        assert claimed >= (2 if name.endswith("thd") else 5), name
    with pytest.raises(AttributeError, match="no attribute p2p"):
        getattr(public_schemes, "p2p")  # noqa: B009


def test_a_target_claims_what_its_package_accepts_and_no_ring():
    for name in TARGETS:
        one = claims(name)
        assert not any(operation.startswith("ring") for operation in one.operations)
        assert "kv-replicas" not in one.features, name
        if name.startswith(("diffusers", "transformer")):
            assert "ulysses x ring" not in one.meshes
        if name.startswith("xfuser"):
            assert "ulysses x ring" not in one.meshes
            assert ("replicated-tokens" in one.features) == ("joint" in one.schemes)
        if name.startswith("diffusers"):
            assert one.masks == () and one.head_ratios == (1,)
        if name.startswith("transformer"):
            assert set(one.layouts) <= {"zigzag", "zigzag_padded"}
        assert ("padded-documents" in one.features) == name.endswith("-thd")
