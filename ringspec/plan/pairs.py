"""Count the visible (query, key) pairs that each of the W workers of a ring computes in each step, by closed formulas.

The mask is a band: with i and j for the positions of query and key, a pair is visible iff
``lowest <= i - j <= highest``. For a causal mask, lowest is 0; a window of L positions to the left and R to the right
has the bounds -R and L. Two facts lead to the formulas.

1. **Pairs of two intervals.** Take n queries and n keys at equal distances, and number both from 0 to n - 1. Let F(x)
   be the number of pairs (query s, key t) with s - t <= x, and T(u) = u (u + 1) / 2. Then F(x) = T(n + x) for
   -n <= x < 0, and F(x) = n*n - T(n - 1 - x) for 0 <= x < n. The number of visible pairs is a difference of two values
   of F.
2. **Pairs of two workers.** Each worker holds n tokens. Take query s of worker a and key t of worker b. In the
   contiguous layout, worker a holds n consecutive tokens, and i - j = (a - b) n + s - t. In the striped layout, it
   holds every W-th token, and i - j = (s - t) W + a - b. In both layouts the count depends only on a - b. In the zigzag
   layout, worker a holds the chunks a and 2W - 1 - a, of n/2 tokens each. The queries of a and the keys of b then form
   four pairs of chunks, whose chunk numbers differ by a - b, b - a, 2W - 1 - (a + b) and -(2W - 1 - (a + b)). Hence for
   all three layouts pairs(a, b) = near[a - b] + far[2W - 1 - a - b], where ``far`` is 0 except in zigzag.

In step number t of a ring, worker r computes with the tokens of worker (r - t) mod W. The difference of the two worker
numbers is t for the W - t workers with r >= t, and t - W for the other t workers. In one step, ``near`` therefore takes
two values, and ``far`` takes every second entry of two intervals. ``far`` never increases with its index, because the
band contains 0. The maximum, the minimum and the sum over workers follow from the ends of these intervals and from
prefix sums, in O(1) operations for a step and O(W) in all.

Sources: contiguous ring, Liu et al., https://arxiv.org/abs/2310.01889; striped, Brandon et al.,
https://arxiv.org/abs/2311.09431, section 3; zigzag, Llama 3, https://arxiv.org/abs/2407.21783, section
3.3.2, and https://github.com/zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Band:
    """A mask by position: visible iff ``lowest <= i - j <= highest``, with i the query's position and j the key's.

    ``lowest <= 0 <= highest``. The bound of an unlimited side is the length of the sequence, with its sign.
    """

    lowest: int
    highest: int


def band(length: int, causal: bool, window: tuple[int | None, int | None] | None) -> Band:
    """Return the band of a mask over ``length`` positions (rules MASK-1, MASK-2).

    >>> band(16, True, None), band(16, False, (3, 1))
    (Band(lowest=0, highest=16), Band(lowest=-1, highest=3))
    """
    left, right = (None, None) if window is None else window
    lowest = -length if right is None else -min(right, length)
    highest = length if left is None else min(left, length)
    return Band(0 if causal else lowest, highest)


def triangle(u: Integers) -> Integers:
    """Return T(u) = 1 + 2 + ... + u."""
    return u * (u + 1) // 2


def below(n: int, x: Integers) -> Integers:
    """Return F(x), the number of pairs (s, t) of numbers from 0 to n - 1 with s - t <= x.

    >>> below(3, np.array([-3, -1, 0, 2])).tolist()
    [0, 3, 6, 9]
    """
    u = np.clip(x, -n, n - 1)
    return np.where(
        u < 0, triangle(n + np.minimum(u, 0)), n * n - triangle(n - 1 - np.maximum(u, 0))
    )


def runs(n: int, distance: Integers, mask: Band) -> Integers:
    """Count the visible pairs of n consecutive queries and n consecutive keys.

    The first key is ``distance`` positions before the first query.
    """
    return below(n, mask.highest - distance) - below(n, mask.lowest - distance - 1)


@dataclass(frozen=True)
class Blocks:
    """The number of visible pairs of worker a's queries and worker b's keys, for one head, as two tables.

    The number is ``near[a - b + W - 1] + far[2W - 1 - a - b]``. ``near`` is int64 [2W - 1]. ``far`` is int64 [2W]; its
    entry 0 is unused and 0.
    """

    workers: int
    near: Integers
    far: Integers

    def pairs(self, a: Integers, b: Integers) -> Integers:
        """Return the number of visible pairs of worker a's queries and worker b's keys, int64 in the shape of ``a``."""
        total: Integers = (
            self.near[a - b + self.workers - 1] + self.far[2 * self.workers - 1 - a - b]
        )
        return total


def blocks(layout: str, workers: int, n: int, mask: Band) -> Blocks:
    """Return the tables for a layout ('contiguous', 'striped', 'zigzag') with n tokens on each worker.

    >>> blocks("striped", 4, 8, Band(0, 32)).pairs(np.array([0, 1]), np.array([1, 0])).tolist()
    [28, 36]
    """
    apart = np.arange(-(workers - 1), workers, dtype=np.int64)
    none = np.zeros(2 * workers, dtype=np.int64)
    if layout == "contiguous":
        return Blocks(workers, runs(n, apart * n, mask), none)
    if layout == "striped":
        most, least = (mask.highest - apart) // workers, -((apart - mask.lowest) // workers)
        return Blocks(workers, below(n, most) - below(n, least - 1), none)
    chunk = n // 2
    near = runs(chunk, apart * chunk, mask) + runs(chunk, -apart * chunk, mask)
    across = np.arange(2 * workers, dtype=np.int64) * chunk
    far = runs(chunk, across, mask) + runs(chunk, -across, mask)
    far[0] = 0
    return Blocks(workers, near, far)


@dataclass(frozen=True)
class StepPairs:
    """The number of visible pairs of one head in each step, int64 [steps].

    ``most``: pairs of the busiest worker. ``least``: pairs of the least busy worker. ``total``: pairs of all workers.
    """

    most: Integers
    least: Integers
    total: Integers


def step_pairs(form: Blocks, moves: str) -> StepPairs:
    """Count the visible pairs in the W steps of a ring; ``moves`` says what travels, 'keys' or 'queries' (RING-1).

    >>> counted = step_pairs(blocks("contiguous", 4, 6, Band(0, 24)), "keys")
    >>> counted.most.tolist(), counted.least.tolist(), counted.total.tolist()
    ([21, 36, 36, 36], [21, 0, 0, 0], [84, 108, 72, 36])
    """
    workers = form.workers
    sign = 1 if moves == "keys" else -1
    step = np.arange(workers, dtype=np.int64)
    middle = workers - 1
    ahead = form.near[middle + sign * step]  # r >= t: r - visitor = t
    behind = np.concatenate(
        (form.near[middle : middle + 1], form.near[middle + sign * (step[1:] - workers)])
    )
    ends = np.array([form.far[1 + step], form.far[2 * workers - 1 - step]])
    low = np.where(step > 0, (workers + 1 - step) % (2 * workers), 1)
    other = np.array([form.far[low], form.far[workers - 1 + step]])
    some = step > 0  # in step 0 every worker computes with its own block
    most = np.where(some, np.maximum(ahead + ends[0], behind + other[0]), ahead + ends[0])
    least = np.where(some, np.minimum(ahead + ends[1], behind + other[1]), ahead + ends[1])
    every_second = every_second_sum(form.far)
    before = np.where(some, every_second[step - 1], 0)
    total = (workers - step) * ahead + every_second[2 * workers - 1 - step] - before
    rest = step * behind + every_second[workers - 1 + step] - every_second[workers - 1 - step]
    return StepPairs(most, least, total + np.where(some, rest, 0))


def every_second_sum(x: Integers) -> Integers:
    """Return y with y[s] = x[s] + x[s - 2] + x[s - 4] + ...

    >>> every_second_sum(np.array([1, 2, 3, 4])).tolist()
    [1, 2, 4, 6]
    """
    y = x.copy()
    y[0::2] = np.cumsum(x[0::2])
    y[1::2] = np.cumsum(x[1::2])
    return y


def worker_pairs(form: Blocks, moves: str) -> Integers:
    """Count the pairs of one head that each worker computes in a whole pass, int64 [W].

    >>> worker_pairs(blocks("contiguous", 4, 6, Band(0, 24)), "keys").tolist()
    [21, 57, 93, 129]
    """
    workers = form.workers
    worker = np.arange(workers, dtype=np.int64)
    near = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(form.near)))
    far = np.cumsum(form.far)
    # Differences r - visitor cover W consecutive values; for an owner of keys, their negatives.
    first = worker if moves == "keys" else workers - 1 - worker
    across = far[2 * workers - 1 - worker] - far[workers - 1 - worker]
    total: Integers = near[first + workers] - near[first] + across
    return total
