"""The lowest versions that pyproject.toml allows, as constraints for pip.

python .ci/lowest.py test >lowest.txt        # of the dependencies and of the extra `test`
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"([\w.-]+)>=([\w.]+)")


def constraints(requirements: Iterable[str]) -> Iterator[str]:
    """Each requirement with its floor as the only version.

    >>> list(constraints(["click>=8.2", "ml_dtypes>=0.5"]))
    ['click==8.2', 'ml_dtypes==0.5']
    >>> list(constraints(["click"]))
    Traceback (most recent call last):
        ...
    ValueError: 'click' is not NAME>=VERSION. Fix: give it a floor in pyproject.toml.
    """
    for requirement in requirements:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(
                f"{requirement!r} is not NAME>=VERSION. Fix: give it a floor in pyproject.toml."
            )
        yield f"{match[1]}=={match[2]}"


def main(extras: list[str]) -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    print("\n".join(constraints(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
