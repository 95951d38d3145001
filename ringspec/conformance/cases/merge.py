"""A case that computes three blocks of keys separately, and checks that they merge to attention over all keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.problems import (
    USUAL_DTYPES,
    Seen,
    call_for,
    drawn,
    judged,
    needs_of,
    tensors_of,
)
from ringspec.conformance.diagnose.picture import numbers
from ringspec.conformance.judge.bounds import bounds_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.vectors.catalogue.build import merge
from ringspec.vectors.format.case import Case, TensorRecipe
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.format.requires import requires

QUERIES, BLOCKS = 16, 3
KEYS = QUERIES * BLOCKS


def merge_cases() -> Iterator[RunCase]:
    for dtype in USUAL_DTYPES:
        yield blocks_merged(f"property/blocks-merged/{dtype}", dtype)


def blocks_merged(id: str, dtype: str) -> RunCase:
    """Make a case of three block calls and one merge call.

    The results of the block calls are merged in float64. The merge call gets correct partial results.
    """
    whole = drawn("blocks-merged", dtype, backward=False, Sq=QUERIES, Sk=KEYS)
    blocks = [block_of(whole, f"{id}-block-{n}", n) for n in range(BLOCKS)]

    def claimed(claims: Capabilities) -> str | None:
        merge_needs = needs_of([blocks[0]]) | {"operation": "merge"}
        return why_not(claims, needs_of(blocks)) or why_not(claims, merge_needs)

    def asked() -> list[Case]:
        return [*blocks, merge_of(blocks, f"{id}-merge", dtype)]

    def make(claims: Capabilities) -> list[Call]:
        return [call_for(claims, case) for case in asked()]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        seen = Seen(claims, tuple(asked()), tuple(calls), tuple(outputs))
        return judged(seen, lambda seen: (merges_to(whole, seen), None))

    return RunCase(
        id,
        "The results for three blocks of keys merge to attention over all keys.",
        needs_of(blocks),
        make,
        judge,
        rules=("SOFT-1", "FWD-4"),
        flags=("log2-lse", "natural-lse-as-log2", "lse-layout"),
        claimed=claimed,
    )


def block_of(whole: Case, id: str, n: int) -> Case:
    """Make the problem of one block: all queries, and the ``n``-th part of the keys."""
    assert whole.shape is not None
    given = inputs_of(whole)
    keys = slice(n * QUERIES, (n + 1) * QUERIES)
    parts = {"q": given["q"], "k": given["k"][:, :, keys], "v": given["v"][:, :, keys]}
    tensors = {name: values(x) for name, x in parts.items()}
    made = dataclasses.replace(
        whole,
        id=id,
        operation="block",
        shape=dataclasses.replace(whole.shape, Sk=QUERIES),
        inputs=dataclasses.replace(whole.inputs, tensors=tensors),
    )
    return dataclasses.replace(made, requires=requires(made))


def values(x: NDArray) -> TensorRecipe:
    return TensorRecipe("values", values=load(x).tolist())


def merge_of(blocks: Sequence[Case], id: str, dtype: str) -> Case:
    """Make a merge of the correctly rounded results of the blocks."""
    assert blocks[0].formats is not None
    parts = {}
    for name, storage in (("o", "outputs"), ("lse", "statistics")):
        format = getattr(blocks[0].formats, storage)
        parts[name] = np.stack([load(tensors_of(b)[f"out.{name}.{format}"]) for b in blocks])
    return merge(
        id, "", "", N=BLOCKS, S=QUERIES, Dv=parts["o"].shape[-1], dtype=dtype,
        parts_o=values(parts["o"]), parts_lse=values(parts["lse"]),
    )  # fmt: skip


def merges_to(whole: Case, seen: Seen) -> str:
    """Merge the results of the blocks in float64, and compare with ``whole``, attention over all keys.

    Returns a message that says what is wrong, or '' if nothing is.
    """
    truth = tensors_of(whole)
    if any("lse" not in output for output in seen.outputs[:BLOCKS]):
        return ""
    o, lse = (
        np.stack([load(output[name][0]) for output in seen.outputs[:BLOCKS]])
        for name in ("o", "lse")
    )
    noise_o, noise_lse = (noise(seen, name) for name in ("o", "lse"))
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.logaddexp.reduce(lse, axis=0)
        weight = np.exp(lse - total)
        merged = (weight[..., None] * o).sum(axis=0)
        # To first order, a weight and the total each err by at most twice the largest error of an lse.
        largest = noise_lse.max(axis=0)
        spread = (weight * (noise_o + 4 * largest * np.abs(o).max(axis=4))).sum(axis=0)
        far = ~(np.abs(merged - truth["out.o.float64"]) <= spread[..., None]).all(axis=3)
        far |= ~(np.abs(total - truth["out.lse.float64"]) <= 2 * largest)
    rows = np.flatnonzero(far.any(axis=(0, 1)))
    if not rows.size:
        return ""
    return (
        f"The results of {BLOCKS} blocks do not merge to attention over all keys, for "
        f"{numbers('query', rows)}: lse and o of a block do not match."
    ).replace("querys", "queries")


def noise(seen: Seen, name: str) -> NDArray[np.float64]:
    """Return [blocks, B, H, S]: the error bound of each row of each block."""
    rows = []
    for case, call in zip(seen.cases[:BLOCKS], seen.calls[:BLOCKS], strict=True):
        bounds = bounds_of(seen.claims, call)
        scale = tensors_of(case)[f"scale.{name}"]
        rows.append(bounds.factors[name] * scale + bounds.floors[name])
    return np.stack(rows)
