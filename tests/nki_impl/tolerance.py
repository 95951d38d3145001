"""Bit-tolerance: how far the kernels may be from the specification's ring under their own recipe.

The recipe is written from the description of the kernels' rounding points. The prediction of a run is
the ring of :mod:`ringspec` under it: its forward, and its backward from the o and lse that the kernel's
forward gave, so that each pass is compared by itself. Every rank is compared.

A row's *size* is the sum of its absolute summands: of o sum_j p |v|, of dv sum_i p |dy|, of dq
scale sum_j a |k|, of dk scale sum_i a |q| with a = p (sum_d |dy v| + sum_d |dy| sum_j p |v|); the largest
over d. Its *row scale* weights each p with kappa = 1 + max_j(scale sum_d |q k|), by which a rounding of
a score comes back in p; that of lse is kappa + |lse|.

**Same order** (level 1: the simulator, whose order of summation is that of the recipe but inside one
matrix product):

- o of 16-bit inputs: at least 99 % of a rank bit-equal in bfloat16, 98 % in float16, the rest within 1 ulp
  of its type at the size. BLAS decides the order inside a product, which float16 shows: in one run of 16
  ranks, 98.8 to 99.8 % are equal
- o of float32 inputs: as in any order, and the root mean square of all differences of a rank within
  1 predicted standard deviation
- lse: within 4 ulp of float32 at the row scale, and 1 ulp of its own where its type is narrower
- dq, dk, dv: within 6 standard deviations of the noise that the recipe predicts, root mean square of a
  rank within 0.5 (float32 inputs: 12 and 1, because the order inside a product is not described, and
  both sides have noise of their own: BLAS decides how much. Largest values of the short runs of the
  covering set: 6.8 and 0.78 (o: 0.84), with OpenBLAS's Haswell kernels and two threads)

**Any order** (level 2: hardware, the official simulator, other tile sizes):

- o, dq, dk, dv: within 1 ulp of the input type, which is that of the matrix operands, at the size, and
  4 ulp of float32 at the row scale; lse as above
- o of a rank: at least 99 % bit-equal in bfloat16, 96 % in float16, whose rounding is fine enough to
  show that of float32 sums: float32 and exact sums of one recipe agree in 99.5 % and 97.7 %. That holds
  for other orders of summation; a kernel that takes the row maximum over other keys rounds other P
  (76 % agree between maxima of 64 and of 128 keys), and is held to the bound alone.

Up to :data:`PREDICTED` tokens in a ring, standard deviations are those of :mod:`ringspec.compare.noise.predict`,
for an lse in float32; beyond, whose memory grows with the square of them, the root mean square of the
recipe's own error in a row stands in, against float64 from the same o and lse, but for what the last
rounding of an element alone gives.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.conformance.judge.noise_inputs import attention_of, places
from ringspec.formats import format_of, load, unit_roundoff
from ringspec.recipes import RECIPES, Recipe
from ringspec.rings.layouts import shard
from ringspec.spec.layout import Layout
from ringspec.spec.masks import visible
from ringspec.truth.problem import Upstream

from .prediction import GRADIENTS, Named, Ring, backward, forward, gradients, results

Array = NDArray[Any]
PREDICTED = 768
RMS, DEVIATIONS = 0.5, 6.0
RMS_FLOAT32, DEVIATIONS_FLOAT32 = 2 * RMS, 2 * DEVIATIONS
EQUAL_SAME_ORDER = {"bfloat16": 0.99, "float16": 0.98}
EQUAL_ANY_ORDER = {"bfloat16": 0.99, "float16": 0.96}
LSE_ULPS = FLOAT32_ULPS = 4.0
PART = 512  # query rows worked through at a time


@dataclass(frozen=True)
class Yardsticks:
    """Global [b, h, S]: ``size`` and ``scale`` of each row; ``sd`` in each tensor's shape.

    None instead of ``sd`` where it was not asked for.
    """

    size: Named
    scale: Named
    sd: Named | None


def yardsticks(ring: Ring, recipe: Recipe, got: Named, want: Named | None) -> Yardsticks:
    """``got`` by rank holds the o and lse that the backward of ``want`` started from.

    ``want``: the recipe's results, of which a large ring's deviations are made; None: no deviations.
    """
    exact = results(ring.layout, forward(ring, RECIPES["float64"]))
    size, scale = sizes(ring, exact["o"], exact["lse"])
    if want is None:
        return Yardsticks(size, scale, None)
    if ring.problem.q.shape[2] <= PREDICTED:
        attention = attention_of(ring.problem, exact["o"], Upstream(ring.dy))
        sd = predicted_noise(attention, ring.layout, recipe.replace(lse="float32"))
        return Yardsticks(size, scale, sd)
    same = backward(ring, RECIPES["float64"], got["o"], got["lse"])
    exact |= gradients(ring.layout, same)
    return Yardsticks(size, scale, own_noise(recipe, want, exact, size))


def own_noise(recipe: Recipe, want: Named, exact: Named, size: Named) -> Named:
    """Instead of standard deviations: each row's error, and each element's own last rounding."""
    last = {"o": recipe.outputs, "dq": recipe.carried_dq}
    sd = {}
    for name in ("o", *GRADIENTS):
        row = np.sqrt(((want[name] - exact[name]) ** 2).mean(axis=3, keepdims=True))
        row = np.maximum(row, unit_roundoff("float32") * size[name][..., None])
        rounding = ulp(last.get(name, recipe.carried_dkv), np.abs(exact[name])) / np.sqrt(12)
        sd[name] = np.maximum(row, rounding)
    return sd


def predicted_noise(attention: Attention, layout: Layout, recipe: Recipe) -> Named:
    """The standard deviation of every element, as the model has it."""
    (owner, slot), workers = places(layout.table), layout.workers
    ring = Geometry.ring(owner, owner, workers, "q")
    geometry = dataclasses.replace(ring, slot_q=slot, slot_k=slot)
    return dict(predict(attention, recipe, geometry).sd)


def sizes(ring: Ring, o: Array, lse: Array) -> tuple[Named, Named]:
    """Sums of absolute summands without and with kappa, the largest of each row over d."""
    at, dy = ring.problem, np.abs(ring.dy)
    group = at.terms.group
    k, v = (np.repeat(x, group, axis=1) for x in (at.k, at.v))
    size: dict[str, list[Array]] = {name: [] for name in ("o", "lse", "dq")}
    scale: dict[str, list[Array]] = {name: [] for name in ("o", "lse", "dq")}
    of_keys = {(name, weighted): np.zeros(k.shape) for name in ("dk", "dv") for weighted in (0, 1)}
    weight = abs(at.terms.scale)
    for first in range(0, at.q.shape[2], PART):
        part = slice(first, first + PART)
        p, kappa = probabilities(ring, k, lse, part)
        values = p @ np.abs(v)
        a = (
            dy[:, :, part] @ np.abs(v).swapaxes(2, 3)
            + (dy[:, :, part] * values).sum(axis=3)[..., None]
        )
        a = weight * p * a
        dq = (a @ np.abs(k)).max(axis=3)
        size["o"].append(values.max(axis=3))
        size["dq"].append(dq)
        scale["o"].append(kappa * values.max(axis=3))
        scale["dq"].append(kappa * dq)
        rows = np.abs(lse[:, :, part])
        scale["lse"].append(kappa + np.where(np.isinf(rows), 0.0, rows))
        for weighted, factor in ((0, np.ones(kappa.shape)), (1, kappa)):
            turned = (factor[..., None] * a).swapaxes(2, 3), (factor[..., None] * p).swapaxes(2, 3)
            of_keys["dk", weighted] += turned[0] @ np.abs(at.q[:, :, part])
            of_keys["dv", weighted] += turned[1] @ dy[:, :, part]
    size["lse"] = scale["lse"]
    made = [{name: np.concatenate(x, axis=2) for name, x in one.items()} for one in (size, scale)]
    for (name, weighted), x in of_keys.items():
        of_group = x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
        made[weighted][name] = of_group.max(axis=3)
    return made[0], made[1]


def probabilities(ring: Ring, k: Array, lse: Array, part: slice) -> tuple[Array, Array]:
    """p [b, h, rows, S] and kappa [b, h, rows] of some query rows."""
    at = ring.problem
    q, scale = at.q[:, :, part], at.terms.scale
    allowed = visible(at.rows.slice(part.start, part.stop), at.columns, at.terms)
    row_lse = lse[:, :, part]
    empty = np.isneginf(row_lse)
    s = scale * q @ k.swapaxes(2, 3) - np.where(empty, 0.0, row_lse)[..., None]
    p = np.exp(np.where(allowed & ~empty[..., None], s, -np.inf))
    logits = abs(scale) * np.abs(q) @ np.abs(k).swapaxes(2, 3)
    return p, 1.0 + np.where(allowed, logits, 0.0).max(axis=3)


@dataclass(frozen=True)
class Measured:
    """One tensor of one rank: the kernel's against the prediction.

    ``equal``       share of bit-equal elements
    ``ulps``        the largest difference in ulps of the tensor's own type (gradients: of the input
                    type) at the row's size; of lse at its row scale, or its own if it is narrow
    ``beyond``      the same in units of what level 2 allows
    ``deviations``, ``rms``   the largest difference, and the root mean square of all, in standard
                    deviations; None for lse, and where no noise was asked for
    ``finite``      infinities and exact zeros are where they are predicted, and nothing is NaN
    """

    tensor: str
    rank: int
    format: str
    equal: float
    ulps: float
    beyond: float
    deviations: float | None
    rms: float | None
    finite: bool


def ulp(name: str, at: Array) -> Array:
    """The spacing of a format's numbers at positive values; 0 at 0."""
    exponent = np.floor(np.log2(np.where(at == 0, 1.0, at)))
    exponent = np.maximum(exponent, format_of(name).min_exponent)
    return np.where(at == 0, 0.0, 2.0 * unit_roundoff(name) * 2.0**exponent)


