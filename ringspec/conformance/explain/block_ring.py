"""Make a ring out of a target that computes single blocks, so that readouts can be read from it.

The target is the program under test. A *block* is the queries of one worker with the keys of one worker. The target
computes every block, and this module does the rest of the ring in float64, as the specification does it: it merges o and
lse of the blocks, computes delta, and adds dq, dk and dv of the blocks. Every wrong result is therefore the block's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.readout.faults.visible import seen as visible_pairs
from ringspec.conformance.readout.problem.settings import DTYPES, FEATURES, LAYOUTS
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Call, Refused, Result, Target
from ringspec.conformance.targets.reference import reference_float64
from ringspec.formats import load, store
from ringspec.problem.model import Array, Booleans
from ringspec.spec.online_softmax import merge_all
from ringspec.vectors.catalogue import build
from ringspec.vectors.format.case import Case

FORWARD, BACKWARD = "block-forward", "block-backward"
BETWEEN_BLOCKS = ("causal", "window")
SENTINEL = 1e4  # an lse of this size is a constant for 'no key', not the result of scores, which are below 10


def computes_blocks(claims: Capabilities) -> bool:
    """Tell whether a target claims blocks, and no ring with a forward pass."""
    blocks = {FORWARD, BACKWARD} & set(claims.operations)
    return bool(blocks) and "ring-forward" not in claims.operations


def ring_of_blocks(target: Target, workers: int) -> RingOfBlocks:
    """Return the ring of ``workers`` workers that is made of the target's block.

    Its claims are those of the block, as far as readouts use them. A pass that the target does not claim is the
    specification's. A ring of one worker is one block, with the positions 0 to n - 1 of queries and keys.
    """
    claims = target.capabilities
    several = workers > 1
    layouts = LAYOUTS if several and "positions" in claims.features else LAYOUTS[:1]
    of_ring = dataclasses.replace(
        claims,
        operations=("ring-forward", *(("ring-backward",) if BACKWARD in claims.operations else ())),
        layouts=layouts,
        circulations=("kv",),
        directions=(1,),
        workers=(workers,),
        masks=tuple(x for x in claims.masks if not several or x in BETWEEN_BLOCKS),
        features=() if several else tuple(x for x in FEATURES[:1] if x in claims.features),
        lse="hidden" if claims.lse == "hidden" else "natural",
        lse_of_empty_rows="minus-infinity",
        axes="BHSD",
        recipe=None,
    )
    return RingOfBlocks(target, of_ring)


@dataclass
class RingOfBlocks:
    """A target whose ring is made of the blocks of ``target``.

    ``notes`` says what was wrong in rows of a block without a visible key. The merge takes these rows as empty.
    """

    target: Target
    capabilities: Capabilities
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.target.name

    def can_run(self, call: Call) -> bool:
        """Tell whether the target claims every block of a ring's call that must be computed."""
        try:
            list(self.blocks(call))
        except Refused:
            return False
        return True

    def run(self, call: Call) -> Result:
        """Compute a call of the ring from blocks; raise Refused if the target does not claim one of them."""
        blocks = list(self.blocks(call))
        o, lse = self.forward(call, blocks)
        outputs, statistics = call.formats["outputs"], call.formats["statistics"]
        found = Result(
            o=[store(x, outputs) for x in o],
            lse=None if self.capabilities.lse == "hidden" else [store(x, statistics) for x in lse],
        )
        if "backward" in call.passes:
            for name, arrays in self.backward(call, blocks, o, lse).items():
                setattr(found, name, [store(x, outputs) for x in arrays])
        return found

    def forward(self, call: Call, blocks: list[Block]) -> tuple[list[Array], list[Array]]:
        """Return o and lse of each worker, merged in float64.

        A hidden lse, which only a ring of one worker may have, is the specification's.
        """
        parts: dict[int, list[tuple[Array, Array]]] = {a: [] for a in range(call.workers)}
        for block in blocks:
            asked = block.forward(call)
            if FORWARD in self.target.capabilities.operations:
                found = self.computed(block, asked)
            else:
                found = outputs_of(
                    reference_float64.run(asked), asked, reference_float64.capabilities
                )
            o = load(found["o"][0])
            if "lse" in found:
                lse = load(found["lse"][0])
                o, lse = self.with_empty_rows(block, o, lse)
            else:
                true = reference_float64.run(asked).lse
                assert true is not None
                lse = load(true[0])
            parts[block.queries].append((o, lse))
        merged = [
            parts[a][0] if len(parts[a]) == 1 else merge_all(parts[a]) for a in range(call.workers)
        ]
        return [o for o, _ in merged], [lse for _, lse in merged]

    def backward(
        self, call: Call, blocks: list[Block], o: list[Array], lse: list[Array]
    ) -> dict[str, list[Array]]:
        """Return dq, dk and dv of each worker: the sums over its blocks."""
        of = {"dq": "q", "dk": "k", "dv": "v"}
        sums = {n: [np.zeros(x.shape) for x in call.tensors[like]] for n, like in of.items()}
        for block in blocks:
            a, b = block.queries, block.keys
            delta = (load(call.worker("dy", a)) * o[a]).sum(axis=3)
            found = self.computed(block, block.backward(call, lse[a], delta))
            for name, worker in (("dq", a), ("dk", b), ("dv", b)):
                sums[name][worker] += load(found[name][0])
        return sums

    def computed(self, block: Block, asked: Call) -> dict[str, tuple[NDArray, ...]]:
        """Return the target's results for one block; a failure of the target says for which block."""
        claims = self.target.capabilities
        try:
            result, _ = ask(self.target, as_seen(asked, claims))
            return dict(outputs_of(result, asked, claims))
        except Stop as stop:
            raise Stop(stop.outcome, f"{block.words}{stop.message}", stop.findings) from None

    def with_empty_rows(self, block: Block, o: Array, lse: Array) -> tuple[Array, Array]:
        """Return o and lse with the rows that see no key set to o = 0 and lse = -inf, and note what they were.

        A row that the kernel computed from keys, because its mask is wrong, stays as it is: the readout reads it.
        """
        empty = np.broadcast_to(~block.visible.any(axis=1), lse.shape)
        nothing = (o == 0).all(axis=3) | ~np.isfinite(o).all(axis=3)
        rows = empty & (nothing | ~(np.abs(lse) < SENTINEL))
        finite_is_claimed = self.target.capabilities.lse_of_empty_rows == "finite"
        for name, x, right, words in (
            ("o", o, (o == 0).all(axis=3), "0"),
            ("lse", lse, np.isneginf(lse) | (np.isfinite(lse) & finite_is_claimed), "-inf"),
        ):
            wrong = rows & ~right
            beginning = f"In rows without a visible key, {name} is "
            if wrong.any() and not any(note.startswith(beginning) for note in self.notes):
                values = x[wrong].ravel()
                unlike = values[~np.isfinite(values) if np.isnan(values).any() else values != 0]
                value = unlike[0] if unlike.size else 0.0
                self.notes.append(f"{beginning}{value:.6g}, not {words}.")
        return np.where(rows[..., None], 0.0, o), np.where(rows, -np.inf, lse)

    def blocks(self, call: Call) -> Iterator[Block]:
        """Yield the blocks of a call that must be computed, in the order of a ring's steps.

        A hidden block is left out if the target does not claim rows without keys. Raise Refused for any other block
        that the target does not claim.
        """
        for a in range(call.workers):
            for step in range(call.workers):
                block = block_of(call, a, (a - step) % call.workers, self.target.capabilities)
                if block is not None:
                    yield block


