"""Find the differences between two sets or two cases, and format them as text or as JSON data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import bits
from ringspec.tensorfile import dtype_code
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.case_json import case_to_data
from ringspec.vectors.format.digest import tensor_bytes
from ringspec.vectors.format.json_text import flat
from ringspec.vectors.sets.stored import VectorSet


@dataclass(frozen=True)
class FieldChange:
    """A change in a case.json: ``path`` says where, ``old`` and ``new`` are the JSON texts (None if absent)."""

    path: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class TensorChange:
    """A tensor that differs.

    ``kind``: "added", "removed", "reshaped" (another dtype or shape) or "values". If the kind is "values", ``elements``
    is the number of elements, of ``size`` in all, whose bits differ, and ``largest`` is the largest difference. Floats
    differ by the number of steps between neighbouring numbers of the format (0 if a zero changed its sign); integers
    and booleans differ by their value.
    """

    name: str
    kind: str
    old: str | None = None
    new: str | None = None
    elements: int = 0
    size: int = 0
    largest: int = 0
    unit: str = ""


@dataclass(frozen=True)
class CaseChange:
    id: str
    fields: tuple[FieldChange, ...]
    tensors: tuple[TensorChange, ...]


@dataclass(frozen=True)
class SetDiff:
    """The differences between two sets: the ids ``added`` and ``removed``, and the cases that ``changed``.

    ``versions`` are changes of the version fields of the manifest, ``flags`` those of flags.json.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[CaseChange, ...]
    versions: tuple[FieldChange, ...]
    flags: tuple[FieldChange, ...]

    @property
    def equal(self) -> bool:
        """Whether the two sets are equal."""
        return not (self.added or self.removed or self.changed or self.versions or self.flags)


def diff_sets(
    old: VectorSet, new: VectorSet, progress: Callable[[int, int, str], None] | None = None
) -> SetDiff:
    """Compare the sets ``old`` and ``new``; only cases whose files differ are read.

    ``progress(done, total, id)`` is called after each case.
    """
    shared = sorted(set(old.ids) & set(new.ids))
    changed = []
    for done, id in enumerate(shared, start=1):
        if old.entry(id) != new.entry(id):
            change = diff_case(id, old.case(id), old.tensors(id), new.case(id), new.tensors(id))
            if change.fields or change.tensors:
                changed.append(change)
        if progress is not None:
            progress(done, len(shared), id)
    return SetDiff(
        added=tuple(sorted(set(new.ids) - set(old.ids))),
        removed=tuple(sorted(set(old.ids) - set(new.ids))),
        changed=tuple(changed),
        versions=tuple(diff_data(head(old), head(new), "")),
        flags=tuple(diff_data(flag_data(old), flag_data(new), "")),
    )


def head(vectors: VectorSet) -> dict[str, str]:
    names = ("set", "set_version", "format_version", "spec_version")
    return {name: getattr(vectors.manifest, name) for name in names}


def flag_data(vectors: VectorSet) -> dict[str, Any]:
    return {name: dict(vars(flag)) for name, flag in vectors.flags.items()}


def diff_case(
    id: str,
    old: Case,
    old_tensors: Mapping[str, NDArray],
    new: Case,
    new_tensors: Mapping[str, NDArray],
) -> CaseChange:
    """Compare two versions of a case: case.json field by field, and the stored tensors bit by bit."""
    fields = tuple(diff_data(case_to_data(old), case_to_data(new), ""))
    tensors = []
    for name in sorted(set(old_tensors) | set(new_tensors)):
        change = diff_tensor(name, old_tensors.get(name), new_tensors.get(name))
        if change is not None:
            tensors.append(change)
    return CaseChange(id, fields, tuple(tensors))


