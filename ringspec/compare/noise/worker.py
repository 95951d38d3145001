"""What one worker of a ring records of its forward pass: the errors of each block, and how they enter the results.

The Greek letters and the formulas of the results are those of :mod:`~ringspec.compare.noise.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringspec.compare.noise.p_relative_to import (
    POperand,
    Reference,
    finite,
    p_rounding,
    p_rounding_somewhere,
)
from ringspec.compare.noise.problem import Array, Head, Integers
from ringspec.compare.noise.rounding import (
    Error,
    Partial,
    no_error,
    partial,
    product_error,
    rounding,
    row_sum_error,
    spacing,
)
from ringspec.formats import narrower, unit_roundoff
from ringspec.merges import merge_recipe
from ringspec.recipes import Recipe

FUNCTION_ULPS = 4  # as ringspec.merges.certain assumes; NumPy's exp errs by 2, its log by 4


@dataclass(frozen=True)
class Shared:
    """An error gamma with one value for each row; it changes o by gamma * ``u`` and lse by gamma * ``a``.

    ``u`` is [G, Sq, Dv], ``a`` is [G, Sq]. ``variance`` [G, Sq]: the variance of gamma.
    """

    u: Array
    a: Array
    variance: Array


@dataclass
class Sources:
    """All errors of the forward pass, for a key head and its G query heads (symbols: :mod:`~ringspec.compare.noise.forward`).

    For each pair, [G, Sq, Sk]: ``sigma`` and ``eta``, the relative errors of e from the scores and from roundings;
    ``common``, the part of sigma's variance that also affects the scores of the backward pass; ``zeta``, the error of P
    as an operand of P v, in units of p; ``mean``, the predictable part of zeta.

    For each row or element: ``lam`` [G, Sq], the roundings of l (lambda above); ``omega`` [G, Sq, Dv], the roundings of
    o; ``drift``, the predictable part of omega; ``explained``, the variance that ``drift`` explains. ``shared``: the
    errors of rescaling factors. ``top`` [G, Sq, Dv] and ``bottom`` [G, Sq]: bounds of their effect on the numerator and
    on the denominator of the final row.
    """

    sigma: Error
    common: Array
    eta: Error
    zeta: Error
    mean: Array
    lam: Error
    omega: Error
    drift: Array
    explained: Array
    top: Array
    bottom: Array
    shared: list[Shared] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """The running softmax of n rows: maximum ``m`` [G, n], sum ``l`` [G, n], and ``o``, which is not yet divided by l.

    In a normalised state, o is already divided by l; then m holds the lse, and l is 1.
    """

    m: Array
    l: Array
    o: Partial


def empty_state(head: Head, queries: Integers) -> State:
    group, width = head.o.shape[0], head.o.shape[2]
    o = np.zeros((group, queries.size, width))
    rows = (group, queries.size)
    return State(np.full(rows, -np.inf), np.zeros(rows), partial(o, no_error(o.shape)))


def factor(m_part: Array, m: Array) -> Array:
    """Return the rescaling factor exp(m_part - m); 0 for a part without keys (m_part = -inf)."""
    return np.exp(m_part - finite(m))


@dataclass(frozen=True)
class Worker:
    """The steps of each worker's forward pass; every method records its rounding errors in ``sources``."""

    head: Head
    recipe: Recipe
    sources: Sources
    truncated: bool

    @property
    def of_lse(self) -> str:
        """The format of lse and of the sums between blocks; in a merge recipe, at most float32."""
        statistics = self.recipe.statistics
        return statistics if self.recipe.merge_recipe is None else narrower(statistics, "float32")

    def rounded_lse(self, lse: Array) -> Error:
        """Return the error of rounding ``lse``, a natural logarithm, in the base in which the merge recipe has it."""
        return rounding(lse / self.unit, self.of_lse).times(self.unit)

    @property
    def unit(self) -> float:
        """The natural logarithm of the base of a part's lse."""
        name = self.recipe.merge_recipe
        return 1.0 if name is None else merge_recipe(name).unit

    def weight(self, queries: Integers, m: Array) -> Array:
        """Return exp(m - lse), the weight of a partial sum relative to ``m`` in the final row; 0 for empty rows."""
        lse = self.head.lse[:, queries]
        nothing = np.isneginf(m) | np.isneginf(lse)
        difference = np.subtract(m, lse, where=~nothing, out=np.zeros(m.shape))
        return np.where(nothing, 0.0, np.exp(difference))

    def block(self, queries: Integers, tiles: list[Integers], reference: Reference) -> State:
        """Return the state of these queries after one block of keys, computed tile by tile (SOFT-1)."""
        state = empty_state(self.head, queries)
        reference.begin(tiles)
        for n, keys in enumerate(tiles):
            state = self.absorb(queries, keys, state, reference, n == 0)
        if self.recipe.merge_order == "normalised":
            state = self.normalised(queries, state)
        elif self.recipe.merge_recipe is not None:
            self.note_returned(queries, state)
        o = state.o.rounded(self.recipe.block_o)
        return State(state.m, state.l, self.noted(queries, state.m, o, state.o))

    def note_returned(self, queries: Integers, state: State) -> None:
        """Record that a block returns m and l in the merge recipe's format, if its own statistics are wider."""
        m, l = finite(state.m), state.l
        of_m = rounding(m, self.of_lse, spacing(m, self.recipe.scores))
        of_l = rounding(l, self.of_lse, spacing(l, self.recipe.statistics))
        w = self.weight(queries, state.m)
        self.note_shared(queries, of_m, w[..., None] * state.o.value, w * l)
        self.note_sum(queries, state.m, of_l)

    def noted(self, queries: Integers, m: Array, o: Partial, before: Partial) -> Partial:
        """Record in omega the roundings from ``before`` to ``o``, times o's weight in the final row; return o."""
        w = self.weight(queries, m)[..., None]
        omega = self.sources.omega
        omega.variance[:, queries] += (o.local.variance - before.local.variance) * w**2
        omega.bound[:, queries] += (o.local.bound - before.local.bound) * w
        self.sources.drift[:, queries] += (o.drift - before.drift) * w
        self.sources.explained[:, queries] += (o.explained - before.explained) * w**2
        return o

    def note_sum(self, queries: Integers, m: Array, error: Error) -> None:
        """Record an error of a sum l that is relative to the maximum m."""
        lam, w = self.sources.lam, self.weight(queries, m)
        lam.variance[:, queries] += error.variance * w**2
        lam.bound[:, queries] += error.bound * w

    def absorb(
        self, queries: Integers, keys: Integers, state: State, reference: Reference, first: bool
    ) -> State:
        """Return the state after one tile is absorbed (SOFT-1): e = exp(s - m), l = c l + sum e, o = c o + P v."""
        head, recipe = self.head, self.recipe
        index = np.ix_(np.arange(head.s.shape[0]), queries, keys)
        s = reference.scores(keys)
        m = np.maximum(state.m, s.max(axis=2))
        shift = finite(m)[..., None]
        e = np.exp(s - shift)
        operand = self.operand(index, s, reference.next(m), m, self.weight(queries, m))
        c = factor(state.m, m)
        terms = (e > unit_roundoff(recipe.statistics)).sum(axis=2)
        of_sum = row_sum_error(e.sum(axis=2), (e * e).sum(axis=2), terms, recipe.statistics)
        l = c * state.l + e.sum(axis=2)
        if not first:
            of_sum = of_sum + rounding(l, recipe.statistics)
            self.note_factor(queries, state, c)
        self.note_sum(queries, m, of_sum)
        return State(m, l, self.absorbed(queries, keys, state, m, c, operand, first))

    def operand(
        self, index: tuple, s: Array, relative_to: Array, m: Array, w: Array
    ) -> tuple[Array, Error, Array]:
        """Return the operand P of P v, its error, and the known part of the error; record eta and zeta.

        The kernel rounds P = exp(s - ``relative_to``) times the dropout factor. The returned arrays are relative to
        ``m`` instead. If the exponential is exactly 1, only the dropout factor is rounded. ``w``: the weight in the
        final row of a partial result relative to ``m``.
        """
        recipe, sources = self.recipe, self.sources
        known_binade = recipe.p_relative_to != "any"
        argument = np.where(np.isneginf(s), 0.0, s - finite(relative_to)[..., None])
        e = np.where(np.isneginf(s), 0.0, np.exp(argument))
        top = (argument == 0) & known_binade
        of_e = rounding(e, recipe.statistics)
        of_argument = rounding(argument, recipe.statistics)
        relative = of_e.relative_to(e) + of_argument
        sources.eta.variance[index] = np.where(top, 0.0, relative.variance)
        sources.eta.bound[index] = np.where(top, 0.0, relative.bound)
        keep = None if self.head.keep is None else self.head.keep[index]
        x = e if keep is None else e * keep
        in_units = np.exp(finite(relative_to) - finite(m))[..., None]
        if known_binade:
            p = POperand(x, e, keep is not None, top, x * relative.bound)
            made, known = p_rounding(p, recipe, self.truncated)
        else:
            made, known = p_rounding_somewhere(x, w[..., None] * in_units, recipe, self.truncated)
        x, made, known = x * in_units, made.times(in_units), known * in_units
        noted = made.times(w[..., None])
        sources.zeta.variance[index] = noted.variance
        sources.zeta.bound[index] = noted.bound
        sources.mean[index] = known * w[..., None]
        return x, made, known

    def absorbed(
        self,
        queries: Integers,
        keys: Integers,
        state: State,
        m: Array,
        c: Array,
        operand: tuple[Array, Error, Array],
        first: bool,
    ) -> Partial:
        """Return the new o, c o + P v, with the errors of P, of the accumulation and of the addition."""
        recipe, v = self.recipe, self.head.v[keys]
        x, of_p, known = operand
        terms = (x > unit_roundoff(recipe.products)).sum(axis=2)[..., None]
        squares = v * v
        error = product_error(x @ v, (x * x) @ squares, terms, recipe.products)
        upstream = Error(of_p.variance @ squares, of_p.bound @ np.abs(v))
        value = (x + known) @ v  # the value to which the rounding of o is applied
        share = partial(value, upstream, spacing(value, recipe.products))
        share = Partial(share.value, share.grid, share.error + error, error)
        # The error of the running o is already recorded, with the same final weight.
        brought = state.o.times(c)
        o = share if first else brought.plus(share).rounded(recipe.products)
        return self.noted(queries, m, o, brought)

    def note_factor(self, queries: Integers, state: State, c: Array) -> None:
        """Record the rounding of the rescaling factor ``c`` between tiles as an independent error of each element."""
        of_c = self.relative(c)
        w = self.weight(queries, state.m)
        o, omega, lam = self.head.o[:, queries], self.sources.omega, self.sources.lam
        u = w[..., None] * (state.o.value - state.l[..., None] * o)
        omega.variance[:, queries] += of_c.variance[..., None] * u**2
        lam.variance[:, queries] += of_c.variance * (w * state.l) ** 2
        self.sources.top[:, queries] += (of_c.bound * w)[..., None] * np.abs(state.o.value)
        self.sources.bottom[:, queries] += of_c.bound * w * state.l

    def relative(self, c: Array) -> Error:
        """Return the relative error of rounding a factor ``c``; 0 and 1 are exact."""
        made = self.of_function(rounding(c, self.of_lse).relative_to(c))
        exact = (c == 0) | (c == 1)
        return Error(np.where(exact, 0.0, made.variance), np.where(exact, 0.0, made.bound))

    def of_function(self, made: Error) -> Error:
        """Return the error of an elementary function whose rounding has the error ``made``.

        The functions of a merge recipe are those of any library, up to :data:`FUNCTION_ULPS` from the rounded result.
        """
        if self.recipe.merge_recipe is None:
            return made
        return Error(made.variance, made.bound * (2 * FUNCTION_ULPS + 1))

    def note_shared(
        self, queries: Integers, made: Error, o: Array, mass: Array, of_sum: bool = True
    ) -> None:
        """Record the relative error ``made`` of a whole partial result.

        ``o`` and ``mass``: what this partial result adds to the numerator and to the denominator of the final row.
        ``of_sum`` False: the error affects only the numerator.
        """
        whole = self.head.o[:, queries]
        u, a = np.zeros(self.head.o.shape), np.zeros(self.head.lse.shape)
        u[:, queries] = o - mass[..., None] * whole if of_sum else o
        a[:, queries] = mass if of_sum else 0.0
        self.note_errors(queries, made, u, a)
        self.sources.top[:, queries] += made.bound[..., None] * np.abs(o)
        if of_sum:
            self.sources.bottom[:, queries] += made.bound * mass

    def note_errors(self, queries: Integers, made: Error, u: Array, a: Array) -> None:
        """Record an error of each row that changes o by ``u`` times it and lse by ``a`` times it, without a bound."""
        variance = np.zeros(a.shape)
        variance[:, queries] = made.variance
        if variance.any():
            self.sources.shared.append(Shared(u, a, variance))

    def normalised(self, queries: Integers, state: State) -> State:
        """Return the state (lse, 1, o / l), and record the rounding of lse, which affects the whole block."""
        empty = state.l == 0
        safe = np.where(empty, 1.0, state.l)
        lse = np.where(empty, -np.inf, state.m + np.log(safe))
        made = self.rounded_lse(np.where(empty, 0.0, lse))
        w = self.weight(queries, lse)
        o = state.o.times(1.0 / safe)
        self.note_shared(queries, made, w[..., None] * o.value, w)
        return State(lse, np.where(empty, 0.0, 1.0), o)

    def finish(self, queries: Integers, state: State) -> None:
        """Add the sinks to the denominator (FWD-5), and record the rounding of the rescaling factor and of the sum."""
        sinks = self.head.sinks
        if sinks is None:
            return
        m = np.maximum(state.m, sinks.max(axis=1)[:, None])
        c = np.exp(state.m - m)
        l = c * state.l + np.exp(sinks[:, None, :] - m[..., None]).sum(axis=2)
        w = self.weight(queries, state.m)
        self.note_shared(queries, self.relative(c), w[..., None] * state.o.value, w * state.l)
        self.note_sum(queries, m, rounding(l, self.recipe.statistics))
