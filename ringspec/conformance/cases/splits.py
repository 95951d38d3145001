"""One problem of attention, split over the ranks of a mesh: its tables, its call and its correct results.

A *split* is a scheme (a way to split attention), a mesh, and what distributes the tokens. The correct results are those
of dense attention, in exact arithmetic; every copy of a replicated token is compared with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ringspec.conformance.cases.calls import OF_KEYS, OF_QUERIES, ExpectedTensor
from ringspec.conformance.cases.problems import drawn, problem_of, truth_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.cells import OF_HEADS, OF_PAIRS, cut_of, shards_of
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import due_of, frozen, read_only
from ringspec.problem.model import Problem
from ringspec.schemes.mesh import Mesh
from ringspec.truth.exactly import Wanted, attention
from ringspec.truth.sharded import Tables
from ringspec.vectors.catalogue.build import DTYPES, telling
from ringspec.vectors.format.case import Case, SchemeCall
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.format.requires import layout_of, requires
from ringspec.vectors.format.shards import cut
from ringspec.vectors.generate import arguments_of
from ringspec.vectors.scheme_tables import shard_tensors, tables_of_scheme

HEAD_DIM = 16
GIVEN = (*OF_KEYS, *OF_QUERIES, *OF_HEADS, *OF_PAIRS)
TRAINED = ("ring", "double_ring", "all_gather", "ulysses", "usp", "joint")
# The tables of a golden case, by their names in a call.
NAMES_IN_CALLS = {
    "layout.q": "index_q",
    "layout.k": "index_k",
    "heads.q": "heads_q",
    "heads.k": "heads_k",
    "position.q": "position_q",
    "position.k": "position_k",
}
DTYPE_NAMES = ("f32", "bf16", "fp16", "f64")


@dataclass(frozen=True)
class Split:
    """A case of the operation 'context_parallel'.

    ``sizes`` and ``terms`` are keywords of a problem: S, Sq, Sk, H, Hkv, and masks. ``own`` are the keywords of the
    scheme: text, text_at, interleave. ``rooms`` are the padded lengths of the documents. ``telling``: the value of key j
    is 1 in component j and 0 elsewhere, times 1 + its head, so that o shows the weight of each key.
    """

    id: str
    reason: str
    scheme: str
    mesh: tuple[tuple[str, int], ...]
    sizes: Mapping[str, int]
    terms: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    rooms: tuple[int, ...] = ()
    telling: bool = False
    mla: bool = False
    drawn_as: str = ""
    smoke: bool = False

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def trained(self) -> bool:
        """Whether there is a backward pass: not of every scheme, and not with a bias."""
        return self.scheme in TRAINED and "bias" not in self.terms

    @property
    def workers(self) -> int:
        return Mesh(self.mesh).ranks


@dataclass(frozen=True)
class Shared:
    """A split with the sizes and the format that a target claims."""

    split: Split
    case: Case
    problem: Problem
    needs: Mapping[str, Any]
    tables: Mapping[str, Any]


def width_for(split: Split, claims: Capabilities) -> int:
    """Return D: 16, or the least width that a target claims if it does not claim 16; that of the problem if it has one."""
    if "D" in split.sizes:
        return split.sizes["D"]
    claimed = claims.head_dims or (HEAD_DIM,)
    return min((d for d in claimed if d >= HEAD_DIM), default=max(claimed))


def dtype_for(split: Split, claims: Capabilities) -> str:
    """Return the format of a case: the claimed ones take turns, so that each has its share of the cases.

    A case that was made smaller has the format of the original, whose id is the first word of its own.
    """
    claimed = [name for name in DTYPE_NAMES if DTYPES[name].inputs in claims.formats] or ["f32"]
    return claimed[zlib.crc32(split.id.partition(" ")[0].encode()) % len(claimed)]


def shared(split: Split, claims: Capabilities) -> Shared:
    """Distribute the problem of a case, in a form that the target claims."""
    return distributed(split, width_for(split, claims), dtype_for(split, claims))


@lru_cache(maxsize=64)
def distributed(split: Split, width: int, dtype: str) -> Shared:
    """Make a split's problem and its tables."""
    sizes = {"D": width, "Dv": width} | dict(split.sizes)
    rest = dict(split.terms)
    if split.telling:
        keys = sizes["Sk"] if "Sk" in sizes else sizes["S"]
        rest["v"] = telling(sizes["Hkv"], min(keys, sizes["Dv"]))
    case = drawn(
        f"schemes/{split.drawn_as or split.id}", dtype, backward=split.trained, **sizes, **rest
    )
    asked = replace(case, operation="context_parallel", scheme=scheme_call(split), requires={})
    problem, _, _ = arguments_of(case, inputs_of(case))
    made = shard_tensors(problem, tables_of_scheme(asked))
    tables = {NAMES_IN_CALLS[name]: read_only(x) for name, x in made.items()}
    return Shared(split, case, problem, requires(asked), tables)


