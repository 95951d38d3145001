"""One attention problem as plain data, and two evaluations of its mask.

`Problem` takes the option names of the public API and nothing from ringspec. The mask is written
twice: `may_attend` decides one pair in scalar Python, straight from the text; `allowed` builds the
whole array in NumPy for the row scale. A test holds one to the other.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import inf, sqrt

import numpy as np
from oracle.philox import keep_array, keep_one


@dataclass(frozen=True)
class Problem:
    """q [B,H,Sq,D], k [B,Hkv,Sk,D], v [B,Hkv,Sk,Dv] and the options of `rs.attention`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = False
    window: object = None
    scale: float | None = None
    softcap: float | None = None
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    segments_q: np.ndarray | None = None
    segments_k: np.ndarray | None = None
    cu_seqlens: object = None
    cu_seqlens_k: object = None
    bound_min: np.ndarray | None = None
    bound_max: np.ndarray | None = None
    sinks: np.ndarray | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    keep: np.ndarray | None = None
    q_offset: int = 0
    positions_q: np.ndarray | None = None
    positions_k: np.ndarray | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, Hkv, Sq, Sk, D, Dv."""
        B, H, Sq, D = self.q.shape
        _, Hkv, Sk, Dv = self.v.shape
        assert self.k.shape == (B, Hkv, Sk, D) and H % Hkv == 0
        return B, H, Hkv, Sq, Sk, D, Dv

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        B, H, _, Sq, Sk, _, _ = self.sizes
        return B, H, Sq, Sk


def nearest_inverse_root(D: int) -> float:
    """Return the float64 nearest to the real 1/sqrt(D), decided by exact rational arithmetic.

    x is nearest when the midpoints to its neighbours enclose 1/sqrt(D), that is when
    low^2 * D <= 1 <= high^2 * D. A tie is impossible: a midpoint m with m^2 * D = 1 would make
    1/m an integer, so m a power of two, which is a float64 and no midpoint.

    >>> nearest_inverse_root(4)
    0.5
    """
    guess = 1.0 / sqrt(D)
    for candidate in (guess, np.nextafter(guess, 0.0), np.nextafter(guess, 1.0)):
        x = Fraction(float(candidate))
        low = (x + Fraction(float(np.nextafter(candidate, 0.0)))) / 2
        high = (x + Fraction(float(np.nextafter(candidate, 2.0)))) / 2
        if low * low * D <= 1 <= high * high * D:
            return float(candidate)
    raise AssertionError(f"no float64 near 1/sqrt({D}) found beside {guess!r}")


def scale_of(problem: Problem) -> float:
    """Return the given scale, or the default one."""
    if problem.scale is not None:
        return float(problem.scale)
    return nearest_inverse_root(problem.q.shape[3])


# The elementwise evaluation -------------------------------------------------------------------


def per_row(array: np.ndarray, b: int, i: int) -> int:
    """Read an int array of shape [S] or [B, S] at batch b, token i."""
    array = np.asarray(array)
    return int(array[i]) if array.ndim == 1 else int(array[b if array.shape[0] > 1 else 0, i])


def per_pair(array: np.ndarray, shape: tuple[int, ...], b: int, h: int, i: int, j: int):
    """Read an array that broadcasts to [B, H, Sq, Sk] at one pair."""
    return np.broadcast_to(array, shape)[b, h, i, j]


def position_q(problem: Problem, b: int, i: int) -> int:
    if problem.positions_q is not None:
        return per_row(problem.positions_q, b, i)
    return i + int(problem.q_offset)


def position_k(problem: Problem, b: int, j: int) -> int:
    return per_row(problem.positions_k, b, j) if problem.positions_k is not None else j


def document(offsets, index: int) -> int:
    """Return the packed document that holds token `index`, or -1 behind the last."""
    for number in range(len(offsets) - 1):
        if offsets[number] <= index < offsets[number + 1]:
            return number
    return -1


def may_attend(problem: Problem, b: int, h: int, i: int, j: int) -> bool:
    """Return True where every mask term lets query i attend to key j."""
    pq = position_q(problem, b, i)
    pk = position_k(problem, b, j)
    if problem.causal and pk > pq:
        return False
    if problem.window is not None:
        window = problem.window
        left, right = (window, window) if isinstance(window, int) else window
        if left is not None and pk - pq < -left:
            return False
        if right is not None and pk - pq > right:
            return False
    if problem.segments_q is not None:
        segments_k = problem.segments_q if problem.segments_k is None else problem.segments_k
        segment_q = per_row(problem.segments_q, b, i)
        segment_k = per_row(segments_k, b, j)
        if segment_q != segment_k or segment_q < 0 or segment_k < 0:
            return False
    if problem.cu_seqlens is not None:
        offsets_k = problem.cu_seqlens if problem.cu_seqlens_k is None else problem.cu_seqlens_k
        document_q = document(problem.cu_seqlens, i)
        if document_q < 0 or document_q != document(offsets_k, j):
            return False
    if problem.bound_min is not None:
        if pk < per_row(problem.bound_min, b, i) or pk >= per_row(problem.bound_max, b, i):
            return False
    if problem.mask is not None and not per_pair(problem.mask, problem.scores_shape, b, h, i, j):
        return False
    if problem.bias is not None:
        if per_pair(problem.bias, problem.scores_shape, b, h, i, j) == -inf:
            return False
    return True


def keeps(problem: Problem, b: int, h: int, i: int, j: int) -> bool:
    """Return the keep bit of one pair: the given mask, else Philox of its positions."""
    if problem.keep is not None:
        return bool(per_pair(problem.keep, problem.scores_shape, b, h, i, j))
    if problem.dropout_p == 0.0:
        return True
    pq = position_q(problem, b, i)
    pk = position_k(problem, b, j)
    return keep_one(pq, pk, h, b, problem.dropout_p, int(problem.dropout_seed))


# The same in whole arrays, for the row scale ----------------------------------------------------


def two_axes(array: np.ndarray) -> np.ndarray:
    """Return an int array [S] or [B, S] as [1|B, S]."""
    array = np.asarray(array, dtype=np.int64)
    return array[None, :] if array.ndim == 1 else array


def all_positions(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of queries [1|B, Sq] and keys [1|B, Sk]."""
    _, _, _, Sq, Sk, _, _ = problem.sizes
    positions_q = np.arange(Sq) + problem.q_offset
    positions_k = np.arange(Sk)
    if problem.positions_q is not None:
        positions_q = problem.positions_q
    if problem.positions_k is not None:
        positions_k = problem.positions_k
    return two_axes(positions_q), two_axes(positions_k)


