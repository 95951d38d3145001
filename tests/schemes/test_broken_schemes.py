"""The validator refuses broken schemes, each for its own reason, and names the cell, the rank and the step."""

from dataclasses import replace

import numpy as np
import pytest

from ringspec.errors import ScheduleError
from ringspec.schemes.exchanges import others, usp
from ringspec.schemes.gathers import all_gather, dcp, pcp
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import double_ring, ring
from ringspec.schemes.scheme import Scheme, Step, Transfer, idle
from ringspec.schemes.sharding import Shard, Sharding, by_tables, shifted
from ringspec.schemes.validator import find_scheme_defects, validate_scheme

CAUSAL = np.tril(np.ones((1, 64, 64), dtype=bool))


def causal(length):
    return CAUSAL[:, :length, :length]


def zigzag(workers, first=0):
    """Return two tokens for each rank: r and 2W - 1 - r."""
    return [[first + r, first + 2 * workers - 1 - r] for r in range(workers)]


def mesh(**axes):
    return Mesh(tuple(axes.items()))


RING = ring(mesh(ring=3), zigzag(3), heads=2, kv_heads=1)
RING_MESH = RING.mesh
DOUBLE = double_ring(mesh(outer=2, inner=3), [[r] for r in range(6)], heads=1, kv_heads=1)
GATHER = all_gather(mesh(cp=3), zigzag(3), heads=2, kv_heads=1)
ULYSSES = usp(mesh(ulysses=4), zigzag(4), heads=8, kv_heads=2, name="ulysses")
USP = usp(mesh(ulysses=2, ring=2), [[0], [1], [2], [3]], heads=2, kv_heads=2)
JOINT = usp(mesh(ring=3, ulysses=2), zigzag(6, 2), heads=4, kv_heads=2, text=(0, 1), name="joint")
PCP = pcp(mesh(pcp=2), [[0], [1]], [[0, 2], [1, 3]], heads=2, kv_heads=1)
DCP = dcp(mesh(tp=2, dcp=2), 1, [[0, 2], [1]], heads=4, kv_heads=2)
NEW = dcp(mesh(dcp=2), 1, [[0, 2], [1]], heads=2, kv_heads=1, new=(3,))
VALID = [RING, DOUBLE, GATHER, ULYSSES, USP, JOINT, PCP, DCP, NEW]


@pytest.mark.rule("CP-1", "CP-2", "CP-4", "CP-5")
@pytest.mark.parametrize("scheme", VALID, ids=lambda scheme: scheme.name)
def test_the_schemes_that_are_broken_below_are_valid(scheme):
    validate_scheme(scheme)


def with_steps(scheme: Scheme, phase: str, steps) -> Scheme:
    return replace(scheme, **{phase: tuple(steps)})


def change(scheme: Scheme, phase: str, number: int, **fields) -> Scheme:
    """Return a scheme with other fields in one step; negative numbers count from the end."""
    steps = list(scheme.steps(phase))
    steps[number] = replace(steps[number], **fields)
    return with_steps(scheme, phase, steps)


def transfer(scheme: Scheme, phase: str, number: int, which: str, **fields) -> Scheme:
    """Return a scheme with other fields in the transfers of the thing ``which`` in one step."""
    old = scheme.steps(phase)[number].transfers
    new = tuple(replace(one, **fields) if one.thing == which else one for one in old)
    return change(scheme, phase, number, transfers=new)


def without(scheme: Scheme, phase: str, thing: str, number: int | None = None) -> Scheme:
    """Return a scheme that never transfers a thing, or not in one step."""
    steps = list(scheme.steps(phase))
    for n in range(len(steps)) if number is None else [number]:
        kept = tuple(one for one in steps[n].transfers if one.thing != thing)
        steps[n] = replace(steps[n], transfers=kept)
    return with_steps(scheme, phase, steps)


def every(scheme: Scheme, phase: str, **fields) -> Scheme:
    """Return a scheme with other fields in every step that computes."""
    steps = [step if step.idle else replace(step, **fields) for step in scheme.steps(phase)]
    return with_steps(scheme, phase, steps)


