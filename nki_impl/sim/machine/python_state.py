"""The Python state that a function can change: the variables of enclosing functions and of its module.

>>> total, seen = 0, []
>>> def body(i):
...     seen.append(i)
>>> before = state_of(body)
>>> difference(before, state_of(body)) is None
True
>>> body(1)
>>> difference(before, state_of(body))
'seen'
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

State = dict[tuple[int, str], list[Any]]
_EMPTY = object()
_PLAIN = (bool, int, float, complex, str, bytes)


def state_of(function: Callable[..., Any]) -> State:
    """Return the variables that ``function`` and the functions in these variables can reach, with their contents.

    Lists, dicts and sets are copied one level deep. Attributes of objects are not included.
    """
    state: State = {}
    pending, known = [function], set()
    while pending:
        plain = _unwrapped(pending.pop())
        if plain is None or id(plain) in known:
            continue
        known.add(id(plain))
        for owner, name, value in _variables(plain):
            state[owner, name] = _contents(value)
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                pending.append(value)
    return state


def difference(before: State, after: State) -> str | None:
    """Return the name of a variable that is not the same in both states, or None."""
    for key, old in before.items():
        new = after.get(key)
        if new is not None and not (len(old) == len(new) and all(map(_same, old, new))):
            return key[1]
    return None


def _unwrapped(function: Any) -> FunctionType | None:
    while isinstance(function, (MethodType, functools.partial)):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    return function if isinstance(function, FunctionType) else None


def _variables(function: FunctionType) -> Iterator[tuple[int, str, Any]]:
    """Yield (owner, name, value) of the variables of enclosing functions and of the module that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield id(cell), name, cell.cell_contents
        except ValueError:
            yield id(cell), name, _EMPTY
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield id(function.__globals__), name, function.__globals__[name]


def _contents(value: Any) -> list[Any]:
    """Return the value, followed by its elements if it is a list, dict or set."""
    if type(value) is dict:
        return [value, *value.keys(), *value.values()]
    if type(value) in (list, set):
        return [value, *value]
    return [value]


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)
