"""The ring equals the dense definition: every feature, layout, circulation and ring size.

The rows of the table below hold every pair of values of any two factors at least once. Each run
is compared tensor by tensor, worker by worker, against `rs.attention` and `rs.attention_backward`,
in units of the row scale.
"""

import numpy as np
import pytest
from covering import covering
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs
from ringspec.spec.layout import zigzag_per_document

BOUND = 1e-14

FACTORS = {
    "workers": [3, 1, 2, 4, 5, 8],
    "layout": ["contiguous", "striped", "zigzag", "zigzag_per_document", "table", "padded"],
    "circulation": ["kv", "q", "gather"],
    "direction": [1, -1],
    "mask": ["none", "causal", "window", "causal_window", "bounds", "dense", "positions"],
    "packing": ["none", "segments", "padding", "documents"],
    "bias": ["none", "full", "per_key", "per_row", "minus_infinity"],
    "softcap": [None, 1.5],
    "sinks": [0, 1, 3],
    "dropout": ["none", "counter", "given"],
    "heads": [(4, 2), (4, 4), (4, 1)],
    "lengths": ["same", "end_aligned", "more_queries"],
    "dlse": [True, False],
    "skip_masked": [False, True],
    "width": [3, 5],
    "scale": [None, 0.7],
}
ROWS = covering(FACTORS)


def lengths(row: dict) -> tuple[int, int]:
    """Sq, Sk: multiples of 2W, H == S in some rows (W = 1, 2), H != S in the others."""
    unit = 2 * row["workers"]
    short = unit if row["workers"] > 3 else 4 * row["workers"]
    return {
        "same": (short, short),
        "end_aligned": (short, short + unit),
        "more_queries": (short + unit, short),
    }[row["lengths"]]


