"""Shares of equal bits between a merger and a recipe, over the golden set and over random parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from merges.partials import Case, equal_bits

from ringspec.merges import MERGES, Functions, MergeRecipe, merge
from ringspec.vectors import open_set
from ringspec.vectors.merge_bits import parts_of


@dataclasses.dataclass
class Shares:
    """Elements compared and equal, of o and of lse, for each format of o; the first case that differs."""

    equal: dict[str, int] = dataclasses.field(default_factory=dict)
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    first: str = ""

    def add(self, case: str, fmt: str, tensor: str, got: np.ndarray, want: np.ndarray) -> None:
        same = equal_bits(got, want)
        key = f"{tensor} of {fmt} parts"
        self.equal[key] = self.equal.get(key, 0) + int(same.sum())
        self.compared[key] = self.compared.get(key, 0) + same.size
        if not same.all() and not self.first:
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            self.first = f"{case} {tensor}{list(at)}: {got[at]!r}, the recipe {want[at]!r}"

    @property
    def differing(self) -> dict[str, int]:
        return {key: self.compared[key] - self.equal[key] for key in self.compared}


def golden_parts(recipe: str) -> list[tuple[str, str, list[Any], Any]]:
    """Return (id, format of o, parts, tensors) of the cases of the set merge that have the bits of ``recipe``."""
    vectors, found = open_set("merge"), []
    for case in vectors:
        tensors = vectors.tensors(case.id)
        if f"bits.{recipe}.o" not in tensors or tensors["in.parts_o"].dtype == np.float16:
            continue
        inputs = {k.removeprefix("in."): x for k, x in tensors.items() if k.startswith("in.")}
        found.append((case.id, inputs["parts_o"].dtype.name, parts_of(inputs), tensors))
    return found


def random_parts(workers: int, fmt: str, seed: int) -> list[Any]:
    """Return parts of 72 rows and 7 columns, 30 % of the rows empty for odd seeds."""
    empty, spread = (0.3 if seed % 2 else 0.0), (12.0 if seed % 3 else 1.0)
    case = Case(workers, 0, False, fmt, empty, spread, level=(1000.0 if seed % 5 == 4 else 3.0))
    return case.parts("BHS", seed)


def compared(
    merger: Any, recipe: MergeRecipe, functions: Functions, seeds: int = 8
) -> dict[str, Shares]:
    """Compare over the golden set and over random parts of W = 2, 4, 8."""
    golden, drawn = Shares(), Shares()
    for id, fmt, parts, _ in golden_parts(recipe.name):
        if len(parts) > 1:
            add(golden, id, fmt, merger, parts, recipe, functions)
    for fmt in ("float32", "bfloat16"):
        for workers in (2, 4, 8):
            for seed in range(seeds):
                parts = random_parts(workers, fmt, seed)
                add(drawn, f"W = {workers}, seed {seed}", fmt, merger, parts, recipe, functions)
    return {"golden": golden, "random": drawn}


def add(
    shares: Shares,
    case: str,
    fmt: str,
    merger: Any,
    parts: Any,
    recipe: MergeRecipe,
    functions: Functions,
) -> None:
    for tensor, got, want in zip(
        ("o", "lse"), merger(parts), merge(parts, recipe, functions), strict=True
    ):
        shares.add(case, fmt, tensor, got, want)


def certain_bits(merger: Any, name: str) -> Shares:
    """Compare the merger with the bits that the golden set says are certain."""
    found = Shares()
    for id, fmt, parts, tensors in golden_parts(name):
        if len(parts) < 2:
            continue
        for tensor, got in zip(("o", "lse"), merger(parts), strict=True):
            known = tensors[f"certain.{name}.{tensor}"]
            want = tensors[f"bits.{name}.{tensor}"]
            found.add(id, fmt, tensor, got.reshape(want.shape)[known], want[known])
    return found


def candidates(name: str) -> dict[str, MergeRecipe]:
    """Return the recipes of which one describes the kernel, depending on its release."""
    found = {"table": MERGES[name]}
    if name == "vllm_merge":
        found["0.33"] = MERGES["vllm_merge_0_33"]
    if MERGES[name].skips == "zero_weight":
        found["skips nothing"] = MERGES[name].replace(skips="nothing")
    return found
