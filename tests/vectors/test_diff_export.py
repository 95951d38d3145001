"""Differences of sets, counted by hand; archives whose bytes depend on the set alone."""

import dataclasses
import gzip
import json
import os
import shutil
import tarfile
import time

import ml_dtypes
import numpy as np
import pytest
from refusals import refuses
from vectors import samples

from ringspec.errors import OptionError, VectorError
from ringspec.vectors import check_set, diff_sets, export_set, open_set
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.digest import sha256
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.sets.diff import TensorChange, diff_tensor, diff_to_data, diff_to_text

ID = "merge/three"


def replaced(case, **changes):
    return Case(**dict(vars(case)) | changes)


def sets(tmp_path, entries, **changes):
    """The sample set, and one of other entries."""
    return samples.write(tmp_path / "old"), samples.write(tmp_path / "new", entries, **changes)


def test_equal_sets_are_equal(tmp_path):
    old, new = sets(tmp_path, samples.entries())
    diff = diff_sets(old, new)
    assert diff.equal
    assert diff_to_text(diff) == "equal\n"
    assert diff_to_data(diff)["equal"] is True


def test_added_removed_and_changed_cases_are_named(tmp_path):
    old_entries = {case.id: (case, tensors) for case, tensors in samples.entries()}
    entries = dict(old_entries)
    del entries["block/backward"]
    case, tensors = entries[ID]
    tensors = dict(tensors)
    lse = tensors["out.lse.float64"].copy()
    lse.flat[1] = np.nextafter(np.nextafter(lse.flat[1], 99), 99)
    lse.flat[3] = np.nextafter(lse.flat[3], 99)
    tensors["out.lse.float64"] = lse
    terms_case, terms_tensors = entries["ring/packed-w2"]
    entries[ID] = (replaced(case, reason="another"), tensors)
    terms = terms_case.terms | {"dropout_p": 0.5, "causal": True}
    entries["ring/packed-w2"] = (replaced(terms_case, terms=terms), terms_tensors)
    added = replaced(case, id="merge/two")
    entries["merge/two"] = (added, samples.tensors(added))
    flags = dict(samples.FLAGS)
    del flags["lost-sink"]
    flags["new-flag"] = Flag("new-flag", "class", "effect")
    old, new = sets(tmp_path, entries.values(), set_version="1.1", flags=flags)
    diff = diff_sets(old, new)
    assert not diff.equal
    assert (diff.added, diff.removed) == (("merge/two",), ("block/backward",))
    assert [change.id for change in diff.changed] == [ID, "ring/packed-w2"]
    merge, packed = diff.changed
    assert [(c.path, c.old, c.new) for c in merge.fields] == [
        ("reason", '"a small case for a test"', '"another"')
    ]
    assert [(c.path, c.old, c.new) for c in packed.fields] == [
        ("terms/causal", None, "true"),
        ("terms/dropout_p", "0.25", "0.5"),
    ]
    assert packed.tensors == ()
    (change,) = merge.tensors
    assert (change.name, change.kind, change.unit) == ("out.lse.float64", "values", "ulp")
    assert (change.elements, change.size, change.largest) == (2, lse.size, 2)
    assert [c.path for c in diff.versions] == ["set_version"]
    assert [c.path for c in diff.flags] == ["lost-sink", "new-flag"]
    text = diff_to_text(diff)
    assert text.startswith("cases: 1 added, 1 removed, 2 changed\n")
    assert "  out.lse.float64: 2 of 12 elements, by at most 2 ulp\n" in text
    assert "added merge/two\n" in text and "removed block/backward\n" in text
    data = json.loads(json.dumps(diff_to_data(diff)))
    assert data["equal"] is False
    assert data["changed"][0]["tensors"][0]["largest"] == 2
    back = diff_sets(new, old)
    assert (back.added, back.removed) == (diff.removed, diff.added)


@pytest.mark.parametrize(
    "change",
    [
        {"added": ("a/b",)},
        {"removed": ("a/b",)},
        {"changed": (None,)},
        {"versions": (None,)},
        {"flags": (None,)},
    ],
)
def test_a_difference_of_any_kind_is_one(tmp_path, change):
    old, new = sets(tmp_path, samples.entries())
    assert not dataclasses.replace(diff_sets(old, new), **change).equal


def test_a_change_of_the_stored_form_alone_is_no_difference(tmp_path):
    """The same case in other white space: another file, the same meaning."""
    old, _ = sets(tmp_path, samples.entries())
    place = tmp_path / "new" / ID / "case.json"
    text = json.dumps(json.loads(place.read_text()))
    manifest = json.loads((tmp_path / "new/manifest.json").read_text())
    entry = manifest["cases"][ID]["files"]["case.json"]
    manifest["bytes"] += len(text) - entry["bytes"]
    entry |= {"bytes": len(text), "sha256": sha256(text.encode())}
    place.write_text(text)
    (tmp_path / "new/manifest.json").write_text(json.dumps(manifest))
    assert diff_sets(old, check_set(tmp_path / "new")).equal


def test_progress_counts_the_shared_cases(tmp_path):
    old, new = sets(tmp_path, samples.entries()[1:])
    seen = []
    diff_sets(old, new, lambda *step: seen.append(step))
    assert [step[0] for step in seen] == list(range(1, len(new) + 1))


def change_of(old, new) -> TensorChange:
    change = diff_tensor("x", old, new)
    assert change is not None
    return change


