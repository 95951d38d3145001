"""Reports made by hand, for the tests of what reads them."""

import math
from types import SimpleNamespace

from ringspec.conformance.report.records import Finding, Record
from ringspec.conformance.report.report import Report, counts_of, footer_of, make_header
from ringspec.conformance.target.capabilities import Capabilities

TARGET = SimpleNamespace(
    name="my kernel",
    capabilities=Capabilities(layouts=("contiguous", "zigzag"), formats=("bfloat16", "float32")),
    notes=("its ring code is untouched",),
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&\"'\x00\x1b"


def needs(**changes):
    plain = {
        "operation": "ring",
        "passes": ["forward", "backward"],
        "workers": 4,
        "layout": "zigzag",
        "circulation": "kv",
        "inputs": "bfloat16",
        "masks": ["causal"],
        "features": [],
    }
    return plain | changes


def findings(wrong=(), workers=4, tensors=("o", "lse", "dq", "dk", "dv")):
    """One finding a tensor and worker, ok but for those in ``wrong``."""
    by_place = {(one.tensor, one.worker): one for one in wrong}
    return tuple(
        by_place.get(
            (name, worker),
            Finding(name, worker, "ok", 0.05 + 0.07 * worker, (0, 1, 2, 3), 0.5, 0.5, 0, 24),
        )
        for name in tensors
        for worker in range(workers)
    )


def pattern(size=24):
    """A causal triangle, and the same with a row too much and a block missing."""
    expected = [[int(j <= i) for j in range(size)] for i in range(size)]
    got = [[int(j <= i + (size // 3 <= i < size // 2)) for j in range(size)] for i in range(size)]
    for i in range(size * 3 // 4, size):
        got[i][: size // 4] = [0] * (size // 4)
    return {"expected": expected, "got": got}


def records(target_case="ring/zigzag-causal-w4"):
    worst = Finding("dk", 2, "beyond bound", 412.25, (0, 1, 5, 3), 0.53, 0.12, 37, 64)
    nan = Finding("dv", 3, "NaN", math.inf, (0, 0, 1, 0), math.nan, -0.25, 1, 24)
    wrong = findings([worst, nan])
    return (
        Record(
            target_case, "mismatch", needs(), "", "", wrong, 0.25, ("stale-keys", "wrong-delta")
        ),
        Record(
            "probes/pattern-zigzag-w4",
            "mismatch",
            needs(passes=["forward"]),
            message="Query 8 (worker 1, slot 2) attends to the hidden key 9 of worker 1.",
            findings=findings(
                [Finding("o", 1, "beyond bound", 3.5, (0, 0, 2, 1), 1.0, 0.0, 4, 24)]
            ),
            picture=pattern(),
        ),
        Record(
            "ring/softcap-w2", "crash", needs(workers=2, features=["softcap"]), message="signal 11"
        ),
        Record("ring/window-w2", "timeout", needs(workers=2, masks=["window"]), message="60 s"),
        *(
            Record(
                f"ring/plain-{n}", "pass", needs(workers=n, masks=[]), "", "", findings(workers=n)
            )
            for n in (2, 3, 4)
        ),
        Record("ring/known", "expected failure", needs(masks=["documents"]), "known limit"),
        *(
            Record(f"ring/sinks-{n}", "not claimed", needs(features=["sinks"]), "feature sinks")
            for n in range(6)
        ),
        Record("merge/two", "not claimed", {"operation": "merge", "passes": ["forward"]}, "merge"),
    )


def report(records=None, complete=True, spec="kernels/mine.py:target", **header):
    """A whole report; ``records()`` unless others are given."""
    chosen = globals()["records"]() if records is None else tuple(records)
    head = make_header(TARGET, spec=spec, profile="core", vectors={"name": "core", "digest": "ab"})
    return Report(head | header, chosen, footer_of(counts_of(chosen), complete))


LINK = "https://github.com/zhuzilin/ring-flash-attention/issues/1"
STALE = {
    "id": "stale-keys",
    "title": "every step of the backward pass uses the keys of step 0",
    "links": [LINK],
    "alike": [],
    "text": "every step of the backward pass uses the keys of step 0 [stale-keys]",
}


def diagnosed_records():
    """Three failures of one bug, two of which are diagnosed, and one crash."""
    wrong = findings([Finding("dk", 2, "beyond bound", 412.25, (0, 1, 5, 3), 0.53, 0.12, 37, 64)])
    return (
        Record("ring/a", "mismatch", needs(), findings=wrong, diagnosis=STALE),
        Record("ring/b", "mismatch", needs(), findings=wrong, diagnosis=STALE),
        Record("ring/c", "mismatch", needs(), findings=wrong),
        Record("ring/d", "crash", needs(), message="worker 1 was ended by SIGSEGV"),
        Record("ring/e", "pass", needs()),
    )
