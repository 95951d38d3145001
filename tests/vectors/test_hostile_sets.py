"""Sets from outside: whatever they hold, an error of its kind and code, bounded memory, nothing opened
outside of the set.

Two kinds of enemy: one changes files and leaves the manifest (a hash or a size finds it), the other
writes the manifest anew (``relisted``), so that only the checks behind the hashes are left.
"""

import os
import shutil
import socket
import sys
import tracemalloc

import pytest
from vectors.hostile import refused
from vectors.samples import relisted, summed

from ringspec.errors import RingspecError, VectorError
from ringspec.vectors import check_set, open_set
from ringspec.vectors.format import files

CASE = "merge/three"
FILE = "merge/three/tensors.safetensors"
on_posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


def test_the_set_is_good_before_it_is_spoilt(root):
    check_set(root)
    relisted(root)
    check_set(root)


# Files


def test_a_flipped_bit_is_found(root):
    raw = bytearray((root / FILE).read_bytes())
    raw[-1] ^= 1
    (root / FILE).write_bytes(raw)
    error = refused(root, (VectorError, "digest-file-hash"))
    assert FILE in error.expected


@pytest.mark.parametrize("name", [FILE, f"{CASE}/case.json", "flags.json"])
@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b" ", lambda raw: b""])
def test_a_shorter_or_longer_file_is_found(root, name, change):
    (root / name).write_bytes(change((root / name).read_bytes()))
    refused(root, (VectorError, "digest-file-size"))


@pytest.mark.parametrize("name", [FILE, f"{CASE}/case.json", "flags.json", "manifest.json"])
def test_a_missing_file_is_found(root, name):
    (root / name).unlink()
    error = refused(root, (VectorError, "path-missing-file"))
    assert name in error.expected


def test_a_missing_folder_is_found(root):
    shutil.rmtree(root / "merge")
    refused(root, (VectorError, "path-missing-file"))


@pytest.mark.parametrize(
    "name",
    ["note.txt", ".hidden", f"{CASE}/note.txt", "merge/two/case.json", "empty/", "__init__.py"],
)
def test_an_unlisted_file_or_folder_is_found(root, name):
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).mkdir() if name.endswith("/") else (root / name).write_text("{}")
    refused(root, (VectorError, "path-unlisted-file"))


@pytest.mark.parametrize("name", ["Manifest.json", f"{CASE}/Case.json", "MERGE/three/case.json"])
def test_names_that_differ_in_case_alone_are_found(root, name):
    (root / name).parent.mkdir(exist_ok=True, parents=True)
    (root / name).write_text("{}")
    assert "only in case" in refused(root, (VectorError, "path-unlisted-file")).got


@on_posix
@pytest.mark.parametrize("name", [FILE, f"{CASE}/case.json", "flags.json", "manifest.json"])
@pytest.mark.parametrize("target", ["same", "outside", "nowhere"])
def test_a_symbolic_link_in_place_of_a_file_is_refused(root, name, target):
    place = root / name
    away = root.parent / "elsewhere"
    shutil.copy(place, away)
    place.unlink()
    place.symlink_to({"same": away, "outside": "/etc/hostname", "nowhere": "none"}[target])
    refused(root, (VectorError, "path-symlink"))


@on_posix
@pytest.mark.parametrize("name", ["merge", CASE])
def test_a_symbolic_link_in_place_of_a_folder_is_refused(root, name):
    (root / name).rename(root.parent / "elsewhere")
    (root / name).symlink_to(root.parent / "elsewhere")
    refused(root, (VectorError, "path-symlink"))
    refused(root, (VectorError, "path-symlink"), lambda root: open_set(root).tensors(CASE))
    refused(root, (VectorError, "path-symlink"), lambda root: open_set(root).case(CASE))


@on_posix
def test_an_unlisted_symbolic_link_is_refused(root):
    (root / "link").symlink_to(root)
    refused(root, (VectorError, "path-unlisted-file"))


