"""Load the target (the program under test) that a text on a command line names.

``package.module:object``   an attribute of a module; dots are allowed
``path/file.py:object``     an attribute of a file
``cmd:PROGRAM ARGUMENTS``   a program that speaks the protocol of ``adapters.command``
``dir:FOLDER``              calls with their results in files (``adapters.offline``)
``name``                    a name in the entry-point group ``ringspec.targets``

Loading a target runs its code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.offline import OfflineTarget
from ringspec.conformance.cases.model import PROFILES
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Target
from ringspec.conformance.target.provenance import LOADED
from ringspec.errors import OptionError, RingspecError, nearest, shown

__all__ = ["load_target"]

GROUP = "ringspec.targets"
# Each contains the cases of the previous one.
NESTED = ("smoke", "core", "full")
MOST_NAME = 200
ATTRIBUTES = "see the target protocol, ringspec.conformance.target.protocol.Target"
FIX = "write package.module:object, path/file.py:object, cmd:PROGRAM or dir:FOLDER"


def load_target(spec: str) -> Target:
    """Load the target that the text ``spec`` names; raise :class:`~ringspec.errors.OptionError` if there is none.

    A class or a function is called without arguments, and its result is the target.

    >>> load_target("ringspec.conformance.targets.reference:reference_bf16").name
    'reference-bf16'
    """
    if not isinstance(spec, str) or not spec.strip():
        raise OptionError("the name of a target", shown(spec), FIX)
    kind, colon, rest = spec.partition(":")
    if kind == "cmd" and colon:
        return CommandTarget(rest)
    if kind == "dir" and colon:
        return OfflineTarget(rest)
    return checked(made(found(spec), spec), spec)


def asked_of(
    spec: str, profile: str | None = None, only: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return profile and patterns of a run.

    These are the given ones, else those for which a ``dir:`` folder was written, else 'core' without patterns. Raises
    :class:`~ringspec.errors.OptionError` if the folder lacks cases of the profile.

    >>> asked_of("cmd:./ring"), asked_of("cmd:./ring", "smoke", ["ring/*"])
    (('core', ()), ('smoke', ('ring/*',)))
    """
    if not spec.startswith("dir:"):
        return profile or "core", tuple(only)
    folder = OfflineTarget(spec.removeprefix("dir:"))
    written = folder.profile if folder.profile in PROFILES else "core"
    if profile is None or profile == written:
        return written, tuple(only) or folder.only
    smaller = NESTED[: NESTED.index(written)] if written in NESTED else ()
    if profile not in smaller:
        raise OptionError(
            f"the profile {written}, for which the folder was written, or a smaller one",
            f"profile {profile}",
            f"leave it out, or write a folder with: ringspec cases write DIR --profile {profile}",
        )
    return profile, tuple(only)


def found(spec: str) -> Any:
    """Return the object that a text names."""
    place, colon, name = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        raise OptionError("path/file.py:object", shown(spec), f"write {spec}:target")
    if not colon:
        return registered(spec)
    if not name or not place:
        raise OptionError("the name of a target", shown(spec), FIX)
    module = from_file(Path(place), spec) if place.endswith(".py") else from_module(place, spec)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise OptionError(
                f"the target {name} in {place}", "no such object", nearest(name, targets_in(module))
            )
        value = getattr(value, part)
    return value


def targets_in(module: ModuleType) -> list[str]:
    """Return the names of the targets in a module; if it has none, all its public names."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    targets = [
        name
        for name, value in public.items()
        if hasattr(value, "capabilities") and hasattr(value, "run") and not isinstance(value, type)
    ]
    return targets or list(public)


def names() -> dict[str, EntryPoint]:
    """Return the registered targets by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def registered(name: str) -> Any:
    known = names()
    if name not in known:
        choice = nearest(name, known) if known else FIX
        raise OptionError(f"the name of a target registered under {GROUP}", shown(name), choice)
    with telling(f"a target {name} that can be imported"), unmoved():
        return known[name].load()


def from_module(name: str, spec: str) -> ModuleType:
    """Import a module by its dotted name; it may also be in the current folder."""
    with telling(f"a target {spec} that can be imported"), importable(Path.cwd()), unmoved():
        return importlib.import_module(name)


