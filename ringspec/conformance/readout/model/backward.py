"""The backward pass: the matrices of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringspec.conformance.readout.faults.choices import DSINKS, KERNELS, Choices, components
from ringspec.conformance.readout.model.arrays import chosen
from ringspec.conformance.readout.model.forward import Forward, forward_pass
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.shares import Shares, shares_of_pairs
from ringspec.conformance.readout.model.sinks import sink_logits
from ringspec.conformance.readout.model.statistics import delta_of
from ringspec.conformance.readout.model.storing import exchanged, stacked, stored
from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift


class Gradients(NamedTuple):
    """The matrices [a, b, h, i, j] of a backward pass: P and dS for dq, for dk and for dbias; and dsinks [a, h, sink].

    The last two are None without a bias and without sinks.
    """

    p: Array
    ds_of_dq: Array
    ds_of_dk: Array
    ds_of_bias: Array | None = None
    dsinks: Array | None = None


def backward_pass(
    model: Model, c: Choices, forward: Forward, lse: Array, products: Array
) -> Gradients:
    """Return the matrices of the gradients from what the forward pass saved.

    ``lse`` has the axes [a, h, i]. ``products`` [a, h, i, (g, x, y)] is <dy, o> of each row of o with each row of
    dy.
    """
    given = forward, lse, products
    return gradients_of_shares(model, c, shares_of_pairs(model, c, *given), *given)


def gradients_of_shares(
    model: Model, c: Choices, shares: Shares, forward: Forward, lse: Array, products: Array
) -> Gradients:
    """Return the matrices of the gradients if these are the shares; the other arguments are those of :func:`backward_pass`."""
    of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
    dv = stored(model, "dv", of_kv, shares.dv, "dv_dy", "dv_to")
    dq = stored(model, "dq", of_q, shares.dq, "dq_to", "dq_k")
    dk = stored(model, "dk", of_kv, shares.dk, "dk_q", "dk_to")
    if c["exchanged"].any():
        dv, dk = exchanged(model, c, dv, dk)
    elif c["stacked"]:
        dv, dk = stacked(model, dv, dk)
    starts = model.pairs.starts
    if c["starts"] and starts is not None:
        dk, dv = (
            x + starts[name] if name in c["starts"] else x for name, x in (("dk", dk), ("dv", dv))
        )
    dbias = shares.dbias
    if dbias is not None:
        dbias = stored(model, "dbias", of_q, dbias, "dbias_to", "dbias_k")
    return Gradients(dv, dq, dk, dbias, gradient_of_sinks(model, c, forward, lse, products))


def gradient_of_sinks(
    model: Model, c: Choices, forward: Forward, lse: Array, products: Array
) -> Array | None:
    """Return the gradient of the sinks [a, h, sink] from what the forward pass saved, as ``backward`` takes it.

    None if there are no sinks.
    """
    if model.sinks is None:
        return None
    row = delta_of(model, model.right, products)[:, 0, :, :, 0]
    if model.pairs.dlse is not None:
        row = row - model.pairs.dlse
    logits = sink_logits(model, c, "sink_o", forward.maximum, forward.block_lse)

    def summed(lse: Array, row: Array, power: float = 0.0) -> Array:
        p = np.exp(logits - finite_shift(lse)[..., None])
        return np.asarray(-(p * (1 - power * p) * row[..., None]).sum(axis=2))

    found = summed(lse, row)
    of: dict[str, Callable[[], Array]] = {
        "right": lambda: found, "lse without the sinks": lambda: summed(forward.bare, row),
        "of p (1 - p)": lambda: summed(lse, row, 1.0), "without delta": lambda: summed(lse, -np.ones_like(row)),
        "of all workers": lambda: np.broadcast_to(found.sum(axis=0), found.shape),
    }  # fmt: skip
    whole = (model.workers, 1, model.heads, 1, 1)
    form, times, head = (
        np.broadcast_to(c[x], (*whole[:3], *c[x].shape[3:]))[:, 0, :, 0]
        for x in ("dsink", "dsink_times", "dsink_of.head")
    )
    found = times * chosen(form, DSINKS, of)
    there = np.zeros_like(found)
    np.add.at(there, (model.rows[:, None], head[..., 0]), found)
    return there


def of_sources(model: Model, c: Choices, ds: Array) -> Array:
    """Return dS [a, b, h, i, j] of the rows that were computed, from that of the rows into which their results were merged."""
    found = np.zeros(model.shape)
    tables = (np.broadcast_to(c[x], (*model.shape[:4], 1))[..., 0] for x in components("result_of"))
    worker, head, slot = tables
    b = np.broadcast_to(model.rows[:, None, None], slot.shape)
    at = slot >= 0
    np.add.at(found, (worker[at], b[at], head[at], slot[at]), ds[at])
    return found


def gradient_of_forward(model: Model, c: Choices) -> Gradients:
    """Return the matrices of the gradients if the backward pass is the gradient of the forward pass ``c``.

    The gradient is computed by differences of the scores. A step of 1e-6 gives six digits, more than is compared.
    """
    base, right = forward_pass(model, c).weights, model.s
    # The weights of a forward pass are in the columns of the keys whose values it used.
    values = model.right.taking(("v.head",), c)
    g = model.g[model.index(model.right, "q"), model.index(values, "v")]
    ds, step = np.zeros(model.shape), 1e-6
    dlse = model.pairs.dlse

    def goal() -> Array:
        """Return the sums [a, h, i] whose gradient is taken."""
        model.kept.clear()
        now = forward_pass(model, c)
        of_o = (now.weights * g).sum(axis=(1, 4))
        return of_o if dlse is None else of_o + dlse * finite_shift(now.lse)

    before = goal()
    keys = right.reshape(-1, model.workers, model.key_heads, model.slots)
    for b in range(model.workers):
        for j in range(model.slots):
            changed = keys.copy()
            changed[:, b, :, j] += step
            model.s = changed.reshape(right.shape)
            ds[:, b, :, :, j] = (goal() - before) / step
    model.s = right
    if not model.correct(c, "result_of"):
        ds = of_sources(model, c, ds)
    dbias = (
        stored(model, "dbias", c, c["bias_times"] * ds, "bias_q", "bias_k")
        if model.geometry.bias
        else None
    )
    if model.sinks is None:
        model.kept.clear()
        ds = model.without_padding(ds)
        return Gradients(base, ds, ds, dbias)
    sinks, dsinks = model.sinks, np.zeros((model.workers, *model.sinks.shape))
    for h, number in np.ndindex(sinks.shape):
        model.sinks = sinks.copy()
        model.sinks[h, number] += step
        dsinks[:, h, number] = ((goal() - before) / step).sum(axis=(1, 2))
    model.sinks = sinks
    model.kept.clear()
    return Gradients(base, ds, ds, dbias, dsinks)
