"""Predict the noise (the rounding errors) of every element from the true values.

:func:`predict` returns the standard deviation and a hard bound of the error of each element of o, lse, dq, dk, dv,
dsinks and dbias. It takes a :class:`~ringspec.recipes.Recipe`, which says where the kernel rounds, and a
:class:`~ringspec.compare.noise.problem.Geometry`, which says how a ring of W workers divides the problem.
:meth:`Noise.variance_of_sums` returns the variance of weighted sums of errors (docs/conform/noise.md). The
derivations are in these modules:

=================  ===============================================================================
``problem``        the input: true values and geometry
``rounding``       one rounding, an accumulated sum, a value that is rounded several times
``p_relative_to``  the number relative to which P is rounded
``worker``         the errors of one worker's blocks in the forward pass
``merging``        the errors of the merges of partial results
``forward``        the errors of the forward pass, block by block in the ring's order
``rows``           the resulting errors of o, lse and delta = <dy, o> - dlse
``backward``       P and dS of the backward pass
``ring``           dq, dk, dv: sums over tiles and ring steps
``sums``           the variance of weighted sums of errors
=================  ===============================================================================

**Bound.** The bound takes the worst case of every rounding (half a spacing at the largest value that the number can
have) and of every sum (n r sum |x| for n terms x in a format of unit roundoff r). These worst cases are propagated
to the results through the same linear maps as the variances, with absolute values. Where several elements share an
error, the bound includes the higher-order terms of exp, quotients and products. It is proven for a kernel that rounds
where the recipe says and whose exp and log err by at most half a spacing.

**Measured** with ``ringspec.ring`` on 260 random problems (64 to 192 tokens, 1, 2, 4 or 8 workers, all layouts and
circulations, logits with a standard deviation of 0.01 to 8, tiles, masks, sinks, soft cap, bias, dropout, dlse).
Results are compared with float64 values, or with extended precision for the recipe float64. Let the ratio of a problem
be the root mean square of error / sd. The first three numbers in each column are the median, the least and the
greatest ratio of all problems; the fourth is the largest |error| / bound (``tests/benchmarks/calibrate_noise.py``)::

    recipe         o                      lse                    dq                     dk                     dv
    float64        1.05 0.73..1.29 0.33   1.08 0.91..1.30 0.41   1.08 0.86..1.65 0.04   1.08 0.92..1.49 0.03   1.08 0.94..1.67 0.10
    float32        1.01 0.87..1.29 0.19   0.90 0.69..1.30 0.26   0.90 0.67..1.32 0.06   0.90 0.68..1.22 0.03   0.86 0.64..1.23 0.11
    bf16           0.97 0.96..1.00 1.00   0.91 0.72..1.37 0.33   0.98 0.94..1.05 0.87   0.98 0.93..1.06 0.52   0.99 0.92..1.00 0.93
    fp16           0.97 0.95..0.99 1.00   0.87 0.71..1.29 0.22   0.99 0.97..1.03 0.70   0.99 0.96..1.02 0.83   0.98 0.91..1.02 0.95
    bf16_partials  0.98 0.96..1.02 0.99   0.93 0.77..1.34 0.39   0.99 0.96..1.02 0.80   0.99 0.93..1.01 0.60   0.98 0.95..1.00 0.98
    fp16_partials  0.98 0.97..1.02 1.00   0.93 0.69..1.18 0.23   0.98 0.95..1.01 0.72   0.99 0.95..1.03 0.65   0.99 0.94..1.01 0.94
    fp8_e4m3       0.97 0.94..0.98 0.98   0.88 0.73..0.99 0.50   0.98 0.96..1.02 0.82   0.98 0.95..1.02 0.40   0.98 0.96..1.00 0.94
    fp8_e5m2       0.97 0.95..1.00 0.99   0.89 0.68..1.02 0.14   0.99 0.96..1.01 0.90   0.99 0.96..1.05 0.60   0.97 0.95..1.01 0.96
    nki            1.00 0.98..1.01 0.95   0.91 0.68..1.20 0.43   0.99 0.96..1.06 0.71   0.99 0.96..1.06 0.26   1.00 0.97..1.02 0.94
    nki_low        0.99 0.97..1.01 0.93   0.92 0.64..1.30 0.21   1.00 0.97..1.03 0.92   0.99 0.93..1.01 0.68   1.00 0.90..1.13 0.89
    nki_impl_bf16  0.97 0.96..1.00 1.00   0.97 0.70..1.27 0.17   0.99 0.94..1.02 0.89   1.00 0.93..1.01 0.51   1.00 0.95..1.03 0.93
    nki_impl_fp16  0.97 0.95..1.00 1.00   0.91 0.59..1.28 0.43   1.00 0.98..1.02 0.83   0.99 0.96..1.03 0.74   0.99 0.93..1.03 0.90
    nki_impl_fp32  1.04 0.76..1.36 0.10   0.91 0.73..1.42 0.19   0.90 0.68..1.33 0.02   0.90 0.72..1.39 0.01   0.87 0.68..1.28 0.05

lse is float32 in most of these recipes, and no recipe declares the order of its sums. Three constants were fitted to
such problems: ``CHUNK`` (in ``rounding``), :data:`INNER` and :data:`UNDECLARED`. They affect only float32 and float64
sums. For PyTorch 2.13's flash attention on a CPU (``tests/compare/test_noise_torch.py``) the ratio is 0.96 to 1.05 in
bfloat16 and 0.92 to 1.11 in float32.

Weighted sums of errors were measured in 40 problems with 4 workers, for each of five 16-bit recipes, after subtracting
``drift`` (see :class:`Noise`). The weights were the true values or random signs; the sums ran over a tensor, a head or
a worker. The root mean square of sum / sd is between 0.8 and 1.2.

**Not covered**: overflow; truncating accumulators; an exp or log that errs by more than its last digit. In float32
recipes sd is known only within a factor of 2, also for sums. Rounding to nearest itself makes a smooth distribution of
values smaller by a relative 0.2 u^2 on average (3e-6 in bfloat16, where u = 2^-8); this is not predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ringspec.compare.noise.backward import PairNoise, pair_noise
from ringspec.compare.noise.forward import forward_sources
from ringspec.compare.noise.problem import Array, Attention, Geometry, Head, Integers, head_of
from ringspec.compare.noise.ring import dkv_noise, dq_noise, kept_error
from ringspec.compare.noise.rounding import Error, partial, product_error, rounding
from ringspec.compare.noise.rows import ReadNoise, read_noise, row_noise
from ringspec.compare.noise.sums import (
    Elementary,
    Held,
    OfDz,
    by_label,
    deviation,
    root,
    squared,
    sum_of_dz,
    sum_of_rows,
    sum_of_sinks,
)
from ringspec.errors import OptionError, ShapeError, shown
from ringspec.merges import merge_recipe
from ringspec.recipes import Recipe, recipe

__all__ = ["Noise", "predict"]

TRUNCATIONS = ("p", "ds", "outputs", "gradients")
ROUNDED_LAST = ("o", "dq", "dk", "dv")
# Between 1 (all of the variance is common) and 0, whose predictions differ by up to a factor of 3.
UNDECLARED = 0.97
INNER = 0.5  # between 1 (one accumulator) and 0.1 (a sum in lanes)


@dataclass(frozen=True)
class Noise:
    """The predicted errors (result - truth) of each tensor.

    The first five fields are dictionaries by tensor name. Their arrays have the shape of the tensor.

    ``sd``     standard deviation; 0 where the result must be exact
    ``bound``  largest absolute error
    ``mean``   the mean error: from truncation, from the rounding of 1 / (1 - dropout_p), and from the rounding of P
               in rows of equal scores. ``sd`` is the deviation from this mean; ``bound`` includes the mean
    ``drift``  errors whose value and sign can be computed, although ``sd`` counts them as random: roundings of values
               that are known to lie close to one number of the format. Such errors are often equal in many rows, so
               they add up over a tensor. Subtract ``drift`` from the errors before you sum them;
               :meth:`variance_of_sums` is the variance of what remains
    ``before`` variance of the errors of o, dq, dk and dv before their last rounding
    ``attention``  the problem
    ``heads``, ``stored``, ``held``  data from which variances of sums are computed
    """

    sd: Mapping[str, Array]
    bound: Mapping[str, Array]
    mean: Mapping[str, Array]
    drift: Mapping[str, Array]
    before: Mapping[str, Array]
    attention: Attention = field(repr=False)
    heads: Mapping[tuple[int, int], Elementary] = field(repr=False)
    stored: Mapping[str, Array] = field(repr=False)
    held: Held = field(default_factory=Held, repr=False, compare=False)

    def variance_of_sums(self, name: str, weights: Array, labels: Integers | None = None) -> Array:
        """Return the variance of one or several weighted sums of the errors of a tensor.

        ``weights`` has the tensor's shape. ``labels`` assigns each row to a sum: int [B, H, Sq] for o, lse and dq,
        [B, Hkv, Sk] for dk and dv; rows with a negative label are ignored. The result has one variance for each label
        from 0 to the largest. None means one sum over all elements, the only choice for dsinks and dbias. Raises
        OptionError for an unknown tensor name, ShapeError for a wrong shape.
        """
        if name not in self.sd:
            raise OptionError(
                f"one of {', '.join(self.sd)}", shown(name), "pass the name of a predicted tensor"
            )
        if weights.shape != self.sd[name].shape:
            raise ShapeError(
                f"weights of the shape of {name}, {self.sd[name].shape}",
                f"shape {weights.shape}",
                "pass one weight for each element",
            )
        if name in ("dsinks", "dbias"):
            if labels is not None:
                raise OptionError(f"no labels for {name}", "labels", "leave them out")
            return self.of_parameters(name, weights)
        rows = weights.shape[:3]
        if labels is not None and labels.shape != rows:
            raise ShapeError(
                f"labels of shape {rows}",
                f"shape {labels.shape}",
                "one label for each row of " + name,
            )
        count = 1 if labels is None else int(labels.max(initial=-1)) + 1
        total = np.zeros(count)
        for b, h in self.heads:
            total += self.of_head(name, b, h, weights, labels, count)
        more = weights**2 * self.stored[name]
        more = more if name == "lse" else more.sum(axis=3)
        return total + by_label(more, labels, count)

    def of_head(
        self, name: str, b: int, h: int, weights: Array, labels: Integers | None, count: int
    ) -> Array:
        """Return what batch b, key head h contributes to the variance of each sum, [count].

        The other parameters are those of :meth:`variance_of_sums`.
        """
        at = self.heads[b, h]
        chosen: int | slice = h
        if name not in ("dk", "dv"):
            chosen = slice(h * self.attention.group, (h + 1) * self.attention.group)
        mine, places = weights[b, chosen], None if labels is None else labels[b, chosen]
        if name == "lse":
            return by_label(mine**2 * at.lse**2, places, count)
        terms = self.held.of(name, (b, h), lambda: head_of(self.attention, b, h), at)
        return sum_of_rows(name, terms, mine, places, count)

    def of_parameters(self, name: str, weights: Array) -> Array:
        """Return the variance [1] of the weighted sum of all errors of dsinks or dbias."""
        total = float((weights**2 * self.stored[name]).sum())
        for b, h in self.heads:
            at, head = self.heads[b, h], head_of(self.attention, b, h)
            chosen = slice(h * self.attention.group, (h + 1) * self.attention.group)
            if name == "dsinks":
                total += float(sum_of_sinks(head, at, weights[chosen]).sum())
                total += float((weights[chosen] ** 2 * squared(at.dsinks)).sum())
                continue
            of_pairs = np.broadcast_to(weights, self.attention.s.shape)[b, chosen]
            total += float(sum_of_dz(OfDz.made(head, at, rounded=False), of_pairs).sum())
        return np.array([total])


def predict(
    attention: Attention,
    declared: str | Recipe,
    geometry: Geometry | None = None,
    *,
    stored: Mapping[str, str] | None = None,
    truncated: tuple[str, ...] = (),
    same_scores: bool | None = None,
    sequential: bool = False,
) -> Noise:
    """Predict the rounding errors of a kernel that computes ``attention`` under the recipe ``declared``.

    ``geometry``     how a ring divides the problem; None: one worker. If the recipe names a merge recipe, the orders in which
                     parts are merged and gradients are added are those of the merge recipe
    ``stored``       formats by tensor name, for results that the kernel stores in a narrower format than its recipe
                     says; each such format adds a rounding
    ``truncated``    points of :data:`TRUNCATIONS` at which the kernel rounds toward zero, not to nearest; any other
                     point raises OptionError
    ``same_scores``  whether the scores of the backward pass equal the scores of the forward pass bit for bit. If not,
                     float32 gradients of peaked rows have up to 3 times the noise. None: not known; the fraction
                     :data:`UNDECLARED` of the scores' variance then counts as common to both passes
    ``sequential``   whether <q, k> and <dy, v> are accumulated in one accumulator, term by term. False: not known;
                     the variance of this accumulation is then multiplied by :data:`INNER`

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    >>> s = np.array([[0.0, -np.inf], [0.0, 0.0]]).reshape(1, 1, 2, 2)
    >>> p = np.array([[1.0, 0.0], [0.5, 0.5]]).reshape(1, 1, 2, 2)
    >>> truth = Attention(q, k, v, s, np.log([[[1.0, 2.0]]]), p, p @ v, 0.5)
    >>> bool(predict(truth, "bf16").sd["o"].max() < 1e-6)  # 1 and 2 are bfloat16 numbers, all e are 1
    True
    """
    used = recipe(declared)
    for point in truncated:
        if point not in TRUNCATIONS:
            raise OptionError(f"points of {TRUNCATIONS}", shown(point), "leave it out")
    if geometry is None:
        geometry = Geometry.single(attention.q.shape[2], attention.k.shape[2])
    if used.merge_recipe is not None:
        geometry = geometry.merging_as(merge_recipe(used.merge_recipe))
    order = (
        UNDECLARED if same_scores is None else float(same_scores),
        1.0 if sequential else INNER,
    )
    results = Results(attention)
    with np.errstate(under="ignore", over="ignore"):
        for b in range(attention.k.shape[0]):
            for h in range(attention.k.shape[1]):
                index = (b, h)
                predict_head(attention, used, geometry, truncated, order, results, index)
    return results.noise(stored or {})


class Results:
    """The arrays of a prediction, which :func:`predict` fills head by head."""

    def __init__(self, attention: Attention) -> None:
        at = self.attention = attention
        shapes: dict[str, tuple[int, ...]] = {"o": at.o.shape, "lse": at.lse.shape}
        if at.dy is not None:
            shapes |= {"dq": at.q.shape, "dk": at.k.shape, "dv": at.v.shape}
            if at.sinks is not None:
                shapes["dsinks"] = at.sinks.shape
            if at.bias is not None:
                shapes["dbias"] = (1,) * (4 - at.bias.ndim) + at.bias.shape
        self.value, self.variance, self.bound, self.mean, self.drift = (
            {name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(5)
        )
        self.before = {name: np.zeros(x) for name, x in shapes.items() if name in ROUNDED_LAST}
        self.heads: dict[tuple[int, int], Elementary] = {}

    def put(
        self,
        name: str,
        index: tuple,
        value: Array,
        error: Error,
        mean: Array | float,
        drift: Array | float = 0.0,
    ) -> None:
        """Add one head's value, error, mean and drift to the result ``name`` at ``index``."""
        self.value[name][index] += value
        self.variance[name][index] += error.variance
        self.bound[name][index] += error.bound
        self.mean[name][index] += mean
        self.drift[name][index] += drift

    def noise(self, stored: Mapping[str, str]) -> Noise:
        """Return the prediction; the results named in ``stored`` are rounded once more, to the format given there."""
        last = {name: np.zeros(x.shape) for name, x in self.value.items()}
        for name, format_name in stored.items():
            if name not in self.value:
                continue
            before = partial(self.value[name], Error(self.variance[name], self.bound[name]))
            after = before.rounded(format_name)
            last[name] = after.local.variance
            self.variance[name], self.bound[name] = after.error.variance, after.error.bound
        for name, mean in self.mean.items():
            self.bound[name] = self.bound[name] + np.abs(mean)
        sd = {name: np.sqrt(x) for name, x in self.variance.items()}
        return Noise(
            sd, self.bound, self.mean, self.drift, self.before, self.attention, self.heads, last
        )


