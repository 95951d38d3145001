"""The program that the target ``reference_mpi`` starts on each rank.

Rank 0 follows the protocol of ``cmd:`` programs (docs/conform/protocol.md) and broadcasts each call. All ranks read the
call's inputs file, and the first W ranks compute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ringspec.comm import mpi
from ringspec.comm.mpi import MpiLinks, world_links
from ringspec.comm.part import Setup
from ringspec.comm.ring import ring_over, run_over, seeds_of
from ringspec.conformance.adapters.wire import PROTOCOL, call_from, line_of
from ringspec.conformance.target.declared import base_recipe
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import (
    arrays_of,
    given_forward,
    options_of,
    reference_float64,
    tables_of,
    workers_of,
)
from ringspec.errors import LostWorkerError, RingspecError
from ringspec.formats import store
from ringspec.problem.options import check
from ringspec.rings.run import Run
from ringspec.rings.schedules import backward_schedule, forward_schedule
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.ring_backward import plus
from ringspec.spec.ring_forward import merge_states
from ringspec.tensorfile import read_tensors, write_tensors

LINE_BYTES = 1 << 20
LINE_TAG = 16 * 1024 + 20
FOREVER = float("inf")


def main() -> None:
    """Serve calls until standard input is closed."""
    links = world_links()
    rings: dict[int, Any] = {}
    with threadpool_limits(1):
        while True:
            message = passed_on(links)
            if message.get("kind") == "hello":
                answer({"kind": "hello", "protocol": PROTOCOL, "name": "ranks"}, links)
            elif message.get("kind") == "call":
                serve(links, rings, message)
            else:
                return


def passed_on(links: MpiLinks) -> dict[str, Any]:
    """Return the next message on every rank; an empty message when standard input is closed."""
    buffer = np.zeros(LINE_BYTES, np.uint8)
    if links.rank == 0:
        line = sys.stdin.readline().encode()[:LINE_BYTES]
        buffer[: len(line)] = np.frombuffer(line, np.uint8)
        for rank in range(1, links.size):
            links.wait(links.send(rank, LINE_TAG, buffer, "passes a call on"))
    else:
        buffer = links.awaited(links.receive(0, LINE_TAG, LINE_BYTES, "awaits a call"), FOREVER)
    text = buffer.tobytes().rstrip(b"\0").decode()
    message: dict[str, Any] = json.loads(text) if text.strip() else {}
    return message


def answer(message: dict[str, Any], links: MpiLinks) -> None:
    if links.rank == 0:
        sys.stdout.buffer.write(line_of(message))
        sys.stdout.buffer.flush()


def serve(links: MpiLinks, rings: dict[int, Any], message: dict[str, Any]) -> None:
    """Compute one call on the first W ranks, and write the result on rank 0."""
    workers = message["workers"]
    if workers not in rings:
        rings[workers] = links.comm.Split(int(links.rank >= workers), links.rank)
    if links.rank >= workers:
        return
    ring = MpiLinks(rings[workers], links.control, links.timeout, links.log)
    try:
        call = call_from(message, read_tensors(message["inputs"]))
        run = run_of(ring, call)
    except LostWorkerError as lost:
        mpi.end_all(lost)
    except RingspecError as error:
        answer({"kind": "error", "message": str(error)[:1000]}, links)
        if (
            links.control.error is not None
        ):  # messages are still in flight, so the ranks must restart
            mpi.abort(1)
        return
    if run is not None:
        results = workers_of(list(run.workers))
        due = due_of(call).items()
        stored = {name: [store(x, one.format) for x in results[name]] for name, one in due}
        write_tensors(Path(message["result"]), {name: np.stack(x) for name, x in stored.items()})
        answer({"kind": "result", "id": call.id}, links)


def run_of(links: MpiLinks, call: Call) -> Run | None:
    """Run the ring, or only its backward pass from the given o and lse; return the run on rank 0."""
    recipe = base_recipe(reference_float64.capabilities.recipe, call.formats["inputs"])
    q, k, v, dy, dlse = arrays_of(call)
    ways: dict[str, Any] = {"circulation": call.circulation, "direction": call.direction}
    if call.passes != ("backward",):
        layout = call.index_q, call.index_k
        options = options_of(call)
        run: Run | None = ring_over(
            links, q, k, v, dy, dlse=dlse, root=0, layout=layout, recipe=recipe, **ways, **options
        )
        return run
    problem = check(q, k, v, options_of(call))
    turn = call.circulation, call.workers, call.direction
    setup = Setup(
        problem,
        seeds_of(problem, dy, dlse),
        recipe,
        *tables_of(call),
        forward_schedule(*turn),
        backward_schedule(*turn),
        (block_forward, block_backward, merge_states, plus),
        tuple(given_forward(call)),
    )
    return run_over(links, links, setup, root=0)


if __name__ == "__main__":
    main()
