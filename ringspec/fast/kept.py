"""A cache of values derived from immutable arrays.

In a ring of W workers, the queries of each worker are used with W blocks of keys, and its keys with W blocks of
queries. Without the cache, every step converted its inputs and computed norms and extra columns again, which took a
tenth of the time of a float32 ring with W = 8.

Values are cached only for arrays in immutable memory, such as the inputs of a ring's worker
(``rings.lockstep.read_only``). A read-only flag is not enough: the array may be a view of a writable array.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Value = TypeVar("Value")
Made = tuple[tuple["weakref.ref[NDArray[Any]]", ...], Any]


def is_immutable(x: NDArray[Any]) -> bool:
    """Return whether x is, directly or through other views, a view of a bytes object, which is immutable.

    >>> import numpy as np
    >>> is_immutable(np.frombuffer(bytes(8))[:1]), is_immutable(np.broadcast_to(np.ones(1), 2))
    (True, False)
    """
    base: object = x
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, bytes)


class Kept:
    """A cache of values that are derived from arrays; a value is dropped when one of its arrays is deleted.

    ``patterns`` holds the hidden pairs of tiles, by the key that ``job.likeness`` returns.

    Every operation on the dict ``made`` is a single call, so threads need no lock. Two threads that need a value at the
    same time may both compute it, with the same result.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Made] = {}
        self.patterns: dict[tuple[Any, ...], Any] = {}

    def get(self, arrays: tuple[NDArray[Any], ...], key: Any, make: Callable[[], Value]) -> Value:
        """Return ``make()``, or the earlier result for the same immutable arrays and key.

        The value must contain neither the arrays nor views of them, because these would keep the arrays alive.
        """
        if not all(map(is_immutable, arrays)):
            return make()
        at = (key, *map(id, arrays))
        found = self.made.get(at)
        # The id may belong to an array that no longer exists.
        if found is not None and all(ref() is x for ref, x in zip(found[0], arrays, strict=True)):
            return found[1]
        value = make()
        # A weak reference calls this only while its own entry exists, so a newer entry is safe. It is pop(at, reference)
        # rather than a Python function, because an interrupt that arrives in a Python callback would be lost.
        forget = functools.partial(self.made.pop, at)
        self.made[at] = tuple(weakref.ref(x, forget) for x in arrays), value
        return value
