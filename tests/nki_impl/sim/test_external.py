"""Published kernels run unmodified on the simulator and give what the definition gives.

They are AWS's NKI library (attention forward and backward, the ring kernels) and tutorials. Each test is
skipped unless RINGSPEC_NKI_KERNELS names a directory with them (:mod:`published`). Tests that expect a
failure show faults of the version that was read; -rx lists them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from nki_impl.sim.errors import DtypeError, SimulatorError
from nki_impl.sim.exchange.groups import ReplicaGroup
from nki_impl.sim.machine.launch import run_ranks

from .published import (
    BF16,
    UNIT,
    Array,
    Attention,
    accepted,
    attention,
    columns,
    deal,
    documents,
    gather,
    gradients,
    kernel,
    normal,
    program,
    rms,
    rows,
    tiles,
)

pytestmark = pytest.mark.nki_kernels

FULL, CAUSAL = "full", "causal"
CTE = ("core.attention.attention_cte", "attention_cte")
BWD = ("core.attention.attention_bwd", "attention_bwd")
RING = "experimental.attention.ring_attention_"


def on(cores: int, made: Any) -> Any:
    return made[2] if cores == 2 else made


def below(size_q: int, size_k: int, shift: int = 0) -> Array:
    """Key j is visible to row i up to i + shift."""
    return np.arange(size_k)[None] <= np.arange(size_q)[:, None] + shift


def window(size: int, width: int) -> Array:
    """The last ``width`` keys up to the row's own."""
    return below(size, size) & ~below(size, size, -width)


def check_forward(
    o: Array, want: Attention, m: Array | None = None, l: Array | None = None
) -> None:
    """P and o are bfloat16: each is rounded once. Maximum and sum are float32."""
    error = np.abs(o.astype(np.float64) - want.o)
    assert (error <= (2 * UNIT * want.absolute + want.slack[:, None] * want.absolute)).all()
    if m is not None and l is not None:
        assert (np.abs(m - want.m) <= want.slack).all()
        assert (np.abs(l / want.l - 1) <= want.slack + want.p.shape[1] * 2.0**-24).all()


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "keys and queries by rows": {"tp_q": True, "tp_k": True},
    "output by columns": {"tp_out": True},
    "not normalised": {"skip": True, "size": 384},
    "no mask, a scale": {"mask": FULL, "size": 384, "scale": 0.125},
    "float32": {"dtype": np.float32, "size": 640, "tp_k": True},
    "float16": {"dtype": np.float16},
    "D of 128": {"width": 128},
    "grouped heads": {"batch": 4, "batch_kv": 2},
    "a length that no tile divides": {"size": 200, "cache": False},
    "two sections": {"size": 128, "keys": 10752, "mask": FULL, "batch": 1},
    "two cores": {"cores": 2},
    "two cores, an odd batch": {"cores": 2, "batch": 3},
    "two cores, an odd batch, split": {"cores": 2, "batch": 3, "size": 1152, "width": 32},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_forward(case: dict[str, Any]) -> None:
    forward(**case)


@pytest.mark.parametrize("shift", [0, 128, 256])
def test_attention_forward_takes_a_contiguous_part_of_the_queries(shift: int) -> None:
    extra = {"cp_offset": np.array([[shift]], np.float32), "global_cp_deg": 3}
    forward(size=128, keys=384, visible=below(128, 384, shift), **extra)


@pytest.mark.parametrize("rank", [0, 2])
def test_attention_forward_takes_every_third_query(rank: int) -> None:
    extra = {"cp_offset": np.array([[rank]], np.float32), "cp_strided_q_slicing": True}
    visible = np.arange(768)[None] <= 3 * np.arange(256)[:, None] + rank
    forward(size=256, keys=768, visible=visible, global_cp_deg=3, **extra)


