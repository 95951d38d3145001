"""What was made of arrays that nobody can write to: a ring shows the same ones to a block after block.

A worker's queries meet W blocks of keys, and its keys W blocks of queries. Without this each block of a
float32 ring made its operands anew: conversions, norms and extra columns took a tenth of a ring of W = 8.

Only read-only arrays count, such as the inputs of a worker: of others nobody knows whether they are still what
they were.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

Value = TypeVar("Value")
Made = tuple[tuple["weakref.ref[NDArray[Any]]", ...], Any]


class Kept:
    """Values by the arrays that they were made of; each goes when one of its arrays does. And ``patterns`` of
    tiles, which are made of positions: see ``job.likeness``.

    Every step on ``made`` is one call, so that threads need no lock: two that ask at once may both make
    the value, which is the same.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Made] = {}
        self.patterns: dict[tuple[Any, ...], Any] = {}

    def get(self, arrays: tuple[NDArray[Any], ...], key: Any, make: Callable[[], Value]) -> Value:
        """``make()``, or what it gave before for the same read-only arrays and key.

        The value must hold none of the arrays nor a view of one: it would keep them.
        """
        if any(x.flags.writeable for x in arrays):
            return make()
        at = (key, *map(id, arrays))
        found = self.made.get(at)
        # Another array may have the id of one that is gone.
        if found is not None and all(ref() is x for ref, x in zip(found[0], arrays, strict=True)):
            return found[1]
        value = make()
        forget = functools.partial(self.forget, at)
        self.made[at] = tuple(weakref.ref(x, forget) for x in arrays), value
        return value

    def forget(self, at: tuple[Any, ...], gone: object) -> None:
        found = self.made.get(at)
        if found is not None and any(ref is gone for ref in found[0]):
            self.made.pop(at, None)
