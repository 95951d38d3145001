"""Every scheme equals dense attention in float64, forward and backward, on every rank and for every copy of a row.

The expected values come from `dense` below, which uses the mask of `oracle.problem` and shares no code with ringspec.
"""

import numpy as np
import pytest
from covering import covering
from oracle.problem import Problem, all_keeps, allowed, nearest_inverse_root
from oracle.row_scale import row_scale, worst_row_error

from ringspec.schemes.api import context_parallel

BOUND = 2e-15  # of the row scale

# Schemes that train: name, mesh (outermost axis first), keywords.
TRAINED = {
    "ring 3": ("ring", {"ring": 3}, {}),
    "ring 3, queries travel": ("ring", {"ring": 3}, {"circulation": "q", "direction": -1}),
    "ring 1": ("ring", {"ring": 1}, {}),
    "double ring 2 x 3": ("double_ring", {"outer": 2, "inner": 3}, {}),
    "double ring 3 x 1": ("double_ring", {"outer": 3, "inner": 1}, {}),
    "all-gather 4": ("all_gather", {"cp": 4}, {}),
    "ulysses 4": ("ulysses", {"ulysses": 4}, {}),
    "ulysses 2": ("ulysses", {"ulysses": 2}, {}),
    "usp, ring outermost": ("usp", {"ring": 3, "ulysses": 2}, {}),
    "usp, ulysses outermost": ("usp", {"ulysses": 2, "ring": 3}, {}),
    "usp 2 x 4": ("usp", {"ring": 2, "ulysses": 4}, {}),
    "joint, front": ("joint", {"ring": 3, "ulysses": 2}, {"text": [0, 1, 2], "text_at": "front"}),
    "joint, rear": ("joint", {"ulysses": 4, "ring": 2}, {"text": [7, 0], "text_at": "rear"}),
    "joint ring": ("joint", {"ring": 3}, {"text": [5]}),
    "joint ulysses": ("joint", {"ulysses": 2}, {"text": [3, 1]}),
}
FACTORS = {
    "scheme": list(TRAINED),
    "layout": ["contiguous", "striped", "zigzag", "table"],
    "mask": ["causal", "window", "causal documents", "segments", "dense"],
    "heads": [(4, 4), (4, 2), (4, 1), (12, 3)],
    "widths": [(5, 5), (5, 3), (3, 6)],
    "scale": [None, 0.4],
    "extra": ["nothing", "dropout", "sinks", "softcap"],
    "dlse": [True, False],
}
ROWS = covering(FACTORS)


def tensors(heads, widths, n_q, n_k, seed):
    """Return q, k, v, dy and dlse with different scales and means for each head."""
    generator = np.random.default_rng(seed)
    (h, h_k), (d, d_v) = heads, widths
    shapes = [(2, h, n_q, d), (2, h_k, n_k, d), (2, h_k, n_k, d_v), (2, h, n_q, d_v), (2, h, n_q)]
    drawn = []
    for shape in shapes:
        factor = np.linspace(0.7, 1.6, shape[1]).reshape((1, -1) + (1,) * (len(shape) - 2))
        drawn.append(generator.standard_normal(shape) * factor + 0.1)
    return drawn


