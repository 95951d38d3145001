"""The results of a ring with given faults for one call, and the sizes of their elements.

The *model ring* (:class:`Model`) takes the call's S = scale q k^T and G = dy v^T. It returns the weights A of the forward
pass, the weights P of the backward pass and the gradient dS of the scores, which give::

    o = A v        dv = P^T dy        dq = scale dS k        dk = scale dS^T q
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.faults.choices import KERNELS, Choices, components, mixing
from ringspec.conformance.readout.faults.effects import STORED
from ringspec.conformance.readout.faults.kinds import Fault, Name
from ringspec.conformance.readout.faults.masks import masks_of, right_mask
from ringspec.conformance.readout.faults.merges import INFINITE, MERGES, ZERO_NOT_NAN
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.model.arrays import placed
from ringspec.conformance.readout.model.backward import gradient_of_forward, gradient_of_sinks
from ringspec.conformance.readout.model.forward import Forward, forward_pass
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
from ringspec.conformance.readout.problem.geometry import dealt_otherwise
from ringspec.conformance.readout.problem.pairs import Pairs, products
from ringspec.conformance.readout.proof.calls import Given
from ringspec.conformance.readout.reading import GRADIENT, SAME, SAVED, Named
from ringspec.conformance.readout.search.backward_search import carried
from ringspec.conformance.readout.search.fault_sets import composed
from ringspec.conformance.readout.search.rounding import is_rounding
from ringspec.conformance.readout.search.vocabulary import every_kind, fault_named
from ringspec.problem.model import Array

NOT_LINEAR = ("dy_ones", "exchanged")  # choices that cannot be replayed from S and G
OF_FORWARD = ("o", "lse")
Results = dict[str, Array]
# The results of a pass, and the sizes of their elements; see ringspec.conformance.readout.proof.replay.nearer.
Made = tuple[Results, Results]


class RingOf:
    """The model ring for one batch entry of a call."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.known: dict[Name, Fault | None] = {}
        # The last forward pass, with its model and the names of its faults: the next often differs only in the backward pass.
        self.last: tuple[Model, list[Name], ForwardMade] | None = None

    @cached_property
    def masks(self) -> list[Mask]:
        return masks_of(self.given.geometry)

    @cached_property
    def right_model(self) -> Model:
        """The model of a ring without faults, which needs no wrong mask."""
        pattern = right_mask(self.given.geometry).pattern & self.given.also
        return Model(pairs_of_call(self.given), [pattern], [])

    @cached_property
    def model(self) -> Model:
        patterns = [mask.pattern & self.given.also for mask in self.masks]
        return Model(pairs_of_call(self.given), patterns, dealt_otherwise(self.given.geometry))

    def fault(self, name: Name) -> Fault | None:
        """Return the fault with this name; None if this ring has no such fault (a ring of two workers has no step 2)."""
        if is_rounding(name[1]):
            return None
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

    def passes_of(
        self, conclusion: Conclusion, saved: tuple[Array, Array] | None = None
    ) -> Iterator[Made] | None:
        """Return what a ring with the faults makes: the results of its forward pass and, if there is a dy, of its backward pass.

        The result is None if this ring has none of the faults, or if the effect of a fault cannot be computed
        by the four products in the module's docstring. ``saved``: o and lse for the backward pass, in place of those of
        this ring.
        """
        given = [fault for fault in conclusion.faults if not is_rounding(fault.kind)]
        faults = [one for fault in given if (one := self.fault(fault.name)) is not None]
        model = self.model if faults else self.right_model
        of_forward = [one for one in faults if one.phase == "forward"]
        forward = composed(model.right, of_forward)
        base = carried(model.right, forward) if conclusion.base == SAME else model.right
        backward = composed(base, [one for one in faults if one.phase == "backward"])
        whole = any(np.any(c[x]) for x in NOT_LINEAR for c in (forward, backward))
        derived = conclusion.base == GRADIENT
        # gradient_of_forward gives dS at the row that reads a query, and sums it over key heads.
        moved = not model.correct(forward, "q") or forward["k.head"] is not model.right["k.head"]
        if (given and not faults) or whole or (derived and moved):
            return None
        as_saved = conclusion.base == SAVED
        ring = RingOfFaults(
            self.given, model, forward, backward, derived, as_saved, None if as_saved else saved
        )
        return self.made([one.name for one in of_forward], ring)

    def made(self, names: list[Name], ring: RingOfFaults) -> Iterator[Made]:
        """Yield what :meth:`passes_of` returns; ``names``: those of the faults of the forward pass."""
        with np.errstate(all="ignore"):  # wrong choices overflow
            if self.last is None or self.last[0] is not ring.model or self.last[1] != names:
                self.last = ring.model, names, ring.forward_pass(ring.forward)
        first = self.last[2]
        yield first.results, first.sizes
        if self.given.dy is not None:
            with np.errstate(all="ignore"):
                made = ring.backward_pass(first)
            yield made


