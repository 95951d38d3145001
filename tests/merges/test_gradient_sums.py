"""The sums of gradients of a merge recipe against the published backward loops, run with given block gradients.

A loop runs once per worker, in threads. The function that computes a block's gradients returns given random ones, and the
transfers pass tensors between the threads; everything else is the installed package's own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from merges.partials import same_bits
from merges.thread_ring import ThreadRing
from merges.torch_side import array, tensor

from ringspec.formats import store
from ringspec.merges import MERGES, add_gradients, visits

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WORKERS = (1, 2, 3, 5, 8)
B, S, H, D = 1, 6, 2, 5


def numbers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return small numbers and some of +-2**14, which cancel: then the order of a float32 sum shows even in 16 bits."""
    small = random.normal(0, 2.0**-12, shape)
    return np.choose(random.integers(0, 3, shape), [small, 2.0**14, -(2.0**14)])


class Blocks:
    """Given gradients (dq, dk, dv) of the queries of one worker and the keys of another, [B, S, H, D] or axes swapped."""

    def __init__(self, workers: int, fmt: str, kind: str, swap: bool) -> None:
        self.workers, self.kind, self.swap = workers, kind, swap
        random = np.random.default_rng([workers, len(kind)])
        self.given = {
            (a, b): tuple(store(numbers(random, self.shape(n)), fmt) for n in self.rows(a, b))
            for a in range(workers)
            for b in range(workers)
        }

    def shape(self, rows: int) -> tuple[int, ...]:
        return (B, H, rows, D) if self.swap else (B, rows, H, D)

    def rows(self, a: int, b: int) -> tuple[int, int, int]:
        """Rows of dq, dk and dv of a block."""
        if self.kind != "zigzag" or a == b:
            return S, S, S
        return (S, S // 2, S // 2) if b < a else (S // 2, S, S)

    def index(self, x: np.ndarray, first: bool):
        """Rows that a contribution covers; half of them are the first of dk and dv, or the second of dq."""
        axis = 2 if self.swap else 1
        if x.shape[axis] == S:
            return ...
        half = slice(None, S // 2) if first else slice(S // 2, None)
        return (slice(None),) * axis + (half,)

    def visible(self, a: int, b: int) -> bool:
        return self.kind != "causal" or b <= a

    def summed(self, recipe: str, rank: int) -> tuple[np.ndarray, ...]:
        """Return dq, dk, dv of a worker with the recipe's sums."""
        how = MERGES[recipe]
        keys = [b for b in visits(how.dq.order, rank, self.workers) if self.visible(rank, b)]
        shares = [self.given[rank, b][0] for b in keys]
        results = [self.added(shares, how.dq, first=False)]
        if how.dkv is not None:
            queries = [
                a for a in visits(how.dkv.order, rank, self.workers) if self.visible(a, rank)
            ]
            for n in (1, 2):
                shares = [self.given[a, rank][n] for a in queries]
                results.append(self.added(shares, how.dkv, first=True))
        return tuple(results)

    def added(self, shares, how, first: bool):
        return add_gradients([(x, self.index(x, first)) for x in shares], how, self.shape(S))


def assert_equal(blocks: Blocks, recipe: str, results: list) -> None:
    for rank, found in enumerate(results):
        for want, got in zip(found, blocks.summed(recipe, rank), strict=False):
            assert same_bits(got, array(want)), (recipe, blocks.workers, blocks.kind, rank)


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["full", "causal", "zigzag"])
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "narrow"])
def test_torch_cp_adds_gradients_as_torchs_loop(monkeypatch, wide, kind, fmt):
    pytest.importorskip("torch")
    loop = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    options = SimpleNamespace(
        convert_to_f32=wide, enable_load_balance=kind == "zigzag", rotate_method=None
    )
    monkeypatch.setattr(loop, "_cp_options", options)
    for workers in WORKERS:
        ring, blocks = ThreadRing(workers), Blocks(workers, fmt, kind, swap=True)
        monkeypatch.setattr(loop, "_create_rotater", lambda *_, r=ring, **__: Rotater(r))
        ranks = SimpleNamespace(get_rank=lambda g: g.rank, get_world_size=lambda g: g.workers)
        monkeypatch.setattr(loop, "dist", ranks)

        def one(rank, ring=ring, blocks=blocks):
            visited = iter(
                b for b in visits("down", rank, blocks.workers) if blocks.visible(rank, b)
            )
            whole = tensor(blocks.given[rank, rank][0])
            return loop._templated_ring_attention_backward(
                ring,
                2,
                lambda **_: tuple(tensor(x) for x in blocks.given[rank, next(visited)]),
                whole,
                "grad_out",
                *[whole] * 4,
                whole[..., 0],
                kind != "full",
            )

        recipe = "torch_cp" if wide else "torch_cp_narrow"
        assert_equal(blocks, recipe, ring.run(one))


