"""Compare the simulator with the public names of NKI."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from nki_impl.sim.public_names import later_names, public_names

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """The public names of NKI ``version`` that the simulator has, and those that it lacks.

    ``offered``: the names that the simulator has, by module (``nki``, ``nki.language``...). ``missing``: the names that
    it lacks, by module. ``later``: the same for the new names of the release after it. ``str()`` gives a report.
    """

    version: str
    offered: dict[str, tuple[str, ...]]
    missing: dict[str, tuple[str, ...]]
    later: Coverage | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """The number of offered names, and the number of all names."""
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
        if self.later is not None:
            lines += ["", "New names:", str(self.later)]
        return "\n".join(lines)


def is_offered(module: ModuleType, name: str) -> bool:
    """Return whether ``module`` has ``name``, and the name is not a function that only raises an error."""
    return hasattr(module, name) and not getattr(getattr(module, name), "not_modelled", False)


def coverage() -> Coverage:
    """Return the public names that the simulator has and those that it lacks."""
    return _coverage(*public_names(), later=_coverage(*later_names()))


def _coverage(
    version: str, names: dict[str, tuple[str, ...]], later: Coverage | None = None
) -> Coverage:
    from nki_impl.sim.packages.modules import simulator_modules

    modules = simulator_modules()
    offered, missing = {}, {}
    for name, members in names.items():
        offered[name] = tuple(member for member in members if is_offered(modules[name], member))
        missing[name] = tuple(member for member in members if member not in offered[name])
    return Coverage(version, offered, missing, later)
