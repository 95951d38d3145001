"""What is public is in the code: modules that the documentation calls public have `__all__`."""

import importlib
import re

from project.public import CHOSEN, ROOT, public_names, value_of

PAGE = (ROOT / "docs/reference/stability.md").read_text(encoding="utf-8")
STABLE = PAGE.partition("## Stable")[2].partition("## Not stable")[0]
NAME = re.compile(r"`([\w.]+)`")


def stable() -> list[tuple[str, list[str]]]:
    """(module, names) of the table's rows; no names where only the module stands there."""
    found: list[tuple[str, list[str]]] = []
    for row in re.findall(r"^\| ([^|]*`ringspec[^|]*) \|", STABLE, re.M):
        for name in NAME.findall(row):
            if name.startswith("ringspec"):
                found.append((name, []))
            else:
                found[-1][1].append(name)
    return [one for one in found if one[0] != "ringspec.targets"]  # a group of entry points


def test_every_module_that_the_page_calls_stable_has_all():
    modules = [module for module, _ in stable()]
    assert {"ringspec", "ringspec.errors", "ringspec.tensorfile"} < set(modules)
    assert [m for m in modules if not hasattr(importlib.import_module(m), "__all__")] == []


def test_every_name_that_the_page_calls_stable_is_in_all():
    named = [(module, name) for module, names in stable() for name in names]
    assert ("ringspec.testing", "check") in named
    assert [x for x in named if x[1] not in importlib.import_module(x[0]).__all__] == []


def test_every_public_name_exists_once_and_begins_with_no_underscore():
    names = list(public_names())
    assert len(names) == len(set(names))
    assert [name for name in names if name[1].startswith("_")] == [("ringspec", "__version__")]
    for path, name in names:
        value_of(path, name)


def test_modules_with_all_are_not_listed_by_hand():
    assert [m for m in CHOSEN if hasattr(importlib.import_module(m), "__all__")] == []
