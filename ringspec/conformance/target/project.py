"""The default TARGET: ``[tool.ringspec] target`` in a project's pyproject.toml.

.. code-block:: toml

    [tool.ringspec]
    target = "tests/ring_target.py:target"
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from ringspec.conformance.target.declared import check_name
from ringspec.errors import FileFormatError, OptionError, shown
from ringspec.plainfile import read_plain_file

KEYS = ("target",)
MAX_BYTES = 1 << 20


def default_target(start: Path | None = None) -> str | None:
    """Return the target that the nearest pyproject.toml at or above ``start`` names, or None.

    A path in the target is relative to the folder of that file. Raises :class:`~ringspec.errors.FileFormatError` if the
    file is not TOML, and :class:`~ringspec.errors.OptionError` for an unknown key of ``[tool.ringspec]``.
    """
    folder = (start or Path.cwd()).resolve()
    for above in (folder, *folder.parents):
        file = above / "pyproject.toml"
        if file.is_file():
            target = target_in(file)
            return None if target is None else relative_to(target, above)
    return None


def target_in(file: Path) -> str | None:
    """Read ``[tool.ringspec] target`` from one file."""
    text = read_plain_file(file, MAX_BYTES)
    try:
        data = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"TOML in {file}", shown(str(error)), "correct the file") from None
    tool = data.get("tool")
    table = tool.get("ringspec", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise FileFormatError(
            f"a table [tool.ringspec] in {file}", shown(table), "write [tool.ringspec] as a table"
        )
    for key in table:
        check_name(f"a key of [tool.ringspec] in {file}", key, KEYS)
    target = table.get("target")
    if target is not None and not isinstance(target, str):
        raise FileFormatError(
            f"a string as target in {file}", shown(target), "put the target into quotes"
        )
    return target


def relative_to(target: str, folder: Path) -> str:
    """Resolve the path in a target, if it has one, against ``folder``.

    >>> relative_to("kernels/mine.py:run", Path("/a")), relative_to("package:run", Path("/a"))
    ('/a/kernels/mine.py:run', 'package:run')
    """
    file, colon, name = target.rpartition(":")
    if file.startswith(("cmd:", "dir:")) or not file.endswith(".py"):
        return target
    path = folder / file
    here = Path.cwd()
    shorter = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shorter}{colon}{name}"


def target_or_default(target: str | None) -> str:
    """Return the given target, else the project's default; raise OptionError if there is neither."""
    chosen = target if target is not None else default_target()
    if chosen is None:
        raise OptionError(
            "a TARGET, or [tool.ringspec] target in a pyproject.toml here or above",
            "neither",
            "pass package.module:object, path/file.py:object, cmd:PROGRAM, dir:FOLDER or the name "
            "of a registered target",
        )
    return chosen
