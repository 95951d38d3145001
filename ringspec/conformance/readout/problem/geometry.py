"""The ring of a readout problem: its steps and positions, and the layouts that a kernel may wrongly assume.

A readout is a problem whose results show what a kernel computed for each pair of tokens. A *slot* is the place of one
token on a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.layout import contiguous, striped, zigzag, zigzag_per_document

PER_DOCUMENT = "zigzag_per_document"
LAYOUTS = {"contiguous": contiguous, "striped": striped}  # zigzag takes an even number of slots
VISIBLE, OWN_CHUNKS, WHOLE = "visible", "visible, and own chunks", "whole blocks"
# What a kernel may compute as one range in layouts in which a causal mask hides parts of all blocks of other workers, the
# usual way first: see ``parts`` of Geometry.
WAYS = {"zigzag": ("", VISIBLE, OWN_CHUNKS, WHOLE), "striped": ("", VISIBLE)}
LATER = "contiguous, shifted by one token"
EXCHANGED = "zigzag with its two chunks exchanged"
SHORT = "contiguous, with one token fewer on each worker"
EVERY_OTHER = "contiguous for workers in the order 0, 2, 1, 3"
Window = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Geometry:
    """The ring, the heads and the mask of a problem; two are equal if all their values are.

    ``circulation`` and ``direction`` are as in ``ringspec.ring``. ``position`` [W, n] has the positions of the tokens
    in the slots of each worker, under ``layout``. ``causal`` and ``window`` (left, right) define the mask. ``heads``
    counts query heads, and ``group`` query heads per key head. ``forward_travels`` is 'keys', as in the specification,
    or 'queries' if the kernel's forward pass sends queries. ``sinks`` is the number of sinks per query head.
    ``bias``: whether a bias is added to the scores.
    ``dropout``: dropout_p and dropout_seed; the seed is None if the call has the mask.
    ``padding``: the slots without a token, counted over all workers. Their position is -1.
    ``batches``: whether the heads are the batch entries of a call with one head.
    ``parts``: what a kernel computes as one range. '' is a block, or a chunk of one in the layout zigzag; VISIBLE is the
    part of a block that is visible, whose tiles run through both chunks of a zigzag shard; with OWN_CHUNKS, the chunks of a
    worker's own block are ranges of their own; with WHOLE, every block is one range, with its hidden parts.
    ``usual_scale``: 1/sqrt(D), which is the scale unless the call gives another one; None stands for the scale.
    """

    workers: int
    circulation: str
    direction: int
    layout: str
    position: Integers
    causal: bool
    window: Window | None
    heads: int
    group: int
    scale: float
    forward_travels: str = "keys"
    documents: tuple[int, ...] | None = None
    softcap: float | None = None
    dlse: bool = False
    sinks: int = 0
    bias: bool = False
    dropout: tuple[float, int | None] | None = None
    padding: tuple[int, ...] = ()
    batches: bool = False
    usual_scale: float | None = None
    parts: str = ""

    @cached_property
    def values(self) -> tuple[object, ...]:
        """All values, with the positions as bytes."""
        position = self.position.shape, self.position.dtype.str, self.position.tobytes()
        of = {one.name: getattr(self, one.name) for one in fields(self)}
        return tuple((of | {"position": position}).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Geometry) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    @property
    def slots(self) -> int:
        """The number of tokens of one worker."""
        return int(self.position.shape[1])

    @property
    def tokens(self) -> int:
        return int(self.position.size)

    @property
    def sees_all(self) -> bool:
        """Whether no pair is masked."""
        return not (self.causal or self.window or self.documents or self.padding)

    @cached_property
    def real(self) -> Booleans:
        """Which slots hold a token, [W, n]."""
        return ~np.isin(np.arange(self.position.size), self.padding).reshape(self.position.shape)

    @cached_property
    def real_pairs(self) -> Booleans:
        """Which pairs [a, b, 1, i, j] consist of two tokens."""
        return self.real[:, None, None, :, None] & self.real[None, :, None, None, :]

    def without_padding(self, x: Array) -> Array:
        """Return an array [W, heads, n, ..] with 0 in padding slots, whose results may have any value."""
        if not self.padding:
            return x
        return np.where(self.real.reshape(self.workers, 1, -1, *[1] * (x.ndim - 3)), x, 0.0)

    @property
    def run(self) -> int:
        """Number of tokens of a worker that a kernel handles as one range: a chunk of a zigzag shard, or else the shard."""
        return self.slots // 2 if self.layout == "zigzag" and not self.parts else self.slots

    @property
    def of_visible_parts(self) -> bool:
        """Whether a kernel computes the visible part of each block as one range."""
        return self.parts in (VISIBLE, OWN_CHUNKS)

    @property
    def own_run(self) -> int:
        """The same for a worker's own block."""
        return self.slots // 2 if self.parts == OWN_CHUNKS else self.run

    @cached_property
    def own_blocks(self) -> Booleans:
        """Which blocks are those of a worker with its own keys, [a, b, 1, 1, 1]."""
        return np.eye(self.workers, dtype=bool)[:, :, None, None, None]

    def travels(self, phase: str) -> str:
        """Return whether 'queries' or 'keys' travel in a pass."""
        if phase == "forward":
            return self.forward_travels
        return "queries" if self.circulation == "q" else "keys"

    def steps(self, phase: str) -> Integers:
        """Return [a, b]: the step in which a pass computes queries of worker a with keys of worker b (RING-1)."""
        a, b = np.indices((self.workers, self.workers))
        hops = b - a if self.travels(phase) == "queries" else a - b
        return (self.direction * hops) % self.workers


