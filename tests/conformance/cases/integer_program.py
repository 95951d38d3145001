"""The operation 'layout' by loops over single tokens, right or with one bug; nothing here comes from ringspec.

Documents are walked token by token: each token is put on its worker, and everything is counted from these lists. This
file runs alone as a program of the command protocol: ``python integer_program.py [BUG]``.
"""

import json
import struct
import sys

RESULTS = ("table", "positions", "lengths", "cu_seqlens", "visible")
BUGS = {
    "layout-floor-length": ("lengths", "cu_seqlens"),
    "layout-ceil-length": ("lengths", "cu_seqlens"),
    "layout-floor-cu-seqlens": ("lengths", "cu_seqlens"),
    "layout-padding-as-tokens": ("table", "lengths", "cu_seqlens"),
    "layout-global-lengths": ("lengths",),
    "layout-packed-positions": ("positions",),
    "layout-slot-positions": ("positions",),
    "layout-prefix-dropped": ("positions",),
    "layout-padded-prefix": ("positions",),
    "layout-positions-as-table": ("table",),
    "layout-global-zigzag": ("table",),
    "layout-second-chunk": ("table",),
    "layout-interleave-ignored": ("lengths", "visible"),
    "layout-kernel-block": ("lengths", "visible"),
    "layout-batch-position": ("table", "lengths"),
    "layout-right-aligned": ("visible",),
}


def owner_of(layout, i, room, workers, interleave, bug):
    """The worker of slot i of a document, found by walking its chunks or blocks."""
    if layout == "interleaved":
        block = {"layout-interleave-ignored": 1, "layout-kernel-block": max(interleave // 2, 1)}
        worker, left = 0, block.get(bug, interleave)
        for _ in range(i):
            left -= 1
            if left == 0:
                worker, left = (worker + 1) % workers, block.get(bug, interleave)
        return worker
    if layout == "striped_padded":
        return i % workers
    if layout == "contiguous_padded":
        return i // (room // workers)
    chunk = i // (room // (2 * workers))
    if chunk < workers:
        return chunk
    return chunk - workers if bug == "layout-second-chunk" else 2 * workers - 1 - chunk


def walked(layout, workers, cu, cu_padded, interleave, bug):
    """Per worker and document the offsets of its slots, -1 for padding; interleaved ones without padding."""
    held = [[[] for _ in cu[1:]] for _ in range(workers)]
    for d, (first, stop) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        n = stop - first
        room = n if cu_padded is None else cu_padded[d + 1] - cu_padded[d]
        for i in range(room):
            at, size = i, room
            if bug == "layout-global-zigzag" and layout == "zigzag_padded":
                at, size = cu_padded[d] + i, cu_padded[-1]
            if bug == "layout-batch-position" and layout == "interleaved":
                at = first + i
            worker = owner_of(layout, at, size, workers, interleave, bug)
            real = i < n or bug == "layout-padding-as-tokens"
            held[worker][d].append(i if real else -1)
    return held


def answer(
    layout,
    workers,
    passes,
    cu_seqlens,
    cu_seqlens_padded=None,
    interleave=None,
    prefix=None,
    queries=None,
    bug=None,
):
    [result] = passes
    bug = bug if bug in BUGS and result in BUGS[bug] else None
    cu, documents = list(cu_seqlens), len(cu_seqlens) - 1
    lengths = [cu[d + 1] - cu[d] for d in range(documents)]
    held = walked(layout, workers, cu, cu_seqlens_padded, interleave, bug)
    if result in ("table", "positions"):
        return {
            result: slots(
                held, result, layout, workers, cu, cu_seqlens_padded, interleave, prefix, bug
            )
        }
    if result == "visible":
        return {
            result: [
                [
                    [
                        seen(held[r][d], lengths[d] - queries + j, queries, j, bug)
                        for j in range(queries)
                    ]
                    for d in range(documents)
                ]
                for r in range(workers)
            ]
        }
    counts = [[sum(i >= 0 for i in held[r][d]) for d in range(documents)] for r in range(workers)]
    if bug == "layout-floor-length":
        counts = [[n // workers for n in lengths]] * workers
    if bug == "layout-ceil-length":
        counts = [[(n + workers - 1) // workers for n in lengths]] * workers
    if bug == "layout-global-lengths":
        counts = [lengths] * workers
    if bug == "layout-floor-cu-seqlens":
        counts = [[cu[d + 1] // workers - cu[d] // workers for d in range(documents)]] * workers
    if result == "lengths":
        return {result: counts}
    return {result: [[sum(row[:d]) for d in range(documents + 1)] for row in counts]}


def seen(offsets, position, queries, j, bug):
    if bug == "layout-right-aligned":
        return max(len(offsets) - queries + 1 + j, 0)
    return sum(0 <= i <= position for i in offsets)


def slots(held, result, layout, workers, cu, cu_padded, interleave, prefix, bug):
    right = walked(layout, workers, cu, cu_padded, interleave, None)
    table = []
    for r in range(workers):
        row = []
        for d in range(len(cu) - 1):
            wrong = bug == "layout-padding-as-tokens" and cu_padded is not None
            first = cu_padded[d] if wrong else cu[d]
            add = (
                0
                if result == "table" or prefix is None or bug == "layout-prefix-dropped"
                else prefix[d]
            )
            if bug == "layout-padded-prefix" and cu_padded is not None and prefix is not None:
                add = max(add - (cu_padded[d + 1] - cu_padded[d] - cu[d + 1] + cu[d]), 0)
            start = first if result == "table" else add
            if bug == "layout-packed-positions":
                start = cu[d]
            if bug == "layout-positions-as-table":
                start = 0
            row += [start + i if i >= 0 else -1 for i in held[r][d]]
            if layout == "interleaved" and bug != "layout-batch-position":
                row += [-1] * (len(right[0][d]) - len(held[r][d]))
        if bug == "layout-slot-positions":
            row = [slot if value >= 0 else -1 for slot, value in enumerate(row)]
        if bug == "layout-batch-position" and layout == "interleaved":
            width = sum(len(one) for one in right[0])
            row = (row + [-1] * width)[:width]
        table.append(row)
    return table


def main(bug=None):
    claims = {
        "operations": [f"layout-{name}" for name in RESULTS],
        "layouts": ["zigzag_padded", "contiguous_padded", "striped_padded", "interleaved"],
        "features": ["prefix"],
    }
    for line in sys.stdin:
        message = json.loads(line)
        if message["kind"] == "hello":
            print(
                json.dumps({"kind": "hello", "name": "integers", "capabilities": claims}),
                flush=True,
            )
            continue
        [name] = message["passes"]
        found = answer(message["layout"], message["workers"], [name], **message["terms"], bug=bug)[
            name
        ]
        write(message["result"], name, found)
        print('{"kind":"result"}', flush=True)


def write(path, name, rows):
    """A safetensors file with one tensor of 32-bit integers."""
    shape, flat = [], rows
    while isinstance(flat, list):
        shape.append(len(flat))
        flat = flat[0] if flat else 0
    numbers = rows
    for _ in shape[1:]:
        numbers = [x for row in numbers for x in row]
    data = struct.pack(f"<{len(numbers)}i", *numbers)
    header = json.dumps(
        {name: {"dtype": "I32", "shape": shape, "data_offsets": [0, len(data)]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


if __name__ == "__main__":
    main(*sys.argv[1:])