@dataclass(frozen=True)
class Block:
    """One block of a ring's call: the queries of worker ``queries`` with the keys of worker ``keys``.

    ``visible`` [n, n]: the pairs that the mask shows. ``options`` are the options of the block's call, such as causal,
    q_offset and positions.
    """

    queries: int
    keys: int
    visible: Booleans
    options: Mapping[str, Any]
    alone: bool

    @property
    def words(self) -> str:
        """The beginning of a message about this block; '' if there is no other block."""
        return (
            "" if self.alone else f"queries of part {self.queries} with keys of part {self.keys}: "
        )

    def forward(self, call: Call) -> Call:
        """Return the call of the block's forward pass."""
        case = case_of(call, "forward", self.options)
        return call_of(case, self.tensors(call, "q", "k", "v"))

    def backward(self, call: Call, lse: Array, delta: Array) -> Call:
        """Return the call of the block's backward pass, for lse and delta of the rows [1, H, n]."""
        statistics = call.formats["statistics"]
        rows = {"in.lse": store(lse, statistics), "in.delta": store(delta, statistics)}
        case = case_of(call, "backward", self.options)
        return call_of(case, self.tensors(call, "q", "k", "v", "dy") | rows)

    def tensors(self, call: Call, *names: str) -> dict[str, NDArray]:
        positions = {
            f"in.{name}": np.asarray(self.options[name])
            for name in ("positions_q", "positions_k")
            if name in self.options
        }
        of = {name: self.keys if name in ("k", "v") else self.queries for name in names}
        return {f"in.{name}": call.worker(name, of[name]) for name in names} | positions


