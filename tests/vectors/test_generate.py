"""Derived tensors are those of the case, the same however they are made, and a set is all or nothing."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from refusals import refuses
from vectors import small

from ringspec.errors import OptionError, RingspecError, ShapeError, UndecidedError
from ringspec.formats import store
from ringspec.vectors import check_set, diff_sets, generate, open_set
from ringspec.vectors.catalogue import catalogue
from ringspec.vectors.format.case import CaseFormats, Ring, TensorRecipe
from ringspec.vectors.format.digest import tensor_bytes
from ringspec.vectors.format.requires import requires
from ringspec.vectors.format.sampling import rows_of
from ringspec.vectors.format.tensor_table import check_tensors, whole_tensors
from ringspec.vectors.processes import each, in_processes

EVERY = 7
CORE = catalogue("core")
FULL = [case for case in CORE if case.storage == "full" and case.operation != "schedule"]
SAMPLED = [case for case in CORE if case.storage == "sampled"]
SCHEDULES = [case for case in CORE if case.operation == "schedule"]


def by_id(cases):
    return [pytest.param(case, id=case.id) for case in cases]


# Agreement with the specification ---------------------------------------------------------------


def assert_agrees(case):
    whole = generate.tensors_of_case(case)
    errors = list(small.disagreement(case, whole))
    assert errors
    for tensor, error in errors:
        assert error <= small.BOUND, tensor


@pytest.mark.parametrize("case", by_id(FULL[::EVERY]) + by_id(small.cases()[:6]))
def test_the_specification_in_float64_agrees_with_the_expected_values(case):
    assert_agrees(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_id(FULL + SAMPLED))
def test_the_specification_agrees_with_every_case(case):
    assert_agrees(case)


def test_the_agreement_sees_one_wrong_element():
    case = small.named("ring/padded")
    whole = generate.tensors_of_case(case)
    name = "out.dk.float64"
    whole[name] = whole[name].copy()
    whole[name][1, 0, 1, 2, 3] *= 1 + 1e-9
    assert max(error for _, error in small.disagreement(case, whole)) > small.BOUND


@pytest.mark.parametrize("case", by_id(SCHEDULES[::2]))
def test_schedules_are_those_of_the_rules(case):
    whole, ring = generate.tensors_of_case(case), case.ring
    if ring.circulation == "gather":
        return
    step, worker = np.indices((ring.workers, ring.workers))
    for one in case.passes:
        visitors = whole[f"out.visitor.{one}"]
        assert np.array_equal(visitors, (worker - ring.direction * step) % ring.workers)
        # Accumulators take a last hop home; what is only read does not (RING-4).
        hops = ring.workers - (one == "forward") if ring.workers > 1 else 0
        target = np.where(step < hops, (worker + ring.direction) % ring.workers, -1)
        assert np.array_equal(whole[f"out.target.{one}"], target)


def test_gathered_keys_are_marked_as_sent_to_everybody():
    case = dataclasses.replace(
        small.named("schedule/small"), ring=Ring(3, "contiguous", "gather"), passes=("forward",)
    )
    whole = generate.tensors_of_case(case)
    assert whole["out.visitor.forward"][0].tolist() == [-1, -1, -1]
    assert whole["out.target.forward"].tolist() == [[-2] * 3] + [[-1] * 3] * 3


# What a worker holds ----------------------------------------------------------------------------


def test_workers_together_hold_the_bytes_of_the_dense_case():
    case = small.named("ring/padded")
    whole = generate.tensors_of_case(case)
    dense = generate.tensors_of_case(dataclasses.replace(case, operation="attention", ring=None))
    for name, want in dense.items():
        kind, tensor, *_ = name.split(".")
        if kind == "in":
            got = whole[name]
        elif tensor in ("dsinks", "dbias"):
            got = whole[name.replace(tensor, tensor + "_sum")]
        else:
            side = "k" if tensor in ("dk", "dv") else "q"
            got = small.unsharded(whole[name], whole[f"layout.{side}"], 2)
        assert tensor_bytes(got) == tensor_bytes(want), name


def test_padding_slots_hold_nothing():
    whole = generate.tensors_of_case(small.named("ring/padded"))
    padding = whole["layout.q"] < 0
    assert padding.sum() == 4
    for name in (
        "out.o.float64",
        "out.dq.bfloat16",
        "out.dk.float64",
        "out.dv.bfloat16",
        "scale.dv",
    ):
        held = np.moveaxis(whole[name], 3, 1)[padding]
        assert not tensor_bytes(held).strip(b"\0"), name
    assert np.isneginf(np.moveaxis(whole["out.lse.float32"], 3, 1)[padding]).all()
    assert (whole["position.q"][:, 0][padding] == -1).all()


def test_partial_sums_of_workers_add_up():
    case = small.named("ring/padded")
    whole = generate.tensors_of_case(case)
    for tensor in ("dsinks", "dbias"):
        parts, total = whole[f"out.{tensor}.float64"], whole[f"out.{tensor}_sum.float64"]
        assert parts.shape == (3, *total.shape)
        scale = whole[f"scale.{tensor}_sum"]
        assert (np.abs(parts.sum(axis=0) - total) <= 1e-15 * scale).all()
        assert np.abs(parts).min(axis=0).max() > 0  # more than one worker has a share


def test_rows_of_a_bias_go_to_the_worker_of_their_query():
    case = small.named("ring/padded")
    recipes = dict(case.inputs.tensors) | {"bias": small.bias_of(1, 1, 8, 8)}
    inputs = dataclasses.replace(case.inputs, tensors=recipes)
    case = dataclasses.replace(case, inputs=inputs)
    whole = generate.tensors_of_case(case)
    dense = generate.tensors_of_case(dataclasses.replace(case, operation="attention", ring=None))
    got = whole["out.dbias.float64"]
    assert got.shape == (3, 1, 1, 4, 8) and "out.dbias_sum.float64" not in whole
    joined = small.unsharded(got, whole["layout.q"], 2)
    assert np.array_equal(joined, dense["out.dbias.float64"])


def test_formats_are_float64_and_those_of_the_case():
    case = dataclasses.replace(
        small.named("ring/padded"), formats=CaseFormats("bfloat16", "float16", "float32")
    )
    whole = generate.tensors_of_case(case)
    formats = {tuple(name.split(".")[1:]) for name in whole if name.startswith("out.")}
    for tensor in ("o", "dq", "dk", "dv", "dbias", "dbias_sum"):
        assert {f for t, f in formats if t == tensor} == {"float64", "float16"}, tensor
    for tensor in ("lse", "dsinks", "dsinks_sum"):
        assert {f for t, f in formats if t == tensor} == {"float64", "float32"}, tensor
    assert whole["out.o.float16"].dtype == np.float16
    narrow = store(whole["out.o.float64"], "float16")
    assert (narrow == whole["out.o.float16"]).mean() > 0.999  # but for double rounding


def test_a_forward_case_holds_no_gradient_and_a_backward_case_no_output():
    passes = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}
    for one, tensors in passes.items():
        case = dataclasses.replace(small.named("attention/small"), passes=(one,))
        if one == "forward":
            recipes = {n: r for n, r in case.inputs.tensors.items() if n != "dy"}
            inputs = dataclasses.replace(case.inputs, tensors=recipes)
            case = dataclasses.replace(case, inputs=inputs)
        whole = generate.tensors_of_case(case)
        got = {name.split(".")[1] for name in whole if name.startswith(("out.", "scale."))}
        assert got == set(tensors)


# Storage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", by_id(small.cases()))
def test_derived_tensors_are_those_that_a_set_takes(case):
    derived = generate.derive(case)
    check_tensors(derived.case, derived.tensors or {})
    assert derived.case.requires == requires(case)
    assert (derived.tensors is None) == (case.storage == "digests")
    assert bool(derived.case.digests) == (case.storage != "full")


def test_digests_pin_the_whole_little_endian_bytes():
    for id in ("ring/sampled", "ring/pinned"):
        case = small.named(id)
        whole, digests = generate.tensors_of_case(case), generate.derive(case).case.digests
        kinds = ("in", "out") if id == "ring/pinned" else ("in", "out", "scale")
        assert sorted(digests) == sorted(n for n in whole if n.split(".")[0] in kinds)
        for name, digest in digests.items():
            assert hashlib.sha256(whole[name].tobytes("C")).hexdigest() == digest


def test_sampled_rows_are_those_of_the_whole_tensors():
    case = small.named("ring/sampled")
    whole, derived = generate.tensors_of_case(case), generate.derive(case)
    kept = derived.tensors
    assert not any(name.startswith("in.") for name in kept)
    for side, names in (("q", ("o", "lse", "dq")), ("k", ("dk", "dv"))):
        rows = kept[f"rows.{side}"]
        assert rows.shape == (2, 16, 3)
        for name in names:
            for full in (f"out.{name}.float64", f"scale.{name}"):
                for worker in range(2):
                    for n, (b, h, slot) in enumerate(rows[worker]):
                        assert np.array_equal(
                            kept[full][worker, n], whole[full][worker, b, h, slot]
                        )
    for name in ("layout.q", "layout.k", "out.dsinks.float32", "out.dsinks_sum.float64"):
        assert np.array_equal(kept[name], whole[name])


@pytest.mark.parametrize("side", ["q", "k"])
def test_sampled_rows_are_distinct_real_and_hold_both_ends(side):
    table = np.arange(60).reshape(3, 20)
    table[1, 0] = table[1, 19] = table[2, 7] = -1
    rows = rows_of("ring/an-id", side, table, 2, 3)
    for worker in range(3):
        found = {tuple(row) for row in rows[worker].tolist()}
        slots = np.flatnonzero(table[worker] >= 0)
        assert len(found) == 16 and {slot for *_, slot in found} <= set(slots.tolist())
        assert {int(slots[0]), int(slots[-1])} <= {slot for *_, slot in found}
        assert rows[worker].tolist() == sorted(rows[worker].tolist())
    assert not np.array_equal(rows, rows_of("ring/another-id", side, table, 2, 3))
    assert np.array_equal(rows, rows_of("ring/an-id", side, table, 2, 3))


def test_too_few_rows_to_sample_are_refused():
    with pytest.raises(ShapeError, match="at least 16 rows"):
        rows_of("ring/an-id", "q", np.arange(30).reshape(2, 15), 1, 1)


def test_every_sampled_case_of_the_catalogue_pins_all_of_its_tensors():
    for case in SAMPLED:
        names = [name for name in whole_tensors(case) if name.startswith(("in.", "out."))]
        assert len(names) >= 6


def test_a_backward_pass_alone_has_the_gradients_of_both_and_no_forward_results():
    case = next(case for case in FULL if case.id == "ring/zigzag-causal-w4")
    both = generate.tensors_of_case(case)
    alone = generate.tensors_of_case(dataclasses.replace(case, passes=("backward",)))
    left_out = {name for name in both if name.split(".")[1] in ("o", "lse")}
    assert set(alone) == set(both) - left_out and left_out
    assert all(tensor_bytes(alone[name]) == tensor_bytes(both[name]) for name in alone)


# Errors -----------------------------------------------------------------------------------------


def test_an_undecided_result_is_refused_by_the_name_of_its_case(monkeypatch):
    def undecided(*arguments, **options):
        raise UndecidedError("a decided result", "another", "change the inputs")

    monkeypatch.setattr(generate, "attention", undecided)
    with pytest.raises(UndecidedError, match="attention/small"):
        generate.derive_named(small.named("attention/small"))


def test_inputs_that_are_not_exact_are_refused_by_the_name_of_the_case():
    case = small.named("attention/small")
    recipes = dict(case.inputs.tensors) | {"q": TensorRecipe("uniform", bits=20, exponent=-9)}
    case = dataclasses.replace(case, inputs=dataclasses.replace(case.inputs, tensors=recipes))
    with pytest.raises(OptionError, match="attention/small"):
        generate.derive_named(case)


# Sets -------------------------------------------------------------------------------------------

ONLY = "merge/*"


def files_in(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_bytes_of_a_set_do_not_depend_on_the_number_of_processes(tmp_path):
    seen = []
    one = generate.generate("core", tmp_path / "one", only=ONLY)
    generate.generate(
        "core", tmp_path / "two", only=ONLY, jobs=2, progress=lambda *what: seen.append(what)
    )
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert diff_sets(one, open_set(tmp_path / "two")).equal
    check_set(tmp_path / "one")
    chosen = [case.id for case in CORE if case.id.startswith("merge/")]
    assert seen == [(n, len(chosen), id) for n, id in enumerate(chosen, start=1)]


def test_generate_never_overwrites(tmp_path):
    small.write(tmp_path / "there", small.cases()[:1])
    before = files_in(tmp_path / "there")
    with refuses((OptionError, "destination")):
        generate.generate("core", tmp_path / "there", only=ONLY)
    assert files_in(tmp_path / "there") == before
    assert os.listdir(tmp_path) == ["there"]


def test_an_unknown_set_and_a_pattern_without_a_case_are_refused(tmp_path):
    with refuses((OptionError, "unknown-name"), match="write 'core'"):
        generate.generate("cores", tmp_path / "new")
    with pytest.raises(OptionError, match="some id matches"):
        generate.generate("core", tmp_path / "new", only="rings/*")
    assert os.listdir(tmp_path) == []


def test_a_case_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fails(case):
        raise UndecidedError("a decided result", "another", "change the inputs")

    monkeypatch.setattr(generate, "derive", fails)
    with pytest.raises(UndecidedError):
        generate.generate("core", tmp_path / "new", only=ONLY)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL to a child process")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_generate_leaves_nothing_at_its_destination(tmp_path, jobs):
    """Killed when some cases are on the disk and others are not."""
    command = ["-m", "ringspec", "vectors", "generate", "core", "new", "--jobs", jobs]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.rglob("case.json"))) < 3:
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
    finally:
        process.kill()
    assert not (tmp_path / "new").exists()
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".new.")] == []
    assert not list(tmp_path.rglob("manifest.json"))
    # The helpers end with their parent: nobody is left in its session.
    deadline = time.monotonic() + 300
    while session_lives(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def session_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# Processes --------------------------------------------------------------------------------------


def fail_at_three(n):
    if n == 3:
        raise OptionError("another number", "3", "leave it out")
    return n


def die(n):
    os._exit(1)


def test_results_come_in_order_and_an_error_at_its_place():
    assert list(each(abs, range(-20, 0), jobs=2)) == list(range(20, 0, -1))
    for jobs in (1, 2):
        results = each(fail_at_three, range(9), jobs)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OptionError, match="another number"):
            next(results)


def test_a_process_that_dies_is_an_error_of_its_own():
    with refuses((RingspecError, "failed-process"), match="use fewer jobs"):
        list(in_processes(die, [1], 1))


@pytest.mark.parametrize("jobs", [0, -1, 257, 1.0, True, None])
def test_a_strange_number_of_jobs_is_refused(jobs):
    with pytest.raises(OptionError, match="jobs"):
        list(each(abs, [1], jobs))
