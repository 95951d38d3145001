"""Named tensors in one file, in the safetensors format: read strictly, written deterministically.

A file consists of the length of a JSON header (8 bytes, little endian), the header, and the data. The header maps each
name to the tensor's dtype, shape and [begin, end) offsets into the data; its key ``__metadata__`` maps strings to
strings. Source: https://github.com/huggingface/safetensors (README, "Format"). Equal tensors give equal bytes: names
are sorted, and there are no gaps or time stamps.

Files are not trusted. The reader limits the header's length, requires unique and known keys, and requires
offsets that are contiguous and within the file. It executes nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec import strictjson
from ringspec.errors import DtypeError, FileFormatError, OptionError, ShapeError, described, shown
from ringspec.formats import FORMATS
from ringspec.plainfile import read_plain_file

__all__ = ["decode", "encode", "read_metadata", "read_tensors", "write_tensors"]

MAX_HEADER = 1 << 20
MAX_RANK = 16
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": FORMATS["bfloat16"].dtype,
    "F8_E4M3": FORMATS["float8_e4m3fn"].dtype,
    "F8_E5M2": FORMATS["float8_e5m2"].dtype,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def dtype_code(dtype: np.dtype) -> str:
    if dtype.kind in "biufV":
        for code, known in DTYPES.items():
            if dtype.newbyteorder("<") == known.newbyteorder("<"):
                return code
    raise DtypeError(
        "a tensor dtype of the safetensors format", f"{dtype}", f"use one of {', '.join(DTYPES)}"
    )


def encode(tensors: dict[str, NDArray], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file that holds the given tensors, in C order and little endian.

    ``tensors`` maps names to arrays of any shape, and ``metadata`` maps names to text. Raises DtypeError or ShapeError
    for an array that the format cannot hold, and FileFormatError for names or metadata that it cannot hold.

    >>> sorted(decode(encode({"b": np.zeros(2), "a": np.ones((1, 2), np.float32)})))
    ['a', 'b']
    """
    _check_writable(tensors, metadata)
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    parts, offset = [], 0
    for name in sorted(tensors):
        array = _plain_array(tensors[name], name)
        code = dtype_code(array.dtype)
        data = np.ascontiguousarray(array).astype(DTYPES[code], copy=False).tobytes()
        span = [offset, offset + len(data)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": span}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    if len(text) > MAX_HEADER:
        raise FileFormatError(
            f"a header of at most {MAX_HEADER} bytes", f"{len(text)} bytes", "write several files"
        )
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def _check_writable(tensors: Any, metadata: Any) -> None:
    """Raise FileFormatError unless the reader of this module accepts the names and the metadata."""
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or "__metadata__" in tensors:
        raise FileFormatError(
            "a dict of arrays by name (not '__metadata__')",
            shown(list(tensors)) if isinstance(tensors, dict) else shown(tensors),
            "pass {'name': array}",
        )
    plain = isinstance(metadata, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    )
    if metadata is not None and not plain:
        raise FileFormatError(
            "metadata that maps strings to strings", shown(metadata), "write numbers as text"
        )


def _plain_array(x: Any, name: str) -> NDArray:
    """Return ``x`` as an array that the format can store."""
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(f"tensor {name!r} as a plain array", "a masked array", "pass .data")
    try:
        array = np.asarray(x)
    except Exception as cause:  # ragged lists, hooks that raise
        raise DtypeError(
            f"tensor {name!r} as an array", described(x, cause), "pass an array"
        ) from None
    if array.ndim > MAX_RANK:
        raise ShapeError(
            f"tensor {name!r} of at most {MAX_RANK} axes", f"{array.ndim}", "reshape it"
        )
    return array


def write_tensors(
    path: str | os.PathLike[str],
    tensors: dict[str, NDArray],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors to a file, completely or not at all: an interrupted call leaves an existing file unchanged.

    Shapes, ``metadata`` and errors are as in :func:`encode`. Also raises OptionError if ``path`` is not a path, and
    FileNotFoundError if the folder of the file does not exist.
    """
    data = encode(tensors, metadata)
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError("a path as text or Path", shown(path), "pass 'run.safetensors'")
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {target} does not exist; make it first")
    replace_file(target, data)


def replace_file(target: Path, data: bytes) -> None:
    """Write bytes to a file, completely or not at all; the file gets the permissions of a new file."""
    handle, temporary = tempfile.mkstemp(prefix=target.name + ".", dir=target.parent or None)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_tensors(path: str | os.PathLike[str]) -> dict[str, NDArray]:
    """Return the tensors in the file at ``path``, as a dict from names to arrays of any shape.

    Raises FileFormatError if the file is not a valid safetensors file.
    """
    return decode(read_plain_file(path), str(path))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the ``__metadata__`` of the file at ``path``; an empty dict if it has none."""
    header, _ = split(read_plain_file(path), str(path))
    return _check_metadata(header.get("__metadata__", {}), str(path))


def decode(data: bytes, what: str = "bytes") -> dict[str, NDArray]:
    """Return the tensors in ``data``, the bytes of a file, as a dict from names to arrays of any shape.

    The arrays are read-only views of ``data``. ``what`` names the file in an error. Raises FileFormatError if the
    bytes are not a valid safetensors file.
    """
    header, body = split(data, what)
    _check_metadata(header.pop("__metadata__", {}), what)
    tensors, expected = {}, 0
    spans = {name: _check_entry(name, entry, what) for name, entry in header.items()}
    for name in sorted(spans, key=lambda name: spans[name][2:]):
        dtype, shape, begin, end = spans[name]
        if begin != expected:
            _refuse(what, "tensors that follow each other without gap", f"{name!r} at byte {begin}")
        if end > len(body):
            _refuse(what, f"tensors inside {len(body)} bytes", f"{name!r} up to byte {end}")
        flat = np.frombuffer(body[begin:end], dtype=dtype)
        if (
            dtype == np.dtype("?")
            and np.frombuffer(body[begin:end], dtype=np.uint8).max(initial=0) > 1
        ):
            _refuse(what, "booleans of 0 or 1", f"another byte in {name!r}")
        tensors[name] = flat.reshape(shape)
        expected = end
    if expected != len(body):
        _refuse(what, "a file that ends with its last tensor", f"{len(body) - expected} more bytes")
    return tensors


def _refuse(what: str, expected: str, got: str) -> None:
    raise FileFormatError(
        f"{expected} in {what}", got, "write the file again with a program that follows the format"
    )


def split(data: bytes, what: str) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data of a file; raise FileFormatError unless the header is strict JSON."""
    if len(data) < 8:
        _refuse(what, "a safetensors file", f"{len(data)} bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER or 8 + length > len(data):
        _refuse(what, f"a header of at most {MAX_HEADER} bytes inside the file", f"{length} bytes")
    try:
        header = strictjson.loads(data[8 : 8 + length])
    except ValueError as cause:
        raise FileFormatError(
            f"a JSON header in {what}", str(cause)[:200], "write the file again"
        ) from None
    if not isinstance(header, dict):
        _refuse(what, "a JSON object as header", type(header).__name__)
    return header, memoryview(data)[8 + length :]


def _check_metadata(metadata: Any, what: str) -> dict[str, str]:
    plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not plain:
        _refuse(what, "__metadata__ that maps strings to strings", repr(metadata)[:80])
    return dict(metadata)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_entry(name: str, entry: Any, what: str) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Check one header entry for consistency and return its (dtype, shape, begin, end)."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        _refuse(what, f"keys {sorted(keys)} for {name!r}", repr(entry)[:80])
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        _refuse(what, f"a known dtype for {name!r}", repr(entry["dtype"])[:80])
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_whole, shape)):
        _refuse(what, f"a shape of at most {MAX_RANK} lengths for {name!r}", repr(shape)[:80])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        _refuse(what, f"two offsets for {name!r}", repr(offsets)[:80])
    dtype = DTYPES[entry["dtype"]]
    size = dtype.itemsize
    for length in shape:
        size *= length
    begin, end = offsets
    span = math.prod(
        length for length in shape if length
    )  # NumPy refuses lengths whose product is too large, even if another length is 0
    if max(begin, end, span * dtype.itemsize) >= 2**62 or end - begin != size:
        got = f"{shown(end - begin)} bytes"
        _refuse(what, f"{shown(size)} bytes for {name!r} of shape {shown(shape)}", got)
    return dtype, tuple(shape), begin, end
