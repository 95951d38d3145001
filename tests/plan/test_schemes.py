"""Plans of schemes: the counted bytes are those that recorded runs move and hold, on every rank that is busiest."""

import numpy as np
import pytest
from refusals import is_refusal

from ringspec.cli.commands.plan import SCHEMES
from ringspec.errors import LayoutError, OptionError, RingspecError
from ringspec.plan import PRESETS, plan
from ringspec.plan.moves import Split, cell_bytes, held, movements, sent
from ringspec.plan.scheme_options import LIMITS, USES
from ringspec.plan.scheme_question import AXES
from ringspec.plan.scheme_times import link_of, step_counts
from ringspec.plan.workload import workload
from ringspec.schemes.api import context_parallel
from ringspec.schemes.build import BUILDERS
from ringspec.schemes.mesh import Mesh

D, DV, BATCH = 3, 2, 2
# Scheme, mesh, (H, Hkv), (Sq, Sk), keywords.
RUNS = [
    ("ring", {"ring": 4}, (2, 1), (8, 8), {}),
    ("ring", {"ring": 1}, (2, 1), (8, 8), {}),
    ("double_ring", {"outer": 2, "inner": 3}, (2, 2), (12, 12), {}),
    ("double_ring", {"outer": 3, "inner": 1}, (2, 2), (6, 6), {}),
    ("all_gather", {"cp": 3}, (4, 2), (6, 6), {}),
    ("ulysses", {"ulysses": 4}, (8, 2), (8, 8), {"layout": "zigzag"}),
    ("ulysses", {"ulysses": 3}, (6, 2), (6, 6), {}),  # the slices use 1, 2 and 1 key heads
    ("ulysses", {"ulysses": 2}, (2, 1), (4, 4), {}),
    ("usp", {"ring": 2, "ulysses": 3}, (6, 2), (12, 12), {}),
    ("usp", {"ulysses": 2, "ring": 2}, (4, 4), (8, 8), {"layout": "zigzag"}),
    ("joint", {"ring": 2, "ulysses": 2}, (4, 2), (11, 11), {"text": [0, 1, 2]}),
    ("joint", {"ring": 2, "ulysses": 2}, (4, 1), (23, 23), {"text": list(range(15))}),
    ("joint", {"ring": 3}, (2, 1), (8, 8), {"text": [0, 1]}),
    ("pcp", {"pcp": 2}, (2, 1), (4, 9), {}),
    ("dcp", {"tp": 2, "dcp": 2}, (8, 2), (2, 9), {}),
    ("dcp", {"tp": 3, "dcp": 2}, (12, 2), (1, 5), {}),
    ("dcp", {"dcp": 4}, (4, 2), (1, 3), {}),
]  # fmt: skip


def recorded(scheme, mesh, heads, lengths, keywords, recipe):
    q = np.ones((BATCH, heads[0], lengths[0], D))
    k, v = (np.ones((BATCH, heads[1], lengths[1], width)) for width in (D, DV))
    dy = None if scheme in ("pcp", "dcp") else np.ones((*q.shape[:3], DV))
    return context_parallel(
        q, k, v, dy, mesh=mesh, scheme=scheme, record=True, recipe=recipe, **keywords
    )


def split_of(run):
    scheme, mesh = run.scheme, run.scheme.mesh
    text = len(set.intersection(*(set(s.tokens) for s in scheme.home_q.shards)))
    text = text if scheme.name == "joint" else 0
    return Split(
        scheme.name,
        mesh,
        scheme.heads,
        scheme.kv_heads,
        len(scheme.home_q.shards[0].tokens) - text,
        max(len(shard.tokens) for shard in scheme.home_k.shards) - text,
        run.problem.k.shape[2] - text,
        text,
    )


def measured(run, phase):
    """What the arrays of a recorded run say in bytes: sent along each axis, and held at most, by each rank."""
    ranks = run.scheme.mesh.ranks
    sent_by, most = [{} for _ in range(ranks)], [0] * ranks
    for moment in [one for one in run.moments if one.phase == phase]:
        states = {one.rank: one for one in moment.after}
        for transfer, messages in zip(
            run.scheme.steps(phase)[moment.step].transfers, moment.messages, strict=True
        ):
            for message in messages:
                part = states[message.source].parts[transfer.thing]
                cell = sum(x.nbytes for x in part.tensors.values())
                cell //= len(part.shard.tokens) * len(part.shard.heads)
                size = cell * len(message.shard.tokens) * len(message.shard.heads)
                there = sent_by[message.source]
                there[transfer.axis] = there.get(transfer.axis, 0) + size
        for state in (*moment.computed, *moment.after):
            size = sum(x.nbytes for part in state.parts.values() for x in part.tensors.values())
            most[state.rank] = max(most[state.rank], size)
    return sent_by, most


