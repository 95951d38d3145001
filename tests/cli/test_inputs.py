"""Drawn tensors are the same for ever; files are hostile until checked."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
from refusals import refuses

from ringspec.cli.shared.inputs import MAX_FILE_BYTES, Shape, drawn, drawn_inputs, read_inputs
from ringspec.cli.shared.npz import read_npz
from ringspec.errors import FileFormatError, OptionError
from ringspec.formats import store
from ringspec.tensorfile import write_tensors

# Computed once from the definition in the docstring of drawn.
GOLDEN = ["0x1.0b52376ed7e0fp+1", "0x1.8017a8e716d48p-6", "0x1.b47d4fc4aa93bp-1"]
SHAPES = {"q": (1, 2, 6, 4), "k": (1, 1, 6, 4), "v": (1, 1, 6, 3), "dy": (1, 2, 6, 3)}


def tensors(*names):
    return {name: drawn(7, name, SHAPES[name]) for name in names or SHAPES}


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zip_file(path, **members: bytes):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def test_drawn_tensors_never_change():
    assert [x.hex() for x in drawn(0, "q", (3,)).tolist()] == GOLDEN
    assert drawn(0, "q", (1 << 16,))[:3].tolist() == drawn(0, "q", (3,)).tolist()


def test_drawn_tensors_look_normal_and_differ_by_seed_name_and_block():
    x = drawn(0, "q", (3 << 16,))
    assert abs(x.mean()) <= 0.01 and abs(x.var() - 1) <= 0.01 and np.abs(x).max() <= 3.47
    blocks = x.reshape(3, -1)
    others = [*blocks, drawn(1, "q", (1 << 16,)), drawn(0, "k", (1 << 16,))]
    correlations = np.corrcoef(others) - np.eye(5)
    assert np.abs(correlations).max() <= 0.02


def test_drawn_tensors_have_a_full_significand():
    x = drawn(0, "q", (1000,))
    assert np.mean(x != x.astype(np.float32)) >= 0.99


def test_too_many_elements_are_refused_before_they_are_made():
    with pytest.raises(OptionError, match="elements"):
        drawn_inputs(0, Shape(1, 1, 1, 1 << 40, 8, 8, 8), ("q", "k", "v"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_gives_back_what_was_saved(tmp_path, save):
    saved = tensors()
    saved["k"] = np.asfortranarray(saved["k"])
    saved["v"] = saved["v"].astype(">f4")
    save(tmp_path / "x.npz", **saved, other=np.arange(3))
    read = read_inputs(tmp_path / "x.npz")
    assert read.ignored == ("other",)
    assert set(read.tensors) == set(saved)
    for name, x in saved.items():
        assert np.array_equal(read.tensors[name], x)


def test_safetensors_give_back_what_was_saved(tmp_path):
    saved = tensors()
    saved["q"] = store(saved["q"], "bfloat16")
    write_tensors(tmp_path / "x.safetensors", {**saved, "other": np.zeros(1)})
    read = read_inputs(tmp_path / "x.safetensors")
    assert read.ignored == ("other",)
    assert all(np.array_equal(read.tensors[name], x) for name, x in saved.items())


class Bomb:
    """Unpickling an instance makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_an_npz_is_refused_and_never_loaded(tmp_path):
    trap = np.empty(1, dtype=object)
    trap[0] = Bomb(tmp_path / "executed")
    np.savez(tmp_path / "x.npz", **{**tensors(), "q": trap})
    with pytest.raises(FileFormatError, match="never loaded"):
        read_inputs(tmp_path / "x.npz")
    assert not (tmp_path / "executed").exists()
    np.load(tmp_path / "x.npz", allow_pickle=True)["q"]
    assert (tmp_path / "executed").exists(), "the trap would have sprung"


def test_objects_under_a_name_that_is_not_read_do_no_harm(tmp_path):
    trap = np.empty(1, dtype=object)
    trap[0] = Bomb(tmp_path / "executed")
    np.savez(tmp_path / "x.npz", **tensors(), other=trap)
    assert read_inputs(tmp_path / "x.npz").ignored == ("other",)
    assert not (tmp_path / "executed").exists()


