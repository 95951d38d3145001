"""Run a Python program with stand-ins in place of GPU packages.

    python -m ringspec.standins flash_attn -- script.py ARGUMENT...
    python -m ringspec.standins flash_attn -- -m package.module ARGUMENT...
    torchrun --nproc-per-node 2 -m ringspec.standins flash_attn -- script.py

Before ``--`` come the stand-ins, such as ``flash_attn`` or ``flash_attn==2.6``. The program runs as ``python script.py``
would run it, as ``__main__``, with its own folder first on the import path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ringspec.errors import OptionError, RingspecError
from ringspec.standins.install import installed
from ringspec.standins.names import standin

USAGE = "python -m ringspec.standins NAME... -- script.py ARGUMENT..."


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments name; its exceptions and exit status are passed on."""
    names, program = divided(arguments)
    for one in map(standin, names):
        print(f"ringspec: {one.note}", file=sys.stderr)
    with installed(*names):
        if program[0] == "-m":
            sys.argv[:] = program[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = program
            sys.path[0] = str(Path(program[0]).resolve().parent)
            runpy.run_path(program[0], run_name="__main__")


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the stand-ins, and the program with its arguments.

    >>> divided(["flash_attn", "--", "script.py", "--steps", "2"])
    (['flash_attn'], ['script.py', '--steps', '2'])
    """
    if "--" not in arguments:
        raise OptionError(USAGE, "no --", "write -- before the script")
    at = list(arguments).index("--")
    names, program = list(arguments[:at]), list(arguments[at + 1 :])
    if not names or len(program) < 1 + (program[:1] == ["-m"]):
        raise OptionError(USAGE, " ".join(arguments), "name a stand-in and a script")
    return names, program


if __name__ == "__main__":
    try:
        divided(sys.argv[1:])
    except RingspecError as error:
        raise SystemExit(f"ringspec.standins: {error}") from None
    main(sys.argv[1:])
