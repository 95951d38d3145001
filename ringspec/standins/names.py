"""Which stand-ins exist, and how they are named: ``flash_attn``, ``flash_attn==2.6``, ``flash_attn[exact]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringspec.errors import OptionError, nearest, shown

__all__ = ["Standin", "standin"]

VERSIONS = {
    "flash_attn": ("2.6", "2.7", "2.8"),
    "flash_attn_interface": ("3.0.0.b1", "3.0.0"),
    "transformer_engine_torch": ("2.20",),
    "aten_flash": ("2.13",),
}
"""The interface versions of each stand-in; the last one is the default."""

OPTIONS = {
    "flash_attn": ("exact", "cuda"),
    "flash_attn_interface": ("exact",),
    "transformer_engine_torch": (),
    "aten_flash": ("exact",),
}

OF_A_KERNEL = "float64 on a CPU, rounded once; the kernel's own errors, dropout and races between CUDA streams were not tested"
NOTES = {
    "flash_attn": OF_A_KERNEL,
    "flash_attn_interface": OF_A_KERNEL,
    "aten_flash": OF_A_KERNEL,
    "transformer_engine_torch": "FusedAttention and the functions for packed tensors, in float64 on a CPU, rounded once; CUDA streams and"
    " events do nothing, the device has compute capability 9.0, transfers of gloo may be awaited twice; "
    "transformer_engine is imported without its compiled part, and its modules, ops and triton kernels are"
    " placeholders; cuDNN, FP8 and races between CUDA streams were not tested",
}
"""What a stand-in computes, and what a run with it cannot show."""

NAME = re.compile(r"(?P<name>\w+)(\[(?P<option>\w+)\])?(==(?P<version>[\w.]+))?")


@dataclass(frozen=True)
class Standin:
    """One stand-in: the package that it replaces, the version of its interface, and how it computes.

    ``name``: the package, such as 'flash_attn', or the module 'flash_attn_interface' of FlashAttention 3. ``version``:
    the version of the interface, such as '2.8'. ``exact``: if True, float32 and float64 inputs and any head dimension
    are accepted as well, which the kernel refuses. ``cuda``: if True, PyTorch's own build of the kernel computes on a
    GPU, and the tensors must be there.
    """

    name: str
    version: str
    exact: bool = False
    cuda: bool = False

    @property
    def note(self) -> str:
        """A sentence for a report: what computed in place of the kernel, and what a run therefore cannot show."""
        package = "torch" if self.name == "aten_flash" else self.name
        interface = (
            f"{self.name} is ringspec's stand-in with the interface of {package} {self.version}"
        )
        if self.cuda:
            return f"{interface}, computed by PyTorch's own FlashAttention kernels on a GPU; dropout was not tested"
        return f"{interface}: {NOTES[self.name]}"


def standin(text: str) -> Standin:
    """Return the stand-in that a text names.

    ``text``: the name of the package, optionally followed by ``[exact]`` or ``[cuda]`` and by ``==`` with a version of the
    interface. The default version is the newest. Raises OptionError for an unknown name, option or version.

    >>> standin("flash_attn"), standin("flash_attn[exact]==2.6").exact
    (Standin(name='flash_attn', version='2.8', exact=False, cuda=False), True)
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
    option, options = match["option"], OPTIONS[match["name"]]
    if option is not None and not options:
        raise OptionError(f"{match['name']} without an option", option, f"write {match['name']!r}")
    if option not in (None, *options):
        expected = f"an option of the stand-in for {match['name']}: {', '.join(options)}"
        raise OptionError(expected, option, nearest(option, options))
    return Standin(match["name"], found[0], option == "exact", option == "cuda")
