"""The public merge of partial results: exact in form, or with the arithmetic of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringspec import merges
from ringspec.errors import NonFiniteError, OptionError, ShapeError, nearest, shown
from ringspec.formats import load
from ringspec.merges import MERGES, Functions, MergeRecipe, Part
from ringspec.problem.checks import check_partials
from ringspec.recipes import RECIPES, Recipe
from ringspec.spec.dense_forward import Forward
from ringspec.spec.online_softmax import SoftmaxState, finish, merge_all, start
from ringspec.spec.ring_forward import merge_states


def merge_partials(
    parts: Sequence[Any],
    recipe: str | MergeRecipe | Recipe | None = None,
    functions: Functions | None = None,
) -> Forward:
    """Merge partial results (o_n, lse_n) over disjoint keys into the result over all keys.

    ``parts`` is a list of pairs (o_n [B, H, S, Dv], lse_n [B, H, S]). lse_n is a natural log, and -inf where a part saw
    no key. Without ``recipe``, the result is lse = log sum exp lse_n, o = sum exp(lse_n - lse) o_n in float64 (SOFT-2,
    SOFT-3, SOFT-4). Raises :class:`~ringspec.errors.ShapeError` if the list is empty or the shapes differ.

    With ``recipe``, the parts are merged in the order given, with the arithmetic that the recipe describes:

    - The name of a merge recipe (a key of ``ringspec.merges.MERGES``, such as 'te_p2p'), or a
      :class:`~ringspec.merges.MergeRecipe`: the arithmetic of a public implementation. The bits are those of
      the implementation if the recipe was compared with it (``compared_with``) and ``functions`` are its elementary
      functions (:class:`~ringspec.merges.Functions`; None: NumPy's). :func:`ringspec.merges.merge` describes the parts. o has
      the dtype of the parts, lse is float32. Special values are results, not errors.
    - The name of a recipe of rounding points (a key of ``ringspec.RECIPES``, such as 'bf16_partials'), or a
      :class:`~ringspec.Recipe`: the arithmetic of the specification's ring, float64 arrays. A part is a pair, or a
      :class:`~ringspec.merges.Part` with ``sums`` for an unnormalised part (m, l, o). ``functions`` must be None.

    Raises :class:`~ringspec.errors.OptionError` for an unknown recipe, or for functions where none are used.

    >>> import numpy as np
    >>> o, lse = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1))
    >>> merge_partials([(o, lse), (3 * o, lse + np.log(3.0))]).o.tolist()
    [[[[2.5, 2.5]]]]
    >>> o, lse = o.astype(np.float32), lse.astype(np.float32)
    >>> merge_partials([(o, lse), (3 * o, lse)], recipe="te_p2p").o.dtype
    dtype('float32')
    """
    if recipe is None:
        refuse_functions(functions, "a merge without a recipe")
        return exact_merge(parts)
    chosen = either_recipe(recipe)
    if isinstance(chosen, MergeRecipe):
        o, lse = merges.merge(parts, chosen, functions)
        return Forward(o, lse)  # type: ignore[arg-type]  # in the formats of the implementation
    refuse_functions(functions, f"the recipe of rounding points {chosen.name!r}")
    return ring_merge(parts, chosen)


def exact_merge(parts: Any) -> Forward:
    """Merge pairs (o, lse) in float64; see :func:`merge_partials`."""
    pairs = check_partials(parts)
    if len({o.shape for o, _ in pairs}) != 1:
        raise ShapeError(
            "at least one pair (o, lse), all of the same shape",
            str([o.shape for o, _ in pairs]),
            "pass parts of the same query rows",
        )
    return Forward(*merge_all(pairs))


def either_recipe(which: Any) -> MergeRecipe | Recipe:
    """Return the merge recipe or the recipe of rounding points called ``which``, or ``which`` itself if it is one."""
    if isinstance(which, (MergeRecipe, Recipe)):
        return which
    if isinstance(which, str):
        if which in MERGES:
            return MERGES[which]
        if which in RECIPES:
            return RECIPES[which]
    raise OptionError(
        "the name of a merge recipe or of a recipe of rounding points, or one of these",
        shown(which),
        nearest(which, [*MERGES, *RECIPES]),
        code="unknown-name",
    )


def refuse_functions(functions: Any, where: str) -> None:
    """Raise OptionError if elementary functions are given where NumPy's are always used."""
    if functions is not None:
        expected = f"functions=None with {where}, which computes in float64"
        raise OptionError(expected, shown(functions), "leave out functions, or name a merge recipe")


def ring_merge(parts: Any, recipe: Recipe) -> Forward:
    """Merge ``parts`` one after the other as the specification's ring does with ``recipe``, and round the results."""
    states = [softmax_state(part, number) for number, part in enumerate(nonempty(parts))]
    shapes = {state.o.shape for state in states}
    if len(shapes) != 1:
        expected = "parts of the same shape"
        raise ShapeError(expected, str(sorted(shapes)), "pass parts of the same query rows")
    batch, heads, length, width = states[0].o.shape
    running = start(batch, heads, length, width)
    for state in states:
        running = merge_states(running, state, recipe)
    return Forward(*finish(running, None, recipe))


def nonempty(parts: Any) -> Any:
    """Return ``parts`` if it is a list or tuple with an entry; raise ShapeError otherwise."""
    if not isinstance(parts, (list, tuple)) or not parts:
        fix = "pass [(o_0, lse_0), ...]"
        raise ShapeError("a list of at least one pair (o, lse) or Part", shown(parts), fix)
    return parts


def softmax_state(part: Any, number: int) -> SoftmaxState:
    """Return a part as the softmax state that a block of the specification's ring returns."""
    if not isinstance(part, Part):
        ((o, lse),) = check_partials([part])
        return SoftmaxState(lse, np.where(np.isneginf(lse), 0.0, 1.0), o)
    if part.rows is not None:
        expected = f"part {number} with rows=None, because the specification's ring merges all rows"
        raise OptionError(expected, f"rows={shown(part.rows)}", "give other rows lse=-inf and o=0")
    ((o, m),) = check_partials([(part.o, part.lse)])
    if part.sums is None:
        return SoftmaxState(m, np.where(np.isneginf(m), 0.0, 1.0), o)
    if not isinstance(part.sums, np.ndarray) or part.sums.shape != m.shape:
        got = f"shape {part.sums.shape}" if isinstance(part.sums, np.ndarray) else shown(part.sums)
        fix = "pass the sum of exp(s - m) of each row"
        raise ShapeError(f"sums of part {number} of shape {m.shape}", got, fix)
    l = load(part.sums, f"sums of part {number}")
    if not (np.isfinite(l) & (l >= 0)).all():
        fix = "pass the sum of exp(s - m) of each row"
        raise NonFiniteError(f"sums of part {number} finite and >= 0", "another value", fix)
    return SoftmaxState(m, l, o)