def measure(
    tensor: str, rank: int, got: Array, want: Array, formats: tuple[str, str],
    size: Array, scale: Array, sd: Array | None,
) -> Measured:  # fmt: skip
    """``formats``: of the inputs, and of lse. Arrays of one rank; size and scale [b, h, s]."""
    of_inputs, of_lse = formats
    own = of_lse if tensor == "lse" else of_inputs
    got = load(got)
    same = got == want
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    finite = bool(np.isfinite(error).all()) and bool((np.isfinite(got) == np.isfinite(want)).all())
    if tensor != "lse":
        unit = ulp(own, size[..., None])
        allowed = unit + FLOAT32_ULPS * ulp("float32", scale[..., None])
    else:
        narrow = own != "float32"
        unit = ulp(own, np.where(np.isinf(want), 0.0, np.abs(want)) if narrow else scale)
        allowed = LSE_ULPS * ulp("float32", scale) + (unit if narrow else 0.0)
    deviations = rms = None
    if sd is not None and tensor != "lse":
        z = ratio(error, sd)
        squares = z[sd > 0] ** 2
        deviations, rms = float(z.max()), float(np.sqrt(squares.sum() / max(squares.size, 1)))
    return Measured(
        tensor, rank, own, float(same.mean()), float(ratio(error, unit).max()),
        float(ratio(error, allowed).max()), deviations, rms, finite,
    )  # fmt: skip


