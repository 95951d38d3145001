"""Check in a case what its JSON schema cannot express: its parts must be consistent, and its tensors not too large.

After these checks it is safe to make the tensors of an untrusted case: the shapes are consistent, and each tensor has
at most :data:`~ringspec.vectors.format.inputs.LARGEST_TENSOR` elements.
"""

from __future__ import annotations

import math
import re

from ringspec.errors import RingspecError, VectorError, shown
from ringspec.vectors.format.case import PADDED_LAYOUTS, Case, Ring, SchemeCall, Shape
from ringspec.vectors.format.inputs import LARGEST_TENSOR, expected_names, shape_of

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(/[a-z0-9]+(-[a-z0-9]+)*){1,2}")
LONGEST_ID, LONGEST_PART = 120, 60
# Windows does not allow folders with these names.
RESERVED = {"con", "prn", "aux", "nul"} | {f"{x}{n}" for x in ("com", "lpt") for n in range(1, 10)}
LARGEST_POSITION = 2**61
MOST_PAIRS = 2**30
LARGEST_MESH = 1024
SCALED = ("attention", "ring", "block", "context_parallel")


def is_id(text: object) -> bool:
    """Return whether a text is a valid id. The id of a case is also the path of the case in its set.

    >>> is_id("ring/zigzag-causal-w4"), is_id("ring/../secret"), is_id("ring")
    (True, False, False)
    """
    if not isinstance(text, str) or len(text) > LONGEST_ID or not ID.fullmatch(text):
        return False
    return all(len(part) <= LONGEST_PART and part not in RESERVED for part in text.split("/"))


def check_case(case: Case, what: str) -> None:
    """Raise :class:`~ringspec.errors.VectorError` unless the parts of a case are consistent."""
    require(is_id(case.id), what, "an id of two or three short names", shown(case.id))
    for name in ("rules", "flags", "recipes"):
        names = getattr(case, name)
        require(len(set(names)) == len(names), what, f"each of the {name} once", shown(names))
    check_operation(case, what)
    if case.shape is not None:
        check_shape(case.shape, what)
    check_terms(case, what)
    if case.ring is not None:
        check_ring(case.ring, case, what)
    if case.scheme is not None:
        check_scheme(case.scheme, case, what)
    check_inputs(case, what)


def require(holds: bool, what: str, expected: str, got: str) -> None:
    if not holds:
        raise VectorError(
            f"{expected} in {what}",
            got,
            "docs/vectors describes the format; correct the case",
            code="case-format",
        )


def check_operation(case: Case, what: str) -> None:
    is_schedule, is_ring = case.operation == "schedule", case.operation == "ring"
    for name, wanted in (
        ("shape", not is_schedule),
        ("formats", not is_schedule),
        ("ring", is_schedule or is_ring),
        ("scheme", case.operation == "context_parallel"),
    ):
        given = getattr(case, name) is not None
        expected = f"{name} {'given' if wanted else 'null'} for {case.operation!r}"
        require(given == wanted, what, expected, "null" if wanted else "something")
    if case.operation == "merge":
        require(
            case.passes == ("forward",),
            what,
            "only the forward pass for a merge",
            shown(case.passes),
        )
    if is_schedule:
        require(case.terms == {}, what, "no terms for a schedule", shown(case.terms))


def check_shape(shape: Shape, what: str) -> None:
    require(shape.H % shape.Hkv == 0, what, "H as a multiple of Hkv", f"{shape.H}, {shape.Hkv}")
    pairs = shape.B * shape.H * shape.Sq * shape.Sk
    require(pairs <= MOST_PAIRS, what, f"at most {MOST_PAIRS} pairs B*H*Sq*Sk", str(pairs))


def check_terms(case: Case, what: str) -> None:
    terms, shape = case.terms, case.shape
    has_scale = case.operation in SCALED
    got = "none" if has_scale else "one"
    require(("scale" in terms) == has_scale, what, "a scale, except for a merge or schedule", got)
    of_merge = set(terms) & {"empty_lse", "lse_base"}
    if case.operation == "merge":
        require(of_merge == set(terms), what, "terms of a merge", shown(terms))
        both = "lse_base" in terms and "parts_sum" in case.inputs.tensors
        require(not both, what, "natural logarithms beside parts_sum", "lse_base")
    else:
        require(not of_merge, what, "empty_lse and lse_base for a merge alone", shown(terms))
    stored = case.operation == "merge" and case.storage == "full"
    got = shown(case.recipes)
    require(
        stored or not case.recipes, what, "recipes only for a merge that is stored in full", got
    )
    if "window" in terms:
        bounded = terms["window"] != (None, None)
        require(bounded, what, "a window with a bounded side", "[null, null]")
        fits = all(side is None or side <= LARGEST_POSITION for side in terms["window"])
        require(fits, what, "window sides up to 2**61", shown(terms["window"]))
    offset = terms.get("q_offset", 1)
    fits = offset != 0 and abs(offset) <= LARGEST_POSITION
    require(fits, what, "q_offset up to 2**61, written only if not 0", shown(offset))
    seeded = terms.get("dropout_seed", 1) != 0 and (
        "dropout_seed" not in terms or "dropout_p" in terms
    )
    require(seeded, what, "dropout_seed only with dropout_p and if not 0", shown(terms))
    for name, length in (("cu_seqlens", shape and shape.Sq), ("cu_seqlens_k", shape and shape.Sk)):
        if name in terms:
            starts = terms[name]
            rises = all(x <= y for x, y in zip(starts[:-1], starts[1:], strict=True))
            fits = rises and starts[0] == 0 and starts[-1] <= (length or 0)
            require(fits, what, f"{name} rising from 0 to at most {length}", shown(starts))
    both = "cu_seqlens" in terms or "cu_seqlens_k" not in terms
    require(both, what, "cu_seqlens together with cu_seqlens_k", "cu_seqlens_k alone")


