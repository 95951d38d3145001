"""Run a ringspec module in a worker's process, which may use another Python interpreter.

    python .../ringspec/conformance/adapters/rank_start.py MODULE ARGUMENT...

The worker's environment is under test. A folder added to its import path could shadow one of its packages. So no folder
is added: the package ``ringspec`` that contains this file is loaded by its location. In a worker ringspec needs only
NumPy and ml_dtypes, which come from the worker's environment. If one of them is missing, the process exits with a
message that says what to install.

In all other respects the module runs as with ``python -m``: the current folder is first on the import path (unless
PYTHONSAFEPATH or ``-P`` forbids it), and PYTHONPATH has its usual meaning. A process that :mod:`multiprocessing` spawns
in a worker runs this file again as ``__mp_main__``, so it imports the same ringspec. Any other program that a worker
starts imports ringspec, if at all, from that program's own import path.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)
NEEDED = ("numpy", "ml_dtypes")


def load_ringspec() -> None:
    """Make ``import ringspec`` import the package in FOLDER, whatever the import path is."""
    check_environment()
    place = str(FOLDER / "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "ringspec", place, submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ringspec"] = module
    spec.loader.exec_module(module)


def check_environment() -> None:
    """Exit with a message if ringspec cannot work in this process."""
    python = sys.executable or "python"
    if sys.version_info < OLDEST:  # the adapter's option `python=` may name any interpreter
        oldest, own = (".".join(map(str, one)) for one in (OLDEST, sys.version_info[:3]))
        raise SystemExit(
            f"expected Python >= {oldest} as {python}; got {own}. Fix: name another interpreter"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise SystemExit(
            f"expected NumPy and ml_dtypes in the environment of {python}; "
            f"got none of {names}. Fix: {python} -m pip install {names}"
        )


def main() -> None:
    """Run ``main()`` of the ringspec module that the command line names."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = (
            os.getcwd()
        )  # instead of this script's folder, whose modules must not be found
    load_ringspec()
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__mp_main__":
    load_ringspec()
if __name__ == "__main__":
    main()
