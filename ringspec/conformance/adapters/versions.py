"""Which versions of the packages under test a report names."""

from __future__ import annotations

import importlib.metadata
import sys


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
