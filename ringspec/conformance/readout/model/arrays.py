"""Small operations on arrays over pairs and rows that several files of the model need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ringspec.conformance.readout.faults.merges import State
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift


def chosen(number: Integers, names: Sequence[str], of: Mapping[str, Callable[[], Array]]) -> Array:
    """Take each element from one of several arrays; ``number`` selects the array's name from ``names``.

    ``of``: functions that compute the arrays. Only those that are selected somewhere are called, and "right".
    """
    if number.size == 1:
        return of[names[int(number.flat[0])]]()
    found = of["right"]()
    for x in np.unique(number[number != 0]):
        found = np.where(number == x, of[names[x]](), found)
    return np.asarray(found)


def where_changed(changed: Booleans, other: State, right: State) -> State:
    """Take each element from ``other`` where ``changed``, else from ``right``."""
    return (
        np.where(changed, other[0], right[0]),
        np.where(changed, other[1], right[1]),
        np.where(changed, other[2], right[2]),
    )


def of_workers(x: Integers) -> Integers:
    """Rearrange [a, 1, h, i, 1] to [a, h, i]."""
    return x[:, 0, :, :, 0]


def numbers_of_blocks(model: Model, x: Integers) -> Integers:
    """Broadcast the numbers of a choice that each query makes for each block to [a, b, h, i]."""
    return np.broadcast_to(x, (*model.shape[:4], 1))[..., 0]


def log_sum(x: Array) -> Array:
    """Return the log-sum-exp along the last axis; -inf if all elements are -inf."""
    return np.asarray(np.logaddexp.reduce(x, axis=-1))


def nonzero(l: Array) -> Array:
    return np.where(l == 0, 1.0, l)


def log_of(m: Array, l: Array) -> Array:
    """Return m + log l; -inf where l is 0."""
    return np.where(l == 0, -np.inf, finite_shift(m) + np.log(np.abs(nonzero(l))))


def of_tokens(x: Array, rows: Integers) -> Array:
    """Return ``x`` [a, b, h, i, j] with other rows; ``rows`` [a, h, i] has the index of the row to take."""
    return (
        x.swapaxes(1, 2)
        .swapaxes(2, 3)
        .reshape(rows.size, x.shape[1], -1)[rows]
        .transpose(0, 3, 1, 2, 4)
    )


def of_rows(x: Array, rows: Integers) -> Array:
    """Reorder the rows (a, i) of [a, b, h, i, j]; ``rows`` has the numbers of the rows in their new order."""
    a, b, h, n, m = x.shape
    flat = x.transpose(0, 3, 1, 2, 4).reshape(a * n, b, h, m)[rows]
    return flat.reshape(a, n, b, h, m).transpose(0, 2, 3, 1, 4)


def placed(x: Array, workers: Integers, empty: float) -> Array:
    """Return what the workers hold after each has given ``x`` [a, ...] to one of ``workers``; ``empty`` without any."""
    there = np.full_like(x, empty)
    there[workers] = x
    return there
