"""Say where a result is wrong: in which tensors, workers, heads and rows, and which block is missing.

This needs no list of known bugs. An element is wrong if its distance from the truth (the correct result) exceeds
:data:`FAR` times its predicted rounding noise. A block is all pairs of one worker's queries and one worker's keys. The
truth determines what each block contributes to a result, and so the error that arises if the block is missing or
counted twice. A block is named if this error equals the error of a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.problem import Geometry
from ringspec.conformance.judge.noise_inputs import Question
from ringspec.spec.dense_backward import over_group

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]
FAR = 8.0
EXPLAINED = 0.98  # part of the error's sum of squares that a block must explain
KEY_TENSORS = ("dk", "dv")
ORDER = ("o", "lse", "dq", "dk", "dv")
# If a block is the whole result of a worker, this fault gives the same error.
OR_ELSE = {
    "is missing from": ", or the whole result is missing",
    "is counted twice in": ", or a factor 1/2 is missing: the whole result is twice the expected one",
}


@dataclass(frozen=True)
class Wrong:
    """The wrong rows of one tensor: ``rows`` bool [B, H, S]; ``owner`` [S], the worker of each row."""

    name: str
    rows: Booleans
    owner: NDArray[np.int64]


def localise(
    question: Question,
    geometry: Geometry,
    got: Mapping[str, Array],
    sd: Mapping[str, Array],
    failing: Collection[str] = ORDER,
) -> list[str]:
    """Describe in sentences where the results ``got`` (global, float64) differ from the truth by more than noise.

    ``question``: the problem with its correct results. ``geometry``: the owner of each token, and the order in which
    blocks are added. ``sd``: predicted standard deviation of each element's error, by tensor. ``failing``: the tensors
    that failed the case, by default all. Other tensors are never called wrong, however far they are from the truth.
    """
    found = [
        Wrong(name, wrong_rows(got[name], question.truth[name], sd[name]), owner_of(name, geometry))
        for name in ORDER
        if name in got
    ]
    wrong = [one for one in found if one.name in failing and one.rows.any()]
    if not wrong:
        return []
    named = [one.name for one in wrong]
    right = [one.name for one in found if one.name not in named]
    lines = [f"wrong: {', '.join(named)}; right: {', '.join(right) or 'none'}"]
    lines += [f"{one.name} holds NaN" for one in wrong if np.isnan(got[one.name]).any()]
    lines += [described(one, geometry) for one in wrong]
    for one in wrong:
        lines += blocks_that_count_wrongly(one.name, question, geometry, got[one.name])
    return lines


def owner_of(name: str, geometry: Geometry) -> NDArray[np.int64]:
    return geometry.owner_k if name in KEY_TENSORS else geometry.owner_q


def wrong_rows(got: Array, truth: Array, sd: Array) -> Booleans:
    """Return bool [B, H, S]: True for rows with a wrong element.

    An element is also wrong if it is NaN or infinite where the truth is finite.
    """
    with np.errstate(invalid="ignore"):
        off = ~((got == truth) | (np.abs(got - truth) <= FAR * sd))
    return off.any(axis=3) if off.ndim == 4 else off


def described(wrong: Wrong, geometry: Geometry) -> str:
    """Say which batches, heads, workers and rows of one tensor are wrong.

    >>> rows = np.zeros((1, 2, 8), dtype=bool); rows[0, 1, 6:] = True
    >>> owner = np.repeat([0, 1], 4)
    >>> described(Wrong("dq", rows, owner), Geometry.ring(owner, owner, 2))
    'dq: 2 of 16 rows; head 1 of 2; worker 1 of 2; rows 2 to 3 of the 4 of each worker'
    """
    rows = wrong.rows
    parts = [f"{int(rows.sum())} of {rows.size} rows"]
    batches, heads, tokens = (rows.any(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    parts += few("batch", np.asarray(batches)) + few("head", np.asarray(heads))
    tokens = np.asarray(tokens)
    workers = np.array([tokens[wrong.owner == r].any() for r in range(geometry.workers)])
    parts += few("worker", workers)
    parts += within_blocks(wrong, tokens, geometry.workers)
    return f"{wrong.name}: " + "; ".join(parts)


def few(what: str, which: Booleans) -> list[str]:
    """Return a list with 'head 1 of 4' or 'heads 1, 3 of 4'; an empty list if ``which`` is True everywhere.

    >>> few("head", np.array([False, True, False, True])), few("head", np.array([True, True]))
    (['heads 1, 3 of 4'], [])
    """
    index = np.flatnonzero(which)
    if len(index) == len(which):
        return []
    listed = ", ".join(map(str, index))
    return [f"{what}{'' if len(index) == 1 else 's'} {listed} of {len(which)}"]


def within_blocks(wrong: Wrong, tokens: Booleans, workers: int) -> list[str]:
    """Say which range of rows is wrong in each worker's block.

    Nothing is said if the range differs between workers, or if it is the whole block.
    """
    ranges = set()
    for r in range(workers):
        mine = np.flatnonzero(wrong.owner == r)
        at = np.flatnonzero(tokens[mine])
        if at.size:
            ranges.add((int(at[0]), int(at[-1]), len(mine)))
    if len(ranges) != 1:
        return []
    [(first, last, count)] = ranges
    return (
        []
        if (first, last) == (0, count - 1)
        else [f"rows {first} to {last} of the {count} of each worker"]
    )


def blocks_that_count_wrongly(
    name: str, question: Question, geometry: Geometry, got: Array
) -> Iterator[str]:
    """Yield a sentence for each block that explains a worker's error, by being missing or counted twice.

    If a missing or doubled result of the whole worker would explain the error as well, the sentence says so.
    """
    if name == "lse":
        return
    shares = shares_of(name, question, geometry)
    owner = owner_of(name, geometry)
    error = got - question.truth[name]
    for r in range(geometry.workers):
        mine = error[:, :, owner == r]
        size = float((mine * mine).sum()) if np.isfinite(mine).all() else 0.0
        if not size > 0:
            continue
        truth = question.truth[name][:, :, owner == r]
        whole = {"is missing from": -truth, "is counted twice in": truth}
        for other, missing, twice in shares[r]:
            for effect, words in ((missing, "is missing from"), (twice, "is counted twice in")):
                if not explains(effect, mine):
                    continue
                whose = "queries" if name in KEY_TENSORS else "keys"
                step = step_of(name, geometry, r, other)
                line = f"the block of {whose} of worker {other} (step {step}) {words} {name} of worker {r}"
                yield line + (OR_ELSE[words] if explains(whole[words], mine) else "")


def explains(effect: Array, error: Array) -> bool:
    """Tell whether ``effect`` equals ``error`` up to a small part of the error's sum of squares."""
    rest = error - effect
    return float((rest * rest).sum()) <= (1 - EXPLAINED) * float((error * error).sum())


