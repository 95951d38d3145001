"""Verification finds every changed bit; the cache gives nothing but the pinned bytes."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from refusals import refuses
from vectors import small

from ringspec.errors import OptionError, UndecidedError, VectorError
from ringspec.tensorfile import read_tensors, write_tensors
from ringspec.vectors import generate, open_set, verify, write_set
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.format.case import TensorRecipe, Withdrawn
from ringspec.vectors.format.digest import tensor_bytes
from ringspec.vectors.sets import cache
from ringspec.vectors.sets.stored import SETS


def derived(id):
    return generate.derive(small.named(id))


def set_of(path, *entries):
    return write_set(path, "small", "1.0", [(one.case, one.tensors) for one in entries], FLAGS)


# Verify -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_set_as_it_should_be(tmp_path, jobs):
    vectors, seen = small.write(tmp_path / "set"), []
    assert vectors.flags  # which no other process can be sent
    reports = verify.verify(vectors, jobs=jobs, progress=lambda *what: seen.append(what))
    assert [(report.id, report.outcome) for report in reports] == [
        (id, "ok") for id in sorted(vectors.ids)
    ]
    assert not any(report.failed for report in reports)
    assert seen == [(n, 7, id) for n, id in enumerate(vectors.ids, start=1)]


def test_a_pattern_chooses_cases(tmp_path):
    vectors = small.write(tmp_path / "set")
    reports = verify.verify(vectors, only="ring/p*")
    assert [report.id for report in reports] == ["ring/padded", "ring/pinned"]
    with pytest.raises(OptionError, match="some id matches"):
        verify.verify(vectors, only="wing/*")


@pytest.mark.parametrize("id", ["attention/small", "ring/sampled"])
def test_one_changed_bit_of_any_tensor_is_found(tmp_path, id):
    one = derived(id)
    for number, name in enumerate(sorted(one.tensors)):
        x = one.tensors[name].copy()
        raw = x.view(np.uint8).reshape(-1)
        raw[0] ^= 1
        changed = dataclasses.replace(one, tensors=one.tensors | {name: x})
        (report,) = verify.verify(set_of(tmp_path / str(number), changed))
        assert (report.outcome, report.failed, report.fields) == ("differs", True, ())
        assert [(t.name, t.kind, t.elements) for t in report.tensors] == [(name, "values", 1)]


def test_a_changed_digest_and_a_changed_need_are_found(tmp_path):
    one = derived("ring/pinned")
    name = "out.dk.bfloat16"
    case = dataclasses.replace(
        one.case,
        digests=one.case.digests | {name: "0" * 64},
        requires=one.case.requires | {"workers": 3},
    )
    (report,) = verify.verify(set_of(tmp_path / "set", dataclasses.replace(one, case=case)))
    assert report.outcome == "differs" and report.tensors == ()
    assert {field.path for field in report.fields} == {f"digests/{name}", "requires/workers"}


def test_a_changed_input_changes_what_is_expected(tmp_path):
    one = derived("attention/small")
    inputs = dataclasses.replace(one.case.inputs, seed="another")
    case = dataclasses.replace(one.case, inputs=inputs)
    (report,) = verify.verify(set_of(tmp_path / "set", dataclasses.replace(one, case=case)))
    found = {tensor.name for tensor in report.tensors}
    assert {"in.q", "in.dy", "out.o.float64", "out.dq.bfloat16", "scale.dk"} <= found


def test_a_withdrawn_case_is_not_derived(tmp_path, monkeypatch):
    one = derived("attention/small")
    case = dataclasses.replace(one.case, withdrawn=Withdrawn("1.1", "it was wrong"))
    vectors = set_of(tmp_path / "set", dataclasses.replace(one, case=case))
    monkeypatch.setattr(verify, "derive", None)
    (report,) = verify.verify(vectors)
    assert (report.outcome, report.failed, report.message) == ("withdrawn", False, "it was wrong")


def test_an_undecided_case_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    def sometimes(case):
        if case.id == "merge/small":
            raise UndecidedError("a decided result", "another", "change the inputs")
        return generate.derive(case)

    vectors = small.write(tmp_path / "set")
    monkeypatch.setattr(verify, "derive", sometimes)
    outcomes = {report.id: report.outcome for report in verify.verify(vectors)}
    assert outcomes.pop("merge/small") == "undecided"
    assert set(outcomes.values()) == {"ok"}


def test_a_case_that_cannot_be_derived_is_reported(tmp_path):
    one = derived("attention/small")
    recipe = TensorRecipe("uniform", bits=20, exponent=-9)
    inputs = dataclasses.replace(
        one.case.inputs, tensors=dict(one.case.inputs.tensors) | {"q": recipe}
    )
    case = dataclasses.replace(one.case, inputs=inputs)
    (report,) = verify.verify(set_of(tmp_path / "set", dataclasses.replace(one, case=case)))
    assert (report.outcome, report.failed) == ("refused", True)
    assert "exact in bfloat16" in report.message


# Packaged sets ----------------------------------------------------------------------------------


def assert_verified(vectors, only=None):
    reports = verify.verify(vectors, only=only)
    assert reports and all(report.outcome == "ok" for report in reports), reports


def test_cases_of_the_core_set_come_out_as_they_are_stored():
    for only in ("attention/b*", "adversarial/[a-m]*", "merge/*", "block/*", "schedule/*"):
        assert_verified(open_set("core"), only)


@pytest.mark.slow
def test_every_case_of_the_core_set_comes_out_as_it_is_stored():
    assert_verified(open_set("core"))


def test_a_packaged_set_holds_the_catalogue():
    for name in SETS:
        packaged = {case.id: case for case in open_set(name)}
        cases = {case.id: case for case in generate.cases_of(name)}
        assert set(packaged) == set(cases)
        for id, case in packaged.items():
            assert dataclasses.replace(case, digests={}) == cases[id], id


# Cache ------------------------------------------------------------------------------------------


@pytest.fixture
def vectors(tmp_path):
    return small.write(tmp_path / "set")


def test_materialise_derives_what_is_not_stored_and_then_nothing(tmp_path, vectors):
    seen, folder = [], tmp_path / "cache"
    first = cache.materialise(vectors.path, folder, progress=lambda *what: seen.append(what))
    assert (first.folder, first.cases, first.derived) == (folder, 2, 2)
    assert seen == [(1, 2, "ring/pinned"), (2, 2, "ring/sampled")]
    files = sorted(folder.rglob("*.safetensors"))
    assert first.bytes == sum(file.stat().st_size for file in files)
    again = cache.materialise(vectors.path, folder, jobs=2)
    assert (again.cases, again.derived, again.bytes) == (2, 0, first.bytes)


def test_what_is_kept_is_not_derived_again(tmp_path, vectors, monkeypatch):
    cache.materialise(vectors.path, tmp_path)
    monkeypatch.setattr(cache, "tensors_of_case", None)
    assert cache.materialise(vectors.path, tmp_path).derived == 0
    for id in vectors.ids:
        assert cache.tensors_of(vectors, id, tmp_path)


def test_whole_tensors_come_back_from_any_storage(tmp_path, vectors):
    for _ in range(2):  # derived, then from the cache
        for case in vectors:
            got = cache.tensors_of(vectors, case.id, tmp_path)
            scales = case.storage != "digests"
            want = generate.tensors_of_case(case, scales=scales)
            assert sorted(got) == sorted(want)
            for name, x in want.items():
                assert tensor_bytes(got[name]) == tensor_bytes(x), name
                assert got[name].dtype == x.dtype and got[name].shape == x.shape


def kept_file(folder, vectors, id):
    return cache.cached_file(folder, vectors, id)


def damage_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def damage_name(file):
    tensors = read_tensors(file)
    write_tensors(file, {name.replace("out", "in"): x for name, x in tensors.items()})


def damage_shape(file):
    write_tensors(file, {name: x.reshape(-1) for name, x in read_tensors(file).items()})


def damage_dtype(file):
    write_tensors(file, {name: x.view(f"i{x.itemsize}") for name, x in read_tensors(file).items()})


DAMAGES = {
    "one bit": damage_bit,
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-8]),
    "too long": lambda file: os.truncate(file, 1 << 30),
    "empty": lambda file: file.write_bytes(b""),
    "other names": damage_name,
    "other shapes": damage_shape,
    "other dtypes": damage_dtype,
    "no file": os.unlink,
    "an object": lambda file: file.write_bytes(b"\x80\x04\x95"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_in_the_cache_is_derived_again(tmp_path, vectors, damage):
    cache.materialise(vectors.path, tmp_path)
    file = kept_file(tmp_path, vectors, "ring/pinned")
    before = file.read_bytes()
    damage(file)
    assert cache.materialise(vectors.path, tmp_path).derived == 1
    assert file.read_bytes() == before
    damage(file)
    got = cache.tensors_of(vectors, "ring/pinned", tmp_path)
    want = generate.tensors_of_case(vectors.case("ring/pinned"), scales=False)
    assert all(tensor_bytes(got[name]) == tensor_bytes(x) for name, x in want.items())


@pytest.mark.parametrize("name", ["out.dv.float64", "in.q"])
def test_bytes_that_are_not_the_pinned_ones_are_an_error_that_names_them(tmp_path, name):
    one = derived("ring/pinned")
    digests = one.case.digests | {name: "0" * 64}
    case = dataclasses.replace(one.case, digests=digests)
    vectors = set_of(tmp_path / "set", dataclasses.replace(one, case=case))
    with refuses((VectorError, "digest"), match=rf"ring/pinned.*other bytes of {name}\."):
        cache.materialise(vectors.path, tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    with refuses((VectorError, "digest"), match=name):
        cache.tensors_of(vectors, "ring/pinned", tmp_path / "cache")


def test_inputs_are_held_to_their_digests_beside_results_from_the_cache(tmp_path, vectors):
    one = derived("ring/pinned")
    case = dataclasses.replace(one.case, digests=one.case.digests | {"in.q": "0" * 64})
    wrong = set_of(tmp_path / "wrong", dataclasses.replace(one, case=case))
    cache.materialise(vectors.path, tmp_path)
    good, bad = (kept_file(tmp_path, x, "ring/pinned") for x in (vectors, wrong))
    os.rename(good, bad)
    with refuses((VectorError, "digest"), match="other bytes of in.q"):
        cache.tensors_of(wrong, "ring/pinned", tmp_path)


def test_no_more_of_a_cached_file_is_read_than_the_case_can_need(tmp_path, vectors, monkeypatch):
    cache.materialise(vectors.path, tmp_path)
    file = kept_file(tmp_path, vectors, "ring/pinned")
    os.truncate(file, 1 << 30)
    seen, decode = [], cache.decode
    monkeypatch.setattr(cache, "decode", lambda data, what: seen.append(len(data)) or decode(data))
    cache.tensors_of(vectors, "ring/pinned", tmp_path)
    assert 0 < max(seen) < 2 << 20


def test_two_versions_of_a_case_do_not_meet_in_the_cache(tmp_path):
    one = derived("ring/pinned")
    reworded = dataclasses.replace(one.case, reason="Another reason.")
    first = set_of(tmp_path / "a", one)
    second = set_of(tmp_path / "b", dataclasses.replace(one, case=reworded))
    files = {kept_file(tmp_path, vectors, "ring/pinned") for vectors in (first, second)}
    assert len(files) == 2
    for file in files:
        assert file.parent == tmp_path / "vectors" / "small" / "1.0"


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGSPEC_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache.cache_folder() == tmp_path / "elsewhere"
    assert cache.cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("RINGSPEC_CACHE_DIR")
    assert cache.cache_folder().name.lower() == "ringspec"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL to a child process")
def test_a_killed_materialise_goes_on_where_it_stopped(tmp_path, vectors):
    program = (
        "import sys, time\n"
        "from ringspec.vectors.sets import cache\n"
        "write = cache.write_tensors\n"
        "def slowly(*a):\n"
        "    write(*a)\n"
        "    print('kept', flush=True)\n"
        "    time.sleep(600)\n"
        "cache.write_tensors = slowly\n"
        f"cache.materialise({str(vectors.path)!r}, 'cache')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "kept\n"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
    finally:
        process.kill()
    time.sleep(0.1)
    done = cache.materialise(vectors.path, tmp_path / "cache")
    assert (done.cases, done.derived) == (2, 1)
