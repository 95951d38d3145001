"""The row scale (docs/spec/numbers.md) in float64 NumPy, and the one error measure of the tests.

    from oracle.row_scale import row_scale, worst_row_error

    scale = row_scale(q, k, v, dy, dlse, causal=True)
    assert worst_row_error(f.o, want_o, scale.o) <= 2e-15

`p~` below is p * keep / (1 - dropout_p). Section 4 says "dropout factors inside p and dp"; read
here as: `p~` wherever p multiplies v or dy, `keep / (1 - dropout_p)` on <|dy|, |v|>, and the
undropped p in front of a_ij, which is the p of ds = p * (dp - delta + dlse).

Two tensors are not named by section 4; they follow the same rule (absolute values inside every
sum, kappa_i for each query row):
    dsinks_hn: sum over b, i of kappa_i * exp(sink_hn - lse_i) * (|dlse_i| + sum_d |dy| sum_j p~ |v|)
    dbias:     sum over the broadcast axes of kappa_i * a_ij
kappa_i takes its maximum over the keys that row i may attend to and the sinks of its head (1 for a
row without any).
"""

from dataclasses import dataclass

import numpy as np
from oracle.problem import Problem, all_keeps, allowed, scale_of


@dataclass(frozen=True)
class RowScale:
    """One non-negative float64 per row: o, lse, dq [B,H,Sq]; dk, dv [B,Hkv,Sk]; the others alike.

    dsinks has the shape of sinks and dbias that of bias (their elements are their own rows). The
    gradients' scales are None without dy, dsinks and dbias also without sinks or bias.
    """

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsinks: np.ndarray | None = None
    dbias: np.ndarray | None = None


def row_scale(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dy: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **options,
) -> RowScale:
    """Return the row scales of one problem; `options` are those of `rs.attention`.

    >>> one = np.ones((1, 1, 1, 1))
    >>> scale = row_scale(2 * one, 3 * one, 5 * one, dy=one)   # one key: p = 1, lse = 6
    >>> scale.o.item(), scale.lse.item(), scale.dq.item(), scale.dv.item()
    (35.0, 13.0, 210.0, 7.0)
    """
    problem = Problem(as_float64(q), as_float64(k), as_float64(v), **options)
    group = problem.q.shape[1] // problem.k.shape[1]
    size_q = np.abs(problem.q)
    size_k = np.abs(
        np.repeat(problem.k, group, axis=1)
    )  # [B, H, Sk, D]: as each query head sees it
    size_v = np.abs(np.repeat(problem.v, group, axis=1))
    visible = allowed(problem)
    factor = all_keeps(problem) / (1.0 - problem.dropout_p)

    p, lse = probabilities(problem, visible)
    kappa = condition(problem, visible, size_q, size_k)
    p_size_v = np.einsum("bhij,bhjd->bhid", p * factor, size_v)
    o = kappa * np.max(p_size_v, axis=-1, initial=0.0)
    lse_scale = kappa + np.where(np.isneginf(lse), 0.0, np.abs(lse))
    if dy is None:
        return RowScale(o, lse_scale)

    size_dy = np.abs(as_float64(dy))
    size_dlse = np.zeros(lse.shape) if dlse is None else np.abs(as_float64(dlse))
    dp = np.einsum("bhid,bhjd->bhij", size_dy, size_v) * factor
    delta = np.sum(size_dy * p_size_v, axis=-1)
    a = p * (dp + delta[..., None] + size_dlse[..., None])
    weighted = kappa[..., None] * a
    scale = abs(scale_of(problem))
    dq = scale * np.einsum("bhij,bhjd->bhid", weighted, size_k)
    dk = scale * over_group(np.einsum("bhij,bhid->bhjd", weighted, size_q), group)
    dv = over_group(np.einsum("bhij,bhid->bhjd", kappa[..., None] * p * factor, size_dy), group)
    return RowScale(
        o=o,
        lse=lse_scale,
        dq=np.max(dq, axis=-1, initial=0.0),
        dk=np.max(dk, axis=-1, initial=0.0),
        dv=np.max(dv, axis=-1, initial=0.0),
        dsinks=sink_scale(problem, lse, kappa * (size_dlse + delta)),
        dbias=None if problem.bias is None else sum_to(weighted, np.shape(problem.bias)),
    )


