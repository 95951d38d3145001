"""The smallest defect that is seen: by whole-tensor tests, and by tolerance rules in use elsewhere.

For ringspec a size is computed (:mod:`benchmarks.power_reach`), at the false-alarm rate of one
case. It can be confirmed by adding the defect to a correct kernel's results and making all tests of
the tensor. For the rules it is found by bisection on sizes of :data:`PER_DECADE` steps a decade,
with the same results.

Only o, dq, dk, dv are compared: of a kernel that returns its lse much less is needed
(``with_lse``). The bounds of single rows, which the suite has as well, are left out, so that it sees
at least what is said here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.power_defects import Defect, defects_of, wrong_diagonal
from benchmarks.power_problem import Asked, Named, Setting, setting_of
from benchmarks.power_reach import CASE, TESTS, deviations_of, reach, reach_in
from benchmarks.rivals import RULES, Rule, Seen
from benchmarks.rivals_naive import naive_of, sizes

from ringspec.compare.statistics.tests import alarms, errors_of, examine
from ringspec.compare.statistics.types import Test

PER_DECADE = 10
SMALLEST = 1e-5  # size that is tried on the rules
PASSES = {"forward": ("o",), "gradients": ("o", "dq", "dk", "dv")}


@dataclass(frozen=True)
class Outcome:
    """What a rule makes of a defect in one pass.

    ``size``: the smallest that fails (wrong rows: the largest n), None if none does.
    ``refuses``: the rule fails a correct result, and so says nothing.
    """

    size: float | None
    refuses: bool = False


@dataclass(frozen=True)
class Row:
    """One defect in one pass.

    ``size``        smallest that ringspec detects, in ``tensor`` (wrong rows: the largest n), or None
    ``with_lse``    the same where lse is compared as well
    ``by_tensor``   smallest in each tensor alone
    ``deviations``  of a defect with a largest size: predicted standard deviations that this makes
    ``confirmed``   whether the injected defect was found; None: not tried
    """

    name: str
    words: str
    unit: str
    passes: str
    size: float | None
    tensor: str | None
    with_lse: float | None
    by_tensor: Mapping[str, float | None]
    rivals: Mapping[str, Outcome]
    mass: float | None = None
    deviations: float | None = None
    confirmed: bool | None = None


@dataclass(frozen=True)
class Power:
    """All rows, and whether the correct kernel passed the tests that were made of it (None: none were)."""

    asked: Asked
    rows: tuple[Row, ...]
    correct: bool | None
    rate: float = CASE
    tests: int = TESTS
    rules: Sequence[Rule] = field(default=RULES, repr=False)


def measure(asked: Asked, *, confirm: bool = True) -> Power:
    """Measure one problem.

    >>> power = measure(Asked(tokens=64, head_dim=16, workers=2, gradients=False), confirm=False)
    >>> [row.name for row in power.rows]
    ['factor', 'scale', 'offset', 'hop', 'truncation', 'diagonal']
    """
    setting = setting_of(asked)
    rivals = Rivals(setting)
    groups = [name for name in PASSES if name == "forward" or asked.gradients]
    rows: list[Row] = []
    for defect in defects_of(setting):
        found = reach(setting, defect.direction)
        for passes in groups:
            rows.append(sized(setting, rivals, defect, passes, found, confirm))
    if asked.causal and asked.tokens > 1:
        rows += [diagonal(setting, rivals, passes, confirm) for passes in groups]
    order = {name: n for n, name in enumerate(groups)}
    rows.sort(key=lambda row: order[row.passes])
    correct = None
    if confirm:
        tensors = sorted({row.tensor for row in rows if row.tensor is not None})
        correct = not found_in(setting, setting.got(), tensors)
    return Power(asked, tuple(rows), correct)


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def sized(
    setting: Setting,
    rivals: Rivals,
    defect: Defect,
    passes: str,
    found: Mapping[str, float],
    confirm: bool,
) -> Row:
    """A defect that has a size, in one pass."""
    names = PASSES[passes]
    within = {name: x if x <= defect.most else math.inf for name, x in found.items()}
    tensor = min(names, key=lambda name: within[name])
    size = within[tensor]
    confirmed = None
    if confirm and math.isfinite(size):
        confirmed = bool(found_in(setting, injected(setting, defect, size), [tensor]))
    deviations = None
    if defect.most == 1.0:
        deviations = max(deviations_of(setting, name, defect.direction[name]) for name in names)
    return Row(
        defect.name,
        defect.words,
        defect.unit,
        passes,
        finite(size),
        tensor if math.isfinite(size) else None,
        finite(min(within[name] for name in (*names, "lse") if name in within)),
        {name: finite(within[name]) for name in names},
        rivals.smallest(defect, names),
        defect.mass,
        deviations,
        confirmed,
    )


def injected(setting: Setting, defect: Defect, size: float) -> Named:
    """A kernel's results with the defect: a wrong scale is computed with, others are added."""
    if defect.name == "scale":
        return setting.got(wide=setting.simulated(setting.problem.terms.scale * (1.0 + size)))
    return setting.got(defect.pattern(size))


