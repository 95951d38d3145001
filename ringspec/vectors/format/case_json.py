"""Write and read case.json, the text that describes a case.

Equal cases have the same text. The parser is strict.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ringspec.vectors.format import json_text
from ringspec.vectors.format.case import (
    Case,
    CaseFormats,
    Inputs,
    Patch,
    Ring,
    SchemeCall,
    Shape,
    TensorRecipe,
    Withdrawn,
)
from ringspec.vectors.format.check_case import check_case

MAX_CASE_BYTES = 1 << 20


def case_from_json(text: str | bytes, what: str = "case.json") -> Case:
    """Parse a case.json; raise :class:`~ringspec.errors.VectorError` if the text is not valid.

    ``what`` names the text in messages. The text may have at most 1 MiB, which bounds time and memory; no tensor is
    made.
    """
    data = json_text.parse(text, what, MAX_CASE_BYTES, code="case-format")
    json_text.check_schema(data, "case", what, code="case-format")
    case = case_from_data(data)
    check_case(case, what)
    return case


def case_to_json(case: Case) -> str:
    """Return the text of case.json; equal cases give equal bytes.

    >>> recipe = TensorRecipe("constant", value=1.0)
    >>> case = Case(
    ...     id="attention/ones", reason="an example", operation="attention", passes=("forward",),
    ...     rules=("FWD-1",), flags=(), shape=Shape(1, 1, 1, 2, 2, 4, 4),
    ...     formats=CaseFormats("float32", "float32", "float32"), terms={"scale": 0.5}, ring=None,
    ...     inputs=Inputs("attention/ones", {"q": recipe, "k": recipe, "v": recipe}), storage="full",
    ... )
    >>> case_from_json(case_to_json(case)) == case
    True
    """
    return json_text.pretty(case_to_data(case))


def case_to_data(case: Case) -> dict[str, Any]:
    """Return the JSON data of a case, with keys in the order of the format."""
    data = {one.name: plain(getattr(case, one.name)) for one in fields(Case)}
    if case.ring is not None:
        data["ring"] = without_defaults(case.ring, "workers", "layout", "circulation", "direction")
    if not case.recipes:
        del data["recipes"]
    if case.scheme is None:
        del data["scheme"]
    else:
        data["scheme"] = without_defaults(case.scheme, "name", "mesh")
    data["inputs"] = {
        "seed": case.inputs.seed,
        "tensors": {name: recipe_to_data(one) for name, one in case.inputs.tensors.items()},
    }
    return data


def recipe_to_data(recipe: TensorRecipe) -> dict[str, Any]:
    data = without_defaults(recipe, "kind")
    if recipe.patches:
        data["patches"] = [without_defaults(patch, "at") for patch in recipe.patches]
    return data


def without_defaults(record: Any, *always: str) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their default, and those in ``always``."""
    given = {one.name: getattr(record, one.name) for one in fields(record)}
    # False == 0, but False is a value to write; None is not.
    return {
        one.name: plain(given[one.name])
        for one in fields(record)
        if one.name in always or not same(given[one.name], one.default)
    }


def same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y)


def plain(x: Any) -> Any:
    """Convert to JSON data: tuples to lists, infinities to text, dataclasses to objects."""
    if isinstance(x, tuple):
        return [plain(value) for value in x]
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(
        x, (Shape, CaseFormats, Ring, SchemeCall, Inputs, Withdrawn, TensorRecipe, Patch)
    ):
        return {one.name: plain(getattr(x, one.name)) for one in fields(x)}
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def case_from_data(data: dict[str, Any]) -> Case:
    """Make a case from the data of a case.json that satisfies the schema."""
    records: dict[str, Any] = {
        name: None if data.get(name) is None else kind(**data[name])
        for name, kind in (
            ("shape", Shape),
            ("formats", CaseFormats),
            ("ring", Ring),
            ("withdrawn", Withdrawn),
            ("scheme", SchemeCall),
        )
    }
    recipes = {name: recipe_from_data(recipe) for name, recipe in data["inputs"]["tensors"].items()}
    return Case(**data | records | {"inputs": Inputs(data["inputs"]["seed"], recipes)})


def recipe_from_data(data: dict[str, Any]) -> TensorRecipe:
    patches = tuple(Patch(**patch) for patch in data.get("patches", ()))
    return TensorRecipe(**data | {"patches": patches})
