"""Copies of the kernels in which a line reads differently, as a package of their own.

The kernels know nothing of it: their source is copied, the line replaced, and the copy imported.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from nki_impl import kernels

SOURCE = Path(kernels.__file__).parent
PACKAGE = "nki_impl.kernels"


Change = tuple[str, str, str]


def altered(folder: Path, *changes: Change) -> ModuleType:
    """The kernels with changes (file, old, new): ``old`` occurs in ``file`` exactly once."""
    name = f"altered_kernels_{folder.name}"
    copy = folder / name
    copy.mkdir()
    for path in sorted(SOURCE.glob("*.py")):
        text = path.read_text()
        for file, old, new in changes:
            if path.name == file:
                assert text.count(old) == 1, f"{text.count(old)} times in {file}: {old}"
                text = text.replace(old, new)
        (copy / path.name).write_text(text.replace(PACKAGE, name))
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
