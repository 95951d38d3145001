"""Compute what a ring with given faults returns for any call that the model ring can express.

The *model ring* (:class:`Model`) computes ring attention with or without *faults*, the mistakes of a kernel. Faults
that were read from a few problems are proved here: they must also give the numbers of other failing calls, whose
inputs were not chosen for this purpose. The model ring takes the call's S = scale q k^T and G = dy v^T. It returns the
weights A of the forward pass, the weights P of the backward pass and the gradient dS of the scores, which give::

    o = A v        dv = P^T dy        dq = scale dS k        dk = scale dS^T q
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.backward_search import GRADIENT, SAME, SAVED, carried
from ringspec.conformance.readout.choices import KERNELS, Choices, components, mixing
from ringspec.conformance.readout.effects import STORED
from ringspec.conformance.readout.fault_sets import composed
from ringspec.conformance.readout.geometry import VISIBLE, WAYS, Geometry, dealt_otherwise
from ringspec.conformance.readout.kinds import Fault
from ringspec.conformance.readout.masks import masks_of
from ringspec.conformance.readout.matches import near
from ringspec.conformance.readout.merges import INFINITE, MERGES, ZERO_NOT_NAN
from ringspec.conformance.readout.model.arrays import placed
from ringspec.conformance.readout.model.backward import gradient_of_forward, gradient_of_sinks
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.shares import (
    Core,
    core_of_pairs,
    ds_of,
    for_dv,
    of_group,
    share_of_bias,
)
from ringspec.conformance.readout.model.storing import held, stored
from ringspec.conformance.readout.pairs import OF_SLOTS, Pairs, kept, products
from ringspec.conformance.readout.problems import TOLERANCES
from ringspec.conformance.readout.reading import Named
from ringspec.conformance.readout.rounding import LOOSE, is_rounding
from ringspec.conformance.readout.told import Told
from ringspec.conformance.readout.visible import Mask
from ringspec.conformance.readout.vocabulary import every_kind, fault_named
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.recipes import RECIPES

TENSORS = {"q", "k", "v", "dy", "dlse", "sinks", "bias", "keep", "segments_q", "segments_k"}
TERMS = {"scale", "causal", "window", "cu_seqlens", "softcap", "dropout_p", "dropout_seed"}
SUMS, OF_FORWARD = ("dsinks",), ("o", "lse")
NOT_LINEAR = ("dy_ones", "exchanged")  # choices that cannot be replayed from S and G
NEARER = 0.25  # of the distance from the correct results, in each tensor
MOST_KEPT = 40  # replays: those of a target's readouts, each with its proof
MOST_PAIRS = 1 << 18  # B * H * Sq * Sk
Results = dict[str, Array]
TILES = re.compile(r"\btiles?\b")


@dataclass(frozen=True)
class Given:
    """One batch entry of a call, in the form that the model ring takes.

    ``q`` and ``dy`` are [W, H, n, D], ``k`` and ``v`` [W, Hkv, n, D], in float64. ``also`` [a, b, 1, i, j]: whether
    query i of worker a and key j of worker b are in the same document and segment. ``bias`` [W, H, n, (b, j)] has the
    keys in the order of the workers, and ``columns`` [W, n] their columns in the call's bias.
    """

    geometry: Geometry
    q: Array
    k: Array
    v: Array
    dy: Array | None
    also: Booleans
    dlse: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    keep: Array | None = None
    columns: Integers | None = None


@dataclass(frozen=True)
class Compared:
    """``fits``: whether the outputs are those that the faults give. ``wrong``: whether they differ from the correct ones."""

    fits: bool
    wrong: bool


def explains(told: Told, calls: Sequence[Call], outputs: Sequence[Outputs]) -> bool:
    """Return whether the faults give all outputs of a case's calls, and some of these outputs are not correct.

    The result is False if the model ring cannot express one of the calls.
    """
    if not told.faults:
        return False
    found = [gives(told, call, got) for call, got in zip(calls, outputs, strict=True)]
    return all(one is not None and one.fits for one in found) and any(
        one is not None and one.wrong for one in found
    )


def gives(told: Told, call: Call, outputs: Outputs) -> Compared | None:
    """Compare the outputs of a call with what the faults give; None if the model ring cannot express the call."""
    return replay_of(call, outputs).compared(told) if expressible(call) else None


KEPT: dict[tuple[int, int], Replayed] = {}


def replay_of(call: Call, outputs: Outputs) -> Replayed:
    """Return the call and the outputs, ready to be compared; made once for the same objects."""
    key = id(call), id(outputs)
    if key not in KEPT:
        while len(KEPT) >= MOST_KEPT:
            del KEPT[next(iter(KEPT))]
        KEPT[key] = Replayed(call, outputs)  # it keeps the objects, so their ids are not used again
    return KEPT[key]


def tiled(told: Told) -> bool:
    """Return whether one of the faults is about tiles."""
    return any(TILES.search(fault.kind) for fault in told.faults)


class Replayed:
    """A call and a target's outputs, ready to be compared with what the model ring computes with given faults.

    If queries travel in the backward pass, either keys or queries may travel in the forward pass; both are tried. Of
    faults of tiles, so are tiles of whole blocks and tiles of their visible parts.
    """

    def __init__(self, call: Call, outputs: Outputs) -> None:
        self.call, self.outputs = call, outputs
        self.right = run_right(call, RECIPES["float64"])
        self.known: dict[tuple[Any, ...], Compared | None] = {}
        batch = call.worker("q", 0).shape[0]
        self.rings = [[RingOf(one) for one in ways_of(given_of(call, n))] for n in range(batch)]

    def compared(self, told: Told, phase: str = "", in_every_way: bool = False) -> Compared | None:
        """Compare the outputs with what the faults give; None if the model ring cannot compute that.

        ``phase``: the only pass whose outputs are compared; '' for both. A backward pass that is compared alone is
        given the target's own o and lse. ``in_every_way``: None also if only some of the ways in which a ring may compute
        this call can have the faults, as where tiles are larger than a chunk.
        """
        key = told.faults, told.base, phase, in_every_way
        if key not in self.known:
            self.known[key] = self.compare(told, phase, in_every_way)
        return self.known[key]

    def compare(self, told: Told, phase: str, in_every_way: bool) -> Compared | None:
        """Do what :func:`compared` returns."""
        parts: list[Compared] = []
        rounded = any(is_rounding(fault.kind) for fault in told.faults)
        for entry, rings in enumerate(self.rings):
            found: list[Compared] = []
            for ring in rings:
                way = ring.given.geometry.parts
                if way and (any(one.fits for one in found) or (way == VISIBLE and not tiled(told))):
                    continue
                made = ring.results_of(
                    told, saved_in(self.outputs, entry) if phase == "backward" else None
                )
                if made is None and in_every_way:
                    return None
                if made is not None and phase:
                    of_pass = [x for x in made[0] if (x in OF_FORWARD) == (phase == "forward")]
                    made = tuple({name: x[name] for name in of_pass} for x in made)  # type: ignore[assignment]
                if made is not None:
                    found.append(self.nearer(entry, made, rounded))
            if not found:
                return None
            parts.append(next((one for one in found if one.fits), found[0]))
        return Compared(all(one.fits for one in parts), any(one.wrong for one in parts))

    @property
    def has_window(self) -> bool:
        return self.rings[0][0].given.geometry.window is not None

    def possible(self, faults: Sequence[Named]) -> list[Named]:
        """Return the faults that a ring of this call can have: without a mask, none can be in the mask."""
        return [
            fault
            for fault in faults
            if is_rounding(fault.kind)
            or any(ring.fault(fault.name) is not None for ring in self.rings[0])
        ]

    def nearer(self, entry: int, made: tuple[Results, Results], rounded: bool) -> Compared:
        """Compare one batch entry with the results of the faults; ``rounded``: some values are rounded to 16 bits."""
        tolerance = TOLERANCES[self.call.formats["inputs"]]
        tolerance = max(tolerance, LOOSE) if rounded else tolerance
        return nearer(self.call, entry, self.outputs, self.right, *made, tolerance)

    def without_contradiction(self, told: Told) -> Told:
        """Reduce each fault to what no later one changes again, if the faults then fit as well.

        Otherwise sentences contradict each other: 'lse and delta are those of the visitor', 'delta is that of the next
        worker'.
        """
        ring = self.rings[0][0]
        faults = tuple(ring.reduced(told.faults, number) for number in range(len(told.faults)))
        reduced = dataclasses.replace(told, faults=faults)
        compared = self.compared(reduced) if faults != told.faults else None
        return reduced if compared is not None and compared.fits else told


def saved_in(outputs: Outputs, entry: int) -> tuple[Array, Array] | None:
    """Return a target's own o [W, H, n, D] and lse [W, H, n]; None if it hides lse."""
    if "lse" not in outputs:
        return None
    o, lse = (np.stack([load(np.asarray(x))[entry] for x in outputs[name]]) for name in OF_FORWARD)
    return o, lse


