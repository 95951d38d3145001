"""Describe the recommendation of a plan: which layout and circulation of a ring to use, and what limits its speed."""

from __future__ import annotations

from ringspec.plan.options import Option, Plan, alternatives
from ringspec.plan.scheme_options import SchemeOption
from ringspec.plan.scheme_question import SERVING

# A plan whose workers are idle for at least this fraction of the time is called wasteful.
WASTEFUL = 0.5
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def advice(planned: Plan) -> list[str]:
    """Return the recommendation of the plan ``planned`` in sentences, the most important sentence first."""
    best = planned.best
    lines = [
        f"Use {best.layout} with {circulation_words(best)}: {duration(best.seconds)} per layer, "
        f"idle for {percent(best.idle)} of it; {amount(best.memory)}B on each worker."
    ]
    if not best.fits:
        lines[0] = (
            f"Nothing fits in the {amount(planned.hardware.memory.value)}B of a {planned.hardware.name}: "
            f"{best.layout} with {circulation_words(best)} needs the least, {amount(best.memory)}B."
        )
    lines += [*limits(planned, best), *others(planned, best)]
    if any(one.streaming_bound for one in best.passes):
        lines.append(
            "Reading and writing a step's blocks in memory takes longer than its products, so these times are too short."
        )
    return lines


def warning(planned: Plan) -> list[str]:
    """Return a warning if the workers are idle at least half of the time; else an empty list.

    The warning names a better plan if there is one: the fastest plan, on as many or fewer workers, whose workers
    compute most of the time.
    """
    best = planned.best
    if best.idle < WASTEFUL:
        return []
    waste = f"{percent(best.idle)} of the time is wasted: the workers wait for each other or for transfers."
    busy = [one for one in alternatives(planned) if one.best.idle < WASTEFUL]
    if not busy:
        return [f"{waste} No smaller ring that fits the device is better."]
    return [f"{waste} Better: {in_place(min(busy, key=lambda one: one.best.seconds), best)}."]


def in_place(other: Plan, best: Option) -> str:
    """Describe the plan ``other``: its workers, layout and circulation, and its time compared with ``best``."""
    one = other.best
    ring = f"a ring of {other.work.workers}, {one.layout} with {circulation_words(one)}"
    alone = "1 worker" if other.work.workers == 1 else ring
    return (
        f"{alone}: {duration(one.seconds)} per layer instead of {duration(best.seconds)}, "
        f"idle for {percent(one.idle)} of it"
    )


def circulation_words(one: Option) -> str:
    return {"kv": "a KV ring", "q": "a Q ring backward", "gather": "gathered keys"}[one.circulation]


def limits(planned: Plan, best: Option) -> list[str]:
    """Say whether the computation hides the transfers, and how many tokens per worker that needs."""
    work, link = planned.work, planned.link
    if work.workers == 1:
        return ["A single worker sends nothing."]
    exposed = sum(one.exposed_seconds for one in best.passes)
    lines = [
        f"The slowest link is {link.name}, {amount(link.bytes_per_second.value)}B/s; all workers wait for it "
        f"{percent(exposed / best.seconds)} of the time."
    ]
    if best.circulation == "gather":
        return [*lines, "A gather ends before the computation begins, so nothing hides it."]
    if not planned.overlap:
        return lines
    if best.hides_from is None:
        return [*lines, *nothing_hides(planned, best)]
    only = "" if work.tokens >= best.hides_from else "only "
    lines.append(
        f"The computation hides every transfer but that after the last step if a worker has {best.hides_from} tokens or more "
        f"(here it has {only}{work.tokens}){reach(planned, best)}."
    )
    return lines


def nothing_hides(planned: Plan, best: Option) -> list[str]:
    if planned.work.window is None:
        return ["No number of tokens per worker hides every transfer."]
    working, steps = best.forward.working_steps, best.forward.step_compute.size
    return [
        f"Because of the window, only {working} of {steps} forward steps compute anything; "
        "the other steps only pass blocks on, and nothing hides these transfers."
    ]


def reach(planned: Plan, best: Option) -> str:
    if best.hides_to is None:
        return "; with this length no ring of two or more workers does"
    near = max((x.workers or 0 for x in planned.hardware.links), default=0)
    slower = f" (more than {near} use a slower link)" if near and best.hides_to >= near else ""
    return f"; with {planned.work.length} tokens in all, up to {best.hides_to} workers{slower}"


def others(planned: Plan, best: Option) -> list[str]:
    """Return the times, relative to the best option, of the options that differ from it in layout or in circulation."""
    parts = []
    for one in planned.options:
        near = (one.layout == best.layout) != (one.circulation == best.circulation)
        if near and best.seconds:
            fits = "" if one.fits else ", which does not fit"
            parts.append(f"{one.layout}/{one.circulation} {one.seconds / best.seconds:.2f}{fits}")
    return [f"Times relative to this option: {'; '.join(parts)}."] if parts else []


def scheme_advice(planned: Plan) -> list[str]:
    """Say which scheme that trains is fastest, sends least and holds least, of those that fit into the device."""
    able = [one for one in planned.schemes if one.fits and one.scheme not in SERVING]
    if len({one.scheme for one in able}) < 2:
        return []
    timed = [(one.times.total, one) for one in able if one.times is not None]
    least_sent = min(able, key=lambda one: sum(way.bytes_sent for way in one.passes))
    total = sum(way.bytes_sent for way in least_sent.passes)
    held = min(one.held for one in able)
    least_held = dict.fromkeys(one.scheme for one in able if one.held == held)
    words = [
        f"{named(least_sent)} sends least, {amount(total)}B",
        f"{listing([*least_held])} {'holds' if len(least_held) == 1 else 'hold'} least, {amount(held)}B",
    ]
    if timed:
        seconds, fastest = min(timed, key=lambda pair: pair[0])
        words.insert(0, f"{named(fastest)} is fastest, {duration(seconds)}")
    return [f"Of the schemes that can train and fit into memory: {'; '.join(words)}."]


def listing(names: list[str]) -> str:
    """Return names joined by commas and 'and'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def named(one: SchemeOption) -> str:
    """Return the scheme with its mesh in words."""
    return f"{one.scheme} ({one.mesh})"


def amount(x: float) -> str:
    """Format a number with a decimal prefix and three digits.

    >>> amount(450e9), amount(1536), amount(0)
    ('450 G', '1.54 k', '0 ')
    """
    for size, prefix in PREFIXES:
        if x >= size:
            return f"{x / size:.3g} {prefix}"
    return f"{x:.3g} "


def duration(seconds: float) -> str:
    """Format a time with the unit that suits it.

    >>> duration(0.00123), duration(4.5e-5), duration(75.0), duration(0.0)
    ('1.23 ms', '45 us', '75 s', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def percent(x: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.123), percent(0.00001)
    ('12.3 %', '0.0 %')
    """
    return f"{100 * x:.1f} %"
