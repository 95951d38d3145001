"""Data and drawing of the architecture page: the packages, their purposes and their imports.

python docs/architecture.py        # writes docs/images/architecture.svg

tests/project/test_architecture.py compares ``PACKAGES`` with the imports of the sources, and the stored
drawing with the result of ``drawing()``.
"""

import dataclasses
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

STORED = Path(__file__).parent / "images" / "architecture.svg"
# Files at the top of ringspec that every other package may import; the drawing shows them as one box.
GROUND = ("errors", "formats", "plainfile", "recipes", "strictjson", "tensorfile")


@dataclasses.dataclass(frozen=True)
class Package:
    """A package, or a file beside the packages.

    row, column  its place in the drawing, from the top left corner; arrows go down
    about        its purpose, as a phrase
    imports      names of all packages that its files import
    """

    row: float
    column: float
    about: str
    imports: tuple[str, ...] = ()


PACKAGES = {
    "ringspec.cli": Package(
        0,
        2,
        "the commands of `ringspec`",
        (
            "ringspec",
            "ringspec.comm",
            "ringspec.compare",
            "ringspec.conformance",
            "ringspec.fast",
            "ringspec.plan",
            "ringspec.problem",
            "ringspec.render",
            "ringspec.rings",
            "ringspec.schemes",
            "ringspec.spec",
            "ringspec.truth",
            "ringspec.vectors",
            "ground",
        ),
    ),
    "ringspec.testing": Package(
        0,
        5,
        "assertions for the test suite of a kernel",
        (
            "ringspec.compare",
            "ringspec.conformance",
            "ringspec.problem",
            "ringspec.rings",
            "ringspec.spec",
            "ringspec.truth",
            "ground",
        ),
    ),
    "ringspec.conformance": Package(
        1,
        5,
        "runs a kernel on cases, judges its results and names known bugs",
        (
            "ringspec",
            "ringspec.comm",
            "ringspec.compare",
            "ringspec.merges",
            "ringspec.problem",
            "ringspec.rings",
            "ringspec.schemes",
            "ringspec.spec",
            "ringspec.standins",
            "ringspec.truth",
            "ringspec.vectors",
            "ground",
        ),
    ),
    "ringspec.standins": Package(
        2,
        6,
        "exact arithmetic behind the interfaces of GPU kernels",
        ("ground",),
    ),
    "ringspec.vectors": Package(
        2,
        5,
        "golden vectors: their format, catalogue, generation and verification",
        (
            "ringspec",
            "ringspec.merges",
            "ringspec.problem",
            "ringspec.schemes",
            "ringspec.truth",
            "ground",
        ),
    ),
    "ringspec.truth": Package(
        3,
        5,
        "expected values and their row scales, exact or in float64",
        (
            "ringspec.compare",
            "ringspec.exact",
            "ringspec.problem",
            "ringspec.rings",
            "ringspec.spec",
            "ground",
        ),
    ),
    "ringspec.comm": Package(
        2,
        4,
        "a ring whose workers are MPI ranks",
        ("ringspec", "ringspec.problem", "ringspec.rings", "ringspec.spec", "ground"),
    ),
    "ringspec.layouts": Package(
        2,
        3,
        "layouts for context parallelism as exact integers, for use alone",
        ("ringspec.rings", "ringspec.spec"),
    ),
    "ringspec.interfaces": Package(
        3,
        3,
        "the call signatures of public systems",
        ("ringspec.problem", "ringspec.rings", "ringspec.spec", "ground"),
    ),
    "ringspec.schemes": Package(
        3.6,
        4,
        "all ways to split attention over ranks: model, executor, validator",
        ("ringspec.problem", "ringspec.rings", "ringspec.spec", "ground"),
    ),
    "ringspec.fast": Package(
        3,
        1,
        "the same results, near the speed of matrix products",
        ("ringspec.problem", "ringspec.rings", "ringspec.spec", "ground"),
    ),
    "ringspec.plan": Package(
        3,
        2,
        "estimated cost of rings and other schemes on given hardware",
        ("ringspec.problem", "ringspec.rings", "ringspec.schemes", "ringspec.spec", "ground"),
    ),
    "ringspec.render": Package(3, 0, "figures and pages made from data", ("ground",)),
    "ringspec": Package(
        2.75,
        4,
        "the public names that `ringspec/__init__.py` exports",
        ("ringspec.rings", "ringspec.schemes", "ringspec.spec", "ground"),
    ),
    "ringspec.rings": Package(
        4,
        3,
        "the whole ring in one process: run, validator, cost",
        ("ringspec.merges", "ringspec.problem", "ringspec.spec", "ground"),
    ),
    "ringspec.merges": Package(
        6, 1, "merges of partial results as public systems compute them", ("ground",)
    ),
    "ringspec.spec": Package(
        5, 3, "the specification: the algorithm alone", ("ringspec.problem", "ground")
    ),
    "ringspec.problem": Package(6, 3, "the arguments of a call, and their checks", ("ground",)),
    "ringspec.exact": Package(
        4, 5, "correctly rounded results", ("ringspec.problem", "ringspec.spec", "ground")
    ),
    "ringspec.compare": Package(
        4, 6, "bounds, verdicts, noise and its statistics", ("ringspec.merges", "ground")
    ),
    "ground": Package(7, 3, f"the files {', '.join(f'`{name}`' for name in GROUND)} of ringspec"),
    "nki_impl.target": Package(
        0,
        7,
        "the kernels as a target of the conformance suite",
        (
            "nki_impl.kernels",
            "nki_impl.lang",
            "nki_impl.packing",
            "nki_impl.sim",
            "ringspec.conformance",
            "ground",
        ),
    ),
    "nki_impl.packing": Package(1, 6, "bounds of documents, windows and layouts for the kernels"),
    "nki_impl.workloads": Package(
        1,
        8,
        "`python -m nki_impl`: instruction, FLOP and byte counts of a kernel",
        ("nki_impl.sim",),
    ),
    "nki_impl.kernels": Package(2, 7, "ring attention in NKI", ("nki_impl.lang",)),
    "nki_impl.lang": Package(
        3, 7, "the NKI language, from the simulator or from the vendor's package, loaded by name"
    ),
    "nki_impl.sim": Package(3, 8, "a simulator of the NKI subset that the kernels use"),
}


