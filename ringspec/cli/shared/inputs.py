"""The tensors q, k, v, dy and dlse: from a file, or drawn from a seed.

The drawn numbers are the same on every machine and with every version of NumPy. They depend only on a hash function,
integer sums and one multiplication, which rounds in the same way everywhere.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringspec.cli.shared.npz import read_npz
from ringspec.errors import FileFormatError, OptionError
from ringspec.tensorfile import read_tensors

NEEDED = ("q", "k", "v")
OPTIONAL = ("dy", "dlse")
# Options of rs.ring that are arrays; a file may hold them under the same names.
FILE_OPTIONS = (
    "bias",
    "mask",
    "segments_q",
    "segments_k",
    "bound_min",
    "bound_max",
    "sinks",
    "keep",
    "positions_q",
    "positions_k",
)
MAX_FILE_BYTES = 1 << 30
MAX_ELEMENTS = 1 << 26
BLOCK = 1 << 16

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """The sizes of a problem with q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    kv_length: int
    head_dim: int
    value_dim: int

    def of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``."""
        queries = (self.batch, self.heads, self.length)
        keys = (self.batch, self.kv_heads, self.kv_length)
        shapes: dict[str, tuple[int, ...]] = {
            "q": (*queries, self.head_dim),
            "k": (*keys, self.head_dim),
            "v": (*keys, self.value_dim),
            "dy": (*queries, self.value_dim),
            "dlse": queries,
        }
        return shapes[name]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a problem, from a file or drawn.

    ``tensors``: q, k, v and, if present, dy and dlse. ``source``: text that says where the tensors come from.
    ``options``: masks, bias and other keywords of ``ringspec.ring`` that the file contains. ``ignored``: names in the
    file that are not read.
    """

    tensors: dict[str, NDArray]
    source: str
    ignored: tuple[str, ...] = ()
    options: dict[str, NDArray] = field(default_factory=dict)


def drawn(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Return pseudorandom float64 numbers with mean 0 and variance 1, which depend only on seed, name and shape.

    Elements n * 65536 to n * 65536 + 65535 come from SHAKE-128 of the text ``ringspec|seed|name|n``, 32 bytes for each
    element. These bytes give four 50-bit integers, whose sum is centred and multiplied by the float64 nearest to
    sqrt(3) * 2**-50. The distribution is bell-shaped between -3.47 and 3.47. The numbers use the full significand, so
    the product of two elements is not exact.

    >>> drawn(0, "q", (2,)).tolist()
    [2.088446549532598, 0.02344314093020941]
    """
    count = math.prod(shape)
    total = np.empty(count, dtype=np.int64)
    for first in range(0, count, BLOCK):
        text = f"ringspec|{seed}|{name}|{first // BLOCK}"
        stop = min(first + BLOCK, count)
        stream = hashlib.shake_128(text.encode()).digest(32 * (stop - first))
        words = np.frombuffer(stream, dtype="<u8").reshape(-1, 4) >> np.uint64(14)
        total[first:stop] = words.astype(np.int64).sum(axis=1) - (1 << 51)
    return total.astype(np.float64).reshape(shape) * (math.sqrt(3) * 2.0**-50)


def drawn_inputs(seed: int, shape: Shape, names: tuple[str, ...]) -> Inputs:
    """Return the tensors ``names`` of a problem of this shape, drawn from the seed."""
    elements = sum(math.prod(shape.of(name)) for name in names)
    if elements > MAX_ELEMENTS:
        raise OptionError(
            f"at most {MAX_ELEMENTS} elements in {', '.join(names)}",
            f"{elements}",
            "choose a smaller --length, --heads, --batch or --head-dim",
        )
    tensors = {name: drawn(seed, name, shape.of(name)) for name in names}
    return Inputs(tensors, f"drawn from seed {seed}")


def read_inputs(path: Path) -> Inputs:
    """Read q, k, v and, if present, dy, dlse and the options in FILE_OPTIONS from a .safetensors or .npz file.

    The file is not trusted: its size is limited and nothing in it is executed. Raises
    :class:`~ringspec.errors.FileFormatError` if its format is wrong. The function that uses the tensors
    checks their dtypes, shapes and values.
    """
    if path.suffix not in (".safetensors", ".npz"):
        raise OptionError(
            "an input file whose name ends in .safetensors or .npz",
            repr(path.name),
            "rename it with the ending of its format",
            code="unknown-name",
        )
    if not path.is_file():
        raise FileFormatError(
            "a regular file",
            f"{path}, which is not a regular file",
            "pass the path of a .safetensors or .npz file",
        )
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise FileFormatError(
            f"a file of at most {MAX_FILE_BYTES} bytes",
            f"{size} bytes in {path}",
            "cut the tensors, for instance to fewer heads",
        )
    read = NEEDED + OPTIONAL + FILE_OPTIONS
    if path.suffix == ".npz":
        tensors, ignored = read_npz(path, read, MAX_FILE_BYTES)
    else:
        everything = read_tensors(path)
        ignored = sorted(set(everything) - set(read))
        tensors = {name: x for name, x in everything.items() if name not in ignored}
    missing = [name for name in NEEDED if name not in tensors]
    if missing:
        raise FileFormatError(
            f"q, k and v in {path}",
            f"no {' and no '.join(missing)} (names there: {shortened([*tensors, *ignored])})",
            "name the tensors q, k, v and, for a backward pass, dy",
        )
    options = {name: tensors.pop(name) for name in FILE_OPTIONS if name in tensors}
    return Inputs(tensors, str(path), tuple(ignored), options)


def shortened(names: list[str], most: int = 8) -> str:
    """Return the first ``most`` names for a message, each cut to 40 characters."""
    shown = ", ".join(ascii(name[:40]) for name in names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
