"""Write the lists of names of the Python reference, and give its entries anchors.

A folder of FOLDERS has one page for each group of names. Its index page includes the lists that are written here:
each name with the first sentence of its docstring. The lists also have the anchors of all these names, so that a link
to the index page leads to the right row.
"""

import html
import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from generate import DOCS, RULE_ID, browsable, link_to_rule

FOLDERS = ("reference/api", "reference/conformance", "reference/compare", "vectors/functions")
LISTS = DOCS / "reference" / "generated" / "names"
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class):: (\S+)\n((?:   :.*\n)*)", re.M)
FIRST_SENTENCE = re.compile(r".*?\.(?=\s|$)", re.S)


def lists() -> None:
    """Write reference/generated/names/FOLDER-GROUP.rst for each group."""
    shutil.rmtree(LISTS, ignore_errors=True)
    LISTS.mkdir(parents=True)
    for folder in FOLDERS:
        for path in sorted((DOCS / folder).glob("*.md")):
            name = f"{path.parent.name}-{path.stem}.rst"
            (LISTS / name).write_text(names_of(path), encoding="utf-8")


def names_of(path: Path) -> str:
    """A table of the names that a page describes, with links to their descriptions."""
    page = f"{path.parent.name}/{path.stem}.html"
    rows = []
    for full, options in DIRECTIVE.findall(path.read_text(encoding="utf-8")):
        value = value_of(full)
        # Names without an index entry keep their anchors on their own page.
        kept = [] if ":no-index:" in options else [full]
        if kept and inspect.isclass(value) and ":no-members:" not in options:
            kept += [f"{full}.{name}" for name in members_of(value)]
        anchors = "".join(f'<span id="{one}"></span>' for one in kept)
        shown = html.escape(full.rpartition(".")[2])
        link = f'<a class="reference internal" href="{page}#{full}"><code>{shown}</code></a>'
        rows.append([f".. raw:: html\n\n   {anchors}<p>{link}</p>\n", first_sentence(value)])
    return browsable(["name", "what it is"], rows, "34 66")


def value_of(full: str) -> object:
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


def members_of(value: type) -> Iterator[str]:
    """Public attributes, properties and methods."""
    names = {**inspect.get_annotations(value), **vars(value)}
    return (name for name in names if not name.startswith("_"))


def first_sentence(value: object) -> str:
    """The first sentence of a docstring, as reStructuredText with links to rules.

    >>> first_sentence(value_of("ringspec.testing.Checked"))
    'The results of a check.'
    """
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    found = FIRST_SENTENCE.match(text)
    return RULE_ID.sub(link_to_rule, found[0] if found else text)


LETTER = re.compile(r'<table[^>]*genindextable">.*?</table>', re.S)
JUMPS = re.compile(r'(?<=<div class="genindex-jumpbox">).*?</div>', re.S)


def fold_index(app, exception) -> None:
    """Fold each letter of Sphinx's index of all names, which is long."""
    path = Path(app.outdir) / "genindex.html"
    if exception is None and app.builder.name == "html" and path.exists():
        path.write_text(folded_index(path.read_text(encoding="utf-8")), encoding="utf-8")


def folded_index(page: str) -> str:
    """The page of the index with a fold for the table of each letter."""

    def fold(table: re.Match[str]) -> str:
        count = table[0].count("<li>")
        words = "1 entry" if count == 1 else f"{count} entries"
        return f"<details><summary>{words}</summary>{table[0]}</details>"

    return JUMPS.sub(r'\g<0><div class="open-all"></div>', LETTER.sub(fold, page))


def give_anchors(app, doctree) -> None:
    """Give the entries of reference/api anchors. They have none, because Sphinx indexes them under other names."""
    from sphinx import addnodes

    if not app.env.current_document.docname.startswith("reference/api/"):
        return
    for entry in doctree.findall(addnodes.desc_signature):
        if not entry["ids"] and entry.parent.get("objtype") in ("function", "class"):
            entry["ids"].append(f"{entry['module']}.{entry['fullname']}")
