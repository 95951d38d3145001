"""Attention over all ranks at once in float64, its gradient, and how far a kernel may be from it.

Arrays have one leading axis of ranks: q, dy, o [W, b, h, s, d]; k, v [W, b, hkv, s, d]; lse [W, b, h, s].
Tokens stay in the order (rank, local row): masks come from global positions and local key indices, so
nothing here knows of rings, steps or offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
UNDERFLOW = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}
"""What rounding may add to a number below the normal ones."""
FLOAT32_OPERATIONS = 8
"""Roundings of float32 that are allowed for in each sum, in units of its absolute terms."""


@dataclass(frozen=True)
class Case:
    """Sizes, masks and dtype of one run; ``group`` query heads share a key head.

    ``scale`` is that of the scores of q as the kernel gets it. ``packed`` are ranges of local keys, the same for the
    keys of every rank; ``documents`` are ranges of tokens, which become bounds for the keys of each rank, and so does
    the causal mask of ``zigzag``.
    """

    workers: int = 1
    batch: int = 1
    heads: int = 1
    group: int = 1
    length: int = 128
    width: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    striped: bool = False
    packed: bool = False
    zigzag: bool = False
    documents: bool = False
    seed: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def key_heads(self) -> int:
        """Heads of k and v."""
        return self.heads // self.group

    @property
    def ranks(self) -> int:
        """Ranks of all rings."""
        return self.workers * (1 if self.groups is None else len(self.groups))

    @property
    def positions(self) -> Array:
        """The token in each slot, [W, s]."""
        place, local = np.mgrid[: self.workers, : self.length]
        if self.striped:
            return local * self.workers + place
        if not self.zigzag:
            return place * self.length + local
        half = self.length // 2
        assert self.length == 2 * half
        last = (2 * self.workers - 1 - place) * half + local - half
        return np.where(local < half, place * half + local, last)

    @property
    def scale(self) -> float:
        """1 under a causal mask, where q comes scaled."""
        return 1.0 if self.causal else 1 / np.sqrt(self.width)


@dataclass(frozen=True)
class Inputs:
    """What the ranks start from, in the storage dtype.

    Bounds [W, b, s] int64, or None: of local keys with ``packed``, of tokens with ``documents``.
    """

    q: Array
    k: Array
    v: Array
    dy: Array
    bound_min: Array | None
    bound_max: Array | None


def draw(case: Case) -> Inputs:
    """Normal q, k, v, dy; the scores have a standard deviation of about 1.5."""
    rng = np.random.default_rng(case.seed)
    kind = DTYPES[case.dtype]
    rows = (case.ranks, case.batch, case.heads, case.length, case.width)
    keys = (case.ranks, case.batch, case.key_heads, case.length, case.width)
    sharpness = 1.5 if not case.causal else 1.5 / np.sqrt(case.width)
    q = (rng.standard_normal(rows) * sharpness).astype(kind)
    k, v = (rng.standard_normal(keys).astype(kind) for _ in range(2))
    dy = rng.standard_normal(rows).astype(kind)
    if case.documents:
        return Inputs(q, k, v, dy, *draw_documents(case, rng))
    return Inputs(q, k, v, dy, *(draw_bounds(case, rng) if case.packed else (None, None)))


def draw_documents(case: Case, rng: np.random.Generator) -> tuple[Array, Array]:
    """Documents of any length in each ring; the last token is in none of them."""
    low = np.zeros((case.ranks, case.batch, case.length), np.int64)
    high = np.zeros_like(low)
    tokens = case.workers * case.length
    for ring in rings(case):
        for entry in range(case.batch):
            edges = np.array([0, *np.sort(rng.integers(1, tokens, 3)), tokens - 1])
            document = np.searchsorted(edges, case.positions, side="right") - 1
            inside = document < len(edges) - 1
            document = np.where(inside, document, 0)
            low[list(ring), entry] = edges[document]
            high[list(ring), entry] = np.where(inside, edges[document + 1], edges[document])
    return low, high


def draw_bounds(case: Case, rng: np.random.Generator) -> tuple[Array, Array]:
    """Documents that end inside a tile, one of them empty, and rows whose bounds exclude everything.

    The bounds of the ranks differ, so a backward that uses its own rows' instead is seen.
    """
    shape = (case.ranks, case.batch, case.length)
    low, high = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for rank in range(case.ranks):
        for entry in range(case.batch):
            cuts = np.sort(rng.integers(1, case.length, 3))
            edges = [0, cuts[0], cuts[0], *cuts[1:], case.length]
            for begin, end in zip(edges, edges[1:], strict=False):
                low[rank, entry, begin:end], high[rank, entry, begin:end] = begin, end
            nothing = rng.integers(0, case.length, 5)
            high[rank, entry, nothing] = low[rank, entry, nothing]
    return low, high


def rings(case: Case) -> tuple[tuple[int, ...], ...]:
    """The replica groups, one of all ranks where none are given."""
    return (tuple(range(case.workers)),) if case.groups is None else case.groups


def visible(case: Case, given: Inputs, ring: tuple[int, ...], entry: int) -> Array:
    """[n, n] bool over the ring's tokens in the order (ring position, local row)."""
    local = np.tile(np.arange(case.length), case.workers)
    position = case.positions.reshape(-1)
    allowed = np.ones((len(local), len(local)), bool)
    if case.causal:
        allowed &= position[None, :] <= position[:, None]
    if given.bound_min is not None and given.bound_max is not None:
        low = np.concatenate([given.bound_min[rank, entry] for rank in ring])
        high = np.concatenate([given.bound_max[rank, entry] for rank in ring])
        key = position if case.documents else local
        allowed &= (low[:, None] <= key) & (key < high[:, None])
    return allowed


