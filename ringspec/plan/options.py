"""Compare layouts of a ring (which worker holds which tokens) and circulations (what travels), and choose the best.

:mod:`ringspec.plan.scheme_options` adds every other way to split attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ringspec.plan.hardware import Hardware, Link, hardware_named
from ringspec.plan.scheme_options import Impossible, SchemeOption, scheme_options
from ringspec.plan.scheme_question import check_question
from ringspec.plan.times import Pass, largest_ring, plan_pass
from ringspec.plan.workload import Workload, check_circulations, check_layouts, workload
from ringspec.problem.checks import flag

# Options whose times differ by less than this are treated as equally fast; memory decides between them.
EQUAL = 0.01


@dataclass(frozen=True)
class Option:
    """One layout with one circulation: the forward and, if requested, the backward pass, and totals over the passes.

    ``seconds``: the time of all passes. ``memory``: bytes that one worker holds in the pass that needs most. ``fits``:
    whether ``memory`` is at most the whole memory of the device.

    A pass hides its transfers if they take no longer than the computation that runs at the same time. ``hides_from``:
    the fewest tokens per worker for which all passes hide their transfers. ``hides_to``: the largest number of workers
    for which all passes hide their transfers, with the same number of tokens in all. Both are None if there is no such
    number.
    """

    layout: str
    circulation: str
    forward: Pass
    backward: Pass | None
    memory: int
    fits: bool
    hides_to: int | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes)

    @property
    def idle(self) -> float:
        """The fraction of ``seconds`` in which an average worker does not compute."""
        computing = sum(one.compute_seconds for one in self.passes)
        return 1.0 - computing / self.seconds if self.seconds else 0.0

    @property
    def hides_from(self) -> int | None:
        fewest = [one.hides_from for one in self.passes]
        known = [n for n in fewest if n is not None]
        return max(known) if len(known) == len(fewest) else None


@dataclass(frozen=True)
class Plan:
    """A planned attention layer: all ``options``, and ``best``, the recommended option.

    ``options`` has one entry for each combination of layout and circulation. ``work``: the attention layer and the
    number of workers. ``hardware``: the device. ``overlap``: whether transfers run during the computation. ``link``:
    the slowest link of a ring of this size.

    ``schemes``: ways to split attention, rings included, each on one or more meshes. ``impossible``: schemes that these
    numbers do not permit.
    """

    work: Workload
    hardware: Hardware
    link: Link
    overlap: bool
    options: tuple[Option, ...]
    best: Option
    schemes: tuple[SchemeOption, ...] = ()
    impossible: tuple[Impossible, ...] = ()

    def option(self, layout: str, circulation: str) -> Option:
        """Return the option with this layout and circulation; raise KeyError if it was not planned."""
        for one in self.options:
            if (one.layout, one.circulation) == (layout, circulation):
                return one
        raise KeyError(f"{layout}, {circulation}")


def plan(
    length: Any,
    workers: Any,
    *,
    hardware: Any = "h200",
    layouts: Any = None,
    circulations: Any = None,
    backward: Any = True,
    overlap: Any = True,
    recipe: Any = "bf16",
    schemes: Any = None,
    mesh: Any = None,
    text: Any = None,
    new: Any = None,
    **shapes: Any,
) -> Plan:
    """Estimate the cost of one layer's attention on W workers, in O(W) operations for any length.

    ``length``: number of tokens S. ``workers``: number of workers W. ``hardware``: the name of a preset ('h200',
    'trn2') or a :class:`~ringspec.plan.Hardware`. ``layouts`` and ``circulations``: names to compare; None: all that
    are possible for S and W. ``backward``: whether to include the backward pass. ``overlap``: whether transfers run
    during the computation. ``recipe``: the name of a recipe, which determines the number formats. ``schemes``: names of
    ways to split attention, as in :func:`ringspec.context_parallel`; None: all. ``mesh``: plan only the schemes that have
    its axes; None: all meshes of W ranks whose inner axis stays inside the fast links. ``text``: how many of the tokens are
    the text of joint attention. ``new``: how many of the tokens are new in 'pcp' and 'dcp'; all others are cached; None: all
    in 'pcp', one in 'dcp'. ``shapes``: the keywords batch, heads, kv_heads, head_dim, value_dim, causal and window of
    :func:`~ringspec.plan.workload.workload`.

    Raises the errors of ``workload``, LayoutError for a mesh of another number of ranks, and OptionError if the hardware lacks a rate or a link that is needed.

    >>> planned = plan(1 << 20, 64, hardware="trn2", kv_heads=8)
    >>> planned.best.layout, planned.link.name
    ('zigzag', 'NeuronLink-v3 between instances')
    >>> uneven = planned.option("contiguous", "kv").forward
    >>> round(uneven.imbalance, 2), round(uneven.lockstep_imbalance, 2)
    (1.98, 1.98)
    >>> [str(one.mesh) for one in planned.schemes if one.scheme == "usp"][0]
    'ring 32 x ulysses 2'
    """
    work = workload(length, workers, recipe_name=recipe, **shapes)
    both, overlapped = flag(backward, "backward"), flag(overlap, "overlap")
    chosen = check_layouts(layouts, work), check_circulations(circulations)
    device = hardware_named(hardware)
    planned = compared(work, device, both, overlapped, *chosen)
    given = {"schemes": schemes, "mesh": mesh, "text": text, "new": new}
    asked = check_question(work, device, scheme_layout(work, chosen[0]), both, overlapped, given)
    possible, impossible = scheme_options(asked)
    return replace(planned, schemes=possible, impossible=impossible)


def scheme_layout(work: Workload, layouts: tuple[str, ...]) -> str:
    """Return the layout for schemes: under a mask zigzag, or else striped, and contiguous without one, as far as allowed."""
    wanted = ("zigzag", "striped") if work.causal or work.window is not None else ("contiguous",)
    return next((one for one in wanted if one in layouts), layouts[0])


def compared(
    work: Workload,
    device: Hardware,
    backward: bool,
    overlap: bool,
    layouts: tuple[str, ...],
    circulations: tuple[str, ...],
) -> Plan:
    """Plan every combination of the given layouts and circulations, and choose the best."""
    options = tuple(
        option(layout, circulation, backward, work, device, overlap)
        for layout in layouts
        for circulation in circulations
    )
    return Plan(work, device, device.link(work.workers), overlap, options, best_of(options))


def alternatives(planned: Plan) -> list[Plan]:
    """Plan the same layer on W, W/2, W/4, ... workers, with all layouts and circulations; return the plans that fit.

    Only numbers of workers that divide the length are planned. The plan with the most workers comes first. A plan fits
    if its best option needs at most the whole memory of a device.

    >>> [one.work.workers for one in alternatives(plan(4096, 8))]
    [8, 4, 2, 1]
    """
    work, backward = planned.work, planned.best.backward is not None
    plans = []
    workers = work.workers
    while workers:
        if work.length % workers == 0:
            fewer = work.resized(workers, work.length // workers)
            ways = check_layouts(None, fewer), check_circulations(None)
            plans.append(compared(fewer, planned.hardware, backward, planned.overlap, *ways))
        workers //= 2
    return [one for one in plans if one.best.fits]


def option(
    layout: str, circulation: str, backward: bool, work: Workload, device: Hardware, overlap: bool
) -> Option:
    """Plan one layout and one circulation."""
    passes = [
        plan_pass(layout, circulation, way, work, device, overlap)
        for way in ((False, True) if backward else (False,))
    ]
    held = max(one.memory.total for one in passes)
    ends = [
        largest_ring(layout, circulation, work, device, way) if overlap else None
        for way in (False, True)[: len(passes)]
    ]
    known = [w for w in ends if w is not None]
    return Option(
        layout,
        circulation,
        passes[0],
        passes[1] if backward else None,
        held,
        held <= device.memory.value,
        min(known) if len(known) == len(ends) else None,
    )


def best_of(options: tuple[Option, ...]) -> Option:
    """Return the recommended option.

    Consider the options that fit into the memory of the device, and among these the options that are at most 1 % slower
    than the fastest. Of these, return the option that needs the least memory. If nothing fits, return the option that
    needs the least memory.
    """
    fitting = [one for one in options if one.fits]
    if not fitting:
        return min(options, key=lambda one: one.memory)
    fastest = min(one.seconds for one in fitting)
    equal = [one for one in fitting if one.seconds <= (1 + EQUAL) * fastest]
    return min(equal, key=lambda one: (one.memory, one.seconds))