@on_posix
@pytest.mark.parametrize("name", [FILE, "flags.json", "manifest.json"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(root, name):
    (root / name).unlink()
    os.mkfifo(root / name)
    refused(root, (VectorError, "path-special-file"))


@on_posix
def test_a_socket_in_place_of_a_file_is_refused(root, monkeypatch):
    (root / "flags.json").unlink()
    monkeypatch.chdir(root)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("flags.json")
        refused(root, (VectorError, "path-special-file"))


@pytest.mark.parametrize("name", [FILE, "flags.json", "manifest.json"])
def test_a_folder_in_place_of_a_file_is_refused(root, name):
    (root / name).unlink()
    (root / name).mkdir()
    refused(root, (VectorError, "path-special-file"))


def test_a_file_in_place_of_a_folder_is_refused(root):
    shutil.rmtree(root / "merge")
    (root / "merge").write_text("{}")
    refused(root, (VectorError, "path-special-file"))
    refused(root, (VectorError, "path-special-file"), lambda root: open_set(root).case(CASE))


@on_posix
def test_a_file_that_becomes_a_link_between_two_looks_is_not_followed(root, monkeypatch):
    """Between lstat and open: the flag O_NOFOLLOW is the second line."""
    monkeypatch.setattr(files, "checked_path", lambda root, name: root / name)
    shutil.copy(root / FILE, root.parent / "elsewhere")
    (root / FILE).unlink()
    (root / FILE).symlink_to(root.parent / "elsewhere")
    refused(root, (VectorError, "path-missing-file"), lambda root: open_set(root).tensors(CASE))
    os.unlink(root / FILE)
    os.mkfifo(root / FILE)
    refused(root, (VectorError, "path-special-file"), lambda root: open_set(root).tensors(CASE))


def test_a_file_that_grows_while_it_is_read_is_refused(root, monkeypatch):
    """A size that was right when it was looked at."""
    size = (root / FILE).stat().st_size
    real = os.fstat

    def earlier(handle):
        status = list(real(handle))
        status[6] = min(status[6], size - 1)
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", earlier)
    refused(
        root, (VectorError, "digest-file-size"), lambda root: files.read_plain(root, FILE, size)
    )


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a//b", "a\\b", "c:x", "", "a/."]
)
def test_a_path_out_of_the_set_is_refused(root, name):
    with pytest.raises(RingspecError, match="inside the set"):
        files.read_plain(root, name, 100)


OPENED: list[str] | None = None


def note_opened(event, arguments):
    if event == "open" and OPENED is not None and isinstance(arguments[0], (str, bytes)):
        OPENED.append(str(arguments[0]))


def test_nothing_outside_of_the_set_is_opened(root):
    global OPENED
    check_set(root)  # schemas are loaded
    sys.addaudithook(note_opened)
    relisted(root, lambda data: data["cases"].update({"../../etc": data["cases"][CASE]}))
    OPENED = []
    try:
        refused(root, (VectorError, "manifest"))
        assert OPENED == [str(root / "manifest.json")]
    finally:
        OPENED = None


# Memory


def peak(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["manifest.json", "flags.json", FILE, f"{CASE}/case.json"])
def test_a_file_of_ten_gigabytes_is_refused_unread(root, name):
    check_set(root)
    os.truncate(root / name, 10 * 2**30)  # sparse: no disk is taken
    assert peak(lambda: refused(root, (VectorError, "digest-file-size"))) < 2 * 2**20


def test_a_manifest_that_lists_huge_files_is_refused(root):
    for name in ("tensors.safetensors", "case.json"):

        def change(data, name=name):
            data["cases"][CASE]["files"][name]["bytes"] = 2**26
            data["cases"][CASE]["files"][name]["bytes"] += name == "tensors.safetensors"
            summed(data)

        relisted(root, change)
        refused(root, (VectorError, "manifest"))


@pytest.mark.parametrize("item", ["[],", "[", "{},", '"",', "1," * 8])
def test_a_manifest_of_the_largest_size_takes_bounded_memory(root, item):
    text = "[" + item * (2**23 // len(item) - 1)
    (root / "manifest.json").write_text(text)
    assert peak(lambda: refused(root, (VectorError, "manifest"))) < 100 * 2**20
