"""Count what each rank of a scheme sends, and what it holds, by formulas.

:func:`ringspec.context_parallel` runs these schemes, and :mod:`ringspec.schemes.cost` counts the same of a scheme as data;
tests/plan/test_schemes.py compares both with recorded runs. A *cell* is one token of one head. A rank holds n tokens, and
all ranks together S. P is the size of the axis ``ulysses``, c the number of key heads that a rank's H/P query heads use.
Counts are those of the busiest rank.

=============  ========================================================  ===============================================
scheme         forward                                                   backward, in addition to k (and q) again
=============  ========================================================  ===============================================
ring           k: W - 1 hops of n Hkv cells                              dk: W hops of n Hkv cells
double_ring    k: W - 1 inner and O - 1 outer hops of n Hkv cells        dk: W inner and O outer hops
all_gather     k: (W - 1) n Hkv                                          dk: (W - 1) n Hkv
ulysses, usp   q: n (H - H/P); k: n (sum of the other c);                dk: R hops; dq: as the state; dk: n (P - 1) c
               k: R - 1 hops of n P c; state: n (P - 1) H/P
joint          the same; the state also carries the T text tokens        the same; text dq, dk: T (R - 1) H/P and c
pcp            k: as all_gather                                          none
dcp            q and state: (D - 1) H/(T D) for each new query           none
=============  ========================================================  ===============================================

In a double ring, O is the size of the axis ``outer``; in dcp, T and D are the sizes of ``tp`` and ``dcp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.plan.workload import Workload
from ringspec.schemes.cost import cell_size
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.scheme import INPUTS, SIDE_OF


@dataclass(frozen=True)
class Move:
    """One collective operation, repeated after each step in ``steps``.

    ``thing``, ``kind`` and ``axis`` are as in :class:`ringspec.schemes.scheme.Transfer`. Each time, a rank sends ``cells``
    in ``messages`` messages. A ``permute`` can travel while a step computes. Another operation on q or k ends before the
    first step; on a result, it begins after the last step.
    """

    thing: str
    kind: str
    axis: str
    cells: int
    messages: int
    steps: range = range(1)


@dataclass(frozen=True)
class Sizes:
    """The cells of a rank: of q and k at home, and of q and k with which it computes.

    ``waits``: whether something moves before the first step, so that home and computation are two moments.
    """

    home_q: int
    home_k: int
    q: int
    k: int
    waits: bool


@dataclass(frozen=True)
class Movements:
    """What one rank does in one pass: its moves, and the cells that it holds."""

    moves: tuple[Move, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Split:
    """The sizes of one call: a scheme, its mesh, H and Hkv, and tokens.

    ``tokens``: the queries of one rank; in dcp, all new queries. ``keys``: the most keys of a rank at home. ``gathered``:
    all keys. ``text``: the tokens that all ranks hold; they count in none of the other three.
    """

    scheme: str
    mesh: Mesh
    heads: int
    kv_heads: int
    tokens: int
    keys: int
    gathered: int
    text: int = 0


def movements(split: Split, backward: bool) -> list[Movements]:
    """Return the moves of a pass, once for each kind of rank: in usp and joint, ranks may use different numbers of key heads."""
    if split.scheme in ("usp", "ulysses", "joint"):
        counts = key_heads(split, "ulysses")
        return [usp(split, backward, c, sum(counts)) for c in sorted(set(counts))]
    if split.scheme in ("all_gather", "pcp"):
        return [gathered(split, backward)]
    return [{"dcp": dcp, "ring": ring, "double_ring": double_ring}[split.scheme](split, backward)]


def key_heads(split: Split, axis: str) -> list[int]:
    """Return the number of key heads that each slice of the query heads uses, one slice for each coordinate of ``axis``.

    >>> key_heads(Split("ulysses", Mesh((("ulysses", 3),)), 6, 2, 1, 1, 3), "ulysses")
    [1, 2, 1]
    """
    parts = split.mesh.size(axis)
    size, group = split.heads // parts, split.heads // split.kv_heads
    return [((u + 1) * size - 1) // group - u * size // group + 1 for u in range(parts)]


def ring_moves(axis: str, size: int, cells: int, backward: bool) -> tuple[Move, ...]:
    """Return the hops of k, and in a backward pass of dk, along a ring."""
    if size == 1:
        return ()
    hops = Move("k", "permute", axis, cells, 1, range(size - 1))
    if not backward:
        return (hops,)
    return hops, Move("dk", "permute", axis, cells, 1, range(size))


def own(split: Split) -> tuple[int, int]:
    """Return the cells of q and of k that a rank holds at home, with all heads."""
    return (split.tokens + split.text) * split.heads, (split.keys + split.text) * split.kv_heads


def ring(split: Split, backward: bool) -> Movements:
    """Return what a rank of a ring does."""
    q, k = own(split)
    moves = ring_moves("ring", split.mesh.size("ring"), k, backward)
    return Movements(moves, Sizes(q, k, q, k, False))


def double_ring(split: Split, backward: bool) -> Movements:
    """Return what a rank of a double ring does; the constructor says why k makes W - 1 inner hops."""
    q, k = own(split)
    outer, inner = split.mesh.size("outer"), split.mesh.size("inner")
    steps = outer * inner
    moves = []
    for thing, last in (("k", steps - 1), ("dk", steps))[: 1 + backward]:
        inner_hops, outer_hops = range(last), range(inner - 1, last, inner)
        if inner > 1:
            moves.append(Move(thing, "permute", "inner", k, 1, inner_hops))
        if outer > 1:
            moves.append(Move(thing, "permute", "outer", k, 1, outer_hops))
    return Movements(tuple(moves), Sizes(q, k, q, k, False))


def gathered(split: Split, backward: bool) -> Movements:
    """Return what a rank does whose keys are gathered."""
    q, k = own(split)
    axis, others = split.mesh.names[0], split.mesh.ranks - 1
    moves: tuple[Move, ...] = (Move("k", "all_gather", axis, others * k, others),)
    everything = split.gathered * split.kv_heads
    if backward:
        moves += (Move("dk", "reduce_scatter", axis, everything - k, others),)
    return Movements(moves, Sizes(q, k, q, everything, True))


def usp(split: Split, backward: bool, count: int, all_counts: int) -> Movements:
    """Return what a rank does in Ulysses, USP or joint attention, if its query heads use ``count`` key heads."""
    parts, size = split.mesh.size("ulysses"), split.mesh.size("ring")
    heads, others = split.heads // parts, parts - 1
    home_q, home_k = own(split)
    block = split.tokens * parts
    ring_steps = ring_moves("ring", size, block * count, backward)
    sizes = Sizes(
        home_q,
        home_k,
        (split.text + block) * heads,
        (split.text + block) * count,
        parts > 1,
    )
    sums: tuple[Move, ...] = ()
    if split.text and backward and size > 1:
        cells = split.text * (size - 1)
        sums = (
            Move("dq", "all_reduce", "ring", cells * heads, size - 1),
            Move("dk", "all_reduce", "ring", cells * count, size - 1),
        )
    if parts == 1:
        return Movements((*ring_steps, *sums), sizes)
    key_kind = "all_gather" if all_counts == parts * split.kv_heads else "all_to_all"
    plain = "all_gather + all_to_all" if split.text else "all_to_all"
    into = (
        Move("q", "all_to_all", "ulysses", split.tokens * heads * others, others),
        Move("k", key_kind, "ulysses", split.tokens * (all_counts - count), others),
    )
    rows = (split.text + split.tokens) * heads * others
    home: tuple[Move, ...] = (Move("state", plain, "ulysses", rows, others),)
    if backward:
        summed = "all_reduce + reduce_scatter" if split.text else "reduce_scatter"
        copied = all_counts > split.kv_heads
        columns = (split.text + split.tokens) * count * others
        home = (
            Move("dq", plain, "ulysses", rows, others),
            Move("dk", summed if copied else plain, "ulysses", columns, others),
        )
    return Movements((*into, *ring_steps, *sums, *home), sizes)


def dcp(split: Split, backward: bool) -> Movements:
    """Return what a rank does that decodes; ``split.tokens`` are the new queries, which all ranks hold."""
    groups, parts = split.mesh.size("tp"), split.mesh.size("dcp")
    of_group = split.heads // groups
    mine = split.tokens * of_group // parts
    keys = split.keys * max(key_heads(split, "tp"))
    moves = tuple(
        Move(thing, kind, "dcp", mine * (parts - 1), parts - 1)
        for thing, kind in (("q", "all_gather"), ("state", "reduce_scatter"))
        if parts > 1
    )
    return Movements(moves, Sizes(mine, keys, split.tokens * of_group, keys, True))


def cell_bytes(work: Workload, backward: bool) -> dict[str, int]:
    """Return the bytes of one cell of each thing in the formats of the recipe, over the batch."""
    phase = "backward" if backward else "forward"
    d, dv = work.head_dim, work.value_dim
    return {x: work.batch * cell_size(x, phase, d, dv, work.recipe) for x in SIDE_OF}


def sent(moved: Movements, each: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a rank sends along each axis of the mesh."""
    found: dict[str, int] = {}
    for one in moved.moves:
        size = len(one.steps) * one.cells * each[one.thing]
        found[one.axis] = found.get(one.axis, 0) + size
    return found


def held(moved: Movements, each: dict[str, int], backward: bool) -> int:
    """Return the most bytes that a rank holds at any moment: at home, after a computation, or after the last transfer."""
    of_q, of_k = (each["dq"], each["dk"]) if backward else (each["state"], 0)
    x = moved.sizes
    inputs = x.q * each["q"] + x.k * each["k"]
    moments = [inputs + x.q * of_q + x.k * of_k, inputs + x.home_q * of_q + x.home_k * of_k]
    if x.waits:
        moments.append(x.home_q * each["q"] + x.home_k * each["k"])
    return max(moments)


def is_input(move: Move) -> bool:
    """Return whether a move carries q or k, which no step changes."""
    return move.thing in INPUTS
