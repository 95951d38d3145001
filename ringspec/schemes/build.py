"""Make the scheme of a call: check the names and numbers of the caller, then call the constructor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringspec.errors import LayoutError, OptionError, nearest, shown
from ringspec.problem.checks import int_array, is_integer
from ringspec.problem.model import Problem
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
    def heads(self) -> int:
        """H, the number of query heads."""
        return self.problem.terms.heads

    @property
    def kv_heads(self) -> int:
        """Hkv, the number of key heads."""
        return self.problem.terms.kv_heads

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


def build_ring(call: Call) -> Scheme:
    """Return a ring."""
    circulation, direction = call.values["circulation"], call.values["direction"]
    circulation = "kv" if circulation is None else circulation
    if circulation == "gather":
        raise OptionError(
            "circulation 'kv' or 'q'", "'gather'", "write scheme='all_gather', mesh={'cp': W}"
        )
    check_circulation(circulation)
    return rings.ring(
        call.mesh,
        *tables_of(call),
        heads=call.heads,
        kv_heads=call.kv_heads,
        circulation=circulation,
        direction=1 if direction is None else check_direction(direction),
    )


def build_double_ring(call: Call) -> Scheme:
    """Return a double ring."""
    return rings.double_ring(call.mesh, *tables_of(call), heads=call.heads, kv_heads=call.kv_heads)


def build_all_gather(call: Call) -> Scheme:
    """Return the scheme that gathers keys."""
    return gathers.all_gather(call.mesh, *tables_of(call), heads=call.heads, kv_heads=call.kv_heads)


def build_ulysses(call: Call) -> Scheme:
    """Return Ulysses."""
    return exchanges.usp(
        call.mesh, *tables_of(call), heads=call.heads, kv_heads=call.kv_heads, name="ulysses"
    )


def build_usp(call: Call) -> Scheme:
    """Return USP."""
    return exchanges.usp(call.mesh, *tables_of(call), heads=call.heads, kv_heads=call.kv_heads)


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
    return exchanges.usp(
        call.mesh,
        tables,
        heads=call.heads,
        kv_heads=call.kv_heads,
        text=text,
        text_at=at,
        name="joint",
    )


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
    """Return a prefill: the last Sq keys are those of the queries, all keys before them are cached."""
    parts, prefix = call.mesh.ranks, call.keys - call.queries
    layout = call.layout
    if isinstance(layout, (tuple, list)) and isinstance(layout, tuple) and len(layout) == 2:
        tables, tables_k = tables_of(call)
    else:
        if prefix < 0:
            raise LayoutError(
                "at least as many keys as queries with the scheme 'pcp'",
                f"Sq = {call.queries}, Sk = {call.keys}",
                "pass the keys of the prefix, then those of the queries",
            )
        new = make_layout("zigzag" if layout is None else layout, call.queries, parts)
        tables = new.table.tolist()
        cached = interleaved(prefix, parts, interleave_of(call))
        tables_k = [
            [*own, *(token + prefix if token >= 0 else -1 for token in row)]
            for own, row in zip(cached, tables, strict=True)
        ]
    return gathers.pcp(call.mesh, tables, tables_k, heads=call.heads, kv_heads=call.kv_heads)


def build_dcp(call: Call) -> Scheme:
    """Return decoding: keys are dealt out to the ranks of a group, ``interleave`` at a time, or by a table."""
    parts = call.mesh.size("dcp")
    if call.layout is None:
        tables = interleaved(call.keys, parts, interleave_of(call))
    elif call.values["interleave"] is not None:
        raise OptionError("layout or interleave", "both", "leave out layout")
    else:
        tables = make_layout(call.layout, call.keys, parts).table.tolist()
    return gathers.dcp(call.mesh, call.queries, tables, heads=call.heads, kv_heads=call.kv_heads)


def interleave_of(call: Call) -> int:
    """Validate the number of successive tokens on one rank; 1 if it was left out."""
    size = call.values["interleave"]
    if size is None:
        return 1
    if not is_integer(size) or size < 1:
        raise LayoutError(
            "interleave as an integer >= 1, the number of successive tokens on one rank",
            shown(size),
            "write interleave=1",
        )
    return int(size)


def interleaved(length: int, parts: int, size: int) -> list[list[int]]:
    """Return the tokens of each part if token i belongs to part (i // size) mod parts.

    >>> interleaved(5, 2, 2)
    [[0, 1, 4], [2, 3]]
    """
    return [[i for i in range(length) if i // size % parts == part] for part in range(parts)]


# The constructor of each scheme, the axes of its mesh, and its own keywords.
BUILDERS: dict[str, tuple[Callable[[Call], Scheme], tuple[str, ...], tuple[str, ...]]] = {
    "ring": (build_ring, ("ring",), ("circulation", "direction")),
    "double_ring": (build_double_ring, ("outer", "inner"), ()),
    "all_gather": (build_all_gather, ("cp",), ()),
    "ulysses": (build_ulysses, ("ulysses",), ()),
    "usp": (build_usp, ("ring", "ulysses"), ()),
    "joint": (build_joint, ("ring", "ulysses"), ("text", "text_at")),
    "pcp": (build_pcp, ("pcp",), ("interleave",)),
    "dcp": (build_dcp, ("tp", "dcp"), ("interleave",)),
}
