"""Write down a function so that a program without ringspec can call it.

A function of an installed module is imported. A function of the file that defines the target is copied, together with
everything at the top level of this file that it uses. Annotations are not evaluated, so what only they use is left out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ringspec.conformance.target.provenance import LOADED
from ringspec.errors import OptionError, shown

OURS = "ringspec"
FIX = (
    "define the function at the top level of a module that does not import ringspec, and import it from there in the "
    "file of the target"
)


def refuse(got: str) -> NoReturn:
    raise OptionError("a function that a program without ringspec can call", got, FIX)


def place_of(function: str | Callable[..., Any]) -> str:
    """Return the place of a function: 'package.module:name', or 'path/file.py:name' for a file loaded by its path."""
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        refuse(f"{name or shown(function)}, which is not a function at the top level of a module")
    return f"{inspect.getsourcefile(function) if module.startswith(LOADED) else module}:{name}"


def standalone(place: str) -> list[str]:
    """Return the lines of a program that define the function at ``place``."""
    home, _, name = place.rpartition(":")
    if home.endswith(".py"):
        return copied(Path(home), name)
    if home.partition(".")[0] == OURS or not name.isidentifier():
        refuse(place)
    return [f"from {home} import {name}"]


def copied(path: Path, name: str) -> list[str]:
    """Return the source lines of a function in a file, and of all that it uses at the top level of this file."""
    text = path.read_text(encoding="utf-8")
    body = [one for one in ast.parse(text).body if not is_future(one)]
    needed, chosen = {name}, set()
    while True:
        added = {n for n, one in enumerate(body) if n not in chosen and needed & set(bound(one))}
        if not added:
            break
        chosen |= added
        needed |= {used for n in added for used in uses(body[n])}
    if not any(isinstance(body[n], ast.FunctionDef) and body[n].name == name for n in chosen):  # type: ignore[attr-defined]
        refuse(f"{name}, which is not a function at the top level of {path.name}")
    lines = text.splitlines()
    return [line for n in sorted(chosen) for line in statement(body[n], needed, lines)]


def is_future(one: ast.stmt) -> bool:
    return isinstance(one, ast.ImportFrom) and one.module == "__future__"


def statement(one: ast.stmt, needed: set[str], lines: list[str]) -> list[str]:
    """Return the lines of a statement; of an import, only the names that are needed."""
    if isinstance(one, ast.Import | ast.ImportFrom):
        kept = [alias for alias in one.names if imported(alias) in needed]
        check_import(one, kept)
        one.names = kept
        return [ast.unparse(one)]
    first = min([one.lineno, *(x.lineno for x in getattr(one, "decorator_list", []))])
    # An import in the body of a function runs when the function is called.
    for inner in ast.walk(one):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            check_import(inner, inner.names)
    found = lines[first - 1 : one.end_lineno]
    return ["", "", *found] if isinstance(one, ast.FunctionDef | ast.ClassDef) else found


def check_import(one: ast.Import | ast.ImportFrom, kept: list[ast.alias]) -> None:
    """Refuse an import of ringspec, and a relative import."""
    if isinstance(one, ast.ImportFrom):
        modules = ["." * one.level + (one.module or "")]
    else:
        modules = [alias.name for alias in kept]
    for module in modules:
        if module.partition(".")[0] in (OURS, ""):
            names = ", ".join(imported(alias) for alias in kept)
            refuse(f"a function that uses {names}, imported from {module}")


def imported(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def bound(one: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top level defines."""
    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield one.name
    elif isinstance(one, ast.Import | ast.ImportFrom):
        yield from map(imported, one.names)
    else:
        for inner in ast.walk(one):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                yield from bound(inner)


def uses(one: ast.AST) -> Iterator[str]:
    """Yield all names that occur in a statement, except in annotations."""
    if isinstance(one, ast.Name):
        yield one.id
    for name, value in ast.iter_fields(one):
        if name in ("annotation", "returns"):
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                yield from uses(inner)
