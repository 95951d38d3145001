"""Ziv's strategy: evaluate with F bits, and with more bits if an element's error interval does not decide its rounding.

The error intervals of a tensor are given as a ball: a middle and a radius for each element.

Source: A. Ziv, "Fast evaluation of elementary mathematical functions with correctly rounded last
bit" (ACM TOMS 17, 1991), https://doi.org/10.1145/114697.116813.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import UndecidedError
from ringspec.exact.integers import objects
from ringspec.exact.rounding import Ball, round_ball
from ringspec.formats import format_of

LADDER = (256, 640, 1408)
SCALE_LADDER = (128, 256, 640, 1408)
MOST_BITS = 4096  # tanh needs up to 1056 more, and exp accepts 5600
FINE = 4096  # number of bits to which a fraction that is not dyadic is cut; finer than any format


def ladder_for(base: tuple[int, ...], *factors: NDArray | float) -> tuple[int, ...]:
    """Return the numbers of bits F to try, for results that are exponentials times these factors.

    The exponentials have an absolute error of about 2**-F. The last F of ``base``, 1408, is 334 more than the least
    float64 subnormal 2**-1074 needs; these 334 bits are a reserve for sums, divisions and bounds. A factor above 1
    makes the error larger, so the number of bits of its integer part is added to the last F.

    >>> ladder_for((256, 640, 1408), np.array([0.5]), 2.0**100)
    (256, 640, 1509)
    """
    largest = [float(np.abs(x).max(initial=0.0)) for x in factors]
    above_one = sum(max(0, math.frexp(x)[1]) for x in largest)
    return (*base[:-1], min(base[-1] + above_one, MOST_BITS))


Tensors = dict[str, dict[str, NDArray]]
Names = Callable[[str], tuple[str, ...]]  # the formats of a tensor
Prover = Callable[[str, tuple[int, ...]], Fraction | None]


@dataclass
class Progress:
    """The elements of one tensor that are already rounded, by format; ``decided`` marks them."""

    values: dict[str, NDArray]
    decided: dict[str, NDArray[np.bool_]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.values)

    def take(self, ball: Ball) -> None:
        """Store the elements whose rounding this ball decides; elements decided earlier keep their value."""
        open_places = ~np.logical_and.reduce([self.decided[name] for name in self.names])
        part = Ball(ball.middle[open_places], ball.radius[open_places], ball.bits)
        for name, rounded in round_ball(part, self.names).items():
            fresh = rounded.decided & ~self.decided[name][open_places]
            values, decided = self.values[name][open_places], self.decided[name][open_places]
            self.values[name][open_places] = np.where(fresh, rounded.values, values)
            self.decided[name][open_places] = decided | fresh

    def left(self) -> list[tuple[int, ...]]:
        """Return the indices of elements whose rounding is undecided in at least one format."""
        undecided = ~np.logical_and.reduce(list(self.decided.values()))
        return [tuple(int(n) for n in index) for index in np.argwhere(undecided)]


def settle(
    evaluate: Callable[[int], dict[str, Ball]],
    names: Names,
    ladder: tuple[int, ...],
    prove: Prover,
) -> Tensors:
    """Round every tensor of ``evaluate(F)`` correctly to each of its formats; return it in the format's storage dtype.

    ``names(tensor)``: the formats of a tensor. ``ladder``: the numbers of bits F to try. ``prove(tensor, index)``: the
    value of an element as a fraction if the element is provably rational, else None. Proofs are needed because a
    rational value may lie exactly on a midpoint between two numbers of a format. Raises UndecidedError if an element is
    neither decided with the last F nor proven.
    """
    progress: dict[str, Progress] = {}
    for bits in ladder:
        for tensor, ball in evaluate(bits).items():
            if tensor not in progress:
                progress[tensor] = start(ball.middle.shape, names(tensor))
            progress[tensor].take(ball)
        # A proof does not depend on F, so one attempt is enough.
        to_prove = progress.items() if bits == ladder[0] else ()
        for tensor, state in to_prove:
            for index in state.left():
                value = prove(tensor, index)
                if value is not None:
                    take_fraction(state, index, value)
        if not any(state.left() for state in progress.values()):
            return {tensor: stored(state) for tensor, state in progress.items()}
    raise refusal(progress, ladder[-1])


def start(shape: tuple[int, ...], names: tuple[str, ...]) -> Progress:
    return Progress(
        {name: np.full(shape, np.nan) for name in names},
        {name: np.zeros(shape, dtype=np.bool_) for name in names},
    )


def take_fraction(state: Progress, index: tuple[int, ...], value: Fraction) -> None:
    """Round a rational element and store it; a number that FINE bits do not represent is enclosed in an interval."""
    raised = value * (1 << FINE)
    below = raised.numerator // raised.denominator
    radius = 0 if raised.denominator == 1 else 1
    for name, rounded in round_ball(
        Ball(objects([below], (1,)), objects([radius], (1,)), FINE), state.names
    ).items():
        if rounded.decided[0]:
            state.values[name][index] = rounded.values[0]
            state.decided[name][index] = True


def stored(state: Progress) -> dict[str, NDArray]:
    """Return the rounded values in the storage dtype of each format, which represents them exactly."""
    with np.errstate(over="ignore"):
        return {name: state.values[name].astype(format_of(name).dtype) for name in state.names}


def refusal(progress: dict[str, Progress], bits: int) -> UndecidedError:
    counts = {tensor: len(state.left()) for tensor, state in progress.items() if state.left()}
    tensor = next(iter(counts))
    return UndecidedError(
        f"results that {bits} bits decide, or that are provably rational",
        f"{sum(counts.values())} undecided elements ({counts}), the first {tensor}"
        f"{list(progress[tensor].left()[0])}",
        "change the inputs: this value may lie exactly between two numbers of the format",
    )