def diff_data(old: Any, new: Any, path: str) -> Iterator[FieldChange]:
    """Yield the entries in which two JSON values differ; lists are compared as a whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(set(old) | set(new)):
            below = f"{path}/{name}" if path else name
            if name not in old:
                yield FieldChange(below, None, flat(new[name]))
            elif name not in new:
                yield FieldChange(below, flat(old[name]), None)
            else:
                yield from diff_data(old[name], new[name], below)
    elif flat(old) != flat(new):
        yield FieldChange(path, flat(old), flat(new))


def diff_tensor(name: str, old: NDArray | None, new: NDArray | None) -> TensorChange | None:
    """Compare two versions of a tensor; return None if the bits are equal.

    >>> change = diff_tensor("out.o.float64", np.array([1.0, 2.0]), np.array([1.0, 2.0 + 2**-50]))
    >>> change.elements, change.largest, change.unit
    (1, 2, 'ulp')
    """
    before, after = (None if x is None else described(x) for x in (old, new))
    if old is None or new is None:
        return TensorChange(name, "added" if old is None else "removed", before, after)
    if before != after:
        return TensorChange(name, "reshaped", before, after)
    if tensor_bytes(old) == tensor_bytes(new):
        return None
    apart = steps(old) if is_float(old) else magnitude(old.astype(np.int64))
    apart_new = steps(new) if is_float(new) else magnitude(new.astype(np.int64))
    return TensorChange(
        name,
        "values",
        before,
        after,
        elements=int((raw(old) != raw(new)).sum()),
        size=old.size,
        largest=largest_distance(apart, apart_new),
        unit="ulp" if is_float(old) else "1",
    )


def described(x: NDArray) -> str:
    return f"{dtype_code(x.dtype)} [{', '.join(map(str, x.shape))}]"


def is_float(x: NDArray) -> bool:
    return x.dtype.kind in "fV"


def raw(x: NDArray) -> NDArray:
    return bits(x) if x.dtype.itemsize > 1 or is_float(x) else x.view(np.uint8)


def steps(x: NDArray) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Return whether each float is negative, and its distance from 0 in steps between numbers of its format."""
    pattern, width = bits(x).astype(np.uint64), 8 * x.dtype.itemsize
    sign = np.uint64(1 << (width - 1))
    return (pattern & sign) != 0, pattern & ~sign


def magnitude(x: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Return whether each integer is negative, and its absolute value as uint64, which can hold 2**63."""
    negative = x < 0
    pattern = x.view(np.uint64)
    return negative, np.where(negative, ~pattern + np.uint64(1), pattern)


def largest_distance(
    old: tuple[NDArray[np.bool_], NDArray[np.uint64]],
    new: tuple[NDArray[np.bool_], NDArray[np.uint64]],
) -> int:
    """Return the largest difference, below 2**64, of two arrays, each given as (is negative, absolute value)."""
    (sign_old, size_old), (sign_new, size_new) = old, new
    same = np.maximum(size_old, size_new) - np.minimum(size_old, size_new)
    return int(np.where(sign_old == sign_new, same, size_old + size_new).max(initial=0))


def diff_to_text(diff: SetDiff) -> str:
    """Format a diff for a terminal; the first line says whether the sets are equal."""
    if diff.equal:
        return "equal\n"
    counts = f"{len(diff.added)} added, {len(diff.removed)} removed, {len(diff.changed)} changed"
    lines = [f"cases: {counts}"]
    lines += [f"version {line(change)}" for change in diff.versions]
    lines += [f"flag {line(change)}" for change in diff.flags]
    lines += [f"added {id}" for id in diff.added] + [f"removed {id}" for id in diff.removed]
    for case in diff.changed:
        lines.append(f"changed {case.id}")
        lines += [f"  {line(change)}" for change in case.fields]
        lines += [f"  {tensor_line(change)}" for change in case.tensors]
    return "\n".join(lines) + "\n"


def line(change: FieldChange) -> str:
    old, new = ("(none)" if x is None else shortened(x) for x in (change.old, change.new))
    return f"{change.path}: {old} -> {new}"


def shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:96] + " ..."


def tensor_line(change: TensorChange) -> str:
    if change.kind != "values":
        return f"{change.name}: {change.kind}, {change.old or '(none)'} -> {change.new or '(none)'}"
    unit = " ulp" if change.unit == "ulp" else ""
    count = f"{change.elements} of {change.size} elements"
    return f"{change.name}: {count}, by at most {change.largest}{unit}"


def diff_to_data(diff: SetDiff) -> dict[str, Any]:
    """Convert a diff to JSON data, with ``equal`` first."""
    return {
        "equal": diff.equal,
        "added": list(diff.added),
        "removed": list(diff.removed),
        "changed": [
            {
                "id": case.id,
                "fields": [dict(vars(change)) for change in case.fields],
                "tensors": [dict(vars(change)) for change in case.tensors],
            }
            for case in diff.changed
        ],
        "versions": [dict(vars(change)) for change in diff.versions],
        "flags": [dict(vars(change)) for change in diff.flags],
    }
