"""The name, notes and package versions of a target, for the header of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspec.conformance.target.versions import Installed, installed, under_test

CHANGING = ("versions", "files")
LOADED = "ringspec_target_"  # prefix of the name of a module that was loaded by its path


def said_by(target: Any, spec: str) -> dict[str, Any]:
    """Return name, notes, versions and files of a target as plain data."""
    have = computed_with(target, spec)
    notes = getattr(target, "notes", ())
    versions = {str(name): str(one) for name, one in getattr(target, "versions", {}).items()}
    return {
        "name": str(target.name),
        "notes": [notes] if isinstance(notes, str) else [str(note) for note in notes],
        "versions": versions | dict(have.versions),
        "files": dict(have.files),
    }


def computed_with(target: Any, spec: str) -> Installed:
    """Return the versions and files of the packages under test, from the process in which the target computes.

    A target with its own processes reports these packages in ``installed``. For a target that computes in this process,
    they are the top-level packages that contain the target's ``function`` and the object that ``spec`` names.
    """
    have = getattr(target, "installed", None)
    if isinstance(have, Installed):
        return have
    if spec.startswith(("cmd:", "dir:")):
        return Installed()
    module = str(getattr(getattr(target, "function", None), "__module__", ""))
    if module.startswith(LOADED):  # a file that the spec names
        module = ""
    return installed(under_test(under_test((), spec), f"{module}:"), imported=True)


def changed_since(header: Mapping[str, Any], have: Installed) -> dict[str, dict[str, str]]:
    """Return versions and files of imported packages, if they differ from those in a report's header.

    >>> header = {"versions": {"a": "2"}, "files": {"a": "/x/a.py"}}
    >>> changed_since(header, Installed({"a": "1"}, {"a": "/x/a.py"}))
    {'versions': {'a': '1'}}
    """
    changed = {
        kind: {
            name: text
            for name, text in getattr(have, kind).items()
            if header.get(kind, {}).get(name) != text and name not in ("ringspec", "specification")
        }
        for kind in CHANGING
    }
    return {kind: texts for kind, texts in changed.items() if texts}
