"""How each rounding of the forward pass changes a row of o and lse.

Let m be the row's largest score, e_ij = exp(s_ij - m), l = sum e, p = e / l and o = sum e keep v / l, all with their
true values; ``keep`` is the dropout factor. Every rounding causes an independent error; the Greek letters below name
these errors. If "err" stands for the error of a result, then to first order, for query i, key j and element d of o::

    err o_id = sum_j zeta_ij v_jd                                    P as operand, in units of p
             + sum_j p_ij (sigma_ij + eta_ij) (keep_ij v_jd - o_id)  scores (sigma), roundings of e (eta)
             - o_id lambda_i                                         roundings of l
             + sum_n gamma_in u_ind                                  rescaling factors of partial results n
             + omega_id                                              roundings of o itself
    err lse_i = sum_j p_ij (sigma_ij + eta_ij) + lambda_i + sum_n gamma_in a_in + rounding of lse

A recipe says where a kernel rounds. A kernel rounds exp(s_ij - c) relative to some number c, for example the largest
score of the block of keys, or the largest score so far; the recipe says which (``p_relative_to``,
:mod:`~ringspec.compare.noise.p_relative_to`). The binade of the rounded number therefore depends on the order in which
blocks are visited. An exponential that is exactly 1 has no rounding error. A partial result relative to c has the
weight exp(c - lse) in the final row.

When two partial results are merged, each is multiplied by a rescaling factor exp(m_n - m), where m_n is the maximum of
partial result n. The error gamma of this factor is the same for all d (:class:`Shared`). If o_n and l_n are the
unnormalised o and l of the partial result, u_n = exp(m_n - lse) (o_n - l_n o) and a_n = exp(m_n - lse) l_n. The
rescaling factors between tiles of one block are treated more simply: their errors count as independent for each
element.

Sources: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691; the specification's rules SOFT-1 to SOFT-4, NUM-2 and
NUM-3.
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
from ringspec.compare.noise.problem import Array, Geometry, Head, Integers
from ringspec.compare.noise.rounding import (
    Error,
    Merged,
    Partial,
    larger_part,
    no_error,
    partial,
    product_error,
    rounding,
    row_sum_error,
    spacing,
)
from ringspec.formats import format_of, unit_roundoff
from ringspec.recipes import Recipe


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
    """All errors of the forward pass, for a key head and its G query heads (symbols: the module's docstring).

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


def score_error(head: Head, recipe: Recipe, inner: float) -> Error:
    """Return the error of each score [G, Sq, Sk]: from the product <q, k>, the soft cap and the rounding of the score.

    ``inner`` multiplies the variance of accumulating the product.
    """
    q, k, width = head.q, head.k, float(head.q.shape[2])
    squares = (q * q) @ (k * k).T
    total = q @ k.T
    digits = 2 * format_of(recipe.inputs).precision
    error = product_error(total, squares, width, recipe.products, digits)
    error = Error(inner * error.variance, error.bound).times(head.scale)
    if recipe.products == "float64":  # then scale, bias and soft cap are rounded as s itself is
        error = error + rounding(head.s, "float64") + rounding(head.s, "float64")
    if head.tanh is not None:
        assert head.softcap is not None and head.damping is not None
        of_tanh = rounding(head.tanh, recipe.scores).times(head.softcap)
        error = Error(error.variance * head.damping**2, error.bound) + of_tanh
    error = error + rounding(head.s, recipe.scores, reach=error.bound)
    return Error(error.variance * head.seen, error.bound * head.seen)


def forward_sources(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    truncated: tuple[str, ...] = (),
    same_scores: float = 1.0,
    inner: float = 1.0,
) -> Sources:
    """Compute the forward pass of all workers with true values, and record the error of each rounding.

    ``truncated``: the points at which the kernel rounds toward zero. ``same_scores``: the fraction of sigma's variance
    that also affects the scores of the backward pass. ``inner``: the parameter of :func:`score_error`.
    """
    pairs, rows = head.s.shape, head.lse.shape
    sigma = score_error(head, recipe, inner)
    sources = Sources(
        sigma,
        same_scores * sigma.variance,
        no_error(pairs),
        no_error(pairs),
        np.zeros(pairs),
        no_error(rows),
        no_error(head.o.shape),
        np.zeros(head.o.shape),
        np.zeros(head.o.shape),
        np.zeros(head.o.shape),
        np.zeros(rows),
    )
    work = Worker(head, recipe, sources, "p" in truncated)
    for r in range(geometry.workers):
        queries = geometry.queries(r)
        if queries.size == 0:
            continue
        state = empty_state(head, queries)
        joined = work.merge if recipe.merge_order == "state" else work.merge_normalised
        reference = Reference(recipe.p_relative_to, head, queries)
        for t, b in enumerate(b for b in geometry.order[r] if b >= 0):
            block = work.block(queries, geometry.key_tiles(int(b), recipe.tile_k), reference)
            state = joined(queries, state, block, t == 0)
        work.finish(queries, state)
    return sources


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
        o = state.o.rounded(self.recipe.block_o)
        return State(state.m, state.l, self.noted(queries, state.m, o, state.o))

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
        made = rounding(c, self.recipe.statistics).relative_to(c)
        exact = (c == 0) | (c == 1)
        return Error(np.where(exact, 0.0, made.variance), np.where(exact, 0.0, made.bound))

    def note_shared(
        self, queries: Integers, made: Error, o: Array, mass: Array, of_sum: bool = True
    ) -> None:
        """Record the relative error ``made`` of a whole partial result.

        ``o`` and ``mass``: what this partial result adds to the numerator and to the denominator of the final row.
        ``of_sum`` False: the error affects only the numerator.
        """
        whole = self.head.o[:, queries]
        u, a = np.zeros(self.head.o.shape), np.zeros(self.head.lse.shape)
        variance = np.zeros(a.shape)
        u[:, queries] = o - mass[..., None] * whole if of_sum else o
        a[:, queries] = mass if of_sum else 0.0
        variance[:, queries] = made.variance
        if variance.any():
            self.sources.shared.append(Shared(u, a, variance))
        self.sources.top[:, queries] += made.bound[..., None] * np.abs(o)
        if of_sum:
            self.sources.bottom[:, queries] += made.bound * mass

    def merge(self, queries: Integers, a: State, b: State, first: bool) -> State:
        """Merge two unnormalised states (SOFT-1, NUM-3). Of their rescaling factors, at most one is neither 0 nor 1."""
        m = np.maximum(a.m, b.m)
        c_a, c_b = factor(a.m, m), factor(b.m, m)
        l = c_a * a.l + c_b * b.l
        if not first:
            one_sided = (a.l == 0) | (b.l == 0)
            grid = np.where(one_sided, np.inf, 0.0)
            self.note_sum(queries, m, rounding(l, self.recipe.statistics, grid))
            for part, c in ((a, c_a), (b, c_b)):
                w = self.weight(queries, part.m)
                self.note_shared(queries, self.relative(c), w[..., None] * part.o.value, w * part.l)
        return State(m, l, self.joined(queries, m, (a.o, c_a), (b.o, c_b)))

    def joined(
        self, queries: Integers, m: Array, a: tuple[Partial, Array], b: tuple[Partial, Array]
    ) -> Partial:
        """Add two rescaled partial results, each given as (o, factor), and round to the carried format (NUM-3)."""
        recipe = self.recipe
        before = a[0].times(a[1]).plus(b[0].times(b[1]))
        one, other = Merged.of(*a, recipe.merge), Merged.of(*b, recipe.merge)
        total, base = one.product.plus(other.product), larger_part(one, other)
        o = total.rounded(recipe.merge, base).rounded(recipe.carried_o, base)
        return self.noted(queries, m, o, before)

    def normalised(self, queries: Integers, state: State) -> State:
        """Return the state (lse, 1, o / l), and record the rounding of lse, which affects the whole block."""
        empty = state.l == 0
        safe = np.where(empty, 1.0, state.l)
        lse = np.where(empty, -np.inf, state.m + np.log(safe))
        made = rounding(np.where(empty, 0.0, lse), self.recipe.statistics)
        w = self.weight(queries, lse)
        o = state.o.times(1.0 / safe)
        self.note_shared(queries, made, w[..., None] * o.value, w)
        return State(lse, np.where(empty, 0.0, 1.0), o)

    def merge_normalised(self, queries: Integers, a: State, b: State, first: bool) -> State:
        """Merge two normalised states (SOFT-3); their weights exp(lse_n - lse) and the new lse are rounded."""
        m = np.maximum(a.m, b.m)
        e_a, e_b = factor(a.m, m), factor(b.m, m)
        empty = e_a + e_b == 0
        total = np.where(empty, 1.0, e_a + e_b)
        lse = np.where(empty, -np.inf, np.where(empty, 0.0, m) + np.log(total))
        c_a, c_b = e_a / total, e_b / total
        w = self.weight(queries, lse)
        for part, c in ((a, c_a), (b, c_b)):
            share = (w * c)[..., None] * part.o.value
            self.note_shared(queries, self.relative(c), share, w * c, of_sum=False)
        grid = np.where((c_a == 0) | (c_b == 0), np.inf, 0.0)
        made = rounding(np.where(empty, 0.0, lse), self.recipe.statistics, grid)
        o = self.joined(queries, lse, (a.o, c_a), (b.o, c_b))
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
