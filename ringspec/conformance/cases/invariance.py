"""Probes that change inputs, and check that results that do not depend on these inputs stay the same.

A probe is a case with simple inputs, whose failure shows its cause. If a target (the program under test) claims
``repeats_bitwise``, the results must be bit-identical. Otherwise they may differ by rounding, within the error bounds
of their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import expected_of
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import (
    DTYPES,
    HEAD_DIM,
    MASKS,
    RINGS,
    USUAL_DTYPES,
    Seen,
    dealt,
    drawn,
    few_rings,
    run_case,
    side_of,
    tables_of,
    tensors_of,
)
from ringspec.conformance.diagnose.picture import gathered, numbers, place
from ringspec.conformance.judge.bounds import bounds_of
from ringspec.formats import format_of
from ringspec.problem.options import default_scale
from ringspec.vectors.catalogue.build import put, times
from ringspec.vectors.format.case import Case, Patch
from ringspec.vectors.format.requires import visible

# The changed tokens under each mask: keys that some queries cannot see, and queries that cannot see some keys.
CHANGED = {
    "causal": ((30, 48), (0, 30)),
    "window": ((0, 5), (40, 48)),
    "documents": ((14, 37), (14, 37)),
}
Whole = NDArray[np.float64]


def isolation_cases() -> Iterator[RunCase]:
    """Yield cases that change keys that some queries do not see, or dy of queries that do not see some keys."""
    for mask, (keys, queries) in CHANGED.items():
        for dtype in DTYPES:
            base = drawn(f"isolation-{mask}", dtype, **MASKS[mask])
            forward = drawn(f"isolation-{mask}", dtype, backward=False, **MASKS[mask])
            every = mask == "causal" and dtype in USUAL_DTYPES
            for workers, layout in RINGS if every else few_rings(dtype):
                name = f"{mask}-{layout}-w{workers}-{dtype}"
                ring = (workers, layout)
                yield hidden_keys(f"probe/hidden-keys/{name}", forward, keys, ring)
                yield hidden_queries(f"probe/hidden-queries/{name}", base, queries, ring)


def hidden_keys(id: str, base: Case, keys: tuple[int, int], ring: tuple[int, str]) -> RunCase:
    a_lot = {
        "k": (times(8.0, None, None, keys, None),),
        "v": (times(-256.0, None, None, keys, None),),
    }
    a_little = {"k": (put(0.0, None, None, keys, 0),), "v": (put(0.0, None, None, keys, 0),)}
    problems = (base, patched(base, a_lot), patched(base, a_little))
    return run_case(
        id,
        "Some keys and values change, by a lot or a little: queries that do not see them keep their o and lse.",
        [dealt(p, f"{id}-{part}", *ring) for p, part in zip(problems, "abc", strict=True)],
        Unchanged("keys and values", keys),
        rules=("MASK-9", "FWD-4"),
        flags=("mask-ignored-in-ring", "causal-on-every-step", "sentinel"),
    )  # fmt: skip


def hidden_queries(id: str, base: Case, queries: tuple[int, int], ring: tuple[int, str]) -> RunCase:
    changes = {"dy": (times(-64.0, None, None, queries, None),)}
    problems = (base, patched(base, changes))
    return run_case(
        id,
        "The dy of some queries changes a lot: the dq of all other queries, and the dk and dv of keys "
        "that none of the changed queries sees, stay the same.",
        [dealt(p, f"{id}-{part}", *ring) for p, part in zip(problems, "ab", strict=True)],
        Unchanged("dy of queries", queries),
        only_backward=True,
        rules=("MASK-9", "BWD-6", "BWD-7"),
        flags=("mask-ignored-in-ring", "delta-of-few-rows"),
    )


def patched(case: Case, changes: Mapping[str, tuple[Patch, ...]]) -> Case:
    """Return a problem whose inputs are drawn as in ``case`` and then changed as ``changes`` says."""
    tensors = dict(case.inputs.tensors)
    for name, patches in changes.items():
        tensors[name] = dataclasses.replace(tensors[name], patches=patches)
    return dataclasses.replace(case, inputs=dataclasses.replace(case.inputs, tensors=tensors))


@dataclass(frozen=True)
class Unchanged:
    """Checks that each call gives the same results as the first call.

    Rows that depend on the tokens ``changed`` (first, stop) may differ. ``what``: the changed input, for the message.
    """

    what: str
    changed: tuple[int, int]

    def __call__(self, seen: Seen) -> tuple[str, None]:
        for call in range(1, len(seen.calls)):
            for name in seen.outputs[call]:
                rows = differing(seen, call, name).any(axis=(0, 1))
                touched = np.flatnonzero(rows & self.must_stay(seen.cases[0], name))
                if touched.size:
                    return self.message(seen, call, name, touched), None
        return "", None

    def must_stay(self, case: Case, name: str) -> NDArray[np.bool_]:
        """Return [S]: True for the rows of a tensor that do not depend on the changed tokens."""
        assert case.shape is not None
        part = slice(*self.changed)
        sees = np.asarray(visible(case, case.shape).any(axis=(0, 1)))
        if self.what == "keys and values":
            blind = np.asarray(~sees[:, part].any(axis=1))
            return blind if name in ("o", "lse") else np.zeros(1, np.bool_)
        if name in ("dk", "dv"):
            return np.asarray(~sees[part].any(axis=0))
        stays = np.ones(len(sees), dtype=np.bool_)
        stays[part] = name in ("o", "lse")
        return stays

    def message(self, seen: Seen, call: int, name: str, touched: NDArray[np.int64]) -> str:
        same = "bit for bit the same" if seen.claims.repeats_bitwise else "the same within noise"
        return (
            f"When the {self.what} {self.changed[0]}-{self.changed[1] - 1} changed, {name} of "
            f"{whose(seen, call, name, touched)} did not stay {same}, although it does not "
            "depend on them."
        )


def whose(seen: Seen, call: int, name: str, touched: NDArray[np.int64]) -> str:
    """Name tokens and their workers: 'tokens 3-5 (worker 0)'."""
    table = tables_of(tensors_of(seen.cases[call]))[side_of(name)]
    workers = sorted({place(int(token), table)[0] for token in touched})
    return f"{numbers('token', touched)} ({numbers('worker', workers)})"


def differing(seen: Seen, call: int, name: str, factor: float = 1.0) -> NDArray[np.bool_]:
    """Return [B, H, S]: True for rows in which a tensor of a call is not ``factor`` times that of the first call.

    Rows are compared bit for bit if the target claims ``repeats_bitwise``, else within the bounds of both calls.
    """
    if not seen.claims.repeats_bitwise:
        return differs_in(seen, call, name, factor)
    first, later = (result_rows(seen, n, name) for n in (0, call))
    same = first * factor == later
    if factor != 1.0:  # multiplication is exact, except that halving a subnormal number rounds it
        least = format_of(seen.calls[0].formats["outputs"]).smallest_subnormal
        same |= np.abs(first * factor - later) <= least
    return ~same.all(axis=3)


def differs_in(seen: Seen, call: int, name: str, factor: float = 1.0) -> NDArray[np.bool_]:
    """Return [B, H, S] as :func:`differing` does, always within the bounds of both calls."""
    first, later = (result_rows(seen, n, name) for n in (0, call))
    bounds = [bound_rows(seen, n, name) for n in (0, call)]
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(later - factor * first) <= factor * bounds[0] + bounds[1]
        return ~(near | (factor * first == later)).all(axis=3)


def result_rows(seen: Seen, call: int, name: str) -> Whole:
    """Return a tensor of a call in global order, [B, H, S, d]; d = 1 for lse."""
    table = tables_of(tensors_of(seen.cases[call]))[side_of(name)]
    x = gathered(seen.outputs[call][name], table)
    return x[..., None] if x.ndim == 3 else x


def bound_rows(seen: Seen, call: int, name: str) -> Whole:
    """Return the error bound of each row of a call's tensor, [B, H, S, 1]."""
    case, bounds = seen.cases[call], bounds_of(seen.claims, seen.calls[call])
    tensors = tensors_of(case)
    expected = expected_of(case, tensors)[name]
    scale = gathered(expected.scale, tables_of(tensors)[side_of(name)])
    return (bounds.factors[name] * scale + bounds.floors[name])[..., None]


