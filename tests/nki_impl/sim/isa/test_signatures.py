"""Every function, method and enumeration that the simulator offers has the official signature."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from enum import Enum
from pathlib import Path

import pytest

TABLE = json.loads((Path(__file__).parents[1] / "signatures.json").read_text())
MODULES = {
    "nki.language": "nki_impl.sim.language",
    "nki.isa": "nki_impl.sim.isa",
    "nki.collectives": "nki_impl.sim.collectives",
}


def offered(kind: str) -> list[tuple[str, str]]:
    """Return (official module, name) of each entry of the table that the simulator has."""
    out: list[tuple[str, str]] = []
    for module, names in TABLE[kind].items():
        if module in MODULES:
            there = importlib.import_module(MODULES[module])
            out += [(module, name) for name in names if hasattr(there, name)]
    return out


def get(module: str, name: str) -> object:
    return getattr(importlib.import_module(MODULES[module]), name)


def official(signature: str) -> list[tuple[str, str, str | None]]:
    """Parse "(a, *b, c=1)" to (name, kind, literal default)."""
    definition = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    out: list[tuple[str, str, str | None]] = [
        (one.arg, "POSITIONAL_OR_KEYWORD", None if default is None else ast.unparse(default))
        for one, default in zip(arguments.args, [*defaults, *arguments.defaults], strict=True)
    ]
    if arguments.vararg:
        out.append((arguments.vararg.arg, "VAR_POSITIONAL", None))
    if arguments.kwarg:
        out.append((arguments.kwarg.arg, "VAR_KEYWORD", None))
    return out


def text_of(default: object) -> str | None:
    """Write a default as the stubs do."""
    if default is inspect.Parameter.empty:
        return None
    if isinstance(default, Enum):
        # The stubs write members of the memory enumeration by their alias (sbuf).
        return (
            default.name
            if type(default).__name__ == "MemoryRegion"
            else f"{type(default).__name__}.{default.name}"
        )
    if default is Ellipsis:
        return "..."
    if callable(default):
        return default.__name__
    return repr(default)


def ours(function: object) -> list[tuple[str, str, str | None]]:
    return [
        (p.name, p.kind.name, text_of(p.default))
        for p in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(("module", "name"), offered("functions"))
def test_a_function_has_the_official_parameters_and_defaults(module: str, name: str) -> None:
    assert ours(get(module, name)) == official(TABLE["functions"][module][name])


@pytest.mark.parametrize(("module", "name"), offered("methods"))
def test_methods_have_the_official_parameters_and_defaults(module: str, name: str) -> None:
    cls = get(module, name)
    for method, signature in TABLE["methods"][module][name].items():
        attribute = inspect.getattr_static(cls, method, None)
        assert attribute is not None, f"{name}.{method} is missing"
        if signature == "property":
            assert isinstance(attribute, property), method
        else:
            assert ours(attribute) == official(signature), method


@pytest.mark.parametrize(("module", "name"), offered("enums"))
def test_enumerations_have_the_official_members_and_values(module: str, name: str) -> None:
    members = {member.name: str(member.value) for member in get(module, name)}  # type: ignore[attr-defined]
    assert members == TABLE["enums"][module][name]


def test_the_functions_that_ring_attention_needs_are_offered() -> None:
    needed = {
        "nki.language": "ndarray zeros ds affine_range program_id shared_identity_matrix exp maximum add",
        "nki.isa": "nc_matmul nc_transpose dma_copy dma_transpose tensor_copy memset tensor_tensor "
        "tensor_scalar scalar_tensor_tensor tensor_reduce tensor_scalar_reduce activation "
        "activation_reduce reciprocal exponential select_reduce tensor_copy_predicated affine_select "
        "range_select iota nc_stream_shuffle max8 register_alloc register_move register_load "
        "register_store core_barrier sendrecv dma_compute tensor_partition_reduce get_nc_version",
    }
    have = set(offered("functions"))
    for module, names in needed.items():
        assert not {name for name in names.split() if (module, name) not in have}
