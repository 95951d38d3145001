"""The public function: context parallelism of any scheme, on any mesh."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.problem.checks import flag
from ringspec.problem.model import Booleans, Problem
from ringspec.problem.options import Options, check, check_gradients, takes_options
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.schemes.build import make_scheme
from ringspec.schemes.mesh import make_mesh
from ringspec.schemes.run import SchemeRun, run_scheme
from ringspec.schemes.scheme import Scheme
from ringspec.schemes.validator import validate_scheme
from ringspec.spec.masks import visible


@takes_options
def context_parallel(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    dlse: ArrayLike | None = None,
    mesh: Any,
    scheme: str | Scheme,
    layout: Any = "contiguous",
    circulation: str | None = None,
    direction: int | None = None,
    recipe: str | Recipe = "float64",
    record: bool = False,
    **options: Unpack[Options],
) -> SchemeRun:
    """Compute attention split over the ranks of a mesh; with dy (or dlse), its backward pass as well.

    >>> import numpy as np
    >>> x = np.ones((1, 2, 8, 4))
    >>> run = context_parallel(x, x, x, mesh={"ring": 4}, scheme="ring", causal=True)
    >>> run.ranks[1].o.shape
    (1, 2, 2, 4)
    """
    problem = check(q, k, v, dict(options))
    used, record = recipe_of(recipe), flag(record, "record")
    where = make_mesh(mesh)
    own = {"circulation": circulation, "direction": direction}
    if isinstance(scheme, Scheme):
        chosen = scheme
    else:
        chosen = make_scheme(scheme, where, problem, layout, options, own)
    validate_scheme(chosen, mask_of(problem))
    seeds = None
    if dy is not None or dlse is not None:
        dy = np.zeros(problem.q.shape[:3] + problem.v.shape[3:]) if dy is None else dy
        seeds = check_gradients(problem, dy, dlse)
    return run_scheme(problem, used, chosen, seeds, record)


def mask_of(problem: Problem) -> Booleans:
    """Return which query attends to which key in any batch: [H or 1, Sq, Sk]."""
    allowed: Booleans = visible(problem.rows, problem.columns, problem.terms).any(axis=0)
    return allowed
