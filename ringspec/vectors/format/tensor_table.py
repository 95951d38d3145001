"""The name, dtype and shape of each tensor of a case, in a table that is derived only from case.json.

``docs/vectors`` describes the same table. Sets are compared with the table when they are written and when they are
checked, so that a reader in another language can rely on the names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from numpy.typing import NDArray

from ringspec.errors import VectorError, shown
from ringspec.tensorfile import dtype_code
from ringspec.vectors.format.case import Case, Ring, Shape
from ringspec.vectors.format.inputs import BOOLEANS, format_of_input, shape_of
from ringspec.vectors.format.shards import fault_of_shards

CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SAMPLED_ROWS = 16
SUMS = ("dsinks", "dsinks_sum", "dbias", "dbias_sum")
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Entry:
    """The dtype of a tensor, as a ``code`` of the safetensors format, and the lengths of its ``axes`` (None: any)."""

    code: str
    axes: Axes
    optional: bool = False


def whole_tensors(case: Case) -> dict[str, Entry]:
    """Return the entries of all tensors of a case, at full size: inputs, expected values, row scales, layouts.

    The ``digests`` of a case have names from this table.
    """
    if case.operation == "schedule":
        return dict(schedule_tables(case))
    table = {}
    for name in case.inputs.tensors:
        storage = format_of_input(case, name)
        code = CODES[storage] if storage else "BOOL" if name in BOOLEANS else "I64"
        table[f"in.{name}"] = Entry(code, shape_of(case, name))
    for name, axes in results(case).items():
        table.update(expected_values(case, name, axes))
        table[f"scale.{name}"] = Entry("F64", axes if name in (*SUMS, "lse") else axes[:-1])
    return table | dict(layout_tables(case)) | dict(recipe_tables(case))


def stored_tensors(case: Case) -> dict[str, Entry]:
    """Return the entries of the tensors that a case's file holds: none, all, or 16 rows of each worker."""
    if case.storage == "digests":
        return {}
    table = whole_tensors(case)
    return table if case.storage == "full" else dict(sampled(case, table))


def schedule_tables(case: Case) -> Iterator[tuple[str, Entry]]:
    workers = workers_of(case)
    for one in case.passes:
        yield f"out.visitor.{one}", Entry("I64", (None, workers))
        yield f"out.target.{one}", Entry("I64", (None, workers))


def workers_of(case: Case) -> int:
    return 1 if case.ring is None else case.ring.workers


def results(case: Case) -> dict[str, Axes]:
    """Return the shape of each expected tensor."""
    shape = case.shape
    assert shape is not None  # check_case: only a schedule has none
    if case.scheme is not None:
        return shards(case, case.scheme.ranks)
    if case.ring is None:
        return by_pass(case, (), shape.Sq, shape.Sk)
    slots_q, slots_k = slots(case, case.ring)
    table = by_pass(case, (case.ring.workers,), slots_q, slots_k)
    if "dsinks" in table:
        table["dsinks_sum"] = table["dsinks"][1:]
    # With a separate bias row for each query, dbias is not summed over workers.
    if "dbias" in table and shape_of(case, "bias")[2] == 1:
        table["dbias_sum"] = table["dbias"][1:]
    return table


def by_pass(case: Case, workers: Axes, n_q: int | None, n_k: int | None) -> dict[str, Axes]:
    shape, given = case.shape, case.inputs.tensors
    assert isinstance(shape, Shape)
    b, h, kv = shape.B, shape.H, shape.Hkv
    table: dict[str, Axes] = {}
    if "forward" in case.passes:
        table |= {"o": (*workers, b, h, n_q, shape.Dv), "lse": (*workers, b, h, n_q)}
    if "backward" in case.passes:
        table["dq"] = (*workers, b, h, n_q, shape.D)
        table["dk"] = (*workers, b, kv, n_k, shape.D)
        table["dv"] = (*workers, b, kv, n_k, shape.Dv)
        if "sinks" in given:
            table["dsinks"] = (*workers, *shape_of(case, "sinks"))
        if "bias" in given:
            bias = shape_of(case, "bias")
            rows = 1 if bias[2] == 1 else n_q
            table["dbias"] = (*workers, bias[0], bias[1], rows, bias[3])
    return table


def expected_values(case: Case, name: str, axes: Axes) -> dict[str, Entry]:
    """Return the entries of one expected tensor, which is stored in float64 and in the format of the case."""
    formats = case.formats
    assert formats is not None  # check_case: only a schedule has none
    of_rows = name in ("lse", "dsinks", "dsinks_sum")
    names = {"float64", formats.statistics if of_rows else formats.outputs}
    return {f"out.{name}.{one}": Entry(CODES[one], axes) for one in sorted(names)}


def shards(case: Case, ranks: int) -> dict[str, Axes]:
    """Return the shapes of a scheme's results: tokens and heads of each rank; dsinks is the sum over all ranks."""
    table = by_pass(case, (), None, None)
    return {
        name: axes if name == "dsinks" else (ranks, axes[0], None, *axes[2:])
        for name, axes in table.items()
    }


