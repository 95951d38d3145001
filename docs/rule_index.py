"""Find in the sources where each rule is stated, which tests check it and which golden cases cover it.

Nothing is imported to find a test: marks are read from the syntax tree of each file below tests/. A mark
whose rules are computed (the cases of the oracle) is not seen here; ``pytest --rule ID`` selects it too.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ringspec.conformance.cases.profiles import run_cases
from ringspec.spec.rules import RULES, Rule
from ringspec.vectors import open_set

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ringspec"
TESTS = ROOT / "tests"
# "BWD-2 to BWD-7" names the rules between as well.
NAMED = re.compile(r"\b([A-Z]+)-(\d+)(?: to \1-(\d+))?\b")
KNOWN = {rule.id for rule in RULES}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def rules_in(text: str) -> set[str]:
    """The rules that a text names.

    >>> sorted(rules_in("1 of (BWD-2 to BWD-4) and MASK-9, not UTF-8"))
    ['BWD-2', 'BWD-3', 'BWD-4', 'MASK-9']
    """
    found = set()
    for family, first, last in NAMED.findall(text):
        found |= {f"{family}-{n}" for n in range(int(first), int(last or first) + 1)}
    return found & KNOWN


def modules_of(rule: Rule) -> list[str]:
    return [f"ringspec.{module}" for module in rule.modules]


def stated_at(rule: Rule) -> list[str]:
    """Full names of the functions and classes whose text names the rule, those of its modules first."""
    order = {f"ringspec.{module}": place for place, module in enumerate(rule.modules)}
    names = [name for name, rules in stated().items() if rule.id in rules]
    return sorted(names, key=lambda name: order.get(name.rpartition(".")[0], len(order)))


@cache
def stated() -> dict[str, set[str]]:
    """What the text of each function and class of the specification names, in the order of the files."""
    found = {}
    folders = ("spec", "problem", "rings", "schemes")
    paths = [path for folder in folders for path in sorted((PACKAGE / folder).glob("*.py"))]
    paths += [PACKAGE / "formats.py", PACKAGE / "recipes.py"]
    for path in paths:
        if path.stem == "rules":
            continue
        text = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(text).body:
            if isinstance(node, Definition):
                found[f"{module}.{node.name}"] = rules_in(ast.get_source_segment(text, node) or "")
    return found


def tests_of(rule: str) -> dict[str, list[str]]:
    """Test functions by file, as paths from the root of the sources."""
    return {
        path: names
        for path, marks in marked().items()
        if (names := [name for name, rules in marks.items() if rule in rules])
    }


@cache
def marked() -> dict[str, dict[str, set[str]]]:
    """file: test: rules, of every file below tests/ with such a mark."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.rule" in text:
            found[str(path.relative_to(ROOT))] = dict(marks_of(ast.parse(text)))
    return found


def marks_of(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Each test with the rules of its decorators, of its class, and of parameters that it names.

    >>> source = '''
    ... @pytest.mark.rule("MASK-1")
    ... def test_one(): ...
    ... '''
    >>> list(marks_of(ast.parse(source)))
    [('test_one', {'MASK-1'})]
    """
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    everywhere = rules_of_marks(constants.get("pytestmark"), constants)
    yield from marks_below(tree.body, everywhere, "", constants)


def marks_below(
    body: list[ast.stmt], outer: set[str], prefix: str, constants: dict[str, ast.expr]
) -> Iterator[tuple[str, set[str]]]:
    for node in body:
        if not isinstance(node, Definition):
            continue
        rules = set(outer)
        for decorator in node.decorator_list:
            rules |= rules_of_marks(decorator, constants)
            for name in ast.walk(decorator):
                if isinstance(name, ast.Name):
                    rules |= rules_of_marks(constants.get(name.id), constants)
        if isinstance(node, ast.ClassDef):
            yield from marks_below(node.body, rules, f"{prefix}{node.name}::", constants)
        elif node.name.startswith("test"):
            yield f"{prefix}{node.name}", rules


def rules_of_marks(node: ast.AST | None, constants: dict[str, ast.expr]) -> set[str]:
    """The arguments of every ``mark.rule(..)`` in an expression, those of a table among them."""
    found: set[str] = set()
    for call in ast.walk(node) if node is not None else ():
        # unparse alone, for every call of every table, took most of the time.
        is_call = isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "rule"
        if is_call and ast.unparse(call.func).endswith("mark.rule"):
            for argument in call.args:
                found |= strings_of(argument, constants)
    return found & KNOWN


def strings_of(node: ast.expr, constants: dict[str, ast.expr]) -> set[str]:
    """String literals of an expression, and of the constants of the file that it names."""
    parts = [
        node,
        *(constants[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in constants),
    ]
    return {
        leaf.value
        for part in parts
        for leaf in ast.walk(part)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    }


def cases_of(rule: str) -> list[str]:
    """Golden cases of the core set that cover the rule, in their order."""
    return [id for id, rules in rules_of_cases().items() if rule in rules]


@cache
def layout_cases_of(rule: str) -> list[str]:
    """Cases of the operation ``layout`` that cover the rule, in their order; the core set has none of them."""
    return [case.id for case in run_cases("layouts") if rule in case.rules]


@cache
def rules_of_cases() -> dict[str, tuple[str, ...]]:
    """Every case of the core set that is not withdrawn, with its rules."""
    core = open_set("core")
    return {case.id: case.rules for case in map(core.case, core.ids) if case.withdrawn is None}