def table_of(length, workers, generator):
    """Return a random table [W, n] with two padding slots for each worker."""
    slots = -(-length // workers) + 2
    table = np.full(workers * slots, -1)
    table[generator.permutation(workers * slots)[:length]] = generator.permutation(length)
    return table.reshape(workers, slots)


def mask_options(mask, length, generator):
    """Return the keywords of a mask."""
    return {
        "causal": {"causal": True},
        "window": {"window": (length // 3, 1)},
        "causal documents": {"cu_seqlens": [0, 4, length], "causal": True},
        "segments": {"segments_q": generator.integers(-1, 2, (2, length))},
        "dense": {"mask": generator.random((2, 1, length, length)) < 0.6},
    }[mask]


def dense(q, k, v, dy, dlse, options):
    """Return o, lse, dq, dk, dv of dense attention in float64; no code of ringspec."""
    problem = Problem(q, k, v, **options)
    group = q.shape[1] // k.shape[1]
    scale = nearest_inverse_root(q.shape[3]) if problem.scale is None else problem.scale
    k_h, v_h = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    z = scale * np.einsum("bhid,bhjd->bhij", q, k_h)
    t = None if problem.softcap is None else np.tanh(z / problem.softcap)
    z = z if t is None else problem.softcap * t
    s = np.where(allowed(problem), z, -np.inf)
    sinks = np.full(q.shape[1], -np.inf) if problem.sinks is None else problem.sinks
    sinks = sinks.reshape(1, -1, 1, 1)
    m = np.maximum(np.maximum(s.max(axis=3, keepdims=True), sinks), -1e300)
    e = np.exp(s - m)
    total = e.sum(axis=3, keepdims=True) + np.exp(sinks - m)
    empty = total == 0
    p = e / np.where(empty, 1, total)
    lse = np.where(empty, -np.inf, m + np.log(np.where(empty, 1, total)))[..., 0]
    keep = 1.0
    if problem.dropout_p:
        keep = all_keeps(problem) / (1 - problem.dropout_p)
    o = np.einsum("bhij,bhjd->bhid", p * keep, v_h)
    if dy is None:
        return {"o": o, "lse": lse}
    dp = np.einsum("bhid,bhjd->bhij", dy, v_h) * keep
    row_term = (dy * o).sum(axis=3)[..., None] - dlse[..., None]
    ds = p * (dp - row_term)
    ds = ds if t is None else ds * (1 - t * t)
    over = (q.shape[0], k.shape[1], group, k.shape[2], -1)
    of_sinks = {}
    if problem.sinks is not None:
        of_sinks = {"dsinks": (np.exp(sinks - lse[..., None]) * -row_term).sum(axis=(0, 2, 3))}
    return of_sinks | {
        "o": o,
        "lse": lse,
        "dq": scale * np.einsum("bhij,bhjd->bhid", ds, k_h),
        "dk": (scale * np.einsum("bhij,bhid->bhjd", ds, q)).reshape(over).sum(axis=2),
        "dv": np.einsum("bhij,bhid->bhjd", p * keep, dy).reshape(over).sum(axis=2),
    }


def compare_all(run, expected, scale):
    """Compare every cell on every rank, and the global results, with the expected values."""
    for name, want in expected.items():
        unit = getattr(scale, name)
        error = worst_row_error(getattr(run, name), want, unit)
        assert error <= BOUND, (name, error)
        if name == "dsinks":
            continue
        for result in run.ranks:
            shard = result.key if name in ("dk", "dv") else result.query
            real = [slot for slot, token in enumerate(shard.tokens) if token >= 0]
            at = np.ix_(range(2), shard.heads, shard.real)
            error = worst_row_error(getattr(result, name)[:, :, real], want[at], unit[at])
            assert error <= BOUND, (name, result.rank, error)


BIASES = [(1, 12, 24, 24), (2, 1, 24, 24), (1, 12, 1, 24), (1, 1, 24, 1), (2, 12, 1, 1)]


@pytest.mark.rule("RING-12", "BWD-8")
@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("name", ["ring 3", "all-gather 4", "usp 2 x 4", "joint, rear"])
def test_the_bias_gradients_of_all_ranks_add_up_to_that_of_dense_attention(name, shape):
    scheme, mesh, keywords = TRAINED[name]
    q, k, v, dy, dlse = tensors((12, 3), (5, 3), 24, 24, 7)
    bias = np.random.default_rng(8).standard_normal(shape)
    if scheme == "joint":  # the ranks divide the other 16 tokens
        keywords = {**keywords, "text": list(range(8))}
    causal = {"causal": True}
    run = context_parallel(
        q, k, v, dy, dlse=dlse, mesh=mesh, scheme=scheme, bias=bias, **keywords, **causal
    )
    want = dense_bias_gradient(q, k, v, dy, dlse, bias)
    assert run.dbias.shape == shape
    np.testing.assert_allclose(run.dbias, want, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(sum(one.dbias for one in run.ranks), run.dbias)
    assert sum(np.any(one.dbias != 0) for one in run.ranks) == len(run.ranks)


def dense_bias_gradient(q, k, v, dy, dlse, bias):
    """Return dbias of causal dense attention in float64, in the shape of the bias; no code of ringspec."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k_h, v_h = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s = np.einsum("bhid,bhjd->bhij", q, k_h) / np.sqrt(q.shape[3]) + bias
    s = np.where(np.tri(length, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    row_term = (dy * np.einsum("bhij,bhjd->bhid", p, v_h)).sum(axis=3) - dlse
    ds = p * (np.einsum("bhid,bhjd->bhij", dy, v_h) - row_term[..., None])
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    return ds.sum(axis=axes, keepdims=True)


@pytest.mark.rule("CP-3", "CP-4", "CP-5")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_schemes_that_train_equal_dense_attention(row):
    scheme, mesh, keywords = TRAINED[row["scheme"]]
    workers = int(np.prod(list(mesh.values())))
    text = len(keywords.get("text", []))
    length = 2 * workers * (2 if workers < 5 else 1) + text
    generator = np.random.default_rng(5)
    q, k, v, dy, dlse = tensors(row["heads"], row["widths"], length, length, ROWS.index(row))
    options = mask_options(row["mask"], length, generator) | {"scale": row["scale"]}
    options |= {
        "nothing": {},
        "dropout": {"dropout_p": 0.25, "dropout_seed": 7},
        "sinks": {"sinks": generator.standard_normal(row["heads"][0])},
        "softcap": {"softcap": 1.5},
    }[row["extra"]]
    layout = row["layout"]
    if layout == "table":
        layout = table_of(length - text, workers, generator)
    given = dlse if row["dlse"] else None
    run = context_parallel(
        q, k, v, dy, dlse=given, mesh=mesh, scheme=scheme, layout=layout, **keywords, **options
    )
    dlse = dlse if row["dlse"] else np.zeros_like(dlse)
    expected = dense(q, k, v, dy, dlse, options)
    compare_all(run, expected, row_scale(q, k, v, dy, dlse, **options))


SERVING = {
    "pcp 4, prefix 5": ("pcp", {"pcp": 4}, 16, 21, {"interleave": 2}),
    "pcp 3, no prefix": ("pcp", {"pcp": 3}, 6, 6, {"layout": "striped"}),
    "pcp 2, prefix 1, extend 3": ("pcp", {"pcp": 2}, 3, 4, {"layout": [[0, -1], [1, 2]]}),
    "dcp 2": ("dcp", {"dcp": 2}, 3, 10, {"interleave": 1}),
    "dcp 4, ranks without keys": ("dcp", {"dcp": 4}, 1, 3, {"interleave": 1}),
    "dcp 4, one rank has all keys": ("dcp", {"dcp": 4}, 2, 16, {"interleave": 16}),
    "dcp, tp outermost": ("dcp", {"tp": 2, "dcp": 2}, 2, 17, {"interleave": 4}),
    "dcp, dcp outermost": ("dcp", {"dcp": 2, "tp": 2}, 2, 17, {"interleave": 4}),
    "dcp by a table": ("dcp", {"dcp": 2}, 1, 5, {"layout": [[0, 1, 2, 3], [4, -1, -1, -1]]}),
}


@pytest.mark.rule("CP-3", "CP-6")
@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (12, 3)])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_prefill_and_decode_equal_dense_attention(name, heads, mask):
    scheme, mesh, n_q, n_k, keywords = SERVING[name]
    q, k, v, _, _ = tensors(heads, (5, 3), n_q, n_k, 3)
    options = {"causal": {"causal": True}, "window": {"window": (4, 0)}}[mask]
    options |= {"q_offset": n_k - n_q}
    run = context_parallel(q, k, v, mesh=mesh, scheme=scheme, **keywords, **options)
    expected = dense(q, k, v, None, None, options)
    compare_all(run, expected, row_scale(q, k, v, **options))


def test_packed_requests_with_and_without_a_prefix_decode_and_prefill():
    """Requests are packed segments: request 0 has prefix 5 and 4 new tokens, request 1 has no prefix and 2 new tokens."""
    q, k, v, _, _ = tensors((4, 2), (5, 5), 6, 11, 8)
    options = {
        "segments_q": np.array([0] * 4 + [1] * 2),
        "segments_k": np.array([0] * 9 + [1] * 2),
        "positions_q": np.array([5, 6, 7, 8, 0, 1]),
        "positions_k": np.array([*range(9), 0, 1]),
        "causal": True,
    }
    expected, scale = dense(q, k, v, None, None, options), row_scale(q, k, v, **options)
    tables = [[0, 3, 4], [1, 2, 5]], [[0, 2, 4, 5, 8, 9], [1, 3, 6, 7, 10, -1]]
    run = context_parallel(q, k, v, mesh={"pcp": 2}, scheme="pcp", layout=tables, **options)
    compare_all(run, expected, scale)
    table = [[0, 2, 4, 6, 8, 9], [1, 3, 5, 7, 10, -1]]
    run = context_parallel(q, k, v, mesh={"dcp": 2}, scheme="dcp", layout=table, **options)
    compare_all(run, expected, scale)
