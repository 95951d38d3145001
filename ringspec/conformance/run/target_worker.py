"""The program of a process that loads a Python target, the program under test, and answers its calls.

:class:`ringspec.conformance.run.process_target.ProcessTarget` starts it. It takes over standard input and output for
the protocol of ``cmd:`` targets (docs/conform/protocol.md), but its answers have a different form. What the target
prints goes to the log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ringspec.conformance.adapters.control import Message, refusal, take_control
from ringspec.conformance.adapters.wire import call_from, line_of, most_bytes, plain
from ringspec.conformance.run.call import MOST_LOG, Stop, arrays_of, ask
from ringspec.conformance.run.load import load_target
from ringspec.conformance.target.protocol import INTEGERS, RESULTS, Call, Result, Target
from ringspec.conformance.target.provenance import computed_with, said_by
from ringspec.errors import OptionError, RingspecError
from ringspec.tensorfile import DTYPES, MAX_HEADER, read_tensors, write_tensors

MOST_MESSAGE = 4 * MOST_LOG


def main() -> None:
    """Answer requests until the control stream ends."""
    setup = json.loads(sys.argv.pop())
    control = take_control()
    threadpool_limits(1)
    sys.path[:] = setup["path"]
    target: Target | None = None
    while True:
        message = control.next()
        if message["kind"] == "hello":
            target, reply = loaded(setup["spec"], message["protocol"])
        else:
            assert target is not None
            reply = answer(target, setup["spec"], message)
        control.reply(reply)


def loaded(spec: str, protocol: int) -> tuple[Target | None, Message]:
    """Return the target and the answer to the first request, 'hello'.

    If loading fails, return None and the parts of an OptionError.
    """
    try:
        target = load_target(spec)
        claims = {name: listed(value) for name, value in target.capabilities.as_dict().items()}
        said = said_by(target, spec) | {"capabilities": claims}
        own = {"own_processes": hasattr(target, "timeout")}
        reply = {"kind": "hello", "protocol": protocol} | own | said
        line_of(reply)
    except RingspecError as error:
        return None, refusal(error)
    except Exception as error:
        what = f"a target {spec} whose name, capabilities, notes and versions can be read"
        got = f"{type(error).__name__}: {error}"
        return None, refusal(OptionError(what, got, "use plain texts and numbers"))
    return target, reply


def listed(value: Any) -> Any:
    """Convert a capability for JSON; anything that can be iterated, such as a range, becomes a list."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    return plain(list(value) if several else value)


def answer(target: Target, spec: str, message: Message) -> Message:
    """Return the answer to one call, whatever the target does; write its results to the requested file."""
    call = call_from(message, read_tensors(message["inputs"]))
    try:
        result, printed = ask(target, call)
        tensors, results = described(result, call)
        write_tensors(message["result"], tensors)
    except Stop as stop:
        text = stop.message[:MOST_MESSAGE]
        return {"kind": "stop", "id": call.id, "outcome": stop.outcome, "message": text}
    reply = {"kind": "result", "id": call.id, "printed": printed[-MOST_LOG:], "results": results}
    have = computed_with(target, spec)
    return reply | {"versions": dict(have.versions), "files": dict(have.files)}


def described(result: Result, call: Call) -> tuple[dict[str, NDArray], Message]:
    """Return the arrays of a result by name and worker, and the dtype and shape of each.

    Some arrays are only described: those that the call does not request, that the file cannot hold, or that are far too
    large. A list that is too long is cut after one surplus entry.
    """
    asked = (RESULTS[:2] if "forward" in call.passes else ()) + (
        RESULTS[2:] if "backward" in call.passes else ()
    )
    asked = call.passes if call.operation == "layout" else asked
    tensors: dict[str, NDArray] = {}
    results: Message = {}
    room = most_bytes(call) - MAX_HEADER
    for name in (*RESULTS, *INTEGERS):
        arrays = arrays_of(getattr(result, name), name)
        arrays = None if arrays is None else arrays[: call.workers + 1]
        results[name] = None if arrays is None else [form_of(x) for x in arrays]
        for worker, x in enumerate(arrays or []):
            fits = x is not None and x.dtype in DTYPES.values() and x.nbytes <= room
            if x is not None and fits and name in asked:
                tensors[f"{name}.{worker}"] = x
                room -= x.nbytes
    return tensors, results


def form_of(x: NDArray | None) -> list[Any] | None:
    """Return dtype and shape of an array as plain data; None for None.

    >>> import numpy as np
    >>> form_of(np.zeros((2, 3), ">c8"))
    ['>c8', [2, 3]]
    """
    if x is None:
        return None
    dtype = str(x.dtype) if x.dtype.kind == "V" else x.dtype.str
    return [dtype, list(x.shape)]


if __name__ == "__main__":
    main()
