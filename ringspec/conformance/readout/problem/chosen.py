"""Choose the readouts that a target with given claims can run, and build them."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from ringspec.conformance.readout.problem.problems import Problem, problem
from ringspec.conformance.readout.problem.settings import (
    BANDED,
    FEATURES,
    FORMATS,
    IN_OTHER_LAYOUTS,
    MOST,
    MOST_WINDOWS,
    NARROW,
    OF_CALLS,
    USUAL,
    Setting,
)
from ringspec.conformance.readout.problem.shapes import (
    OF_SHAPE,
    Shape,
    geometry_for,
    shape_for,
    subject_of,
    unclaimed,
    with_circulation,
)
from ringspec.conformance.target.capabilities import Capabilities


def settings_for(claims: Capabilities) -> tuple[list[Setting], str]:
    """Return the settings of the problems for a target with these claims; if there are none, also the reason.

    After the usual ones come those of other circulations, of the other direction, of other layouts without a mask or
    with a window, of a given scale, of four workers, of an odd length, with documents and with other features, in this
    order.
    Sinks, a bias and dropout are read in at most two layouts.
    """
    found: dict[str, list[Setting]] = {}
    reasons = []
    for setting in (*USUAL, *IN_OTHER_LAYOUTS):
        shape = unclaimed(setting, claims) or shape_for(claims, setting)
        if isinstance(shape, str):
            reasons.append(shape)
        else:
            name = subject_of(geometry_for(setting, shape, claims))
            found.setdefault(name, []).append(setting)
    windows, packed, others, *features = (
        found.get(name, []) for name in ("window", "documents", "", *FEATURES)
    )
    read = sorted({one.layout for one in USUAL if one.mask != "padding"})
    last = max(reasons, key=lambda reason: reason.startswith(OF_SHAPE), default="")
    if not set(read) & set(claims.layouts):
        last = f"one of the layouts {', '.join(read)}"
    chosen = [*others[: MOST - min(len(windows), MOST_WINDOWS)], *windows][:MOST]
    in_layouts = chain(*(settings[:2] for settings in features))
    known = {with_circulation(one, claims) for one in chosen}
    of_calls = [
        one
        for one in OF_CALLS
        if with_circulation(one, claims) not in known
        and not unclaimed(one, claims)
        and isinstance(shape_for(claims, one), Shape)
    ]
    in_documents = [one for one in packed if one.mask == BANDED or one == packed[0]]
    return [*chosen, *of_calls, *in_documents, *in_layouts], "" if found else f"it needs {last}"


def problems_for(claims: Capabilities) -> tuple[list[Problem], str]:
    """Return the problems of :func:`settings_for`; if there are none, also the reason."""
    settings, reason = settings_for(claims)
    return [problem_of(setting, claims) for setting in settings], reason


def problem_of(setting: Setting, claims: Capabilities) -> Problem:
    """Return the problem of one of the settings for a target with these claims."""
    made = problem_for(setting, claims)
    assert isinstance(made, Problem), made
    return made


@lru_cache(maxsize=64)
def problem_for(setting: Setting, claims: Capabilities) -> Problem | str:
    """Return the problem of a setting for a target with these claims, or the reason why there is none."""
    reason = unclaimed(setting, claims)
    if reason:
        return reason
    names = [name for name in (NARROW if setting.narrow else FORMATS) if name in claims.formats]
    shape = shape_for(claims, setting)
    return shape if isinstance(shape, str) else problem(setting, names[0], shape, claims)
