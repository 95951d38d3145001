"""Run one call of a target, and check everything about its result except the values.

A target is the program under test; a call is one request to it. :func:`ask` runs the target; :func:`outputs_of` checks
names, shapes and dtypes of the result. If something is wrong, each of them raises :class:`Stop` with the outcome of the
case.
"""

from __future__ import annotations

import contextlib
import io
import threading
import traceback
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.report.records import Finding
from ringspec.conformance.report.shared import dtype_fault
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import (
    due_formats,
    lse_back,
    shape_seen,
    to_numpy,
    turned_back,
)
from ringspec.conformance.target.declared import declared_recipe
from ringspec.conformance.target.protocol import (
    INTEGERS,
    RESULTS,
    Call,
    Crashed,
    Exited,
    Failed,
    Garbage,
    Mutated,
    PerWorker,
    Refused,
    Result,
    Target,
    TimedOut,
)
from ringspec.conformance.target.results import INTEGER, Due, due_of, fingerprint
from ringspec.errors import DtypeError, shown
from ringspec.formats import name_of

MOST_LOG, MOST_PRINTED = 4000, 500
OUTCOME_OF: dict[type[Failed], str] = {
    Exited: "exit",
    Crashed: "crash",
    TimedOut: "timeout",
    Garbage: "garbage",
    Mutated: "mutated",
}