def target(scheme: Scheme, phase: str, number: int, thing: str) -> Sharding:
    return next(one.to for one in scheme.steps(phase)[number].transfers if one.thing == thing)


def last_rank_without(sharding: Sharding) -> Sharding:
    """Return a sharding in which nobody holds the tokens that the last rank of the home has."""
    lost = set(zigzag(4)[3])
    shards = [(tuple(t for t in s.tokens if t not in lost), s.heads) for s in sharding.shards]
    return by_tables(*zip(*shards, strict=True))


def ring_without_keys_after(scheme: Scheme) -> Scheme:
    """Skip a block if the ring step is larger than the ring coordinate, as block causality by rank numbers does."""
    steps = list(scheme.forward)
    held = [target(scheme, "forward", 0, "k"), target(scheme, "forward", 1, "k")]
    for t in range(2):
        keys = tuple(
            shard.tokens if t <= scheme.mesh.coordinate(r, "ring") else ()
            for r, shard in enumerate(held[t].shards)
        )
        steps[1 + t] = replace(steps[1 + t], keys=keys)
    return with_steps(scheme, "forward", steps)


def text_keys(scheme: Scheme, when) -> Scheme:
    """Use the text keys in the steps and on the ranks for which when(step, rank) is true."""
    steps = list(scheme.forward)
    block = target(scheme, "forward", 0, "k")
    for t in range(3):
        keys = tuple(
            s.tokens if when(t, r) else others(s, (0, 1)) for r, s in enumerate(block.shards)
        )
        steps[1 + t] = replace(steps[1 + t], keys=keys)
        block = shifted(block, scheme.mesh, "ring", 1)
    return with_steps(scheme, "forward", steps)


def tiled(scheme: Scheme) -> Scheme:
    """Give rank u key head u mod Hkv, which tiling the key heads does, in place of u * Hkv // P."""
    wide = target(scheme, "forward", 0, "k")
    to = by_tables([s.tokens for s in wide.shards], [[u % 2] for u in range(4)])
    return transfer(scheme, "forward", 0, "k", to=to)


def heads_of_ranks(scheme: Scheme, thing: str, heads) -> Scheme:
    wide = target(scheme, "forward", 0, thing)
    return transfer(
        scheme, "forward", 0, thing, to=by_tables([s.tokens for s in wide.shards], heads)
    )


def one_block_twice(scheme: Scheme) -> Scheme:
    """Send the block of rank 0 to ranks 1 and 2."""
    home = scheme.home_k.shards
    to = Sharding((home[2], home[0], home[0]), replicated=True)
    return transfer(scheme, "forward", 0, "k", to=to)


def foreign_group(scheme: Scheme) -> Scheme:
    """Put ranks with different key heads into one decode group: each holds the key head of its own number."""
    heads = [[0], [1], [0], [1]]
    home = by_tables([s.tokens for s in scheme.home_k.shards], heads)
    return replace(scheme, home_k=home)


def nobody_moves(scheme: Scheme) -> Scheme:
    return replace(scheme, forward=(Step(),), backward=(Step(),))


