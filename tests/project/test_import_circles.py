"""No file of the packages imports, directly or through others, a file that imports it."""

import doctest

import pytest
from project import import_graph
from project.import_graph import circles, files_of

# To be deleted with the circle.
# Each of these is closed only by an import for annotations, which never runs.
CIRCLES_OF_ANNOTATIONS = {
    frozenset({"ringspec.rings.run", "ringspec.rings.show"}),
    frozenset(
        f"nki_impl.sim.{name}"
        for name in (
            "machine.core",
            "machine.dependence",
            "machine.ledger",
            "machine.races",
            "machine.rewrites",
            "machine.turns",
            "memory.registers",
            "operators.refusal",
            "tensor.patterns",
            "tensor.views",
        )
    ),
}


@pytest.fixture(scope="module")
def modules(root):
    found = files_of(root, ("ringspec", "nki_impl"))
    assert {"ringspec", "ringspec.spec.essence", "nki_impl.target"} <= set(found)
    return found


def arrows(graph, circle):
    """The imports inside a circle, one a line, for the message of a failure."""
    return [
        f"{name} -> {other}" for name in sorted(circle) for other in sorted(graph[name] & circle)
    ]


def new_circles(graph, known):
    return [arrows(graph, circle) for circle in circles(graph) if circle not in known]


def test_no_circle_of_files_when_the_imports_run(modules):
    graph = import_graph.import_graph(modules, with_types=False)
    assert new_circles(graph, set()) == []


def test_no_new_circle_of_files_through_imports_for_annotations(modules):
    graph = import_graph.import_graph(modules)
    assert new_circles(graph, CIRCLES_OF_ANNOTATIONS) == []


def test_a_circle_through_an_import_inside_a_function_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from package.two import x\n")
    (package / "two.py").write_text("def x():\n    from package import three\n")
    (package / "three.py").write_text("import package.one\n")
    graph = import_graph.import_graph(files_of(tmp_path, ("package",)))
    assert new_circles(graph, set()) == [
        [
            "package.one -> package.two",
            "package.three -> package.one",
            "package.two -> package.three",
        ]
    ]


def test_the_examples_of_import_graph_hold():
    assert doctest.testmod(import_graph).failed == 0
