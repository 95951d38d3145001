"""The tensors that a set does not store in full are derived on first use, and then kept in a cache.

The set has a digest (SHA-256) of each of these tensors. Tensors are checked against the digests when they are derived
and whenever they are read from the cache; if a file in the cache is damaged, its tensors are derived again. Inputs are
not cached, because making them is faster than reading them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from numpy.typing import NDArray

from ringspec.errors import RingspecError, VectorError
from ringspec.tensorfile import DTYPES, MAX_HEADER, decode, dtype_code, write_tensors
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.digest import tensor_digest
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.format.tensor_table import whole_tensors
from ringspec.vectors.generate import layouts_of_case, matching, tensors_of_case
from ringspec.vectors.processes import each
from ringspec.vectors.sets.stored import VectorSet, open_set, path_of

__all__ = ["materialise", "tensors_of"]

VARIABLE = "RINGSPEC_CACHE_DIR"
Tensors = dict[str, NDArray]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Materialised:
    """The result of :func:`materialise`.

    ``folder``: the folder of the cache. ``cases``: number of requested cases, all of which are now in the cache.
    ``derived``: how many of them were derived now. ``bytes``: total size of their files.
    """

    folder: Path
    cases: int
    derived: int
    bytes: int


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Return ``given``, or by default $RINGSPEC_CACHE_DIR, or else the user's cache folder."""
    if given is not None:
        return path_of(given)
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("ringspec", appauthor=False))


def cached_file(folder: Path, vectors: VectorSet, id: str) -> Path:
    """Return the path of a case's cache file, made from the set's name and version and the digest of the case."""
    content = vectors.entry(id).content
    return folder / "vectors" / vectors.name / vectors.set_version / f"{content}.safetensors"


def tensors_of(
    vectors: VectorSet, id: str, cache_dir: str | os.PathLike[str] | None = None
) -> Tensors:
    """Return the whole tensors of the case ``id`` of a set: ``in.*``, ``out.*``, ``layout.*``, ``position.*``.

    Row scales ``scale.*`` are included unless the storage is "digests". Tensors that ``vectors`` does not store are
    read from the cache folder ``cache_dir`` (None: see :func:`cache_folder`), or derived and written to this folder.
    Raises :class:`~ringspec.errors.VectorError` if derived bytes do not have the digests of the case.
    """
    case = vectors.case(id)
    if case.storage == "full":
        return vectors.tensors(id)
    inputs = {f"in.{name}": x for name, x in inputs_of(case).items()}
    check_pinned(case, inputs)
    file = cached_file(cache_folder(cache_dir), vectors, id)
    kept = read_kept(file, case)
    if kept is None:
        kept = derive_and_keep(file, case)
    return inputs | kept | layouts_of_case(case)


def materialise(
    name: str | os.PathLike[str] = "kernel",
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    jobs: int = 1,
    only: str | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Derive the expected values that a set does not store, and write them to the cache.

    Cases that are already in the cache are checked by their digests and not derived again, so a repeated call continues
    an interrupted call. ``name`` is as in ``open_set``. If ``cache_dir`` is None, the cache is $RINGSPEC_CACHE_DIR or
    the user's cache folder. ``jobs`` processes work at the same time. ``only`` is a pattern of ids.
    ``progress(done, total, id)`` is called after each case. Raises :class:`~ringspec.errors.VectorError` if derived
    bytes do not have the digests of the case.
    """
    vectors, folder = open_set(name), cache_folder(cache_dir)
    plain = VectorSet(vectors.path, vectors.manifest)
    wanted = [case for case in matching(tuple(vectors), only) if is_derived(case)]
    items = [(plain, case.id, cached_file(folder, vectors, case.id)) for case in wanted]
    derived, size = 0, 0
    for done, (case, (is_new, bytes)) in enumerate(
        zip(wanted, each(provide, items, jobs), strict=True), start=1
    ):
        derived, size = derived + is_new, size + bytes
        if progress is not None:
            progress(done, len(wanted), case.id)
    return Materialised(folder, len(wanted), derived, size)


def is_derived(case: Case) -> bool:
    return case.storage != "full" and case.withdrawn is None


def provide(item: tuple[VectorSet, str, Path]) -> tuple[bool, int]:
    """Make sure that a case is in the cache; return whether it was derived now, and the size of its file."""
    vectors, id, file = item
    case = vectors.case(id)
    is_new = read_kept(file, case) is None
    if is_new:
        derive_and_keep(file, case)
    return is_new, file.stat().st_size


def derive_and_keep(file: Path, case: Case) -> Tensors:
    """Derive the tensors for which the case has digests, check the digests, and write all or none of the tensors."""
    scales = any(name.startswith("scale.") for name in case.digests)
    whole = tensors_of_case(case, scales=scales)
    check_pinned(case, whole)
    kept = {name: whole[name] for name in kept_names(case)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, kept)
    return kept


def kept_names(case: Case) -> list[str]:
    return sorted(name for name in case.digests if not name.startswith("in."))


def check_pinned(case: Case, tensors: Mapping[str, NDArray]) -> None:
    """Raise VectorError if a tensor does not have the digest that the case lists for it."""
    wrong = [
        name
        for name, x in tensors.items()
        if name in case.digests and tensor_digest(x) != case.digests[name]
    ]
    if wrong:
        raise VectorError(
            f"the digests in case.json of {case.id}",
            f"other bytes of {', '.join(wrong)}",
            "report it with your processor and NumPy: these bytes must not depend on a machine",
            code="digest",
        )


def read_kept(file: Path, case: Case) -> Tensors | None:
    """Return the tensors of a case from the cache, or None if a tensor is missing or has a wrong digest."""
    names = kept_names(case)
    table = whole_tensors(case)
    try:
        with open(file, "rb") as opened:
            data = opened.read(largest_file(case) + 1)
        tensors = decode(data, "a cached case")
        if sorted(tensors) != names or len(data) > largest_file(case):
            return None
        for name in names:
            # A digest covers only bytes, which another shape or dtype could share.
            x, entry = tensors[name], table[name]
            if (dtype_code(x.dtype), x.shape) != (entry.code, entry.axes):
                return None
        check_pinned(case, tensors)
    except (OSError, RingspecError):
        return None
    return tensors


def largest_file(case: Case) -> int:
    """Return the largest possible size, in bytes, of a case's cache file; larger files are not read."""
    total = 8 + MAX_HEADER
    for entry in whole_tensors(case).values():
        size = DTYPES[entry.code].itemsize
        for length in entry.axes:
            size *= length or 1
        total += size
    return total
