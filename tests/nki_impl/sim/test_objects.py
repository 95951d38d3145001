"""Classes that kernels define: the NKI language guide gives their default ``__init__``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from nki_impl.sim import language as nl
from nki_impl.sim.errors import SimulatorWarning


@dataclass
class Sizes(nl.NKIObject):
    T: int
    _rows: int
    limit = 3
    kind: ClassVar[str] = "sizes"
    K: int | None = 7


@dataclass
class Wider(Sizes):
    H: int


class Plain(nl.NKIObject):
    x: int
    y: int = 1


class Own(nl.NKIObject):
    x: int

    def __init__(self, value: int) -> None:
        self.value = value


def made(make: Any, **expected: Any) -> None:
    one = make()
    assert {name: getattr(one, name) for name in expected} == expected


def test_a_field_that_is_not_passed_is_none_with_a_warning_that_names_it() -> None:
    with pytest.warns(SimulatorWarning, match=r"Sizes: _rows not passed.*test_objects.py"):
        made(lambda: Sizes(T=2), T=2, _rows=None, limit=3, K=7)
    with pytest.warns(SimulatorWarning, match="Sizes: T, _rows not passed"):
        made(Sizes, T=None, _rows=None)
    with pytest.warns(SimulatorWarning, match="Wider: _rows, H not passed"):
        made(lambda: Wider(1), T=1, _rows=None, H=None)
    with pytest.warns(SimulatorWarning, match="Plain: x not passed"):
        made(Plain, x=None, y=1)


def test_objects_with_all_fields_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(lambda: Sizes(1, 2), T=1, _rows=2, limit=3, K=7)
        made(lambda: Sizes(T=1, _rows=2, limit=4), T=1, _rows=2, limit=4)
        made(lambda: Wider(1, 2, H=5), T=1, _rows=2, H=5)
        made(lambda: Plain(x=3), x=3, y=1)
        made(lambda: Own(3), value=3)


def test_an_unknown_field_and_a_missing_argument_of_an_own_init_are_errors() -> None:
    with pytest.raises(TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Sizes(T=1, other=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Own()  # type: ignore[call-arg]


def test_the_fields_of_a_dataclass_are_those_that_it_declares() -> None:
    assert {field.name for field in fields(Sizes)} == {"T", "_rows", "limit", "K"}
