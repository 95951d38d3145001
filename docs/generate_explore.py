"""The pages that step through a ring or another way to split attention, as `ringspec explore` writes them.

conf.py calls :func:`explore_pages` after `generate.example_report`, which empties the folder. What it
writes is not stored in git.
"""

from functools import cache

from generate import DOCS

from ringspec.cli.views.explore_bug import bug_records, where_it_shows
from ringspec.cli.views.explore_records import BUG_TOKENS, BUG_WORKERS, records
from ringspec.cli.views.explore_schemes import MESHES, scheme_records
from ringspec.conformance.diagnose.mutants import MUTANTS, precision_bugs
from ringspec.errors import OptionError
from ringspec.render.explore import explore_page as page_of


def explore_pages() -> None:
    """_extra/ring.html, schemes.html, and bug-NAME.html for each bug that a page shows; Sphinx copies them to the root."""
    folder = DOCS / "_extra"
    folder.mkdir(exist_ok=True)
    (folder / "ring.html").write_text(page_of(records()), encoding="utf-8")
    (folder / "schemes.html").write_text(page_of(scheme_records(list(MESHES))), encoding="utf-8")
    for id in filter(has_page, MUTANTS):
        page = page_of(bug_records(id, BUG_WORKERS, BUG_TOKENS, 0))
        (folder / page_name(id)).write_text(page, encoding="utf-8")


def page_name(id: str) -> str:
    return f"bug-{id}.html"


@cache
def has_page(id: str) -> bool:
    """True if a small ring shows the bug. A bug of rounding changes the last of few decimals, which says little."""
    mutant = MUTANTS[id]
    if mutant in precision_bugs.BUGS:
        return False
    try:
        where_it_shows(mutant, BUG_WORKERS, BUG_TOKENS, 0)
    except OptionError:
        return False
    return True