def same_changes(
    changes: Sequence[tuple[str, object]], others: Sequence[tuple[str, object]]
) -> bool:
    """Return whether two mistakes set the same choices to the same values."""
    ours, theirs = dict(changes), dict(others)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(np.asarray(x), np.asarray(theirs[slot])) for slot, x in ours.items()
    )


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
class ForwardMade:
    """A forward pass: its ``results`` o and lse, their ``sizes``, and what the backward pass takes from it.

    ``weights`` [a, b, h, i, j]: of each pair in the row of o that the worker computes, before it is stored elsewhere.
    """

    made: Forward
    weights: Array
    results: Results
    sizes: Results


@dataclass(frozen=True)
class RingOfFaults:
    """A ring that makes the choices ``forward`` and ``backward``, for given tensors.

    ``derived``: the backward pass is the gradient of the forward pass with its choices, and ``backward`` is not used
    for P and dS. ``as_saved``: the backward pass uses o and lse as they were before they were stored wrongly. ``saved``:
    the o and lse that the backward pass uses; None for those of this forward pass.
    """

    given: Given
    model: Model
    forward: Choices
    backward: Choices
    derived: bool
    as_saved: bool = False
    saved: tuple[Array, Array] | None = None

    def forward_pass(self, c: Choices) -> ForwardMade:
        """Return what a forward pass with the choices ``c`` makes."""
        given, right = self.given, self.model.right
        first = forward_pass(self.model, c)
        moved = (*components("v"), *components("o_row"), "o_to", "o_tokens")
        at_home = all(c[x] is right[x] for x in moved)
        weights = first.weights
        if not at_home:
            weights = forward_pass(self.model, c.taking(moved, right)).weights
        o, size = self.product(weights, weights, c, ("q", right), "v", given.v, given.q)
        results = {"o": self.put_back(o, c), "lse": first.lse}
        sizes = {
            "o": self.put_back(size, c),
            "lse": np.maximum(1.0, np.abs(np.nan_to_num(first.lse, neginf=0.0))),
        }
        return ForwardMade(first, weights, results, sizes)

    def backward_pass(self, first: ForwardMade) -> Made:
        """Return the gradients and their sizes; ``first``: what the forward pass made."""
        c = self.forward
        if self.as_saved:
            c = c.taking(STORED, self.model.right)
            first = self.forward_pass(c)
        finite = without_nan(c)
        if finite is not c and np.isnan(first.results["lse"]).any():
            c, first = finite, self.forward_pass(finite)
        return self.gradients(c, first)

    def gradients(self, forward: Choices, first: ForwardMade) -> Made:
        """Return the gradients and their sizes after a forward pass with the choices ``forward``."""
        given, model, right = self.given, self.model, self.model.right
        assert given.dy is not None
        o, weights = first.results["o"], first.weights
        results, sizes = dict[str, Array](), dict[str, Array]()
        of_q, of_kv = (self.backward.in_kernel(kernel) for kernel in KERNELS)
        if self.derived:
            made = gradient_of_forward(model, forward)
            dbias, dsinks, ds = made.ds_of_bias, made.dsinks, made.ds_of_dq
            shares = weights, ds, ds
            p, delta = weights, (given.dy * o).sum(axis=3)[:, None, ..., None]
        else:
            saved_o, lse = self.saved or (o, first.made.lse)
            every = {c["delta_dims"] for c in (right, of_q, of_kv)}
            products = {part: self.products_with_dy(saved_o, part) for part in every}
            flat = products[right["delta_dims"]]
            cores = [
                core_of_pairs(model, c, first.made, lse, products[c["delta_dims"]])
                for c in (of_q, of_kv)
            ]
            shares = self.shares(of_q, of_kv, *cores)
            p, delta = np.maximum(cores[0][1], cores[1][1]), cores[0][3]
            dbias = share_of_bias(model, of_q, cores[0])
            if dbias is not None:
                dbias = stored(model, "dbias", of_q, dbias, "dbias_to", "dbias_k")
            dsinks = gradient_of_sinks(model, self.backward, first.made, lse, flat)
        parts = np.abs(p) * (np.abs(model.pairs.g).max() + np.abs(delta))
        if dsinks is not None:
            weight = np.abs(1 - p.sum(axis=(1, 4))) * np.abs(given.dy * o).sum(axis=3)
            results["dsinks"] = dsinks
            sizes["dsinks"] = np.maximum(np.abs(dsinks), weight.sum(axis=2)[..., None])
        if dbias is not None:
            results["dbias"] = self.by_column(dbias)
            sizes["dbias"] = self.by_column(np.maximum(np.abs(dbias), parts))
        scale = given.geometry.scale
        of_v = forward if self.derived else of_kv
        to_v = "v" if self.derived else "dv_to"
        for name, share, c, goal, source, x, like in (
            ("dv", shares[0], of_kv, (to_v, of_v), "dv_dy", given.dy, given.v),
            ("dq", scale * shares[1], of_q, ("dq_to", of_q), "dq_k", given.k, given.q),
            ("dk", scale * shares[2], of_kv, ("dk_to", of_kv), "dk_q", given.q, given.k),
        ):
            size = share if name == "dv" else np.maximum(scale * np.abs(parts), np.abs(share))
            results[name], sizes[name] = self.product(share, size, c, goal, source, x, like)
        for name, x in (("dk", given.k), ("dv", given.v)):
            if name in self.backward["starts"]:
                results[name], sizes[name] = results[name] + x, sizes[name] + np.abs(x)
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
        size: Array,
        c: Choices,
        goal: tuple[str, Choices],
        source: str,
        x: Array,
        like: Array,
    ) -> tuple[Array, Array]:
        """Multiply ``share`` by the rows of ``x``; return the sums, and the same sums of the absolute values of ``size``.

        For each pair of tokens, the choice ``source`` names the row of ``x``, and the choice ``goal`` the row of the
        result to which the product is added. The result has as many rows as ``like``.
        """
        rows, columns = like.shape[0] * like.shape[1] * like.shape[2], x.shape[:3]
        count = columns[0] * columns[1] * columns[2]
        at = self.model.index(goal[1], goal[0]) * count + self.model.index(c, source)
        at = np.broadcast_to(at, self.model.shape).ravel()
        vectors = x.reshape(count, -1)
        sums = []
        for part, y in ((share, vectors), (np.abs(size), np.abs(vectors))):
            flat = np.broadcast_to(part, self.model.shape).ravel()
            of_rows = np.bincount(at, flat, rows * count).reshape(rows, count) @ y
            sums.append(np.asarray(of_rows.reshape(*like.shape[:3], -1), float))
        return sums[0], sums[1]

    def put_back(self, o: Array, c: Choices) -> Array:
        """Return o as the workers store it, with its tokens in the order in which they are put back."""
        model = self.model
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
