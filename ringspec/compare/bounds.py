"""Bounds on the error of a result, derived from the rounding that its recipe declares.

A recipe (:class:`ringspec.recipes.Recipe`) lists the *rounding points* of an implementation, and the number format at
each. An element of a result passes if ``|got - want| <= factor * scale + floor``:

- ``scale`` is the row scale (docs/spec/numbers.md): the sum that defines the result, with the absolute value of each
  term, times kappa = 1 + the row's largest logit, computed with absolute values too.
- ``factor`` bounds the rounding errors, in units of the row scale (:func:`bound_factors`).
- ``floor`` covers underflow (:func:`bound_floors`).

**Factor.** Each rounding point adds an error: its unit roundoff u times a number of roundings, counted as follows.

- A sum of n terms counts as :func:`walk` (n) = min(n, 2 sqrt(n)) roundings, and so does a value that is rounded n
  times. For small n this is the worst case; for large n the errors are taken as a random walk (Higham and Mary, 2019,
  https://doi.org/10.1137/18M1226312). The order of the sum does not matter.
- In a ring of W workers, each step computes with one block of keys. If each block's result is rounded once, all these
  roundings together count as one, because the absolute values of the blocks add up to the row scale. An accumulator
  that is rounded after every step counts as walk(W - 1) roundings, plus one if its format is narrower than the format
  of the blocks' results.
- A division, exp, log or tanh counts as :data:`LIBRARY` roundings.
- All errors are added. If twice the root of the sum of their squares is less, that is used instead
  (:func:`together`). The factor is :data:`MARGIN` times the result.

The following formulas list the errors that are added for each result. u_x is the unit roundoff of rounding point x. The
points f = ``products`` and t = ``statistics`` are the accumulators of matrix products and the numbers of the running
softmax (its weights, maximum and sum). D and Dv are the widths of q and v, ``keys`` and ``rows`` the numbers of keys
and of query rows, tiles_k and tiles_q the numbers of their tiles, and L = max(1, log(keys))::

    score  = (walk(D) + 3) u_f + 2 u_scores    score s, in units of kappa: <q, k>, scale, bias, soft cap
    weight = score + LIBRARY u_t               weight exp(s - m), in units of kappa
    lse    = weight + (walk(keys) + LIBRARY walk(W) + LIBRARY walk(tiles_k)) u_t + u_lse
    o      = 2 weight + u_p + (walk(keys) + LIBRARY walk(tiles_k) + LIBRARY) u_f
             + (walk(keys) + LIBRARY walk(tiles_k) + 2 LIBRARY walk(W)) u_t
             + u_block_o + 2 walk(W - 1) u_merge + u_outputs
             + walk(W - 1) u_carried_o         if u_carried_o > u_merge
             + 2 L walk(W) u_t                 if merged parts are normalised: their weights use rounded lse
    p      = weight + (lse without u_lse) + L (u_lse + u_backward_lse + u_f)    P = exp(s - lse)
    dz     = p + o + walk(Dv) (u_f + u_d) + u_dy_o_products + 2 u_delta + LIBRARY u_f
             + 4 u_scores                      if there is a soft cap
    dv     = p + u_p + u_t + (walk(rows) + 2) u_f + walk(tiles_q) u_tile_dkv
             + u_block_gradients + walk(W - 1) u_carried_dkv + u_gradients
    dk     = dz + u_ds + all terms of dv after u_t
    dq     = dz + u_ds + the same terms, with keys, tiles_k, tile_dq and carried_dq
    dbias  = dz + u_ds + walk(rows B H) u_f + u_gradients
    dsinks = dz + walk(rows B H) u_t

dz is the gradient of the scores before the soft cap. It uses P and delta = <dy, o> - dlse, whose errors are p and o.
u_d is the larger of u_f and the unit roundoff of float32, or u_f if the point ``delta`` is float64. A backward pass
over a single block receives lse and delta as inputs. Their errors are then 0, except that the block may round lse once
more. The point ``inputs`` adds no error, because the inputs of a test are already numbers of the input format.

**Floor.** Numbers underflow in a narrow format: exp(-20) is 0 in float16. No multiple of a row scale covers this
loss, so :func:`bound_floors` computes an absolute term. One underflow loses up to half the least subnormal number in
float16, and up to the least *normal* number in other formats, because kernels flush subnormals to zero. The floor is
the sum of these losses over all intermediate results. Each loss is multiplied by the number of terms in the sum and by
the largest magnitude of its other factors. In float16, with inputs up to 3 and 64 keys, the floor is 1e-6 for o and
dv, 3e-5 for dq and 4e-4 for dk (every row may lose a part of delta). In formats with a wider range it is below 1e-32.

**Measured** with ``ringspec.ring`` on 200 random problems: 1 to 8 workers, 16 to 128 tokens, logits with a
standard deviation of 0.01 to 8, rows of different magnitude, and all features. Results are compared with float64
values; only the results of the recipe float64 are compared with exact values. Each entry is the largest error in all
problems, in units of the bound. The number in brackets is the largest error in the median problem::

    recipe          o              lse             dq              dk              dv
    float64         0.06 (1/120)   0.03 (1/70)     0.05 (1/170)    0.04 (1/300)    0.11 (1/93)
    float32         0.05 (1/150)   0.04 (1/112)    0.04 (1/250)    0.04 (1/430)    0.04 (1/134)
    bf16            0.52 (1/14)    0.02 (1/127)    0.29 (1/42)     0.24 (1/80)     0.45 (1/18)
    bf16_partials   0.29 (1/24)    0.03 (1/90)     0.20 (1/73)     0.12 (1/130)    0.31 (1/35)
    nki             0.33 (1/28)    0.02 (1/127)    0.14 (1/79)     0.11 (1/190)    0.63 (1/17)

fp16 and fp8 behave like bf16. dbias stays below 0.09, dsinks below 0.13; their bounds are the loosest (median
1/50 to 1/2500). On the package's stored test vectors (the set 'core'), no recipe exceeded 0.72.

The table omits tensors with an overflow. :data:`MARGIN` is not derived for dq, dk, dsinks and dbias. It was chosen
after the first 100 of these problems (and 320 others); the last 100 did not influence it.

**Not covered**: overflow, and sequential float32 sums of thousands of equal numbers. Overflow occurs in float16 sums
beyond 65504. In the recipe nki_low it also occurs on peaked rows: lse is rounded to bfloat16, so exp(s - lse) may
overflow (2 of the 200 problems end in NaN). In a sequential sum of equal numbers all rounding errors may have the same
sign: 0.1 added 4096 times has an error of 1.03 times the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ringspec.errors import OptionError, shown
from ringspec.formats import format_of, unit_roundoff
from ringspec.recipes import ROUNDING_POINTS, Recipe, recipe

__all__ = ["Sizes", "bound_factors", "bound_floors"]

Sources = tuple[float, ...]
RESULTS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
# The recipe assumed for a target that declares none, by the format of a call's inputs.
RECIPE_OF_FORMAT = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
UNDECLARED_TILE = 32
# A reserve for one rounding that a recipe does not name, such as that of scale * q. The many errors of dz are
# independent and rarely add up: the simulation never reached a quarter of their sum.
MARGIN = dict.fromkeys(("o", "lse", "dv"), 1.4)
MARGIN |= dict.fromkeys(("dq", "dk", "dsinks", "dbias"), 0.7)
# Error of a library's exp, log, tanh or division, and of exp's argument, in unit roundoffs.
LIBRARY = 4.0


@dataclass(frozen=True)
class Sizes:
    """The numbers of terms in the sums of a call, for the whole ring, not for one worker.

    ``workers``  number of workers W; ``head_dim``: width D of q and k; ``value_dim``: width Dv of v (None: D)
    ``keys``     number of keys Sk; ``queries``: number of queries Sq times query heads per key head (None: ``keys``)
    ``batch``    B * H, over which dsinks and a broadcast dbias are summed
    ``softcap``  whether there is a soft cap
    ``given_lse``    the largest ``|lse|`` if lse and delta are inputs, as in the backward pass of a single block;
                     None if they are results of the forward pass
    ``condition``    the largest row scale of lse (kappa + ``|lse|``); 0: bounds to first order only
    ``largest_lse``  the largest ``|lse|``; with ``condition`` it gives the error of an exponent (:func:`amplified`)
    """

    workers: int
    keys: int
    head_dim: int
    value_dim: int | None = None
    queries: int | None = None
    batch: int = 1
    softcap: bool = False
    given_lse: float | None = None
    condition: float = 0.0
    largest_lse: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "keys", "head_dim", "value_dim", "queries", "batch"):
            count = getattr(self, name)
            if not (count is None or (type(count) is int and count >= 0)):
                raise OptionError(
                    f"{name} as an int >= 0", shown(count), "pass the shape of the call"
                )

    @property
    def rows(self) -> int:
        """The number of query rows that may see one key, over all query heads that share the key."""
        return self.keys if self.queries is None else self.queries

    @property
    def values(self) -> int:
        """The width Dv of v."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def log_keys(self) -> float:
        """The number L = max(1, log(keys)), such that ``|lse|`` <= L kappa."""
        return max(1.0, math.log(max(self.keys, 1)))


