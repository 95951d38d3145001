"""The validator of schemes: it proves that a scheme computes attention, or lists every reason why it does not.

**The rule.** Run the scheme with multisets of triples (query, query head, key). At the end, every copy of every cell at
home must have each visible triple that concerns it exactly once. A query cell of the forward pass, and of dq, is
concerned by its own triples; a key cell of dk by those of all query heads that use it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ringspec.errors import ScheduleError
from ringspec.problem.checks import is_integer
from ringspec.schemes.atoms import compressed
from ringspec.schemes.collectives import derived_kind
from ringspec.schemes.defects import Defect
from ringspec.schemes.execute import Moment, RankState, execute
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.multisets import (
    Met,
    Visible,
    is_visible,
    multiset_arithmetic,
    multiset_inputs,
)
from ringspec.schemes.scheme import INPUTS, KINDS, ORDERS, RESULTS, SIDE_OF, Scheme, Step, Transfer
from ringspec.schemes.sharding import Shard, Sharding

SHOWN = 8
Cell = tuple[int, int]
Triple = tuple[int, int, int, int]


def validate_scheme(scheme: Scheme, visible: Visible | None = None) -> None:
    """Prove that a scheme is valid, or raise ScheduleError with every defect found.

    ``visible`` bool [H or 1, Sq, Sk] says which query attends to which key; None: all to all, for the tokens at home.

    >>> from ringspec.schemes.rings import ring
    >>> from ringspec.schemes.mesh import Mesh
    >>> validate_scheme(ring(Mesh((("ring", 2),)), [[0, 1], [2, 3]], heads=2, kv_heads=1))
    """
    defects = find_scheme_defects(scheme, visible)
    if defects:
        raise ScheduleError(
            "a scheme in which every copy of every cell meets each visible triple exactly once",
            "; ".join(str(defect) for defect in defects[:SHOWN])
            + (f"; and {len(defects) - SHOWN} more" if len(defects) > SHOWN else ""),
            "correct the named steps; ringspec.schemes has constructors of valid schemes",
            tuple(defects),
        )


def find_scheme_defects(scheme: Scheme, visible: Visible | None = None) -> list[Defect]:
    """Return all defects of a scheme; ``visible`` is as in :func:`validate_scheme`."""
    defects = malformed(scheme)
    if defects:
        return defects
    if visible is None:
        visible = np.ones((1, length(scheme.home_q), length(scheme.home_k)), dtype=np.bool_)
    defects = homeless(scheme, visible)
    for phase in ("forward", "backward"):
        if scheme.steps(phase):
            defects += replicas(scheme, phase)
            small, _ = compressed(scheme, phase, visible)
            defects += wrong_collectives(small, phase)
    for phase in ("forward", "backward"):
        if scheme.steps(phase):
            defects += pass_defects(scheme, phase, visible)
    return defects


def length(sharding: Sharding) -> int:
    """Return the number of tokens up to the largest that a rank holds."""
    return 1 + max((token for shard in sharding.shards for token in shard.tokens), default=-1)


def malformed(scheme: Scheme) -> list[Defect]:
    """Find values that no scheme can have. This is checked first, so that the other checks can rely on it."""
    if not well_typed(scheme):
        return [Defect("malformed", None, "a Scheme of Steps of Transfers needed")]
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


def well_typed(scheme: object) -> bool:
    """Return whether ``scheme`` is a Scheme of tuples, shardings, steps and transfers, with ints in all tables."""
    if not isinstance(scheme, Scheme) or not isinstance(scheme.mesh, Mesh):
        return False
    passes = (scheme.forward, () if scheme.backward is None else scheme.backward)
    if not all(isinstance(steps, tuple) for steps in passes):
        return False
    steps = [step for steps in passes for step in steps]
    if not all(isinstance(step, Step) and isinstance(step.transfers, tuple) for step in steps):
        return False
    transfers = [one for step in steps for one in step.transfers]
    if not all(isinstance(one, Transfer) for one in transfers):
        return False
    names = [
        getattr(one, field) for one in transfers for field in ("thing", "kind", "axis", "order")
    ]
    shardings = [scheme.home_q, scheme.home_k, scheme.home_o, *(one.to for one in transfers)]
    tables = [one.tokens for one in transfers if one.tokens is not None]
    for step in steps:
        for sets in (step.rows, step.keys):
            if sets is not None:
                tables += sets if isinstance(sets, tuple) else [sets]
    for sharding in shardings:
        kinds = isinstance(sharding, Sharding) and isinstance(sharding.shards, tuple)
        if not kinds or not all(isinstance(shard, Shard) for shard in sharding.shards):
            return False
        tables += [numbers for shard in sharding.shards for numbers in (shard.tokens, shard.heads)]
    whole = all(isinstance(table, tuple) and all(map(is_integer, table)) for table in tables)
    counts = is_integer(scheme.heads) and is_integer(scheme.kv_heads)
    return whole and counts and all(isinstance(name, str) for name in names)


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
    """Find cells that are on several ranks of a sharding that does not declare it."""
    defects = overlap(phase, "home_q", scheme.home_q, None)
    defects += overlap(phase, "home_k", scheme.home_k, None)
    for number, step in enumerate(scheme.steps(phase)):
        for one in step.transfers:
            defects += overlap(phase, one.thing, one.to, number)
    return defects


def overlap(phase: str, what: str, sharding: Sharding, number: int | None) -> list[Defect]:
    """Find the first cell on several ranks of a sharding, unless it declares replicas."""
    several = [cell for cell, count in sharding.copies().items() if count > 1]
    if sharding.replicated or not several:
        return []
    (token, head), count = several[0], sharding.copies()[several[0]]
    text = f"{what}: {count} ranks hold token {token}, head {head}, without `replicated`"
    return [Defect("undeclared replica", phase, text, (token, head), None, number)]


def wrong_collectives(scheme: Scheme, phase: str) -> list[Defect]:
    """Find transfers whose declared name is not the one that follows from the shardings before and after."""
    now = {"q": scheme.home_q.shards, "k": scheme.home_k.shards}
    defects = []
    for number, step in enumerate(scheme.steps(phase)):
        if not step.idle:
            for thing in RESULTS[phase]:
                now.setdefault(thing, now[SIDE_OF[thing]])
        for one in step.transfers:
            if one.thing not in now:
                continue  # pass_defects names it
            derived = derived_kind(now[one.thing], one, scheme.mesh)
            if derived != one.kind and not (derived == "local" and scheme.mesh.size(one.axis) == 1):
                text = f"{one.thing} along {one.axis!r} is declared {one.kind}, but is {derived}"
                defects.append(Defect("collective", phase, text, None, None, number))
            now[one.thing] = one.to.shards
    return defects


def pass_defects(scheme: Scheme, phase: str, visible: Visible) -> list[Defect]:
    """Run one pass with multisets and find everything that is absent, missed, lost, doubled or foreign."""
    small, seen = compressed(scheme, phase, visible)
    defects: list[Defect] = []
    computed: set[Triple] = set()

    def observe(moment: Moment) -> None:
        for before, after in zip(moment.before, moment.computed, strict=True):
            for thing in RESULTS[phase]:
                part = after.parts.get(thing)
                if part is not None and part is not before.parts.get(thing):
                    for cell in part.tensors[thing].ravel():
                        computed.update(met.triple for met in cell)

    states = execute(
        small,
        phase,
        multiset_inputs(small),
        multiset_arithmetic(small, phase, seen),
        defects.append,
        observe,
    )
    for thing, home in small.ends(phase).items():
        full = scheme.ends(phase)[thing]
        expected = expected_triples(small, SIDE_OF[thing], seen)
        for state in states:
            last = final_shard(scheme, phase, thing, state.rank)
            if last != full.shards[state.rank]:
                text = f"rank {state.rank} ends with {thing} of another shard than its home"
                defects.append(Defect("not at home", phase, text, None, state.rank))
            defects += wrong_cells(phase, thing, home.shards[state.rank], state, expected, computed)
    return defects


def final_shard(scheme: Scheme, phase: str, thing: str, rank: int) -> Shard:
    """Return the shard that a rank's result has at the end of a pass."""
    now = {"q": scheme.home_q, "k": scheme.home_k}
    for step in scheme.steps(phase):
        if not step.idle:
            now.setdefault(thing, now[SIDE_OF[thing]])
        for one in step.transfers:
            if one.thing in now:
                now[one.thing] = one.to
    return now.get(thing, Sharding((Shard((), ()),) * scheme.mesh.ranks)).shards[rank]


