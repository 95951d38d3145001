"""Merge partial results with a merge recipe: check the parts, evaluate the form, round the output once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import DtypeError, OptionError, ShapeError, nearest, shown
from ringspec.formats import name_of, store
from ringspec.merges.forms.all_parts import all_parts
from ringspec.merges.forms.pair import pair
from ringspec.merges.forms.parts import Part
from ringspec.merges.forms.running_lse import rescaling, two_passes
from ringspec.merges.forms.sigmoid import sigmoid
from ringspec.merges.forms.state import state
from ringspec.merges.functions import NUMPY, Functions
from ringspec.merges.numbers import Float32
from ringspec.merges.recipe import MergeRecipe
from ringspec.merges.table import MERGES

__all__ = ["FORMS", "as_parts", "evaluate", "merge", "merge_recipe"]

Form = Callable[[Sequence[Part], MergeRecipe, Functions, str], tuple[Float32, Float32]]

FORMS: dict[str, Form] = {
    "sigmoid": sigmoid,
    "two_passes": two_passes,
    "rescaling": rescaling,
    "pair": pair,
    "all_parts": all_parts,
    "state": state,
}

LOG2_E = np.float32(1 / math.log(2.0))
STORED = ("float32", "bfloat16", "float16")


def merge_recipe(which: str | MergeRecipe) -> MergeRecipe:
    """Return the merge recipe called ``which``, or ``which`` itself if it is one; OptionError for an unknown name.

    >>> merge_recipe("te_p2")
    Traceback (most recent call last):
    ringspec.errors.OptionError: expected the name of a merge recipe, or a MergeRecipe; got 'te_p2'. Fix: write 'te_p2p'.
    """
    if isinstance(which, MergeRecipe):
        found = which
    elif isinstance(which, str) and which in MERGES:
        found = MERGES[which]
    else:
        expected = "the name of a merge recipe, or a MergeRecipe"
        raise OptionError(expected, shown(which), nearest(which, MERGES), code="unknown-name")
    if found.form not in FORMS:
        fix = nearest(found.form, FORMS)
        raise OptionError("the form of a merge", shown(found.form), fix, code="unknown-name")
    return found


def merge(
    parts: Any, recipe: str | MergeRecipe, functions: Any = None
) -> tuple[NDArray[Any], Float32]:
    """Merge partial results, in the order in which they are given, with the arithmetic of ``recipe``.

    ``parts`` are pairs (o, lse) or :class:`~ringspec.merges.Part`, in the recipe's order (:func:`~ringspec.merges.visits`
    gives it for a worker of a ring). o [..., Dv] is a NumPy array of float32, bfloat16 or float16; lse [...] is float32, -inf
    where a part saw no key; NaN and +inf are allowed, because implementations differ in what they make of them.
    ``functions`` are the elementary functions, NumPy's if None.

    Returns o [..., Dv], in the dtype of the parts' o, and lse [...], float32: the bits of the implementation that the recipe
    describes, if ``functions`` are its elementary functions and the recipe is right. A recipe without ``compared_with`` was
    only written from the source, and may be wrong. Raises OptionError for an unknown recipe, DtypeError and ShapeError for
    parts of other types or shapes.

    >>> import numpy as np
    >>> o, lse = np.ones((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2), np.float32)
    >>> whole, total = merge([(o, lse), (3 * o, lse)], "torch_cp")
    >>> float(whole[0, 0, 0, 0]), round(float(total[0, 0, 0]), 4)
    (2.0, 0.6931)
    """
    given = NUMPY if functions is None else functions
    if not isinstance(given, Functions):
        fix = "pass ringspec.merges.Functions(exp=...)"
        raise OptionError("functions as ringspec.merges.Functions, or None", shown(given), fix)
    o, lse, own = evaluate(parts, recipe, given)
    return (o, lse) if own == "float32" else (store(o, own), lse)


def evaluate(
    parts: Any, recipe: str | MergeRecipe, functions: Functions
) -> tuple[Float32, Float32, str]:
    """Merge as :func:`merge` does, and return o and lse as float32, before o is stored in the format of the parts, and it."""
    used = merge_recipe(recipe)
    checked = as_parts(parts)
    if used.form == "all_parts" and any(part.rows is not None for part in checked):
        fix = "give the other rows of such a part lse=-inf and o=0"
        raise OptionError(
            f"parts of all rows for the recipe {used.name!r}", "a part with rows", fix
        )
    if used.form != "state" and any(part.sums is not None for part in checked):
        fix = "normalise the parts, or choose a recipe of the form 'state'"
        raise OptionError(f"normalised parts for the recipe {used.name!r}", "a part with sums", fix)
    own = name_of(checked[0].o.dtype)
    assert own is not None
    readable = [_emptied(part, used) for part in checked]
    o, lse = FORMS[used.form](readable, used, functions, own)
    if used.natural_result:
        lse = functions.divide(lse, LOG2_E)
    return o, lse, own


def as_parts(parts: Any) -> list[Part]:
    """Check partial results and return them as a list of :class:`~ringspec.merges.Part`; see :func:`merge`."""
    if not isinstance(parts, (list, tuple)) or not parts:
        fix = "pass [(o_0, lse_0), ...]"
        raise ShapeError("a list of at least one pair (o, lse) or Part", shown(parts), fix)
    found = [_as_part(one, number) for number, one in enumerate(parts)]
    first = found[0]
    if first.rows is not None:
        fix = "give the part that covers all rows first"
        raise ShapeError("part 0 with rows=None", f"rows={shown(first.rows)}", fix)
    for number, part in enumerate(found):
        o_shape = first.o.shape if part.rows is None else first.o[part.rows].shape
        if part.o.shape != o_shape:
            expected = f"o of part {number} of shape {o_shape}, the rows that it covers"
            raise ShapeError(expected, f"shape {part.o.shape}", "pass parts of the same query rows")
        if part.o.dtype != first.o.dtype:
            expected = f"o of part {number} of dtype {first.o.dtype}, as that of part 0"
            raise DtypeError(expected, f"dtype {part.o.dtype}", "round all parts to one format")
    return found


def _as_part(one: Any, number: int) -> Part:
    if not isinstance(one, Part):
        if not isinstance(one, (list, tuple)) or len(one) != 2:
            fix = "pass (o, lse), or ringspec.merges.Part"
            raise ShapeError(f"part {number} as a pair (o, lse)", shown(one), fix)
        one = Part(*one)
    arrays = {"o": one.o, "lse": one.lse} | ({} if one.sums is None else {"sums": one.sums})
    for name, x in arrays.items():
        known = STORED if name == "o" else ("float32",)
        if not isinstance(x, np.ndarray) or name_of(x.dtype) not in known:
            got = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else shown(x)
            fix = "convert it with ringspec.formats.store(x, format)"
            expected = f"{name} of part {number} as a NumPy array of {' or '.join(known)}"
            raise DtypeError(expected, got, fix)
        if name != "o" and x.shape != one.o.shape[:-1]:
            expected = f"{name} of part {number} of shape {one.o.shape[:-1]}, that of o without its last axis"
            raise ShapeError(expected, f"shape {x.shape}", "move its axes to those of o")
    return one


def _emptied(part: Part, recipe: MergeRecipe) -> Part:
    """Return the part with the values of its lse that mark an empty row replaced by -inf."""
    marked = np.zeros(part.lse.shape, bool)
    for mark in recipe.empty_lse:
        marked |= np.isnan(part.lse) if mark == "nan" else np.isposinf(part.lse)
    if not marked.any():
        return part
    lse = np.where(marked, np.float32(-np.inf), part.lse)
    return Part(part.o, lse, part.rows, part.sums)