def walk(count: float) -> float:
    """Return how many unit roundoffs n = ``count`` roundings add up to: min(n, 2 sqrt(n)).

    >>> walk(4), walk(16), walk(1024)
    (4, 8.0, 64.0)
    """
    return min(count, 2.0 * math.sqrt(count))


def bound_factors(
    declared: str | Recipe,
    sizes: Sizes,
    *,
    outputs: str | None = None,
    statistics: str | None = None,
) -> dict[str, float]:
    """Return the factor of each result's bound, for a ring or a single block that rounds as its recipe says.

    ``declared``: the recipe, or its name. ``outputs``: the format in which o and the gradients are returned;
    ``statistics``: the format of lse and dsinks. A returned format that is narrower than the recipe's adds a rounding.

    >>> sizes = Sizes(workers=4, keys=64, head_dim=16)
    >>> [f"{bound_factors(name, sizes)['dq']:.1e}" for name in ("float64", "float32", "bf16")]
    ['8.3e-15', '4.5e-06', '1.1e-02']
    """
    used = recipe(declared)
    u = {point: unit_roundoff(getattr(used, point)) for point in ROUNDING_POINTS}
    sources = forward_sources(used, u, sizes)
    sources |= backward_sources(used, u, sizes, sources)
    ends = dict.fromkeys(RESULTS, u["gradients"]) | {"o": u["outputs"], "lse": u["lse"]}
    ends["dsinks"] = 0.0
    factors = {}
    for name, end in ends.items():
        wanted = statistics if name in ("lse", "dsinks") else outputs
        once_more = 0.0 if wanted is None else unit_roundoff(wanted)
        once_more = once_more if once_more > end else 0.0
        factors[name] = MARGIN[name] * together((*sources[name], once_more))
    return factors


