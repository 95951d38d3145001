"""Make the scheme of a call: check the names and numbers of the caller, then call the constructor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.errors import LayoutError, OptionError, nearest, shown
from ringspec.problem.checks import int_array
from ringspec.problem.model import Integers, Problem
from ringspec.rings.documents import interleaved
from ringspec.rings.layouts import make_layout
from ringspec.rings.ring import layouts_for
from ringspec.rings.schedules import check_circulation, check_direction
from ringspec.schemes import exchanges, gathers, rings
from ringspec.schemes.mesh import Mesh, check_axes
from ringspec.schemes.scheme import Scheme, Tokens


@dataclass(frozen=True)
class Call:
    """What a caller asks for: the problem, the mesh, the layout, and the keywords of the scheme, with defaults."""

    mesh: Mesh
    problem: Problem
    layout: Any
    options: Any
    values: dict[str, Any]

    @property
    def heads(self) -> dict[str, Any]:
        """H and Hkv, as keywords of a constructor."""
        return {"heads": self.problem.terms.heads, "kv_heads": self.problem.terms.kv_heads}

    @property
    def queries(self) -> int:
        """Sq, the number of queries."""
        return int(self.problem.q.shape[2])

    @property
    def keys(self) -> int:
        """Sk, the number of keys."""
        return int(self.problem.k.shape[2])


def make_scheme(name: Any, call: Call) -> Scheme:
    """Return the scheme called ``name`` for a call, in whose ``values`` None means that a keyword was left out."""
    if not isinstance(name, str) or name not in BUILDERS:
        raise OptionError(
            "the name of a scheme, or a Scheme",
            shown(name),
            nearest(name, BUILDERS),
            code="unknown-name",
        )
    build, axes, keywords = BUILDERS[name]
    check_axes(call.mesh, name, axes)
    for keyword, value in call.values.items():
        if value is not None and keyword not in keywords:
            known = [repr(other) for other, (_, _, own) in BUILDERS.items() if keyword in own]
            raise OptionError(
                f"{keyword} only with the scheme {' or '.join(known)}",
                f"{keyword}={shown(value)} with the scheme {name!r}",
                f"leave out {keyword}",
            )
    return build(call)


def tables_of(call: Call) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tables [W, n] of the tokens of queries and of keys; contiguous if the caller gave no layout."""
    layout = "contiguous" if call.layout is None else call.layout
    for_q, for_k = layouts_for(call.problem, layout, call.mesh.ranks, call.options)
    return for_q.table.tolist(), for_k.table.tolist()


def build_plain(constructor: Callable[..., Scheme], **fixed: Any) -> Callable[[Call], Scheme]:
    """Return the function that makes a scheme which needs only tables and heads."""
    return lambda call: constructor(call.mesh, *tables_of(call), **call.heads, **fixed)


def build_ring(call: Call) -> Scheme:
    """Return a ring."""
    circulation, direction = call.values["circulation"], call.values["direction"]
    circulation = "kv" if circulation is None else circulation
    if circulation == "gather":
        raise OptionError(
            "circulation 'kv' or 'q'", "'gather'", "write scheme='all_gather', mesh={'cp': W}"
        )
    check_circulation(circulation)
    direction = 1 if direction is None else check_direction(direction)
    return build_plain(rings.ring, circulation=circulation, direction=direction)(call)


def build_joint(call: Call) -> Scheme:
    """Return joint attention: the layout distributes the tokens that are not text, in their order."""
    text = text_of(call)
    at = "front" if call.values["text_at"] is None else call.values["text_at"]
    if not isinstance(at, str) or at not in ("front", "rear"):
        raise OptionError("text_at 'front' or 'rear'", shown(at), "write text_at='front'")
    rest = [token for token in range(call.queries) if token not in set(text)]
    layout = "contiguous" if call.layout is None else call.layout
    table = make_layout(layout, len(rest), call.mesh.ranks).table.tolist()
    tables = [[rest[slot] if slot >= 0 else -1 for slot in row] for row in table]
    return exchanges.usp(call.mesh, tables, **call.heads, text=text, text_at=at, name="joint")


def text_of(call: Call) -> Tokens:
    """Return the text tokens of a joint call; queries and keys must have the same tokens."""
    if call.values["text"] is None:
        raise OptionError(
            "text, the tokens that all ranks hold, with the scheme 'joint'",
            "none",
            "write text=[0, 1, 2], or scheme='usp'",
        )
    given = int_array(call.values["text"], "text")
    text = tuple(int(token) for token in given.ravel())
    once = len(set(text)) == len(text) and all(0 <= token < call.queries for token in text)
    if given.ndim != 1 or not once or call.queries != call.keys:
        raise LayoutError(
            "text as distinct tokens below S, for q and k of one length S",
            f"{shown(text)} with Sq = {call.queries}, Sk = {call.keys}",
            "list each text token once, as its place in q, k and v",
        )
    return text