def case_of(call: Call, phase: str, options: Mapping[str, Any]) -> Case:
    """Return the case of one block of a ring's call, built as the block cases of the suite are."""
    (batch, heads, slots, dim), kv_heads = call.worker("q", 0).shape, call.worker("k", 0).shape[1]
    make = build.block_forward if phase == "forward" else build.block_backward
    return make(
        f"{call.id}/{phase}", "", "", S=slots, B=batch, H=heads, Hkv=kv_heads, D=dim,
        Dv=call.worker("v", 0).shape[3], dtype=DTYPES[call.formats["inputs"]], **options,
    )  # fmt: skip


def block_of(call: Call, a: int, b: int, claims: Capabilities) -> Block | None:
    """Return block [a, b] of a ring's call, with the first options for its positions that the target claims.

    None for a hidden block that the target does not claim. Raises Refused if it claims no options that fit.
    """
    assert call.position_q is not None and call.position_k is not None
    of_q, of_k = call.position_q[a, 0], call.position_k[b, 0]
    terms = call.terms
    causal, window = bool(terms.get("causal")), terms.get("window")
    visible = visible_pairs(of_q[None, None], of_k[None, None], causal, window)[0, 0, 0]
    passes = [one for one in ("forward", "backward") if f"block-{one}" in claims.operations]
    missing = ""
    for options in options_of(terms, of_q, of_k, visible):
        needs = [case_of(call, one, options).requires for one in passes]
        reasons = [x for x in (why_not(claims, one) for one in needs) if x]
        if not reasons:
            return Block(a, b, visible, options, call.workers == 1)
        missing = missing or reasons[0]
    if visible.any():
        raise Refused(f"no block with {missing}")
    return None


def options_of(
    terms: Mapping[str, Any], of_q: NDArray, of_k: NDArray, visible: Booleans
) -> Iterator[dict[str, Any]]:
    """Yield the options of calls that compute a block with queries and keys at the positions ``of_q`` and ``of_k``.

    The mask is the same in all. The first options are those that say most about the positions.
    """
    plain = dict(terms)
    slots = np.arange(len(of_q))
    offset = int(of_q[0] - of_k[0])
    in_a_row = all(np.array_equal(x - x[0], slots) for x in (of_q, of_k))
    moved = offset != 0 or of_q[0] != 0
    masked = bool(terms.get("causal")) or terms.get("window") is not None
    if moved or not in_a_row:
        places = {"positions_q": tuple(of_q.tolist()), "positions_k": tuple(of_k.tolist())}
        yield plain | places
    if in_a_row and offset:
        yield plain | {"q_offset": offset}
    if in_a_row and not offset or not masked:
        yield plain
    if masked and visible.all():
        yield {name: x for name, x in plain.items() if name not in BETWEEN_BLOCKS}
