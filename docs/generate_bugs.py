"""Write the pages of known bugs: every mutant, its effect on the attention pattern, and the cases that find it.

conf.py calls :func:`pages` before Sphinx reads the folder. Its output, including pictures, is not
stored in git. Pictures come from runs of the mutants (:mod:`bug_runs`), and need matplotlib.
"""

import inspect
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from generate import DOCS, details, heading, open_all, plain, table
from generate_explore import has_page, page_name
from generate_vectors import link, report_name
from readouts import sentences_by_bug

from ringspec.conformance.diagnose.mutants import MODULES, MUTANTS, Mutant
from ringspec.vectors import open_set

FOLDER = DOCS / "conform" / "generated"
# Draws one bug into a file and returns the caption; tests substitute one that draws nothing.
Draw = Callable[[Mutant, Path], str]


def pages() -> None:
    """Write conform/generated/known_bugs.rst, and in bugs/ a page for each family and the pictures."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "bugs").mkdir(parents=True)
    (FOLDER / "known_bugs.rst").write_text(known_bugs(), encoding="utf-8")
    for module in MODULES:
        text = family_page(module, drawn)
        (FOLDER / "bugs" / f"{name_of(module)}.rst").write_text(text, encoding="utf-8")


def drawn(mutant: Mutant, path: Path) -> str:
    """Run the mutant, draw its effect, and return the caption."""
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
        f"This page lists {len(MUTANTS)} known bugs, {reported} of them with links to public reports. Each is implemented as a small "
        "mutation of the specification (``ringspec.conformance.diagnose.mutants``). The tests confirm that it fails "
        "the cases listed with it. :doc:`The kill table <../kill_table>` lists which cases and which tolerance rules detect "
        "each bug. To look up a bug from a report, search this page for its name.\n",
        table(families, "34 66"),
        READING_THE_PICTURES,
        ".. toctree::\n   :hidden:\n",
        *[f"   bugs/{name_of(module)}" for module in MODULES],
        "",
    ]
    return "\n".join(parts)


READING_THE_PICTURES = """The pictures
------------

Each picture shows a run with the bug on a case that detects it. It was drawn when this page was built.

* **Pairs.** With one-hot values, o is the weight matrix P; with one-hot dy, dv shows the P of the backward pass. With
  one-hot keys, dq shows dZ, the gradient of the scores before the soft cap; with one-hot queries, dk does. The left
  panel is the specification, the right one the bug. Blue: visible. Cross: visible but should be masked. Dot: missing.
  Star: NaN or infinite. A pair of P counts as visible if its weight is not 0, a pair of dZ if its value is more than
  rounding.
* **Factors.** If the pairs are correct but their numbers are not, the right panel shows each number with the bug
  divided by the correct number: white is 1, grey is masked. The left panel shows the square roots of the correct
  magnitudes, so that small ones are visible.
* **Errors.** For bugs that show neither in pairs nor in factors, and for all rounding bugs: the error of each row in
  units of its bound, in the recipe in which the case fails.

The numbers beside the rows and above the columns are the workers that own the tokens. Pairs and factors are
computed in float64, without the recipe's rounding. P includes the factors of dropout, and dZ
includes the scale. If query heads share keys, dv and dk show the sum over the group. The head that differs most is drawn.
"""


def family_page(module: ModuleType, draw: Draw) -> str:
    name = name_of(module)
    parts = [
        f".. _bugs-{name}:\n",
        heading(f"Known bugs: {name}"),
        f"{plain(what_of(module))} :ref:`The page of all bugs <known-bugs>` explains the pictures.\n",
        " · ".join(bug_link(mutant) for mutant in module.BUGS) + "\n",
        open_all(),
        *[about(mutant, draw) for mutant in module.BUGS],
    ]
    return "\n".join(parts)


def about(mutant: Mutant, draw: Draw) -> str:
    """The section of one bug: title and explanation; on a click the picture, public reports, cases that find it."""
    caption = draw(mutant, FOLDER / "bugs" / f"{mutant.id}.png")
    title = mutant.id
    folded = [
        f".. figure:: {title}.png",
        f"   :alt: {title}. {caption}",
        "",
        f"   {plain(caption)}",
        "",
        *also(mutant),
        *step_through(mutant),
        f"Reported in: {', '.join(map(report_link, mutant.links)) or 'no known public report'}.\n",
        "Detected by:\n",
        *[f"* in {recipe}: {case_link(id)}" for recipe, id in mutant.kills.items()],
        *[f"* not detected in {recipe}: {plain(why)}" for recipe, why in mutant.unseen.items()],
        "",
    ]
    return "\n".join(
        [
            f".. _bug-{title}:\n",
            f"{title}\n{'-' * len(title)}\n",
            f"*{plain(mutant.title)}*\n",
            plain(mutant.what) + "\n",
            *explained(mutant),
            details("Picture, public reports and cases", folded),
        ]
    )


def step_through(mutant: Mutant) -> list[str]:
    """A link to the page that shows the bug beside the correct ring, if there is one."""
    if not has_page(mutant.id):
        return []
    return [
        f"`Step through a ring with this bug <../../../{page_name(mutant.id)}>`__, beside the correct ring.\n"
    ]


def also(mutant: Mutant) -> list[str]:
    """Other forms of the bug that a diagnosis tries."""
    if not mutant.guises:
        return []
    return [
        "A diagnosis also tries these forms:\n",
        *[f"* {plain(g.words)}" for g in mutant.guises],
        "",
    ]


def explained(mutant: Mutant) -> list[str]:
    """What ``ringspec explain`` says of the bug (docs/readouts.py), if it explains it."""
    sentences = sentences_by_bug().get(mutant.id)
    if not sentences:
        return []
    return [f":doc:`ringspec explain <../../readout>` says: *{plain(' '.join(sentences))}*\n"]


def report_link(address: str) -> str:
    return f"`{report_name(address)} <{address}>`__"


def case_link(id: str) -> str:
    """A link from a golden case to its line in the list of all cases."""
    return link(id, id) if id in golden() else f"``{id}``"


@cache
def golden() -> frozenset[str]:
    """The ids of the core set."""
    return frozenset(open_set("core").ids)