@dataclass(frozen=True)
class Truth:
    """Values and their tolerances, in the kernel's dtypes and layouts of this module."""

    value: dict[str, Array]
    allowed: dict[str, Array]


def heads_of(case: Case, given: Inputs) -> Any:
    """(ring, entry, head, key head, q, k, v [n, d] in float64, visible [n, n]) of every head."""
    for ring in rings(case):
        for entry in range(case.batch):
            mask = visible(case, given, ring, entry)
            for head in range(case.heads):
                key_head = head // case.group
                q = tokens(given.q, ring, entry, head)
                k, v = (tokens(x, ring, entry, key_head) for x in (given.k, given.v))
                yield ring, entry, head, key_head, q, k, v, mask


def tokens(x: Array, ring: tuple[int, ...], entry: int, head: int) -> Array:
    """The rows of all ranks of a ring, one rank after the other, in float64."""
    return np.concatenate([x[rank, entry, head] for rank in ring]).astype(np.float64)


def spread(target: Array, ring: tuple[int, ...], entry: int, head: int, rows: Array) -> None:
    """Add rows in the order of :func:`tokens` to the ranks' places."""
    for rank, part in zip(ring, np.split(rows, len(ring)), strict=True):
        target[rank, entry, head] += part


def forward(case: Case, given: Inputs) -> Truth:
    """o and lse, and what rounding P, o and float32 arithmetic may do to them."""
    u, f = ROUNDOFF[case.dtype], FLOAT32_OPERATIONS * ROUNDOFF["float32"]
    o, o_allowed = np.zeros(given.q.shape), np.zeros(given.q.shape)
    lse, lse_allowed = np.zeros(given.q.shape[:-1]), np.zeros(given.q.shape[:-1])
    for ring, entry, head, _, q, k, v, mask in heads_of(case, given):
        s = np.where(mask, case.scale * q @ k.T, -np.inf)
        kappa = 1 + np.max(np.where(mask, abs(case.scale) * np.abs(q) @ np.abs(k).T, 0), axis=1)
        top = np.max(s, axis=1)
        shift = np.where(np.isneginf(top), 0, top)
        e = np.exp(s - shift[:, None])
        l = e.sum(axis=1)
        p = e / np.where(l == 0, 1, l)[:, None]
        with np.errstate(divide="ignore"):
            row_lse = shift + np.log(l)
        size = p @ np.abs(v)
        lost = UNDERFLOW[case.dtype] * (mask @ np.abs(v)) / np.where(l == 0, 1, l)[:, None]
        spread(o, ring, entry, head, p @ v)
        noise = u * (size + np.abs(p @ v)) + f * kappa[:, None] * size + lost
        spread(o_allowed, ring, entry, head, noise)
        spread(lse, ring, entry, head, row_lse)
        bound = f * (kappa + np.abs(np.where(np.isneginf(row_lse), 0, row_lse)))
        spread(lse_allowed, ring, entry, head, bound)
    return Truth({"o": o, "lse": lse}, {"o": o_allowed, "lse": lse_allowed})