F8 = "{'descr':'<f8','fortran_order':False,'shape':%s}\n"
HOSTILE = {
    "a shape far larger than the data": npy(F8 % "(1000000000000,)"),
    "a shape whose product overflows": npy(F8 % "(4294967296,4294967296)"),
    "negative lengths with a fitting product": npy(F8 % "(-1,-8)", bytes(64)),
    "a length that is a boolean": npy(F8 % "(True,)", bytes(8)),
    "more data than the shape says": npy(F8 % "(1,)", bytes(16)),
    "less data than the shape says": npy(F8 % "(3,)", bytes(16)),
    "rank 70": npy(F8 % str((1,) * 70), bytes(8)),
    "a deeply nested header": npy("(" * 9000),
    "a header that is code": npy("__import__('os').mkdir('executed')\n"),
    "an enormous header": npy(" " * 60000),
    "no header": b"",
    "a wrong magic string": b"\x93NUMPX\x01\x00" + bytes(80),
    "an unknown version": b"\x93NUMPY\x03\x00" + bytes(80),
    "fields": npy("{'descr':[('a','<f8')],'fortran_order':False,'shape':(1,)}\n", bytes(8)),
    "elements without size": npy("{'descr':'|S0','fortran_order':False,'shape':(1,2)}\n"),
    "a raw type, as bfloat16 becomes": npy(
        "{'descr':'|V2','fortran_order':False,'shape':(1,)}\n", bytes(2)
    ),
}


@pytest.mark.parametrize("member", HOSTILE.values(), ids=HOSTILE)
def test_hostile_npz_members_are_file_format_errors(tmp_path, monkeypatch, member):
    monkeypatch.chdir(tmp_path)
    path = zip_file(tmp_path / "x.npz", q=member, k=member, v=member)
    with pytest.raises(FileFormatError):
        read_inputs(path)
    assert os.listdir(tmp_path) == ["x.npz"]


def test_npz_larger_than_allowed_is_refused_before_it_is_unpacked(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", q=np.zeros(1 << 16))
    assert (tmp_path / "x.npz").stat().st_size < 2000
    with pytest.raises(FileFormatError, match="at most 1000 bytes"):
        read_npz(tmp_path / "x.npz", ["q"], max_bytes=1000)


def test_npz_with_a_name_that_is_there_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive, pytest.warns(UserWarning):
        archive.writestr("q.npy", b"")
        archive.writestr("q.npy", b"")
    with pytest.raises(FileFormatError, match="duplicate name"):
        read_inputs(tmp_path / "x.npz")


def test_any_damaged_npz_is_an_error_of_its_class_or_still_right(tmp_path):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **tensors())
    whole = buffer.getvalue()
    path = tmp_path / "x.npz"
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        check_damaged(path, bytes(damaged))
        if place % 5 == 0:
            check_damaged(path, whole[:place])


def check_damaged(path, data: bytes):
    """Either refused, or the damage was in a place that means nothing."""
    path.write_bytes(data)
    try:
        read = read_inputs(path)
    except FileFormatError:
        return
    for name, x in read.tensors.items():
        assert np.array_equal(x, tensors()[name])


@pytest.mark.parametrize("missing", ["q", "k", "v"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_missing_name_is_named(tmp_path, missing, suffix):
    path = tmp_path / f"x{suffix}"
    left = {name: x for name, x in tensors().items() if name != missing}
    if suffix == ".npz":
        np.savez(path, **left)
    else:
        write_tensors(path, left)
    with pytest.raises(FileFormatError, match=f"no {missing} "):
        read_inputs(path)


def test_only_regular_files_of_known_names_and_bounded_size_are_read(tmp_path):
    with refuses((OptionError, "unknown-name"), match="ends in"):
        read_inputs(tmp_path / "x.pt")
    with pytest.raises(FileFormatError, match="regular file"):
        read_inputs(tmp_path / "missing.npz")
    (tmp_path / "directory.npz").mkdir()
    with pytest.raises(FileFormatError, match="regular file"):
        read_inputs(tmp_path / "directory.npz")
    with open(tmp_path / "large.npz", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse: takes no space
    with pytest.raises(FileFormatError, match="at most"):
        read_inputs(tmp_path / "large.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(FileFormatError, match="regular file"):
        read_inputs(tmp_path / "x.npz")