def nearer(
    call: Call,
    entry: int,
    outputs: Outputs,
    right: Mapping[str, Sequence[Array]],
    ours: Results,
    sizes: Results,
    tolerance: float,
) -> Compared:
    """Compare one batch entry of the outputs with the results of the faults and with the correct ones.

    ``ours`` are the results that the faults give, and ``right`` the correct ones. The outputs fit if each element is
    within the tolerance, and each wrong tensor is much nearer to ``ours`` than to ``right``; NaN fits only NaN in ``ours``.
    ``sizes``: for each element, the sum of the absolute values of its terms.
    """
    wrong = False
    for name in outputs.keys() & ours.keys():
        at = ... if name in SUMS else entry  # these are sums over a batch, which has one entry
        got, true = (
            np.stack([load(np.asarray(x))[at] for x in shards])
            for shards in (outputs[name], right[name])
        )
        if name in OF_SLOTS and call.index_q is not None:
            empty = (call.index_q < 0).reshape(call.workers, 1, -1, *[1] * (got.ndim - 3))
            got, true = np.where(empty, ours[name], got), np.where(empty, ours[name], true)
        # The gradients of a forward pass with NaN are compared where they are finite.
        passed_on = name not in OF_FORWARD and "o" in ours and np.isnan(ours["o"]).any()
        missing = np.isnan(got) & (passed_on | np.isnan(ours[name]))
        if not (missing | near(got, ours[name], sizes[name], tolerance)).all():
            return Compared(False, wrong)
        wrong |= bool((missing & ~np.isnan(true)).any())
        far, close = distance(got, true, sizes[name]), distance(got, ours[name], sizes[name])
        if far > tolerance:
            wrong = True
            if not close <= NEARER * far:
                return Compared(False, wrong)
    return Compared(True, wrong)


