"""Find the claims that a run did not test: claimed values that no executed case used.

A target is the program under test. Its claims say what it supports, by kind: numbers of workers, layouts, formats and
so on. A value counts as used only in a call whose results can depend on it. A layout or a circulation (what travels
around the ring) needs at least two workers. A direction needs at least three, because two workers form the same ring in
both directions. The Q ring, in which queries travel, counts only in a backward pass. Head dimensions and batch sizes
are left out, because targets claim whole ranges of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringspec.conformance.report.records import Record
from ringspec.conformance.target.capabilities import CIRCULATIONS, Capabilities
from ringspec.conformance.target.declared import declared_recipe
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.requires import axes_of

SIXTEEN_BITS = ("bfloat16", "float16")
RECIPE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
NOT_EXECUTED = ("not claimed", "not run")
DIRECTIONS = (1, -1)
FEW = 4  # more untested values of one kind are counted instead of named


@dataclass(frozen=True)
class Coverage:
    """Claimed values that no executed case used, and 16-bit formats without a declared recipe.

    A recipe says where the target rounds. ``untested``: the unused values by kind of claim (``workers``, ``layouts``,
    ...); a kind without unused values is left out. ``claimed``: the number of claimed values of each kind in
    ``untested``. ``declared`` and ``undeclared``: the 16-bit input formats in which a ring of at least two workers
    passed, with and without a declared recipe. ``only_blocks``: the target claims single blocks and no ring, so that no
    case shows the weight of each query and key.
    """

    untested: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)
    undeclared: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    only_blocks: bool = False

    @property
    def clauses(self) -> tuple[str, ...]:
        """What the run's one-sentence summary says about claims that were not tested.

        >>> Coverage(undeclared=("bfloat16",)).clauses
        ('recipe not declared: rounding between steps was not tested',)
        """
        if not self.undeclared:
            return ()
        which = f" for {' and '.join(self.undeclared)}" if self.declared else ""
        return (f"recipe not declared{which}: rounding between steps was not tested",)

    @property
    def hints(self) -> tuple[str, ...]:
        """How to remedy each of the :attr:`clauses`, and which command tells more.

        >>> print(*Coverage(undeclared=("bfloat16",)).hints)
        to test it, declare in the capabilities how the kernel rounds, for example recipe={"bfloat16": "bf16"}
        """
        found = []
        if self.undeclared:
            names = ", ".join(f'"{one}": "{RECIPE_NAMES[one]}"' for one in self.undeclared)
            found.append(
                f"to test it, declare in the capabilities how the kernel rounds, for example recipe={{{names}}}"
            )
        if self.only_blocks:
            found.append(
                "ringspec explain says in sentences what a target of single blocks computes"
            )
        return tuple(found)

    @property
    def line(self) -> str:
        """The untested values in one line of text; empty if every claimed value was used.

        >>> Coverage({"workers": (8,), "directions": (-1,)}, {"workers": 3, "directions": 2}).line
        'claimed, but used by no executed case: workers 8; directions -1'
        """
        if not self.untested:
            return ""
        parts = [listed(kind, values, self.claimed[kind]) for kind, values in self.untested.items()]
        return f"claimed, but used by no executed case: {'; '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the footer of a report."""
        return {
            "untested": {kind: list(values) for kind, values in self.untested.items()},
            "untested_line": self.line,
            "clauses": list(self.clauses),
            "hints": list(self.hints),
        }


def listed(kind: str, values: Sequence[Any], claimed: int) -> str:
    """Name up to 4 values of a kind of claim; for more, give their number and that of the claimed values.

    >>> listed("features", ("bias", "keep"), 9), listed("features", tuple("abcdefg"), 9)
    ('features bias, keep', 'features 7 of 9')
    """
    shown = ", ".join(map(str, values)) if len(values) <= FEW else f"{len(values)} of {claimed}"
    return f"{kind.replace('_', ' ')} {shown}"


def used_by(needs: Mapping[str, Any], calls: Iterable[Call]) -> dict[str, list[Any]]:
    """Return the values of each kind of claim that the calls of one case use, as plain data.

    ``needs``: the requirements of the case, from which masks and features are taken.
    """
    found: dict[str, set[Any]] = {}
    for call in calls:
        for kind, value in values_of(call):
            found.setdefault(kind, set()).add(value)
    backward = any(name.endswith("-backward") for name in found.get("operations", ()))
    for kind in ("masks", "features"):
        names = {name for name in needs.get(kind, ()) if name != "dlse" or backward}
        if names:
            found[kind] = names
    return {kind: sorted(values) for kind, values in found.items()}


