"""Public functions for schedules and causal offsets: check the arguments, then call the specification.

Each function returns the result of the function in the specification that has the same name (RING-1 to RING-10).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ringspec.errors import LayoutError, OptionError, nearest, shown
from ringspec.problem.checks import check_workers, integer, is_integer, length_of
from ringspec.spec import cp_offset as offsets
from ringspec.spec import schedule as spec
from ringspec.spec.schedule import CIRCULATIONS, Pair, Schedule


def forward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """Return the schedule of the forward pass: a KV ring, or gathered keys.

    ``circulation`` is 'kv' or 'q' (which have the same forward) or 'gather'; W = ``workers``. ``direction`` 1: worker
    r sends to r + 1; -1: to r - 1. Raises OptionError or LayoutError.

    >>> schedule = forward_schedule("kv", 3)
    >>> schedule.steps[1].uses, schedule.hops
    ((2, 0, 1), 2)
    """
    check_circulation(circulation)
    return spec.forward_schedule(circulation, check_workers(workers), check_direction(direction))


def backward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """Return the schedule of the backward pass: 'kv' (dk, dv travel), 'q' (dq travels, RING-5) or 'gather'.

    ``circulation``, ``workers``, ``direction`` and errors are as in :func:`forward_schedule`.

    >>> backward_schedule("q", 3).hops  # dq needs one hop more than q, to return to its owner
    3
    """
    check_circulation(circulation)
    return spec.backward_schedule(circulation, check_workers(workers), check_direction(direction))


def skip(schedule: Schedule, invisible: Iterable[Pair]) -> Schedule:
    """Return a copy of a schedule that declares the ``invisible`` pairs as skipped and does not compute them (RING-11).

    A pair is (query owner, key owner).
    """
    skipped = frozenset(invisible)
    steps = []
    for number, step in enumerate(schedule.steps):
        uses = tuple(
            None if schedule.pair(number, r) in skipped else owner
            for r, owner in enumerate(step.uses)
        )
        steps.append(replace(step, uses=uses))
    return replace(schedule, steps=tuple(steps), skipped=skipped)


def check_circulation(circulation: str) -> None:
    """Raise OptionError unless ``circulation`` is 'kv', 'q' or 'gather'."""
    if not isinstance(circulation, str) or circulation not in CIRCULATIONS:
        raise OptionError(
            "a circulation ('kv', 'q' or 'gather')",
            shown(circulation),
            nearest(circulation, CIRCULATIONS),
            code="unknown-name",
        )


def check_direction(direction: Any) -> int:
    """Validate a direction of travel, 1 or -1, and return it as an int."""
    if not is_integer(direction) or direction not in (1, -1):
        raise OptionError(
            "direction 1 (r to r + 1) or -1 (r to r - 1)", shown(direction), "pass direction=1"
        )
    return int(direction)


def cp_offset(
    layout: str, a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> int:
    """Return the offset of the causal diagonal between queries of worker a and keys of worker b.

    In local indices i and j, query i attends to key j iff j <= i + offset. The offset follows RING-8 for 'contiguous'
    and RING-9 for 'striped'. 'zigzag' has four offsets, see :func:`zigzag_offsets`. Each of the W = ``workers`` workers
    holds ``n_q`` queries and ``n_k`` keys. The query with global index i has position i + ``q_offset``. Raises
    OptionError for another ``layout``, and for an a or b that is not a worker.

    >>> cp_offset("contiguous", 2, 1, workers=4, n_q=8, n_k=8)
    8
    """
    a, b, lengths = check_pair(a, b, workers, n_q, n_k, q_offset)
    if layout not in ("contiguous", "striped"):
        raise OptionError(
            "a layout with one offset per pair of workers: 'contiguous' or 'striped'",
            shown(layout),
            "use zigzag_offsets for 'zigzag', and positions for any other layout",
            code="unknown-name",
        )
    return offsets.cp_offset(layout, a, b, **lengths)


def zigzag_offsets(
    a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """RING-10: return the offsets between the two query chunks of worker a and the two key chunks of worker b.

    The result is indexed [query chunk][key chunk]. Local indices count from the start of each chunk, which has half of
    the worker's tokens. ``workers``, ``n_q``, ``n_k``, ``q_offset`` and errors are as in :func:`cp_offset`; also raises
    LayoutError if n_q or n_k is odd.
    """
    a, b, lengths = check_pair(a, b, workers, n_q, n_k, q_offset)
    if lengths["n_q"] % 2 or lengths["n_k"] % 2:
        raise LayoutError(
            "n_q and n_k even, two chunks each",
            f"{lengths['n_q']} and {lengths['n_k']}",
            "pad the blocks",
        )
    return offsets.zigzag_offsets(a, b, **lengths)


def check_pair(
    a: Any, b: Any, workers: Any, n_q: Any, n_k: Any, q_offset: Any
) -> tuple[int, int, dict[str, int]]:
    """Check the arguments of an offset; return workers a and b, and a dict of the other arguments."""
    workers, a, b = check_workers(workers), integer(a, "a"), integer(b, "b")
    n_q, n_k, q_offset = length_of(n_q, "n_q"), length_of(n_k, "n_k"), integer(q_offset, "q_offset")
    if not (0 <= a < workers and 0 <= b < workers):
        raise OptionError(
            f"workers a and b in 0..{workers - 1}", f"{shown(a)} and {shown(b)}", "count from 0"
        )
    return a, b, {"workers": workers, "n_q": n_q, "n_k": n_k, "q_offset": q_offset}
