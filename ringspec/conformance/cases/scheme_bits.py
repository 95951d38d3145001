"""Cases for a target that promises Ulysses with the same bits for every number of ranks (``invariant_under_workers='all'``).

Each case calls the operation 'context_parallel' with 1, 2 and 4 ranks, as far as the target claims them. Its number format
is one that the target claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.explain import explain_all
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.splits import Split, call_of, expected_of, needs_of
from ringspec.conformance.cases.worker_bits import TENSORS, WORKERS, other_bits, unpromised
from ringspec.conformance.diagnose.picture import numbers
from ringspec.conformance.judge.bounds import bounds_of, findings_of
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.cells import shards_of
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load

__all__ = ["cases"]

SCHEME = "ulysses"
PROBLEMS = (("full", "contiguous"), ("causal", "contiguous"), ("causal", "zigzag"))
SIZES = {"H": 4, "Hkv": 4, "S": 24}


def cases() -> list[RunCase]:
    """Return all cases. A target claims them if it claims Ulysses and promises all bits for every number of ranks.

    >>> cases()[0].why_not(Capabilities(schemes=("ulysses",)))
    "invariant_under_workers='nothing'"
    """
    return [case_of(*one) for one in PROBLEMS]


def case_of(mask: str, layout: str) -> RunCase:
    id = f"property/worker-bits/{SCHEME}-{mask}-{layout}"
    terms = {"causal": True} if mask == "causal" else {}
    # The first word of an id decides the number format, so all of these splits have one format.
    splits = tuple(
        Split(f"{id} w{w}", "", SCHEME, ((SCHEME, w),), SIZES, terms, layout, drawn_as=id)
        for w in WORKERS
    )

    def claimed(claims: Capabilities) -> str | None:
        if (reason := unpromised(claims, every_row=True)) is not None:
            return reason
        reasons = [why_not(claims, needs_of(split, claims)) for split in splits]
        first = next(filter(None, reasons), None)
        few = reasons.count(None) < 2
        return f"fewer than 2 of its numbers of ranks are claimed: {first}" if few else None

    def make(claims: Capabilities) -> list[Call]:
        return [call_of(split, claims) for split in chosen(splits, claims)]

    return RunCase(
        id,
        "Ulysses gives the same bits for every number of ranks, because one rank computes whole heads.",
        {"operation": "context_parallel", "passes": ("forward",), "scheme": SCHEME},
        make,
        partial(judge, splits),
        claimed=claimed,
        narrowed=lambda claims: needs_of(chosen(splits, claims)[-1], claims),
    )


def chosen(splits: Sequence[Split], claims: Capabilities) -> list[Split]:
    """Return the splits that a target claims."""
    return [split for split in splits if why_not(claims, needs_of(split, claims)) is None]


def judge(
    splits: Sequence[Split],
    claims: Capabilities,
    calls: Sequence[Call],
    outputs: Sequence[Outputs],
) -> Judgement:
    """Compare each call with its correct results, and the bits of each with those of the first."""
    findings: list[Finding] = []
    for split, call, output in zip(chosen(splits, claims), calls, outputs, strict=True):
        expected = expected_of(split, claims, call)
        findings += findings_of(bounds_of(claims, call, expected), expected, output, claims)
    message = explain_all(findings) if any(not one.ok for one in findings) else ""
    message = message or first_change(calls, outputs)
    return Judgement(not message, tuple(findings), message)


def first_change(calls: Sequence[Call], outputs: Sequence[Outputs]) -> str:
    """Say which elements have other bits than in the first call; empty if none has. +0 and -0 are the same."""
    for call, output in zip(calls[1:], outputs[1:], strict=True):
        for name in TENSORS:
            if name not in output:
                continue
            first, later = whole(calls[0], name, outputs[0]), whole(call, name, output)
            changed = other_bits(first, later)
            if changed.any():
                axes = (0, 1, 3) if changed.ndim == 4 else (0, 1)
                tokens = numbers("token", np.flatnonzero(changed.any(axis=axes)))
                return (
                    f"{name} with {call.workers} ranks has other bits than with {calls[0].workers}, in "
                    f"{changed.sum()} of {changed.size} elements, for {tokens}; "
                    "the target claims invariant_under_workers='all'."
                )
    return ""


def whole(call: Call, name: str, output: Outputs) -> NDArray[np.float64]:
    """Return a result of all ranks, [B, H, S] or [B, H, S, d]."""
    tokens, heads = shards_of(call, name)
    parts = [load(x) for x in output[name]]
    found = np.empty((len(parts[0]), heads.max() + 1, tokens.max() + 1, *parts[0].shape[3:]))
    for own_tokens, own_heads, part in zip(tokens, heads, parts, strict=True):
        found[:, own_heads[:, None], own_tokens] = part
    return found
