"""Multi-head latent attention (MLA) as a problem with one key head, which every scheme splits like any other.

Keys and values of all heads are made from one latent vector c_j of each token: k_j = [W_uk c_j, k_rope_j], v_j = W_uv c_j.
In the *absorbed* form, these matrices move to the queries and outputs, so that all heads share one key head::

    q'_i = [q_nope_i W_uk, q_rope_i]      k'_j = [c_j, k_rope_j]      v'_j = c_j
    o_i = o'_i W_uv^T                     scale = 1 / sqrt(d_nope + d_rope), not 1 / sqrt(width of q')

The gradient of the latent is that of both places where it is used: dc_j = dk'_j[:latent] + dv'_j.

Source: DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

import numpy as np

from ringspec.problem.model import Array
from ringspec.problem.options import default_scale


def absorbed(
    q_nope: Array, q_rope: Array, c: Array, k_rope: Array, w_uk: Array
) -> tuple[Array, Array, Array, float]:
    """Return q', k', v' and the scale of the absorbed form, as arguments of :func:`ringspec.context_parallel`.

    q_nope [B, H, Sq, d_nope], q_rope [B, H, Sq, d_rope], c [B, Sk, latent], k_rope [B, Sk, d_rope], w_uk [H, d_nope,
    latent], float64. Returns q' [B, H, Sq, latent + d_rope], k' [B, 1, Sk, latent + d_rope], v' [B, 1, Sk, latent].

    >>> q, k, v, scale = absorbed(np.ones((1, 2, 3, 5)), np.ones((1, 2, 3, 4)), np.ones((1, 3, 8)),
    ...                           np.ones((1, 3, 4)), np.ones((2, 5, 8)))
    >>> q.shape, k.shape, v.shape, scale == 1 / 3
    ((1, 2, 3, 12), (1, 1, 3, 12), (1, 1, 3, 8), True)
    """
    q = np.concatenate([np.einsum("bhid,hdc->bhic", q_nope, w_uk), q_rope], axis=3)
    k = np.concatenate([c, k_rope], axis=2)[:, None]
    return q, k, c[:, None], default_scale(q_nope.shape[3] + q_rope.shape[3])


def expanded(o: Array, w_uv: Array) -> Array:
    """Return the output [B, H, Sq, Dv] of each head, from o' [B, H, Sq, latent] and w_uv [H, Dv, latent]."""
    return np.einsum("bhic,hdc->bhid", o, w_uv)


def latent_gradient(dk: Array, dv: Array) -> tuple[Array, Array]:
    """Return dc [B, Sk, latent] and dk_rope [B, Sk, d_rope] from dk' [B, 1, Sk, latent + d_rope] and dv' [B, 1, Sk, latent]."""
    latent = dv.shape[3]
    return dk[:, 0, :, :latent] + dv[:, 0], dk[:, 0, :, latent:]