def ratio(error: Array, unit: Array) -> Array:
    """error / unit; 0 / 0 is 0, and NaN infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(error == 0, 0.0, error / unit)
    return np.where(np.isnan(found), np.inf, found)


def compared(
    ring: Ring, recipe: Recipe, got: Named, want: Named, with_noise: bool = True
) -> list[Measured]:
    """Every tensor of every rank; ``got`` by rank, ``want`` in global order."""
    measures = yardsticks(ring, recipe, got, want if with_noise else None)
    found = []
    for name, arrays in got.items():
        expected, size, scale = (
            shard(x, ring.layout) for x in (want[name], measures.size[name], measures.scale[name])
        )
        sd = None
        if measures.sd is not None and name != "lse":
            sd = shard(measures.sd[name], ring.layout)
        for place, rank in enumerate(ring.ranks):
            found.append(
                measure(
                    name, rank, arrays[rank], expected[place], (recipe.inputs, recipe.lse),
                    size[place], scale[place], None if sd is None else sd[place],
                )
            )  # fmt: skip
    return found


def broken_same_order(one: Measured) -> list[str]:
    """What one tensor of one rank breaks of level 1."""
    wrong = [] if one.finite else ["non-finite values or infinities"]
    narrow = one.format != "float32"
    if one.tensor == "lse":
        return wrong + over(one.beyond, 1.0, "of 4 ulp of float32 and 1 ulp of its type")
    assert one.deviations is not None and one.rms is not None
    if one.tensor == "o" and narrow:
        due = EQUAL_SAME_ORDER[one.format]
        wrong += [] if one.equal >= due else [f"{one.equal:.4f} bit-equal, due {due}"]
        return wrong + over(one.ulps, 1.0, "ulp at the row's size")
    most, farthest = (RMS, DEVIATIONS) if narrow else (RMS_FLOAT32, DEVIATIONS_FLOAT32)
    if one.tensor == "o":
        wrong += over(one.beyond, 1.0, "of what any order allows")
        return wrong + over(one.rms, most, "predicted standard deviations in root mean square")
    wrong += over(one.deviations, farthest, "predicted standard deviations")
    return wrong + over(one.rms, most, "predicted standard deviations in root mean square")


def broken_any_order(one: Measured) -> list[str]:
    """What one tensor of one rank breaks of level 2."""
    wrong = [] if one.finite else ["non-finite values or infinities"]
    wrong += over(one.beyond, 1.0, "of what any order allows")
    due = EQUAL_ANY_ORDER.get(one.format, 0.0)
    if one.tensor == "o" and not one.equal >= due:
        wrong.append(f"{one.equal:.4f} bit-equal, due {due}")
    return wrong


def over(value: float, most: float, unit: str) -> list[str]:
    """A sentence where a value exceeds its limit, or is NaN."""
    return [] if value <= most else [f"{value:.3g} {unit}, due {most:g}"]


def broken(found: list[Measured], level: Any) -> list[str]:
    """All sentences of a level, with tensor and rank."""
    return [f"{one.tensor} of rank {one.rank}: {text}" for one in found for text in level(one)]
