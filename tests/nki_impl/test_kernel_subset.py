"""The kernels' arguments, and the Python that NKI 0.6 compiles, which 0.7 also takes.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/get-started/nki-language-guide.html
(values, control flow, class support) and the migration guides beside it.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from nki_impl import kernels
from ringspec.interfaces import nkilib

from .altered import SOURCE

FILES = sorted(SOURCE.glob("*.py"))
ALLOWED_IMPORTS = {"__future__", "dataclasses", "typing", "nki_impl.lang"}
FORBIDDEN = {
    ast.AsyncFunctionDef: "async",
    ast.Await: "await",
    ast.Delete: "del",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.Global: "global",
    ast.Lambda: "a nested function",
    ast.ListComp: "a comprehension",
    ast.Match: "match",
    ast.NamedExpr: ":=",
    ast.Nonlocal: "nonlocal",
    ast.Raise: "raise",
    ast.SetComp: "a comprehension",
    ast.Starred: "a starred argument",
    ast.Try: "try",
    ast.With: "with",
    ast.Yield: "yield",
}
BUILTINS = {"float", "len", "max", "min", "range", "slice", "tuple"}


def problems(text: str, name: str) -> list[str]:
    """What a file does that is outside of the subset, with lines."""
    tree = ast.parse(text)
    imported = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    found = [
        f"{name}:{node.lineno}: a mutable constant"
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, (ast.List, ast.Dict))
        and ast.unparse(node.targets[0]) != "__all__"
    ]
    for node in ast.walk(tree):
        at = f"{name}:{getattr(node, 'lineno', 0)}: "
        if type(node) in FORBIDDEN:
            found.append(at + FORBIDDEN[type(node)])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module not in ALLOWED_IMPORTS and not str(module).startswith("nki_impl.kernels"):
                found.append(at + f"imports {module}")
        if isinstance(node, ast.FunctionDef):
            if any(isinstance(n, ast.FunctionDef) for n in ast.walk(node) if n is not node):
                found.append(at + "a nested function")
            if node.args.kwonlyargs or node.args.vararg or node.args.kwarg:
                found.append(at + "keyword-only or variable arguments")
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] != [
            "nl.NKIObject"
        ]:
            found.append(at + "a class that is no plain NKIObject")
        if isinstance(node, ast.Compare) and any(
            isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops
        ):
            if not all(isinstance(c, ast.Constant) and c.value is None for c in node.comparators):
                found.append(at + "is with something other than None")
        if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
            found.append(at + "a loop over tuples")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id not in BUILTINS | imported | defined:
                found.append(at + f"calls {node.func.id}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_kernel_file_keeps_to_the_subset(file: Path) -> None:
    assert problems(file.read_text(), file.name) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import numpy", "imports"),
        ("from nki_impl.sim import isa", "imports"),
        ("def f():\n    return [x for x in y]", "comprehension"),
        ("def f(*, x): pass", "keyword-only"),
        ("def f():\n    def g(): pass", "nested"),
        ("if x is y: pass", "other than None"),
        ("for a, b in c: pass", "tuples"),
        ("class A: pass", "NKIObject"),
        ("enumerate(x)", "calls enumerate"),
        ("raise ValueError", "raise"),
        ("A = []", "mutable"),
    ],
)
def test_what_is_outside_of_the_subset_is_seen(text: str, said: str) -> None:
    assert any(said in problem for problem in problems(text, "it"))


# Arguments that the interface does not have; they follow those that it has, and their defaults change nothing.
OWN = {"ring_attention_spmd_fwd": {"zero_lse": False, "causal_scale": "refuse"}}


@pytest.mark.parametrize("name", kernels.__all__)
def test_arguments_and_defaults_are_those_of_the_interface(name: str) -> None:
    model = dict(inspect.signature(getattr(nkilib, name)).parameters)
    model.pop("recipe", None)  # the model's own
    kernel = inspect.signature(getattr(kernels, name).function).parameters
    own = OWN.get(name, {})
    assert list(kernel) == list(model) + list(own)
    for argument, parameter in kernel.items():
        if argument != "lse_dtype":
            default = own[argument] if argument in own else model[argument].default
            assert parameter.default == default, argument
