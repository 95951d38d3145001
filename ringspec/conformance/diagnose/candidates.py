"""Run known bugs on the calls of a case, and measure how far their results are from those of the target.

The target is the program under test; a call is one request to it. A suspect is a known bug that the target may have. It
is a mutant (a known bug that can be run) or another form of one (``guise``), run with choices that the specification
leaves to an implementation (``way``), such as the order of merging. sigma is the size of a program's own rounding
errors. Two results agree if they differ by no more than rounding; see :mod:`~ringspec.conformance.diagnose.match`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.mutants.hooks import Hooks, Results
from ringspec.conformance.diagnose.mutants.mutant import Guise, Mutant, run_mutant
from ringspec.conformance.diagnose.mutants.ring import RESULTS
from ringspec.conformance.diagnose.mutants.variants import USUAL, Way
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import due_of
from ringspec.formats import load, store, unit_roundoff
from ringspec.recipes import RECIPES, Recipe

Array = NDArray[np.float64]
PairsOfShards = list[tuple[Array, Array]]
CAP = 1e3
POOLED = 0.1  # fraction of the tensor's mean squared noise that is added to each row's
KEY_TENSORS = ("dk", "dv")


@dataclass(frozen=True)
class Suspect:
    """A mutant, or its other form ``guise`` if given, run with the implementation choices ``way``."""

    mutant: Mutant
    guise: Guise | None = None
    way: Way = USUAL

    @property
    def program(self) -> Mutant | Guise:
        return self.mutant if self.guise is None else self.guise

    @property
    def key(self) -> str:
        return f"{self.mutant.id} {self.in_words()}"

    def in_words(self) -> str:
        """Describe ``guise`` and ``way`` in words; '' for the mutant itself with the usual choices."""
        words = "" if self.guise is None else self.guise.words
        return "; ".join(filter(None, (words, self.way.in_words())))


@dataclass(frozen=True)
class Error:
    """The errors of one tensor, all workers in one row of numbers, in units of ``sigma``; see :meth:`View.error`.

    ``finite``: which of all numbers the other arrays have. ``e`` = the target's results - ``right``, and ``own`` =
    ``right`` - the correct program in float64.
    """

    finite: NDArray[np.bool_]
    right: Array
    sigma: Array
    e: Array
    own: Array


class CannotRun(Exception):
    """Raised if a suspect raises an exception. This is an error in ringspec and not in the target."""

    def __init__(self, suspect: Suspect, error: Exception) -> None:
        super().__init__(f"{suspect.mutant.id} ({type(error).__name__}: {error})")
        self.suspect = suspect


class View:
    """One call with the target's results. Results of other programs for this call are computed once and kept.

    ``exact``: programs are first compared in float64, which takes half the time, but tells no rounding bugs apart.
    """

    def __init__(self, claims: Capabilities, call: Call, got: Outputs, exact: bool = False) -> None:
        self.claims, self.call, self.results, self.exact = claims, call, got, exact
        self.recipe = recipe_for(claims, call.formats)
        due = due_of(call)
        self.formats = {name: due[name].format for name in got if name in due}
        self.got = {name: [load(x) for x in got[name]] for name in self.formats}
        self.kept: dict[tuple[str, bool], dict[str, list[Array]]] = {}
        self.noises: dict[str, dict[str, list[Array]]] = {}
        self.errors: dict[tuple[str, str], Error | None] = {}

    def shown(self, suspect: Suspect | None) -> Suspect | None:
        """Return the suspect, or None (the correct program) if the suspect cannot change this call's results."""
        shows = suspect is not None and suspect.program.applies(self.call)
        return suspect if shows else None

    def of(self, suspect: Suspect | None, exact: bool = False) -> dict[str, list[Array]]:
        """Return the results of a suspect (None: the correct program) for this call.

        They are rounded as the target rounds, and stored in the formats of the call. If ``exact``, they are computed in
        float64. If the bug cannot change a result of the call, they are those of the correct program.
        """
        suspect = self.shown(suspect)
        key = ("" if suspect is None else suspect.key, exact)
        if key not in self.kept:
            recipe = RECIPES["float64"] if exact else self.recipe
            results = self.run(suspect, recipe)
            self.kept[key] = {
                name: [
                    load(x) if exact else load(store(np.asarray(x), self.formats[name]))
                    for x in results[name]
                ]
                for name in self.formats
            }
        return self.kept[key]

    def run(self, suspect: Suspect | None, recipe: Recipe) -> Results:
        """Run a suspect (None: the correct program); raise :class:`CannotRun` if the suspect raises an exception."""
        if suspect is None:
            return run_right(self.call, recipe)
        try:
            return run_mutant(suspect.program, self.call, recipe, suspect.way)
        except Exception as error:
            raise CannotRun(suspect, error) from error

    def tokens(self, x: Array, name: str, worker: int) -> Array:
        """Return one worker's array without its padding slots."""
        index = self.call.index_k if name in KEY_TENSORS else self.call.index_q
        if index is None or name in ("dsinks", "dbias") or self.call.operation == "merge":
            return x
        return x[:, :, index[worker] >= 0]

    def pairs(self, ours: dict[str, list[Array]], name: str) -> PairsOfShards:
        """Return (the target's array, the array in ``ours``) of each worker, without padding; [] if shapes differ."""
        found = []
        for worker, got in enumerate(self.got[name]):
            mine = ours[name][worker]
            if got.shape != mine.shape:
                return []
            found.append((self.tokens(got, name, worker), self.tokens(mine, name, worker)))
        return found

    def coarse(self, suspect: Suspect) -> float:
        """Return a rough distance of a suspect from the results, in units of the correct program's noise.

        It serves to choose the suspects to examine closely.
        """
        rms, _ = self.compared(self.of(suspect, self.exact), self.noise(None))
        return sum(rms.values())

    @cached_property
    def forward(self) -> View | None:
        """The same call without its backward pass; None if it has no backward pass, or no forward pass."""
        if set(self.call.passes) != {"forward", "backward"}:
            return None
        call = dataclasses.replace(self.call, passes=("forward",))
        return View(self.claims, call, self.results, self.exact)

    def coarse_in_forward(self, suspect: Suspect) -> float:
        """Return what the results of the forward pass contribute to :meth:`coarse`; 0 if the call does not have both passes."""
        return 0.0 if self.forward is None else self.forward.coarse(suspect)

    def noise(self, suspect: Suspect | None) -> dict[str, list[Array]]:
        """Return sigma of each row, by tensor and worker, for a suspect (None: the correct program)."""
        suspect = self.shown(suspect)
        key = "" if suspect is None else suspect.key
        if key not in self.noises:
            exact, rounded = self.of(suspect, exact=True), self.of(suspect)
            self.noises[key] = {
                name: row_noise(rounded[name], exact[name], unit_roundoff(self.formats[name]))
                for name in self.formats
            }
        return self.noises[key]

    def flat(self, ours: dict[str, list[Array]], name: str) -> Array:
        """Return the arrays of all workers as one row of numbers, without padding."""
        parts = [self.tokens(x, name, worker) for worker, x in enumerate(ours[name])]
        return np.concatenate([part.ravel() for part in parts])

    def error(self, right: Suspect | None, name: str) -> Error | None:
        """Return the errors of the target and of ``right`` (None: the correct program) where they are finite.

        The result is None if the target's arrays have another shape.
        """
        right = self.shown(right)
        key = ("" if right is None else right.key, name)
        if key not in self.errors:
            theirs = self.of(right)
            comparable = bool(self.pairs(theirs, name))
            self.errors[key] = self.error_from(theirs, name) if comparable else None
        return self.errors[key]

    def error_from(self, theirs: dict[str, list[Array]], name: str) -> Error:
        """Compute what :meth:`error` returns, from the results of ``right``."""
        sigma = [
            np.broadcast_to(x, y.shape)
            for x, y in zip(self.noise(None)[name], theirs[name], strict=True)
        ]
        base, by = self.flat(theirs, name), self.flat({name: sigma}, name)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            e = (self.flat(self.got, name) - base) / by
            own = (base - self.flat(self.of(None, exact=True), name)) / by
        finite = np.isfinite(e) & np.isfinite(own)
        return Error(finite, *(x[finite] for x in (base, by, e, own)))

    def compared(
        self, ours: dict[str, list[Array]], noise: dict[str, list[Array]]
    ) -> tuple[dict[str, float], float]:
        """Return the root mean square of (got - ours) / sigma for each tensor, and the largest value in any tensor."""
        rms, largest = {}, 0.0
        for name in self.formats:
            square, count = 0.0, 0
            for worker, (got, mine) in enumerate(self.pairs(ours, name)):
                z = standardised(got, mine, self.tokens(noise[name][worker], name, worker))
                square, count = square + float((z * z).sum()), count + z.size
                largest = max(largest, float(z.max(initial=0.0)))
            rms[name] = math.sqrt(square / count) if count else 0.0
        return rms, largest


