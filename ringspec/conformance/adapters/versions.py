"""Which versions of the packages under test a report names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from ringspec.errors import MissingPackageError, shown


def installed(packages: tuple[str, ...], python: str = sys.executable) -> dict[str, str]:
    """The installed versions of distributions, by name; those that are not installed are left out.

    For another interpreter than this one nothing is known: {}.

    >>> sorted(installed(("numpy", "no-such-package")))
    ['numpy']
    >>> installed(("numpy",), python="/another/python")
    {}
    """
    if python != sys.executable:
        return {}
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def require(modules: tuple[str, ...], package: str, version: str, command: str) -> None:
    """Return if the modules can be imported and the distribution has this version.

    Else :class:`~ringspec.errors.MissingPackageError`, with the ``command`` that installs it.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"the package {module}", "none", f"run: {command}")
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(f"the package {package}", "none", f"run: {command}") from None
    if found != version:
        raise MissingPackageError(f"{package} {version}", shown(found), f"run: {command}")