def from_file(path: Path, spec: str) -> ModuleType:
    """Import a file, which may import modules from its folder."""
    if not path.is_file():
        raise OptionError(f"a file {path}", "none", "write the path relative to the current folder")
    name = f"{LOADED}{path.stem}"
    located = importlib.util.spec_from_file_location(name, path)
    if located is None or located.loader is None:
        raise OptionError("a Python file", str(path), FIX)
    module = importlib.util.module_from_spec(located)
    sys.modules[name] = module
    with (
        telling(f"a target {spec} that can be imported"),
        importable(path.parent.resolve()),
        unmoved(),
    ):
        located.loader.exec_module(module)
    return module


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path, and leave it last on the path afterwards.

    It stays on the path because functions of the loaded file may import modules when they are called.
    """
    place = str(folder)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)


@contextlib.contextmanager
def unmoved() -> Iterator[None]:
    """Restore the current folder afterwards, because paths of targets and reports are relative to it."""
    place = os.getcwd()
    try:
        yield
    finally:
        os.chdir(place)


@contextlib.contextmanager
def telling(expected: str) -> Iterator[None]:
    """Turn an exception of the target's code into an OptionError with the end of the traceback and one remedy."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said, fix = str(error), "see the last line of the traceback"
        if isinstance(error, ImportError):
            fix = import_fix(error)
        elif isinstance(error, RingspecError):  # it has a remedy already
            said, fix = f"expected {error.expected}; got {error.got}", error.fix
        lines = "".join(traceback.format_tb(error.__traceback__, limit=-4)).rstrip()
        raise OptionError(expected, f"{type(error).__name__}: {said}\n{lines}\n", fix) from None


def import_fix(error: ImportError) -> str:
    """Return what to do about a missing module. One that has a stand-in need not be installed."""
    from ringspec.standins.install import replaced_by

    if replacement := replaced_by(error.name or ""):
        return (
            f"import what needs {replacement} inside the function of one rank, because only the ranks have the stand-in, and"
            f' pass standins=("{replacement}",)'
        )
    return "install what it needs, in the environment in which ringspec runs"


def made(value: Any, spec: str) -> Any:
    """Call a class or a function; return anything else as it is."""
    if inspect.isclass(value) or inspect.isroutine(value):
        with telling(f"a target {spec} that can be imported"), unmoved():
            return value()
    return value


def checked(value: Any, spec: str) -> Target:
    """Check that an object has the attributes of a target: ``name``, ``capabilities`` and ``run``."""
    names = ("name", "capabilities", "run", "notes", "versions", "close")
    with telling(f"attributes of {spec} that can be read"):
        has = {name: getattr(value, name) for name in names if hasattr(value, name)}
    lacks = [name for name in names[:3] if name not in has]
    if lacks:
        raise OptionError(
            f"a target with name, capabilities and run as {spec}",
            f"a {type(value).__name__} without {', '.join(lacks)}",
            "wrap a function with an adapter, such as NumPyTarget(function, Capabilities(...))",
        )
    if not isinstance(has["capabilities"], Capabilities):
        raise OptionError(
            f"capabilities of {spec} as Capabilities(...)",
            shown(has["capabilities"]),
            "make them with ringspec.conformance.target.capabilities",
        )
    check_told(has, spec)
    target: Target = value
    return target


def check_told(has: Mapping[str, Any], spec: str) -> None:
    """Check the name, notes, versions and methods of a target; raise OptionError if one has the wrong type."""
    name, notes, versions = has["name"], has.get("notes", ()), has.get("versions", {})
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME:
        raise OptionError(f"a name of {spec}, a short text", shown(name), ATTRIBUTES)
    if not isinstance(notes, str) and not (
        isinstance(notes, Sequence) and all(isinstance(note, str) for note in notes)
    ):
        raise OptionError(f"notes of {spec}, a list of sentences", shown(notes), ATTRIBUTES)
    if not isinstance(versions, Mapping) or not all(
        isinstance(text, str) for entry in versions.items() for text in entry
    ):
        raise OptionError(f"versions of {spec}, text by package", shown(versions), ATTRIBUTES)
    for function in ("run", "close"):
        if function in has and not callable(has[function]):
            raise OptionError(f"a function {function} of {spec}", shown(has[function]), ATTRIBUTES)
