"""Docstrings of public functions and classes, as far as a program can judge them.

Each is held to the rules below. Whether a doctest would help, and whether what it says is true, a program
cannot see; the doctests are run with the tests.

``docstring``   there is one
``parameters``  it names every parameter or field; where it refers to ``Options``, those of Options
                need no words here
``shape``       where arrays come in or go out, it gives a shape in brackets, or says that any will do
``dtype``       where arrays come in or go out, it or its module names a dtype or a number format
``errors``      an error class that the function itself raises is named
``source``      where arrays come in or go out, it or its module names an address, a module of the specification, a
                rule, a standard, or a page of docs/
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numpy.typing import NDArray
from project.public import described

from ringspec.problem.options import Options

PUBLIC = described()
ARRAYS = re.compile(r"\b(Array|ArrayLike|NDArray|ndarray|PerWorker|Integers|Booleans|Named)\b")
SHAPE = re.compile(r"\[[^\[\]]*\]|\bany shape\b|\bsame shape\b|\bof the shapes? of\b")
DTYPE = re.compile(r"\b(b?float\d*\w*|u?int\d*|bool\w*|dtypes?|integers?|formats?)\b")
SOURCE = re.compile(r"https?://\S|\bringspec\.spec\.\w|\b[A-Z]{2,}-\d+\b|\bIEEE\b|\bdocs/")


def functions_of(value: object) -> Iterator[tuple[str, Callable[..., object], str]]:
    """(suffix, function, docstring that it may lean on) of an object: itself, or its methods."""
    if inspect.isfunction(value):
        yield "", value, ""
        return
    own = inspect.getdoc(value) or ""
    for name, member in vars(value).items():
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        if member.__module__ == value.__module__:
            yield f".{name}", member, own


def without_examples(text: str) -> str:
    """A docstring without its doctests, whose brackets are lists and not shapes."""
    return re.sub(r"(?ms)^\s*>>>.*?(?:\n\s*\n|\Z)", "", text).rstrip()


def named(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """All but self and cls, and the shared keywords where the docstring says that Options has them."""
    shared = Options.__annotations__ if named(inspect.getdoc(function) or "", "Options") else ()
    given = inspect.signature(function).parameters.values()
    return [p for p in given if p.name not in ("self", "cls", *shared)]


def raised_by(function: Callable[..., object]) -> set[str]:
    """Names of the classes that a function's own statements raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
    classes = (call.func if isinstance(call, ast.Call) else call for call in raised)
    names = (
        one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in classes
    )
    return {name for name in names if name[:1].isupper()}


def has_arrays(value: object) -> bool:
    """Whether arrays are among the fields, parameters and results of a public object."""
    own = annotations_of(value) if inspect.isclass(value) else ""
    return bool(ARRAYS.search(own + " ".join(annotations_of(f) for _, f, _ in functions_of(value))))


def annotations_of(value: object) -> str:
    return " ".join(str(one) for one in getattr(value, "__annotations__", {}).values())


def broken_by(value: object, module: str | None = None) -> Iterator[tuple[str, str]]:
    """(rule, what is missing) of a public object; ``module`` in place of its module's docstring."""
    if module is None:
        module = sys.modules[value.__module__].__doc__ or ""
    text = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    if not text or text.startswith(f"{value.__name__}("):
        yield "docstring", "has none"
        return
    if has_arrays(value) and not SOURCE.search(text + module):
        yield "source", "names no source, and neither does its module"
    if inspect.isclass(value):
        yield from broken_by_class(value, text, module)
    for suffix, function, own in functions_of(value):
        for rule, missing in broken_by_function(function, own, module):
            yield rule, f"{suffix} {missing}".strip()


def broken_by_class(value: type, text: str, module: str) -> Iterator[tuple[str, str]]:
    fields = [name for name in getattr(value, "__annotations__", {}) if not name.startswith("_")]
    for name in fields:
        if not named(text, name):
            yield "parameters", f"field {name} is not named"
    if ARRAYS.search(annotations_of(value)):
        if not SHAPE.search(without_examples(text)):
            yield "shape", "has arrays and no shape"
        if not DTYPE.search(without_examples(text) + module):
            yield "dtype", "has arrays and no dtype"
    start = vars(value).get("__init__")
    if inspect.isfunction(start) and start.__module__ == value.__module__ and not fields:
        for parameter in parameters_of(start):
            if not named(text, parameter.name):
                yield "parameters", f"parameter {parameter.name} is not named"


def broken_by_function(
    function: Callable[..., object], own: str, module: str
) -> Iterator[tuple[str, str]]:
    text = inspect.getdoc(function) or ""
    if not text:
        if function.__name__ not in own:
            yield "docstring", "has none"
        text = own
    for parameter in parameters_of(function):
        if not named(text, parameter.name) and not named(own, parameter.name):
            yield "parameters", f"parameter {parameter.name} is not named"
    plain = without_examples(text)
    if ARRAYS.search(annotations_of(function)):
        if not SHAPE.search(plain + without_examples(own)):
            yield "shape", "has arrays and no shape"
        if not DTYPE.search(plain + without_examples(own) + module):
            yield "dtype", "has arrays and no dtype"
    for name in sorted(raised_by(function)):
        if not named(text + own, name):
            yield "errors", f"raises {name} and does not say so"


@pytest.mark.parametrize("module", sorted({value.__module__ for value in PUBLIC.values()}))
def test_the_docstrings_of_a_module_say_what_a_caller_needs(module):
    broken = [
        f"{name}: {rule}: {missing}"
        for name, value in PUBLIC.items()
        if value.__module__ == module
        for rule, missing in broken_by(value)
    ]
    assert broken == []


def without_a_docstring(x):
    raise OSError


def silent_about_x(y: NDArray[Any], x: int) -> NDArray[Any]:
    """Arrays of a kind. See there."""
    if x:
        raise ValueError(x)
    return y


def complete(y: NDArray[Any], x: int) -> NDArray[Any]:
    """y [n] float64 times ``x``; ValueError where x is 0. Source: ringspec.spec.definition."""
    if not x:
        raise ValueError(x)
    return y


class Partly:
    """Holds one thing, ``told``."""

    told: int
    untold: NDArray[Any]


def rules_broken(value):
    found = {}
    for rule, missing in broken_by(value, module=""):
        found.setdefault(rule, []).append(missing)
    return found


def test_a_docstring_that_says_nothing_breaks_each_rule():
    assert rules_broken(without_a_docstring) == {"docstring": ["has none"]}
    assert set(rules_broken(silent_about_x)) == {"parameters", "shape", "dtype", "errors", "source"}
    assert rules_broken(complete) == {}


def test_a_class_names_its_fields_and_their_shapes():
    broken = rules_broken(Partly)
    assert broken["parameters"] == ["field untold is not named"]
    assert {"shape", "dtype"} <= set(broken)


def test_the_shape_in_a_doctest_is_no_shape():
    assert SHAPE.search("x of the worker\n\n>>> f([1])\n[2]\n")
    assert not SHAPE.search(without_examples("x of the worker\n\n>>> f([1])\n[2]\n"))