def distance(x: Array, y: Array, size: Array) -> float:
    """Return the largest finite difference of two arrays, in units of ``size``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.abs(x - y) / np.where(size == 0, 1.0, size)
    return float(np.where(np.isfinite(z), z, 0.0).max(initial=0.0))


def expressible(call: Call) -> bool:
    """Return whether the model ring can compute everything that a call asks for."""
    if call.operation != "ring" or "forward" not in call.passes:
        return False
    tables = (call.index_q, call.index_k, call.position_q, call.position_k)
    if any(x is None for x in tables) or not set(call.tensors) <= TENSORS:
        return False
    if not set(call.terms) <= TERMS or call.formats["inputs"] not in TOLERANCES:
        return False
    index_q, index_k, position_q, position_k = map(np.asarray, tables)
    batch, heads, slots, _ = call.worker("q", 0).shape
    pairs = batch * heads * (slots * call.workers) ** 2
    if batch > 1 and {"sinks", "bias", "keep", "dropout_p"} & {*call.tensors, *call.terms}:
        return False
    for name in {"bias", "keep"} & set(call.tensors):
        table, whole = call.worker(name, 0), (1, heads, slots, slots * call.workers)
        if table.shape != whole or not np.isfinite(of_pairs(table)).all():
            return False
    if index_q.min() < 0 and {"bias", "keep", "dropout_p"} & {*call.tensors, *call.terms}:
        return False
    one_side = np.array_equal(index_q, index_k) and np.array_equal(position_q, position_k)
    return one_side and position_q.shape[1] == 1 and pairs <= MOST_PAIRS


def ways_of(given: Given) -> list[Given]:
    """Return the same call for each way in which a correct ring may compute it, the usual one first."""
    geometry = given.geometry
    travels = ("keys", "queries") if geometry.circulation == "q" else ("keys",)
    return [
        dataclasses.replace(
            given,
            geometry=dataclasses.replace(geometry, forward_travels=x, parts=part),
        )
        for part in WAYS.get(geometry.layout, ("",))
        for x in travels
    ]


def given_of(call: Call, entry: int) -> Given:
    """Return one batch entry of a call that the model ring can express."""
    q, k, v, dy, dlse = (
        np.stack([load(x)[entry] for x in call.tensors[name]]) if name in call.tensors else None
        for name in ("q", "k", "v", "dy", "dlse")
    )
    assert q is not None and k is not None and v is not None
    assert call.position_q is not None and call.index_k is not None
    terms, starts = call.terms, documents_of(call)
    dropout = None
    if terms.get("dropout_p"):
        dropout = (
            terms["dropout_p"],
            None if "keep" in call.tensors else terms.get("dropout_seed", 0),
        )
    sinks = load(call.worker("sinks", 0)) if "sinks" in call.tensors else None
    geometry = Geometry(
        call.workers,
        call.circulation,
        call.direction,
        call.layout,
        call.position_q[:, 0],
        bool(terms.get("causal")),
        terms.get("window"),
        q.shape[1],
        q.shape[1] // k.shape[1],
        float(terms["scale"]),
        documents=starts,
        softcap=terms.get("softcap"),
        dlse="dlse" in call.tensors,
        sinks=0 if sinks is None else sinks.shape[1],
        bias="bias" in call.tensors,
        dropout=dropout,
        padding=() if call.index_q is None else tuple(np.flatnonzero(call.index_q < 0).tolist()),
        usual_scale=q.shape[3] ** -0.5,
    )
    columns = call.index_k.ravel()
    bias, keep = (
        np.stack([of_pairs(x)[0] for x in call.tensors[name]])[..., columns]
        if name in call.tensors
        else None
        for name in ("bias", "keep")
    )
    keep = kept(geometry) if keep is None else keep
    return Given(
        geometry, q, k, v, dy, same_document(call, entry), dlse, sinks, bias, keep, call.index_k
    )


def of_pairs(table: NDArray) -> Array:
    """Return a tensor over pairs, a bias or a mask of booleans, in float64."""
    return table.astype(np.float64) if table.dtype == bool else load(table)


def documents_of(call: Call) -> tuple[int, ...] | None:
    """Return the first position of each document; None if there are none, or if positions do not number the tokens."""
    assert call.index_q is not None and call.position_q is not None
    if "cu_seqlens" not in call.terms or not np.array_equal(call.index_q, call.position_q[:, 0]):
        return None
    return tuple(int(x) for x in call.terms["cu_seqlens"][:-1])


def same_document(call: Call, entry: int) -> Booleans:
    """Return whether a query and a key are in the same document and segment, for each pair [a, b, 1, i, j]."""
    assert call.index_q is not None
    workers, slots = call.index_q.shape
    same = np.ones((workers, workers, 1, slots, slots), dtype=bool)
    if "cu_seqlens" in call.terms and documents_of(call) is None:
        document = np.searchsorted(np.asarray(call.terms["cu_seqlens"]), call.index_q, "right")
        same &= pairwise(document, document)
    if "segments_q" in call.tensors:
        of_q, of_k = (
            np.stack([x[min(entry, len(x) - 1)] for x in call.tensors[name]])
            for name in ("segments_q", "segments_k")
        )
        same &= pairwise(of_q, of_k)
    return same


def pairwise(of_q: Integers, of_k: Integers) -> Booleans:
    return np.asarray(of_q[:, None, None, :, None] == of_k[None, :, None, None, :])


class RingOf:
    """The model ring for one batch entry of a call."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.known: dict[tuple[str, str, str], Fault | None] = {}

    @cached_property
    def masks(self) -> list[Mask]:
        return masks_of(self.given.geometry)

    @cached_property
    def model(self) -> Model:
        patterns = [mask.pattern & self.given.also for mask in self.masks]
        return Model(pairs_of_call(self.given), patterns, dealt_otherwise(self.given.geometry))

    def fault(self, name: tuple[str, str, str]) -> Fault | None:
        """Return the fault with this name; None if this ring has no such fault (a ring of two workers has no step 2)."""
        if name not in self.known:
            self.known[name] = fault_named(self.given.geometry, self.masks, name)
        return self.known[name]

    def reduced(self, faults: Sequence[Named], number: int) -> Named:
        """Return fault ``number`` without the choices that later faults change again; as it is if no kind does only that."""
        named = faults[number]
        fault, *later = (self.fault(one.name) for one in faults[number:])
        if fault is None:
            return named
        again = {x for one in later if one and one.phase == fault.phase for x in one.kind.slots}
        left = [change for change in fault.kind.changes if change[0] not in again]
        if not left or len(left) == len(fault.kind.changes):
            return named
        for kind in every_kind(self.given.geometry, fault.phase).of_kernel(fault.kind.only):
            if same_changes(kind.changes, left):
                cost = named.cost - fault.kind.cost + kind.cost
                return dataclasses.replace(named, kind=kind.words, cost=cost)
        return named

    def results_of(
        self, told: Told, saved: tuple[Array, Array] | None = None
    ) -> tuple[Results, Results] | None:
        """Return the results of a ring with the faults, and the sizes of their elements (see :func:`nearer`).

        The result is None if this ring has none of the faults, or if the effect of a fault cannot be computed
        by the four products in the module's docstring. ``saved``: o and lse for the backward pass, in place of those of
        this ring.
        """
        given = [fault for fault in told.faults if not is_rounding(fault.kind)]
        faults = [one for fault in given if (one := self.fault(fault.name)) is not None]
        model = self.model
        forward = composed(model.right, [one for one in faults if one.phase == "forward"])
        base = carried(model.right, forward) if told.base == SAME else model.right
        backward = composed(base, [one for one in faults if one.phase == "backward"])
        whole = any(np.any(c[x]) for x in NOT_LINEAR for c in (forward, backward))
        derived = told.base == GRADIENT
        # gradient_of_forward gives dS at the row that reads a query, and sums it over key heads.
        moved = not model.correct(forward, "q") or forward["k.head"] is not model.right["k.head"]
        if (given and not faults) or whole or (derived and moved):
            return None
        with np.errstate(all="ignore"):  # wrong choices overflow
            found = Numbers(self.given, model, forward, backward, derived, saved).all()
            if told.base == SAVED:
                before = forward.taking(STORED, model.right)
                kept = Numbers(self.given, model, before, backward, False).all()
                found = found[0] | gradients(kept[0]), found[1] | gradients(kept[1])
            return found


