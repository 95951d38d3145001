"""The public function: attention split over a mesh of ranks, by any scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.errors import LayoutError, OptionError, ShapeError, shown
from ringspec.formats import check_results
from ringspec.problem.checks import flag
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import Options, check, check_gradients, takes_options
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.attention import as_given
from ringspec.schemes.build import Call, make_scheme
from ringspec.schemes.mesh import make_mesh
from ringspec.schemes.multisets import mask_of
from ringspec.schemes.run import SchemeRun, run_scheme
from ringspec.schemes.scheme import Scheme
from ringspec.schemes.validator import validate_scheme


@takes_options
def context_parallel(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    dlse: ArrayLike | None = None,
    mesh: Any = None,
    scheme: str | Scheme,
    layout: Any = None,
    circulation: str | None = None,
    direction: int | None = None,
    text: ArrayLike | None = None,
    text_at: str | None = None,
    interleave: int | None = None,
    recipe: str | Recipe = "float64",
    record: bool = False,
    **options: Unpack[Options],
) -> SchemeRun:
    """Compute attention split over the ranks of a mesh; with dy (or dlse), its backward pass as well.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv], dlse [B, H, Sq] are of any float dtype, in
    global order. Keywords are those of :func:`~ringspec.attention` (:class:`~ringspec.problem.options.Options` lists
    them) and:

    ``mesh``         {axis: size}, outermost axis first; the rank is row-major. The scheme names the axes
    ``scheme``       'ring' (axis ring), 'double_ring' (outer, inner), 'all_gather' (cp), 'ulysses' (ulysses), 'usp' (ring
                     and ulysses, in any order), 'joint' (the same), and, forward only, 'pcp' (pcp) and 'dcp' (tp, dcp);
                     or a :class:`~ringspec.schemes.scheme.Scheme` of your own, which is validated first and has its mesh
    ``layout``       which rank holds which token, as in :func:`~ringspec.ring`: a name, a table [W, n] with -1 for
                     padding, a Layout of :mod:`ringspec.layouts` such as zigzag_padded(...), or a pair for q and k.
                     None: 'contiguous' ('zigzag' for pcp). In 'joint' it distributes the tokens that are not text. In
                     'dcp' it distributes the keys over the axis dcp; None: by ``interleave``
    ``circulation``, ``direction``  of 'ring', as in :func:`~ringspec.ring`: 'kv' or 'q', 1 or -1
    ``text``         of 'joint': the tokens that all ranks hold, as places in q, k and v
    ``text_at``      of 'joint': 'front' or 'rear', the first or last ring step uses the keys of the text
    ``interleave``   of 'dcp' and 'pcp': how many successive keys of the cache a rank holds; default 1. It counts from the
                     first key of each request
    ``recipe``       name or :class:`~ringspec.recipes.Recipe`: where values are rounded
    ``record``       keep every rank's state before and after every step

    In 'pcp' and 'dcp', cu_seqlens and cu_seqlens_k divide q and k into requests; without them there is one. In 'pcp' the
    last keys of a request are those of its queries, and all keys before them are a cached prefix. For a causal mask, give
    ``q_offset=Sk - Sq`` for one request, and positions for several. A bias does not move: each rank reads the entries of the
    pairs that it computes, and ``dbias`` is the sum of the ranks' parts, because no pair is computed twice.

    Returns a :class:`~ringspec.schemes.run.SchemeRun`. Bad input raises a subclass of
    :class:`~ringspec.errors.RingspecError`; an invalid scheme of your own raises ScheduleError with every defect.

    >>> import numpy as np
    >>> q = np.zeros((1, 4, 8, 2)); k = np.zeros((1, 2, 8, 2)); v = np.arange(16.0).reshape(1, 2, 8, 1)
    >>> run = context_parallel(q, k, v, mesh={"ring": 2, "ulysses": 2}, scheme="usp", layout="zigzag", causal=True)
    >>> run.o[0, 0, :4, 0].tolist(), run.ranks[1].query.tokens
    ([0.0, 0.5, 1.0, 1.5], (1, 6))
    """
    problem = check(q, k, v, dict(options))
    used, record = recipe_of(recipe), flag(record, "record")
    own = {
        "circulation": circulation,
        "direction": direction,
        "text": text,
        "text_at": text_at,
        "interleave": interleave,
    }
    chosen = scheme_of(scheme, mesh, problem, layout, options, own)
    if isinstance(scheme, Scheme):
        check_fits(chosen, problem)
    seeds = seeds_of(problem, chosen, dy, dlse)
    validate_scheme(chosen, mask_of(problem))
    run = run_scheme(problem, used, chosen, seeds, record)
    if run.gradients is not None:
        run = replace(run, gradients=as_given(run.gradients, options))
    if used.products == "float64":
        check_results(o=run.o, dq=run.dq, dk=run.dk, dv=run.dv, dsinks=run.dsinks, dbias=run.dbias)
    return run


def scheme_of(
    scheme: Any, mesh: Any, problem: Problem, layout: Any, options: Any, own: dict[str, Any]
) -> Scheme:
    """Return the scheme of a call: the caller's own, or one that is made from its name, the mesh and the layout."""
    if not isinstance(scheme, Scheme):
        return make_scheme(scheme, Call(make_mesh(mesh), problem, layout, options, own))
    given = {"layout": layout, **own}
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"no {name} beside a Scheme", f"{name}={shown(value)}", f"leave out {name}"
            )
    if mesh is not None and make_mesh(mesh) != scheme.mesh:
        raise LayoutError(
            f"the mesh of the scheme, {scheme.mesh}", shown(mesh), "leave out mesh", code="mesh"
        )
    return scheme


def check_fits(scheme: Scheme, problem: Problem) -> None:
    """Raise ShapeError unless a caller's scheme has the numbers of heads of the problem."""
    heads, kv_heads = problem.terms.heads, problem.terms.kv_heads
    if (scheme.heads, scheme.kv_heads) != (heads, kv_heads):
        raise ShapeError(
            f"a scheme of H = {heads} and Hkv = {kv_heads} heads, as q and k have",
            f"one of H = {scheme.heads}, Hkv = {scheme.kv_heads}",
            "make the scheme with the heads of q and k",
        )


def seeds_of(problem: Problem, scheme: Scheme, dy: Any, dlse: Any) -> tuple[Array, Array] | None:
    """Validate dy and dlse and return them as float64; None if there is no backward pass."""
    if dy is None and dlse is None:
        return None
    if scheme.backward is None:
        raise OptionError(
            f"no dy or dlse with the scheme {scheme.name!r}, which has no backward pass",
            "dy" if dlse is None else "dlse",
            "leave it out, or use the scheme 'all_gather'",
        )
    dy = np.zeros(problem.q.shape[:3] + problem.v.shape[3:]) if dy is None else dy
    return check_gradients(problem, dy, dlse)