def test_attention_forward_of_striped_ranks_leaves_the_first_row_without_keys() -> None:
    extra = {"cp_offset": np.array([[-1]], np.float32), "cp_striped_input": True}
    visible = below(256, 256, -1)
    visible[0] = True  # compared below
    o, m, l = forward(visible=visible, global_cp_deg=3, skip_rows=1, **extra)
    assert (m[:, 0] == np.finfo(np.float32).min).all()
    assert (l[:, 0] == 256).all() and np.isfinite(o[:, 0]).all()


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_attention_forward_of_packed_documents(mask: str) -> None:
    first, last = documents(384, (100, 300, 384))
    keys = np.arange(384)[None]
    visible = (keys >= first[:, None]) & (keys < last[:, None])
    bounds = {"bound_min": first, "bound_max": last}
    extra = {name: one[:, None] for name, one in bounds.items()}
    forward(size=384, mask=mask, visible=visible & (below(384, 384) | (mask == FULL)), **extra)


@pytest.mark.parametrize("width", [100, 128, 200])
def test_attention_forward_with_a_window(width: int) -> None:
    forward(size=512, visible=window(512, width), sliding_window=width)


def test_attention_forward_with_a_sink() -> None:
    sink = np.random.default_rng(5).standard_normal((2, 1)).astype(np.float32)
    forward(sink_of=sink, sink=sink)


def test_attention_forward_after_a_prefix() -> None:
    rng = np.random.default_rng(6)
    k, v = normal(rng, 2, 600, 64), normal(rng, 2, 600, 64)
    extra = {"k_prior": columns(k), "v_prior": v, "prior_used_len": np.array([300], np.int32)}
    forward(prefix=(k[:, :300], v[:, :300]), **extra)


