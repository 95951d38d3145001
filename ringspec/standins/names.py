"""Which stand-ins exist, and how a stand-in is named: ``flash_attn``, ``flash_attn==2.6``, ``flash_attn[exact]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringspec.errors import OptionError, nearest, shown

__all__ = ["Standin", "standin"]

VERSIONS = {"flash_attn": ("2.6", "2.7", "2.8"), "aten_flash": ("2.13",)}
"""The interface versions of each stand-in; the last one is the default."""

NAME = re.compile(r"(?P<name>\w+)(?P<exact>\[exact\])?(==(?P<version>[\w.]+))?")


@dataclass(frozen=True)
class Standin:
    """One stand-in: the package that it replaces, the version of its interface, and which inputs it accepts.

    ``name``: the package, such as 'flash_attn'. ``version``: the version of the interface, such as '2.8'. ``exact``: if
    True, float32 and float64 inputs and any head dimension are accepted as well, which the kernel refuses.
    """

    name: str
    version: str
    exact: bool = False

    @property
    def note(self) -> str:
        """A sentence for a report: what computed in place of the kernel, and what a run therefore cannot show."""
        package = "torch" if self.name == "aten_flash" else self.name
        return (
            f"{self.name} is ringspec's stand-in with the interface of {package} {self.version}: float64 on a CPU,"
            " rounded once; the kernel's own errors, dropout and races between CUDA streams were not tested"
        )


def standin(text: str) -> Standin:
    """Return the stand-in that a text names.

    ``text``: the name of the package, optionally followed by ``[exact]`` and by ``==`` with a version of the interface.
    The default version is the newest. Raises OptionError for an unknown name or version.

    >>> standin("flash_attn"), standin("flash_attn[exact]==2.6").exact
    (Standin(name='flash_attn', version='2.8', exact=False), True)
    """
    match = NAME.fullmatch(text) if isinstance(text, str) else None
    if match is None or match["name"] not in VERSIONS:
        name = text if match is None else match["name"]
        expected = "the name of a stand-in, such as 'flash_attn' or 'flash_attn==2.6'"
        raise OptionError(expected, shown(text), nearest(name, VERSIONS), code="unknown-name")
    known = VERSIONS[match["name"]]
    version = match["version"] or known[-1]
    # 2.7.4.post1 has the interface of 2.7.
    found = [one for one in known if version == one or version.startswith(one + ".")]
    if not found:
        expected = (
            f"a version of {match['name']} whose interface the stand-in has: {', '.join(known)}"
        )
        raise OptionError(expected, version, f"write {match['name']}=={known[-1]}")
    return Standin(match["name"], found[0], match["exact"] is not None)