def backward(
    case: Case,
    given: Inputs,
    o: Array,
    lse: Array,
    scale: float | None = None,
    mixed_precision: bool = True,
) -> Truth:
    """dq, dk, dv from o and lse as given, and what rounding P, dS and float32 may do to them.

    Without ``mixed_precision`` also what rounding lse, dy * o, their sum and the carried dk and dv to
    the input dtype may do.
    """
    u, f = ROUNDOFF[case.dtype], FLOAT32_OPERATIONS * ROUNDOFF["float32"]
    lost = UNDERFLOW[case.dtype]
    low = 0.0 if mixed_precision else u
    carries = low * case.workers * case.group
    scale = case.scale if scale is None else scale
    value = {n: np.zeros(x.shape) for n, x in (("dq", given.q), ("dk", given.k), ("dv", given.v))}
    allowed = {n: np.zeros(x.shape) for n, x in value.items()}
    for ring, entry, head, key_head, q, k, v, mask in heads_of(case, given):
        dy, out = tokens(given.dy, ring, entry, head), tokens(o, ring, entry, head)
        row_lse = np.concatenate([lse[rank, entry, head] for rank in ring]).astype(np.float64)
        mask = mask & ~np.isneginf(row_lse)[:, None]
        row_lse = np.where(np.isneginf(row_lse), 0, row_lse)[:, None]
        with np.errstate(over="ignore"):
            p = np.where(mask, np.exp(np.where(mask, scale * q @ k.T - row_lse, 0)), 0)
        kappa = 1 + np.max(np.where(mask, abs(scale) * np.abs(q) @ np.abs(k).T, 0), axis=1)[:, None]
        kappa = f * (kappa + np.abs(row_lse)) + 1.1 * low * np.abs(row_lse)
        delta, delta_size = ((x(dy) * x(out)).sum(axis=1)[:, None] for x in (np.asarray, np.abs))
        ds = p * (dy @ v.T - delta)
        size = p * (np.abs(dy) @ np.abs(v).T + delta_size)
        noise = u * np.abs(ds) + kappa * size + 2.1 * low * p * delta_size + lost * mask
        spread(value["dq"], ring, entry, head, scale * ds @ k)
        spread(allowed["dq"], ring, entry, head, abs(scale) * noise @ np.abs(k))
        spread(value["dk"], ring, entry, key_head, scale * ds.T @ q)
        dk_noise = abs(scale) * (noise + carries * np.abs(ds)).T @ np.abs(q)
        spread(allowed["dk"], ring, entry, key_head, dk_noise)
        spread(value["dv"], ring, entry, key_head, p.T @ dy)
        spread(
            allowed["dv"],
            ring,
            entry,
            key_head,
            ((u + kappa + carries) * p + lost * mask).T @ np.abs(dy),
        )
    return Truth(value, allowed)


def worst(got: Array, value: Array, allowed: Array) -> float:
    """The largest error in units of what is allowed: infinite for NaN, and for a wrong infinity."""
    assert got.shape == value.shape
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(got - value) / allowed
    same = (got == value) | (np.isneginf(got) & np.isneginf(value))
    ratio = np.where(same, 0.0, ratio)
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))
