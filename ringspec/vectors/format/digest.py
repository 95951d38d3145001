"""SHA-256 of files, tensors, cases and sets.

The digest of a case depends only on its fields and on the bits of its tensors, not on how its files are written.
Tensors may have any dtype that a tensor file supports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ringspec.tensorfile import DTYPES, dtype_code
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.case_json import case_to_data
from ringspec.vectors.format.json_text import canonical

__all__ = ["case_digest", "tensor_digest"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensor_bytes(x: NDArray) -> bytes:
    r"""Return the little-endian bytes of an array in C order.

    >>> tensor_bytes(np.array([1, 2], dtype=">i2"))
    b'\x01\x00\x02\x00'
    """
    return np.ascontiguousarray(x).astype(DTYPES[dtype_code(x.dtype)], copy=False).tobytes()


def tensor_digest(x: NDArray) -> str:
    """Return the SHA-256 of the :func:`tensor_bytes` of an array ``x`` of any shape."""
    return sha256(tensor_bytes(x))


def case_digest(case: Case, tensors: Mapping[str, NDArray] | None) -> str:
    """Return the SHA-256 of the canonical JSON of a case, followed by its stored ``tensors``, sorted by name.

    The JSON has sorted keys, no spaces and a newline at the end. Before the bytes of each tensor comes a line ``name
    dtype d0,d1,...``, where dtype is the code of the safetensors format and d0, d1, ... is the shape.
    """
    total = hashlib.sha256(canonical(case_to_data(case)) + b"\n")
    for name, x in sorted((tensors or {}).items()):
        axes = ",".join(str(length) for length in x.shape)
        total.update(f"{name} {dtype_code(x.dtype)} {axes}\n".encode())
        total.update(tensor_bytes(x))
    return total.hexdigest()


def set_digest(contents: Mapping[str, str]) -> str:
    """Return the SHA-256 of a text with one line ``id digest`` for each case, sorted by id.

    >>> set_digest({})[:8]
    'e3b0c442'
    """
    return sha256("".join(f"{id} {digest}\n" for id, digest in sorted(contents.items())).encode())
