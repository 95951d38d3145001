"""The part of ``ringspec plan`` that shows ways to split attention: a table, what is not possible, when to use which."""

from __future__ import annotations

from ringspec.cli.shared.output import bands
from ringspec.plan import Plan
from ringspec.plan.advice import amount, duration, percent, scheme_advice
from ringspec.plan.scheme_options import LIMITS, USES, SchemeOption, SchemePass
from ringspec.plan.scheme_question import AXES

COLUMNS = (
    "sent fwd", "sent bwd", "held fwd", "held bwd", "steps", "msgs", "time", "waits", "exposed"
)  # fmt: skip
LEGEND = (
    "sent, held: bytes that the busiest rank sends, and the most that it holds at any moment, without buffers for what "
    "arrives (!: more than the device has); steps: steps in which ranks compute, in both passes; msgs: messages that one "
    "rank sends, in both passes; time, waits, exposed: as for a ring (-: no model); 4x2: outer x inner, ring x ulysses or "
    "tp x dcp"
)


def scheme_lines(planned: Plan, width: int, details: bool) -> list[str]:
    """Return the lines about schemes; ``details``: also what moves in each of them."""
    if planned.work.workers == 1:
        return []
    head = f"Ways to split attention over {planned.work.workers} ranks, {layout_words(planned)}:"
    sections = [
        [head, *(scheme_table(planned, width) if planned.schemes else [])],
        [
            *(
                f"{label_of(one)} is tensor parallelism alone: each rank holds the whole cache of its key heads."
                for one in planned.schemes
                if one.scheme == "dcp" and one.mesh.size("dcp") == 1
            ),
            *scheme_advice(planned),
            *(
                f"Not possible: {other.scheme}, because {other.why}. Fix: {other.fix}."
                for other in planned.impossible
            ),
        ],
        moving(planned) if details else [],
        [
            f"{name}: use it {USES[name]}. Limits: {LIMITS[name]}.".replace("`", "")
            for name in dict.fromkeys(one.scheme for one in planned.schemes)
        ],
    ]
    return [line for section in sections if section for line in [*section, ""]][:-1]


def layout_words(planned: Plan) -> str:
    """Return the layout of the schemes in words."""
    return planned.schemes[0].layout if planned.schemes else "none of which is possible"


def scheme_table(planned: Plan, width: int) -> list[str]:
    """Return a table with a line for each scheme and mesh."""
    labels, columns = [""], [[name] for name in COLUMNS]
    for one in planned.schemes:
        labels.append(label_of(one))
        for column, cell in zip(columns, cells_of(one), strict=True):
            column.append(cell)
    labels = [label.ljust(max(map(len, labels))) for label in labels]
    return [*bands(labels, columns, width, numbers=True), LEGEND]


def label_of(one: SchemeOption) -> str:
    """Return the scheme and the sizes of its mesh, with the names of the axes if they are in another order than usual."""
    if one.mesh.names != AXES[one.scheme][-len(one.mesh.axes) :]:
        return f"{one.scheme} {one.mesh}"
    return f"{one.scheme} {'x'.join(str(size) for _, size in one.mesh.axes)}"


def cells_of(one: SchemeOption) -> list[str]:
    """Return the cells of one scheme in the order of :data:`COLUMNS`."""
    both = [*one.passes, None][:2]
    times = one.times
    return [
        *("-" if way is None else f"{amount(way.bytes_sent)}B" for way in both),
        *(
            "-" if way is None else f"{amount(way.held)}B" + (" !" if not one.fits else "")
            for way in both
        ),
        str(sum(way.steps for way in one.passes)),
        str(sum(way.messages for way in one.passes)),
        *(
            ("-", "-", "-")
            if times is None
            else (
                duration(times.total),
                percent(times.waiting / times.total),
                percent(times.exposed / times.total),
            )
        ),
    ]


def moving(planned: Plan) -> list[str]:
    """Say what moves in each scheme, and the bytes along each axis of each mesh."""
    lines, said = [], set()
    for one in planned.schemes:
        if one.scheme not in said:
            said.add(one.scheme)
            for way in one.passes:
                moved = "; ".join(way.operations) or "nothing"
                lines.append(f"{label_of(one)} moves in the {way.name} pass: {moved}.")
        passes = [f"{way.name} {along_axes(way)}" for way in one.passes]
        lines.append(f"{label_of(one)} sends {'; '.join(passes)}.")
    return lines


def along_axes(way: SchemePass) -> str:
    """Return the bytes that a rank sends along each axis."""
    return (
        ", ".join(f"{amount(size)}B along {axis}" for axis, size in way.sent.items()) or "nothing"
    )
