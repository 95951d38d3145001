"""Writing a set: whole or not at all, and nothing that a reader would refuse."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from vectors import samples

from ringspec.errors import DtypeError, OptionError, VectorError
from ringspec.vectors import check_set, export_set, open_set, write_set
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.files import new_folder, remove_left
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.format.manifest import LIMITS

CASES = samples.cases()


def bytes_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def replaced(case, **changes):
    return Case(**dict(vars(case)) | changes)


@pytest.mark.parametrize("lie", ["file", "folder", "empty-folder", "dangling-link"])
def test_an_existing_destination_is_refused_and_stays(tmp_path, lie):
    target = tmp_path / "set"
    if lie == "file":
        target.write_bytes(b"old")
    elif lie == "dangling-link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        if lie == "folder":
            (target / "old").write_bytes(b"old")
    before = bytes_of(tmp_path)
    with refuses((OptionError, "destination")):
        samples.write(target)
    assert bytes_of(tmp_path) == before
    assert os.listdir(tmp_path) == ["set"]


def test_a_destination_without_folder_is_refused(tmp_path):
    with refuses((OptionError, "destination"), match="make the folder first"):
        samples.write(tmp_path / "no" / "set")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_a_failure_half_way_leaves_nothing(tmp_path, error):
    def failing():
        yield from samples.entries()[:3]
        raise error

    with pytest.raises(error):
        samples.write(tmp_path / "set", failing())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["rename", "fsync", "chmod"])
def test_a_failure_at_the_end_leaves_nothing(tmp_path, monkeypatch, call):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space"):
        samples.write(tmp_path / "set")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_set_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file and each folder is synchronised, then the folder is renamed, then its parent."""
    calls = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        calls.append(os.fstat(handle).st_ino)
        fsync(handle)

    def noted_rename(old, new):
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    vectors = samples.write(tmp_path / "set")
    monkeypatch.undo()
    numbers = {path.stat().st_ino for path in (tmp_path / "set").rglob("*")}
    numbers.add((tmp_path / "set").stat().st_ino)
    at = calls.index("rename")
    assert numbers == set(calls[:at])
    assert calls[at + 1 :] == [tmp_path.stat().st_ino]
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    calls.clear()
    export_set(vectors, tmp_path / "x.tar")
    archive = (tmp_path / "x.tar").stat().st_ino
    assert calls == [archive, "rename", tmp_path.stat().st_ino]


def test_an_existing_destination_is_refused_before_anything_is_derived(tmp_path):
    (tmp_path / "set").mkdir()

    def derived():
        raise AssertionError("derived in vain")
        yield

    with refuses((OptionError, "destination")):
        samples.write(tmp_path / "set", derived())


def test_a_destination_that_appears_meanwhile_stays(tmp_path):
    def slow():
        yield from samples.entries()
        (tmp_path / "set").mkdir()

    with refuses((OptionError, "destination")):
        samples.write(tmp_path / "set", slow())
    assert os.listdir(tmp_path) == ["set"] and os.listdir(tmp_path / "set") == []


def test_a_file_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "tensors.safetensors", 1000)
    with refuses((VectorError, "manifest"), match="at most 1000 bytes"):
        samples.write(tmp_path / "set")
    assert os.listdir(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
from vectors import samples

def slow():
    yield from samples.entries()[:4]
    print("half way", flush=True)
    time.sleep(60)

samples.write(Path(sys.argv[1]), slow())
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_killed_writer_leaves_no_set(tmp_path):
    tests, root = Path(__file__).parents[1], Path(__file__).parents[2]
    paths = os.pathsep.join((str(tests), str(root)))
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "set")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert writer.stdout.readline() == b"half way\n"
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(timeout=300) == -signal.SIGKILL
    writer.stdout.close()
    assert not (tmp_path / "set").exists()
    assert len(os.listdir(tmp_path)) == 1  # what the killed process has left
    samples.write(tmp_path / "set")
    check_set(tmp_path / "set")
    assert os.listdir(tmp_path) == ["set"]


def test_what_a_living_process_writes_at_the_same_place_is_left_alone(tmp_path):
    with new_folder(tmp_path / "set") as folder:
        (folder / "begun").write_text("half")
        with new_folder(tmp_path / "other"):
            remove_left(tmp_path / "set")
        assert (folder / "begun").read_text() == "half"
    assert (tmp_path / "set/begun").exists()