class Rotater:
    """Buffers that go to the next worker, like torch's rotaters."""

    def __init__(self, ring: ThreadRing) -> None:
        self.ring = ring

    def exchange_buffers(self, buffer) -> None:
        self.buffer = self.ring.pass_on(buffer)

    def next_buffer(self):
        return self.buffer


# Not float32: flash-attn refuses it, and the loop then adds to the buffer that the next block overwrites.
@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("module", "kind", "recipe"),
    [
        ("ring_flash_attn", "full", "ring_flash_attn"),
        ("ring_flash_attn", "causal", "ring_flash_attn"),
        ("zigzag_ring_flash_attn", "zigzag", "ring_flash_attn_zigzag"),
    ],
)
def test_ring_flash_attn_adds_gradients_as_its_loop(monkeypatch, module, kind, recipe, fmt):
    from ringspec.standins import installed

    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("needs the package ring_flash_attn")
    name = f"ring_flash_attn.{module}"
    if name not in sys.modules:
        with installed("flash_attn"):
            importlib.import_module(name)
    loop = sys.modules[name]
    for workers in WORKERS:
        ring, blocks = ThreadRing(workers), Blocks(workers, fmt, kind, swap=False)
        monkeypatch.setattr(loop, "RingComm", lambda r: Comm(r))
        monkeypatch.setattr(loop, "get_default_args", lambda _: {"window_size": None})
        monkeypatch.setattr(
            loop, "_flash_attn_backward", lambda r=ring, **given: r.local.block(given)
        )

        def one(rank, ring=ring, blocks=blocks):
            visited = iter(
                b for b in visits("down", rank, blocks.workers) if blocks.visible(rank, b)
            )

            def block(given):
                gradients = blocks.given[rank, next(visited)]
                for target, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                    given[target].copy_(tensor(x))

            ring.local.block = block
            whole = tensor(blocks.given[rank, rank][0])
            lse = whole[..., 0].transpose(1, 2)
            backward = getattr(loop, f"{module}_backward")
            return backward(ring, *[whole] * 5, lse, 1.0, causal=kind != "full")

        assert_equal(blocks, recipe, ring.run(one))


class Comm:
    """Transfers to the next worker, like ring_flash_attn's RingComm; they are done when they are called."""

    def __init__(self, ring: ThreadRing) -> None:
        self.ring, self.rank, self.world_size = ring, ring.rank, ring.workers

    def send_recv_kv(self, k, v, *_):
        return self.ring.pass_on((k.clone(), v.clone()))

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_diffusers_adds_dq_as_its_loop(monkeypatch, fmt):
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("needs the package diffusers")
    loop = importlib.import_module("diffusers.models.attention_dispatch")
    for workers in WORKERS:
        ring, blocks = ThreadRing(workers), Blocks(workers, fmt, "full", swap=False)
        functional = SimpleNamespace(
            all_gather_tensor=lambda x, r=ring, **_: torch.cat(r.all(x)),
            permute_tensor=lambda x, *_, r=ring, **__: r.pass_on(x),
        )
        monkeypatch.setattr(loop, "funcol", functional)
        monkeypatch.setattr(loop, "_wait_tensor", lambda x: x)

        def one(rank, ring=ring, blocks=blocks):
            visited = iter(visits("up", rank, blocks.workers))
            whole = tensor(blocks.given[rank, rank][0])
            cp = SimpleNamespace(
                _ring_mesh=SimpleNamespace(get_group=lambda: ring),
                _ring_local_rank=rank,
                ring_degree=blocks.workers,
                convert_to_fp32=True,
            )
            ctx = SimpleNamespace(
                _parallel_config=SimpleNamespace(context_parallel_config=cp),
                q_shape=whole.shape,
                kv_shape=whole.shape,
                saved_tensors=(whole,) * 3,
                ring_out=whole,
                ring_lse=whole[..., 0],
                backward_op=lambda *_, **__: tuple(
                    tensor(x) for x in blocks.given[rank, next(visited)]
                ),
            )
            return loop.TemplatedRingAttention.backward(ctx, whole)[:3]

        assert_equal(blocks, "diffusers", ring.run(one))
