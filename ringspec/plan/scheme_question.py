"""What is asked about ways to split attention: the wanted schemes and mesh, and tokens that only some schemes have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringspec.errors import LayoutError
from ringspec.plan.hardware import Hardware
from ringspec.plan.workload import Workload, check_choice, sized
from ringspec.schemes.mesh import Mesh, make_mesh

# The axes of each scheme, outermost first, as ringspec.schemes.build.BUILDERS has them.
AXES = {
    "ring": ("ring",),
    "double_ring": ("outer", "inner"),
    "all_gather": ("cp",),
    "ulysses": ("ulysses",),
    "usp": ("ring", "ulysses"),
    "joint": ("ring", "ulysses"),
    "pcp": ("pcp",),
    "dcp": ("tp", "dcp"),
}
SERVING = ("pcp", "dcp")


@dataclass(frozen=True)
class Question:
    """What to plan: the layer, the device, tokens that only some schemes have, and the wanted schemes and mesh.

    ``text``: tokens of joint attention that all ranks hold, part of the length. ``new``: new tokens of pcp and dcp, the
    last ones of the length; all others are cached. None: all of them in pcp, one in dcp.
    """

    work: Workload
    hardware: Hardware
    layout: str
    backward: bool
    overlap: bool
    schemes: tuple[str, ...]
    mesh: Mesh | None
    text: int
    new: int | None


def check_question(
    work: Workload,
    hardware: Hardware,
    layout: str,
    backward: bool,
    overlap: bool,
    given: dict[str, Any],
) -> Question:
    """Validate the keywords of :func:`ringspec.plan.plan` that concern schemes."""
    names, mesh, text, new = (given[name] for name in ("schemes", "mesh", "text", "new"))
    wanted = tuple(AXES) if names is None else check_choice(names, tuple(AXES), "schemes")
    made = None if mesh is None else make_mesh(mesh)
    if made is not None and made.ranks != work.workers:
        raise LayoutError(
            f"a mesh of W = {work.workers} ranks", str(made), "change mesh or workers", code="mesh"
        )
    if made is not None:
        wanted = named_by(made, wanted, names is not None)
    text = 0 if text is None else sized(text, "text", work.length - 1)
    new = None if new is None else sized(new, "new", work.length)
    return Question(work, hardware, layout, backward, overlap, wanted, made, text, new)


def named_by(mesh: Mesh, wanted: tuple[str, ...], chosen: bool) -> tuple[str, ...]:
    """Return the schemes that have exactly the axes of a mesh.

    ``chosen``: whether the caller named the schemes; then each must have these axes. Raises LayoutError otherwise.
    """
    fitting = tuple(
        x for x in wanted if set(AXES[x]) == set(mesh.names) or (x, mesh.names) == ("dcp", ("dcp",))
    )
    if fitting and (fitting == wanted or not chosen):
        return fitting
    unfit = [x for x in wanted if x not in fitting]
    known = "; ".join(f"{x}: {', '.join(AXES[x])}" for x in unfit)
    others = [x for x in AXES if set(AXES[x]) == set(mesh.names)]
    fix = f"choose a mesh such as {example_mesh(unfit[0], mesh.ranks)}"
    if others:
        fix += f", or the scheme {' or '.join(others)}"
    raise LayoutError(f"a mesh with the axes of the scheme ({known})", str(mesh), fix, code="mesh")


def example_mesh(scheme: str, ranks: int) -> str:
    """Return a mesh of a scheme for this many ranks, as the option --mesh takes it."""
    axes = AXES[scheme]
    inner = next((x for x in (8, 4, 2, 3) if ranks % x == 0 and x < ranks), 1)
    sizes = (ranks,) if len(axes) == 1 else (ranks // inner, inner)
    return ",".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
