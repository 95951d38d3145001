"""The problem to evaluate: tensors and options, whose float64 values are taken as exact (docs/spec/index.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import NonFiniteError, OptionError, ShapeError, shown

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """One problem: q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] in float64, with masks and options.

    ``visible`` (bool, the whole mask; None: all visible), ``bias`` (float64; -inf hides the pair) and ``keep`` (bool,
    the dropout mask) have four axes and are broadcastable to [B, H, Sq, Sk]. ``sinks``: float64 [H, N]. ``scale``,
    ``softcap``, ``dropout_p``: float64 numbers. Raises ShapeError, NonFiniteError or OptionError.
    """

    q: Array
    k: Array
    v: Array
    scale: float
    visible: Booleans | None = None
    bias: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    keep: Booleans | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        check_tensors(self.q, self.k, self.v)
        for name in ("visible", "bias", "keep"):
            check_pairs(getattr(self, name), name, self.pairs)
        if (
            self.bias is not None
            and np.isnan(np.where(self.bias == np.inf, np.nan, self.bias)).any()
        ):
            raise NonFiniteError("a bias that is finite or -inf", "NaN or +inf", "mask with -inf")
        if self.sinks is not None:
            check_array(self.sinks, "sinks", (self.q.shape[1], (*np.shape(self.sinks), 0, 0)[1]))
        for name in ("scale", "softcap", "dropout_p"):
            check_number(getattr(self, name), name)
        if self.softcap is not None and not 0 < self.softcap < np.inf:
            raise OptionError("softcap > 0 or None", shown(self.softcap), "give a positive number")
        if not 0 <= self.dropout_p < 1:
            raise OptionError("0 <= dropout_p < 1", shown(self.dropout_p), "give a probability")

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        """The shape (B, H, Sq, Sk) of an array with one number for each pair of a query and a key."""
        batch, heads, n_q, _ = self.q.shape
        return batch, heads, n_q, self.k.shape[2]

    @property
    def group(self) -> int:
        """The number G = H / Hkv of query heads for each key head; query head h uses key head h // G."""
        return self.q.shape[1] // self.k.shape[1]

    def mask(self, b: int, h: int, rows: slice) -> Booleans:
        """Return a mask [n, Sk] of the visible pairs of ``rows`` of query head h in batch b."""
        shape = self.pairs
        allowed = np.ones((len(range(*rows.indices(shape[2]))), shape[3]), dtype=np.bool_)
        if self.visible is not None:
            allowed &= np.broadcast_to(self.visible, shape)[b, h, rows]
        if self.bias is not None:
            allowed &= ~np.isneginf(np.broadcast_to(self.bias, shape)[b, h, rows])
        return allowed

    def kept(self, b: int, h: int, rows: slice) -> Booleans | None:
        """Return a mask [n, Sk] of the entries of P that dropout keeps, for batch b, query head h and ``rows``.

        None: dropout keeps all entries.
        """
        if self.keep is None:
            return None
        return np.broadcast_to(self.keep, self.pairs)[b, h, rows]


def check_number(x: object, name: str) -> None:
    """Require a finite Python float or NumPy float64, because another type may convert to another number."""
    if x is None and name == "softcap":
        return
    if not isinstance(x, float):
        raise OptionError(f"{name} as float", f"{shown(x)} ({type(x).__name__})", "pass float(x)")
    if not np.isfinite(x):
        raise NonFiniteError(f"a finite {name}", shown(x), "give a number")


def check_array(x: Array, name: str, shape: tuple[int, ...]) -> None:
    """Require a finite float64 array of the given shape."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float64 or x.shape != shape:
        got = f"{getattr(x, 'dtype', type(x).__name__)} of shape {np.shape(x)}"
        raise ShapeError(f"{name} as float64 of shape {shape}", got, "convert or reshape it")
    if not np.isfinite(x).all():
        raise NonFiniteError(f"finite numbers in {name}", "NaN or infinity", "give finite numbers")


def check_tensors(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) or x.ndim != 4:
            raise ShapeError(f"{name} of four axes", f"shape {np.shape(x)}", "give [B, H, S, D]")
    check_array(q, "q", q.shape)
    check_array(k, "k", (q.shape[0], k.shape[1], k.shape[2], q.shape[3]))
    check_array(v, "v", (*k.shape[:3], v.shape[3]))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ShapeError(
            "H a multiple of Hkv >= 1",
            f"{q.shape[1]} and {k.shape[1]}",
            "pass H as a multiple of Hkv",
        )


def check_pairs(x: NDArray | None, name: str, pairs: tuple[int, ...]) -> None:
    """Require an array that is broadcastable to ``pairs``, with four axes; float64 if it is the bias, otherwise bool."""
    if x is None:
        return
    dtype = np.float64 if name == "bias" else np.bool_
    fits = isinstance(x, np.ndarray) and x.ndim == 4 and x.dtype == dtype
    if not fits or any(have not in (1, want) for have, want in zip(x.shape, pairs, strict=True)):
        raise ShapeError(
            f"{name} with four axes, broadcastable to {pairs}",
            f"{getattr(x, 'dtype', type(x).__name__)} of shape {np.shape(x)}",
            "give [B|1, H|1, Sq|1, Sk|1]",
        )
