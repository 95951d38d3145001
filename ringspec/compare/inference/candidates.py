"""List the ways in which a kernel may round, each with a description, so that its noise can be compared with them.

A recipe says to which format a kernel rounds at each of its *rounding points*, such as P before its product with V.
The *candidates* are the recipe that the kernel declares, variations of it at one or a few rounding points, and the
predefined recipes of :mod:`ringspec.recipes` with the same input format. Two kinds of variation are not recipes:

- A point rounds twice. Let V be the predicted variance of the declared recipe, and V0 the variance without the
  rounding at this point. The rounding contributes V - V0, so the candidate's variance is V + (V - V0).
- A point truncates instead of rounding to nearest. The variance is the same, but the error has a mean: half a unit
  in the last place towards zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringspec.formats import unit_roundoff
from ringspec.recipes import RECIPES, Recipe

Term = tuple[float, Recipe]
Prediction = tuple[Recipe, tuple[str, ...]]
PARTIALS = ("block_o", "carried_o", "block_gradients", "carried_dq", "carried_dkv")
# The points of a recipe as subjects of a sentence, in the order of the recipe.
NOUNS = {
    "products": "products were",
    "scores": "scores were",
    "statistics": "softmax statistics were",
    "p": "P was",
    "block_o": "partial o was",
    "merge": "merges of partials were",
    "carried_o": "o between steps was",
    "outputs": "o was",
    "lse": "lse was",
    "backward_lse": "the lse that the backward pass reads was",
    "dy_o_products": "the products of dy_o_sum were",
    "delta": "dy_o_sum was",
    "ds": "dS was",
    "tile_dq": "dq between tiles was",
    "tile_dkv": "dk and dv between tiles were",
    "block_gradients": "partial gradients were",
    "carried_dq": "dq between steps was",
    "carried_dkv": "dk and dv between steps were",
    "gradients": "gradients were",
}


# Points that some kernels round to 16 bits although their recipe declares float32.
ALONE = (
    "scores",
    "statistics",
    "carried_o",
    "backward_lse",
    "dy_o_products",
    "delta",
    "carried_dq",
    "carried_dkv",
)
# The number relative to which P is rounded (``p_relative_to``), in words.
REFERENCES = {
    "block": "P was rounded relative to the maximum of its block, a fresh state for each block",
    "running": "P was rounded relative to the running maximum, one state carried through the ring",
    "stale": "P was rounded relative to an older maximum, as in lazy rescaling",
    "row": "P was rounded relative to the maximum of the whole row",
    "lse": "P was divided by the sum of its row before it was rounded",
    "block_lse": "P was divided by the sum of its block before it was rounded",
}


@dataclass(frozen=True)
class Candidate:
    """One way in which a kernel may round.

    ``words``      how such a kernel differs from the declared recipe
    ``terms``      pairs (factor, recipe): the variance is the sum of factor * (predicted variance of the recipe)
    ``truncated``  rounding points that truncate towards zero instead of rounding to nearest
    """

    name: str
    words: str
    terms: tuple[Term, ...]
    truncated: tuple[str, ...] = ()

    @property
    def meaning(self) -> tuple[object, ...]:
        """A key that is equal for candidates that differ only in the order of their sums."""
        terms = (
            (
                factor,
                r.p_relative_to or "block",
                r.merge_recipe,
                *(getattr(r, point) for point in NOUNS),
            )
            for factor, r in self.terms
        )
        return (self.truncated, *terms)


def candidates_for(declared: Recipe) -> tuple[Candidate, ...]:
    """Return all candidates, the declared recipe first and the predefined recipes last.

    >>> from ringspec.recipes import recipe
    >>> [c.words for c in candidates_for(recipe("bf16"))][:4]
    ['as declared', 'dS was rounded twice', 'P was rounded twice', 'P was not rounded to bfloat16']
    """
    found = [Candidate(declared.name, "as declared", ((1.0, declared),))]
    narrow = narrow_format(declared)
    if narrow is None:
        found += float32_candidates(declared)
    else:
        found += [
            *twice(declared),
            *not_rounded(declared, narrow),
            *partials(declared, narrow),
            *truncations(declared),
            *references(declared),
            *alone(declared, narrow),
        ]
    for other in RECIPES.values():
        # The formats of the results are those of the call.
        same = other.replace(
            outputs=declared.outputs, gradients=declared.gradients, lse=declared.lse
        )
        if other.inputs == declared.inputs and other.name != declared.name:
            found.append(Candidate(other.name, in_words(declared, same), ((1.0, same),)))
    return tuple(found)


def narrow_format(declared: Recipe) -> str | None:
    """Return the first of the formats of P, dS and the outputs that is narrower than float32; None if there is none."""
    for name in (declared.p, declared.ds, declared.outputs):
        if unit_roundoff(name) > unit_roundoff("float32"):
            return name
    return None


def twice(declared: Recipe) -> list[Candidate]:
    """Return candidates that round dS or P a second time."""
    found = []
    for point, noun in (("ds", "dS"), ("p", "P")):
        if unit_roundoff(getattr(declared, point)) > unit_roundoff("float32"):
            without = declared.replace(**{point: "float32"})
            terms = ((2.0, declared), (-1.0, without))
            found.append(Candidate(f"{point} twice", f"{noun} was rounded twice", terms))
    return found


def not_rounded(declared: Recipe, narrow: str) -> list[Candidate]:
    """Return candidates without the rounding of P, of dS, or of both, and a candidate that rounds only the results."""
    found = []
    for points, noun in ((("p",), "P was"), (("ds",), "dS was"), (("p", "ds"), "P and dS were")):
        if all(getattr(declared, point) == narrow for point in points):
            wide = declared.replace(**dict.fromkeys(points, "float32"))
            name = f"{' and '.join(points)} float32"
            found.append(Candidate(name, f"{noun} not rounded to {narrow}", ((1.0, wide),)))
    inner = {
        point: "float32"
        for point in NOUNS
        if point not in ("outputs", "gradients", "lse")
        and unit_roundoff(getattr(declared, point)) > unit_roundoff("float32")
    }
    only = declared.replace(**inner)
    if len(inner) != 2 or set(inner) != {"p", "ds"}:
        found.append(Candidate("outputs only", "only the outputs were rounded", ((1.0, only),)))
    else:
        found[-1] = Candidate("outputs only", "only the outputs were rounded", ((1.0, only),))
    return found


def partials(declared: Recipe, narrow: str) -> list[Candidate]:
    """Return candidates that round partial results between ring steps to ``narrow``, or keep them in float32."""
    found = []
    for fmt in (narrow, "float32"):
        other = declared.replace(**dict.fromkeys(PARTIALS, fmt))
        if fmt == "float32":
            other = other.replace(merge="float32")
        if other == declared:
            continue
        words = f"partials were rounded to {narrow} between steps"
        if fmt == "float32":
            words = f"partials were kept in float32 between steps, wider than the declared {narrow}"
        found.append(Candidate(f"partials in {fmt}", words, ((1.0, other),)))
    return found


def alone(declared: Recipe, narrow: str) -> list[Candidate]:
    """Return candidates that round to ``narrow`` at one point where the recipe declares a wider format."""
    return [
        Candidate(
            f"{point} {narrow}",
            f"{NOUNS[point]} rounded to {narrow}",
            ((1.0, declared.replace(**{point: narrow})),),
        )
        for point in ALONE
        if unit_roundoff(getattr(declared, point)) < unit_roundoff(narrow)
    ]


def references(declared: Recipe) -> list[Candidate]:
    """Return candidates that round P = exp(s - c) with another c than declared; every c in the list is correct."""
    return [
        Candidate(f"p relative to {kind}", words, ((1.0, declared.replace(p_relative_to=kind)),))
        for kind, words in REFERENCES.items()
        if kind != (declared.p_relative_to or "block")
    ]


def truncations(declared: Recipe) -> list[Candidate]:
    """Return candidates that truncate towards zero where the recipe rounds to nearest."""
    plan = (
        ("P was", ("p",)),
        ("dS was", ("ds",)),
        ("the results were", ("outputs", "gradients")),
        ("the gradients were", ("gradients",)),
    )
    return [
        Candidate(
            f"{' and '.join(points)} truncated", f"{noun} truncated", ((1.0, declared),), points
        )
        for noun, points in plan
        if unit_roundoff(getattr(declared, points[0])) > unit_roundoff("float32")
    ]


def float32_candidates(declared: Recipe) -> list[Candidate]:
    """Return candidates for a recipe without 16-bit or 8-bit formats: they change the width of operands or of sums."""
    found = []
    if declared.inputs == "float32":
        for fmt in ("bfloat16", "float16"):
            other = declared.replace(p=fmt, ds=fmt)
            words = f"P and dS were rounded to {fmt}"
            found.append(Candidate(f"p and ds {fmt}", words, ((1.0, other),)))
        inner = [point for point in NOUNS if point not in ("outputs", "gradients", "lse")]
        wide = declared.replace(**dict.fromkeys(inner, "float64"))
        words = "accumulations are wider than the declared float32"
        found.append(Candidate("float64 inside", words, ((1.0, wide),)))
    else:
        inner = [point for point in NOUNS if getattr(declared, point) == "float64"]
        narrow = declared.replace(**dict.fromkeys(inner, "float32"))
        words = "accumulations are float32, narrower than the declared float64"
        found.append(Candidate("float32 inside", words, ((1.0, narrow),)))
    return found


def in_words(declared: Recipe, other: Recipe) -> str:
    """Describe the rounding points at which ``other`` differs from the declared recipe.

    >>> from ringspec.recipes import recipe
    >>> in_words(recipe("bf16"), recipe("bf16").replace(ds="float32", name="x"))
    'x: dS was kept in float32 (declared bfloat16)'
    """
    parts = []
    rest = dict(NOUNS)
    changed, wanted = ({getattr(x, point) for point in PARTIALS} for x in (other, declared))
    if len(changed) == len(wanted) == 1 and changed != wanted:
        (got,), (want,) = changed, wanted
        parts.append(f"partials were {verb(want, got)} {got} between steps (declared {want})")
        rest = {point: noun for point, noun in rest.items() if point not in PARTIALS}
    for point, noun in rest.items():
        want, got = getattr(declared, point), getattr(other, point)
        if want != got:
            parts.append(f"{noun} {verb(want, got)} {got} (declared {want})")
    if not parts:
        parts.append("blocks and merges are in another order")
    return f"{other.name}: {'; '.join(parts)}"


def verb(want: str, got: str) -> str:
    return "rounded to" if unit_roundoff(got) > unit_roundoff(want) else "kept in"


def predictions_of(candidates: Sequence[Candidate]) -> tuple[Prediction, ...]:
    """Return the noise predictions that the candidates need, as (recipe, truncated points) without duplicates."""
    found: list[Prediction] = []
    for candidate in candidates:
        for _, recipe in candidate.terms:
            if (recipe, candidate.truncated) not in found:
                found.append((recipe, candidate.truncated))
    return tuple(found)
