"""Sets: what is written is read back, and the same set gives the same bytes."""

import hashlib
import json
import os
import shutil
import struct
import time

import numpy as np
import pytest
from refusals import refuses
from vectors import samples

from ringspec import SPEC_VERSION
from ringspec.errors import OptionError, VectorError
from ringspec.vectors import check_set, open_set
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.digest import case_digest, set_digest, tensor_digest
from ringspec.vectors.sets import stored as sets

CASES = samples.cases()


def bytes_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def replaced(case, **changes):
    return Case(**dict(vars(case)) | changes)


def test_a_set_comes_back(tmp_path):
    samples.write(tmp_path / "set")
    vectors = open_set(tmp_path / "set")
    assert vectors.ids == tuple(sorted(case.id for case in CASES))
    assert {case.id: case for case in vectors} == {case.id: case for case in CASES}
    assert len(vectors) == len(CASES) == vectors.manifest.count
    assert dict(vectors.flags) == samples.FLAGS
    assert (vectors.name, vectors.set_version) == ("sample", "1.0")
    assert (vectors.format_version, vectors.spec_version) == ("1.0", SPEC_VERSION)
    for case in CASES:
        stored, given = vectors.tensors(case.id), samples.tensors(case) or {}
        assert set(stored) == set(given)
        for name, x in given.items():
            assert stored[name].dtype == x.dtype and stored[name].shape == x.shape
            assert stored[name].tobytes() == x.tobytes()


def test_the_arrays_are_read_only(tmp_path):
    vectors = samples.write(tmp_path / "set")
    for name, x in vectors.tensors("attention/everything").items():
        assert not x.flags.writeable, name
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0


def test_a_withdrawn_case_stays_and_is_marked(tmp_path):
    vectors = samples.write(tmp_path / "set")
    withdrawn = [case.id for case in vectors if case.withdrawn is not None]
    assert withdrawn == ["attention/old/withdrawn"]
    assert vectors.tensors(withdrawn[0])


def test_the_bytes_do_not_depend_on_the_order_of_the_cases_and_flags(tmp_path):
    samples.write(tmp_path / "one")
    samples.write(
        tmp_path / "two",
        reversed(samples.entries()),
        flags=dict(reversed(samples.FLAGS.items())).values(),
    )
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_nothing_but_the_listed_files_is_written(tmp_path):
    vectors = samples.write(tmp_path / "set")
    assert set(bytes_of(tmp_path / "set")) == {"manifest.json", *vectors.manifest.files()}
    assert os.listdir(tmp_path) == ["set"]
    total = sum(len(data) for data in bytes_of(tmp_path / "set").values())
    assert vectors.manifest.bytes == total - len((tmp_path / "set/manifest.json").read_bytes())


def test_checking_reports_each_case_and_returns_the_set(tmp_path):
    vectors = samples.write(tmp_path / "set")
    seen = []
    assert check_set(tmp_path / "set", lambda *step: seen.append(step)).ids == vectors.ids
    assert seen == [(n, len(CASES), id) for n, id in enumerate(vectors.ids, start=1)]


def test_an_empty_set_is_one(tmp_path):
    assert len(samples.write(tmp_path / "set", [])) == 0
    check_set(tmp_path / "set")


def test_the_content_digest_is_that_of_the_meaning_and_the_bits():
    case = CASES[0]
    tensors = samples.tensors(case)
    digest = case_digest(case, tensors)
    swapped = {name: x.astype(x.dtype.newbyteorder(">")) for name, x in tensors.items()}
    turned = {name: np.asfortranarray(x) for name, x in reversed(tensors.items())}
    assert case_digest(case, swapped) == case_digest(case, turned) == digest
    name = "out.o.float64"
    changed = [
        case_digest(replaced(case, reason="another"), tensors),
        case_digest(case, {name: x for name, x in tensors.items() if name != "in.q"}),
        case_digest(case, tensors | {name: np.nextafter(tensors[name], np.inf)}),
        case_digest(case, tensors | {name: tensors[name].reshape(-1)}),
        case_digest(case, tensors | {name: tensors[name].view(np.int64)}),
    ]
    assert len({digest, *changed}) == 6


def test_digests_are_those_that_another_program_computes():
    """sha256sum of the line "a/b 00", and of the eight bytes of 1.0."""
    assert set_digest({"a/b": "00"}) == (
        "2aeb3f02d927caa9bd4f860318bc5843ab3c2870ce660d52bfd7d97bbaed4d34"
    )
    one = "6c3c396ed6b5c36dcae172271f462051b1266b851e92df3deea8ac65478fd712"
    assert tensor_digest(np.array(1.0)) == tensor_digest(np.array([1.0], dtype=">f8")) == one


def test_the_content_digest_follows_from_the_files_as_the_format_says(tmp_path):
    """Made from the files' bytes alone, with no code of ringspec."""
    vectors = samples.write(tmp_path / "set")
    for id, entry in vectors.manifest.cases.items():
        data = json.loads((tmp_path / "set" / id / "case.json").read_text())
        total = json.dumps(data, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        file = tmp_path / "set" / id / "tensors.safetensors"
        raw = file.read_bytes() if file.exists() else b"\2\0\0\0\0\0\0\0{}"
        (length,) = struct.unpack("<Q", raw[:8])
        header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        for name in sorted(header):
            axes = ",".join(map(str, header[name]["shape"]))
            total += f"{name} {header[name]['dtype']} {axes}\n".encode()
            total += body[slice(*header[name]["data_offsets"])]
        assert hashlib.sha256(total).hexdigest() == entry.content
    lines = [f"{id} {entry.content}\n" for id, entry in sorted(vectors.manifest.cases.items())]
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == vectors.manifest.content


def test_an_unknown_id_is_refused_with_the_nearest_one(tmp_path):
    vectors = samples.write(tmp_path / "set")
    with refuses((VectorError, "unknown-case"), match="write 'ring/table-w3'"):
        vectors.case("ring/table-w4")
    for id in ("../manifest", "", None, ["ring/table-w3"]):
        with refuses((VectorError, "unknown-case")):
            vectors.tensors(id)


@pytest.mark.parametrize("name", [7, None, "a\0b", b"core", ["core"]])
def test_what_is_no_name_of_a_set_is_refused(name):
    with pytest.raises(OptionError):
        open_set(name)


def test_a_folder_that_is_none_is_refused_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses((VectorError, "path"), match="write 'core'"):
        open_set("cores")
    (tmp_path / "file").write_text("{}")
    with refuses((VectorError, "path"), match="the folder of a set"):
        open_set(tmp_path / "file")
    with refuses((VectorError, "path-missing-file"), match=r"manifest\.json"):
        open_set(tmp_path)


def test_a_set_is_opened_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "DATA", tmp_path)
    samples.write(tmp_path / "kernel")
    assert open_set("kernel").ids == check_set("kernel").ids


def test_opening_reads_the_manifest_and_a_case_reads_its_own_file(tmp_path):
    vectors = samples.write(tmp_path / "set")
    for other in vectors.ids[1:]:
        shutil.rmtree(tmp_path / "set" / other)
    (tmp_path / "set" / "flags.json").unlink()
    assert open_set(tmp_path / "set").case(vectors.ids[0]) == CASES[0]


def test_reading_a_set_is_quick(tmp_path):
    """A reader in a notebook or a test waits for a case as long as for a file: measured 1 ms."""
    samples.write(tmp_path / "set")
    check_set(tmp_path / "set")
    start = time.process_time()
    check_set(tmp_path / "set")
    assert time.process_time() - start <= 2.0
