"""Put stand-ins into ``sys.modules``, so that an unmodified program imports them, and restore ``sys.modules``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ringspec.errors import OptionError
from ringspec.standins import aten_flash, flash_attn, flash_attn_3, transformer_engine_torch
from ringspec.standins.names import Standin, standin

__all__ = ["installed", "replaced_by"]

MAKERS = {
    "flash_attn": flash_attn.modules,
    "flash_attn_interface": flash_attn_3.modules,
    "transformer_engine_torch": transformer_engine_torch.modules,
}
# The packages that a stand-in replaces.
PACKAGES = {
    "flash_attn": ("flash_attn",),
    "flash_attn_interface": ("flash_attn_interface", "flash_attn_3"),
    "transformer_engine_torch": ("transformer_engine_torch",),
    "aten_flash": (),
}
# Other modules that use the original: extensions, which are imported before or without the package, and packages that
# import it. They must not be imported before, and are removed after the block.
OTHERS = {
    "flash_attn": ("flash_attn_2_cuda",),
    "flash_attn_interface": (),
    "transformer_engine_torch": ("transformer_engine",),
    "aten_flash": (),
}
# What else a stand-in changes inside the block: a context manager. That of aten_flash registers operators of torch, which
# are no modules.
CONTEXTS = {
    "aten_flash": aten_flash.registered,
    "transformer_engine_torch": transformer_engine_torch.answered,
}


@contextmanager
def installed(*names: str) -> Iterator[None]:
    """Make imports of the named packages import their stand-ins inside the with block.

    ``names``: one or more stand-ins, as :func:`~ringspec.standins.standin` reads them. After the block, also after an
    exception, ``sys.modules`` has no entry of the packages, as before. A module that was imported inside the block
    continues to use the stand-in. ``aten_flash`` is no package: it registers operators of torch, until the end of the
    block. Raises OptionError if one of the packages, or a stand-in for it, is already imported,
    because the program may hold functions of it.

    >>> with installed("flash_attn==2.6"):
    ...     import flash_attn
    ...     flash_attn.__version__
    '2.6.3'
    >>> import sys
    >>> "flash_attn" in sys.modules
    False
    """
    chosen = [standin(name) for name in names]
    if not chosen:
        raise OptionError("the name of a stand-in", "none", "pass 'flash_attn'")
    for one in chosen:
        refuse_if_imported(one)
    added: dict[str, ModuleType] = {}
    for one in chosen:
        if one.name in MAKERS:
            added |= MAKERS[one.name](one)
    packages = tuple(name for one in chosen for name in PACKAGES[one.name])
    finder = SubmoduleRefusal(packages)
    sys.modules.update(added)
    sys.meta_path.insert(0, finder)
    try:
        with ExitStack() as stack:
            for one in chosen:
                if one.name in CONTEXTS:
                    stack.enter_context(CONTEXTS[one.name](one))
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if any(owns(one.name, name) for one in chosen)]:
            del sys.modules[name]


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def owns(name: str, module: str) -> bool:
    """Tell whether a module is one of the original of the stand-in ``name``, or uses it."""
    return any(belongs(module, package) for package in (*PACKAGES[name], *OTHERS[name]))


def replaced_by(module: str) -> str | None:
    """Return the name of the stand-in that replaces a module; None if there is none.

    >>> replaced_by("flash_attn.bert_padding"), replaced_by("flash_attn_2_cuda"), replaced_by("numpy")
    ('flash_attn', 'flash_attn', None)
    """
    return next((name for name in PACKAGES if owns(name, module)), None)


def refuse_if_imported(one: Standin) -> None:
    for name, module in list(sys.modules.items()):
        if not owns(one.name, name):
            continue
        if getattr(module, "ringspec_standin", None) is not None:
            fix = "use one with block, and name each stand-in once"
            raise OptionError(f"no stand-in for {one.name} in use", f"{name} is one", fix)
        expected = f"{one.name} not yet imported, when its stand-in is installed"
        fix = f"install the stand-in before anything imports {one.name}"
        raise OptionError(expected, f"{name} from {getattr(module, '__file__', None)}", fix)


class SubmoduleRefusal:
    """A finder that refuses to import a submodule which a stand-in does not have, and says so."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self.packages:
            return None
        if name == package and PathFinder.find_spec(name) is None:
            return None  # programs ask with importlib.util.find_spec whether it is installed
        has = ", ".join(sorted(one for one in sys.modules if belongs(one, package)))
        raise ModuleNotFoundError(
            f"expected a module that ringspec's stand-in for {package} has: {has}; got {name}. Fix: remove the import"
            f" of {name}, or make it optional.",
            name=name,
        )