def values_of(call: Call) -> Iterable[tuple[str, Any]]:
    """Yield (kind of claim, value) for each value that a call uses; masks and features are left out."""
    if call.operation == "layout":
        yield from (("operations", f"layout-{one}") for one in call.passes)
        yield "workers", call.workers
        yield "layouts", call.layout
        return
    yield "formats", call.formats["inputs"]
    yield "formats", call.formats["outputs"]
    if call.operation == "merge":
        yield "operations", "merge"
        return
    for one in call.passes:
        yield "operations", f"{call.operation}-{one}"
    if call.operation == "context_parallel":
        yield from scheme_values(call)
        return
    q, k = call.worker("q", 0), call.worker("k", 0)
    yield "head_ratios", q.shape[1] // k.shape[1]
    if call.operation != "ring":
        return
    yield "workers", call.workers
    if call.workers >= 2:
        yield "layouts", call.layout
        yield "ring_formats", call.formats["inputs"]
        # The forward pass of a Q ring is a KV ring: "q" changes only the backward pass.
        if call.circulation != "q" or "backward" in call.passes:
            yield "circulations", call.circulation
    if call.workers >= 3:
        yield "directions", call.direction


def scheme_values(call: Call) -> Iterable[tuple[str, Any]]:
    """Yield (kind of claim, value) for what only the operation 'context_parallel' uses."""
    yield "schemes", call.scheme
    yield "meshes", axes_of(call.mesh)
    yield "workers", call.workers
    yield "layouts", call.layout
    if call.heads_q is not None and call.heads_k is not None:
        yield "head_ratios", (int(call.heads_q.max()) + 1) // (int(call.heads_k.max()) + 1)
    if "interleave" in call.terms:
        yield "interleaves", call.terms["interleave"]


def claimed_values(claims: Capabilities) -> dict[str, tuple[Any, ...]]:
    """Return the claimed values by kind of claim.

    If the claims do not limit a kind, it is left out. Circulations and directions are an exception: then all their
    values are listed.

    >>> claimed_values(Capabilities(workers=(1,)))
    {'operations': ('ring-forward', 'ring-backward'), 'workers': (1,), 'formats': ('float32',), 'masks': ('causal',)}
    """
    most = max(claims.workers or (3,))
    ring = any(name.startswith("ring-") for name in claims.operations)
    integers = any(name.startswith("layout-") for name in claims.operations)
    schemes = bool(claims.schemes)
    placed = any(name != "dcp" for name in claims.schemes)  # a cache is placed by its interleave
    floats = any(not name.startswith("layout-") for name in claims.operations)
    circulations = claims.circulations
    if circulations is None:
        backward = "ring-backward" in claims.operations
        circulations = tuple(one for one in CIRCULATIONS if one != "q" or backward)
    named = {
        "operations": claims.operations,
        "workers": claims.workers if ring or integers or schemes else None,
        "layouts": claims.layouts if (ring or integers or placed) and most >= 2 else None,
        "circulations": circulations if ring and most >= 2 else None,
        "directions": (claims.directions or DIRECTIONS) if ring and most >= 3 else None,
        "formats": claims.formats if floats else None,
        "masks": claims.masks if floats else None,
        "features": claims.features,
        "head_ratios": claims.head_ratios,
        "schemes": claims.schemes,
        "meshes": claims.meshes if schemes else None,
        "interleaves": claims.interleaves if schemes else None,
    }
    return {kind: tuple(values) for kind, values in named.items() if values}


def coverage_of(claims: Capabilities, records: Iterable[Record]) -> Coverage:
    """Return the claims that none of the executed cases among ``records`` tests.

    >>> used = {"operations": ["ring-forward"], "workers": [2], "layouts": ["contiguous"]}
    >>> used |= {"circulations": ["kv"], "formats": ["float32"], "masks": ["causal"]}
    >>> claims = Capabilities(("ring-forward",), circulations=("kv",), workers=(2, 4), directions=(1,))
    >>> coverage_of(claims, [Record("a", "pass", used=used)]).untested
    {'workers': (4,), 'directions': (1,)}
    """
    used: dict[str, set[Any]] = {}
    passed: set[str] = set()
    for record in records:
        if record.outcome == "pass":
            passed.update(record.used.get("ring_formats", ()))
        if record.outcome not in NOT_EXECUTED:
            for kind, values in record.used.items():
                used.setdefault(kind, set()).update(values)
    claimed = claimed_values(claims)
    missing = {
        kind: tuple(value for value in values if value not in used.get(kind, ()))
        for kind, values in claimed.items()
    }
    untested = {kind: values for kind, values in missing.items() if values}
    rings = [one for one in SIXTEEN_BITS if one in passed]
    known = {one: declared_recipe(claims.recipe, one) is not None for one in rings}
    return Coverage(
        untested,
        {kind: len(claimed[kind]) for kind in untested},
        tuple(one for one in rings if not known[one]),
        tuple(one for one in rings if known[one]),
        only_blocks=not any(name.startswith("ring-") for name in claims.operations)
        and any(name.startswith("block-") for name in claims.operations),
    )
