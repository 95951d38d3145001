"""The public names of NKI, as ``api_names.json`` lists them, and the error for a name that the simulator lacks.

The file lists the names by module, and says from which repository's stub files they come. For the release after it,
whose stub files are not public, it has the new names that were found in pages of the documentation.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def _listed() -> Any:
    text = resources.files("nki_impl.sim").joinpath("api_names.json").read_text("utf-8")
    return json.loads(text)


def public_names() -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the version of NKI, and a dict of its public names by module."""
    held = _listed()
    return held["source"]["version"], {name: tuple(names) for name, names in held["names"].items()}


def later_names() -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the release after that version, and its new names by module, as far as its pages could be read."""
    held = _listed()["later"]
    return held["version"], {name: tuple(names) for name, names in held["names"].items()}


def no_such_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module of the simulator lacks: NKI has it, or no documented release has.

    >>> print(no_such_name("nki.language", "softmax"))
    nki.language.softmax is a name of nki 0.6.0 (Neuron 2.32) that the simulator does not offer; nki_impl.sim.coverage.coverage() lists these names
    """
    for version, names in (public_names(), later_names()):
        if name in names.get(module, ()):
            return AttributeError(
                f"{module}.{name} is a name of {version} that the simulator does not offer; "
                "nki_impl.sim.coverage.coverage() lists these names"
            )
    return AttributeError(f"module {module!r} has no attribute {name!r}")