class Stop(Exception):
    """Raised to end a case; contains the outcome of the case."""

    def __init__(self, outcome: str, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(outcome, message, findings)
        self.outcome, self.message, self.findings = outcome, message, findings


class Tail(io.TextIOBase):
    """A text stream that keeps the last :data:`MOST_LOG` characters written to it."""

    def __init__(self) -> None:
        self.kept = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # Anything but a string raises TypeError here, as with a real stdout.
        self.kept = (self.kept + text[-MOST_LOG:])[-MOST_LOG:]
        return len(text)

    def getvalue(self) -> str:
        return self.kept


def ask(target: Target, call: Call, capture: bool = True) -> tuple[Result, str]:
    """Run one call; return the result and what the target printed. Raise Stop if the target changed its inputs.

    ``capture``: keep the end of what the target prints, for the message of the case; otherwise it goes to stdout as
    usual. Only the main thread can capture it.
    """
    before, printed = fingerprint(call), Tail()
    # sys.stdout belongs to all threads, so it is redirected in the main thread only.
    alone = capture and threading.current_thread() is threading.main_thread()
    try:
        with contextlib.redirect_stdout(printed) if alone else contextlib.nullcontext():
            result: Any = target.run(call)
    except Stop:
        raise
    except (Exception, SystemExit) as error:
        outcome, message = failure(error)
        raise Stop(outcome, with_log(message, printed.getvalue())) from None
    finally:
        changed = fingerprint(call) != before
    if changed:
        raise Stop("mutated", with_log("the target changed its inputs", printed.getvalue()))
    if not isinstance(result, Result):
        message = f"run returned {shown(result)} instead of a Result"
        raise Stop("garbage", with_log(message, printed.getvalue()))
    return result, printed.getvalue() + str(getattr(target, "printed", ""))


def failure(error: BaseException) -> tuple[str, str]:
    """Return the outcome and the message of a case whose target raised an exception."""
    if isinstance(error, Refused):
        return "refused", str(error) or "refused without a reason"
    if isinstance(error, Failed):
        outcome = next((OUTCOME_OF[k] for k in OUTCOME_OF if isinstance(error, k)), "error")
        return outcome, with_log(str(error), error.log)
    if isinstance(error, SystemExit):
        return "exit", f"the target called sys.exit({error.code!r})"
    text = "".join(traceback.format_exception(error))[-MOST_LOG:]
    if isinstance(error, ValueError) and "read-only" in str(error):
        return "mutated", f"the target tried to change its inputs, which are read-only\n{text}"
    return "error", text


def with_printed(message: str, printed: str) -> str:
    r"""Add what the target printed to the message of a passed case; a long text is cut to its end.

    >>> with_printed("", "step 1 done\n")
    'it printed:\nstep 1 done'
    """
    printed = printed.strip()
    return f"{message}\nit printed:\n{printed[-MOST_PRINTED:]}".strip() if printed else message


def with_log(message: str, log: str) -> str:
    log = log.strip()
    return f"{message}\nit wrote:\n{log[-MOST_LOG:]}" if log else message


def outputs_of(result: Result, call: Call, claims: Capabilities) -> dict[str, PerWorker]:
    """Return the expected tensors of a result, per worker, in the suite's order of axes and in storage dtypes.

    The arrays are copies. If tensors are missing, or have a wrong shape or dtype, it raises :class:`Stop`. The outcome
    is the first that applies of 'missing', 'wrong shape' and 'wrong dtype'; the findings name each faulty tensor of
    each worker.
    """
    outputs: dict[str, PerWorker] = {}
    faults: list[tuple[str, Finding, str]] = []
    expected = due_of(call)
    unasked = [
        name for name in (*RESULTS, *INTEGERS) if name not in expected and given(result, name)
    ]
    if unasked:
        passes = " and ".join(call.passes)
        text = f"{', '.join(unasked)} returned, but not requested ({call.operation}, {passes})"
        raise Stop("garbage", f"{text}; leave it out or return None")
    axes = "BHSD" if call.operation == "merge" else claims.axes
    floats = call.operation != "layout"
    recipe = declared_recipe(claims.recipe, call.formats["inputs"]) if floats else None
    for name, due in expected.items():
        if name == "lse" and claims.lse == "hidden":
            continue
        arrays = arrays_of(getattr(result, name), name) or []
        arrays += [None] * (len(due.shapes) - len(arrays))
        formats = due_formats(name, due, recipe)
        for worker, x in enumerate(arrays):
            fault = fault_of(name, worker, x, due, formats, axes)
            if fault is not None:
                faults.append((fault[0], Finding(name, worker, fault[0]), fault[1]))
        if not faults:
            outputs[name] = tuple(settled(name, x, axes, claims) for x in arrays if x is not None)
    for kind in ("missing", "wrong shape", "wrong dtype"):
        texts = [(finding.tensor, text) for outcome, finding, text in faults if outcome == kind]
        if texts:
            first = dict(reversed(texts))  # of each tensor its first worker
            message = "; ".join(first[name] for name in dict.fromkeys(name for name, _ in texts))
            if more := len(texts) - len(first):
                message += f"; and {more} more on other workers"
            raise Stop(kind, message, tuple(finding for _, finding, _ in faults))
    return outputs


def given(result: Result, name: str) -> bool:
    """Tell whether a result contains the tensor ``name`` for at least one worker."""
    value = getattr(result, name)
    nothing = isinstance(value, list | tuple) and all(x is None for x in value)
    return value is not None and not nothing


def arrays_of(value: Any, name: str) -> list[NDArray | None] | None:
    """Convert a list of arrays to NumPy arrays; raise Stop with outcome 'garbage' for anything else."""
    if value is None:
        return None
    try:
        return [None if x is None else to_numpy(x, name) for x in value]
    except (DtypeError, TypeError) as error:
        raise Stop("garbage", f"{name} is not a list of arrays: {error}") from None


def fault_of(
    name: str,
    worker: int,
    x: NDArray | None,
    due: Due,
    formats: tuple[str, ...],
    axes: str,
) -> tuple[str, str] | None:
    """Return an outcome and a sentence if a worker's tensor is missing or has a wrong shape or dtype, else None."""
    if worker >= len(due.shapes):
        return (
            "wrong shape",
            f"{name} was returned for worker {worker}; there are {len(due.shapes)} workers",
        )
    if x is None:
        return "missing", f"{name} of worker {worker} is missing"
    wanted = shape_seen(name, due.shapes[worker], axes)
    if x.shape != wanted:
        return "wrong shape", f"{name} of worker {worker} has shape {x.shape}, expected {wanted}"
    if INTEGER in formats and x.dtype.kind in "iu":
        return None
    if name_of(x.dtype) not in formats:
        expected = " or ".join(dict.fromkeys(formats))
        return "wrong dtype", dtype_fault(name, worker, str(x.dtype), expected)
    return None


def settled(name: str, x: NDArray, axes: str, claims: Capabilities) -> NDArray:
    """Return a copy of an array in the suite's axis order and lse convention."""
    x = turned_back(name, x, axes)
    if name == "lse":
        x = lse_back(x, claims)
    return np.array(x, order="C")