def same_changes(
    changes: Sequence[tuple[str, object]], others: Sequence[tuple[str, object]]
) -> bool:
    """Return whether two mistakes set the same choices to the same values."""
    ours, theirs = dict(changes), dict(others)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(np.asarray(x), np.asarray(theirs[slot])) for slot, x in ours.items()
    )


def gradients(results: Results) -> Results:
    """Return the gradients alone."""
    return {name: x for name, x in results.items() if name not in OF_FORWARD}


def without_nan(choices: Choices) -> Choices:
    """Return choices with which rows are 0 that are NaN because two of their blocks have an infinite lse."""
    number, zero = MERGES.index(INFINITE), MERGES.index(ZERO_NOT_NAN)
    if not (choices["merge"] == number).any():
        return choices
    merges = np.where(choices["merge"] == number, zero, choices["merge"])
    return dataclasses.replace(choices, of={**choices.of, "merge": merges})


def pairs_of_call(given: Given) -> Pairs:
    """Return S and G [Hkv, a, b, h, i, j] of a call, for each query head with each key head."""
    s = given.geometry.scale * products(given.q, given.k)
    dy = np.zeros_like(given.q[..., : given.v.shape[3]]) if given.dy is None else given.dy
    g = products(dy, given.v)
    dy_k = products(dy, given.k) if given.k.shape == given.v.shape else None
    return Pairs(given.geometry, s, g, given.dlse, given.sinks, given.bias, given.keep, dy_k=dy_k)