def found_in(setting: Setting, got: Named, tensors: Sequence[str]) -> tuple[Test, ...]:
    """The alarms of all tests of some tensors, at the false-alarm rate of a case."""
    tests: list[Test] = []
    for name in tensors:
        truth = setting.truth[name]
        tests += examine(
            name, errors_of(got[name], truth), truth, setting.noise, setting.strata[name],
            allowance=setting.allowance(name), direction=setting.directions[name],
        )  # fmt: skip
    return alarms(tests, CASE, count=TESTS)


def diagonal(setting: Setting, rivals: Rivals, passes: str, confirm: bool) -> Row:
    """The largest n, a power of 2, such that one wrong row in n is detected."""
    names = PASSES[passes]
    counts = [1 << e for e in range(max(setting.asked.tokens // 2, 1).bit_length() - 1, -1, -1)]

    def largest(
        seen: Callable[[Named, str], bool], among: Sequence[str]
    ) -> tuple[int | None, str | None]:
        for n in counts:
            pattern = wrong_diagonal(setting, n)
            for name in among:
                if seen(pattern, name):
                    return n, name
        return None, None

    def seen(pattern: Named, name: str) -> bool:
        return reach_in(setting, name, pattern[name]) <= 1.0

    n, tensor = largest(seen, names)
    by_tensor = {name: largest(seen, [name])[0] for name in names}
    confirmed = None
    if confirm and n is not None and tensor is not None:
        got = setting.got(wrong_diagonal(setting, n))
        confirmed = bool(found_in(setting, got, [tensor]))
    return Row(
        "diagonal", "wrong diagonal in one row of n, second half", "n", passes, n, tensor,
        largest(seen, (*names, "lse"))[0], by_tensor, rivals.rows(counts, names), confirmed=confirmed,
    )  # fmt: skip


class Rivals:
    """The rules on one problem, with what they compare with."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        format, seed = setting.recipe.outputs, setting.asked.seed
        self.naive = naive_of(setting.attention, format)
        self.perturbed = naive_of(setting.attention, format, seed)
        self.sizes = sizes(setting.attention)
        self.refused = {
            passes: {rule.name: not self.passes(rule, None, names) for rule in RULES}
            for passes, names in PASSES.items()
            if set(names) <= set(self.naive)
        }

    def passes(self, rule: Rule, pattern: Named | None, names: Sequence[str]) -> bool:
        """Whether the results with an error pass a rule in all of some tensors."""
        return all(rule.passes(seen) for seen in self.with_error(pattern, names))

    def with_error(self, pattern: Named | None, names: Sequence[str]) -> list[Seen]:
        """What the rules see of some tensors."""
        got = self.setting.got(None if pattern is None else {name: pattern[name] for name in names})
        return [self.seen(name, got[name]) for name in names]

    def seen(self, name: str, got: Any) -> Seen:
        size, length = self.sizes[name]
        return Seen(
            got, self.setting.truth[name], self.naive[name], self.perturbed[name], size, length,
            self.setting.format_of(name),
        )  # fmt: skip

    def smallest(self, defect: Defect, names: Sequence[str]) -> dict[str, Outcome]:
        """By rule, the smallest size on the grid that fails."""
        last = round(math.log10(defect.most / SMALLEST) * PER_DECADE)
        grid = [defect.most * 10 ** ((k - last) / PER_DECADE) for k in range(last + 1)]
        return self.bisected(names, lambda k: defect.pattern(grid[k]), grid)

    def rows(self, counts: Sequence[int], names: Sequence[str]) -> dict[str, Outcome]:
        """By rule, the largest n of a wrong row in n that fails; ``counts`` falls."""
        patterns = {n: wrong_diagonal(self.setting, n) for n in counts}
        return self.bisected(names, lambda k: patterns[counts[k]], [float(n) for n in counts])

    def bisected(
        self, names: Sequence[str], pattern: Callable[[int], Named], grid: Sequence[float]
    ) -> dict[str, Outcome]:
        """By rule, the first place of a grid of growing defects that fails."""
        refused = self.refused["forward" if len(names) == 1 else "gradients"]
        results = cache(lambda k: self.with_error(pattern(k), names))
        found = {}
        for rule in RULES:
            if refused[rule.name]:
                found[rule.name] = Outcome(None, True)
                continue
            low, high = -1, len(grid)  # low passes, high fails
            while high - low > 1:
                middle = (low + high) // 2
                if all(rule.passes(seen) for seen in results(middle)):
                    low = middle
                else:
                    high = middle
            found[rule.name] = Outcome(grid[high] if high < len(grid) else None)
        return found
