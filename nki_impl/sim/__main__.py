"""``python -m nki_impl.sim script.py [arguments]``: run a script whose ``import nki`` is the simulator."""

from __future__ import annotations

import os
import runpy
import sys

from nki_impl.sim.install import installed


def main(arguments: list[str]) -> int:
    """Run the script ``arguments[0]`` as the main program, and return an exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m nki_impl.sim script.py [arguments]")
        return 0 if arguments else 2
    if not os.path.isfile(arguments[0]):
        print(f"python -m nki_impl.sim: no file {arguments[0]!r}", file=sys.stderr)
        return 2
    before = sys.argv, sys.path
    sys.argv = list(arguments)
    sys.path = [os.path.dirname(os.path.abspath(arguments[0])), *sys.path]
    try:
        with installed():
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