def step_of(name: str, geometry: Geometry, worker: int, other: int) -> int:
    """Return the ring step in which the block of worker ``other`` is added to the tensor of a worker; -1 if never."""
    order = {"o": geometry.order, "dq": geometry.order_dq}.get(name, geometry.order_dkv)
    at = np.flatnonzero(order[worker] == other)
    return int(at[0]) if at.size else -1


def shares_of(
    name: str, question: Question, geometry: Geometry
) -> list[list[tuple[int, Array, Array]]]:
    """Return for each worker a list of (other, missing, twice), with an entry for each block.

    ``other``: the worker that owns the keys of the block, or its queries if the result is dk or dv. ``missing`` and
    ``twice``: the error if the block is missing, and if it is counted twice.
    """
    shares = linear_shares(name, question)
    owner, others = owner_of(name, geometry), other_side(name, geometry)
    found: list[list[tuple[int, Array, Array]]] = []
    for r in range(geometry.workers):
        rows = np.flatnonzero(owner == r)
        mine = []
        for b in range(geometry.workers):
            columns = np.flatnonzero(others == b)
            share, mass = shares(rows, columns)
            if name == "o":
                truth = question.truth["o"][:, :, rows]
                whole = share - mass * truth
                with np.errstate(divide="ignore", invalid="ignore"):
                    missing = np.where(mass < 1, -whole / (1 - mass), -truth)
                mine.append((b, missing, whole / (1 + mass)))
            else:
                mine.append((b, -share, share))
        found.append(mine)
    return found


def other_side(name: str, geometry: Geometry) -> NDArray[np.int64]:
    return geometry.owner_q if name in KEY_TENSORS else geometry.owner_k


class linear_shares:
    """Computes what the query-key pairs of some rows and columns contribute to a result.

    Call an instance with (rows, columns): indices of queries and keys for o and dq, of keys and queries for dk and dv.
    It returns the contribution and, for o, the sum of the weights in each row; for other results the sum is 0.
    """

    def __init__(self, name: str, question: Question) -> None:
        self.name, self.at = name, question.attention
        at, group = self.at, self.at.group
        self.k, self.v = (np.repeat(x, group, axis=1) for x in (at.k, at.v))
        self.kept = at.p if at.keep is None else at.p * at.keep
        self.dz: Array | None = None
        if name in ("dq", "dk") and at.dy is not None:
            dp = at.dy @ self.v.swapaxes(2, 3)
            dp = dp if at.keep is None else dp * at.keep
            delta = (at.dy * at.o).sum(axis=3) - (0.0 if at.dlse is None else at.dlse)
            self.dz = at.p * (dp - delta[..., None])
            if at.tanh is not None:
                self.dz = self.dz * (1 - at.tanh**2)

    def __call__(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> tuple[Array, Array | float]:
        at = self.at
        if self.name == "o":
            p = self.kept[:, :, rows][..., columns]
            weight = at.p[:, :, rows][..., columns].sum(axis=3, keepdims=True)
            return p @ self.v[:, :, columns], weight
        if self.name == "dv":
            assert at.dy is not None
            x = self.kept[:, :, columns][..., rows].swapaxes(2, 3) @ at.dy[:, :, columns]
            return over_group(x, at.group), 0.0
        assert self.dz is not None
        if self.name == "dq":
            return at.scale * self.dz[:, :, rows][..., columns] @ self.k[:, :, columns], 0.0
        x = self.dz[:, :, columns][..., rows].swapaxes(2, 3) @ at.q[:, :, columns]
        return at.scale * over_group(x, at.group), 0.0
