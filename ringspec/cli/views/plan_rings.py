"""The part of ``ringspec plan`` that compares rings: the workload, a table, the passes of the best ring, advice."""

from __future__ import annotations

from ringspec.cli.shared import output
from ringspec.plan import Pass, Plan
from ringspec.plan.advice import advice, amount, duration, percent, warning


def text(one: Plan, width: int, short: bool = False) -> list[str]:
    """Return one plan as lines: warnings, workload, table of rings, passes of the best ring, advice; or the workload alone."""
    if short:
        return heading(one)
    lines = [*warning(one), *heading(one), "", *table(one, width), ""]
    for way in one.best.passes:
        lines.append(pass_line(way))
    return [*lines, "", *advice(one)]


def heading(one: Plan) -> list[str]:
    work, device = one.work, one.hardware
    mask = "causal" if work.causal else "no mask"
    if work.window is not None:
        mask += f", window {work.window[0]},{work.window[1]}"
    peak = device.peak(work.recipe.p).value
    efficiencies = [device.efficiency(way).value for way in (False, True)]
    return [
        f"{work.workers} workers, {work.length} tokens, {work.tokens} each: batch {work.batch}, "
        f"heads {work.heads}/{work.kv_heads}, D {work.head_dim}/{work.value_dim}, {mask}, "
        f"recipe {work.recipe.name}",
        f"{device.name}: {amount(peak)}FLOP/s, of which {efficiencies[0]:.2f} forward and "
        f"{efficiencies[1]:.2f} backward; {one.link.name}: "
        f"{amount(one.link.bytes_per_second.value)}B/s, {one.link.latency.value * 1e6:.3g} us a hop"
        f"{'' if one.overlap else '; no overlap'}",
    ]


def table(one: Plan, width: int) -> list[str]:
    """Return a table with a line for each layout and kind of ring; columns that exceed ``width`` continue below."""
    labels, columns = [""], [[name] for name in COLUMNS]
    for entry in one.options:
        mark = "*" if entry is one.best else " "
        labels.append(f"{mark} {entry.layout} {entry.circulation}")
        back = entry.backward
        cells = [
            duration(entry.seconds),
            f"{entry.seconds / one.best.seconds:.2f}",
            duration(entry.forward.seconds),
            "-" if back is None else duration(back.seconds),
            percent(entry.idle),
            percent(sum(way.waiting_seconds for way in entry.passes) / entry.seconds),
            percent(sum(way.exposed_seconds for way in entry.passes) / entry.seconds),
            amount(entry.memory) + ("B" if entry.fits else "B !"),
            "-" if entry.hides_from is None else str(entry.hides_from),
            "-" if entry.hides_to is None else str(entry.hides_to),
        ]
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    labels = [label.ljust(max(map(len, labels))) for label in labels]
    return [*output.bands(labels, columns, width, numbers=True), LEGEND]


COLUMNS = ("time", "ratio", "forward", "backward", "idle", "waits", "exposed", "memory", "n*", "W*")
LEGEND = (
    "*: recommended; idle: fraction of the time in which an average worker does not compute, because it waits for the "
    "busiest worker of the step (waits) or for transfers (exposed); memory: of one worker, with its buffers, ! if the "
    "device has less; n*, W*: with at least n* tokens per worker, or at most W* workers, computation hides all transfers "
    "but that after the last step"
)


def pass_line(way: Pass) -> str:
    return (
        f"{way.name}: {duration(way.seconds)} ({duration(way.compute_seconds)} computing, "
        f"{duration(way.waiting_seconds)} waiting for the busiest worker, {duration(way.exposed_seconds)} waiting "
        f"for transfers, which take {duration(way.transfer_seconds)}); {way.hops} hops, "
        f"{amount(way.bytes_sent)}B sent by each worker; lockstep imbalance {way.lockstep_imbalance:.2f}"
    )
