"""Values made of arrays that nobody can change: a ring shows the same ones to a block after block.

A worker's queries meet W blocks of keys, and its keys W blocks of queries. Without this each block of a
float32 ring made its operands anew: conversions, norms and extra columns took a tenth of a ring of W = 8.

Only arrays in immutable memory count, as the inputs of a ring's worker are (``rings.lockstep.read_only``). That an array is
read-only says nothing: it may be a view of one that is written to.
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
    """Whether the memory of x belongs, through all its bases, to a bytes object, which nothing can change.

    >>> import numpy as np
    >>> is_immutable(np.frombuffer(bytes(8))[:1]), is_immutable(np.broadcast_to(np.ones(1), 2))
    (True, False)
    """
    base: object = x
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, bytes)


class Kept:
    """Values by the arrays that they were made of; each goes when one of its arrays does.

    ``patterns`` of tiles are made of positions: see ``job.likeness``.

    Every step on ``made`` is one call, so that threads need no lock: two that ask at once may both make
    the value, which is the same.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Made] = {}
        self.patterns: dict[tuple[Any, ...], Any] = {}

    def get(self, arrays: tuple[NDArray[Any], ...], key: Any, make: Callable[[], Value]) -> Value:
        """``make()``, or what it gave before for the same immutable arrays and key.

        The value must hold none of the arrays nor a view of one: it would keep them.
        """
        if not all(map(is_immutable, arrays)):
            return make()
        at = (key, *map(id, arrays))
        found = self.made.get(at)
        # Another array may have the id of one that is gone.
        if found is not None and all(ref() is x for ref, x in zip(found[0], arrays, strict=True)):
            return found[1]
        value = make()
        # An entry holds the references that call this, so an entry that has taken its place is safe. It is
        # pop(at, reference): a function in Python would swallow an interrupt that arrives in it.
        forget = functools.partial(self.made.pop, at)
        self.made[at] = tuple(weakref.ref(x, forget) for x in arrays), value
        return value
