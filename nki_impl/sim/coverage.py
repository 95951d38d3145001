"""Which of the public names of NKI the simulator offers.

``api_names.json`` lists the names by module, read off the stubs of the public repository that it names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from types import ModuleType

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """Names by module (``nki``, ``nki.language``...), and the ``version`` that they belong to.

    ``offered`` are those that the simulator has, ``missing`` the others. ``str()`` of it is a report.
    """

    version: str
    offered: dict[str, tuple[str, ...]]
    missing: dict[str, tuple[str, ...]]

    @property
    def counts(self) -> tuple[int, int]:
        """How many names are offered, of how many."""
        have = sum(len(names) for names in self.offered.values())
        return have, have + sum(len(names) for names in self.missing.values())

    def __str__(self) -> str:
        have, of = self.counts
        lines = [f"{have} of {of} names of {self.version}"]
        for module in self.offered:
            total = len(self.offered[module]) + len(self.missing[module])
            lines.append(f"{module}: {len(self.offered[module])} of {total}")
            if self.missing[module]:
                lines.append("  not offered: " + ", ".join(self.missing[module]))
        return "\n".join(lines)


def public_names() -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the version and the names of NKI by module."""
    text = resources.files("nki_impl.sim").joinpath("api_names.json").read_text("utf-8")
    held = json.loads(text)
    return held["source"]["version"], {name: tuple(names) for name, names in held["names"].items()}


def is_offered(module: ModuleType, name: str) -> bool:
    """Return True when ``module`` has ``name`` and models it (``not_modelled`` marks what only raises)."""
    return hasattr(module, name) and not getattr(getattr(module, name), "not_modelled", False)


def coverage() -> Coverage:
    """Return what is offered of the public names and what is not."""
    from nki_impl.sim.install import simulator_modules

    version, names = public_names()
    modules = simulator_modules()
    offered, missing = {}, {}
    for name, members in names.items():
        offered[name] = tuple(member for member in members if is_offered(modules[name], member))
        missing[name] = tuple(member for member in members if member not in offered[name])
    return Coverage(version, offered, missing)