def as_float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def sinks_of(problem: Problem) -> np.ndarray:
    """Return the sink logits [H, N]; N = 0 without sinks."""
    H = problem.q.shape[1]
    if problem.sinks is None:
        return np.zeros((H, 0))
    sinks = as_float64(problem.sinks)
    return sinks.reshape(H, sinks.size // H)


def probabilities(problem: Problem, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p [B,H,Sq,Sk] and lse [B,H,Sq] in plain float64; empty rows have p = 0, lse = -inf."""
    group = problem.q.shape[1] // problem.k.shape[1]
    keys = np.repeat(problem.k, group, axis=1)
    s = scale_of(problem) * np.einsum("bhid,bhjd->bhij", problem.q, keys)
    if problem.bias is not None:
        s = s + np.asarray(problem.bias, dtype=np.float64)
    if problem.softcap is not None:
        s = problem.softcap * np.tanh(s / problem.softcap)
    s = np.where(visible, s, -np.inf)
    sinks = sinks_of(problem)
    B, H, Sq, _ = s.shape
    logits = np.concatenate(
        [s, np.broadcast_to(sinks[None, :, None, :], (B, H, Sq, sinks.shape[1]))], axis=-1
    )
    m = np.max(logits, axis=-1, initial=-np.inf)
    shift = np.where(np.isneginf(m), 0.0, m)
    total = np.sum(np.exp(logits - shift[..., None]), axis=-1)
    empty = total == 0.0
    lse = np.where(empty, -np.inf, shift + np.log(np.where(empty, 1.0, total)))
    p = np.exp(s - shift[..., None]) / np.where(empty, 1.0, total)[..., None]
    return p, lse


def condition(
    problem: Problem, visible: np.ndarray, size_q: np.ndarray, size_k: np.ndarray
) -> np.ndarray:
    """Return kappa [B, H, Sq] = 1 + max over visible j of scale * sum_d |q||k| + |bias|, and |sink|.

    A sink far above the scores takes digits of p as a large score does.
    """
    size = abs(scale_of(problem)) * np.einsum("bhid,bhjd->bhij", size_q, size_k)
    if problem.bias is not None:
        size = size + np.abs(np.asarray(problem.bias, dtype=np.float64))
    largest = np.max(np.where(visible, size, 0.0), axis=-1, initial=0.0)
    sinks = np.max(np.abs(sinks_of(problem)), axis=1, initial=0.0)
    return 1.0 + np.maximum(largest, sinks[None, :, None])


def sink_scale(problem: Problem, lse: np.ndarray, row: np.ndarray) -> np.ndarray | None:
    """Return sum over b, i of exp(sink - lse) * row in the shape of sinks."""
    if problem.sinks is None:
        return None
    sinks = sinks_of(problem)
    weight = np.exp(sinks[None, :, None, :] - lse[..., None])  # with a sink no lse is -inf
    return np.einsum("bhin,bhi->hn", weight, row).reshape(np.shape(problem.sinks))


def over_group(values: np.ndarray, group: int) -> np.ndarray:
    """Sum [B, H, ...] over the query heads of each key head: [B, Hkv, ...]."""
    B, H = values.shape[:2]
    return values.reshape(B, H // group, group, *values.shape[2:]).sum(axis=2)


def sum_to(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum `values` over the axes along which an array of `shape` was broadcast."""
    values = values.sum(axis=tuple(range(values.ndim - len(shape))))
    for axis, size in enumerate(shape):
        if size == 1:
            values = values.sum(axis=axis, keepdims=True)
    return values


def worst_row_error(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> float:
    """Return the largest |got - want| / row scale over all elements.

    `scale` has the shape of `want` or lacks its last axis. Equal elements count 0 (also equal
    infinities). Where the scale is 0 only equality will do; a NaN or an infinity that does not
    match gives inf. Compare as `assert worst_row_error(...) <= bound`.

    >>> worst_row_error(np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]]), np.array([4.0]))
    0.25
    >>> worst_row_error(np.array([np.nan]), np.array([1.0]), np.array([4.0]))
    inf
    """
    got, want, scale = (np.asarray(array, dtype=np.float64) for array in (got, want, scale))
    if got.shape != want.shape:
        raise AssertionError(f"got has shape {got.shape}, want {want.shape}")
    if scale.ndim == want.ndim - 1:
        scale = scale[..., None]
    scale = np.broadcast_to(scale, want.shape)
    comparable = np.isfinite(got) & np.isfinite(want) & np.isfinite(scale) & (scale > 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(got - want) / scale
    error = np.where(comparable, error, np.inf)
    error = np.where(got == want, 0.0, error)
    return float(np.max(error, initial=0.0))