def positions(layout: str, workers: int, slots: int) -> Integers:
    """Return the positions [W, n] of the slots under 'contiguous', 'striped', 'zigzag' or 'zigzag_per_document'."""
    if layout == PER_DOCUMENT:
        tokens = workers * slots
        starts = document_starts(layout, workers, slots)
        return zigzag_per_document(tokens, workers, (*starts, tokens)).table
    return tables(workers, slots)[layout]


def document_starts(layout: str, workers: int, slots: int) -> tuple[int, ...]:
    """Return the first tokens of three documents of different lengths.

    Two of them lie on several workers. Under 'zigzag_per_document', all do, and each has 2W chunks without padding.
    """
    tokens = workers * slots
    if layout != PER_DOCUMENT:
        return 0, 5 * tokens // 24, 14 * tokens // 24
    first = max(slots // 8, 1) * 2 * workers
    return 0, first, max(first, tokens - first)


def with_padding(workers: int, slots: int) -> Integers:
    """Return the positions [W, n] of tokens in the order of the slots; -1 in padding slots, which differ by worker."""
    empty = ([-1], [0, 1], [slots // 2 - 1, -1])
    real = np.ones((workers, slots), bool)
    for r in range(workers):
        real[r, empty[r % 3]] = False
    return np.where(real, np.cumsum(real).reshape(real.shape) - 1, -1)


def packed(geometry: Geometry) -> dict[str, Integers]:
    """Return [W, n]: the slots of each worker's tokens, followed or preceded by its padding slots."""
    return {
        "first": np.argsort(~geometry.real, axis=1, kind="stable"),
        "last": np.argsort(geometry.real, axis=1, kind="stable"),
    }


def tables(workers: int, slots: int) -> dict[str, Integers]:
    """Return a dict from the name of each layout to its positions [W, n].

    Some of these layouts are wrong ones that kernels are known to use.
    """
    r, i = np.indices((workers, slots))
    length, half = workers * slots, slots // 2
    found = {name: make(length, workers).table for name, make in LAYOUTS.items()}
    if slots % 2 == 0:
        chunks = zigzag(length, workers).table
        found["zigzag"] = chunks
        found["zigzag with chunks r and W + r"] = np.where(i < half, r, workers + r - 1) * half + i
        found[EXCHANGED] = np.roll(chunks, half, axis=1)
    if workers == 4:  # as in a ring of the groups 0, 2 and 1, 3, which exchange heads
        found[EVERY_OTHER] = np.array([[0], [2], [1], [3]]) * slots + i
    return found | {LATER: r * slots + i + 1, SHORT: r * (slots - 1) + i}


def believed(geometry: Geometry) -> dict[str, Integers]:
    """Return a dict from the names of layouts that a kernel may wrongly assume to their positions [W, n].

    These are all layouts of :func:`tables` except the problem's own.
    """
    every = {} if geometry.padding else tables(geometry.workers, geometry.slots)
    return {name: x for name, x in every.items() if not np.array_equal(x, geometry.position)}


def dealt_otherwise(geometry: Geometry) -> list[Integers]:
    """Return one array per layout that a kernel may assume: first the correct layout, then as in :func:`believed`.

    The array has an entry for each slot, where slots are counted over all workers. The assumed layout puts some token
    in that slot, and the entry is the slot that really holds this token. A layout that is not a permutation of the
    tokens is replaced by the correct one. The last array is for the inverse permutation of the correct layout.
    """
    slot_of = np.argsort(geometry.position.ravel())
    maps = [np.arange(geometry.tokens)]
    for name, table in believed(geometry).items():
        maps.append(maps[0] if name in (LATER, SHORT) else slot_of[table.ravel()])
    token_of = geometry.position.ravel()
    return [*maps, np.argsort(token_of[token_of])]


OPEN_CHAIN = "the visitor in a chain that is not closed (its first worker keeps what it has)"


def relations(
    geometry: Geometry, phase: str, side: str, distinct: bool = True
) -> dict[str, Integers]:
    """Return, for each block, the workers that a kernel may wrongly take for the owner of its queries or keys.

    Each table [a, b] gives one such worker for block [a, b]; its key in the dict describes the worker in words.
    ``side``: 'q' for the owner of the queries, which is a, or 'k' for that of the keys, which is b. ``distinct``: leave
    out tables that equal the correct owners or an earlier table.
    """
    W, d = geometry.workers, geometry.direction
    a, b = np.indices((W, W))
    step = geometry.steps(phase)
    own, other = (a, b) if side == "q" else (b, a)
    if (side == "q") == (geometry.travels(phase) == "queries"):
        tables = {
            "the worker that computes": other,
            "the previous step's visitor": (own + d) % W,
            "the next step's visitor": (own - d) % W,
            "the visitor in a ring of the opposite direction": (other + d * step) % W,
            "the worker whose number equals the step": step % W,
            "the visitor if fixed pairs of workers (0 and 1, 2 and 3) exchange blocks in every step": np.minimum(
                other ^ (step % 2), W - 1
            ),
            "worker 0": np.zeros_like(a),
            "the visitor of step 1": (other - d) % W,
            OPEN_CHAIN: np.clip(other - d * step, 0, W - 1),
        }
    else:
        tables = {
            "the visitor": other,
            "the next worker": (own + 1) % W,
            "the previous worker": (own - 1) % W,
            "worker 0": np.zeros_like(a),
        }
    if not distinct:
        return tables
    left: dict[str, Integers] = {}
    for words, table in tables.items():
        same = any(np.array_equal(table, x) for x in (own, *left.values()))
        if not same:
            left[words] = table
    return left