def together(sources: Sources) -> float:
    """Combine independent errors: their sum, or twice the root of the sum of their squares if that is less.

    >>> together((1.0, 1.0)), together((1.0,) * 16)
    (2.0, 8.0)
    """
    return min(sum(sources), 2.0 * math.hypot(*sources))


def amplified(sources: Sources, x: float) -> Sources:
    """Convert the errors of an exponent to errors of the exponential, by the factor (e^x - 1) / x.

    ``x``: the error of the exponent in the worst row. For example, bfloat16 represents an lse of 1000 with an error of
    up to 2, so p = exp(s - lse) may be wrong by a factor of e^2.
    """
    if not 0.0 < x <= 700.0:
        return sources if x == 0 else tuple(math.inf if one else 0.0 for one in sources)
    return tuple(one * (math.expm1(x) / x) for one in sources)


def forward_sources(used: Recipe, u: Mapping[str, float], sizes: Sizes) -> dict[str, Sources]:
    """Return the separate errors that enter a weight exp(s - m), o and lse, in units of their row scales."""
    f, t = u["products"], u["statistics"]
    keys, steps = walk(sizes.keys), walk(sizes.workers)
    tiles = walk(math.ceil(sizes.keys / (used.tile_k or UNDECLARED_TILE)))
    weight: Sources = (walk(sizes.head_dim) * f, 3 * f, 2 * u["scores"], LIBRARY * t)
    weight = amplified(weight, together(weight) * sizes.condition)
    total = (keys * t, LIBRARY * steps * t, LIBRARY * tiles * t)
    o = (
        *(2 * x for x in weight),
        *total,
        u["p"],
        keys * f,
        LIBRARY * tiles * f,
        LIBRARY * f,
        u["block_o"],
        2 * kept(u["merge"], u["block_o"], sizes),
        kept(u["carried_o"], u["block_o"], sizes) if u["carried_o"] > u["merge"] else 0.0,
        LIBRARY * steps * t,
        u["outputs"],
    )
    if used.merge_order == "normalised":  # the weights of a merge are computed from rounded lse
        o += (2 * sizes.log_keys * steps * t,)
    return {"weight": weight, "o": o, "lse": (*weight, *total, u["lse"])}


