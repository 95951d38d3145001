"""Check every link of the built documentation, without a network: ``python docs/check_links.py FOLDER``.

The target of a link to a page, a file or an anchor of the folder must exist. Of other links only the form
is checked: https, no blank, no placeholder, and a host of :data:`HOSTS`, to detect mistyped hosts. Prints
each bad link with its page, and exits with 1 if there is any.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that lead somewhere.
LINKS = {
    "a": "href",
    "link": "href",
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
}
HOSTS = frozenset({
    "arxiv.org", "awsdocs-neuron.readthedocs-hosted.com", "docs.nvidia.com", "docs.pytorch.org", "docs.python.org",
    "doi.org", "github.com", "huggingface.co", "jfly.uni-koeln.de", "members.loria.fr", "numpy.org",
    "pip.repos.neuron.amazonaws.com", "pypi.org", "pytorch.org", "semver.org", "shields.io", "www.mlplatform.org",
    "www.mpi-forum.org", "www.nvidia.com", "www.sphinx-doc.org",
})  # fmt: skip
# Themes and the renderer of formulas bring these; they are no references of ours.
BROUGHT = frozenset({"cdn.jsdelivr.net", "pradyunsg.me", "jupyter.org"})
PLACEHOLDER = re.compile(r"example\.(com|org)|\bTODO\b|\bXXX\b|[<>{}]|%3[CE]|%7[BD]")
GENERATED = ("genindex.html", "search.html", "py-modindex.html")


class Page(HTMLParser):
    """The anchors of a page and its links (tag, target)."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        target = given.get(LINKS.get(tag, ""))
        if target is not None:
            self.links.append((tag, target))


def page_of(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def bad_links(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(page, link, what is wrong) of every bad link in the HTML files below ``folder``."""
    folder = folder.resolve()
    pages = {path.resolve(): page_of(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        name = str(path.relative_to(folder))
        for tag, link in dict.fromkeys(page.links):
            wrong = wrong_with(tag, link, path, folder, pages)
            if wrong:
                yield name, link, wrong


def wrong_with(tag: str, link: str, path: Path, folder: Path, pages: dict[Path, Page]) -> str:
    """What is wrong with a link of a page; '' if nothing is."""
    if link != link.strip() or re.search(r"\s", link):
        return "has a blank"
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return str(error)
    if parts.scheme in ("data", "javascript", "blob"):
        return "" if parts.scheme == "data" else f"is {parts.scheme}"
    if parts.scheme or parts.netloc:
        return wrong_outside(link)
    target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(folder):
        return "leads out of the folder"
    if not target.exists():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    # '#' alone is the top of a page; one with '=' is the state that a script reads.
    if anchor and "=" not in anchor and target in pages and target.name not in GENERATED:
        return "" if anchor in pages[target].anchors else f"there is no anchor {anchor}"
    return ""


def wrong_outside(link: str) -> str:
    """What is wrong with the form of an address.

    >>> wrong_outside("https://arxiv.org/abs/2310.01889"), wrong_outside("http://arxiv.org/abs/2310.01889")
    ('', 'is not https')
    >>> wrong_outside("https://arxvi.org/abs/1"), wrong_outside("https://github.com/<name>")
    ('host arxvi.org is not known', 'has a place to be filled in')
    """
    parts = urlsplit(link)
    if parts.scheme != "https":
        return "is not https"
    if re.search(r"\s", link):
        return "has a blank"
    if PLACEHOLDER.search(link):
        return "has a place to be filled in"
    host = (parts.hostname or "").lower()
    return "" if host in HOSTS or host in BROUGHT else f"host {host} is not known"


def main(folder: Path) -> int:
    if not any(folder.rglob("*.html")):
        print(f"{folder}: no HTML file")
        return 1
    bad = list(bad_links(folder))
    for page, link, wrong in bad:
        print(f"{page}: {link}: {wrong}")
    pages = list(folder.rglob("*.html"))
    print(f"{len(pages)} pages, {len(bad)} bad links")
    return 1 if bad else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/check_links.py FOLDER")
    sys.exit(main(Path(sys.argv[1])))