def same_bits_cases() -> Iterator[RunCase]:
    """Yield cases that repeat a call, and cases that move a factor of 2 from the softmax scale to q."""
    for dtype in DTYPES:
        base = drawn("same-bits", dtype, causal=True)
        for workers, layout in few_rings(dtype):
            ring, name = (workers, layout), f"{layout}-w{workers}-{dtype}"
            id = f"probe/repeat/{name}"
            yield run_case(
                id,
                "The same call three times gives the same bits if the target claims repeats_bitwise, "
                "otherwise the same results within noise.",
                [dealt(base, f"{id}-{part}", *ring) for part in "abc"],
                Multiplied({}),
                flags=("delta-of-few-rows", "buffer-reuse"),
            )
            yield moved_scale(f"probe/power-of-two/{name}", base, ring)


def moved_scale(id: str, base: Case, ring: tuple[int, str]) -> RunCase:
    """Make a case that halves the scale and doubles q: the scores stay, and dq is exactly halved."""
    half = {"scale": default_scale(HEAD_DIM) / 2}
    twice = {"q": (times(2.0, None, None, None, None),)}
    moved = dataclasses.replace(patched(base, twice), terms=dict(base.terms) | half)
    return run_case(
        id,
        "q is doubled and the scale halved: no bit of the results changes, except that dq is halved.",
        [dealt(base, f"{id}-a", *ring), dealt(moved, f"{id}-b", *ring)],
        Multiplied({"dq": 0.5}),
        rules=("FWD-1", "BWD-5"),
        flags=("scale-twice",),
    )


@dataclass(frozen=True)
class Multiplied:
    """Checks that each tensor is ``factors[name]`` times that of the first call; the default factor is 1."""

    factors: dict[str, float]

    def __call__(self, seen: Seen) -> tuple[str, None]:
        for call in range(1, len(seen.calls)):
            for name in seen.outputs[call]:
                factor = self.factors.get(name, 1.0)
                rows = differing(seen, call, name, factor).any(axis=(0, 1))
                if rows.any():
                    wanted = "that" if factor == 1.0 else f"{factor:g} times that"
                    where = whose(seen, call, name, np.flatnonzero(rows))
                    return (
                        f"{name} of call {call + 1} is not {wanted} of call 1, for {where}.",
                        None,
                    )
        return "", None
