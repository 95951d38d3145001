"""The problems by which a target is read: rings that it claims, as calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ringspec.conformance.cases.calls import call_of, forward_alone
from ringspec.conformance.cases.problems import over
from ringspec.conformance.readout.geometry import Geometry, positions
from ringspec.conformance.readout.pairs import Pairs, inputs_of, pairs_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array, Integers
from ringspec.vectors.catalogue import build
from ringspec.vectors.format.case import Case, Ring, TensorRecipe

MOST = 6
WORKERS, SLOTS, MOST_SLOTS, WINDOW = 3, 8, 16, (5, 0)
LAYOUTS = ("contiguous", "zigzag", "striped")
CIRCULATIONS = ("kv", "q", "gather")
NARROW = ("bfloat16", "float16")
FORMATS = ("float32", "float64", *reversed(NARROW))
DTYPES = {"float32": "f32", "float64": "f64", "float16": "fp16", "bfloat16": "bf16"}
# Relative to the sizes of a number's parts. Those of 16-bit formats leave room for 16-bit partial results and lse.
COARSE = 0.05
PROOF_DIM = 12  # no power of two, whose scale would hide in another factor
REASON = "Results that spell out the weight of each pair of tokens."
HEAD_DIMENSION = "a head dimension"
OF_SHAPE = (HEAD_DIMENSION, "at most")
TOLERANCES = {"float64": 2e-4, "float32": 2e-4, "float16": 0.02, "bfloat16": COARSE}


@dataclass(frozen=True)
class Setting:
    """The ring that a case reads: ``mask`` is 'causal', 'full' or 'window'.

    ``workers``, ``group`` (query heads of a key head): None is 3 workers and 2 heads, or what the target claims.
    ``narrow``: 16-bit inputs.
    """

    mask: str
    layout: str
    circulation: str = "kv"
    direction: int = 1
    workers: int | None = None
    group: int | None = None
    narrow: bool = False

    @property
    def id(self) -> str:
        """The id of its case."""
        parts = [self.mask, self.layout, self.circulation]
        parts += ["backwards"] if self.direction < 0 else []
        parts += [] if self.workers is None else [f"w{self.workers}"]
        parts += [] if self.group is None else [f"ratio{self.group}"]
        return "readout/" + "-".join(parts + (["16bit"] if self.narrow else []))


def usual_settings() -> Iterator[Setting]:
    """Masks, layouts and circulations, those first that say most."""
    for circulation in CIRCULATIONS:
        for layout in LAYOUTS:
            yield Setting("causal", layout, circulation)
            if circulation == "kv" or layout == LAYOUTS[0]:
                yield Setting("full", layout, circulation)
    for layout in LAYOUTS:
        yield Setting("window", layout)


def other_settings() -> Iterator[Setting]:
    """Rings on which faults of the other direction, of rounding, of more workers and of other heads show."""
    for circulation in CIRCULATIONS[:2]:
        yield Setting("causal", LAYOUTS[0], circulation, direction=-1)
    yield Setting("causal", LAYOUTS[1], narrow=True)
    yield Setting("causal", LAYOUTS[0], workers=4)
    for group in (1, 4):
        yield Setting("causal", LAYOUTS[0], group=group)


USUAL = tuple(usual_settings())
SETTINGS = (*USUAL, *other_settings())


@dataclass(frozen=True)
class Problem:
    """One call of a target and what it spells out.

    ``proof``, ``proof_case``: the same ring with random inputs. What is read has to give its results as well.
    """

    case: Case
    pairs: Pairs
    call: Call
    tolerance: float
    proof_case: Case
    proof: Call

    @property
    def id(self) -> str:
        return self.case.id


def problems_for(claims: Capabilities) -> tuple[list[Problem], str]:
    """The first usual problems of a target with these claims; or none, and the reason why not."""
    found, reasons = [], []
    for setting in USUAL:
        made = problem_for(setting, claims)
        if isinstance(made, Problem):
            found.append(made)
        else:
            reasons.append(made)
    last = max(reasons, key=lambda reason: reason.startswith(OF_SHAPE), default="")
    return found[:MOST], "" if found else f"it needs {last}"


@lru_cache(maxsize=64)
def problem_for(setting: Setting, claims: Capabilities) -> Problem | str:
    """The problem of a setting for a target with these claims, or the reason why there is none."""
    reason = unclaimed(setting, claims)
    if reason:
        return reason
    names = [name for name in (NARROW if setting.narrow else FORMATS) if name in claims.formats]
    shape = shape_for(claims, setting)
    return shape if isinstance(shape, str) else problem(setting, names[0], shape, claims)


def unclaimed(setting: Setting, claims: Capabilities) -> str:
    """Why a target with these claims does not get a setting; empty if it gets it."""
    usual = usual_workers(claims)
    several = set(claims.layouts) & set(LAYOUTS)
    reasons = {
        "a forward pass (operation ring-forward)": "ring-forward" not in claims.operations,
        f"layout {setting.layout}": setting.layout not in claims.layouts,
        "mask causal": setting.mask != "full" and "causal" not in claims.masks,
        "mask window": setting.mask == "window" and "window" not in claims.masks,
        "a call without a mask": setting.mask == "full" and claims.only_causal,
        "no other layout, which is read without a mask": setting.mask == "full"
        and setting.layout != LAYOUTS[0]
        and bool(several - {setting.layout})
        and "causal" in claims.masks,
        f"circulation {setting.circulation}": setting.circulation
        not in (claims.circulations or ("kv",)),
        f"direction {setting.direction}": setting.direction not in (claims.directions or (1,))
        and (setting.direction == -1 or -1 not in (claims.directions or ())),
        "a batch of 1": claims.batch is not None and 1 not in claims.batch,
        f"{setting.workers} workers": setting.workers is not None
        and (setting.workers == usual or setting.workers not in (claims.workers or (usual, 4))),
        f"{setting.group} query heads of a key head": setting.group is not None
        and (
            setting.group == usual_group(claims)
            or setting.group not in (claims.head_ratios or (1, 2, 4))
        ),
        "a 16-bit format besides a wider one": setting.narrow
        and (not set(NARROW) & set(claims.formats) or set(claims.formats) <= set(NARROW)),
        "an input format": not set(FORMATS) & set(claims.formats),
    }
    missing = [words for words, is_missing in reasons.items() if is_missing]
    return missing[0] if missing else ""


def usual_workers(claims: Capabilities) -> int:
    several = [w for w in claims.workers or (WORKERS,) if w >= WORKERS]
    return min(several) if several else max(claims.workers or (WORKERS,))


def usual_group(claims: Capabilities) -> int:
    ratios = claims.head_ratios or (2, 1)
    return 2 if 2 in ratios else ratios[0]


def shape_for(claims: Capabilities, setting: Setting) -> tuple[int, int, int, int, int] | str:
    """W, n, H, query heads of a key head, D; or why there is none."""
    workers = setting.workers or usual_workers(claims)
    group = setting.group or usual_group(claims)
    zigzag = setting.layout == "zigzag"
    multiple = int(np.lcm(claims.tokens_multiple, 2 if zigzag else 1))
    if multiple > MOST_SLOTS:
        return f"at most {MOST_SLOTS} tokens on a worker"
    for slots in dict.fromkeys((-(-SLOTS // multiple) * multiple, max(multiple, 4))):
        for heads in (2 * group, group) if group < 4 else (group,):
            least = (heads + 1) * workers * slots
            dims = claims.head_dims or (least,)
            if claims.value_dims is not None:
                dims = tuple(d for d in dims if d in claims.value_dims)
            fitting = [d for d in dims if d >= least]
            if fitting:
                return workers, slots, heads, group, min(fitting)
    return f"{HEAD_DIMENSION} of at least {least}, for {workers} workers with {slots} tokens each"


def problem(
    setting: Setting, storage: str, shape: tuple[int, int, int, int, int], claims: Capabilities
) -> Problem:
    """One problem, as a case of golden vectors over a ring."""
    workers, slots, heads, group, dim = shape
    layout, circulation, id = setting.layout, setting.circulation, setting.id
    directions = claims.directions or (1,)
    direction = setting.direction if setting.direction in directions else directions[0]
    causal, window = setting.mask != "full", WINDOW if setting.mask == "window" else None
    table = positions(layout, workers, slots)
    geometry = Geometry(
        workers, circulation, direction, layout, table, causal, window, heads, group, dim**-0.5
    )
    pairs = pairs_of(geometry)
    order = np.argsort(table.ravel())
    tensors = {
        name: TensorRecipe("values", values=in_order(x, order).tolist())
        for name, x in inputs_of(pairs, dim).items()
    }
    terms: dict[str, Any] = {"causal": True} if causal else {}
    if window is not None:
        terms["window"] = window

    def over_ring(id: str, dim: int, **given: Any) -> tuple[Case, Call]:
        heads_of_keys, dtype = heads // group, DTYPES[storage]
        whole = build.case(
            id, REASON, "", S=geometry.tokens, H=heads, Hkv=heads_of_keys, D=dim, dtype=dtype, **given, **terms
        )  # fmt: skip
        case = over(whole, id, Ring(workers, layout, circulation, direction))
        call = dataclasses.replace(call_of(case, {}), circulation=circulation, direction=direction)
        return case, call if "ring-backward" in claims.operations else forward_alone(call)

    case, call = over_ring(id, dim, **tensors)
    narrow = PROOF_DIM if claims.head_dims is None and claims.value_dims is None else dim
    return Problem(case, pairs, call, TOLERANCES[storage], *over_ring(f"{id}-proof", narrow))


def in_order(x: Array, order: Integers) -> Array:
    """[W, heads, n, d] of the workers as [1, heads, S, d] in the order of the tokens."""
    workers, heads, slots, width = x.shape
    return x.swapaxes(0, 1).reshape(heads, workers * slots, width)[None, :, order]
