"""Each member in float64 is ring attention: its o, lse and gradients are those of the definition.

No module of ringspec takes part. The truth is a plain dense attention with numerical gradients, and
torch's autograd where it is installed.
"""

import numpy as np
import pytest
from correct_kernels.members import MEMBERS, both_passes
from correct_kernels.philox import first_word, kept
from correct_kernels.problems import (
    BATCH,
    HEADS,
    KEY_HEADS,
    LAYOUTS,
    SCALE,
    TERMS,
    Whole,
    dense,
    difference,
    ring_of,
    whole,
)
from correct_kernels.rounding import narrowed

WORKERS = 3
DROPPED = ("dropout", "keep")
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


def keep_of(problem: Whole):
    """The keep mask of all pairs, or None."""
    if "keep" in problem.tensors:
        return problem.tensors["keep"]
    if "dropout_p" not in problem.terms:
        return None
    rows, columns = (np.arange(problem.tensors[x].shape[2])[None] for x in ("q", "k"))
    terms = problem.terms
    return kept(terms["dropout_seed"], terms["dropout_p"], BATCH, HEADS, rows, columns)


def computed(member, problem: Whole, layout: str, **more):
    """What the workers give, in the order of the tokens."""
    ring, index_q, index_k = ring_of(problem, layout, WORKERS, base2=member.base2, **more)
    dy, dlse = (
        [
            np.take(x, np.maximum(t, 0), 2) * (t >= 0).reshape(-1, *[1] * (x.ndim - 3))
            for t in index_q
        ]
        for x in (problem.dy, problem.dlse)
    )
    shards = both_passes(member, ring, dy, dlse)
    found = {}
    for name, held in shards.items():
        if name == "dsinks" or (name == "dbias" and problem.tensors["bias"].shape[2] == 1):
            found[name] = sum(held)
            continue
        index = index_k if name in ("dk", "dv") else index_q
        found[name] = np.zeros((*held[0].shape[:2], index.max() + 1, *held[0].shape[3:]))
        for tokens, shard in zip(index, held, strict=True):
            found[name][:, :, tokens[tokens >= 0]] = shard[:, :, tokens >= 0]
    return found


def problem_of(kind: str) -> Whole:
    unequal = kind in ("full", "mask-and-sinks", "bounds")
    return whole(kind, 12, 24 if unequal else 12)


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("name", MEMBERS)
def test_forward_and_gradients_are_those_of_the_definition(name, kind):
    if MEMBERS[name].way.delta_column and kind in DROPPED:
        pytest.skip("dP - delta inside the product leaves no place for dropout")
    problem = problem_of(kind)
    layout = LAYOUTS[(list(MEMBERS).index(name) + list(TERMS).index(kind)) % len(LAYOUTS)]
    circulation = ("kv", "q", "gather")[list(TERMS).index(kind) % 3]
    found = computed(MEMBERS[name], problem, layout, circulation=circulation, direction=-1)
    keep = keep_of(problem)
    for key, truth in dense(problem, keep).items():
        np.testing.assert_allclose(found[key], truth, rtol=1e-12, atol=1e-12)
    rng = np.random.default_rng(3)
    for tensor, gradient in GRADIENTS.items():
        if tensor not in problem.tensors:
            continue
        direction = rng.normal(size=problem.tensors[tensor].shape)
        slope = difference(problem, keep, tensor, direction)
        real = np.isfinite(problem.tensors[tensor])
        assert np.all(found[gradient][~real] == 0)
        inner = float((found[gradient] * direction)[real].sum())
        assert abs(inner - slope) <= 1e-8 * (1 + abs(slope))


def test_philox_gives_the_words_of_its_authors():
    # Random123, kat_vectors: key, counter and output word 0 of philox4x32 with 10 rounds.
    ones = 0xFFFFFFFF
    known = (
        ((0, 0), (0, 0, 0, 0), 0x6627E8D5),
        ((ones, ones), (ones,) * 4, 0x408F276D),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    )
    for key, counter, word in known:
        assert first_word(key, tuple(np.array([x]) for x in counter)).tolist() == [word]


@pytest.mark.parametrize("value", [1.0, 2.0**-20, 3e-41, 200.0, 0.0])
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even(format, value):
    import ml_dtypes

    steps = np.float32(value).view(np.uint32) + np.arange(0, 1 << 17, 61, dtype=np.uint32)
    x = steps.view(np.float32)
    storage = np.float16 if format == "float16" else ml_dtypes.bfloat16
    want = x.astype(storage).astype(np.float32)
    assert np.array_equal(narrowed(x, format), want)
    assert np.array_equal(narrowed(-x, format), -want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MEMBERS)
def test_every_layout_gives_the_same_attention(name, layout):
    problem = whole("causal", 24, 24)
    found = computed(MEMBERS[name], problem, layout)
    for key, truth in dense(problem).items():
        np.testing.assert_allclose(found[key], truth, rtol=1e-12, atol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("name", MEMBERS)
def test_gradients_are_those_of_autograd_element_by_element(name):
    import torch

    problem = whole("causal", 24, 24, seed=5)
    q, k, v = (
        torch.tensor(problem.tensors[x], requires_grad=True, dtype=torch.float64) for x in "qkv"
    )
    keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    s = (SCALE * q @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
    o, lse = s.softmax(dim=3) @ values, s.logsumexp(dim=3)
    torch.autograd.backward([o, lse], [torch.tensor(problem.dy), torch.tensor(problem.dlse)])
    found = computed(MEMBERS[name], problem, "zigzag")
    for x, key in ((q, "dq"), (k, "dk"), (v, "dv")):
        np.testing.assert_allclose(found[key], x.grad.numpy(), rtol=1e-10, atol=1e-12)
