"""A dense backward from o and lse as they are given, written out once for the interface tests."""

import numpy as np


def dense_given(q, k, v, dy, o, lse, *, scale, allowed, bias=0.0, softcap=None, factor=1.0):
    """dq, dk, dv of arrays [B, H, S, D], every head with keys of its own.

    `allowed` and `factor` (keep / (1 - p)) broadcast to [B, H, Sq, Sk]. p is exp(s - lse) with the
    given lse, which need not make it sum to 1.

    >>> one = np.ones((1, 1, 1, 1))
    >>> dq, dk, dv = dense_given(one, one, 2 * one, one, one, one[0], scale=1.0, allowed=True)
    >>> dq.item(), dv.item()
    (1.0, 1.0)
    """
    z = scale * np.einsum("bhid,bhjd->bhij", q, k) + bias
    t = 0.0 * z if softcap is None else np.tanh(z / softcap)
    s = z if softcap is None else softcap * t
    p = np.where(allowed, np.exp(s - lse[..., None]), 0.0)
    delta = np.einsum("bhid,bhid->bhi", dy, o)
    dp = np.einsum("bhid,bhjd->bhij", dy, v) * factor
    dz = p * (dp - delta[..., None]) * (1.0 - t * t)
    dq = scale * np.einsum("bhij,bhjd->bhid", dz, k)
    dk = scale * np.einsum("bhij,bhid->bhjd", dz, q)
    dv = np.einsum("bhij,bhid->bhjd", p * factor, dy)
    return dq, dk, dv


def worst_rounded_error(got, want, scale, unit_roundoff):
    """Largest excess of |got - want| over one rounding of want, in units of the row scale.

    >>> got = np.float32([1.0]).astype(float)
    >>> worst_rounded_error(got, np.array([1.0 + 2.0**-25]), np.array([[1.0]]), 2.0**-24)
    0.0
    """
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape
    excess = np.abs(got - want) - unit_roundoff * np.abs(want)
    excess = np.where(np.isnan(excess), np.inf, np.maximum(excess, 0.0))
    return float(np.max(excess / np.where(scale > 0, scale, 1.0)[..., None], initial=0.0))