def backward_sources(
    used: Recipe, u: Mapping[str, float], sizes: Sizes, forward: Mapping[str, Sources]
) -> dict[str, Sources]:
    """Return the separate errors that enter the gradients; ``forward``: the result of :func:`forward_sources`."""
    f, t = u["products"], u["statistics"]
    log_keys, o, lse = sizes.log_keys, forward["o"], forward["lse"][:-1]
    if sizes.given_lse is not None:
        log_keys, o, lse = max(log_keys, sizes.given_lse), (), ()
    of_lse = (u["backward_lse"],) if sizes.given_lse is not None else (u["lse"], u["backward_lse"])
    exponent = (*forward["weight"], *lse, log_keys * f)
    worst = together(exponent) * sizes.condition + sum(of_lse) * sizes.largest_lse
    p = amplified((*exponent, *(log_keys * x for x in of_lse)), worst)
    values = walk(sizes.values)
    delta = max(f, 0.0 if used.delta == "float64" else unit_roundoff("float32"))
    dz = (*p, *o, values * f, values * delta, u["dy_o_products"], 2 * u["delta"], LIBRARY * f)
    dz += (4 * u["scores"],) if sizes.softcap else ()
    rows, keys = walk(sizes.rows), walk(sizes.keys)
    tiles_q = tiles_of_block(sizes.rows, sizes, used.tile_q)
    tiles_k = tiles_of_block(sizes.keys, sizes, used.tile_k)
    end = (u["block_gradients"], u["gradients"])
    of_keys = ((rows + 2) * f, tiles_q * u["tile_dkv"], kept(u["carried_dkv"], end[0], sizes), *end)
    of_rows = ((keys + 2) * f, tiles_k * u["tile_dq"], kept(u["carried_dq"], end[0], sizes), *end)
    all_rows = walk(sizes.rows * sizes.batch)
    return {
        "dq": (*dz, u["ds"], *of_rows),
        "dk": (*dz, u["ds"], *of_keys),
        "dv": (*p, u["p"], t, *of_keys),
        "dsinks": (*dz, all_rows * t),
        "dbias": (*dz, u["ds"], all_rows * f, u["gradients"]),
    }


def kept(u: float, leaving: float, sizes: Sizes) -> float:
    """Return the error of an accumulator that is rounded in each ring step to a format of unit roundoff ``u``.

    Each block's result is already rounded to a format of unit roundoff ``leaving``. The first block's result needs no
    addition, so it is rounded again only if ``u`` is larger than ``leaving``.
    """
    return walk(max(sizes.workers - 1, 0)) * u + (u if u > leaving else 0.0)


def tiles_of_block(count: int, sizes: Sizes, tile: int | None) -> float:
    """Return :func:`walk` of the number of tiles in a block; the block's accumulator is rounded once per tile."""
    per_worker = count / max(sizes.workers, 1)
    return walk(1 if tile is None else max(1, math.ceil(per_worker / tile)))