@pytest.mark.parametrize(("scheme", "mesh", "heads", "lengths", "keywords"), RUNS)
def test_planned_bytes_are_those_that_a_recorded_run_moves_and_holds(
    scheme, mesh, heads, lengths, keywords
):
    run = recorded(scheme, mesh, heads, lengths, keywords, "float64")
    work = workload(
        8, 1, batch=BATCH, heads=heads[0], kv_heads=heads[1], head_dim=D, value_dim=DV,
        recipe_name="float64",
    )  # fmt: skip
    for phase in ("forward", "backward")[: 1 + (run.gradients is not None)]:
        backward = phase == "backward"
        each, planned = cell_bytes(work, backward), movements(split_of(run), backward)
        sent_by, most = measured(run, phase)
        ways = [sent(x, each) for x in planned]
        # In a prefill, some ranks hold fewer keys of the prefix, and send less than planned.
        assert all(x in sent_by for x in ways) and (
            scheme == "pcp" or all(x in ways for x in sent_by)
        )
        assert max(sum(x.values()) for x in ways) == max(sum(x.values()) for x in sent_by)
        assert max(held(x, each, backward) for x in planned) == max(most)


@pytest.mark.parametrize(("scheme", "mesh", "heads", "lengths", "keywords"), RUNS)
def test_planned_operations_are_those_of_the_scheme_and_its_cost_in_bytes(
    scheme, mesh, heads, lengths, keywords
):
    run = recorded(scheme, mesh, heads, lengths, keywords, "bf16")
    work = workload(8, 1, batch=BATCH, heads=heads[0], kv_heads=heads[1], head_dim=D, value_dim=DV)
    for phase in ("forward", "backward")[: 1 + (run.gradients is not None)]:
        backward = phase == "backward"
        each, planned = cell_bytes(work, backward), movements(split_of(run), backward)
        cost = run.cost(phase)
        assert max(sum(sent(x, each).values()) for x in planned) == max(cost.sent)
        assert max(held(x, each, backward) for x in planned) == max(cost.held)
        for x in planned:
            assert sum(len(one.steps) for one in x.moves) == cost.transfers or not max(cost.sent)
            assert sum(len(one.steps) * one.messages for one in x.moves) == max(cost.messages)
        declared = [
            (one.thing, one.kind, one.axis)
            for step in run.scheme.steps(phase)
            for one in step.transfers
        ]
        named = [(m.thing, m.kind, m.axis) for m in planned[0].moves for _ in m.steps]
        assert sorted(named) == sorted(declared)


def option(planned, scheme, **mesh):
    return next(x for x in planned.schemes if x.scheme == scheme and dict(x.mesh.axes) == mesh)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (900, 0)}])
def test_a_planned_ring_is_the_ring_that_is_planned_without_schemes(options):
    """Positions, 8 bytes a token, travel in the comparison of rings alone; latency 0 and rates that hide nothing show it."""
    device = PRESETS["h200"].with_rates(bytes_per_second=1e9, latency=0)
    planned = plan(4096, 8, kv_heads=8, hardware=device, **options)
    (layout,) = {x.layout for x in planned.schemes if x.scheme != "dcp"}
    assert {x.layout for x in planned.schemes if x.scheme == "dcp"} == {"interleaved"}
    for scheme, axis, circulation in (("ring", "ring", "kv"), ("all_gather", "cp", "gather")):
        one, other = option(planned, scheme, **{axis: 8}), planned.option(layout, circulation)
        for way, same in zip(one.passes, other.passes, strict=True):
            positions = 8 * 512 * 7
            assert way.bytes_sent == same.bytes_sent - positions
            times = way.times
            assert times.compute == pytest.approx(same.compute_seconds, rel=1e-12)
            assert times.exposed == pytest.approx(same.exposed_seconds, rel=0.005)
            if scheme == "ring":
                assert times.waiting == pytest.approx(same.waiting_seconds, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("scheme", "mesh", "length", "options"),
    [
        ("double_ring", {"outer": 2, "inner": 3}, 24, {"window": (5, 0)}),
        ("usp", {"ring": 3, "ulysses": 2}, 24, {"causal": True}),
        ("usp", {"ring": 3, "ulysses": 2}, 24, {"window": (4, 0)}),
        ("usp", {"ulysses": 2, "ring": 3}, 24, {}),
        ("ulysses", {"ulysses": 3}, 12, {"causal": True}),
        ("all_gather", {"cp": 3}, 12, {"window": (4, 0)}),
        ("joint", {"ring": 2, "ulysses": 2}, 19, {}),
    ],
)
def test_who_waits_is_who_has_fewer_pairs_in_a_recorded_run(scheme, mesh, length, options):
    work = workload(
        length, 1, heads=6, causal=options.get("causal", False), window=options.get("window")
    )
    layout = "zigzag" if options else "contiguous"
    keywords = {"text": [0, 1, 2]} if scheme == "joint" else {"layout": layout}
    x = np.ones((1, 6, length, 1))
    run = context_parallel(x, x, x, x, mesh=mesh, scheme=scheme, record=True, **keywords, **options)
    split = split_of(run)
    for phase, backward in (("forward", False), ("backward", True)):
        counted = [p for p in run.cost(phase).pairs if any(p)]
        most, mean = step_counts(split, layout, work, backward and split.text > 0)
        unit = 6 // split.mesh.size("ulysses")
        assert [max(p) for p in counted] == [unit * n for n in most.tolist() if n]
        assert np.mean(np.sum(counted, axis=0)) == pytest.approx(unit * mean, rel=1e-12)


