"""The validator of schemes: it proves that a scheme computes attention, or lists every reason why it does not.

**The rule.** Run the scheme with multisets of triples (query, query head, key). At the end, every copy of every cell at
home must have each visible triple that concerns it exactly once. A query cell of the forward pass, and of dq, is
concerned by its own triples; a key cell of dk by those of all query heads that use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ringspec.errors import ScheduleError
from ringspec.schemes.atoms import compressed
from ringspec.schemes.checks import (
    homeless,
    length,
    malformed,
    replicas,
    shardings_over,
    wrong_collectives,
)
from ringspec.schemes.defects import Defect
from ringspec.schemes.execute import Moment, RankState, execute
from ringspec.schemes.multisets import (
    Met,
    Visible,
    is_visible,
    multiset_arithmetic,
    multiset_inputs,
)
from ringspec.schemes.scheme import RESULTS, SIDE_OF, Scheme
from ringspec.schemes.sharding import Shard

SHOWN = 8
Cell = tuple[int, int]
Triple = tuple[int, int, int, int]


def validate_scheme(scheme: Scheme, visible: Visible | None = None) -> None:
    """CP-2: prove that a scheme is valid, or raise ScheduleError with every defect found.

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
    *_, (_, last, _) = shardings_over(scheme, phase)
    for thing, home in small.ends(phase).items():
        full = scheme.ends(phase)[thing]
        expected = expected_triples(small, SIDE_OF[thing], seen)
        for state in states:
            if thing in last and last[thing].shards[state.rank] != full.shards[state.rank]:
                text = f"rank {state.rank} ends with {thing} of another shard than its home"
                defects.append(Defect("not at home", phase, text, None, state.rank))
            defects += wrong_cells(phase, thing, home.shards[state.rank], state, expected, computed)
    return defects


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
                for kind, text, step in wrong_triples(held, expected[cell], computed):
                    where = f"{thing} of token {token}, head {head} on rank {state.rank}: {text}"
                    defects.append(Defect(kind, phase, where, cell, state.rank, step))
    return defects


def wrong_triples(
    held: list[Met], wanted: set[Triple], computed: set[Triple]
) -> Iterator[tuple[str, str, int | None]]:
    """Return what is missed, lost, doubled or foreign in one cell: the kind, the first triple as text, its last step."""
    counts = Counter(met.triple for met in held)
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
                f"query {one[0]}, head {one[1]} with key {one[2]}"
                + (f", computed in {made}" if made else "")
                + (f" (and {len(triples) - 1} more)" if len(triples) > 1 else "")
            )
            yield kind, text, makers[-1][0] if makers else None
