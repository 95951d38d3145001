"""The page that steps through a ring, as `ringspec explore` writes it.

conf.py calls :func:`explore_page` after `generate.example_report`, which empties the folder. What it
writes is not stored in git.
"""

from generate import DOCS

from ringspec.cli.views.explore_records import records
from ringspec.render.explore import explore_page as page_of


def explore_page() -> None:
    """_extra/ring.html, which Sphinx copies to the root of the pages."""
    folder = DOCS / "_extra"
    folder.mkdir(exist_ok=True)
    (folder / "ring.html").write_text(page_of(records()), encoding="utf-8")
