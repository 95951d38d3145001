"""The results of a ring with given faults for one call, and the sizes of their elements.

The *model ring* (:class:`Model`) takes the call's S = scale q k^T and G = dy v^T. It returns the weights A of the forward
pass, the weights P of the backward pass and the gradient dS of the scores, which give::

    o = A v        dv = P^T dy        dq = scale dS k        dk = scale dS^T q
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.backward_search import GRADIENT, SAME, SAVED, carried
from ringspec.conformance.readout.calls import Given
from ringspec.conformance.readout.choices import KERNELS, Choices, components, mixing
from ringspec.conformance.readout.effects import STORED
from ringspec.conformance.readout.fault_sets import composed
from ringspec.conformance.readout.geometry import dealt_otherwise
from ringspec.conformance.readout.kinds import Fault
from ringspec.conformance.readout.masks import masks_of
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
from ringspec.conformance.readout.pairs import Pairs, products
from ringspec.conformance.readout.reading import Named
from ringspec.conformance.readout.rounding import is_rounding
from ringspec.conformance.readout.told import Told
from ringspec.conformance.readout.visible import Mask
from ringspec.conformance.readout.vocabulary import every_kind, fault_named
from ringspec.problem.model import Array

NOT_LINEAR = ("dy_ones", "exchanged")  # choices that cannot be replayed from S and G
OF_FORWARD = ("o", "lse")
Results = dict[str, Array]


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
