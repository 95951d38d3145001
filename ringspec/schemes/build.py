"""Make the scheme of a call: check the names and numbers of the caller, then call the constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.errors import OptionError, nearest, shown
from ringspec.problem.model import Problem
from ringspec.rings.ring import layouts_for
from ringspec.rings.schedules import check_circulation, check_direction
from ringspec.schemes import rings
from ringspec.schemes.mesh import Mesh, check_axes
from ringspec.schemes.scheme import Scheme

# The axes of each scheme's mesh, and the keywords that it has beside `layout`.
AXES = {
    "ring": ("ring",),
    "double_ring": ("outer", "inner"),
}
KEYWORDS = {
    "circulation": ("ring",),
    "direction": ("ring",),
}
DEFAULTS: dict[str, Any] = {"circulation": "kv", "direction": 1}


def make_scheme(
    name: Any, mesh: Mesh, problem: Problem, layout: Any, options: Any, given: dict[str, Any]
) -> Scheme:
    """Return the scheme called ``name`` for a problem; ``given`` are the scheme's own keywords, None if left out."""
    if not isinstance(name, str) or name not in AXES:
        raise OptionError(
            "the name of a scheme, or a Scheme",
            shown(name),
            nearest(name, AXES),
            code="unknown-name",
        )
    check_axes(mesh, name, AXES[name])
    for keyword, value in given.items():
        if value is not None and name not in KEYWORDS[keyword]:
            raise OptionError(
                f"{keyword} only with the scheme {' or '.join(map(repr, KEYWORDS[keyword]))}",
                f"{keyword}={shown(value)} with the scheme {name!r}",
                f"leave out {keyword}",
            )
    values = {k: DEFAULTS[k] if value is None else value for k, value in given.items()}
    return BUILDERS[name](mesh, problem, layout, options, values)


def sizes(problem: Problem) -> dict[str, int]:
    """Return H and Hkv as keywords of a constructor."""
    return {"heads": problem.terms.heads, "kv_heads": problem.terms.kv_heads}


def tables_of(mesh: Mesh, problem: Problem, layout: Any, options: Any) -> tuple[Any, Any]:
    """Return the tables [W, n] of the tokens of queries and of keys."""
    layout_q, layout_k = layouts_for(problem, layout, mesh.ranks, options)
    return layout_q.table.tolist(), layout_k.table.tolist()


def build_ring(mesh: Mesh, problem: Problem, layout: Any, options: Any, values: Any) -> Scheme:
    """Return a ring."""
    check_circulation(values["circulation"])
    tables = tables_of(mesh, problem, layout, options)
    return rings.ring(
        mesh,
        *tables,
        **sizes(problem),
        circulation=values["circulation"],
        direction=check_direction(values["direction"]),
    )


def build_double_ring(
    mesh: Mesh, problem: Problem, layout: Any, options: Any, values: Any
) -> Scheme:
    """Return a double ring."""
    return rings.double_ring(mesh, *tables_of(mesh, problem, layout, options), **sizes(problem))


BUILDERS: dict[str, Callable[[Mesh, Problem, Any, Any, Any], Scheme]] = {
    "ring": build_ring,
    "double_ring": build_double_ring,
}