def test_what_is_impossible_says_why_and_what_would_be():
    planned = plan(64 * 32, 64, heads=32)
    assert {x.scheme: (x.why, x.fix) for x in planned.impossible} == {
        "ulysses": (
            "ulysses = 64 must divide H = 32",
            "usp with ring 8 x ulysses 8, or pad q to 64 heads, 2 for each key head",
        ),
        "joint": ("no tokens are text", "give their number, as in --text 512"),
        "dcp": (
            "tp x dcp = 64 must divide H = 32",
            "32 ranks, or pad q to 64 heads, 2 for each key head",
        ),
    }
    reasons = {x.scheme: x.why for x in plan(14, 7, text=3).impossible}
    assert "no mesh outer x inner" in reasons["double_ring"]
    reasons = {x.scheme: x.why for x in plan(16, 4, text=3, new=3).impossible}
    assert reasons["joint"] == "the 13 tokens that are not text are no multiple of 8"
    assert reasons["pcp"] == "3 new tokens are no multiple of 8"


@pytest.mark.parametrize("workers", [6, 8])
def test_what_is_planned_can_be_run_and_what_is_impossible_cannot(workers):
    planned = plan(48, workers, heads=4, kv_heads=2, causal=False)
    x, k = np.ones((1, 4, 48, 1)), np.ones((1, 2, 48, 1))
    assert {one.scheme for one in planned.schemes} >= {"ring", "usp", "all_gather"}
    for one in planned.schemes:
        context_parallel(
            x,
            k,
            k,
            mesh=one.mesh,
            scheme=one.scheme,
            layout=one.layout if one.scheme != "dcp" else None,
        )
    for one in planned.impossible:
        if one.scheme != "joint":
            mesh = {AXES[one.scheme][-1]: workers}
            with pytest.raises(RingspecError):
                context_parallel(x, k, k, mesh=mesh, scheme=one.scheme)


def test_an_axis_is_as_slow_as_the_links_that_its_groups_cross():
    device = PRESETS["h200"]
    for axes, names in (
        ((("ring", 2), ("ulysses", 8)), ["InfiniBand", "NVLink"]),
        ((("ring", 2), ("ulysses", 4)), ["NVLink", "NVLink"]),
        ((("ring", 4), ("ulysses", 3)), ["InfiniBand", "InfiniBand"]),  # 6-8 crosses a node of 8
    ):
        mesh = Mesh(axes)
        assert [link_of(mesh, axis, device).name for axis in mesh.names] == names


def test_the_axes_are_those_of_the_schemes():
    assert {name: axes for name, (_, axes, _) in BUILDERS.items()} == AXES
    assert set(LIMITS) == set(USES) == set(AXES) == set(SCHEMES)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schemes": "uylsses"}, (OptionError, "unknown-name")),
        ({"mesh": {"ring": 3}}, (LayoutError, "mesh")),
        ({"mesh": {"rang": 4}}, (LayoutError, "mesh")),
        ({"mesh": 4}, (LayoutError, "mesh")),
        ({"mesh": {"cp": 4}, "schemes": "usp"}, (LayoutError, "mesh")),
        ({"text": 64}, OptionError),
        ({"text": -1}, OptionError),
        ({"new": 65}, OptionError),
        ({"new": True}, OptionError),
    ],
)
def test_bad_keywords_of_schemes_have_their_own_error(options, expected):
    with pytest.raises(RingspecError) as caught:
        plan(64, 4, **options)
    assert is_refusal(caught.value, expected)
