"""The problems by which a target is read: a few rings that it claims, as calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.cases.calls import call_of, forward_alone
from ringspec.conformance.cases.problems import over
from ringspec.conformance.readout.geometry import Geometry, Window, positions
from ringspec.conformance.readout.pairs import Pairs, inputs_of, pairs_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array, Integers
from ringspec.vectors.catalogue import build
from ringspec.vectors.format.case import Case, Ring, TensorRecipe

MOST = 6
WORKERS, SLOTS, WINDOW = 3, 8, (5, 0)
LAYOUTS = ("contiguous", "zigzag", "striped")
FORMATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = {"float32": "f32", "float64": "f64", "float16": "fp16", "bfloat16": "bf16"}
# Relative to the sizes of a number's parts. Those of 16-bit formats leave room for 16-bit partial results and lse.
COARSE = 0.05
TOLERANCES = {"float64": 2e-4, "float32": 2e-4, "float16": 0.02, "bfloat16": COARSE}


@dataclass(frozen=True)
class Problem:
    """One call of a target and what it spells out."""

    case: Case
    pairs: Pairs
    call: Call
    tolerance: float

    @property
    def id(self) -> str:
        return self.case.id


def problems_for(claims: Capabilities) -> tuple[list[Problem], str]:
    """Problems of a target with these claims; or none, and the reason why not."""
    if "ring-forward" not in claims.operations:
        return [], "it needs a forward pass (operation ring-forward)"
    names = [name for name in FORMATS if name in claims.formats]
    found, reason = [], "no layout of contiguous, zigzag and striped is claimed"
    for layout, causal, window, circulation in settings(claims):
        shape = shape_for(claims, layout)
        if isinstance(shape, str):
            reason = shape
            continue
        found.append(problem(claims, names[0], layout, causal, window, circulation, shape))
    return found[:MOST], "" if found else reason


def settings(claims: Capabilities) -> Iterator[tuple[str, bool, Window | None, str]]:
    """Layout, mask and circulation, those first that say most."""
    layouts = [name for name in LAYOUTS if name in claims.layouts]
    causal, full = "causal" in claims.masks, not claims.only_causal
    circulations = claims.circulations or ("kv",)
    for circulation in circulations:
        for layout in layouts:
            if causal:
                yield layout, True, None, circulation
            if full and (layout == layouts[0] or not causal):
                yield layout, False, None, circulation
    if "window" in claims.masks and causal and layouts:
        yield layouts[0], True, WINDOW, circulations[0]


def shape_for(claims: Capabilities, layout: str) -> tuple[int, int, int, int, int] | str:
    """W, n, H, query heads of a key head, D; or why there is none."""
    several = [w for w in claims.workers or (WORKERS,) if w >= WORKERS]
    workers = min(several) if several else max(claims.workers or (WORKERS,))
    ratios = claims.head_ratios or (2, 1)
    group = 2 if 2 in ratios else ratios[0]
    if claims.batch is not None and 1 not in claims.batch:
        return "a batch of 1 is not claimed"
    multiple = int(np.lcm(claims.tokens_multiple, 2 if layout == "zigzag" else 1))
    for slots in dict.fromkeys((-(-SLOTS // multiple) * multiple, max(multiple, 4))):
        for heads in (2 * group, group):
            least = (heads + 1) * workers * slots
            dims = claims.head_dims or (least,)
            if claims.value_dims is not None:
                dims = tuple(d for d in dims if d in claims.value_dims)
            fitting = [d for d in dims if d >= least]
            if fitting:
                return workers, slots, heads, group, min(fitting)
    return f"a head dimension of {least} or more is needed for {workers} workers with {slots} tokens each"


def problem(
    claims: Capabilities,
    storage: str,
    layout: str,
    causal: bool,
    window: Window | None,
    circulation: str,
    shape: tuple[int, int, int, int, int],
) -> Problem:
    """One problem, as a case of golden vectors over a ring."""
    workers, slots, heads, group, dim = shape
    directions = claims.directions or (1,)
    direction = 1 if 1 in directions else directions[0]
    table = positions(layout, workers, slots)
    geometry = Geometry(
        workers, circulation, direction, layout, table, causal, window, heads, group, dim**-0.5
    )
    pairs = pairs_of(geometry)
    mask = "window" if window else "causal" if causal else "full"
    id = f"readout/{mask}-{layout}-w{workers}-{circulation}"
    order = np.argsort(table.ravel())
    tensors = {
        name: TensorRecipe("values", values=in_order(x, order).tolist())
        for name, x in inputs_of(pairs, dim).items()
    }
    given: dict[str, Any] = dict(tensors)
    if causal:
        given["causal"] = True
    if window is not None:
        given["window"] = window
    whole = build.case(
        id,
        "Results that spell out the weights of each pair of tokens.",
        "",
        S=geometry.tokens,
        H=heads,
        Hkv=heads // group,
        D=dim,
        dtype=DTYPES[storage],
        **given,
    )
    case = over(whole, id, Ring(workers, layout, circulation, direction))
    call = dataclasses.replace(call_of(case, {}), circulation=circulation, direction=direction)
    if "ring-backward" not in claims.operations:
        call = forward_alone(call)
    return Problem(case, pairs, call, TOLERANCES[storage])


def in_order(x: Array, order: Integers) -> Array:
    """[W, heads, n, d] of the workers as [1, heads, S, d] in the order of the tokens."""
    workers, heads, slots, width = x.shape
    return x.swapaxes(0, 1).reshape(heads, workers * slots, width)[None, :, order]
