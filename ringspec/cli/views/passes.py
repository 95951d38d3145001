"""Describe one pass of a ring, as plain data for --json and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringspec.cli.shared.output import bands
from ringspec.problem.model import Problem
from ringspec.recipes import Recipe
from ringspec.rings.cost import cost, pairs_text
from ringspec.rings.schedules import cp_offset, zigzag_offsets
from ringspec.rings.show import travelling
from ringspec.spec.layout import Layout
from ringspec.spec.schedule import Schedule

MAX_TABLE = 16

Data = dict[str, Any]


def pass_data(
    problem: Problem,
    schedule: Schedule,
    layout_q: Layout,
    layout_k: Layout,
    recipe: Recipe,
    q_offset: int,
) -> Data:
    """Return what each worker computes and sends in each step of one pass, with the keys of ``schema.json``.

    Query i must have position i + ``q_offset``, and key j must have position j.
    """
    counted = cost(problem, schedule, layout_q, layout_k, recipe)
    steps = []
    for t, step in enumerate(schedule.steps):
        met = dict(schedule.pairs(t))
        workers = []
        for r in range(schedule.workers):
            a, b = met.get(r, (None, None))
            offset = None
            if a is not None and b is not None and problem.terms.causal:
                offset = offset_of(layout_q, layout_k, a, b, q_offset)
            workers.append(
                {
                    "worker": r,
                    "query_owner": a,
                    "key_owner": b,
                    "visible_pairs": int(counted.pairs[t, r]),
                    "cp_offset": offset,
                    "bytes_sent": int(counted.sent[t, r]),
                }
            )
        transfers = [
            {
                "kind": x.kind,
                "carries": list(x.carries),
                "pairs": [list(p) for p in x.pairs],
            }
            for x in step.transfers
        ]
        steps.append(
            {
                "step": t,
                "workers": workers,
                "visible_pairs": int(counted.pairs[t].sum()),
                "bytes_sent": int(counted.sent[t].sum()),
                "transfers": transfers,
                "then": travelling(schedule, t),
            }
        )
    return {
        "name": schedule.name,
        "moves": schedule.moves,
        "hops": schedule.hops,
        "steps": steps,
        "visible_pairs": int(counted.pairs.sum()),
        "copies": counted.copies,
        "bytes_sent": int(counted.sent.sum()),
        "imbalance": counted.imbalance,
        "lockstep_imbalance": counted.lockstep_imbalance,
        "skipped": [list(pair) for pair in sorted(schedule.skipped)],
    }


def offset_of(
    layout_q: Layout, layout_k: Layout, a: int, b: int, q_offset: int
) -> int | list[list[int]] | None:
    """Return the offset of the causal diagonal for the queries of worker ``a`` and the keys of worker ``b``.

    The rules of the specification are RING-8 and RING-9. In the zigzag layout each worker has two chunks of tokens, so
    the result is a 2 x 2 list, with an offset for each pair of chunks (rule RING-10). In other layouts than contiguous,
    striped and zigzag, the result is None.
    """
    sizes = {
        "workers": layout_q.workers,
        "n_q": layout_q.slots,
        "n_k": layout_k.slots,
        "q_offset": q_offset,
    }
    if layout_q.name in ("contiguous", "striped"):
        return cp_offset(layout_q.name, a, b, **sizes)
    if layout_q.name == "zigzag":
        return [list(chunk) for chunk in zigzag_offsets(a, b, **sizes)]
    return None


def layout_data(layout_q: Layout, layout_k: Layout) -> Data:
    return {
        "name": layout_q.name,
        "queries": layout_q.table.tolist(),
        "keys": layout_k.table.tolist(),
    }


def pass_lines(data: Data, width: int, before: Data | None = None) -> list[str]:
    """Return one pass as text. The table of blocks is omitted if the pass ``before`` has the same table."""
    copies = data["copies"]
    lines = [f"{data['name']}: query x key block ({pairs_text(copies)})"]
    steps, workers = data["steps"], len(data["steps"][0]["workers"])
    same = same_meetings(data, before)
    columns = [[f"step {t}"] for t in range(len(steps))]
    labels = ["worker"]
    if not same and workers <= MAX_TABLE:
        labels += [str(r) for r in range(workers)]
        for t, step in enumerate(steps):
            columns[t] += [cell(w, copies) for w in step["workers"]]
    if not same:
        labels.append("pairs")
        for t, step in enumerate(steps):
            columns[t].append(str(step["visible_pairs"] // copies))
    labels.append("bytes")
    for t, step in enumerate(steps):
        columns[t].append(str(step["bytes_sent"]))
    if same:
        lines[0] = f"{data['name']}: the same blocks in the same steps as above"
        labels[0] = ""
    elif workers > MAX_TABLE:
        lines[0] = f"{data['name']}: no table for W > {MAX_TABLE}; --json has every worker"
        labels[0] = ""
    return [*lines, *bands(labels, columns, width), *then_lines(steps), summary(data)]


def same_meetings(data: Data, before: Data | None) -> bool:
    """Return whether every worker computes the same blocks in the same steps as in the pass ``before``."""
    return before is not None and meetings(before) == meetings(data)


def meetings(data: Data) -> list[list[tuple[int | None, int | None]]]:
    """Return, for every step and worker, (owner of the queries, owner of the keys) of the blocks that it computes."""
    return [[(w["query_owner"], w["key_owner"]) for w in step["workers"]] for step in data["steps"]]


def cell(worker: Data, copies: int) -> str:
    if worker["query_owner"] is None:
        return "-"
    pairs = worker["visible_pairs"] // copies
    return f"q{worker['query_owner']} x k{worker['key_owner']} ({pairs})"


def then_lines(steps: list[Data]) -> list[str]:
    """Return lines that say what is sent after each step; consecutive steps with the same transfers share a line."""
    lines, first = [], 0
    for t, step in enumerate(steps):
        last = t == len(steps) - 1
        if last or steps[t + 1]["then"] != step["then"]:
            which = f"step {t}" if first == t else f"steps {first} to {t}"
            if step["transfers"]:
                lines.append(f"after {which}: {step['then']}")
            first = t + 1
    return lines


def summary(data: Data) -> str:
    hops = "1 hop" if data["hops"] == 1 else f"{data['hops']} hops"
    times = "" if data["copies"] == 1 else f"{data['copies']} x "
    return (
        f"total: {hops}, {data['bytes_sent']} bytes, {times}{data['visible_pairs'] // data['copies']} "
        f"pairs; imbalance {data['imbalance']:.2f} (lockstep {data['lockstep_imbalance']:.2f})"
    )


def offset_lines(data: Data, layout: str, width: int) -> list[str]:
    """Return the table of causal offsets as lines, with an offset for each worker and step."""
    steps = data["steps"]
    workers = len(steps[0]["workers"])
    if layout not in ("contiguous", "striped", "zigzag"):
        return [
            f"cp_offset: not defined for the layout {layout}; its masks are computed from positions"
        ]
    if workers > MAX_TABLE:
        return [f"cp_offset: no table for W > {MAX_TABLE}; --json has every worker"]
    lines = ["cp_offset: the query at local index i attends to the key at j iff j <= i + offset"]
    if layout == "zigzag":
        lines.append(
            "entries: first query chunk with first and second key chunk / second query chunk with first and second"
        )
    labels = ["worker"] + [str(r) for r in range(workers)]
    columns = [
        [f"step {t}"] + [offset_text(w["cp_offset"]) for w in step["workers"]]
        for t, step in enumerate(steps)
    ]
    return [*lines, *bands(labels, columns, width)]


def offset_text(offset: Any) -> str:
    """Format an offset, a 2 x 2 list of offsets, or None.

    >>> offset_text(-8), offset_text([[0, -48], [48, 0]]), offset_text(None)
    ('-8', '0 -48 / 48 0', '-')
    """
    if offset is None:
        return "-"
    if isinstance(offset, int):
        return str(offset)
    return " / ".join(" ".join(str(entry) for entry in row) for row in offset)


def tokens_text(tokens: Sequence[int], most: int = 4) -> str:
    """Format token indices as arithmetic sequences, followed by the number of padding slots (-1).

    >>> tokens_text([0, 4, 8, 12]), tokens_text([0, 1, 14, 15]), tokens_text([5, -1])
    ('0, 4 .. 12', '0..1, 14..15', '5, and 1 padding slot')
    """
    real = [int(token) for token in tokens if token >= 0]
    padding = len(tokens) - len(real)
    parts = [run_text(real[a:b]) for a, b in runs(real)]
    if len(parts) > most:
        parts = [*parts[:most], f"... ({len(real)} tokens)"]
    if padding:
        parts.append(f"and {padding} padding slot" + ("s" if padding > 1 else ""))
    return ", ".join(parts) or "nothing"


def runs(tokens: list[int]) -> list[tuple[int, int]]:
    """Divide ``tokens`` into arithmetic sequences that are as long as possible; return (start, stop) of each."""
    found, a = [], 0
    while a < len(tokens):
        b = a + 1
        while b < len(tokens) and tokens[b] - tokens[b - 1] == tokens[a + 1] - tokens[a]:
            b += 1
        found.append((a, b))
        a = b
    return found


def run_text(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    if run[1] == run[0] + 1:
        return f"{run[0]}..{run[-1]}"
    if len(run) == 2:
        return f"{run[0]}, {run[1]}"
    return f"{run[0]}, {run[1]} .. {run[-1]}"


def holding_lines(layout: Data) -> list[str]:
    """Return lines that list the tokens of each worker, separately for queries and keys if these differ."""
    if len(layout["queries"]) > MAX_TABLE:
        return [f"tokens: no table for W > {MAX_TABLE}; --json has every worker"]
    lines = ["worker  tokens"]
    for r, (queries, keys) in enumerate(zip(layout["queries"], layout["keys"], strict=True)):
        text = tokens_text(queries)
        if layout["queries"] != layout["keys"]:
            text = f"queries {text}; keys {tokens_text(keys)}"
        lines.append(f"{r:>6}  {text}")
    return lines
