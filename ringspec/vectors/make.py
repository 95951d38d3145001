"""Golden values for your own problem: make cases of any shape, derive their values, and write them as a set.

The id of a case seeds its inputs, so the same id, shape and format give the same bytes on every machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from ringspec.errors import OptionError, nearest, shown
from ringspec.vectors.catalogue.build import DTYPES, bias_of, case, spread
from ringspec.vectors.format.case import Case, Ring, Shape
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.generate import write_derived
from ringspec.vectors.sets.stored import VectorSet

__all__ = ["MOST_TERMS", "make", "make_case"]

# The largest B * H * Sq * Sk * (D + Dv): a quarter of an hour of exact arithmetic, or more.
MOST_TERMS = 1 << 32
REASON = "Made for one shape: {}."


def make_case(
    id: str,
    shape: Shape,
    *,
    dtype: str = "bf16",
    ring: Ring | None = None,
    backward: bool = True,
    sinks: int = 0,
    bias: bool = False,
    dlse: bool = False,
    **terms: Any,
) -> Case:
    """Make a case of any shape, with random inputs; :func:`make` derives its values.

    ``id``: the name of the case in its set, such as 'mine/causal', which also seeds the inputs. ``shape``: lengths of
    the axes. ``dtype``: 'bf16', 'fp16', 'f32' or 'f64', of inputs and outputs. ``ring``: workers and layout; None:
    dense attention. ``backward``: whether the case has gradients. ``sinks``: number of sinks per head. ``bias``:
    whether there is a bias [1, H, Sq, Sk]. ``dlse``: whether there is an upstream gradient of lse. ``terms``:
    ``scale``, ``causal``, ``window``, ``softcap``, ``dropout_p``, ``dropout_seed``, ``q_offset``, ``cu_seqlens``,
    ``cu_seqlens_k``, as in ``ringspec.attention``. Raises OptionError or VectorError if the case is not valid.

    >>> made = make_case("mine/small", Shape(1, 4, 2, 32, 32, 8, 8), ring=Ring(2, "zigzag"), causal=True)
    >>> made.operation, made.requires["workers"], made.requires["head_ratio"]
    ('ring', 2, 2)
    """
    if dtype not in DTYPES:
        raise OptionError("a dtype", shown(dtype), nearest(dtype, DTYPES), code="unknown-name")
    size = shape.B * shape.H * shape.Sq * shape.Sk * (shape.D + shape.Dv)
    if size > MOST_TERMS:
        raise OptionError(
            f"B * H * Sq * Sk * (D + Dv) of at most {MOST_TERMS}", str(size), "choose fewer tokens"
        )
    tensors: dict[str, Any] = {}
    if sinks:
        tensors["sinks"] = spread(-1.0, 0.25, 11, shape.H, sinks)
    if bias:
        tensors["bias"] = bias_of(1, shape.H, shape.Sq, shape.Sk)
    if dlse:
        tensors["dlse"] = True
    made = case(
        id,
        REASON.format(", ".join(f"{name} = {n}" for name, n in vars(shape).items())),
        rules_of(ring, backward, terms),
        operation="attention" if ring is None else "ring",
        passes=("forward", "backward") if backward else ("forward",),
        dtype=dtype,
        ring=ring,
        **vars(shape),
        **tensors,
        **{name: value for name, value in terms.items() if value is not None},
    )
    return case_from_json(case_to_json(made))  # so that the checks of a reader apply


def rules_of(ring: Ring | None, backward: bool, terms: dict[str, Any]) -> str:
    """Return the names of the specification's rules that a case with these features tests, separated by blanks."""
    found = ["FWD-1", "FWD-4", "FWD-6"]
    found += ["BWD-3", "BWD-5", "BWD-6", "BWD-7"] if backward else []
    found += ["RING-2"] if ring is not None else []
    for name, rule in (("causal", "MASK-1"), ("window", "MASK-2"), ("cu_seqlens", "MASK-5")):
        found += [rule] if terms.get(name) else []
    return " ".join(found)


def make(
    destination: str | os.PathLike[str],
    cases: Iterable[Case],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> VectorSet:
    """Derive the correctly rounded values of cases and write them to a new folder, completely or not at all.

    ``destination`` must not exist. ``cases``: from :func:`make_case`. ``progress(done, total, id)`` is called after
    each case. Returns the set; :func:`ringspec.vectors.open_set` opens it again from its folder.
    Raises UndecidedError if a value cannot be rounded with certainty, OptionError if the folder exists.
    """
    chosen = [dataclasses.replace(one, storage="full") for one in cases]
    return write_derived(destination, "made", "1.0", chosen, 1, progress)
