"""Arrays from an untrusted .npz file.

``numpy.load`` allocates the size stated in a header before it reads the data, so a small file can request any amount of
memory. An array of objects contains pickles, and reading a pickle can run code. This reader limits sizes first,
compares every header with the bytes in the file, and refuses arrays of objects.

Source of the format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. An .npz file is a zip
archive with one .npy file for each name.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ringspec.errors import FileFormatError
from ringspec.plainfile import check_plain

MAX_MEMBERS = 1000
MAX_HEADER = 10_000
HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(
    path: Path, wanted: Iterable[str], max_bytes: int
) -> tuple[dict[str, NDArray], list[str]]:
    """Return the ``wanted`` arrays that the file contains, and the names of its other arrays.

    Raises :class:`~ringspec.errors.FileFormatError` unless the file has only plain arrays, with at
    most ``max_bytes`` in all.
    """
    names = set(wanted)
    try:
        check_plain(path, path.stat().st_mode)
        with zipfile.ZipFile(path) as archive:
            members = members_by_name(archive, path)
            total = sum(info.file_size for name, info in members.items() if name in names)
            if total > max_bytes:
                refuse(path, f"at most {max_bytes} bytes of arrays", f"{total} bytes")
            arrays = {
                name: read_member(archive, info, name, path)
                for name, info in members.items()
                if name in names
            }
    except FileFormatError:
        raise
    # zipfile, zlib and the header parser raise many kinds of error for malformed bytes.
    except Exception as cause:
        raise FileFormatError(
            f"an .npz file in {path}",
            f"{type(cause).__name__}: {str(cause)[:200]}",
            "write the file again with numpy.savez",
        ) from None
    return arrays, sorted(set(members) - names)


def refuse(path: Path, expected: str, got: str) -> None:
    raise FileFormatError(
        f"{expected} in {path}", got, "write plain float arrays with numpy.savez, or .safetensors"
    )


def members_by_name(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the members of the archive by array name, that is, without the suffix .npy."""
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        refuse(path, f"at most {MAX_MEMBERS} arrays", f"{len(infos)}")
    members = {info.filename.removesuffix(".npy"): info for info in infos}
    if len(members) != len(infos):
        refuse(path, "every name once", "a duplicate name")
    return members


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, path: Path) -> NDArray:
    """Read one array; refuse it if its data do not have exactly the size that its header states."""
    with archive.open(info) as member:
        data = member.read(info.file_size + 1)
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    if version not in HEADER_READERS:
        refuse(path, f"an .npy header of version 1.0 or 2.0 for {name!r}", f"version {version}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for headers written by Python 2
        shape, in_columns, dtype = HEADER_READERS[version](stream, max_header_size=MAX_HEADER)
    if dtype.hasobject:
        refuse(path, f"numbers in {name!r}", "Python objects (pickles), which are never loaded")
    if dtype.kind == "V":
        refuse(
            path,
            f"a NumPy dtype for {name!r}",
            f"dtype {dtype} (.npz does not keep bfloat16 and float8; .safetensors does)",
        )
    if any(length < 0 for length in shape):
        refuse(path, f"lengths >= 0 for {name!r}", f"shape {shape}")
    here = len(data) - stream.tell()
    if math.prod(shape) * dtype.itemsize != here:
        refuse(path, f"the data of {name!r} with shape {shape} and dtype {dtype}", f"{here} bytes")
    flat = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if in_columns else "C")