def test_a_set_that_others_may_read_has_their_permissions(tmp_path):
    samples.write(tmp_path / "set")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "set").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "set/manifest.json").stat().st_mode & 0o777 == 0o666 & ~mask
    export_set(open_set(tmp_path / "set"), tmp_path / "x.tar")
    assert (tmp_path / "x.tar").stat().st_mode & 0o777 == 0o666 & ~mask


FULL = CASES[0]
GIVEN = samples.tensors(FULL)
SAMPLED = next(case for case in CASES if case.storage == "sampled")
PINNED = next(case for case in CASES if case.storage == "digests")
O = "out.o.float64"
UNWRITABLE = {
    "id-twice": ([(FULL, GIVEN)] * 2, (VectorError, "manifest")),
    "no-tensors": ([(FULL, None)], (VectorError, "case-tensors")),
    "tensor-missing": (
        [(FULL, {name: x for name, x in GIVEN.items() if name != O})],
        (VectorError, "case-tensors"),
    ),
    "tensor-too-many": (
        [(FULL, GIVEN | {"out.p.float64": GIVEN[O]})],
        (VectorError, "case-tensors"),
    ),
    "another-dtype": (
        [(FULL, GIVEN | {O: GIVEN[O].astype(np.float32)})],
        (VectorError, "case-tensors"),
    ),
    "another-shape": ([(FULL, GIVEN | {O: GIVEN[O][:, :1]})], (VectorError, "case-tensors")),
    "objects": ([(FULL, GIVEN | {O: GIVEN[O].astype(object)})], DtypeError),
    "digests-in-full": (
        [(replaced(FULL, digests={"in.q": "0" * 64}), GIVEN)],
        (VectorError, "case-tensors"),
    ),
    "sampled-without-digests": (
        [(replaced(SAMPLED, digests={}), samples.tensors(SAMPLED))],
        (VectorError, "case-tensors"),
    ),
    "tensors-beside-digests": ([(PINNED, GIVEN)], (VectorError, "case-tensors")),
    "digest-missing": (
        [(replaced(PINNED, digests={"in.q": "0" * 64}), None)],
        (VectorError, "case-tensors"),
    ),
    "digest-of-nothing": (
        [(replaced(PINNED, digests=PINNED.digests | {"out.p": "0" * 64}), None)],
        (VectorError, "case-tensors"),
    ),
    "unknown-flag": ([(replaced(FULL, flags=("none-such",)), GIVEN)], (VectorError, "flag-format")),
    "bad-case": ([(replaced(FULL, rules=()), GIVEN)], (VectorError, "case-format")),
    "path-escape": ([(replaced(FULL, id="../../escape"), GIVEN)], (VectorError, "case-format")),
    "case-inside-a-case": (
        [(replaced(FULL, id="a/b"), GIVEN), (replaced(FULL, id="a/b/c"), GIVEN)],
        (VectorError, "manifest"),
    ),
}


@pytest.mark.parametrize(("given", "error"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_a_reader_would_refuse_is_not_written(tmp_path, given, error):
    (tmp_path / "inside").mkdir()
    with refuses(error):
        samples.write(tmp_path / "inside" / "set", given)
    assert os.listdir(tmp_path / "inside") == []
    assert os.listdir(tmp_path) == ["inside"]


@pytest.mark.parametrize(
    ("name", "version"), [("", "1.0"), ("Core", "1.0"), ("../x", "1.0"), ("x", "1"), ("x", 1.0)]
)
def test_an_odd_name_or_version_is_refused(tmp_path, name, version):
    with pytest.raises(OptionError):
        write_set(tmp_path / "set", name, version, [], {})


def test_an_odd_flag_is_refused(tmp_path):
    with refuses((VectorError, "flag-format")):
        samples.write(tmp_path / "set", [], flags=[Flag("x", "", "effect")])
    with refuses((VectorError, "flag-format")):
        samples.write(tmp_path / "set", [], flags=[Flag("x", "y", "z", ("https://a.org",), ())])
    with refuses((VectorError, "flag-format")):
        samples.write(tmp_path / "set", [], flags=[Flag("x", "y", "z", ("file:///a",), ("code",))])
    assert os.listdir(tmp_path) == []
