"""The ring of torch_ring.py is right: against PyTorch's own attention, and dense truth in float64."""

import ast
import importlib.util
import itertools
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    from independent import philox
    from independent.noise import relative, seen
    from independent.problems import PROBLEMS, results, table
    from independent.torch_ring import Ring

NAMES = list(PROBLEMS) if HAS_TORCH else ["any"]
DTYPES = ["float64", "float32", "bfloat16", "float16"]
OWN = ("torch_forward", "torch_backward", "torch_ring", "philox", "problems", "noise")


def other_tiles(ring, what):
    return 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_problem_is_the_truth_and_noise(name, dtype):
    assert seen(name, getattr(torch, dtype)) == []


@pytest.mark.parametrize("name", NAMES)
def test_other_tiles_and_seeds_change_the_noise_alone(name):
    for dtype, seed in itertools.product((torch.bfloat16, torch.float32), (4, 5)):
        assert seen(name, dtype, {"tile_size": other_tiles}, seed) == []


def attention_of_torch(q, k, v, dy, causal):
    """o and gradients of scaled_dot_product_attention."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    o.backward(dy)
    return [o.detach(), *(x.grad for x in leaves)]


def ring_attention(q, k, v, dy, causal, layout, workers, circulation):
    """The same of the ring, its shards put together again."""
    token = table(layout, workers, q.shape[2])
    q, k, v, dy = ([x[:, :, t] for t in token] for x in (q, k, v, dy))
    positions = [t[None] for t in token]
    places = list(token), list(token), positions, positions
    size = token.numel()
    options = {"causal": causal, "circulation": circulation, "out": q[0].dtype}
    ring = Ring(q, k, v, *places, size, q[0].shape[-1] ** -0.5, statistics=q[0].dtype, **options)
    found = results(ring, {"dy": dy})
    order = torch.argsort(token.reshape(-1))
    return [torch.cat(found[name], dim=2)[:, :, order] for name in ("o", "dq", "dk", "dv")]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "layout, circulation",
    [
        ("contiguous", "kv"),
        ("striped", "kv"),
        ("zigzag", "kv"),
        ("zigzag", "q"),
        ("striped", "gather"),
    ],
)
def test_it_is_the_attention_of_torch(layout, circulation, workers):
    random = torch.Generator().manual_seed(workers)
    # As many heads as tokens once, and grouped heads.
    size = 12 if workers == 3 else 16
    for causal, (tokens, heads, key_heads) in itertools.product(
        (True, False), ((48, 6, 2), (size, size, size))
    ):
        q, k, v, dy = (
            torch.randn(2, h, tokens, 8, generator=random, dtype=torch.float64)
            for h in (heads, key_heads, key_heads, heads)
        )
        for dtype, most in ((torch.float64, 5e-15), (torch.float32, 3e-6)):
            given = [x.to(dtype) for x in (q, k, v, dy)]
            got = ring_attention(*given, causal, layout, workers, circulation)
            for one, other in zip(got, attention_of_torch(*given, causal), strict=True):
                assert relative(one - other, other) < most


def test_philox_gives_the_published_words():
    # https://github.com/DEShawResearch/random123, tests/kat_vectors: philox4x32, 10 rounds.
    known = {
        ((0, 0), (0, 0, 0, 0)): 0x6627E8D5,
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4): 0x408F276D,
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        ): 0xD16CFE09,
    }
    for (key, counter), word in known.items():
        assert int(philox.first_word(key, tuple(torch.tensor(x) for x in counter))) == word


def test_the_ring_imports_nothing_of_ringspec():
    folder = Path(__file__).parent
    bugs = [path.stem for path in folder.glob("bugs*.py")]
    for name in (*OWN, *bugs, "catalogue", "reports"):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] == "ringspec" for module in modules), name
