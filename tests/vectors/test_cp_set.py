"""The set cp: its tables are those of the schemes, and say by themselves who holds what; its results are attention."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from refusals import is_refusal

import ringspec as rs
import ringspec.vectors
from ringspec.errors import VectorError
from ringspec.formats import load
from ringspec.vectors import case_from_json, case_to_json, open_set, verify
from ringspec.vectors.catalogue import catalogue, split_pairs
from ringspec.vectors.format.case import SCHEMES
from ringspec.vectors.format.shards import held, whole
from ringspec.vectors.format.tensor_table import check_tensors
from ringspec.vectors.scheme_tables import OWN, layout_of_scheme, scheme_of

SET = open_set("cp")
CASES = {case.id: case for case in SET}
every = pytest.mark.parametrize("id", sorted(CASES))
BOUND = 1e-14


def inputs(tensors):
    given = {name[3:]: x for name, x in tensors.items() if name.startswith("in.")}
    return {n: load(x, n) if x.dtype.kind in "fV" else x for n, x in given.items()}


def close(got, want, scale):
    """Each element is within BOUND of its row scale, infinities are equal, and NaN is never close."""
    there = np.isfinite(want)
    assert np.array_equal(got[~there], want[~there])
    error = np.abs(np.where(there, got, 0) - np.where(there, want, 0))
    return bool((error <= BOUND * scale).all())


def run_of(case, tensors):
    """What ringspec.context_parallel gives for a case, from the words of its case.json."""
    x, own = inputs(tensors), case.scheme
    given = [x.pop(name, None) for name in ("q", "k", "v", "dy")]
    options = {**case.terms, **x, **{name: getattr(own, name) for name in OWN}}
    layout = layout_of_scheme(own, options)
    return rs.context_parallel(
        *given, mesh=dict(own.mesh), scheme=own.name, layout=layout, **options
    )


@every
def test_every_rank_has_the_tables_and_results_that_context_parallel_gives_it(id):
    case, tensors = CASES[id], SET.tensors(id)
    run = run_of(case, tensors)
    assert len(run.ranks) == case.scheme.ranks == len(tensors["layout.q"])
    for r, rank in enumerate(run.ranks):
        for side, shard in (("q", rank.query), ("k", rank.key)):
            slots = tensors[f"layout.{side}"][r]
            heads = tensors[f"heads.{side}"][r]
            assert tuple(slots[: len(shard.tokens)]) == shard.tokens
            assert (slots[len(shard.tokens) :] == -1).all() and tuple(heads) == shard.heads
        for name in ("o", "lse", "dq", "dk", "dv"):
            got = getattr(rank, name)
            assert (got is None) == (f"out.{name}.float64" not in tensors)
            if got is None:
                continue
            want, scale = tensors[f"out.{name}.float64"][r], tensors[f"scale.{name}"][r]
            n = got.shape[2]
            there = tensors[f"layout.{'k' if name in ('dk', 'dv') else 'q'}"][r][:n] >= 0
            scale = scale if name == "lse" else scale[..., None]
            got, want, scale = (x[:, :, :n][:, :, there] for x in (got, want, scale))
            assert close(got, want, scale), (r, name)


def visible(case, x):
    """Which query sees which key [Sq, Sk], from the definition of the terms alone."""
    shape, terms = case.shape, case.terms
    p = x.get("positions_q", np.arange(shape.Sq) + terms.get("q_offset", 0)).reshape(-1, 1)
    j = np.arange(shape.Sk)[None]
    seen = (j <= p) if terms.get("causal") else np.ones((shape.Sq, shape.Sk), bool)
    if "window" in terms:
        seen = seen & (j >= p - terms["window"][0])
    if "cu_seqlens" in terms:
        starts = terms["cu_seqlens"]
        of_k = np.searchsorted(terms.get("cu_seqlens_k", starts), j.ravel(), side="right")
        of_q = np.searchsorted(starts, np.arange(shape.Sq), side="right")
        seen = seen & (of_q[:, None] == of_k[None])
    return seen


PLAIN = [id for id, case in CASES.items() if not {"softcap", "dropout_p"} & set(case.terms)]


@pytest.mark.parametrize("id", PLAIN)
def test_the_tables_alone_put_dense_attention_together(id):
    """Without ringspec.schemes: rows, heads and owners come from the file, results from a few lines of NumPy."""
    case, tensors = CASES[id], SET.tensors(id)
    x, shape = inputs(tensors), case.shape
    k, v = (np.repeat(x[name], shape.H // shape.Hkv, axis=1) for name in "kv")
    s = np.where(visible(case, x), case.terms["scale"] * (x["q"] @ k.swapaxes(2, 3)), -np.inf)
    every_sink = np.zeros((shape.H, 0)) if "sinks" not in x else x["sinks"]
    sinks = np.broadcast_to(every_sink[None, :, None], (*s.shape[:3], every_sink.shape[1]))
    lse = np.logaddexp.reduce(np.concatenate([s, sinks], axis=3), axis=3)
    p = np.exp(s - lse[..., None])
    dv = None
    if "dy" in x:
        group = (shape.B, shape.Hkv, shape.H // shape.Hkv, shape.Sk, shape.Dv)
        dv = (p.swapaxes(2, 3) @ x["dy"]).reshape(group).sum(axis=2)
    for name, want, side, sizes in (
        ("o", p @ v, "q", (shape.Sq, shape.H)), ("lse", lse, "q", (shape.Sq, shape.H)),
        ("dv", dv, "k", (shape.Sk, shape.Hkv)),
    ):  # fmt: skip
        if want is not None:
            tables = tensors[f"layout.{side}"], tensors[f"heads.{side}"]
            got, scale = (
                whole(tensors[f"{group}"], *tables, *sizes)
                for group in (f"out.{name}.float64", f"scale.{name}")
            )
            assert close(want, got, scale if name == "lse" else scale[..., None]), name


@every
def test_all_copies_of_a_cell_are_the_same_number_and_nothing_is_in_empty_slots(id):
    case, tensors = CASES[id], SET.tensors(id)
    for name, x in tensors.items():
        group, _, rest = name.partition(".")
        tensor = rest.partition(".")[0]
        if group != "out" or tensor == "dsinks":
            continue
        side = "k" if tensor in ("dk", "dv") else "q"
        tokens, heads = tensors[f"layout.{side}"], tensors[f"heads.{side}"]
        sizes = (case.shape.Sk, case.shape.Hkv) if side == "k" else (case.shape.Sq, case.shape.H)
        assert held(tokens, heads, *sizes).any(axis=0).all()
        together = load(whole(x, tokens, heads, *sizes))
        for r, own in enumerate(tokens):
            mine = load(x[r])
            real = own >= 0
            assert np.array_equal(mine[:, :, real], together[:, heads[r]][:, :, own[real]])
            assert (mine[:, :, ~real] == (-np.inf if tensor == "lse" else 0.0)).all()


def counts_of(id):
    """How many keys of each rank each query sees [W, Sq]."""
    case, tensors = CASES[id], SET.tensors(id)
    seen = visible(case, inputs(tensors))
    return np.array([seen[:, own[own >= 0]].sum(axis=1) for own in tensors["layout.k"]])


def test_cases_of_known_bugs_have_the_numbers_that_make_them_bugs():
    assert counts_of("dcp/mtp-ten-keys").tolist() == [[4, 5, 5], [4, 4, 5]]
    assert counts_of("dcp/mtp").tolist() == [[1, 2], [1, 1]]
    assert counts_of("dcp/mtp-i16").tolist() == [[15, 16, 16], [0, 0, 1]]
    assert counts_of("dcp/empty-rank").tolist() == [[1], [1], [1], [0]]
    assert counts_of("dcp/empty-rank-i16").tolist() == [[16], [0], [0], [0]]
    assert counts_of("dcp/base").tolist() == [[4], [1]]
    tables = {id: SET.tensors(id) for id in CASES}
    assert tables["padded/three-of-four-w2"]["layout.k"].tolist() == [[0, -1], [1, 2]]
    assert tables["padded/six-of-eight-w2"]["layout.k"].tolist() == [[0, 1, -1, -1], [2, 3, 4, 5]]
    assert tables["ulysses/zigzag-causal"]["layout.q"].tolist() == [[0, 3], [1, 2]]
    assert tables["dcp/gqa-group"]["heads.k"].tolist() == [[0], [0], [1], [1]]
    assert tables["joint/front"]["layout.q"][:, :3].tolist() == [[0, 1, 2]] * 4
    assert CASES["mla/scale"].terms["scale"] == 8**-0.5 and CASES["mla/scale"].shape.D == 11
    dy = load(tables["joint/backward"]["in.dy"])
    assert dy[:, :, :3].all(axis=3).any() and not dy[:, :, 3:].any()


def test_every_scheme_meets_every_mask_format_and_number_of_key_heads():
    for rows, out in (
        (split_pairs.ROWS, {("joint", "documents")}),
        (split_pairs.SERVED_ROWS, set()),
    ):
        for a, b in itertools.combinations(range(5), 2):
            every = itertools.product({row[a] for row in rows}, {row[b] for row in rows})
            assert set(every) - {(row[a], row[b]) for row in rows} <= out, (a, b)
    assert {case.scheme.name for case in CASES.values()} == set(SCHEMES)
    features = {name for case in CASES.values() for name in case.requires["features"]}
    assert {"replicated-tokens", "kv-replicas", "padded-documents", "empty-ranks",
            "multi-token-decode", "prefix", "mla", "sinks", "dropout", "dlse"} <= features  # fmt: skip


def test_the_files_of_the_set_are_small():
    folder = Path(ringspec.vectors.__file__).parent / "data" / "cp"
    assert sum(file.stat().st_size for file in folder.rglob("*.*")) <= 1.2 * 2**20


def test_cases_come_out_as_they_are_stored():
    for only in ("joint/*", "dcp/*", "padded/*", "ulysses/*"):
        assert all(report.outcome == "ok" for report in verify.verify(SET, only=only))


@pytest.mark.slow
def test_every_case_comes_out_as_it_is_stored():
    assert all(report.outcome == "ok" for report in verify.verify(SET))


def spoilt_token(tensors):
    tensors["layout.q"][0, 0] = 99


def spoilt_head(tensors):
    tensors["heads.k"][1, 0] = -7


def spoilt_twice(tensors):
    tensors["layout.k"][0, 1] = tensors["layout.k"][0, 0]


def spoilt_missing(tensors):
    tensors["layout.q"][1, 0] = -1


def spoilt_slots(tensors):
    tensors["layout.q"] = tensors["layout.q"][:, :1]


def spoilt_positions(tensors):
    tensors["position.k"] = tensors["position.k"][:, :, :1]


SPOILT = (spoilt_token, spoilt_head, spoilt_twice, spoilt_missing, spoilt_slots, spoilt_positions)


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda one: one.__name__)
def test_tables_that_do_not_name_every_cell_once_a_rank_are_refused(spoil):
    id = "ulysses/zigzag-causal"
    tensors = {name: x.copy() for name, x in SET.tensors(id).items()}
    check_tensors(CASES[id], tensors)
    spoil(tensors)
    with pytest.raises(VectorError) as caught:
        check_tensors(CASES[id], tensors)
    assert is_refusal(caught.value, (VectorError, "case-tensors"))


TEXT = case_to_json(CASES["padded/usp-w4"])


@pytest.mark.parametrize(
    "old, new",
    [
        ('["ulysses", 2]', '["ring", 2]'),
        ('["ulysses", 2]', '["ulysses", 1024]'),
        ('["ulysses", 2]', '["ulysses", 0]'),
        ('"zigzag_padded"', '"zigzag"'),
        ('"zigzag_padded"', '"table"'),
        ('"name": "usp"', '"name": "helix"'),
        ('"context_parallel"', '"attention"'),
        ('"storage": "full"', '"storage": "digests"'),
        ('"layout": "zigzag_padded"', '"hops": 2, "layout": "zigzag_padded"'),
    ],
)
def test_a_scheme_that_contradicts_itself_is_refused(old, new):
    assert old in TEXT
    with pytest.raises(VectorError) as caught:
        case_from_json(TEXT.replace(old, new))
    assert is_refusal(caught.value, (VectorError, "case-format"))


def test_a_scheme_that_does_not_fit_its_heads_is_refused_when_it_is_derived():
    text = case_to_json(CASES["ulysses/uneven-key-heads-w3"])
    case = case_from_json(
        text.replace('["ulysses", 3]', '["ulysses", 2]')
        .replace('"H": 6', '"H": 9')
        .replace('"Hkv": 2', '"Hkv": 9')
    )
    with pytest.raises(rs.errors.RingspecError, match="H as a multiple of the axis"):
        scheme_of(case)


def test_the_page_of_the_catalogue_lists_each_case_once():
    assert sorted(case.id for case in catalogue("cp")) == sorted(CASES)