def predict_head(
    attention: Attention,
    used: Recipe,
    geometry: Geometry,
    truncated: tuple[str, ...],
    order: tuple[float, float],
    results: Results,
    index: tuple[int, int],
) -> None:
    """Predict the errors of one key head and of its query heads, and add them to ``results``."""
    (b, h), (same_scores, inner) = index, order
    head = head_of(attention, b, h)
    heads = slice(h * attention.group, (h + 1) * attention.group)
    sources = forward_sources(head, used, geometry, truncated, same_scores, inner)
    rows = row_noise(head, used, sources, truncated)
    lse = np.where(np.isneginf(head.lse), 0.0, head.lse)
    results.put("o", (b, heads), head.o, rows.o, rows.mean, rows.drift)
    results.put("lse", (b, heads), lse, rows.lse, 0.0)
    results.before["o"][b, heads] = rows.before
    at = Elementary(
        deviation(sources.zeta.variance),
        deviation(sources.sigma.variance),
        same_scores,
        deviation(sources.eta.variance),
        np.sqrt(sources.lam.variance),
        np.sqrt(rows.lse.variance),
        root(rows.output),
        tuple(sources.shared),
        {"o": rows.gain},
    )
    if attention.dy is not None:
        read = read_noise(head, used, sources, rows)
        pairs = pair_noise(head, used, sources, read, truncated, inner)
        of_kept = kept_error(head, sources, read, pairs)
        dq = dq_noise(head, used, geometry, sources, read, pairs, truncated)
        dk, dv = dkv_noise(head, used, geometry, read, pairs, of_kept, truncated)
        results.put("dq", (b, heads), dq.value, dq.error, dq.mean, dq.drift)
        results.put("dk", (b, h), dk.value, dk.error, dk.mean, dk.drift)
        results.put("dv", (b, h), dv.value, dv.error, dv.mean, dv.drift)
        for name, place, one in (("dq", heads, dq), ("dk", h, dk), ("dv", h, dv)):
            results.before[name][b, place] = one.before
        at = dataclasses.replace(
            at,
            private=deviation(pairs.private.variance),
            of_ds=deviation(pairs.of_ds.variance),
            kept=deviation(pairs.kept.variance),
            lse_read=np.sqrt(read.lse.variance),
            delta=root(read.delta.variance - read.explained),
            covariance=read.covariance,
            dq=root(dq.local),
            dk=root(dk.local),
            dv=root(dv.local),
            gain={"o": rows.gain, "dq": dq.gain, "dk": dk.gain, "dv": dv.gain},
        )
        if head.sinks is not None:
            at = dataclasses.replace(at, dsinks=np.sqrt(own_of_sinks(head, used).variance))
        put_parameters(results, head, used, at, pairs, read, b, heads)
    results.heads[b, h] = at