BF16 = ml_dtypes.bfloat16
DISTANCES = {
    "one-ulp": (np.float64([1, 2]), np.float64([1, 2 + 2**-51]), 1, 1),
    "over-a-binade": (np.float32([1]), np.float32([1 - 2**-24]), 1, 1),
    "over-zero": (np.float64([5e-324]), np.float64([-5e-324]), 1, 2),
    "signed-zero": (np.float64([0.0]), np.float64([-0.0]), 1, 0),
    "to-infinity": (np.float16([65504]), np.float16([np.inf]), 1, 1),
    "all-of-float64": (np.float64([-np.inf]), np.float64([np.inf]), 1, 2 * 0x7FF0 << 48),
    "bfloat16": (np.array([1, 3], BF16), np.array([1.0078125, 3], BF16), 1, 1),
    "integers": (np.int64([1, 5, 9]), np.int64([1, 7, 4]), 2, 5),
    "far-integers": (np.int64([-(2**63)]), np.int64([2**63 - 1]), 1, 2**64 - 1),
    "booleans": (np.array([True, False]), np.array([False, False]), 1, 1),
}


@pytest.mark.parametrize(("old", "new", "elements", "largest"), DISTANCES.values(), ids=DISTANCES)
def test_distances_are_counted_in_steps_of_the_format(old, new, elements, largest):
    for change in (change_of(old, new), change_of(new, old)):
        assert (change.kind, change.elements, change.largest) == ("values", elements, largest)
    assert diff_tensor("x", old, old.copy()) is None


def test_tensors_that_appear_vanish_or_change_their_form_are_named():
    x = np.zeros((2, 3))
    assert change_of(None, x).kind == "added"
    assert change_of(x, None).kind == "removed"
    reshaped = change_of(x, x.astype(np.float32))
    assert (reshaped.kind, reshaped.old, reshaped.new) == ("reshaped", "F64 [2, 3]", "F32 [2, 3]")
    assert change_of(x, x.T).kind == "reshaped"


# Archives


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_an_archive_has_the_same_bytes_again(tmp_path, suffix):
    vectors = samples.write(tmp_path / "set")
    export_set(vectors, tmp_path / f"one{suffix}")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    for n, path in enumerate(sorted((tmp_path / "copy").rglob("*"))):
        os.utime(path, (10**9 + n, 10**9 + n))
        os.chmod(path, 0o700 if path.is_dir() else 0o600)
    (tmp_path / "copy" / "unlisted").write_text("not packed")
    time.sleep(1.1)  # a time stamp of gzip counts seconds
    export_set(open_set(tmp_path / "copy"), tmp_path / f"another{suffix}")
    one, another = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "another"))
    assert one == another


def test_the_two_kinds_hold_the_same_archive(tmp_path):
    vectors = samples.write(tmp_path / "set")
    export_set(vectors, tmp_path / "x.tar")
    export_set(vectors, tmp_path / "x.tar.gz")
    assert (
        gzip.decompress((tmp_path / "x.tar.gz").read_bytes()) == (tmp_path / "x.tar").read_bytes()
    )


def test_an_unpacked_archive_is_the_set(tmp_path):
    vectors = samples.write(tmp_path / "set")
    export_set(vectors, tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path, filter="data")
    assert diff_sets(vectors, check_set(tmp_path / "sample")).equal
    names = [member.name for member in members]
    assert names == sorted(names) and len(set(names)) == len(names)
    for member in members:
        assert (member.mtime, member.uid, member.gid) == (0, 0, 0)
        assert (member.uname, member.gname) == ("", "")
        assert member.mode == (0o755 if member.isdir() else 0o644)
        assert member.isdir() or member.isfile()
    packed = {name for name in names if tmp_path.joinpath(name).is_file()}
    assert packed == {f"sample/{name}" for name in ("manifest.json", *vectors.manifest.files())}


def test_an_archive_is_whole_or_not_at_all(tmp_path):
    vectors = samples.write(tmp_path / "set")
    (tmp_path / "set/schedule/q-ring/case.json").unlink()  # the last one packed
    with refuses((VectorError, "path-missing-file")):
        export_set(vectors, tmp_path / "x.tar")
    assert os.listdir(tmp_path) == ["set"]


def test_a_set_that_changed_is_not_packed(tmp_path):
    vectors = samples.write(tmp_path / "set")
    manifest = tmp_path / "set" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"set_version": "1.0"', '"set_version": "1.1"')
    )
    with refuses((VectorError, "digest-file-hash")):
        export_set(vectors, tmp_path / "x.tar")
    assert os.listdir(tmp_path) == ["set"]


def test_an_existing_file_is_refused_and_stays(tmp_path):
    vectors = samples.write(tmp_path / "set")
    (tmp_path / "x.tar").write_bytes(b"old")
    seen = []
    with refuses((OptionError, "destination")):
        export_set(vectors, tmp_path / "x.tar", lambda *step: seen.append(step))
    assert (tmp_path / "x.tar").read_bytes() == b"old"
    assert seen == []


def test_a_file_that_appears_meanwhile_stays(tmp_path):
    vectors = samples.write(tmp_path / "set")
    with refuses((OptionError, "destination")):
        export_set(
            vectors, tmp_path / "x.tar", lambda *_: (tmp_path / "x.tar").write_bytes(b"other")
        )
    assert (tmp_path / "x.tar").read_bytes() == b"other"
    assert sorted(os.listdir(tmp_path)) == ["set", "x.tar"]


@pytest.mark.parametrize("name", ["x.zip", "x", "tar", "x.tar.bz2", None])
def test_another_suffix_is_refused(tmp_path, name):
    vectors = samples.write(tmp_path / "set")
    with pytest.raises(OptionError):
        export_set(vectors, None if name is None else tmp_path / name)


def test_progress_counts_the_files(tmp_path):
    vectors = samples.write(tmp_path / "set")
    seen = []
    export_set(vectors, tmp_path / "x.tar", lambda *step: seen.append(step))
    count = len(vectors.manifest.files()) + 1
    assert [step[:2] for step in seen] == [(n, count) for n in range(1, count + 1)]