def expected_triples(scheme: Scheme, side: str, visible: Visible) -> dict[Cell, set[Triple]]:
    """Return the visible triples that concern each cell (token, head) of the queries, or of the keys."""
    home = scheme.home_q if side == "q" else scheme.home_k
    expected: dict[Cell, set[Triple]] = {cell: set() for cell in home.copies()}
    keys = {token for shard in scheme.home_k.shards for token in shard.real}
    for query, head in scheme.home_q.copies():
        key_head = head // scheme.group
        for key in keys:
            if is_visible(visible, head, query, key):
                cell = (query, head) if side == "q" else (key, key_head)
                expected[cell].add((query, head, key, key_head))
    return expected


def wrong_cells(
    phase: str,
    thing: str,
    home: Shard,
    state: RankState,
    expected: dict[Cell, set[Triple]],
    computed: set[Triple],
) -> list[Defect]:
    """Compare each cell of a rank's result, slot by slot, with the triples that belong there; one defect a cell and kind."""
    part = state.parts.get(thing)
    if part is None or part.tensors[thing].shape[1:] != (len(home.heads), len(home.tokens)):
        text = (
            f"rank {state.rank} does not end with {thing} "
            f"of {len(home.tokens)} tokens x {len(home.heads)} heads"
        )
        return [Defect("not at home", phase, text, None, state.rank)]
    defects = []
    for h, head in enumerate(home.heads):
        for t, token in enumerate(home.tokens):
            if token >= 0:
                held, cell = list(part.tensors[thing][0, h, t]), (token, head)
                defects += wrong_cell(
                    phase, thing, cell, state.rank, held, expected[cell], computed
                )
    return defects


def wrong_cell(
    phase: str,
    thing: str,
    cell: Cell,
    rank: int,
    held: list[Met],
    wanted: set[Triple],
    computed: set[Triple],
) -> list[Defect]:
    """Return what is missed, lost, doubled or foreign in one cell of a rank's result."""
    counts = Counter(met.triple for met in held)
    where = f"{thing} of token {cell[0]}, head {cell[1]} on rank {rank}"
    defects = []
    for kind, triples in (
        ("missed", sorted(wanted - set(counts) - computed)),
        ("lost", sorted((wanted - set(counts)) & computed)),
        ("doubled", sorted(triple for triple in wanted if counts[triple] > 1)),
        ("foreign", sorted(set(counts) - wanted)),
    ):
        if triples:
            one = triples[0]
            makers = [(met.step, met.rank) for met in held if met.triple == one]
            made = ", ".join(f"step {step} on rank {maker}" for step, maker in makers)
            text = (
                f"{where}: query {one[0]}, head {one[1]} with key {one[2]}"
                + (f", computed in {made}" if made else "")
                + (f" (and {len(triples) - 1} more)" if len(triples) > 1 else "")
            )
            step = makers[-1][0] if makers else None
            defects.append(Defect(kind, phase, text, cell, rank, step))
    return defects