BROKEN = {
    # Rings
    "ring: a hop is missing": (
        without(RING, "forward", "k", 0),
        "doubled",
        "step 0 on rank 0, step 1 on rank 0",
    ),
    "ring: one hop goes the other way": (
        transfer(RING, "forward", 1, "k", to=RING.home_k),
        "doubled",
        "step 2 on rank",
    ),
    "ring: the last step is missing": (
        with_steps(RING, "forward", RING.forward[:2]),
        "missed",
        "with key",
    ),
    "ring: one step too many": (
        with_steps(RING, "forward", (*RING.forward[:2], RING.forward[1], RING.forward[2])),
        "doubled",
        "step 3 on rank",
    ),
    "ring: one block is sent to two ranks": (
        one_block_twice(RING),
        "collective",
        "declared permute",
    ),
    "ring: dk does not make the last hop": (
        without(RING, "backward", "dk", 2),
        "not at home",
        "dk",
    ),
    "ring: dk does not travel with k": (without(RING, "backward", "dk"), "lost", "holds no dk"),
    "ring: the backward pass uses local keys in every step": (
        without(without(RING, "backward", "k"), "backward", "dk"),
        "doubled",
        "step 0 on rank 0, step 1 on rank 0, step 2 on rank 0",
    ),
    "ring: keys travel, dk arrives a hop late": (
        transfer(RING, "backward", 0, "dk", to=RING.home_k),
        "lost",
        "holds no dk",
    ),
    "ring: a permute is declared all_gather": (
        transfer(RING, "forward", 0, "k", kind="all_gather"),
        "collective",
        "is permute",
    ),
    "ring: context parallelism is silently off": (nobody_moves(RING), "missed", "with key"),
    "double ring: no outer hop": (
        with_steps(
            DOUBLE,
            "forward",
            (
                *DOUBLE.forward[:2],
                replace(DOUBLE.forward[2], transfers=DOUBLE.forward[2].transfers[:1]),
                *DOUBLE.forward[:3],
            ),
        ),
        "doubled",
        "step 3 on rank",
    ),
    "double ring: the outer hop goes along the inner ring": (
        change(
            DOUBLE,
            "forward",
            2,
            transfers=(
                DOUBLE.forward[2].transfers[0],
                replace(DOUBLE.forward[2].transfers[1], axis="inner"),
            ),
        ),
        "absent",
        "no rank of the group along 'inner'",
    ),
    # Gathered keys
    "all-gather: dk is not returned": (without(GATHER, "backward", "dk"), "not at home", "dk"),
    "all-gather: dk returns to the next rank": (
        transfer(GATHER, "backward", 1, "dk", to=shifted(GATHER.home_k, GATHER.mesh, "cp", 1)),
        "foreign",
        "dk of token",
    ),
    "all-gather: shares of dk are exchanged, not added": (
        transfer(GATHER, "backward", 1, "dk", kind="all_to_all"),
        "collective",
        "is reduce_scatter",
    ),
    "all-gather: the copies of the keys are not declared": (
        transfer(
            GATHER,
            "forward",
            0,
            "k",
            to=replace(target(GATHER, "forward", 0, "k"), replicated=False),
        ),
        "undeclared replica",
        "3 ranks hold token 0",
    ),
    "pcp: the prefix is not gathered": (
        transfer(PCP, "forward", 0, "k", to=by_tables([[0, 2, 3], [1, 2, 3]], [[0], [0]])),
        "missed",
        "with key 1",
    ),
    # Ulysses and USP
    "ulysses: key heads are tiled": (tiled(ULYSSES), "absent head", "key head 0"),
    "ulysses: query heads in reverse order": (
        heads_of_ranks(ULYSSES, "q", [(6, 7), (4, 5), (2, 3), (0, 1)]),
        "absent head",
        "key head 1",
    ),
    "ulysses: query heads overlap": (
        heads_of_ranks(ULYSSES, "q", [(0, 1), (1, 2), (2, 3), (6, 7)]),
        "absent",
        "head 4",
    ),
    "ulysses: the exchange forgets the keys of a rank": (
        transfer(
            ULYSSES, "forward", 0, "k", to=last_rank_without(target(ULYSSES, "forward", 0, "k"))
        ),
        "missed",
        "with key 3",
    ),
    "ulysses: the exchange back is missing": (
        without(ULYSSES, "forward", "state"),
        "not at home",
        "state",
    ),
    "ulysses: the exchange back gives each rank the rows of the next": (
        transfer(
            ULYSSES, "forward", 1, "state", to=shifted(ULYSSES.home_q, ULYSSES.mesh, "ulysses", -1)
        ),
        "not at home",
        "another shard",
    ),
    "ulysses: the exchange back puts heads in another order": (
        transfer(
            ULYSSES,
            "forward",
            1,
            "state",
            to=by_tables(
                [s.tokens for s in ULYSSES.home_q.shards], [[*range(4, 8), *range(4)]] * 4
            ),
        ),
        "foreign",
        "state of token 0, head 0 on rank 0: query 0, head 4",
    ),
    "ulysses: the exchange back reverses the rows of each rank": (
        transfer(
            ULYSSES,
            "forward",
            1,
            "state",
            to=by_tables(
                [sorted(s.tokens, reverse=True) for s in ULYSSES.home_q.shards], [range(8)] * 4
            ),
        ),
        "not at home",
        "another shard",
    ),
    "ulysses: dk of one copy of a key head only": (
        transfer(ULYSSES, "backward", 1, "dk", kind="all_to_all"),
        "collective",
        "is reduce_scatter",
    ),
    "usp: blocks are skipped by rank numbers": (
        ring_without_keys_after(
            usp(mesh(ulysses=2, ring=2), [[0], [1], [2], [3]], heads=2, kv_heads=2)
        ),
        "missed",
        "query 2, head 0 with key 1",
    ),
    "usp: the ring runs along the wrong axis": (
        change(
            USP,
            "forward",
            1,
            transfers=tuple(replace(one, axis="ulysses") for one in USP.forward[1].transfers),
        ),
        "absent",
        "no rank of the group along 'ulysses'",
    ),
    "usp: queries are not exchanged": (without(USP, "forward", "q"), "absent head", "key head"),
    # Joint attention
    "joint: text keys in every step": (
        text_keys(JOINT, lambda t, r: True),
        "doubled",
        "with key 0, computed in step 1 on rank 0, step 2 on rank 0, step 3 on rank 0",
    ),
    "joint: text keys in no step": (text_keys(JOINT, lambda t, r: False), "missed", "with key 0"),
    "joint: text keys on the first ring coordinate only": (
        text_keys(JOINT, lambda t, r: t == 0 and r < 2),
        "lost",
        "query 0, head 0 with key 0",
    ),
    "joint: text rows are differentiated by every copy": (
        every(JOINT, "backward", rows=None),
        "doubled",
        "query 0, head 0 with key 0",
    ),
    "joint: text rows are differentiated by no copy": (
        every(
            JOINT,
            "backward",
            rows=tuple(others(s, (0, 1)) for s in target(JOINT, "backward", 0, "q").shards),
        ),
        "missed",
        "query 0, head 0",
    ),
    "joint: text gradients of the ring are not added": (
        change(
            JOINT,
            "backward",
            -1,
            transfers=tuple(
                one for one in JOINT.backward[-1].transfers if one.kind != "all_reduce"
            ),
        ),
        "lost",
        "dk of token 0",
    ),
    "joint: the text's dk travels with the block": (
        transfer(JOINT, "backward", 1, "dk", tokens=None),
        "collective",
        "is all_reduce + permute",
    ),
    "joint: text outputs are not gathered": (
        transfer(JOINT, "forward", 3, "state", kind="all_to_all"),
        "collective",
        "is all_gather + all_to_all",
    ),
    "joint: text on all ranks without `replicated`": (
        replace(JOINT, home_k=replace(JOINT.home_k, replicated=False)),
        "undeclared replica",
        "home_k: 6 ranks hold token 0",
    ),
    # Decoding
    "dcp: a group over different key heads": (
        foreign_group(DCP),
        "absent head",
        "computes query heads of key head",
    ),
    "dcp: query heads are not gathered": (without(DCP, "forward", "q"), "missed", "with key 1"),
    "dcp: states are not merged": (without(DCP, "forward", "state"), "not at home", "state"),
    "dcp: states are gathered, not merged": (
        transfer(DCP, "forward", 1, "state", kind="all_gather"),
        "collective",
        "is reduce_scatter",
    ),
    "dcp: new keys in the cache and beside it": (
        change(NEW, "forward", 1, keys=None),
        "doubled",
        "with key 3",
    ),
    "dcp: a key of the cache is on no rank": (
        replace(DCP, home_k=by_tables([(0, 2), (), (0, 2), ()], [[0], [0], [1], [1]])),
        "no home",
        "key 1",
    ),
    "dcp: a key of the cache is on two ranks": (
        replace(
            DCP,
            home_k=Sharding(
                tuple(Shard((0, 1, 2) if r % 2 == 0 else (1,), (r // 2,)) for r in range(4))
            ),
        ),
        "undeclared replica",
        "2 ranks hold token 1",
    ),
    "dcp: a key on two ranks is declared, and used by both": (
        change(
            replace(DCP, home_k=by_tables([(0, 1, 2), (1,)] * 2, [[0], [0], [1], [1]])),
            "forward",
            1,
            keys=None,
        ),
        "doubled",
        "with key 1",
    ),
    # Values that no scheme can have
    "a sharding of two ranks on a mesh of three": (
        transfer(RING, "forward", 0, "k", to=Sharding(RING.home_k.shards[:2])),
        "malformed",
        "2 ranks on a mesh of 3",
    ),
    "an axis that the mesh does not have": (
        transfer(RING, "forward", 0, "k", axis="rnig"),
        "malformed",
        "'rnig'",
    ),
    "an operation that does not exist": (
        transfer(RING, "forward", 0, "k", kind="gather"),
        "malformed",
        "'gather'",
    ),
    "dq in a forward pass": (transfer(RING, "forward", 0, "k", thing="dq"), "malformed", "'dq'"),
    "rows for one rank": (
        change(RING, "forward", 0, rows=((0,),)),
        "malformed",
        "rows for 1 of 3 ranks",
    ),
    "rows that a rank does not hold": (
        change(RING, "forward", 0, rows=((0,), (0,), (2,))),
        "absent",
        "query 0",
    ),
    "a token twice on one rank": (
        replace(RING, home_q=by_tables([[0, 0], [1, 4], [2, 3]], [[0, 1]] * 3)),
        "malformed",
        "twice",
    ),
    "three query heads over two key heads": (
        replace(RING, heads=3, kv_heads=2),
        "malformed",
        "3 query heads",
    ),
    "no step that computes": (replace(RING, forward=(idle(),)), "malformed", "no step computes"),
    "a list in place of steps": (
        replace(RING, forward=list(RING.forward)),
        "malformed",
        "Scheme of Steps",
    ),
    "a pass that starts where the other does not end": (
        replace(RING, home_o=shifted(RING.home_q, RING_MESH, "ring", 1)),
        "malformed",
        "home_o must be home_q",
    ),
    "a transfer of a state before anything is computed": (
        replace(
            RING, forward=(idle(Transfer("state", "permute", "ring", RING.home_q)), *RING.forward)
        ),
        "absent",
        "before anything was computed",
    ),
}


@pytest.mark.rule("CP-1", "CP-2", "CP-4", "CP-5")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_scheme_is_refused_for_its_own_reason(name):
    scheme, kind, words = BROKEN[name]
    mask = causal(4) if "rank numbers" in name else None
    found = find_scheme_defects(scheme, mask)
    assert any(one.kind == kind and words in one.where for one in found), list(map(str, found))[:6]
    with pytest.raises(ScheduleError, match="expected a scheme in which") as caught:
        validate_scheme(scheme, mask)
    assert caught.value.problems == tuple(found)


def unordered(things: str) -> Scheme:
    """Return Ulysses over zigzag shards in which rows and keys lie in the order of the ranks after the exchange."""
    scheme = usp(mesh(ulysses=2), zigzag(2), heads=2, kv_heads=2, name="ulysses")
    for thing in things:
        scheme = transfer(scheme, "forward", 0, thing, order="rank")
    return replace(scheme, backward=None)


@pytest.mark.parametrize("things", ["q", "k", "qk"])
def test_ulysses_without_reordering_is_refused_with_zigzag_and_a_causal_mask(things):
    found = find_scheme_defects(unordered(things), causal(4))
    assert any(one.kind == "foreign" for one in found), list(map(str, found))


def test_the_order_of_keys_does_not_matter_without_a_mask():
    validate_scheme(unordered("k"))


def test_a_defect_names_cell_rank_and_step():
    found = find_scheme_defects(BROKEN["ring: a hop is missing"][0])
    doubled = next(one for one in found if one.kind == "doubled")
    assert (doubled.phase, doubled.cell, doubled.rank, doubled.step) == ("forward", (0, 0), 0, 1)
    assert "state of token 0, head 0 on rank 0" in str(doubled)
