"""Tolerance rules in use elsewhere, as functions of one tensor: what do they let pass?

They are here to be measured beside the tests of this package (``power.py`` and ``kill_table.py``); no verdict of ringspec uses them. A rule sees a :class:`Seen` and says whether it passes;
a result passes a rule where each of its tensors does. Every comparison fails on NaN.

=============  ====================================================================================
max-1e-2       \\|err\\| <= 1e-2 max\\|truth\\| + 1e-3, of a public suite for ring kernels
max-2e-2       \\|err\\| <= 2e-2 max\\|truth\\| + 1e-5
naive-x2       largest error at most twice that of a naive implementation in the same format
assert_close   torch.testing.assert_close with its defaults for the format
dual-delta     errors not stochastically larger than those of a naive implementation
ttrace         Frobenius error at most 3 times what perturbed inputs make
tosa           bound, bias and variance of a dot product's errors, in units of u sum \\|a b\\|
=============  ====================================================================================

Sources: docs/conform/power.md; what is assumed where one leaves a choice is said in the function. The naive implementation is
:func:`benchmarks.rivals_naive.naive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import format_of, round_to, unit_roundoff

Array = NDArray[np.float64]
# rtol, atol of torch.testing.assert_close by dtype; other dtypes are compared exactly.
CLOSE = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}
ALPHA = 0.01  # of the two tests of dual_delta
PERTURBED = 3.0  # times the estimated rounding error that ttrace allows


@dataclass(frozen=True)
class Seen:
    """One tensor of one problem, float64 arrays of one shape, [B, H, S, d] or another.

    ``got``        the result under test, numbers of ``format``
    ``truth``      the right values
    ``naive``      those of a naive implementation in ``format``
    ``perturbed``  the same of inputs that were perturbed by one machine epsilon
    ``size``       the dot product of the absolute values of the operands of the last product
    ``length``     terms of that product
    """

    got: Array
    truth: Array
    naive: Array
    perturbed: Array
    size: Array
    length: int
    format: str


@dataclass(frozen=True)
class Rule:
    """A tolerance rule: its ``name``, what it says in ``words``, its ``source``, where it is in use.

    ``passes(seen)`` is the rule itself: True where it accepts the tensor.
    """

    name: str
    words: str
    source: str
    passes: Callable[[Seen], bool]


def largest(x: Array) -> float:
    """max|x|, 0 of nothing, NaN if x has one."""
    return float(np.abs(x).max()) if x.size else 0.0


def max_scaled(seen: Seen, relative: float, absolute: float) -> bool:
    """max|got - truth| <= relative * max|truth| + absolute: one limit for the whole tensor."""
    limit = relative * largest(seen.truth) + absolute
    return largest(seen.got - seen.truth) <= limit


def max_scaled_1e2(seen: Seen) -> bool:
    """:func:`max_scaled` with 1e-2 and 1e-3."""
    return max_scaled(seen, 1e-2, 1e-3)


def max_scaled_2e2(seen: Seen) -> bool:
    """:func:`max_scaled` with 2e-2 and 1e-5."""
    return max_scaled(seen, 2e-2, 1e-5)


def twice_naive(seen: Seen) -> bool:
    """max|got - truth| <= 2 max|naive - truth|, the rule of FlashAttention's tests for outputs.

    Some of them allow 3 for gradients, and newer ones two more ulps; 2 is used for all tensors here.
    """
    return largest(seen.got - seen.truth) <= 2.0 * largest(seen.naive - seen.truth)


def assert_close(seen: Seen) -> bool:
    """|got - expected| <= atol + rtol |expected| for every element, expected in the same format.

    ``expected`` is the truth rounded to the format, because dtypes must agree.
    """
    expected = round_to(seen.truth, seen.format)
    rtol, atol = CLOSE.get(seen.format, (0.0, 0.0))
    return bool(np.all(np.abs(seen.got - expected) <= atol + rtol * np.abs(expected)))


def dual_delta(seen: Seen) -> bool:
    """The absolute errors are not stochastically larger than those of the naive implementation.

    The paper compares two distributions of errors against an oracle of high precision, with summary
    statistics, plots and non-parametric tests (Wilcoxon, Kolmogorov-Smirnov). Known here are its abstract and
    summaries, not its text, so this is assumed: both tests, one-sided, each at 1 %, on the
    absolute errors of all elements. Two-sided they would refuse a kernel for being better than naive.
    """
    mine, other = np.abs(seen.got - seen.truth).ravel(), np.abs(seen.naive - seen.truth).ravel()
    if not np.isfinite(mine).all():
        return False
    return smirnov_p(mine, other) >= ALPHA and rank_sum_p(mine, other) >= ALPHA


def smirnov_p(x: Array, y: Array) -> float:
    """p-value of the one-sided two-sample Kolmogorov-Smirnov test of "x is larger" (asymptotic).

    >>> smirnov_p(np.arange(100.0) + 30, np.arange(100.0)) < 1e-3, smirnov_p(np.zeros(9), np.ones(9))
    (True, 1.0)
    """
    x, y = np.sort(x), np.sort(y)
    below_x = np.searchsorted(x, y, side="right") / x.size
    below_y = np.arange(1, y.size + 1) / y.size
    distance = max(0.0, float((below_y - below_x).max(initial=0.0)))
    return math.exp(-2.0 * distance**2 * x.size * y.size / (x.size + y.size))


def rank_sum_p(x: Array, y: Array) -> float:
    """p-value of Wilcoxon's rank-sum test of "x is larger", normal approximation.

    >>> round(rank_sum_p(np.arange(50.0), np.arange(50.0)), 3)
    0.5
    """
    y = np.sort(y)
    pairs = np.searchsorted(y, x, side="left") + np.searchsorted(y, x, side="right")
    wins = 0.5 * float(pairs.sum(dtype=np.float64))
    n, m = x.size, y.size
    z = (wins - 0.5 * n * m) / math.sqrt(n * m * (n + m + 1) / 12.0)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def frobenius(x: Array, reference: Array) -> float:
    """||x - reference|| / ||reference||."""
    norm = float(np.linalg.norm(reference))
    return float(np.linalg.norm(x - reference)) / norm if norm > 0 else math.inf


def ttrace(seen: Seen) -> bool:
    """The relative Frobenius distance from a trusted reference is at most a multiple of what rounding makes.

    The paper compares with a reference implementation on one device, in the precision of the run, and estimates
    the rounding error from a second run of it on inputs that are perturbed by about one
    machine epsilon. Known here are abstract, summaries and the metric as other projects use it
    (||a - b|| / ||a||), not the text; assumed are: the reference is the naive
    implementation; each input is multiplied by 1 +- eps; the multiple is 3. Uses of its theorem 5.3 elsewhere
    allow 4 to 5 machine epsilons.
    """
    allowed = PERTURBED * frobenius(seen.perturbed, seen.naive)
    return frobenius(seen.got, seen.naive) <= allowed


def tosa(seen: Seen) -> bool:
    """The three tests of a dot product in TOSA's conformance suite, on errors in units of u sum|a b|.

    With T results and the kernel size bound ksb: each |e| <= 2 ksb; sum e^2 <= 1.6 ksb T; and
    |sum e| <= sqrt(16 ksb T), which TOSA makes for its data sets without a preferred sign. As in the
    verifier of the reference model (version 1.0; the older one has KS, 0.4 KS T and 2 sqrt(KS T)).

    Assumed: ksb = ceil(KS / 2^(bits of float32 - bits of the format)), at least 1, for sums in
    float32; the rule is for a dot product of exact operands, and is applied to attention's last product
    as if P and dS were exact; TOSA's own data sets are operands of a product and have no counterpart.
    """
    given = format_of(seen.format)
    u = unit_roundoff(seen.format)
    wider = max(format_of("float32").precision - given.precision, 0)
    bound = max(1, math.ceil(seen.length / 2**wider))
    error = seen.got - seen.truth
    exact = seen.size == 0
    if not np.all(error[exact] == 0):
        return False
    unit = np.maximum(seen.size[~exact] * u, 2.0**given.min_exponent)
    e = error[~exact] / unit
    variance = 1.6 * bound * e.size
    within = bool(np.all(np.abs(e) <= 2 * bound))
    return within and float(e @ e) <= variance and abs(float(e.sum())) <= math.sqrt(10 * variance)


RULES = (
    Rule(
        "max-1e-2",
        "|err| <= 1e-2 max|truth| + 1e-3",
        "https://github.com/aws-neuron/nki-library/blob/main/test/integration/nkilib/"
        "experimental/attention/test_ring_attention_fwd.py",
        max_scaled_1e2,
    ),
    Rule(
        "max-2e-2",
        "|err| <= 2e-2 max|truth| + 1e-5",
        "https://github.com/aws-neuron/nki-library/blob/main/test/utils/comparators.py",
        max_scaled_2e2,
    ),
    Rule(
        "naive-x2",
        "max|err| at most twice that of a naive implementation in the same format",
        "https://github.com/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py",
        twice_naive,
    ),
    Rule(
        "assert_close",
        "torch.testing.assert_close with its defaults for the format",
        "https://docs.pytorch.org/docs/stable/testing.html",
        assert_close,
    ),
    Rule(
        "dual-delta",
        "errors not stochastically larger than those of a naive implementation",
        "https://arxiv.org/abs/2602.10605",
        dual_delta,
    ),
    Rule(
        "ttrace",
        "distance from a naive implementation at most 3 times what perturbed inputs make",
        "https://arxiv.org/abs/2506.09280",
        ttrace,
    ),
    Rule(
        "tosa",
        "bound, bias and variance of dot product errors",
        "https://www.mlplatform.org/tosa/tosa_spec.html",
        tosa,
    ),
)
"""All rules, in the order of the tables."""
