"""A JAX function as a target: right ones pass, each kind of wrong one is named as that."""

from pathlib import Path

import pytest
from conformance.diagnose.named_faults import assert_named, each_fault
from refusals import refuses

from ringspec.conformance.adapters.jax_mesh import JaxTarget
from ringspec.conformance.cases import schemes
from ringspec.conformance.cases.golden import golden_case
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import SCHEME_OPERATIONS, Capabilities
from ringspec.errors import OptionError
from ringspec.vectors.sets.stored import open_set

pytestmark = pytest.mark.jax

HERE = Path(__file__).parent
FUNCTIONS = HERE / "jax_functions.py"
EXAMPLE = HERE.parents[2] / "docs" / "conform" / "example_jax.py"
FLOAT32 = "ring/float32-zigzag-w4"
CLAIMS = Capabilities(
    layouts=("contiguous", "zigzag"),
    features=("dlse",),
    formats=("float32", "float64", "bfloat16"),
)


def outcome_of(target, id):
    core = open_set("core")
    case = core.case(id)
    made = golden_case(case, lambda: core.tensors(id), lambda: core.tensors(id))
    return run(target, [made]).records[0]


@pytest.fixture
def target_of():
    made = []

    def make(name, place=FUNCTIONS, claims=CLAIMS, **settings):
        made.append(JaxTarget(f"{place}:{name}", claims, **settings))
        return made[-1]

    yield make
    for target in made:
        target.close()


def test_the_example_is_right_on_up_to_eight_workers(target_of):
    claims = Capabilities(
        layouts=("contiguous", "striped", "zigzag"),
        features=("dlse",),
        formats=("bfloat16", "float32", "float64"),
    )
    target = target_of("ring_attention", EXAMPLE, claims)
    for id in (
        "ring/float32-zigzag-w4",
        "attention/float64",
        "ring/dlse-w2",
        "ring/striped-causal-w3",
        "ring/contiguous-causal-w8",
    ):
        record = outcome_of(target, id)
        assert record.outcome == "pass", (id, record.message)


def test_float64_is_computed_in_64_bits_and_float32_in_32(target_of):
    target = target_of("right")
    for id in ("attention/float64", "attention/float32", "attention/float64"):
        record = outcome_of(target, id)
        assert record.outcome == "pass", (id, record.message)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("raises", "error", "no such kernel"),
        ("leaves", "exit", "exit status 3"),
        ("without_lse", "missing", "lse of worker 0 is missing"),
    ],
)
def test_a_wrong_function_is_named_as_what_it_is(target_of, name, outcome, words):
    record = outcome_of(target_of(name), FLOAT32)
    assert record.outcome == outcome, record.message
    assert words in record.message


FUNCTION = {
    "segfault": "crashes",
    "hang": "hangs",
    "print": "prints",
    "float16": "narrow",
    "wrong worker": "shifted",
    "mutate": "mutates",
    "NaN": "one_nan",
}


@each_fault
def test_each_fault_is_named_as_exactly_that(target_of, fault):
    target = target_of(FUNCTION[fault])
    if fault == "hang":
        target.timeout = 2.0
    record = outcome_of(target, FLOAT32)
    if fault == "mutate":  # a JAX array cannot be changed: trying is an exception
        assert record.outcome == "error" and "immutable" in record.message
    else:
        assert_named(record, fault)
    if fault == "NaN":
        assert "o of worker 1" in record.message


def test_what_a_function_prints_is_a_log_and_no_answer(target_of):
    target = target_of("prints")
    record = outcome_of(target, FLOAT32)
    assert record.outcome == "pass", record.message
    assert '{"kind": "result"}' in target.printed
    assert record.message.startswith("it printed:") and '{"kind": "result"}' in record.message


def test_after_a_crash_another_process_answers(target_of):
    target = target_of("crashes")
    assert outcome_of(target, FLOAT32).outcome == "crash"
    assert outcome_of(target, FLOAT32).outcome == "crash"


def test_more_workers_than_devices_are_refused(target_of):
    record = outcome_of(target_of("right", devices=1), FLOAT32)
    assert record.outcome == "refused"
    assert "4 workers, but there are 1 cpu devices" in record.message


def test_a_function_that_is_not_there_is_an_error_that_names_it(target_of):
    record = outcome_of(target_of("nowhere"), FLOAT32)
    assert record.outcome == "error"
    assert "nowhere" in record.message


def test_wrong_settings_are_refused_before_anything_starts():
    with refuses((OptionError, "unknown-name"), match="gpu"):
        JaxTarget("module:name", platform="gpus")
    with pytest.raises(OptionError, match="devices"):
        JaxTarget("module:name", devices=0)
    with pytest.raises(OptionError, match="interpreter"):
        JaxTarget("module:name", python="/no/such/python").command()


def test_schemes_have_meshes_with_named_axes(target_of):
    claims = Capabilities(
        operations=SCHEME_OPERATIONS, schemes="usp", layouts=("contiguous", "zigzag"),
        features="kv-replicas",
    )  # fmt: skip
    names = ("usp/ring-outer-causal-w4", "usp/ulysses-outer-zigzag-w4", "usp/ring-of-three-w6")
    chosen = [case for case in schemes.cases() if case.id in {f"scheme/{one}" for one in names}]
    assert run(target_of("usp", claims=claims), chosen).counts == {"pass": 3}
