"""A reproducer: it needs no ringspec, fails where the target is wrong, passes where it is right, or is not written."""

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.cases.calls import call_of, expected_of
from ringspec.conformance.report.records import Finding
from ringspec.conformance.reproduce.dense_text import (
    RESULTS,
    TENSORS,
    TERMS,
    dense_lines,
    is_masked,
    visible_lines,
)
from ringspec.conformance.reproduce.explicit import Explicit
from ringspec.conformance.reproduce.literals import input_lines
from ringspec.conformance.reproduce.program import places_of, program, supported
from ringspec.conformance.reproduce.reproduce import confirmed
from ringspec.conformance.reproduce.shrink import tried
from ringspec.conformance.reproduce.standalone import copied, place_of, standalone
from ringspec.conformance.run.load import load_target
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.targets.reference import reference_float32
from ringspec.errors import OptionError
from ringspec.vectors import open_set
from ringspec.vectors.format.case import CaseFormats, Ring

WRONG_RING = Path(__file__).parents[3] / "docs" / "examples" / "wrong_ring.py"
CASE = "ring/float32-zigzag-w4"
CORE = open_set("core")


def reproduce(*words):
    return CliRunner().invoke(main, ["reproduce", *map(str, words)])


def run_alone(program, folder, *modules):
    """Run a program with the standard library and these installed modules, and nothing else."""
    shelf = folder / "shelf"
    shelf.mkdir(exist_ok=True)
    for name in ("numpy", "numpy.libs", *modules):
        place = Path(np.__file__).parents[1] / name
        if place.exists() and not (shelf / name).exists():
            (shelf / name).symlink_to(place)
    return subprocess.run(
        [sys.executable, "-S", str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(shelf)},
        cwd=folder,
        timeout=600,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The reproducer of the ring of the documentation, and the text beside it."""
    folder = tmp_path_factory.mktemp("made")
    result = reproduce(f"{WRONG_RING}:target", CASE, "-o", folder / "repro.py")
    assert result.exit_code == 0, result.output
    return folder / "repro.py"


def test_ringspec_cannot_be_imported_where_the_reproducer_is_tested(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(
        "import numpy\ntry:\n    import ringspec\nexcept ImportError:\n    print('none')\n"
    )
    assert run_alone(program, tmp_path).stdout == "none\n"


def test_the_reproducer_fails_without_ringspec_and_prints_the_two_numbers(made, tmp_path):
    done = run_alone(made, tmp_path)
    assert done.returncode == 1, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("WRONG: dv of worker 0, element [0, 0, 0, 0]: got 0.2689414")
    assert "dense float64 gives 0.7310585786300049" in first
    assert done.stderr == ""


def test_the_reproducer_passes_once_the_mistake_is_corrected(made, tmp_path):
    text = made.read_text()
    mistake = "if step < len(q) - 1:"
    assert text.count(mistake) == 1
    corrected = tmp_path / "corrected.py"
    corrected.write_text(text.replace(mistake, "if True:"))
    done = run_alone(corrected, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout and "right: dv of worker 0" in done.stdout


def test_the_reproducer_has_at_most_100_lines_and_does_not_import_ringspec(made):
    text = made.read_text()
    assert len(text.splitlines()) <= 100
    assert max(map(len, text.splitlines()[1:])) <= 120
    assert "import ringspec" not in text and "from ringspec" not in text


def test_the_text_for_an_issue_has_versions_numbers_place_cause_and_evidence(made):
    text = made.with_suffix(".md").read_text()
    assert text.startswith("# ring_attention: wrong dv with 2 workers x 1 token")
    assert f"- numpy {np.__version__}\n" in text
    assert "got 0.2689414" in text and "want 0.7310586" in text
    assert "- correct in the same call: o, lse, dq, dk\n" in text
    assert "dk and dv are added to those of the next step's visitor" in text
    assert "Evidence" in text and "[dkv-not-home]" in text
    assert made.read_text() in text


def test_a_case_that_passes_writes_nothing(tmp_path):
    right = tmp_path / "right.py"
    right.write_text(WRONG_RING.read_text().replace("if step < len(q) - 1:", "if True:"))
    result = reproduce(f"{right}:target", CASE, "-o", tmp_path / "repro.py")
    assert result.exit_code == 2 and "passes" in result.stderr
    assert not (tmp_path / "repro.py").exists() and not (tmp_path / "repro.md").exists()


@pytest.mark.slow
def test_a_function_of_another_module_is_imported_and_not_copied(tmp_path):
    source = WRONG_RING.read_text()
    function, _, _ = source.partition("\n\ntarget = ")
    lines = [line for line in function.splitlines() if "from ringspec" not in line]
    (tmp_path / "my_rings.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "glue.py").write_text(
        "from my_rings import ring_attention\n"
        "from ringspec.conformance.adapters.numpy_lists import NumPyTarget\n"
        "from ringspec.conformance.target import Capabilities\n"
        "target = NumPyTarget(ring_attention, Capabilities(layouts=('contiguous', 'zigzag'), head_ratios=(1,)))\n"
    )
    target = f"{tmp_path / 'glue.py'}:target"
    result = reproduce(target, CASE, "-o", tmp_path / "r.py")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "r.py").read_text()
    assert "from my_rings import ring_attention\n" in text and "def next_worker" not in text
    assert run_alone(tmp_path / "r.py", tmp_path).returncode == 1


@pytest.mark.parametrize("target", ["cmd:python ring.py", "dir:results", "reference"])
def test_a_target_whose_call_cannot_be_written_is_refused_with_what_to_do(target, tmp_path):
    (tmp_path / "results").mkdir()
    result = reproduce(target, CASE, "-o", tmp_path / "repro.py")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "Fix: " in result.stderr
    assert not (tmp_path / "repro.py").exists()


def test_a_target_object_that_is_no_adapter_is_refused_with_what_to_do():
    with pytest.raises(OptionError, match="NumPyTarget.*--shrink --json"):
        supported(reference_float32)


def test_the_program_must_end_in_py(tmp_path):
    result = reproduce(f"{WRONG_RING}:target", CASE, "-o", tmp_path / "repro.txt")
    assert result.exit_code == 2 and "FILE.py" in result.stderr


SOURCE = """
from __future__ import annotations
import os, math as m
from ringspec.conformance.target.protocol import Call
LIMIT = 3
OTHER = 4

def unused(x):
    return OTHER

@staticmethod
def helper(x):
    return m.sqrt(x) + LIMIT

def ring(q, k, v, call: Call) -> Call:
    return helper(q)

def needs_call(q):
    return Call(q)

def imports_inside(q):
    from ringspec import attention
    return attention

alias = lambda q: q
"""


def test_a_copied_function_brings_what_it_uses_and_nothing_else(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    text = "\n".join(copied(tmp_path / "mine.py", "ring"))
    assert "import math as m\n" in text and "LIMIT = 3\n" in text
    assert "@staticmethod\ndef helper(x):" in text and "def ring(" in text
    for other in ("ringspec", "import os", "OTHER", "unused"):
        assert other not in text


@pytest.mark.parametrize("name", ["needs_call", "imports_inside", "alias", "nothing"])
def test_a_function_that_needs_ringspec_or_is_none_is_refused(name, tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(OptionError, match="Fix: define the function at the top level"):
        copied(tmp_path / "mine.py", name)


def test_a_function_without_a_place_of_its_own_is_refused():
    for function in (lambda q: q, types.SimpleNamespace(), "".join):
        with pytest.raises(OptionError, match="top level"):
            place_of(function)
    with pytest.raises(OptionError):
        standalone("ringspec.rings.run:ring")


def known(case):
    """Whether the dense check can compute a case."""
    if case.operation not in ("ring", "attention") or case.id.startswith("kernel-shape/"):
        return False
    call = call_of(case, CORE.tensors(case.id))
    return {*call.terms} <= {*TERMS} and {*call.tensors} <= {*TENSORS}


def covering(cases):
    """The smallest cases that together use every term, tensor, layout and number of workers."""
    chosen, seen = [], set()
    for case in sorted(cases, key=lambda case: case.shape.Sq * case.shape.Sk):
        call = call_of(case, CORE.tensors(case.id))
        padded = ("padded", bool((call.index_q < 0).any()), call.passes)
        has = {*call.terms, *call.tensors, call.layout, call.workers, padded}
        # A feature is tried with each of the other features that meet it in some case.
        has |= {
            (x, y)
            for x in {*call.terms, *call.tensors} & FEATURES
            for y in {*call.terms, call.layout}
        }
        if not has <= seen:
            chosen.append(case)
            seen |= has
    return chosen


FEATURES = {"softcap", "bias", "mask", "sinks", "dlse"}
KNOWN = covering(case for case in CORE if known(case))
TURNED = [case for case in KNOWN if case.shape.B == 1][::9]


def check_dense(case, claims, folder):
    """Execute the source of the dense check for a case, and compare its results with exact values."""
    tensors = CORE.tensors(case.id)
    call = as_seen(call_of(case, tensors), claims)
    visible = visible_lines(call) if is_masked(call) else []
    head = ["import ml_dtypes", "import numpy as np", "from numpy import inf"]
    program = folder / "dense.py"
    lines = [*head, *input_lines(call), *visible, *dense_lines(call, claims), "found = dense()"]
    program.write_text("\n".join(lines))
    found = runpy.run_path(str(program))["found"]
    for name, want in expected_of(case, tensors).items():
        if name not in RESULTS:
            continue
        factor = np.log(2) if name == "lse" and claims.lse == "base2" else 1.0
        shards = np.split(found[name] * factor, len(want.values), axis=2)
        for worker, got in enumerate(shards):
            values, scale = want.values[worker], want.scale[worker]
            real = np.ones(got.shape[2], bool) if want.real is None else want.real[worker]
            scale = scale[..., None] if scale.ndim < values.ndim else scale
            with np.errstate(invalid="ignore"):
                near = (got == values) | (np.abs(got - values) <= 1e-12 * (scale + np.abs(values)))
            assert near[:, :, real].all(), (name, worker)


def test_the_dense_check_is_tried_on_every_mask_and_feature_that_it_knows():
    used = {
        name
        for case in KNOWN
        for name in (*case.terms, *call_of(case, CORE.tensors(case.id)).tensors)
    }
    assert {*TERMS, *TENSORS} - used <= {"o", "lse"}


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.id)
def test_the_dense_check_gives_the_exact_values_of_a_golden_case(case, tmp_path):
    check_dense(case, Capabilities(), tmp_path)


@pytest.mark.parametrize("axes", ["BSHD", "SBHD", "HSD", "SHD"])
@pytest.mark.parametrize("case", TURNED, ids=lambda case: case.id)
def test_the_dense_check_takes_the_axes_and_the_lse_of_the_target(case, axes, tmp_path):
    check_dense(case, Capabilities(axes=axes, lse="base2"), tmp_path)


def test_a_place_has_the_bound_of_its_element_and_a_nan_a_generous_one():
    wrong = [
        Finding("dq", 1, "NaN", float("inf"), (0, 0, 0, 0), float("nan"), 0.25, 1, 4),
        Finding("o", 0, "ok", 0.5, (0, 0, 0, 0), 0.5, 0.5, 0, 4),
        Finding("dv", 0, "beyond bound", 100.0, (0, 0, 2, 0), 1.5, 0.5, 1, 4),
    ]
    first, second = places_of(wrong)
    assert (first.tensor, first.bound) == ("dv", 0.0101)
    assert (second.tensor, second.bound) == ("dq", 0.01)


def test_numpy_targets_are_supported():
    target = NumPyTarget(lambda q, k, v: None)
    assert supported(target) is target


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_the_program_of_a_torch_ring_starts_its_ranks_and_shows_the_failure(format, tmp_path):
    right = (WRONG_RING.parents[1] / "conform" / "example_torch.py").read_text()
    rescaled = "o = o * torch.exp(lse - base)[..., None] + "
    assert right.count(rescaled) == 1
    (tmp_path / "mine.py").write_text(right.replace(rescaled, "o = o + "))
    spec = f"{tmp_path / 'mine.py'}:target"
    target = load_target(spec)
    x = np.array([[[[1.0], [0.5]]]])
    formats, ring = CaseFormats(format, format, "float32"), Ring(2, "contiguous", "kv", 1)
    inputs = dict.fromkeys(("q", "k", "v", "dy"), x)
    both = ("forward", "backward")
    trial = tried(target, Explicit("ring", both, formats, ring, {"scale": 1.0}, inputs))
    target.close()
    places = places_of(trial.findings)
    text = program(target, trial.call, places, "A torch ring.")
    assert "WRONG: o of worker 0" in confirmed(text, spec, target, places)
    corrected = text.replace("o = o + ", rescaled)
    with pytest.raises(OptionError, match="exit status 0"):
        confirmed(corrected, spec, target, places)
