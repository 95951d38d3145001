"""The running softmax of a query tile (128 rows): merging two partial results, and the final normalisation.

A partial result over some keys consists of ``o``, the unnormalised sum of exp(s - m) v; ``l``, the sum of exp(s - m);
and n = -m. Here s are the scores and m is the row maximum. n is stored in place of m because it is the bias operand of
the exponential. All numbers are float32. A row that has seen no visible key has o = 0, l = 0, m = FLOOR. This row is
merged like any other: its weight exp(FLOOR - m) is 0 if the other partial result has a real maximum m, and 1 if that
result is empty, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_impl.kernels.masks import HIDDEN
from nki_impl.kernels.tiles import ROWS, Tensor
from nki_impl.lang import nisa, nl

LEAST_SUM = 1e-15
"""Replaces l = 0, for which 1 / l and log(l) are undefined; the l of any other row is at least 1."""


@dataclass
class Partial(nl.NKIObject):  # type: ignore[name-defined]
    """A partial result of one query tile: ``o`` [128, D], ``l`` and ``n`` [128, 1], float32 on chip."""

    o: Tensor
    l: Tensor
    n: Tensor


def merge(held: Partial, block: Partial) -> None:
    """Merge ``block`` into ``held`` in place; each product and each sum is rounded to float32 once.

    n = min(n_held, n_block); l and o are weighted with exp(n - n_held) and exp(n - n_block).
    """
    n = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=n, data1=held.n, data2=block.n, op=nl.minimum)
    c_held, c_block = weight(held.n, n), weight(block.n, n)
    add_weighted(held.l, c_held, block.l, c_block)
    add_weighted(held.o, c_held, block.o, c_block)
    nisa.tensor_copy(dst=held.n, src=n)


def weight(old: Tensor, new: Tensor) -> Tensor:
    """Compute exp(new - old) [128, 1], which never exceeds 1."""
    c = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=c, op=nl.exp, data=old, bias=new, scale=-1.0)
    return c


def add_weighted(held: Tensor, c_held: Tensor, block: Tensor, c_block: Tensor) -> None:
    """Set held = held * c_held + block * c_block in each row; ``block`` is overwritten by block * c_block."""
    nisa.tensor_scalar(dst=block, data=block, op0=nl.multiply, operand0=c_block)
    nisa.scalar_tensor_tensor(
        dst=held, data=held, op0=nl.multiply, operand0=c_held, op1=nl.add, operand1=block
    )


def take(held: Partial, block: Partial) -> None:
    """Copy ``block`` to ``held``; used for the first partial result of a row, which needs no merge."""
    nisa.tensor_copy(dst=held.o, src=block.o)
    nisa.tensor_copy(dst=held.l, src=block.l)
    nisa.tensor_copy(dst=held.n, src=block.n)


def finish(held: Partial, o: Tensor) -> None:
    """Write held.o / held.l to ``o`` [128, D], rounded once to its dtype; 0 for a row without visible keys."""
    inverse = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=held.l, op0=nl.maximum, operand0=LEAST_SUM)
    nisa.reciprocal(dst=inverse, data=inverse)
    nisa.tensor_scalar(dst=o, data=held.o, op0=nl.multiply, operand0=inverse)


def log_sum_exp(l: Tensor, n: Tensor, lse: Tensor, zero_lse: bool = False) -> None:
    """Write lse = m + log(l), a natural logarithm; -inf for a row without visible keys, or 0 with ``zero_lse``.

    All arrays are [128, tiles], with one column for each query tile.
    """
    least = nl.ndarray(l.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=least, data=l, op0=nl.maximum, operand0=LEAST_SUM)
    log = nl.ndarray(l.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=log, op=nl.log, data=least)
    nisa.tensor_tensor(dst=log, data1=log, data2=n, op=nl.subtract)
    empty = nl.ndarray(l.shape, dtype=nl.float32, buffer=nl.sbuf)
    if zero_lse:
        nisa.tensor_scalar(dst=empty, data=l, op0=nl.greater, operand0=0.0)
        nisa.tensor_tensor(dst=lse, data1=log, data2=empty, op=nl.multiply)
    else:
        # An empty row has FLOOR - 34.5 here; adding HIDDEN overflows float32 and gives -inf.
        nisa.tensor_scalar(
            dst=empty, data=l, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=HIDDEN
        )
        nisa.tensor_tensor(dst=lse, data1=log, data2=empty, op=nl.add)
