"""The page of known bugs: every mutant, its links, and the cases that find it.

conf.py calls :func:`pages` before Sphinx reads the folder. What it writes is not stored in git.
"""

import shutil

from generate import DOCS, heading, plain

from ringspec.conformance.mutants import MUTANTS


def pages() -> None:
    """conform/generated/known_bugs.rst."""
    folder = DOCS / "conform" / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "known_bugs.rst").write_text(known_bugs(), encoding="utf-8")


def known_bugs() -> str:
    parts = [
        ".. _known-bugs:\n",
        heading("Known bugs"),
        f"{len(MUTANTS)} bugs as small mutations of the specification (``ringspec.conformance.mutants``). "
        "Each fails the cases that are named with it, in every run of the tests. What all cases, and rules in "
        "use elsewhere, make of them stands in :doc:`the kill table <../kill_table>`.\n",
    ]
    for mutant in MUTANTS.values():
        parts.append(about(mutant))
    return "\n".join(parts)


def about(mutant) -> str:
    """One bug: title, what it is, where it was seen, which case finds it."""
    links = [f"* {link}" for link in mutant.links] or ["* no public report is known"]
    cases = [f"* in {recipe}: ``{id}``" for recipe, id in mutant.kills.items()]
    title = mutant.id
    return "\n".join(
        [
            f"{title}\n{'-' * len(title)}\n",
            f"*{plain(mutant.title)}*\n",
            plain(mutant.what) + "\n",
            "Seen:\n",
            *links,
            "",
            "Found by:\n",
            *cases,
            *[f"* not in {recipe}: {plain(why)}" for recipe, why in mutant.unseen.items()],
            "",
        ]
    )
