"""The functions that compute a ring, called pieces, each of which a bug can replace.

Each default computes what the specification says. :mod:`~ringspec.conformance.diagnose.mutants.ring` is the loop that
calls the pieces; with all defaults its results equal those of ``ringspec.ring``, bit for bit.

s are the masked scores, p the softmax weights, dp = dy v^T. ds is the gradient of s, and dz that of the scores before
the soft cap. keep is the factor of dropout. A key head serves a group of query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import product, round_to
from ringspec.problem.model import Array, Booleans, Columns, Rows, Terms, columns_of
from ringspec.recipes import Recipe
from ringspec.spec.block import BlockGradients
from ringspec.spec.dense_backward import dy_o_sum, sink_gradient
from ringspec.spec.dense_backward import over_group as sum_over_group
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible as visible_pairs
from ringspec.spec.online_softmax import SoftmaxState, absorb, finish
from ringspec.spec.ring_forward import merge_states
from ringspec.spec.worker import KeySide, QuerySide

Results = dict[str, list[NDArray]]
Side = TypeVar("Side", QuerySide, KeySide)


@dataclass(frozen=True)
class At:
    """Where a piece is called: the pass, the worker, the ring step, and the pair of blocks.

    ``phase``: 'forward', 'backward' or 'merge'. ``all_queries`` and ``all_keys``: the blocks of all workers as they
    were at the start of the pass.
    """

    phase: str
    worker: int
    step: int
    workers: int
    direction: int
    query: QuerySide
    key: KeySide
    all_queries: Sequence[QuerySide]
    all_keys: Sequence[KeySide]

    @property
    def own(self) -> bool:
        """Tell whether queries and keys belong to the same worker, which makes this the diagonal block."""
        return self.query.owner == self.key.owner

    def visitor(self, step: int) -> int:
        """Return the worker whose block visits this worker in a step (RING-1)."""
        return (self.worker - self.direction * step) % self.workers


@dataclass(frozen=True)
class Hop:
    """One transfer around the ring, after ``step``.

    ``last``: whether it is the final transfer of a backward pass, which returns gradients to their owners.
    """

    phase: str
    step: int
    workers: int
    direction: int
    last: bool


def same_terms(phase: str, terms: Terms) -> Terms:
    return terms


def same_queries(phase: str, side: QuerySide) -> QuerySide:
    return side


def same_keys(phase: str, side: KeySide) -> KeySide:
    return side


def same_seeds(dy: Array, dlse: Array) -> tuple[Array, Array]:
    return dy, dlse


def every_pair(at: At) -> bool:
    return True


def blocks_that_meet(at: At) -> tuple[QuerySide, KeySide]:
    return at.query, at.key


def mask(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    return visible_pairs(rows, columns, terms)


def score(
    q: Array,
    k: Array,
    allowed: Booleans,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> tuple[Array, Array | None]:
    """Return the scores s, and t = tanh(z / softcap), where z = scale * q k^T + bias.

    s is -inf where ``allowed`` is False. t is None without a soft cap.
    """
    z = terms.scale * product(q, k.swapaxes(2, 3), recipe.products) + finite_bias(rows, columns)
    z, t = capped(z, terms, recipe)
    return np.where(allowed, round_to(z, recipe.scores), -np.inf), t


def finite_bias(rows: Rows, columns: Columns) -> Array | float:
    """Return the bias of a block, with 0 in place of -inf; a pair whose bias is -inf is masked anyway."""
    if rows.bias is None:
        return 0.0
    bias: Array = columns_of(rows.bias, columns)
    return np.where(np.isneginf(bias), 0.0, bias)


def capped(z: Array, terms: Terms, recipe: Recipe) -> tuple[Array, Array | None]:
    if terms.softcap is None:
        return z, None
    t = round_to(np.tanh(z / terms.softcap), recipe.scores)
    return terms.softcap * t, t


def keep(at: At, rows: Rows, columns: Columns, terms: Terms, batch: int) -> Array | float:
    return keep_factor(rows, columns, terms, batch)


def to_query_heads(x: Array, terms: Terms) -> Array:
    """Repeat key heads so that each query head has its own copy (FWD-10)."""
    return np.repeat(x, terms.group, axis=1)


def same_part(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    return part


def merged(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    return merge_states(running, part, recipe)


def finished(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    return finish(running, sinks, recipe)


def hop(where: Hop, sides: Sequence[Side]) -> list[Side]:
    """Give every worker the block of its neighbour."""
    return [sides[(r - where.direction) % where.workers] for r in range(where.workers)]


def delta(worker: int, dy: Array, o: Array, dlse: Array, recipe: Recipe) -> Array:
    return dy_o_sum(dy, o, recipe) - dlse


def probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
    """Compute p = exp(s - lse), 0 in rows whose lse is -inf."""
    empty = np.isneginf(lse)
    p = np.exp(s - np.where(empty, 0.0, lse)[..., None])
    return np.where(empty[..., None], 0.0, round_to(p, recipe.statistics))


def score_gradient(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    """Compute ds = p * (dp * keep - delta), 0 where p is 0."""
    return np.where(p == 0, 0.0, p * (dp * keep - delta[..., None]))


def uncapped(ds: Array, t: Array) -> Array:
    return ds * (1.0 - t * t)


def operand(name: str, x: Array, recipe: Recipe) -> Array:
    """Round an operand of the products in the backward pass; ``name`` is 'p' or 'ds'."""
    return round_to(x, getattr(recipe, name))


def products(
    kept: Array, dz: Array, q: Array, k: Array, dy: Array, terms: Terms, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """Compute dq, dk and dv of one tile. dk and dv are not rounded yet, and still have one head per query head."""
    dq = round_to(terms.scale * product(dz, k, recipe.products), recipe.products)
    dk = terms.scale * product(dz.swapaxes(2, 3), q, recipe.products)
    return dq, dk, product(kept.swapaxes(2, 3), dy, recipe.products)


def over_group(x: Array, terms: Terms) -> Array:
    return sum_over_group(x, terms.group)


def for_bias(dz: Array, rows: Rows, terms: Terms) -> Array:
    """Return the gradient of the scores that is summed to give dbias."""
    return dz


def same_share(at: At, share: BlockGradients) -> BlockGradients:
    return share


def add(at: At, name: str, total: Array, share: Array, format: str) -> Array:
    """Add the contribution ``share`` of one block to an accumulator; ``name`` is 'dq', 'dk', 'dv' or 'dbias'."""
    return round_to(total + share, format)


def reduced(owner: int, parts: Sequence[KeySide]) -> Sequence[KeySide]:
    """Return what each worker contributes to an owner's dk and dv, in worker order.

    This piece is called only if keys are gathered instead of sent around the ring.
    """
    return parts


def sink_share(worker: int, sinks: Array, lse: Array, delta: Array) -> Array:
    return sink_gradient(sinks, lse, delta)


def same_results(results: Results) -> Results:
    return results


def same_recipe(recipe: Recipe) -> Recipe:
    return recipe


@dataclass(frozen=True)
class Hooks:
    """All pieces, in the order in which a pass calls them.

    ``recipe``        where the program really rounds, and to which format
    ``terms``         scale, masks, soft cap, sinks and dropout of a pass, 'forward' or 'backward'
    ``queries``, ``keys``    a worker's blocks at the start of a pass; in the backward pass with dy, lse, delta
    ``computes``      whether a pair of blocks is computed at all
    ``sees``          the blocks that the computation reads
    ``to_query_heads``    which key head a query head reads
    ``mask``          visible query-key pairs of a tile
    ``score``         s and t of a tile
    ``keep``          dropout factors
    ``absorb_tile``   absorb one tile into the softmax state of its block
    ``part``          the softmax state of one block before it is merged
    ``merge``         merge the softmax state of one block into the running state
    ``hop``           the block that each worker holds after a transfer
    ``finish``        o and lse of a worker
    ``seeds``         dy and dlse of a worker as the backward pass uses them
    ``delta``         row sum of dy * o, minus dlse, of a worker
    ``probabilities``, ``score_gradient``, ``uncapped``    p, ds, dz of a tile
    ``operand``       p and dz as rounded for the products
    ``products``      dq, dk, dv of a tile
    ``over_group``    sum over the query heads of a key head
    ``for_bias``      the gradient of the scores that is summed to give dbias
    ``share``         the gradients of one pair of blocks before they are added
    ``add``           add the gradients of one pair of blocks to an accumulator
    ``reduced``       what each worker contributes to one owner's dk, dv if keys are gathered
    ``sink_share``    one worker's contribution to dsinks
    ``results``       all results that the call returns
    """

    recipe: Callable[[Recipe], Recipe] = same_recipe
    terms: Callable[[str, Terms], Terms] = same_terms
    queries: Callable[[str, QuerySide], QuerySide] = same_queries
    keys: Callable[[str, KeySide], KeySide] = same_keys
    computes: Callable[[At], bool] = every_pair
    sees: Callable[[At], tuple[QuerySide, KeySide]] = blocks_that_meet
    to_query_heads: Callable[[Array, Terms], Array] = to_query_heads
    mask: Callable[[At, Rows, Columns, Terms], Booleans] = mask
    score: Callable[..., tuple[Array, Array | None]] = score
    keep: Callable[[At, Rows, Columns, Terms, int], Array | float] = keep
    absorb_tile: Callable[..., SoftmaxState] = absorb
    part: Callable[[At, SoftmaxState, Recipe], SoftmaxState] = same_part
    merge: Callable[[At, SoftmaxState, SoftmaxState, Recipe], SoftmaxState] = merged
    hop: Callable[..., list] = hop
    finish: Callable[[int, SoftmaxState, Array | None, Recipe], tuple[Array, Array]] = finished
    seeds: Callable[[Array, Array], tuple[Array, Array]] = same_seeds
    delta: Callable[[int, Array, Array, Array, Recipe], Array] = delta
    probabilities: Callable[[Array, Array, Recipe], Array] = probabilities
    score_gradient: Callable[[Array, Array, Array | float, Array], Array] = score_gradient
    uncapped: Callable[[Array, Array], Array] = uncapped
    operand: Callable[[str, Array, Recipe], Array] = operand
    products: Callable[..., tuple[Array, Array, Array]] = products
    over_group: Callable[[Array, Terms], Array] = over_group
    for_bias: Callable[[Array, Rows, Terms], Array] = for_bias
    share: Callable[[At, BlockGradients], BlockGradients] = same_share
    add: Callable[[At, str, Array, Array, str], Array] = add
    reduced: Callable[[int, Sequence[KeySide]], Sequence[KeySide]] = reduced
    sink_share: Callable[[int, Array, Array, Array], Array] = sink_share
    results: Callable[[Results], Results] = same_results