def forward(
    size: int = 256,
    keys: int | None = None,
    width: int = 64,
    batch: int = 2,
    batch_kv: int | None = None,
    mask: str = CAUSAL,
    dtype: Any = BF16,
    scale: float = 1.0,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cache: bool = True,
    skip: bool = False,
    cores: int = 1,
    visible: Array | None = None,
    skip_rows: int = 0,
    sink_of: Array | None = None,
    prefix: tuple[Array, Array] | None = None,
    **extra: Any,
) -> tuple[Array, Any, Any]:
    """Run attention_cte and compare o, maximum and sum of every head from row ``skip_rows`` on."""
    rng = np.random.default_rng(size + width)
    keys, batch_kv = keys or size, batch_kv or batch
    q = normal(rng, batch, size, width, dtype=dtype, scale=width**-0.5 / scale)
    k, v = (normal(rng, batch_kv, keys, width, dtype=dtype) for _ in range(2))
    arguments = {
        "q": q if tp_q else columns(q), "k": k if tp_k else columns(k), "v": v, "scale": scale,
        "causal_mask": mask == CAUSAL, "tp_q": tp_q, "tp_k": tp_k, "tp_out": tp_out,
        "cache_softmax": cache, "skip_output_normalization": skip,
    }  # fmt: skip
    made = kernel(*CTE)
    arguments = accepted(made, arguments | extra, {"skip_output_normalization": False})
    results = run_ranks(on(cores, made), [arguments]).results[0]
    o, m, l = (results[0], -rows(results[1]), rows(results[2])) if cache else (results, None, None)
    o = columns(o) if tp_out else o
    if l is not None:
        l = l if skip else 1 / l.astype(np.float64)
    if skip:
        o = o.astype(np.float64) / l[..., None]
    if visible is None:
        visible = below(size, keys) | (mask == FULL)
    for b in range(batch):
        # The kernel computes in bfloat16 whatever comes in.
        one = [x.astype(BF16) for x in (q[b], *(x[b * batch_kv // batch] for x in (k, v)))]
        seen = visible
        if prefix is not None:
            one[1:] = [np.concatenate([p[b], x]) for p, x in zip(prefix, one[1:], strict=True)]
            seen = np.concatenate([np.ones((size, len(prefix[0][b])), bool), visible], axis=1)
        want = attention(*one, scale, seen, None if sink_of is None else sink_of[b, 0])
        part = slice(skip_rows, None)
        held = Attention(**{name: getattr(want, name)[part] for name in vars(want)})
        check_forward(o[b, part], held, *((m[b, part], l[b, part]) if cache else ()))
    return o, m, l


BACKWARDS: dict[str, dict[str, Any]] = {
    # Release 2.29: 1.02 units, in dq. The limit has a fifth more.
    "causal": {"width": 128, "heads": 2, "bound": 1.2 * UNIT},
    "no mask": {"mask": FULL},
    "eight tiles of queries": {"size": 1024},
    "float32": {"size": 512, "dtype": np.float32, "bound": 2.0**-20},
    "16-bit accumulators": {"size": 512, "mixed": False, "bound": 2.0**-6},
    "grouped heads": {"heads": 4, "heads_kv": 2},
    "two cores": {"batch": 2, "heads": 3, "cores": 2},
    "dv by rows": {"transpose_dv": True},
    "D of 256": {"width": 256},
    "a later part of the queries": {"keys": 512, "visible": below(256, 512, 256), "cp_offset": 256},
}


@pytest.mark.parametrize("case", BACKWARDS.values(), ids=BACKWARDS)
def test_attention_backward(case: dict[str, Any]) -> None:
    backward(**case)


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_attention_backward_of_packed_documents(mask: str) -> None:
    first, last = documents(512, (100, 300, 512))
    keys = np.arange(512)[None]
    visible = (keys >= first[:, None]) & (keys < last[:, None]) & (below(512, 512) | (mask == FULL))
    extra = {"bound_min": first, "bound_max": last}
    backward(size=512, batch=2, mask=mask, visible=visible, **extra)


@pytest.mark.parametrize("width", [100, 128, 200, 256])
def test_attention_backward_with_a_window(width: int) -> None:
    backward(size=512, visible=window(512, width), sliding_window=width)


def backward(
    size: int = 256,
    keys: int | None = None,
    width: int = 64,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    mask: str = CAUSAL,
    dtype: Any = BF16,
    mixed: bool = True,
    cores: int = 1,
    bound: float = UNIT,
    visible: Array | None = None,
    **extra: Any,
) -> None:
    """Run attention_bwd and compare dq, dk and dv of every head."""
    rng = np.random.default_rng(size + width)
    keys, heads_kv, scale = keys or size, heads_kv or heads, width**-0.5
    q, dy = (normal(rng, batch, heads, size, width, dtype=dtype) for _ in range(2))
    k, v = (normal(rng, batch, heads_kv, keys, width, dtype=dtype) for _ in range(2))
    if visible is None:
        visible = below(size, keys) | (mask == FULL)
    o, lse = np.zeros(q.shape), np.zeros(q.shape[:-1])
    want = [np.zeros(x.shape) for x in (q, k, v)]
    for b, h in np.ndindex(batch, heads):
        one = (q[b, h], *(x[b, h * heads_kv // heads] for x in (k, v)))
        head = attention(*one, scale, visible)
        o[b, h], lse[b, h] = head.o, head.lse
        dq, dk, dv = gradients(head, *one, dy[b, h], scale)
        for whole, part, at in zip(
            want, (dq, dk, dv), (h, *[h * heads_kv // heads] * 2), strict=True
        ):
            whole[b, at] += part
    names = ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref")
    tensors = (q, k, v, o.astype(dtype), dy)
    arguments: dict[str, Any] = {n: columns(x) for n, x in zip(names, tensors, strict=True)}
    arguments |= {"lse_ref": tiles(lse).astype(np.float32), "mixed_precision": mixed}
    arguments |= {"use_causal_mask": mask == CAUSAL} | extra
    made = kernel(*BWD)
    arguments = accepted(made, arguments, {})
    got = list(run_ranks(on(cores, made), [arguments]).results[0])
    if extra.get("transpose_dv"):
        got[2] = got[2].transpose(0, 2, 3, 1)
    for mine, theirs in zip(got, want, strict=True):
        for b, h in np.ndindex(theirs.shape[:2]):
            assert rms(columns(mine)[b, h], theirs[b, h]) <= bound


RINGS: dict[str, dict[str, Any]] = {
    "one worker": {"world": 1},
    "two": {"world": 2},
    "three": {"world": 3},
    "four, in another order": {"world": 4, "interleave": 1},
    "striped": {"world": 3, "striped": True},
    "no mask": {"world": 3, "mask": FULL},
    "longer": {"world": 2, "size": 512, "width": 128},
    "16-bit accumulators": {"world": 2, "mixed": False, "bound": 2.0**-6},
    "two cores": {"world": 2, "heads": 2, "cores": 2},
    "two cores, striped": {"world": 3, "heads": 2, "cores": 2, "striped": True},
    "two cores, no mask, in another order": {
        "world": 3, "heads": 4, "cores": 2, "mask": FULL, "interleave": 2,
    },
}  # fmt: skip

UNORDERED = "the cores read each other's statistics of an odd head without a barrier (ring fwd)"


@pytest.mark.parametrize("case", RINGS.values(), ids=RINGS)
def test_ring_attention(case: dict[str, Any]) -> None:
    ring(**case)


@pytest.mark.parametrize("size", [128, 256, 1024])
@pytest.mark.xfail(reason=UNORDERED, strict=False, raises=SimulatorError)
def test_ring_attention_of_an_odd_number_of_heads_on_two_cores(size: int) -> None:
    ring(world=2, heads=3, cores=2, size=size, only_forward=True)


def ring(
    world: int,
    size: int = 128,
    width: int = 64,
    heads: int = 1,
    mask: str = CAUSAL,
    striped: bool = False,
    mixed: bool = True,
    cores: int = 1,
    interleave: int | None = None,
    bound: float = UNIT,
    only_forward: bool = False,
) -> None:
    """Run the ring forward, feed its o and lse to the ring backward, and compare every head."""
    rng = np.random.default_rng(world * size + width)
    causal, total = mask == CAUSAL, world * size
    scale = 1.0 if causal else width**-0.5  # with a mask the caller multiplies q by the scale
    q = normal(rng, 1, heads, total, width, scale=width**-0.5 if causal else 1.0)
    k, v, dy = (normal(rng, 1, heads, total, width) for _ in range(3))
    dealt = [deal(x, world, striped) for x in (q, k, v, dy)]
    common = {"replica_groups": (tuple(range(world)),), "num_workers": world}
    options = common | {"use_causal_mask": causal}
    made = on(cores, kernel(RING + "fwd", "ring_attention_spmd_fwd"))
    arguments = [
        dict(zip("qkv", parts[:3], strict=True))
        | {"training": True, "tp_q": True, "tp_k": True, "striped_input": striped}
        | options
        for parts in zip(*dealt, strict=True)
    ]
    results = run_ranks(made, arguments, interleave=interleave).results
    o = gather([one[0] for one in results], striped)
    lse = gather([rows(one[1])[..., None] for one in results], striped)[..., 0]
    visible = below(total, total) | (not causal)
    want = [attention(q[0, h], k[0, h], v[0, h], scale, visible) for h in range(heads)]
    for h in range(heads):
        # The merge rounds o, its two products and their sum to bfloat16 at each of W - 1 steps.
        error = np.abs(o[0, h].astype(np.float64) - want[h].o)
        assert (error <= (3 + 3 * (world - 1)) * UNIT * want[h].absolute).all()
        assert rms(o[0, h], want[h].o) <= UNIT * (1 + 0.1 * world)
        assert (np.abs(lse[0, h] - want[h].lse) <= want[h].slack + total * 2.0**-24).all()
    if only_forward:
        return
    made = on(cores, kernel(RING + "bwd", "ring_attention_spmd_bwd"))
    names = ("q_ref", "k_ref", "v_ref", "dy_ref")
    arguments = [
        {name: columns(x) for name, x in zip(names, parts, strict=True)}
        | {"o_ref": columns(one[0]), "lse_ref": one[1], "mixed_precision": mixed}
        | {"softmax_scale": scale, "lnc_size": cores, "striped_attention": striped}
        | options
        for parts, one in zip(zip(*dealt, strict=True), results, strict=True)
    ]
    given = run_ranks(made, arguments, interleave=interleave).results
    got = [gather([columns(one[i]) for one in given], striped) for i in range(3)]
    for h in range(heads):
        parts = (q[0, h], k[0, h], v[0, h], dy[0, h])
        for mine, theirs in zip(got, gradients(want[h], *parts, scale), strict=True):
            assert rms(mine[0, h], theirs) <= bound


@pytest.mark.parametrize(("world", "cores"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_ring_attention_unpermute(world: int, cores: int) -> None:
    x = normal(np.random.default_rng(0), 2, 1, 128 * world * world, 64)
    made = on(cores, kernel(RING + "unpermute", "ring_attention_unpermute"))
    groups = {"replica_groups": (tuple(range(world)),), "num_workers": world}
    arguments = [{"x": part[:, 0]} | groups for part in deal(x, world, striped=True)]
    results = run_ranks(made, arguments).results
    for got, part in zip(results, deal(x, world, striped=False), strict=True):
        assert np.array_equal(got, part[:, 0])


@pytest.mark.parametrize("mask", ["full", "causal", "striped"])
def test_the_ring_forward_is_its_recipe_and_its_error_grows_with_the_ring(mask: str) -> None:
    from nki_impl.kernels import ring_attention_spmd_fwd as ours
    from ringspec import ring as specified

    theirs = kernel(RING + "fwd", "ring_attention_spmd_fwd")
    causal, striped = mask != "full", mask == "striped"
    rng = np.random.default_rng(0)
    q = normal(rng, 1, 2, 1024, 64, scale=0.125 if causal else 1.0)
    k, v = normal(rng, 1, 2, 1024, 64), normal(rng, 1, 2, 1024, 64)
    scale = 1.0 if causal else 0.125
    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth = specified(*wide, workers=1, causal=causal, scale=scale).o
    errors: dict[str, list[float]] = {"theirs": [], "ours": []}
    for world in (1, 2, 4, 8):
        options = {
            "replica_groups": (tuple(range(world)),), "num_workers": world, "training": True,
            "use_causal_mask": causal, "striped_input": striped, "tp_q": True, "tp_k": True,
        }  # fmt: skip
        dealt = zip(*(deal(x, world, striped) for x in (q, k, v)), strict=True)
        arguments = [dict(zip("qkv", parts, strict=True)) | options for parts in dealt]
        outputs = {
            name: gather([one[0] for one in run_ranks(made, arguments).results], striped)
            for name, made in (("theirs", theirs), ("ours", ours))
        }
        layout = "striped" if striped else "contiguous"
        recipe = {"workers": world, "layout": layout, "causal": causal, "scale": scale}
        expected = specified(*wide, recipe="nki", **recipe).o
        assert np.mean(outputs["theirs"].astype(np.float64) == expected) >= 0.99
        for name, o in outputs.items():
            errors[name].append(rms(o, truth))
    print(mask, {name: [f"{e:.2e}" for e in column] for name, column in errors.items()})
    assert errors["theirs"] == sorted(errors["theirs"])
    assert errors["theirs"][-1] >= 1.15 * errors["theirs"][0]
    assert errors["ours"][-1] <= errors["ours"][0]


TUTORIALS = "nki-samples/src/nki_samples/tutorials/"
MATMULS: dict[str, tuple[tuple[int, int, int], dict[str, int]]] = {
    "nki_matmul_basic_": ((128, 64, 512), {}),
    "nki_matmul_tiled_": ((256, 256, 512), {}),
    "nki_matmul_hoist_load_": ((256, 256, 512), {}),
    "nki_matmul_block_free_dimension_": ((256, 256, 1024), {}),
    "nki_matmul_fully_optimized_": (
        (512, 512, 1024),
        {"TILES_IN_BLOCK_M": 2, "TILES_IN_BLOCK_N": 1, "TILES_IN_BLOCK_K": 4},
    ),
}


def passes_dtype(made: Any) -> bool:
    """Whether the kernel passes tensor_copy a dtype, as these kernels do in 6905a68, besides dst."""
    return "dtype=result.dtype)" in inspect.getsource(made.function)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("name", MATMULS)
def test_tutorial_matrix_multiplication(name: str, dtype: Any) -> None:
    module = program(TUTORIALS + "matrix_multiplication/matrix_multiplication_nki_kernels.py")
    (inner, left, right), options = MATMULS[name]
    rng = np.random.default_rng(0)
    a, b = normal(rng, inner, left, dtype=dtype), normal(rng, inner, right, dtype=dtype)
    made = getattr(module, name)
    if name == "nki_matmul_hoist_load_" and dtype == BF16 and passes_dtype(made):
        # dst is float32 and dtype bfloat16: no release documents what that means.
        with pytest.raises(DtypeError, match=r"tensor_copy: dtype: float32 as dst has: .* 2\.27"):
            made(a, b, **options)
        return
    got = made(a, b, **options).astype(np.float64)
    wide = [x.astype(np.float64) for x in (a, b)]
    allowed = np.abs(wide[0]).T @ np.abs(wide[1]) * inner * 2.0**-24
    want = wide[0].T @ wide[1]
    assert (np.abs(got - want) <= allowed + (0 if dtype != BF16 else UNIT * np.abs(want))).all()


def test_tutorial_average_pool() -> None:
    module = program(TUTORIALS + "average_pool2d/average_pool2d_nki_kernels.py")
    x = np.arange(72, dtype=np.float16).reshape(2, 6, 6)
    want = x.reshape(2, 3, 2, 3, 2).mean(axis=(2, 4))
    assert np.array_equal(module.tensor_avgpool_kernel(x, 2), want)


def test_tutorial_transpose_of_free_dimensions() -> None:
    module = program(TUTORIALS + "transpose2d/transpose2d_nki_kernels.py")
    x = np.arange(60, dtype=np.int8).reshape(5, 12)
    want = x.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12)
    assert np.array_equal(module.tensor_transpose2D_kernel_(x, (3, 4)), want)


@pytest.mark.parametrize("name", ["mamba_v1", "mamba_v2", "mamba_v3"])
def test_tutorial_fused_mamba(name: str) -> None:
    module = program(TUTORIALS + "fused_mamba/mamba_nki_kernels.py")
    if not hasattr(module, name):
        pytest.skip(f"there is no {name} in this version")
    rng = np.random.default_rng(0)
    delta = rng.random((1, 128, 1024)).astype(np.float32)
    decay = -rng.random((128, 2)).astype(np.float32)
    u = normal(rng, 1, 128, 1024, dtype=np.float32)
    b, c = (normal(rng, 1, 2, 1024, dtype=np.float32) for _ in range(2))
    want, state = np.zeros((128, 1024)), np.zeros((2, 128))
    for t in range(1024):
        now = delta[0, :, t].astype(np.float64)
        kept = np.exp(now * decay.T) * state
        state = kept + now * u[0, :, t] * b[0, :, t][:, None]
        want[:, t] = (state * c[0, :, t][:, None]).sum(axis=0)
    assert rms(getattr(module, name)(delta, u, decay, b, c)[0], want) <= 2.0**-20


def test_tutorial_ring_of_matrix_multiplications() -> None:
    module = program(TUTORIALS + "allgather_matmul_ring/allgather_matmul_ring_nki_kernels.py")
    world, inner, rng = module.RANK_N, module.K, np.random.default_rng(0)
    group = ReplicaGroup((tuple(range(world)),))
    x = [normal(rng, 128, inner) for _ in range(world)]
    w = [normal(rng, inner, 512) for _ in range(world)]
    arguments = [(x[rank], w[rank], group) for rank in range(world)]
    results = run_ranks(module.allgather_matmul_ring, arguments).results
    for rank, source in np.ndindex(world, world):
        want = x[source].astype(np.float64) @ w[rank].astype(np.float64)
        assert rms(results[rank][source], want) <= UNIT


def test_the_example_of_the_official_simulator_runs_as_a_script() -> None:
    program("aws-neuron-sdk/nki/examples/simulate/nki_simulate_example.py")
