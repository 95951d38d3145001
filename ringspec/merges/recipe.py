"""A merge recipe: what determines the bits of a merge of partial results, as data.

The rounding points of :mod:`ringspec.recipes` say *where* an implementation rounds. A merge recipe says *what* it
computes when it merges: the formula, its operands' types and order, where it starts, and what it does with empty parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringspec.errors import OptionError, nearest, shown
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32

__all__ = ["GradientSum", "MergeRecipe", "visits"]

ORDERS = ("down", "up", "by_rank", "up_own_last", "down_own_last")
CARRIES = ("float32", "own", "wider")


def visits(order: str, worker: int, workers: int) -> tuple[int, ...]:
    """Return the workers in the order in which ``worker`` merges their parts, or in which an accumulator visits them.

    ``order``: 'down' r, r - 1, ...; 'up' r, r + 1, ...; 'by_rank' 0, 1, ...; 'up_own_last' r + 1, r + 2, ..., r;
    'down_own_last' r - 1, r - 2, ..., r; all modulo W = ``workers``.

    >>> visits("down", 1, 4), visits("up_own_last", 1, 4)
    ((1, 0, 3, 2), (2, 3, 0, 1))
    """
    _one_of("order", order, ORDERS)
    if order == "by_rank":
        return tuple(range(workers))
    step = 1 if order.startswith("up") else -1
    first = 1 if order.endswith("own_last") else 0
    return tuple((worker + step * (first + t)) % workers for t in range(workers))


@dataclass(frozen=True)
class GradientSum:
    """How the contributions to a gradient are added.

    ``order`` is an order of :func:`visits`: for dq of worker r, the owners of the keys; for dk and dv of worker r, the
    workers whose queries contribute. ``carried`` is the format in which the sum is kept after each step: 'float32', or
    'own', the format of the contributions; then each sum is a float32 sum that is rounded to this format. ``start`` is
    'first' (a copy of the first contribution) or 'zeros', to which the first one is added, so that -0 becomes +0.
    ``result`` is the format of the result: 'own', 'carried', or the name of a format where an implementation has one.
    """

    order: str
    carried: str
    start: str
    result: str = "own"

    def __post_init__(self) -> None:
        _one_of("order", self.order, ORDERS)
        _one_of("carried", self.carried, ("float32", "own"))
        _one_of("start", self.start, ("first", "zeros"))
        _one_of("result", self.result, ("own", "carried", "bfloat16", "float16", "float32"))


@dataclass(frozen=True)
class MergeRecipe:
    """The arithmetic of one merge of partial results.

    ``name``      name of the recipe
    ``form``      the formula, a key of ``ringspec.merges.FORMS``; the file of the form has it in its docstring
    ``order``     order in which worker r merges the parts, see :func:`visits`
    ``carried_o``  format of o after each step: 'float32'; 'own', the format of the parts; 'wider', the wider of o's
                  format and that of the weights, as type promotion gives it
    ``start``     'first': o starts as that of the first part; 'zeros': as 0, to which the first part is added
    ``products_rounded``  whether each weighted o is rounded to ``carried_o`` before the sum is (two roundings a step)
    ``earlier_rounded``  in the form 'rescaling': whether the rescaled earlier o is rounded to ``carried_o`` before the next
                  part is added
    ``base``      'e' or '2': base of the exponential and logarithm of the given lse
    ``natural_result``  in base 2: whether the merged lse is divided by float32 log2(e) at the end, so that the result is a
                  natural logarithm; the weights come from the lse before
    ``empty_lse``  values of a part's lse that are read as -inf: 'inf', 'nan'
    ``skips``     what is left out of the sum: 'nothing', 'zero_weight' (of a part whose weight is 0, +0 is added, even if its o is NaN),
                  'zero_o' (an element of o that is 0, even if its weight is NaN)
    ``weights``, ``sum_tree``  in the form 'all_parts': how a part is weighted, and how the exponentials are added
    ``all_empty``  in the forms 'pair', 'all_parts' and 'state': lse of a row that no part saw, '-inf', 'inf' or '0'; o is then 0, or
                  in the form 'pair' as ``empty_o`` says. 'as_computed': what the operations give
    ``fma``       whether the sum of a product and an addend is contracted to a fused multiply-add
    ``fused``     in the form 'pair', whose sum has two products: the one that is not rounded by itself, that of the 'part' or of
                  the 'earlier' o
    ``empty_o``   in the form 'pair', if ``all_empty`` is not 'as_computed': o of a row that no part saw, 'first' or 'zero'
    ``dq``, ``dkv``  sums of the gradients (:class:`GradientSum`); None if the implementation has no backward pass, or none
                  was read
    ``source``    repository, path and commit or release
    ``versions``  releases for which the recipe holds, as far as known
    ``compared_with``  the real code whose results were compared with the recipe's, and how; None: it was only written from the source
    ``gradients_compared_with``  the same for ``dq`` and ``dkv``
    ``note``      one sentence

    A recipe may give NaN where its original does. That describes the original, and excuses nothing in a verdict.
    """

    name: str
    form: str
    order: str
    carried_o: str = "float32"
    start: str = "first"
    products_rounded: bool = False
    earlier_rounded: bool = True
    base: str = "e"
    natural_result: bool = False
    empty_lse: tuple[str, ...] = ()
    skips: str = "nothing"
    weights: str = "lse"
    sum_tree: str = "sequential"
    all_empty: str = "as_computed"
    fma: bool = False
    fused: str = "part"
    empty_o: str = "first"
    dq: GradientSum | None = None
    dkv: GradientSum | None = None
    source: str = ""
    versions: str = ""
    compared_with: str | None = None
    gradients_compared_with: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _one_of("order", self.order, ORDERS)
        _one_of("carried_o", self.carried_o, CARRIES)
        _one_of("start", self.start, ("first", "zeros"))
        _one_of("base", self.base, ("e", "2"))
        _one_of("skips", self.skips, ("nothing", "zero_weight", "zero_o"))
        _one_of("weights", self.weights, ("lse", "ratio", "reciprocal", "end"))
        _one_of("sum_tree", self.sum_tree, ("sequential", "halves", "neighbours"))
        _one_of("all_empty", self.all_empty, ("as_computed", "-inf", "inf", "0"))
        _one_of("fused", self.fused, ("part", "earlier"))
        _one_of("empty_o", self.empty_o, ("first", "zero"))
        for mark in self.empty_lse:
            _one_of("empty_lse", mark, ("inf", "nan"))
        for flag in ("products_rounded", "earlier_rounded", "fma", "natural_result"):
            if not isinstance(getattr(self, flag), bool):
                got = shown(getattr(self, flag))
                raise OptionError(f"{flag} as True or False", got, f"write {flag}=True")
        if self.natural_result and self.base == "e":
            expected = "natural_result=True only with base='2'"
            raise OptionError(expected, "base='e'", "leave out natural_result: lse is natural")

    def carried_in(self, own: str) -> str:
        """Return the format in which o is carried between steps, for parts of the format ``own``."""
        return own if self.carried_o == "own" else "float32"

    def exponential(self, functions: Functions) -> Callable[[Float32], Float32]:
        """Return exp or exp2 of ``functions``, after ``base``."""
        return functions.exp if self.base == "e" else functions.exp2

    def logarithm(self, functions: Functions) -> Callable[[Float32], Float32]:
        """Return log or log2 of ``functions``, after ``base``."""
        return functions.log if self.base == "e" else functions.log2

    @property
    def unit(self) -> float:
        """The natural logarithm of the base of the given lse: lse * unit is natural."""
        return math.log(2.0) if self.base == "2" else 1.0

    @property
    def result_unit(self) -> float:
        """The natural logarithm of the base of the merged lse."""
        return 1.0 if self.natural_result else self.unit

    def replace(self, **changes: Any) -> MergeRecipe:
        """Return a copy with some fields changed; give it a new ``name``. What it was compared with becomes None.

        An unknown field raises OptionError.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                expected = "a field of a merge recipe"
                raise OptionError(expected, shown(name), nearest(name, known), code="unknown-name")
        return dataclasses.replace(
            self, **{"compared_with": None, "gradients_compared_with": None, **changes}
        )


def _one_of(what: str, given: Any, known: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in known:
        expected = f"{what} as one of {', '.join(map(repr, known))}"
        raise OptionError(expected, shown(given), nearest(given, known), code="unknown-name")