def merge_factors(
    declared: str | Recipe, parts: int, *, outputs: str | None = None, statistics: str | None = None
) -> dict[str, float]:
    """Return the factors of the bounds of o and lse when ``parts`` normalised results (o, lse) are merged."""
    used = recipe(declared)
    sizes = Sizes(workers=parts, keys=parts, head_dim=1)
    factors = bound_factors(used, sizes, outputs=outputs, statistics=statistics)
    return {name: factors[name] for name in ("o", "lse")}


def bound_floors(
    declared: str | Recipe,
    sizes: Sizes,
    largest: Mapping[str, float],
    *,
    outputs: str | None = None,
    statistics: str | None = None,
) -> dict[str, float]:
    """Return the floor of each result's bound: an absolute error that covers underflow of intermediate results.

    ``largest``: the largest magnitudes of the inputs ``q``, ``k``, ``v``, ``dy`` and ``dlse`` (default 0), and the
    numbers ``scale`` and ``dropout`` = 1 / (1 - dropout_p) (default 1). The other parameters are those of
    :func:`bound_factors`.

    >>> largest = {"q": 3, "k": 3, "v": 3, "dy": 3, "scale": 0.25}
    >>> sizes = Sizes(workers=4, keys=64, head_dim=16)
    >>> [f"{bound_floors(name, sizes, largest)['dv']:.0e}" for name in ("fp16", "bf16")]
    ['1e-06', '1e-36']
    """
    used = recipe(declared)
    least = {point: least_number(getattr(used, point)) for point in ROUNDING_POINTS}
    q, k, v, dy, dlse = (float(largest.get(x, 0.0)) for x in ("q", "k", "v", "dy", "dlse"))
    scale, dropout = (float(largest.get(x, 1.0)) for x in ("scale", "dropout"))
    keys, rows, steps = walk(sizes.keys), walk(sizes.rows), sizes.workers
    width = walk(sizes.values)
    weight = least["statistics"] * dropout + least["p"]
    o = forward_floor(least, keys, weight, v, steps)
    # dz = p (dp - delta): a loss in dp or delta is multiplied by p, and p sums to 1 in a row.
    times_p = width * (dy * o + least["products"] + least["dy_o_products"]) + least["delta"]
    dz = least["statistics"] * (2 * sizes.values * dy * v * dropout + dlse) + least["ds"]
    end = steps * least["block_gradients"] + least["gradients"] + least["products"]
    dq_end = end + steps * (least["carried_dq"] + least["tile_dq"])
    dkv_end = end + steps * (least["carried_dkv"] + least["tile_dkv"])
    all_rows = walk(sizes.rows * sizes.batch)
    floors = {
        "o": o,
        "lse": least["lse"],
        "dq": abs(scale) * (keys * dz + times_p) * k + dq_end,
        "dk": abs(scale) * rows * (dz + times_p) * q + dkv_end,
        "dv": rows * (weight * dy + least["products"]) + dkv_end,
        "dsinks": all_rows * (dz + times_p),
        "dbias": all_rows * (dz + times_p) + least["gradients"],
    }
    for name in floors:
        wanted = statistics if name in ("lse", "dsinks") else outputs
        floors[name] += 0.0 if wanted is None else least_number(wanted)
    return floors


def forward_floor(
    least: Mapping[str, float], keys: float, weight: float, v: float, steps: int
) -> float:
    """Return the largest error that underflow of weights, of products or of o itself causes in o."""
    own = least["block_o"] + 2 * least["merge"] + least["carried_o"]
    return keys * (weight * v + least["products"]) + steps * own + least["outputs"]


def least_number(name: str) -> float:
    """Return the most that one underflow loses: half a subnormal step in float16, otherwise the least normal number.

    >>> least_number("float16") == 2.0**-25, least_number("bfloat16") == 2.0**-126
    (True, True)
    """
    if name == "float16":
        return format_of(name).smallest_subnormal / 2
    return float(2.0 ** format_of(name).min_exponent)