def scheme_call(split: Split) -> SchemeCall:
    """Return how a split's attention is split, as golden cases say it."""
    if not split.rooms:
        return SchemeCall(split.scheme, split.mesh, split.layout, **split.own)
    padded = tuple(int(x) for x in np.cumsum((0, *split.rooms)))
    return SchemeCall(
        split.scheme, split.mesh, "zigzag_padded", cu_seqlens_padded=padded, **split.own
    )


def needs_of(split: Split, claims: Capabilities) -> dict[str, Any]:
    """Return what a case requires of a target."""
    return dict(shared(split, claims).needs) | {"passes": passes_for(split, claims)}


def passes_for(split: Split, claims: Capabilities) -> tuple[str, ...]:
    """Return the passes of a case that a target claims: the backward pass only if the scheme trains."""
    both = split.trained and "context_parallel-backward" in claims.operations
    return ("forward", "backward") if both else ("forward",)


def call_of(split: Split, claims: Capabilities) -> Call:
    """Make the call of a case."""
    made = shared(split, claims)
    passes = passes_for(split, claims)
    inputs = {
        name: x
        for name, x in inputs_of(made.case).items()
        if name in GIVEN and (name not in ("dy", "dlse") or "backward" in passes)
    }
    # The positions of the call include q_offset.
    terms = {name: x for name, x in made.case.terms.items() if name != "q_offset"} | dict(split.own)
    how = scheme_call(split)
    if how.cu_seqlens_padded is not None:
        terms["cu_seqlens_padded"] = how.cu_seqlens_padded
    assert made.case.formats is not None
    bare = Call(
        split.id, "context_parallel", passes, split.workers, {}, terms, dict(vars(made.case.formats)),
        layout_of(how), scheme=split.scheme, mesh=split.mesh, **made.tables,
    )  # fmt: skip
    return replace(
        bare, tensors={name: frozen(cut_of(bare, name, x)) for name, x in inputs.items()}
    )


def expected_of(split: Split, claims: Capabilities, call: Call) -> dict[str, ExpectedTensor]:
    """Return the correct values of each result of a call, for every copy of every token."""
    truth = truth_of(problem_of(shared(split, claims).case))
    found = {}
    for name, values in truth.tensors.items():
        if name == "dsinks" or (name not in ("o", "lse") and "backward" not in call.passes):
            continue
        tokens, heads = shards_of(call, name)
        kind = "statistics" if name == "lse" else "outputs"
        exact, rounded, scale = (
            tuple(cut(x, tokens, heads))
            for x in (values["float64"], values[call.formats[kind]], truth.scales[name])
        )
        found[name] = ExpectedTensor(exact, rounded, scale, tuple(tokens >= 0))
    if "dsinks" in due_of(call):
        found["dsinks"] = sums_of_sinks(shared(split, claims).case, call)
    return found


def sums_of_sinks(case: Case, call: Call) -> ExpectedTensor:
    """Return the correct dsinks [h, N] of each rank: the sums over its own rows."""
    assert call.index_q is not None and call.index_k is not None and call.heads_q is not None
    problem, upstream, _ = arguments_of(case, inputs_of(case))
    wanted = Wanted((call.formats["statistics"], "float64"), scales=True)
    truth = attention(problem, upstream, Tables(call.index_q, call.index_k), wanted)
    values = truth.tensors["dsinks_parts"]
    exact, rounded, scale = (
        tuple(part[of] for part, of in zip(x, call.heads_q, strict=True))
        for x in (
            values["float64"],
            values[call.formats["statistics"]],
            truth.scales["dsinks_parts"],
        )
    )
    return ExpectedTensor(exact, rounded, scale)