def own_of_sinks(head: Head, used: Recipe) -> Error:
    """Return the error of dsinks [G, N] that the rounding of exp(sink - lse) and the sum over rows cause."""
    assert head.sinks is not None and head.delta is not None
    exponent = head.sinks[:, None, :] - head.lse[..., None]
    p = np.exp(exponent)
    term = p * head.delta[..., None]
    of_exponent, of_p = rounding(exponent, used.statistics), rounding(p, used.statistics)
    terms = of_exponent.times(term) + of_p.times(head.delta[..., None])
    squares = (term * term).sum(axis=1)
    of_sum = product_error(term.sum(axis=1), squares, float(p.shape[1]), used.statistics)
    return Error(terms.variance.sum(axis=1), terms.bound.sum(axis=1)) + of_sum


def put_parameters(
    results: Results,
    head: Head,
    used: Recipe,
    at: Elementary,
    pairs: PairNoise,
    read: ReadNoise,
    b: int,
    heads: slice,
) -> None:
    """Predict the errors of dsinks and dbias, which are sums over rows (BWD-8, BWD-9), and add them to ``results``."""
    assert head.delta is not None and head.dz is not None
    if head.sinks is not None:
        p = np.exp(head.sinks[:, None, :] - head.lse[..., None])
        bound = np.abs(head.delta) * pairs.growth + (1 + pairs.growth) * read.delta.bound
        each = [
            sum_of_sinks(head, at, np.broadcast_to(one, head.sinks.shape))
            for one in np.eye(head.sinks.shape[1])
        ]
        variance = np.stack(each, axis=2) + p * p * read.explained[..., None]
        error = Error(variance.sum(axis=1), (p * bound[..., None]).sum(axis=1))
        error = error + own_of_sinks(head, used)
        value = -(p * head.delta[..., None]).sum(axis=1)
        mean, drift = (-(p * x[..., None]).sum(axis=1) for x in (read.mean, read.drift))
        results.put("dsinks", (heads,), value, error, mean, drift)
    if head.biased:
        put_bias(results, head, at, pairs, read, b, heads)


def put_bias(
    results: Results,
    head: Head,
    at: Elementary,
    pairs: PairNoise,
    read: ReadNoise,
    b: int,
    heads: slice,
) -> None:
    """Predict the error of dbias, which is dz summed over the axes along which the bias was broadcast."""
    assert head.dz is not None
    b_size, h_size, n_q, n_k = tuple(results.value["dbias"].shape)
    y = head.p if head.damping is None else head.p * head.damping
    variance = pairs.dz.variance
    if n_k == 1:
        # The sum is over the keys of a row, which share the row's delta.
        variance = sum_of_dz(OfDz.made(head, at, rounded=False), np.ones(head.dz.shape))
        variance = variance + (y.sum(axis=2) ** 2 * read.explained)[..., None]
    index = (b if b_size > 1 else 0, heads if h_size > 1 else slice(0, 1))

    def summed(x: Array) -> Array:
        for axis, size in enumerate((h_size, n_q, n_k)):
            x = x.sum(axis=axis, keepdims=True) if size == 1 else x
        return x

    error = Error(summed(variance), summed(pairs.dz.bound))
    mean, drift = (summed(-y * x[..., None]) for x in (read.mean, read.drift))
    results.put("dbias", index, summed(head.dz), error, mean, drift)