def layout_tables(case: Case) -> Iterator[tuple[str, Entry]]:
    if case.scheme is not None:
        for side in "qk":
            for group, axes in (("layout", ()), ("heads", ()), ("position", (None,))):
                yield f"{group}.{side}", Entry("I64", (case.scheme.ranks, *axes, None))
    if case.ring is None:
        return
    for side, n in zip("qk", slots(case, case.ring), strict=True):
        yield f"layout.{side}", Entry("I64", (case.ring.workers, n))
        yield f"position.{side}", Entry("I64", (case.ring.workers, None, n))


def recipe_tables(case: Case) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of the bits that each merge recipe gives, in the formats of the parts, and which are certain."""
    for recipe in case.recipes:
        for name, of_part in (("o", "parts_o"), ("lse", "parts_lse")):
            code, axes = CODES[format_of_input(case, of_part) or ""], shape_of(case, of_part)[1:]
            yield f"bits.{recipe}.{name}", Entry(code, axes)
            yield f"certain.{recipe}.{name}", Entry("BOOL", axes)


def slots(case: Case, ring: Ring) -> tuple[int, int]:
    """Return n_q and n_k, the numbers of query slots and key slots on one worker; the case must have a shape."""
    shape = case.shape
    assert shape is not None
    if ring.table_q is not None:
        table_k = ring.table_q if ring.table_k is None else ring.table_k
        return len(ring.table_q[0]), len(table_k[0])
    starts_q = case.terms.get("cu_seqlens", (0,))
    starts_k = case.terms.get("cu_seqlens_k", starts_q)
    return dealt(ring, shape.Sq, starts_q), dealt(ring, shape.Sk, starts_k)


def dealt(ring: Ring, length: int, starts: tuple[int, ...]) -> int:
    """Return the number of slots on each worker for ``length`` tokens.

    >>> dealt(Ring(2, "zigzag_per_document"), 6, (0, 4, 6))
    4
    """
    if ring.layout != "zigzag_per_document":
        return length // ring.workers
    ends = (*starts[1:], length)
    sizes = [stop - first for first, stop in zip(starts, ends, strict=True)]
    return sum(2 * -(-size // (2 * ring.workers)) for size in sizes)


def sampled(case: Case, table: dict[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """Return the entries of a sampled case: the indices of the sampled rows, these rows, whole sums, and layouts."""
    workers = workers_of(case)
    sides = {"o": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}
    for side in sorted({sides[name] for name in results(case) if name in sides}):
        yield f"rows.{side}", Entry("I64", (workers, SAMPLED_ROWS, 3))
    for name, entry in table.items():
        group, _, rest = name.partition(".")
        tensor = rest.partition(".")[0]
        if group in ("layout", "position"):
            yield name, Entry(entry.code, entry.axes, optional=group == "position")
        elif tensor in SUMS and group != "in":
            yield name, Entry(entry.code, entry.axes, optional=tensor.startswith("dbias"))
        elif group != "in":
            tail = entry.axes[-1:] if group == "out" and tensor != "lse" else ()
            yield name, Entry(entry.code, (workers, SAMPLED_ROWS, *tail))


def check_tensors(case: Case, tensors: Mapping[str, NDArray]) -> None:
    """Raise :class:`~ringspec.errors.VectorError` unless ``tensors`` have the names, dtypes and shapes of the table."""
    table = stored_tensors(case)
    missing = {name for name, entry in table.items() if not entry.optional} - set(tensors)
    if missing or set(tensors) - set(table):
        odd = sorted(missing) or sorted(set(tensors) - set(table))
        refuse(case, f"the tensors {', '.join(sorted(table)) or 'none'}", named(bool(missing), odd))
    for name, x in tensors.items():
        entry = table[name]
        fits = len(x.shape) == len(entry.axes) and all(
            n == wanted or wanted is None for n, wanted in zip(x.shape, entry.axes, strict=True)
        )
        if dtype_code(x.dtype) != entry.code or not fits:
            wanted = str(entry.axes).replace("None", "any")
            got = f"{dtype_code(x.dtype)} of shape {x.shape}"
            refuse(case, f"{name} as {entry.code} of shape {wanted}", got)
    if case.scheme is not None:
        check_shards(case, tensors)
    check_digest_names(case)


def check_shards(case: Case, tensors: Mapping[str, NDArray]) -> None:
    """Raise VectorError unless the tables of a scheme name each token and head, and the results have their shapes."""
    assert case.shape is not None  # check_case: only a schedule has none
    fault = fault_of_shards(case.shape, tensors)
    if fault is not None:
        refuse(case, *fault)


def check_digest_names(case: Case) -> None:
    """Raise VectorError unless every input and every expected tensor has a digest, and nothing else has."""
    if case.storage == "full":
        return
    table = whole_tensors(case)
    wanted = {name for name in table if name.startswith(("in.", "out."))}
    unknown, missing = sorted(set(case.digests) - set(table)), sorted(wanted - set(case.digests))
    if unknown or missing:
        refuse(
            case,
            f"digests of {', '.join(sorted(wanted))}",
            named(bool(missing), missing or unknown),
        )


def named(is_missing: bool, names: list[str]) -> str:
    return ("none of " if is_missing else "also ") + shown(", ".join(names))


def refuse(case: Case, expected: str, got: str) -> None:
    raise VectorError(
        f"{expected} in {case.id}", got, "generate the case again", code="case-tensors"
    )
