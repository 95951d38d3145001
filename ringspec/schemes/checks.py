"""Checks of a scheme that need no run: its form, the homes of all cells, declared replicas, declared collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ringspec.problem.checks import is_integer
from ringspec.schemes.collectives import derived_kind
from ringspec.schemes.defects import Defect
from ringspec.schemes.multisets import Visible
from ringspec.schemes.scheme import (
    INPUTS,
    KINDS,
    ORDERS,
    RESULTS,
    SIDE_OF,
    Scheme,
    Step,
)
from ringspec.schemes.sharding import Sharding


def length(sharding: Sharding) -> int:
    """Return the number of tokens up to the largest that a rank holds."""
    return 1 + max((token for shard in sharding.shards for token in shard.tokens), default=-1)


def malformed(scheme: Scheme) -> list[Defect]:
    """Find values that no scheme can have. This is checked first, so that the other checks can rely on it."""
    if not well_typed(scheme):
        return [
            Defect(
                "malformed",
                None,
                "a Scheme of Steps of Transfers needed, with fields of the annotated types",
            )
        ]
    defects = []
    if scheme.heads < 1 or scheme.kv_heads < 1 or scheme.heads % scheme.kv_heads:
        text = f"{scheme.heads} query heads over {scheme.kv_heads} key heads"
        return [Defect("malformed", None, text)]
    if all(step.idle for step in scheme.forward):
        defects.append(Defect("malformed", "forward", "no step computes"))
    if scheme.backward is not None and all(step.idle for step in scheme.backward):
        defects.append(Defect("malformed", "backward", "no step computes"))
    if scheme.backward is not None and scheme.home_o != scheme.home_q:
        text = "a backward pass begins with dy where the forward pass ends: home_o must be home_q"
        defects.append(Defect("malformed", "backward", text))
    for side, home in (("q", scheme.home_q), ("k", scheme.home_k), ("q", scheme.home_o)):
        defects += malformed_sharding(scheme, side, home, None, None)
    for phase in RESULTS:
        for number, step in enumerate(scheme.steps(phase)):
            defects += malformed_step(scheme, phase, number, step)
    return defects


def malformed_step(scheme: Scheme, phase: str, number: int, step: Step) -> list[Defect]:
    """Find tables of the wrong length, and names that the pass or the mesh does not have."""
    defects = []
    for what, tables in (("rows", step.rows), ("keys", step.keys)):
        if tables is not None and len(tables) != scheme.mesh.ranks:
            text = f"{what} for {len(tables)} of {scheme.mesh.ranks} ranks"
            defects.append(Defect("malformed", phase, text, None, None, number))
    for one in step.transfers:
        known = one.thing in INPUTS + RESULTS[phase] and one.axis in scheme.mesh.names
        if not known or not set(one.kind.split(" + ")) <= set(KINDS) or one.order not in ORDERS:
            text = f"a {one.kind!r} of {one.thing!r} along {one.axis!r}, order {one.order!r}"
            defects.append(Defect("malformed", phase, text, None, None, number))
        else:
            side = SIDE_OF[one.thing]
            defects += malformed_sharding(scheme, side, one.to, phase, number)
    return defects


def malformed_sharding(
    scheme: Scheme, side: str, sharding: Sharding, phase: str | None, number: int | None
) -> list[Defect]:
    """Find shards that are missing, that hold a token or a head twice, or one that the problem does not have."""
    if sharding.ranks != scheme.mesh.ranks:
        text = f"a sharding for {sharding.ranks} ranks on a mesh of {scheme.mesh.ranks}"
        return [Defect("malformed", phase, text, None, None, number)]
    home, heads = (scheme.home_q, scheme.heads) if side == "q" else (scheme.home_k, scheme.kv_heads)
    tokens = {-1} | {token for shard in home.shards for token in shard.tokens if token >= 0}
    defects = []
    for rank, shard in enumerate(sharding.shards):
        twice = len(set(shard.real)) != len(shard.real) or len(set(shard.heads)) != len(shard.heads)
        known = set(shard.tokens) <= tokens and set(shard.heads) <= set(range(heads))
        if twice or not known:
            what = "a token or head twice" if twice else "a token or head that is not there"
            text = f"rank {rank} holds {what}: tokens {shard.tokens}, heads {shard.heads}"
            defects.append(Defect("malformed", phase, text, None, rank, number))
    return defects


hints = cache(get_type_hints)


def well_typed(value: object, wanted: Any = Scheme) -> bool:
    """Return whether a value, by default a scheme, has the annotated type, with ints in all tables."""
    if dataclasses.is_dataclass(wanted):
        kinds = hints(wanted)  # type: ignore[arg-type]
        return isinstance(value, wanted) and all(  # type: ignore[arg-type]
            well_typed(getattr(value, field.name), kinds[field.name])
            for field in dataclasses.fields(wanted)
        )
    if get_origin(wanted) is tuple:
        of = get_args(wanted)
        many = of[1:] == (...,)
        if not isinstance(value, tuple) or not (many or len(value) == len(of)):
            return False
        return all(map(well_typed, value, of[:1] * len(value) if many else of))
    if get_origin(wanted) is UnionType:
        return any(well_typed(value, one) for one in get_args(wanted))
    return is_integer(value) if wanted is int else isinstance(value, wanted)


def homeless(scheme: Scheme, visible: Visible) -> list[Defect]:
    """Find cells that no rank holds at home."""
    defects = []
    sides = (
        ("query", scheme.home_q, visible.shape[1], scheme.heads),
        ("key", scheme.home_k, visible.shape[2], scheme.kv_heads),
        ("output", scheme.home_o, visible.shape[1], scheme.heads),
    )
    for what, home, tokens, heads in sides:
        held = home.copies()
        cells = [(token, head) for token in range(tokens) for head in range(heads)]
        for cell in [cell for cell in cells if cell not in held][:1]:
            text = f"no rank holds {what} {cell[0]}, head {cell[1]}"
            defects.append(Defect("no home", None, text, cell))
        for cell in [cell for cell in held if cell[0] >= tokens or cell[1] >= heads][:1]:
            text = f"a rank holds {what} {cell[0]}, head {cell[1]}, of {tokens} tokens and {heads} heads"
            defects.append(Defect("malformed", None, text, cell))
    return defects


def replicas(scheme: Scheme, phase: str) -> list[Defect]:
    """Find the first cell on several ranks of each sharding that does not declare replicas."""
    named: list[tuple[str, Sharding, int | None]]
    named = [("home_q", scheme.home_q, None), ("home_k", scheme.home_k, None)]
    for number, step in enumerate(scheme.steps(phase)):
        named += [(one.thing, one.to, number) for one in step.transfers]
    defects = []
    for what, sharding, where in named:
        several = [(cell, n) for cell, n in sharding.copies().items() if n > 1]
        if several and not sharding.replicated:
            cell, count = several[0]
            text = (
                f"{what}: {count} ranks hold token {cell[0]}, head {cell[1]}, without `replicated`"
            )
            defects.append(Defect("undeclared replica", phase, text, cell, None, where))
    return defects


def shardings_over(scheme: Scheme, phase: str) -> Iterator[tuple[int, dict[str, Sharding], Any]]:
    """Return, for each transfer of a pass, the step, the shardings of all things before it, and the transfer.

    The last entry has the shardings at the end of the pass, and None in place of a transfer.
    """
    now = {"q": scheme.home_q, "k": scheme.home_k}
    steps = scheme.steps(phase)
    for number, step in enumerate(steps):
        if not step.idle:
            now = {thing: now[SIDE_OF[thing]] for thing in RESULTS[phase]} | now
        for one in step.transfers:
            yield number, now, one
            if one.thing in now:
                now = {**now, one.thing: one.to}
    yield len(steps), now, None


def wrong_collectives(scheme: Scheme, phase: str) -> list[Defect]:
    """Find transfers whose declared name is not the one that follows from the shardings before and after (CP-1)."""
    defects = []
    for number, now, one in shardings_over(scheme, phase):
        if one is None or one.thing not in now:
            continue  # pass_defects names a thing that is not there
        derived = derived_kind(now[one.thing].shards, one, scheme.mesh)
        if derived != one.kind and not (derived == "local" and scheme.mesh.size(one.axis) == 1):
            text = f"{one.thing} along {one.axis!r} is declared {one.kind}, but is {derived}"
            defects.append(Defect("collective", phase, text, None, None, number))
    return defects