def run_right(call: Call, recipe: Recipe) -> Results:
    with np.errstate(all="ignore"):
        return RESULTS[call.operation](call, recipe, Hooks())


def row_noise(rounded: Sequence[Array], exact: Sequence[Array], unit: float) -> list[Array]:
    """Return sigma of each row, from a program's rounded results and its float64 results.

    The result is a list of one array per worker; the last axis has length 1, except for lse. ``unit``: unit roundoff of
    the format of the results.
    """
    squares = [finite_square(a, b) for a, b in zip(rounded, exact, strict=True)]
    count = sum(x.size for x in squares)
    pooled = POOLED * sum(float(x.sum()) for x in squares) / count if count else 0.0
    found = []
    for square, x in zip(squares, rounded, strict=True):
        size = np.where(np.isfinite(x), np.abs(x), 0.0)
        if x.ndim == 4:
            square = square.mean(axis=3, keepdims=True)
            size = size.max(axis=3, keepdims=True, initial=0.0)
        least = (0.5 * unit * size) ** 2
        found.append(np.sqrt(square + pooled + least))
    return found


def finite_square(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        d = a - b
        return np.where(np.isfinite(d), np.minimum(d * d, 1e300), 0.0)


def standardised(got: Array, ours: Array, sigma: Array) -> Array:
    """Return |got - ours| / sigma, at most :data:`CAP`; 0 where both are equal, or both are NaN or +inf.

    +inf and NaN count as equal, because the order of operations decides which of them an overflow gives. -inf is
    different: it is the lse of an empty row.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.abs(got - ours)
        z = np.where(difference == 0, 0.0, difference / sigma)
    spoilt = [np.isnan(x) | np.isposinf(x) for x in (got, ours)]
    same = (spoilt[0] & spoilt[1]) | (got == ours)
    return np.where(same, 0.0, np.where(np.isfinite(z), np.minimum(z, CAP), CAP))


def rms_of(pairs: PairsOfShards) -> float:
    squares = [finite_square(a, b) for a, b in pairs]
    count = sum(x.size for x in squares)
    return math.sqrt(sum(float(x.sum()) for x in squares) / count) if count else 0.0
