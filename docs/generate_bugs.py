"""The pages of known bugs: every mutant, what it does to the attention pattern, and the cases that find it.

conf.py calls :func:`pages` before Sphinx reads the folder. What it writes, pictures among it, is not
stored in git. Pictures come from runs of the mutants (:mod:`bug_runs`), and need matplotlib.
"""

import inspect
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from generate import DOCS, heading, plain, table
from generate_vectors import link, report_name

from ringspec.conformance.diagnose.mutants import MODULES, MUTANTS, Mutant
from ringspec.vectors import open_set

FOLDER = DOCS / "conform" / "generated"
# Draws one bug into a file and gives the caption; tests put one in its place that draws nothing.
Draw = Callable[[Mutant, Path], str]


def pages() -> None:
    """conform/generated/known_bugs.rst, and bugs/ beside it: a page for each family, and the pictures."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "bugs").mkdir(parents=True)
    (FOLDER / "known_bugs.rst").write_text(known_bugs(), encoding="utf-8")
    for module in MODULES:
        text = family_page(module, drawn)
        (FOLDER / "bugs" / f"{name_of(module)}.rst").write_text(text, encoding="utf-8")


def drawn(mutant: Mutant, path: Path) -> str:
    """Runs the mutant and draws what it does."""
    from bug_pictures import draw
    from bug_pictures_words import caption
    from bug_runs import shown

    picture = shown(mutant)
    draw(picture, path)
    return caption(picture)


def name_of(module: ModuleType) -> str:
    """
    >>> from ringspec.conformance.diagnose.mutants import travel_bugs
    >>> name_of(travel_bugs)
    'travel'
    """
    return module.__name__.rpartition(".")[2].removesuffix("_bugs")


def what_of(module: ModuleType) -> str:
    """The first sentence of the module."""
    return " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())


def bug_link(mutant: Mutant) -> str:
    return link(f"bug-{mutant.id}", mutant.id)


def known_bugs() -> str:
    families = [["family", "bugs"]]
    for module in MODULES:
        bugs = " · ".join(bug_link(mutant) for mutant in module.BUGS)
        page = f":doc:`{name_of(module)} <bugs/{name_of(module)}>` ({len(module.BUGS)})"
        families.append([f"{page}: {plain(what_of(module))}", bugs])
    reported = sum(bool(mutant.links) for mutant in MUTANTS.values())
    parts = [
        ".. _known-bugs:\n",
        heading("Known bugs"),
        f"{len(MUTANTS)} bugs as small mutations of the specification (``ringspec.conformance.diagnose.mutants``), "
        f"{reported} of them seen in public, with links. Each fails the cases that are named with it, in every "
        "run of the tests. What all cases, and rules in use elsewhere, make of them stands in "
        ":doc:`the kill table <../kill_table>`. To look a bug up by the name that a report gives it, "
        "search this page.\n",
        table(families, "34 66"),
        READING_THE_PICTURES,
        ".. toctree::\n   :hidden:\n",
        *[f"   bugs/{name_of(module)}" for module in MODULES],
        "",
    ]
    return "\n".join(parts)


READING_THE_PICTURES = """The pictures
------------

Each picture is a run of the bug on a case that catches it, drawn when this page was built.

* **Pairs.** With one-hot values, o is the matrix P of weights itself; with one-hot dy, dv shows the P that the
  backward uses; with one-hot keys, dq shows dZ, and with one-hot queries dk does. Left what the
  specification gives for these inputs, right what the bug gives. Blue: seen. A cross: too many, a pair that must
  not be seen. A dot: missing. A star: not a number, or infinite. A pair of P counts unless its weight is 0, a
  pair of dZ unless it is rounding.
* **Factors.** Where the pairs are right and their numbers are not, the right panel shows the number that the
  bug gives divided by the right one: white is 1, grey is hidden. The left panel shows the size of the right
  ones (square root of it, so that small ones are seen).
* **Errors.** Where neither shows the bug, and for all bugs of rounding: the error of each row in units of the
  bound that the suite allows it, in the recipe in which the case fails.

Numbers beside the rows and above the columns are workers: whose token it is. Pairs and factors are computed
in float64, so that no rounding is in them; P includes the factors of dropout, dZ includes the scale. Where
query heads share keys, dv and dk show the sum over the group. Of all heads the one that differs most is drawn.
"""


def family_page(module: ModuleType, draw: Draw) -> str:
    name = name_of(module)
    parts = [
        f".. _bugs-{name}:\n",
        heading(f"Known bugs: {name}"),
        f"{plain(what_of(module))} How to read the pictures stands on :ref:`the page of all bugs "
        "<known-bugs>`.\n",
        " · ".join(bug_link(mutant) for mutant in module.BUGS) + "\n",
        *[about(mutant, draw) for mutant in module.BUGS],
    ]
    return "\n".join(parts)


def about(mutant: Mutant, draw: Draw) -> str:
    """One bug: title, what it is, its picture, where it was seen, which case finds it."""
    caption = draw(mutant, FOLDER / "bugs" / f"{mutant.id}.png")
    title = mutant.id
    return "\n".join(
        [
            f".. _bug-{title}:\n",
            f"{title}\n{'-' * len(title)}\n",
            f"*{plain(mutant.title)}*\n",
            plain(mutant.what) + "\n",
            f".. figure:: {title}.png",
            f"   :alt: {title}. {caption}",
            "",
            f"   {plain(caption)}",
            "",
            *also(mutant),
            f"Seen: {', '.join(map(report_link, mutant.links)) or 'no public report is known'}.\n",
            "Found by:\n",
            *[f"* in {recipe}: {case_link(id)}" for recipe, id in mutant.kills.items()],
            *[f"* not in {recipe}: {plain(why)}" for recipe, why in mutant.unseen.items()],
            "",
        ]
    )


def also(mutant: Mutant) -> list[str]:
    """Other forms in which a diagnosis looks for the bug."""
    if not mutant.guises:
        return []
    return ["It is also looked for as:\n", *[f"* {plain(g.words)}" for g in mutant.guises], ""]


def report_link(address: str) -> str:
    return f"`{report_name(address)} <{address}>`__"


def case_link(id: str) -> str:
    """A golden case leads to its line in the list of all cases."""
    return link(id, id) if id in golden() else f"``{id}``"


@cache
def golden() -> frozenset[str]:
    """The ids of the core set."""
    return frozenset(open_set("core").ids)