def package_of(module: str) -> str | None:
    """The entry of ``PACKAGES`` that a module belongs to; None for a package's empty ``__init__``.

    >>> [package_of(name) for name in ("ringspec.spec.masks", "ringspec.errors", "ringspec.__main__")]
    ['ringspec.spec', 'ground', 'ringspec.cli']
    >>> [package_of(name) for name in ("ringspec", "nki_impl", "nki_impl.__main__")]
    ['ringspec', None, 'nki_impl.workloads']
    """
    if module == "nki_impl.ordering":  # the part of the target that knows no name of ringspec
        return "nki_impl.target"
    top, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if top == "ringspec" and first in GROUND:
        return "ground"
    if first == "__main__":
        return {"ringspec": "ringspec.cli", "nki_impl": "nki_impl.workloads"}[top]
    if not first:
        return top if top == "ringspec" else None
    return f"{top}.{first}"


def drawn_arrows() -> list[tuple[str, str]]:
    """(importer, imported) without the pairs that a chain of other arrows connects already.

    >>> ("ringspec.rings", "ringspec.spec") in drawn_arrows()
    True
    >>> ("ringspec.rings", "ringspec.problem") in drawn_arrows()
    False
    """
    return [
        (name, imported)
        for name, package in PACKAGES.items()
        for imported in package.imports
        if not any(imported in reached(other) for other in package.imports)
    ]


def reached(name: str) -> set[str]:
    """Every package that one imports, directly or through others."""
    direct = PACKAGES[name].imports
    return set(direct).union(*map(reached, direct))


COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 118, 74, 104, 34, 12


def drawing() -> str:
    """The drawing as SVG: a box for each package, an arrow for each pair of ``drawn_arrows()``."""
    width = 2 * MARGIN + WIDTH + int(COLUMN * max(p.column for p in PACKAGES.values()))
    height = 2 * MARGIN + HEIGHT + int(ROW * max(p.row for p in PACKAGES.values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' font-family="sans-serif" font-size="13">',
        "<title>The packages of this repository; an arrow leads from a package to one that it imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
        ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *(arrow(name, imported) for name, imported in drawn_arrows()),
        *(line for name in PACKAGES for line in box(name)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def span(name: str) -> tuple[int, int, int]:
    """(left, top, width) of a box; the ground lies below all of ringspec."""
    package = PACKAGES[name]
    top = MARGIN + int(ROW * package.row)
    if name == "ground":
        return MARGIN, top, COLUMN * 6 + WIDTH
    return MARGIN + int(COLUMN * package.column), top, WIDTH


def box(name: str) -> Iterator[str]:
    left, top, wide = span(name)
    fill = "#e8f0fe" if name.startswith("ringspec") else "#eee" if name == "ground" else "#fdf1e0"
    label = f"ground: {', '.join(GROUND)}" if name == "ground" else name.removeprefix("ringspec.")
    small = ' font-size="11"' if name.startswith("nki_impl") else ""
    yield f"<g><title>{escape(PACKAGES[name].about.replace('`', ''))}</title>"
    yield f'<rect x="{left}" y="{top}" width="{wide}" height="{HEIGHT}" rx="5" fill="{fill}" stroke="#555"/>'
    yield (
        f'<text x="{left + wide // 2}" y="{top + HEIGHT // 2 + 4}" text-anchor="middle"{small}>'
        f"{escape(label)}</text></g>"
    )


def arrow(name: str, imported: str) -> str:
    """The line from the bottom of one box to the top of the other; straight down to the ground."""
    left, top, wide = span(name)
    to_left, to_top, to_wide = span(imported)
    start = left + wide // 2
    end = start if imported == "ground" else to_left + to_wide // 2
    return (
        f'<line x1="{start}" y1="{top + HEIGHT}" x2="{end}" y2="{to_top}" stroke="#555"'
        ' marker-end="url(#tip)"/>'
    )


def table() -> str:
    """Every package with its purpose and its imports, as reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 20 40 40", ""]
    rows = [("package", "purpose", "imports")]
    for name, package in PACKAGES.items():
        shown = ", ".join(f"``{one}``" for one in package.imports) or "none of these"
        rows.append((f"``{name}``", package.about.replace("`", "``"), shown))
    for row in rows:
        lines += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    path.write_text(drawing(), encoding="utf-8")
