"""The text about a shrunk case: the simplest call found that fails in the same way as the original case."""

from __future__ import annotations

import json
from collections.abc import Iterator

from numpy.typing import NDArray

from ringspec.compare.explain import explain_all
from ringspec.conformance.reproduce.explicit import Explicit
from ringspec.conformance.reproduce.shrink import Shrunk
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.vectors.format.case import Shape

WIDTH = 80
MOST_INPUTS, MOST_RESULTS = 10, 2  # lines
FEATURES = {
    "cu_seqlens": "documents", "segments_q": "segments", "bound_min": "bounds", "mask": "dense mask",
    "bias": "bias", "sinks": "sinks", "softcap": "softcap", "dropout_p": "dropout", "keep": "keep",
    "dlse": "dlse", "q_offset": "q_offset", "positions_q": "positions",
}  # fmt: skip


def lines(shrunk: Shrunk) -> list[str]:
    """Describe the simplest call in about 20 lines of at most 80 columns."""
    found = [f"shrunk from {describe(shrunk.first.problem)}", f"to {describe(shrunk.last.problem)}"]
    count = "1 trial" if shrunk.trials == 1 else f"{shrunk.trials} trials"
    ended = "" if shrunk.finished else "; the time ran out, --shrink-time gives more"
    found.append(f"  {count}, {shrunk.seconds:.1f} s{ended}")
    found += inputs(shrunk.last.call)
    found += explain_all(shrunk.last.findings, MOST_RESULTS).splitlines()
    if shrunk.explanation:
        found.append(f"explanation: {' '.join(shrunk.explanation)}")
    else:
        before, after = (", ".join(one.tensors) for one in (shrunk.first, shrunk.last))
        same = f"the same tensors are wrong: {after}"
        found.append(same if before == after else f"wrong: {after}; in the case: {before}")
    return found


def describe(problem: Explicit) -> str:
    """Return one line that describes the workers, sizes, mask and options of a problem.

    >>> from ringspec.conformance.cases.problems import dealt, drawn, tensors_of
    >>> from ringspec.conformance.cases.calls import call_of
    >>> from ringspec.conformance.reproduce.explicit import explicit_of
    >>> case = dealt(drawn("example", "bf16", causal=True, D=4, Hkv=1), "example", 2, "zigzag")
    >>> describe(explicit_of(call_of(case, tensors_of(case))))
    '2 workers x 24 tokens, 2 heads (1 key head), D = 4, causal, zigzag, bfloat16'
    """
    shape = problem.shape
    parts = [f"{plural(problem.workers, 'worker')} x {tokens(problem)}", heads(shape)]
    parts += [f"batch of {shape.B}"] if shape.B > 1 else []
    parts.append(f"D = {shape.D}" + (f", Dv = {shape.Dv}" if shape.Dv != shape.D else ""))
    parts += ["causal"] if problem.terms.get("causal") else []
    window = problem.terms.get("window")
    parts += [] if window is None else [f"window {window}"]
    present = {*problem.terms, *problem.tensors}
    parts += [words for name, words in FEATURES.items() if name in present]
    parts += [] if problem.default_scale else [f"scale {problem.terms['scale']:g}"]
    if problem.ring is not None and problem.ring.layout != "contiguous":
        parts.append(problem.ring.layout)
    return ", ".join([*parts, problem.formats.inputs])


def tokens(problem: Explicit) -> str:
    """Describe the number of tokens of a worker."""
    shape, workers = problem.shape, problem.workers
    of_q, of_k = -(-shape.Sq // workers), -(-shape.Sk // workers)
    if shape.Sq == shape.Sk:
        return plural(of_q, "token")
    return f"{plural(of_q, 'query', 'queries')} and {plural(of_k, 'key')}"


def heads(shape: Shape) -> str:
    """Describe the number of query heads and, if it differs, of key heads."""
    shared = "" if shape.Hkv == shape.H else f" ({plural(shape.Hkv, 'key head')})"
    return plural(shape.H, "head") + shared


def plural(count: int, one: str, several: str = "") -> str:
    """Format a count with its noun.

    >>> plural(1, "token"), plural(2, "query", "queries"), plural(2, "head")
    ('1 token', '2 queries', '2 heads')
    """
    return f"{count} {one if count == 1 else several or one + 's'}"


def inputs(call: Call) -> list[str]:
    """Describe the options and the tensors of a call as lines."""
    passes = " and ".join(call.passes)
    ring = f", {call.circulation}, direction {call.direction}" if call.operation == "ring" else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in call.mesh)
    scheme = f", {call.scheme}, mesh {mesh}" if call.scheme else ""
    found = [f"{call.operation}, {passes}, {call.layout}{ring}{scheme}"]
    terms = ", ".join(f"{name} = {json.dumps(x)}" for name, x in sorted(call.terms.items()))
    found += [terms] if terms else []
    for name, shards in call.tensors.items():
        entries = [f"worker {worker} {numbers(x)}" for worker, x in enumerate(shards)]
        found += wrapped(name, entries)
    if len(found) > MOST_INPUTS:
        more = len(found) - MOST_INPUTS
        found = [*found[:MOST_INPUTS], f"and {more} more lines; --json has every number"]
    return [f"  {line if len(line) < WIDTH - 2 else line[: WIDTH - 6] + ' ...'}" for line in found]


def wrapped(name: str, entries: list[str]) -> Iterator[str]:
    """Format one tensor as lines; ``entries`` are the texts of its parts on each worker."""
    line = f"{name:3}"
    for entry in entries:
        if len(line) + len(entry) + 4 > WIDTH and line.strip() not in ("", name):
            yield line
            line = " " * 3
        line += f" {entry} "
    yield line.rstrip()


def numbers(x: NDArray) -> str:
    """Format an array as nested lists. Leading axes of length 1 are dropped while there are more than two axes.

    >>> import numpy as np
    >>> numbers(np.array([[[[1.0, -0.5]]]])), numbers(np.array([[0, 1]]))
    ('[[1, -0.5]]', '[[0, 1]]')
    """
    values = x if x.dtype.kind in "ib" else load(x)
    while values.ndim > 2 and len(values) == 1:
        values = values[0]
    return written(values.tolist())


def written(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, float) and value == int(value if abs(value) < 1e15 else 0):
        return str(int(value))
    return str(value)
