"""Versions and files of the packages that computed the results, for a report.

Versions are read in the process that computes, because its interpreter, import path and environment may differ from
those of the suite.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringspec.conformance.target.protocol import Failed, Garbage, Refused
from ringspec.errors import MissingPackageError, shown

__all__ = ["Installed", "installed"]

LONGEST = 4096


@dataclass(frozen=True)
class Installed:
    """Packages by name: their ``versions``, and the ``files`` from which they are imported.

    A package without a version is missing in ``versions``, and one without a file is missing in ``files``.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def merged(self, later: Installed) -> Installed:
        """Merge with ``later``, whose entries take precedence.

        >>> Installed({"a": "1"}, {"a": "/x"}).merged(Installed({"a": "2"}, {"a": "/y"})).files
        {'a': '/y'}
        """
        return Installed({**self.versions, **later.versions}, {**self.files, **later.files})

    def of(self, name: str) -> str:
        """Describe a package by name, version and file.

        >>> Installed({"a": "1.0"}, {"a": "/x/a.py", "b": "/x/b.py"}).of("a")
        'a 1.0 (/x/a.py)'
        """
        version, file = self.versions.get(name), self.files.get(name)
        return " ".join([name, *filter(None, [version, file and f"({file})"])])


def under_test(packages: Iterable[str], function: str) -> tuple[str, ...]:
    """Return ``packages`` and the package that contains a function under test.

    ``function``: 'package.module:name', or a path, which adds no package.

    >>> under_test(("torch",), "my_kernel.ring:attention"), under_test(("torch",), "/x/y.py:f")
    (('torch', 'my_kernel'), ('torch',))
    """
    place = function.rpartition(":")[0]
    own = "" if place.endswith(".py") else place.partition(".")[0]
    return tuple(dict.fromkeys([*packages, *([own] if own not in ("", "ringspec") else [])]))


def installed(packages: Iterable[str], *, imported: bool = False) -> Installed:
    """Return versions and files of Python, NumPy and ``packages`` (names of distributions) in this process.

    A package that is not imported yet is found on the import path without importing it. If ``imported`` is True, it is
    left out. Packages that are not installed are always left out.

    >>> sorted(installed(("no-such-package",)).versions)
    ['numpy', 'python']
    """
    versions, files = {"python": platform.python_version()}, {"python": sys.executable}
    for package in dict.fromkeys(["numpy", *packages]):
        name = module_name(package)
        module = sys.modules.get(name)
        if module is None and imported:
            continue
        file = file_of(name)
        if file is None and module is None:
            continue
        version = version_of(package, file, str(getattr(module, "__version__", "")))
        if version:
            versions[package] = version
        if file is not None:
            files[package] = file
    return Installed(versions, files)


@functools.cache
def module_name(package: str) -> str:
    """Return the name under which a distribution is imported.

    >>> module_name("ring-attention-pytorch")
    'ring_attention_pytorch'
    """
    name = package.replace("-", "_")
    if name in sys.modules or located(name) is not None:
        return name
    try:
        listed = importlib.metadata.distribution(package).read_text("top_level.txt") or ""
    except importlib.metadata.PackageNotFoundError:
        listed = ""
    return listed.split()[0] if listed.split() else name


def located(name: str) -> Any:
    """Find the spec of a top-level module without importing it; None if there is none."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec, such as one made by hand
        return None


def file_of(name: str) -> str | None:
    """Return the file of a top-level module, or the folder of a package without a file."""
    module = sys.modules.get(name)
    spec = None if module is not None else located(name)
    file = getattr(module, "__file__", None) if spec is None else spec.origin
    if file is not None:
        return str(file)
    folders = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    return next((str(folder) for folder in folders or ()), None)


@functools.cache
def version_of(package: str, file: str | None, own: str) -> str:
    """Return the version of a package that is imported from ``file``.

    It is that of the distribution in the folder of ``file``, else ``own`` (the module's ``__version__``), else that of
    a distribution of this name anywhere on the import path.
    """
    if file is not None:
        place = Path(file)
        root = place.parents[1] if place.stem == "__init__" else place.parent
        for one in importlib.metadata.distributions(name=package, path=[str(root)]):
            return str(one.version)
    if own:
        return own
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def said_installed(message: Mapping[str, Any]) -> Installed:
    """Read the ``versions`` and ``files`` in a message of a worker or a program; both are optional.

    Raises Garbage unless both map short strings to short strings.

    >>> said_installed({"kind": "result", "versions": {"my_kernel": "1.2"}}).versions
    {'my_kernel': '1.2'}
    """
    for what in ("versions", "files"):
        value = message.get(what, {})
        if not isinstance(value, dict) or not all(
            isinstance(x, str) and len(x) <= LONGEST for pair in value.items() for x in pair
        ):
            raise Garbage(f"expected {what} as texts by name; got {shown(value)}")
    return Installed(message.get("versions", {}), message.get("files", {}))


def agreed(workers: Sequence[Installed]) -> Installed:
    """Merge the packages of all workers; raise Failed if two workers report different versions of a package.

    >>> agreed([Installed({"a": "1"}), Installed({"a": "2"}, {"a": "/y/a.py"})])
    Traceback (most recent call last):
    ringspec.conformance.target.protocol.Failed: the workers have different versions: worker 0 has a 1, worker 1 has a 2 (/y/a.py)
    """
    first = workers[0]
    for worker, other in enumerate(workers):
        for name in sorted(first.versions.keys() & other.versions.keys()):
            if first.versions[name] != other.versions[name]:
                raise Failed(
                    f"the workers have different versions: worker 0 has {first.of(name)}, "
                    f"worker {worker} has {other.of(name)}"
                )
    return functools.reduce(Installed.merged, reversed(workers))


def check_names(module: Any, names: Iterable[str], package: str, known: str) -> None:
    """Raise Refused if a module of the package under test lacks one of the names.

    ``known``: the versions that have these names. A target that uses private names of a package calls this function. So
    it fails with a clear message, instead of a traceback, in a version without these names.
    """
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise unknown_version(f"{', '.join(missing)} in {module.__name__}", package, known)


def check_keywords(
    function: Callable[..., Any], names: Iterable[str], package: str, known: str
) -> None:
    """Raise Refused if a function of the package under test lacks one of the keywords.

    >>> check_keywords(sorted, ("key", "reverse"), "python", "3.11")
    """
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    missing = [name for name in names if name not in parameters]
    if missing:
        raise unknown_version(f"{function.__name__} with {', '.join(missing)}", package, known)


def unknown_version(what: str, package: str, known: str) -> Refused:
    """Make the Refused error for a package version that lacks ``what``; ``known``: versions that have it."""
    have = installed((package,)).of(package)
    return Refused(
        f"expected {what}, as {package} {known} has it; got {have} without it. "
        "Fix: report this version to ringspec, whose target does not know it yet"
    )


def require(modules: tuple[str, ...], package: str, floor: str, command: str) -> None:
    """Raise MissingPackageError unless the modules can be imported and the distribution is recent enough.

    ``floor``: the lowest version. ``command``: the command that installs the distribution, for the error.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"the package {module}", "none", f"run: {command}")
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(f"the package {package}", "none", f"run: {command}") from None
    if release(found) < release(floor):
        raise MissingPackageError(f"{package} >= {floor}", shown(found), f"run: {command}")


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without trailing zeros.

    >>> release("0.42.1"), release("2.13.0+cpu"), release("1.0rc1") == release("1")
    ((0, 42, 1), (2, 13), True)
    """
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