@dataclass(frozen=True)
class Numbers:
    """The outputs of a ring that makes the choices ``forward`` and ``backward``, for given tensors.

    ``derived``: the backward pass is the gradient of the forward pass with its choices, and ``backward`` is not used
    for P and dS. ``saved``: the o and lse that the backward pass uses; None for those of this forward pass.
    """

    given: Given
    model: Model
    forward: Choices
    backward: Choices
    derived: bool
    saved: tuple[Array, Array] | None = None

    def all(self) -> tuple[Results, Results]:
        """Return the results of the forward pass and, if there is a dy, of the backward pass; then their sizes."""
        given, model, right = self.given, self.model, self.model.right
        first = forward_pass(model, self.forward)
        at_home = self.forward.taking(
            (*components("v"), *components("o_row"), "o_to", "o_tokens"), right
        )
        weights = forward_pass(model, at_home).weights
        o, size = self.product(weights, self.forward, ("q", right), "v", given.v, given.q)
        results = {"o": self.put_back(o), "lse": first.lse}
        sizes = {
            "o": self.put_back(size),
            "lse": np.maximum(1.0, np.abs(np.nan_to_num(first.lse, neginf=0.0))),
        }
        if given.dy is None:
            return results, sizes
        finite_too = without_nan(self.forward)
        if finite_too is not self.forward and np.isnan(first.lse).any():
            finite = dataclasses.replace(self, forward=finite_too).all()
            return results | gradients(finite[0]), sizes | gradients(finite[1])
        of_q, of_kv = (self.backward.in_kernel(kernel) for kernel in KERNELS)
        if self.derived:
            made = gradient_of_forward(model, self.forward)
            dbias, dsinks, ds = made.ds_of_bias, made.dsinks, made.ds_of_dq
            shares = weights, ds, ds
            p, delta = weights, (given.dy * results["o"]).sum(axis=3)[:, None, ..., None]
        else:
            o, lse = self.saved or (results["o"], first.lse)
            every = {c["delta_dims"] for c in (right, of_q, of_kv)}
            products = {part: self.products_with_dy(o, part) for part in every}
            flat = products[right["delta_dims"]]
            cores = [
                core_of_pairs(model, c, first, lse, products[c["delta_dims"]])
                for c in (of_q, of_kv)
            ]
            shares = self.shares(of_q, of_kv, *cores)
            p, delta = np.maximum(cores[0][1], cores[1][1]), cores[0][3]
            dbias = share_of_bias(model, of_q, cores[0])
            if dbias is not None:
                dbias = stored(model, "dbias", of_q, dbias, "dbias_to", "dbias_k")
            dsinks = gradient_of_sinks(model, self.backward, first, lse, flat)
        parts = np.abs(p) * (np.abs(model.pairs.g).max() + np.abs(delta))
        if dsinks is not None:
            weight = np.abs(1 - p.sum(axis=(1, 4))) * np.abs(given.dy * results["o"]).sum(axis=3)
            results["dsinks"] = dsinks
            sizes["dsinks"] = np.maximum(np.abs(dsinks), weight.sum(axis=2)[..., None])
        if dbias is not None:
            results["dbias"] = self.by_column(dbias)
            sizes["dbias"] = self.by_column(np.maximum(np.abs(dbias), parts))
        scale = given.geometry.scale
        of_v = self.forward if self.derived else of_kv
        to_v = "v" if self.derived else "dv_to"
        for name, share, c, goal, source, x, like in (
            ("dv", shares[0], of_kv, (to_v, of_v), "dv_dy", given.dy, given.v),
            ("dq", scale * shares[1], of_q, ("dq_to", of_q), "dq_k", given.k, given.q),
            ("dk", scale * shares[2], of_kv, ("dk_to", of_kv), "dk_q", given.q, given.k),
        ):
            results[name], size = self.product(share, c, goal, source, x, like)
            if name != "dv":
                share = scale * np.maximum(np.abs(parts), np.abs(share) / scale)
                size = self.product(share, c, goal, source, x, like)[1]
            sizes[name] = size
        for found in (results, sizes):
            self.put_together(found)
        return results, sizes

    def put_together(self, found: Results) -> None:
        """Mix the gradients of heads or workers, and add dk and dv, as the choices of the backward pass say."""
        given = self.given
        *names, of, how = self.backward["mixed"] or ("", "")
        for name in names:
            axis = 0 if of == "workers" else 1
            x = np.tensordot(mixing(how, found[name].shape[axis]), found[name], (1, axis))
            found[name] = np.moveaxis(x, 0, axis)
        if self.backward["stacked"] and given.k.shape == given.v.shape:
            stack = found["dk"] + found["dv"]
            found.update(dk=stack, dv=np.roll(stack, -given.geometry.direction, axis=0))

    def products_with_dy(self, o: Array, part: tuple[float, float]) -> Array:
        """Return <dy, o> [a, h, i, (g, x, y)] over a part of the head dimension: where it begins and ends, 0 to 1."""
        assert self.given.dy is not None
        start, end = (int(x * o.shape[3]) for x in part)
        found = np.einsum("ahid,xgyd->ahigxy", o[..., start:end], self.given.dy[..., start:end])
        return found.reshape(*o.shape[:3], -1)

    def shares(
        self, of_q: Choices, of_kv: Choices, core: Core, core_kv: Core
    ) -> tuple[Array, Array, Array]:
        """Return the matrices that the products use: P for dv, dS for dq and dS for dk."""
        model, c = self.model, self.backward
        of_dv = for_dv(model, of_kv, *core_kv)
        of_dk = ds_of(model, c["dk_form"], of_kv, *core_kv[1:])
        of_dv = of_dv.swapaxes(3, 4) if c["turned"] & 2 else of_dv
        of_dq = of_group(model, ds_of(model, c["dq_form"], of_q, *core[1:]), c)
        of_dk = of_dk.swapaxes(3, 4) if c["turned"] & 1 else of_dk
        return (
            held(model, "dv", c, of_dv * c["dv_count"]),
            held(model, "dq", c, of_dq * c["dq_count"]),
            held(model, "dk", c, of_dk * c["dk_count"]),
        )

    def by_column(self, x: Array) -> Array:
        """Return [a, h, i, column] of the call's bias from [a, b, h, i, j]."""
        assert self.given.columns is not None
        flat = x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], *x.shape[2:4], -1)
        return np.asarray(flat[..., np.argsort(self.given.columns.ravel())])

    def product(
        self,
        share: Array,
        c: Choices,
        goal: tuple[str, Choices],
        source: str,
        x: Array,
        like: Array,
    ) -> tuple[Array, Array]:
        """Multiply ``share`` by the rows of ``x``; return the sums, and the same sums of absolute values.

        For each pair of tokens, the choice ``source`` names the row of ``x``, and the choice ``goal`` the row of the
        result to which the product is added. The result has as many rows as ``like``.
        """
        rows, columns = like.shape[0] * like.shape[1] * like.shape[2], x.shape[:3]
        count = columns[0] * columns[1] * columns[2]
        at = self.model.index(goal[1], goal[0]) * count + self.model.index(c, source)
        at = np.broadcast_to(at, self.model.shape).ravel()
        flat = np.broadcast_to(share, self.model.shape).ravel()
        vectors = x.reshape(count, -1)
        found = [
            np.bincount(at, weights, rows * count).reshape(rows, count) @ y
            for weights, y in ((flat, vectors), (np.abs(flat), np.abs(vectors)))
        ]
        value, size = (np.asarray(y.reshape(*like.shape[:3], -1), float) for y in found)
        return value, size

    def put_back(self, o: Array) -> Array:
        """Return o as the workers store it, with its tokens in the order in which they are put back."""
        c, model = self.forward, self.model
        if not model.correct(c, "o_row"):
            o = o.reshape(-1, o.shape[3])[model.row_index(c, "o_row")]
        if c["o_tokens"]:
            order = np.argsort(model.tokens[c["o_tokens"]])
            W, H, n, d = o.shape
            rows = o.transpose(0, 2, 1, 3).reshape(W * n, H, d)[order]
            o = rows.reshape(W, n, H, d).transpose(0, 2, 1, 3)
        if c["o_to"] is not model.right["o_to"]:
            return placed(o, c["o_to"], 0.0)
        return o