def check_ring(ring: Ring, case: Case, what: str) -> None:
    by_table = ring.layout == "table"
    given = ring.table_q is not None
    got = "a table" if given else "no table"
    require(given == by_table, what, "table_q exactly if the layout is 'table'", got)
    require(given or ring.table_k is None, what, "table_q together with table_k", "table_k alone")
    if case.shape is None:
        return
    if ring.layout == "zigzag_per_document":
        require("cu_seqlens" in case.terms, what, "cu_seqlens for this layout", "none")
    parts = {"contiguous": 1, "striped": 1, "zigzag": 2}.get(ring.layout)
    lengths = (case.shape.Sq, case.shape.Sk)
    if parts is not None:
        divides = all(length % (parts * ring.workers) == 0 for length in lengths)
        expected = f"lengths divisible by {parts * ring.workers} for this layout"
        require(divides, what, expected, shown(lengths))
    if ring.table_q is not None:
        table_k = ring.table_q if ring.table_k is None else ring.table_k
        check_table(ring.table_q, lengths[0], ring.workers, f"table_q of {what}")
        check_table(table_k, lengths[1], ring.workers, f"the table of keys of {what}")


def check_scheme(scheme: SchemeCall, case: Case, what: str) -> None:
    """Raise VectorError unless the parts of a scheme are consistent; whether it fits the case, its derivation says."""
    require(case.storage == "full", what, "storage 'full' of a scheme", shown(case.storage))
    names = [name for name, _ in scheme.mesh]
    require(len(set(names)) == len(names), what, "each axis of the mesh once", shown(names))
    most = LARGEST_MESH
    require(scheme.ranks <= most, what, f"a mesh of at most {most} ranks", str(scheme.ranks))
    for name, wanted in (
        ("table_q", scheme.layout == "table"),
        ("cu_seqlens_padded", scheme.layout in PADDED_LAYOUTS),
    ):
        given = getattr(scheme, name) is not None
        expected = f"{name} {'with' if wanted else 'without'} the layout {scheme.layout!r}"
        require(given == wanted, what, expected, "a value" if given else "none")
    together = scheme.table_k is None or scheme.table_q is not None
    require(together, what, "table_q together with table_k", "table_k alone")
    backward_bias = "bias" in case.inputs.tensors and "backward" in case.passes
    require(not backward_bias, what, "no bias in the backward pass of a scheme", "a bias")


def check_table(table: tuple[tuple[int, ...], ...], length: int, workers: int, what: str) -> None:
    """Raise VectorError unless a table [W, n] has each token once, and -1 in padding slots (rule LAYOUT-5)."""
    rectangular = len(table) == workers and len({len(row) for row in table}) == 1
    require(rectangular, what, f"{workers} rows of equal length", f"{len(table)} rows")
    tokens = sorted(token for row in table for token in row if token >= 0)
    require(tokens == list(range(length)), what, f"each token below {length} once", "another table")


def check_inputs(case: Case, what: str) -> None:
    """Raise VectorError unless the names, shapes and sizes of a case's inputs are valid."""
    must, may = expected_names(case)
    given = set(case.inputs.tensors)
    require(must <= given, what, f"the inputs {sorted(must)}", shown(sorted(given)))
    require(given <= must | may, what, f"inputs among {sorted(must | may)}", shown(sorted(given)))
    for name in sorted(given):
        check_special_values(case, name, what)
        try:
            shape = shape_of(case, name)
        except RingspecError as error:
            raise VectorError(
                f"{error.expected} in {what}", error.got, error.fix, code="case-format"
            ) from None
        except ValueError:  # what NumPy raises for ragged values
            raise VectorError(
                f"rectangular values of {name} in {what}",
                "rows of unequal lengths",
                "give all rows the same length",
                code="case-format",
            ) from None
        fits = math.prod(shape) <= LARGEST_TENSOR
        require(fits, what, f"at most {LARGEST_TENSOR} elements in {name}", shown(shape))


def check_special_values(case: Case, name: str, what: str) -> None:
    """Raise VectorError for NaN and +inf, except in the o and in the lse of an empty part of a merge."""
    recipe = case.inputs.tensors[name]
    given = [recipe.value, *(patch.set for patch in recipe.patches)]
    require("nan" not in given or name == "parts_o", what, f"numbers in {name}", "nan")
    marked = name == "parts_lse" and "empty_lse" in case.terms
    got = "inf, which marks empty parts of a merge with the term empty_lse"
    require(math.inf not in given or marked, what, f"finite numbers or -inf in {name}", got)