def allowed(problem: Problem) -> np.ndarray:
    """Return the visibility of every pair: bool [B, H, Sq, Sk]."""
    _, _, _, Sq, Sk, _, _ = problem.sizes
    positions_q, positions_k = all_positions(problem)
    distance = positions_k[:, None, None, :] - positions_q[:, None, :, None]  # pk - pq
    visible = np.ones(problem.scores_shape, dtype=bool)
    if problem.causal:
        visible &= distance <= 0
    if problem.window is not None:
        left, right = np.broadcast_to(np.array(problem.window, dtype=object), 2)
        visible &= True if left is None else distance >= -left
        visible &= True if right is None else distance <= right
    if problem.segments_q is not None:
        segments_q = two_axes(problem.segments_q)
        segments_k = segments_q if problem.segments_k is None else two_axes(problem.segments_k)
        same = segments_q[:, None, :, None] == segments_k[:, None, None, :]
        visible &= same & (segments_q >= 0)[:, None, :, None]
    if problem.cu_seqlens is not None:
        offsets_q = np.asarray(problem.cu_seqlens)
        offsets_k = offsets_q if problem.cu_seqlens_k is None else np.asarray(problem.cu_seqlens_k)
        document_q = np.searchsorted(offsets_q, np.arange(Sq), side="right")
        document_k = np.searchsorted(offsets_k, np.arange(Sk), side="right")
        document_q[np.arange(Sq) >= offsets_q[-1]] = -1
        document_k[np.arange(Sk) >= offsets_k[-1]] = -2
        visible &= document_q[:, None] == document_k[None, :]
    if problem.bound_min is not None:
        visible &= positions_k[:, None, None, :] >= two_axes(problem.bound_min)[:, None, :, None]
        visible &= positions_k[:, None, None, :] < two_axes(problem.bound_max)[:, None, :, None]
    if problem.mask is not None:
        visible &= np.asarray(problem.mask, dtype=bool)
    if problem.bias is not None:
        visible &= ~np.isneginf(np.asarray(problem.bias, dtype=np.float64))
    return visible


def all_keeps(problem: Problem) -> np.ndarray:
    """Return the keep mask of every pair: bool [B, H, Sq, Sk]."""
    if problem.keep is not None:
        return np.broadcast_to(np.asarray(problem.keep, dtype=bool), problem.scores_shape)
    if problem.dropout_p == 0.0:
        return np.ones(problem.scores_shape, dtype=bool)
    positions_q, positions_k = all_positions(problem)
    B, H, _, _ = problem.scores_shape
    keep = keep_array(
        positions_q,
        positions_k,
        np.arange(H),
        np.arange(B),
        problem.dropout_p,
        int(problem.dropout_seed),
    )
    return np.broadcast_to(keep, problem.scores_shape)