def build_pcp(call: Call) -> Scheme:
    """Return a prefill: each request has a cached prefix of keys, then those of its queries."""
    check_offset(call, "pcp")
    if isinstance(call.layout, tuple) and len(call.layout) == 2:
        refuse_interleave(call)
        tables, tables_k = tables_of(call)
    else:
        layout = "zigzag" if call.layout is None else call.layout
        documents = call.options.get("cu_seqlens")
        new = make_layout(layout, call.queries, call.mesh.ranks, documents).table
        tables, tables_k = new.tolist(), keys_of_prefill(call, new)
    return gathers.pcp(call.mesh, tables, tables_k, **call.heads)


def keys_of_prefill(call: Call, new: Integers) -> list[list[int]]:
    """Return the keys of each rank: its part of every prefix, and the keys of its own queries, the table ``new``."""
    starts, starts_k = requests(call)
    key_of = np.full(call.queries + 1, -1)  # the last entry is that of padding slots
    cached = []
    for number in range(len(starts) - 1):
        first, stop = starts[number : number + 2]
        first_k, stop_k = starts_k[number : number + 2]
        prefix = stop_k - first_k - (stop - first)
        if prefix < 0:
            raise LayoutError(
                "at least as many keys as queries in each request, with the scheme 'pcp'",
                f"{stop - first} queries, {stop_k - first_k} keys",
                "pass the keys of the prefix, then those of the queries",
            )
        key_of[first:stop] = range(first_k + prefix, stop_k)
        cached.append(range(first_k, first_k + prefix))
    cached.append(range(starts_k[-1], call.keys))  # keys of no request
    own = dealt(call, cached, call.mesh.ranks)
    return [[*old, *key_of[row].tolist()] for old, row in zip(own, new, strict=True)]


def build_dcp(call: Call) -> Scheme:
    """Return decoding: the keys of each request are dealt out to the ranks of a group, or a layout says who has which."""
    check_offset(call, "dcp")
    parts = call.mesh.size("dcp")
    _, starts = requests(call)
    if call.layout is None:
        bounds = [*starts, call.keys]
        tables = dealt(call, list(map(range, bounds[:-1], bounds[1:])), parts)
    else:
        refuse_interleave(call)
        documents = None if call.options.get("cu_seqlens") is None else starts
        tables = make_layout(call.layout, call.keys, parts, documents).table.tolist()
    return gathers.dcp(call.mesh, call.queries, tables, **call.heads)


def check_offset(call: Call, scheme: str) -> None:
    """Raise OptionError for a causal mask whose q_offset was left out: 0 would hide the cache from the first queries."""
    has_positions = any(
        call.options.get(x) is not None for x in ("q_offset", "positions_q", "cu_seqlens")
    )
    if call.options.get("causal") and call.queries != call.keys and not has_positions:
        raise OptionError(
            f"q_offset beside causal=True with the scheme {scheme!r}, whose queries come after cached keys",
            "none",
            f"write q_offset={call.keys - call.queries}, or another position of the first query",
        )


def requests(call: Call) -> tuple[list[int], list[int]]:
    """Return where each request begins and the last one ends, in q and in k; one request without cu_seqlens."""
    given = call.options.get("cu_seqlens")
    if given is None:
        return [0, call.queries], [0, call.keys]
    for_k = call.options.get("cu_seqlens_k")
    starts, starts_k = (np.asarray(x).tolist() for x in (given, given if for_k is None else for_k))
    count = max(len(starts), len(starts_k))  # a request may have no queries, or no keys
    longer, longer_k = (x + x[-1:] * (count - len(x)) for x in (starts, starts_k))
    return longer, longer_k


def dealt(call: Call, cached: Sequence[Sequence[int]], parts: int) -> list[list[int]]:
    """Return the keys of each part: those of every request are dealt out in turn, ``interleave`` at a time (LAYOUT-9)."""
    size = call.values["interleave"]
    layout = interleaved([len(keys) for keys in cached], parts, 1 if size is None else size)
    numbers = [key for keys in cached for key in keys]
    return [[numbers[slot] for slot in row if slot >= 0] for row in layout.table.tolist()]


def refuse_interleave(call: Call) -> None:
    """Raise OptionError if a caller gave ``interleave`` beside a layout of the keys."""
    if call.values["interleave"] is not None:
        raise OptionError("layout or interleave", "both", "leave out layout")


# The constructor of each scheme, the axes of its mesh, and its own keywords.
BUILDERS: dict[str, tuple[Callable[[Call], Scheme], tuple[str, ...], tuple[str, ...]]] = {
    "ring": (build_ring, ("ring",), ("circulation", "direction")),
    "double_ring": (build_plain(rings.double_ring), ("outer", "inner"), ()),
    "all_gather": (build_plain(gathers.all_gather), ("cp",), ()),
    "ulysses": (build_plain(exchanges.usp, name="ulysses"), ("ulysses",), ()),
    "usp": (build_plain(exchanges.usp), ("ring", "ulysses"), ()),
    "joint": (build_joint, ("ring", "ulysses"), ("text", "text_at")),
    "pcp": (build_pcp, ("pcp",), ("interleave",)),
    "dcp": (build_dcp, ("tp", "dcp"), ("interleave",)),
}
