"""Bad input: every error says what was expected, what came, and how to fix it."""

import numpy as np
import pytest

import ringspec as rs
from ringspec.errors import (
    LayoutError,
    NotRecordedError,
    OptionError,
    ScheduleError,
    ShapeError,
    UnknownKeywordError,
)
from ringspec.schemes.api import context_parallel
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import ring
from ringspec.schemes.sharding import Shard, Sharding

X = np.ones((1, 4, 8, 2))
DY = {"dy": X}
OVERLAP = Sharding((Shard((0, 1, 2, 3, 4), (0, 1, 2, 3)), Shard((4, 5, 6, 7), (0, 1, 2, 3))))
TWO = ring(Mesh((("ring", 2),)), [[0, 1, 2, 3], [4, 5, 6, 7]], heads=4, kv_heads=4)
BAD = {
    "no mesh": ({"scheme": "ring"}, LayoutError, "distinct named axes"),
    "a number as mesh": ({"scheme": "ring", "mesh": 4}, LayoutError, "distinct named axes"),
    "an empty mesh": ({"scheme": "ring", "mesh": {}}, LayoutError, "distinct named axes"),
    "a size of 0": ({"scheme": "ring", "mesh": {"ring": 0}}, LayoutError, "sizes >= 1"),
    "a size of True": ({"scheme": "ring", "mesh": {"ring": True}}, LayoutError, "sizes >= 1"),
    "an axis twice": (
        {"scheme": "ring", "mesh": [("ring", 2), ("ring", 2)]},
        LayoutError,
        "distinct",
    ),
    "an axis of another scheme": (
        {"scheme": "ring", "mesh": {"ulysses": 2}},
        LayoutError,
        "the axis 'ulysses'",
    ),
    "a misspelt axis": (
        {"scheme": "usp", "mesh": {"ring": 2, "ulises": 2}},
        LayoutError,
        "write 'ulysses'",
    ),
    "an unknown scheme": (
        {"scheme": "ulises", "mesh": {"ulysses": 2}},
        OptionError,
        "write 'ulysses'",
    ),
    "a scheme that is no name": (
        {"scheme": 3, "mesh": {"ring": 2}},
        OptionError,
        "name of a scheme",
    ),
    "heads that the mesh does not divide": (
        {"scheme": "ulysses", "mesh": {"ulysses": 8}},
        OptionError,
        "use 4 in place of 8, or pad q to 8 heads",
    ),
    "heads that tp x dcp does not divide": (
        {"scheme": "dcp", "mesh": {"tp": 2, "dcp": 4}},
        OptionError,
        "tp x dcp = 8",
    ),
    "a length that the ranks do not divide": (
        {"scheme": "ring", "mesh": {"ring": 3}},
        LayoutError,
        "S = 8",
    ),
    "a table for other ranks": (
        {"scheme": "ring", "mesh": {"ring": 2}, "layout": [[0, 1, 2, 3, 4, 5, 6, 7]]},
        LayoutError,
        "2 rows",
    ),
    "interleave 0": (
        {"scheme": "dcp", "mesh": {"dcp": 2}, "interleave": 0},
        LayoutError,
        "interleave",
    ),
    "interleave 1.5": (
        {"scheme": "pcp", "mesh": {"pcp": 2}, "interleave": 1.5},
        LayoutError,
        "interleave",
    ),
    "interleave for a ring": (
        {"scheme": "ring", "mesh": {"ring": 2}, "interleave": 1},
        OptionError,
        "leave out interleave",
    ),
    "interleave beside a layout": (
        {"scheme": "dcp", "mesh": {"dcp": 2}, "interleave": 1, "layout": "striped"},
        OptionError,
        "both",
    ),
    "decoding without its axis": (
        {"scheme": "dcp", "mesh": {"tp": 2}},
        OptionError,
        "add the axis 'dcp'",
    ),
    "text for a ring": (
        {"scheme": "ring", "mesh": {"ring": 2}, "text": [0]},
        OptionError,
        "'joint'",
    ),
    "joint without text": ({"scheme": "joint", "mesh": {"ring": 2}}, OptionError, "text="),
    "text beyond S": (
        {"scheme": "joint", "mesh": {"ring": 2}, "text": [8]},
        LayoutError,
        "below S",
    ),
    "text twice": (
        {"scheme": "joint", "mesh": {"ring": 2}, "text": [0, 0]},
        LayoutError,
        "distinct",
    ),
    "text_at another place": (
        {"scheme": "joint", "mesh": {"ring": 2}, "text": [0, 1], "text_at": "middle"},
        OptionError,
        "'front' or 'rear'",
    ),
    "dy where nothing trains": (
        {"scheme": "dcp", "mesh": {"dcp": 2}, **DY},
        OptionError,
        "no backward pass",
    ),
    "circulation gather": (
        {"scheme": "ring", "mesh": {"ring": 2}, "circulation": "gather"},
        OptionError,
        "all_gather",
    ),
    "a direction of 2": (
        {"scheme": "ring", "mesh": {"ring": 2}, "direction": 2},
        OptionError,
        "direction 1",
    ),
    "a layout beside a Scheme": (
        {"scheme": TWO, "layout": "zigzag"},
        OptionError,
        "beside a Scheme",
    ),
    "another mesh beside a Scheme": ({"scheme": TWO, "mesh": {"ring": 4}}, LayoutError, "ring 2"),
    "an unknown keyword": (
        {"scheme": "ring", "mesh": {"ring": 2}, "interleaf": 1},
        UnknownKeywordError,
        "'interleave'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_a_fix(name):
    keywords, error, words = BAD[name]
    with pytest.raises(error) as caught:
        context_parallel(X, X, X, **keywords)
    text = str(caught.value)
    assert words in text and text.startswith("expected ") and "; got " in text and "Fix: " in text


def test_more_queries_than_keys_are_refused_in_a_prefill():
    with pytest.raises(LayoutError, match="at least as many keys"):
        context_parallel(X, X[:, :, :4], X[:, :, :4], mesh={"pcp": 2}, scheme="pcp")


def test_an_own_scheme_of_other_heads_or_lengths_is_refused():
    with pytest.raises(ShapeError, match="H = 2 and Hkv = 2"):
        context_parallel(X[:, :2], X[:, :2], X[:, :2], scheme=TWO)
    with pytest.raises(ScheduleError, match="no rank holds query 8"):
        longer = np.ones((1, 4, 9, 2))
        context_parallel(longer, longer, longer, scheme=TWO)


def test_overlapping_ownership_must_be_declared():
    import dataclasses

    with pytest.raises(ScheduleError, match="2 ranks hold token 4, head 0, without `replicated`"):
        context_parallel(X, X, X, scheme=dataclasses.replace(TWO, home_k=OVERLAP))


def test_states_and_moments_exist_only_if_recorded():
    run = context_parallel(X, X, X, mesh={"ring": 2}, scheme="ring", record=True)
    assert run.state(1, 0, when="computed").parts["k"].shard.tokens == (4, 5, 6, 7)
    for step, phase in ((2, "forward"), (0, "backward")):
        with pytest.raises(NotRecordedError):
            run.moment(step, phase)
    with pytest.raises(NotRecordedError):
        run.state(2, 0)
    with pytest.raises(NotRecordedError, match="record=True"):
        context_parallel(X, X, X, mesh={"ring": 2}, scheme="ring").moment(0)


def test_empty_lengths_are_attention_without_keys():
    none = np.ones((1, 4, 0, 2))
    run = context_parallel(X, none, none, mesh={"dcp": 2}, scheme="dcp")
    assert (run.o == 0).all() and np.isneginf(run.lse).all()
    assert rs.attention(X, none, none).lse.shape == run.lse.shape


@pytest.mark.parametrize(("scheme", "mesh"), [("pcp", {"pcp": 2}), ("dcp", {"dcp": 2})])
def test_a_causal_mask_after_a_cache_needs_the_position_of_the_first_query(scheme, mesh):
    new = X[:, :, :4]
    with pytest.raises(OptionError, match="write q_offset=4"):
        context_parallel(new, X, X, mesh=mesh, scheme=scheme, causal=True)
    assert context_parallel(new, X, X, mesh=mesh, scheme=scheme, causal=True, q_offset=0).o.size
