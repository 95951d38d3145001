"""Which file of the packages imports which, read from the sources without running them.

Every import counts: at the top of a file, inside a function, and under ``if TYPE_CHECKING``. An import
of a name counts as an import of the file that the name is taken from; the packages around it do not count.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, frozenset[str]]


def files_of(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Module name: file, of every Python file of the packages below ``root``."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(files: Mapping[str, Path], with_types: bool = True) -> Graph:
    """Module: the modules among ``files`` that it imports; without those for annotations if asked."""
    return {
        name: frozenset(imported(path.read_text(encoding="utf-8"), files, with_types)) - {name}
        for name, path in files.items()
    }


def imported(source: str, known: Mapping[str, object], with_types: bool = True) -> Iterator[str]:
    """The modules among ``known`` that a source imports.

    >>> source = "from a import b\\nfrom a.b import c\\nif TYPE_CHECKING:\\n    import d\\n"
    >>> sorted(set(imported(source, dict.fromkeys(["a", "a.b", "d"]))))
    ['a.b', 'd']
    >>> sorted(set(imported(source, dict.fromkeys(["a", "a.b", "d"]), with_types=False)))
    ['a.b']
    """
    for node in nodes_of(ast.parse(source), with_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module


def nodes_of(tree: ast.AST, with_types: bool) -> Iterator[ast.AST]:
    """The statements below a node, and the handlers and cases that have statements."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts = node.body + node.orelse if with_types else node.orelse
            for part in parts:
                yield part
                yield from nodes_of(part, with_types)
        else:
            yield node
            yield from nodes_of(node, with_types)


def circles(graph: Graph) -> list[frozenset[str]]:
    """The largest sets of modules in which each reaches each other one.

    >>> graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    >>> [sorted(circle) for circle in circles(graph)]
    [['a', 'b', 'c']]
    """
    reached = {module: reachable(graph, module) for module in graph}
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return sorted(found, key=sorted)


def reachable(graph: Graph, start: str) -> set[str]:
    """Every module that ``start`` imports, directly or through others."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found
