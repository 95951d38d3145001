"""The drawing of the packages and their imports is what the sources say."""

import doctest
import importlib

import pytest
from project.import_graph import files_of, import_graph


@pytest.fixture(scope="module")
def architecture(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "docs"))
        yield importlib.import_module("architecture")


@pytest.fixture(scope="module")
def arrows(root, architecture):
    """(importer, imported) of the packages, from the sources."""
    graph = import_graph(files_of(root, ("ringspec", "nki_impl")))
    found = set()
    for module, imported in graph.items():
        for other in imported:
            found.add((architecture.package_of(module), architecture.package_of(other)))
    return {(importer, other) for importer, other in found if importer != other}


def stated(packages):
    return {(name, other) for name, one in packages.items() for other in one.imports}


def test_every_import_between_packages_is_an_arrow_and_every_arrow_an_import(architecture, arrows):
    listed = stated(architecture.PACKAGES)
    assert sorted(arrows - listed) == [], "imports that docs/architecture.py does not list"
    assert sorted(listed - arrows) == [], "listed in docs/architecture.py, imported nowhere"


def test_every_package_has_its_box(root, architecture):
    modules = files_of(root, ("ringspec", "nki_impl"))
    found = {architecture.package_of(module) for module in modules} - {None}
    assert found == set(architecture.PACKAGES)


def test_arrows_lead_down(architecture):
    rows = {name: one.row for name, one in architecture.PACKAGES.items()}
    assert [
        pair for pair in stated(architecture.PACKAGES) if not rows[pair[0]] < rows[pair[1]]
    ] == []


def test_what_is_not_drawn_follows_from_what_is(architecture):
    drawn = architecture.drawn_arrows()
    reached = {name: set() for name in architecture.PACKAGES}
    for name in sorted(reached, key=lambda one: -architecture.PACKAGES[one].row):
        for importer, imported in drawn:
            if importer == name:
                reached[name] |= {imported} | reached[imported]
    assert all(other in reached[name] for name, other in stated(architecture.PACKAGES))


def test_the_stored_drawing_is_made_from_the_data(architecture):
    assert architecture.STORED.read_text(encoding="utf-8") == architecture.drawing(), (
        "run: python docs/architecture.py"
    )


def test_the_table_has_every_package(architecture):
    table = architecture.table()
    assert [name for name in architecture.PACKAGES if f"* - ``{name}``\n" not in table] == []


def test_the_examples_of_the_script_hold(architecture):
    assert doctest.testmod(architecture).failed == 0
