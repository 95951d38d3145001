"""MLA in its absorbed form, under every scheme, equals attention with the keys and values of each head written out."""

import numpy as np
import pytest

from ringspec.schemes.api import context_parallel
from ringspec.schemes.mla import absorbed, expanded, latent_gradient

H, S, NOPE, ROPE, LATENT, WIDTH = 4, 8, 5, 3, 8, 6
SCHEMES = [
    ("ring", {"ring": 4}),
    ("ulysses", {"ulysses": 4}),
    ("usp", {"ring": 2, "ulysses": 2}),
    ("all_gather", {"cp": 2}),
]


def parts(n_q=S):
    """Return q_nope, q_rope, c, k_rope, w_uk, w_uv and dy."""
    generator = np.random.default_rng(3)
    shapes = [
        (1, H, n_q, NOPE),
        (1, H, n_q, ROPE),
        (1, S, LATENT),
        (1, S, ROPE),
        (H, NOPE, LATENT),
        (H, WIDTH, LATENT),
        (1, H, n_q, WIDTH),
    ]
    return [generator.standard_normal(shape) for shape in shapes]


def written_out(q_nope, q_rope, c, k_rope, w_uk, w_uv):
    """Return the output of causal attention with k and v of every head, in float64 without ringspec."""
    k_nope = np.einsum("bjc,hdc->bhjd", c, w_uk)
    s = np.einsum("bhid,bhjd->bhij", q_nope, k_nope) + np.einsum("bhid,bjd->bhij", q_rope, k_rope)
    s = s / np.sqrt(NOPE + ROPE)
    n_q = q_nope.shape[2]
    s = np.where(np.tril(np.ones((n_q, S), dtype=bool), S - n_q), s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p = p / p.sum(axis=3, keepdims=True)
    return np.einsum("bhij,bhjd->bhid", p, np.einsum("bjc,hdc->bhjd", c, w_uv))


@pytest.mark.parametrize(("scheme", "mesh"), SCHEMES, ids=lambda x: str(x))
def test_mla_equals_attention_with_keys_and_values_written_out(scheme, mesh):
    *inputs, w_uv, dy = parts()
    q, k, v, scale = absorbed(*inputs)
    dy_latent = np.einsum("bhid,hdc->bhic", dy, w_uv)
    run = context_parallel(q, k, v, dy_latent, mesh=mesh, scheme=scheme, scale=scale, causal=True)
    want = written_out(*inputs, w_uv)
    assert np.abs(expanded(run.o, w_uv) - want).max() <= 1e-13
    dc, _ = latent_gradient(run.dk, run.dv)
    # Along a random direction, the derivative of <dy, o> by a central difference.
    q_nope, q_rope, c, k_rope, w_uk = inputs
    direction, step = np.random.default_rng(4).standard_normal(c.shape), 1e-6
    ends = [
        (dy * written_out(q_nope, q_rope, c + sign * step * direction, k_rope, w_uk, w_uv)).sum()
        for sign in (1, -1)
    ]
    measured = (ends[0] - ends[1]) / (2 * step)
    assert abs((dc * direction).sum() - measured) <= 1e-6 * max(1, abs(measured))


def test_mla_decodes_over_a_cache_that_is_split_by_tokens():
    *inputs, w_uv, _ = parts(n_q=2)
    q, k, v, scale = absorbed(*inputs)
    run = context_parallel(
        q, k, v, mesh={"dcp": 4}, scheme="dcp", scale=scale, causal=True, q_offset=S - 2
    )
    assert run.scheme.home_k.shards[3].heads == (0,)
    assert np.abs(expanded(run.o, w_uv) - written_out(*inputs, w_uv)).max() <= 1e-13


def test_the_default_scale_is_not_that_of_mla():
    *inputs, w_uv, _ = parts()
    q, k, v, _ = absorbed(*inputs)
    run = context_parallel(q, k, v, mesh={"ring": 2}, scheme="ring", causal=True)
    assert np.abs(expanded(run.o, w_uv) - written_out(*inputs, w_uv)).max() > 1e-3