def options_of(row: dict, random: np.random.Generator, n_q: int, n_k: int) -> dict:
    B, H = 2, row["heads"][0]
    options: dict = {"softcap": row["softcap"], "scale": row["scale"]}
    if row["lengths"] == "end_aligned":
        options["q_offset"] = n_k - n_q
    mask = row["mask"]
    if mask in ("causal", "causal_window"):
        options["causal"] = True
    if mask in ("window", "causal_window"):
        options["window"] = (n_k // 3, 1)
    if mask == "bounds":
        low = random.integers(0, n_k, (B, n_q))
        options |= {"bound_min": low, "bound_max": low + random.integers(0, n_k, (B, n_q))}
    if mask == "dense":
        options["mask"] = random.random((B, H, n_q, n_k)) < 0.4
    if mask == "positions":
        options |= {
            "causal": True,
            "positions_q": random.integers(0, 2 * n_k, (B, n_q)),
            "positions_k": random.permutation(2 * n_k)[:n_k],
        }
    cut_q, cut_k = sorted(random.integers(0, n_q, 2)), sorted(random.integers(0, n_k, 2))
    if row["packing"] == "documents":
        options |= {"cu_seqlens": [0, *cut_q, n_q - 1], "cu_seqlens_k": [0, *cut_k, n_k]}
    elif row["packing"] == "segments":
        options |= {
            "segments_q": random.integers(0, 2, (B, n_q)),
            "segments_k": random.integers(0, 2, (B, n_k)),
        }
    elif row["packing"] == "padding":
        options |= {
            "segments_q": random.integers(-1, 1, n_q),
            "segments_k": random.integers(-1, 1, n_k),
        }
    shapes = {
        "full": (B, H, n_q, n_k),
        "per_key": (H, 1, n_k),
        "per_row": (1, H, n_q, 1),
        "minus_infinity": (1, 1, n_q, n_k),
    }
    if row["bias"] in shapes:
        bias = random.normal(size=shapes[row["bias"]])
        if row["bias"] == "minus_infinity":
            bias[random.random(bias.shape) < 0.3] = -np.inf
        options["bias"] = bias
    if row["sinks"]:
        options["sinks"] = 2 * random.normal(size=(H, row["sinks"]))
    if row["dropout"] != "none":
        options |= {"dropout_p": 0.3, "dropout_seed": 2**40 + 11}
    if row["dropout"] == "given":
        options["keep"] = random.random((1, H, n_q, n_k)) < 0.6
    return options


def layout_of(row: dict, random: np.random.Generator, n_q: int, n_k: int):
    if row["layout"] == "table":
        return tuple(random.permutation(n).reshape(row["workers"], -1) for n in (n_q, n_k))
    if row["layout"] == "padded":
        tables = []
        for n in (n_q, n_k):
            slots = np.full(n + 3 * row["workers"], -1)
            slots[:n] = np.arange(n)
            tables.append(random.permutation(slots).reshape(row["workers"], -1))
        return tuple(tables)
    if row["layout"] == "zigzag_per_document" and row["packing"] != "documents":
        return tuple(zigzag_per_document(n, row["workers"], [0, n // 3, n]) for n in (n_q, n_k))
    return row["layout"]


def case(number: int):
    """q, k, v, dy, dlse, options and ring arguments of one row of the table."""
    row, random = ROWS[number], np.random.default_rng(number)
    n_q, n_k = lengths(row)
    B, (H, Hkv), D, Dv = 2, row["heads"], 4, row["width"]
    q, k, v, dy = (
        random.normal(size=shape)
        for shape in ((B, H, n_q, D), (B, Hkv, n_k, D), (B, Hkv, n_k, Dv), (B, H, n_q, Dv))
    )
    dlse = random.normal(size=(B, H, n_q)) if row["dlse"] else None
    options = options_of(row, random, n_q, n_k)
    ring = {name: row[name] for name in ("workers", "circulation", "direction", "skip_masked")}
    ring["layout"] = layout_of(row, random, n_q, n_k)
    return q, k, v, dy, dlse, options, ring


def test_the_table_holds_every_pair_of_values():
    for one in FACTORS:
        for two in FACTORS:
            if one < two:
                held = {(str(row[one]), str(row[two])) for row in ROWS}
                assert len(held) == len(FACTORS[one]) * len(FACTORS[two])


@pytest.mark.rule(
    "RING-1", "RING-4", "RING-5", "RING-6", "RING-7", "RING-12", "RING-13", "FWD-1", "FWD-3", "FWD-5", "FWD-6",
    "FWD-7", "FWD-8", "FWD-9", "FWD-10", "BWD-1", "BWD-2", "BWD-3", "BWD-4", "BWD-5", "BWD-6",
    "BWD-7", "BWD-8", "BWD-9", "BWD-10", "SOFT-1", "SOFT-2", "LAYOUT-5", "DROP-3",
)  # fmt: skip
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_ring_equals_dense_on_every_worker(number):
    q, k, v, dy, dlse, options, ring = case(number)
    run = rs.ring(q, k, v, dy, dlse=dlse, **ring, **options)
    want = rs.attention(q, k, v, **options)
    gradients = rs.attention_backward(q, k, v, dy, dlse=dlse, **options)
    scale = row_scale(q, k, v, dy, dlse, **options)
    assert worst_row_error(run.o, want.o, scale.o) <= BOUND
    assert worst_row_error(run.lse, want.lse, scale.lse) <= BOUND
    for name in ("dq", "dk", "dv", "dsinks", "dbias"):
        got, expected = getattr(run, name), getattr(gradients, name)
        if expected is None:
            assert got is None
        else:
            assert worst_row_error(got, expected, getattr(scale, name)) <= BOUND, name
    compare_every_worker(run, want, gradients, scale)


def compare_every_worker(run, want, gradients, scale) -> None:
    """Local tensors of each worker against the rows that the layout gives it, padding included."""
    for r in range(len(run.workers)):
        local = run.worker(r)
        for name, index in (("o", local.index_q), ("lse", local.index_q), ("dq", local.index_q),
                            ("dk", local.index_k), ("dv", local.index_k)):  # fmt: skip
            source = want if name in ("o", "lse") else gradients
            real, got = index >= 0, getattr(local, name)
            expected = getattr(source, name)[:, :, index[real]]
            bound = getattr(scale, name)[:, :, index[real]]
            assert worst_row_error(got[:, :, real], expected, bound) <= BOUND, (r, name)
            if name != "lse":
                assert (got[:, :, ~real] == 0).all(), (r, name)


def test_a_shifted_block_would_be_seen():
    """The comparison can fail: one worker's rows moved by one slot are far outside the bound."""
    q, k, v, dy, dlse, options, ring = case(0)
    run = rs.ring(q, k, v, **ring, **options)
    want, scale = rs.attention(q, k, v, **options), row_scale(q, k, v, **options)
    wrong = run.o.copy()
    wrong[:, :, :2] = wrong[:, :, 1::-1]
    assert not worst_row_error(wrong, want.o, scale.o) <= 1e6 * BOUND
