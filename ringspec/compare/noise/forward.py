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

import numpy as np

from ringspec.compare.noise.merging import merged
from ringspec.compare.noise.p_relative_to import Reference
from ringspec.compare.noise.problem import Geometry, Head
from ringspec.compare.noise.rounding import Error, no_error, product_error, rounding
from ringspec.compare.noise.worker import Sources, Worker
from ringspec.formats import format_of
from ringspec.recipes import Recipe


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
        reference = Reference(recipe.p_relative_to, head, queries)
        blocks = [
            work.block(queries, geometry.key_tiles(int(b), recipe.tile_k), reference)
            for b in geometry.order[r]
            if b >= 0
        ]
        work.finish(queries, merged(work, queries, blocks))
    return sources
