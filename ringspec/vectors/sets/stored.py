"""Open, check and write sets of golden cases.

The page docs/vectors/format.md defines the format independently of this code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from numpy.typing import NDArray

from ringspec.errors import OptionError, VectorError, nearest, shown
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.container import (
    Tensors,
    check_content,
    file_entry,
    read_case,
    read_case_tensors,
    write_case,
)
from ringspec.vectors.format.files import (
    check_listing,
    new_folder,
    read_listed,
    read_plain,
    write_plain,
)
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.format.flagfile import check_flags_known, flags_from_json, flags_to_json
from ringspec.vectors.format.manifest import (
    FLAGS_FILE,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CaseEntry,
    Manifest,
    make_manifest,
    manifest_from_json,
    manifest_to_json,
)

DATA = Path(__file__).parents[1] / "data"
SETS = ("core", "kernel", "merge", "cp")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class VectorSet:
    """The set of golden cases in the folder ``path``; iterating over a set gives its cases, sorted by id.

    Cases that are no longer used are included; ``Case.withdrawn`` marks them. Files are checked when they are read.
    ``manifest``: the content of manifest.json.
    """

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """The name of the set."""
        return self.manifest.set

    @property
    def set_version(self) -> str:
        """The version of the set, which increases when cases are added or withdrawn."""
        return self.manifest.set_version

    @property
    def format_version(self) -> str:
        """The version of the file format."""
        return self.manifest.format_version

    @property
    def spec_version(self) -> str:
        """The version of the specification to which the values conform."""
        return self.manifest.spec_version

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, sorted."""
        return tuple(sorted(self.manifest.cases))

    def __len__(self) -> int:
        return len(self.manifest.cases)

    def __iter__(self) -> Iterator[Case]:
        return (self.case(id) for id in self.ids)

    def entry(self, id: str) -> CaseEntry:
        """Return the manifest entry of a case; raise VectorError if there is none."""
        if not isinstance(id, str) or id not in self.manifest.cases:
            raise VectorError(
                f"the id of a case of the set {self.name!r}",
                shown(id),
                nearest(id, self.ids) if len(self) < 2000 else "look it up in the set's ids",
                code="unknown-case",
            )
        return self.manifest.cases[id]

    def case(self, id: str) -> Case:
        """Read the case with this id; raise :class:`~ringspec.errors.VectorError` if there is none."""
        return read_case(self.path, id, self.entry(id))

    def tensors(self, id: str) -> dict[str, NDArray]:
        """Read the stored tensors of a case by name, read-only; empty if only digests are stored.

        docs/vectors/format.md lists their shapes, such as [W, B, H, n, D], and dtypes.
        """
        return read_case_tensors(self.path, id, self.entry(id))

    @cached_property
    def flags(self) -> Mapping[str, Flag]:
        """The flags, which explain the classes of bugs that the cases detect, by name."""
        listed = self.manifest.flags
        data = read_listed(self.path, FLAGS_FILE, listed.bytes, listed.sha256)
        return flags_from_json(data)


def open_set(name: str | os.PathLike[str]) -> VectorSet:
    """Open a set of this package ("core", "kernel", "merge", "cp"), or the set in the folder ``name``. Only its manifest is read.

    To open a folder that is called "core", pass "./core".
    Raises :class:`~ringspec.errors.VectorError` if there is no such folder or the folder is not a set.
    """
    path = DATA / name if isinstance(name, str) and name in SETS else path_of(name)
    if not os.path.isdir(path):
        raise VectorError(
            "the folder of a set",
            shown(str(name)),
            f"{nearest(name, SETS)}, or pass a folder",
            code="path",
        )
    return VectorSet(path, manifest_from_json(read_plain(path, MANIFEST_FILE, MAX_MANIFEST_BYTES)))


def path_of(name: object) -> Path:
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str) or "\0" in path:
        raise OptionError("the name or path of a set", shown(name), "pass 'core' or a folder")
    return Path(path)


def check_set(path: str | os.PathLike[str], progress: Progress | None = None) -> VectorSet:
    """Check each file, case, tensor shape and digest of a set, and return the set. Values are not recomputed.

    ``path`` is the ``name`` of :func:`open_set`. ``progress(done, total, id)`` is called after each case. Raises a
    subclass of :class:`~ringspec.errors.RingspecError` for the first fault. Cases are read one at a time to limit
    memory.
    """
    vectors = open_set(path)
    check_listing(vectors.path, {MANIFEST_FILE, *vectors.manifest.files()})
    flags = vectors.flags
    for done, id in enumerate(vectors.ids, start=1):
        case = vectors.case(id)
        check_flags_known(case, flags)
        check_content(case, vectors.tensors(id), vectors.entry(id))
        if progress is not None:
            progress(done, len(vectors), id)
    return vectors


def write_set(
    path: str | os.PathLike[str],
    name: str,
    set_version: str,
    entries: Iterable[tuple[Case, Tensors | None]],
    flags: Iterable[Flag] | Mapping[str, Flag],
    *,
    spec_version: str | None = None,
) -> VectorSet:
    """Write a new set to the folder ``path``, which is created only when the set is complete.

    ``name`` and ``set_version`` are written to the manifest, ``flags`` to flags.json. ``entries`` yields the cases with
    their tensors, which are written one by one; the bytes of the set do not depend on the order of the cases.
    ``spec_version`` defaults to that of this package. Raises :class:`~ringspec.errors.OptionError` if ``path`` exists,
    and :class:`~ringspec.errors.VectorError` for content that a reader would refuse.
    """
    target = path_of(path)
    check_names(name, set_version)
    known = flags if isinstance(flags, Mapping) else {flag.name: flag for flag in flags}
    with new_folder(target) as folder:
        text = flags_to_json(known.values()).encode()
        known = flags_from_json(text)
        write_plain(folder / FLAGS_FILE, text)
        cases: dict[str, CaseEntry] = {}
        oldest = "1.0"
        for case, tensors in entries:
            if case.id in cases:
                raise VectorError(
                    "unique ids", shown(case.id), "give one of them another id", code="manifest"
                )
            check_flags_known(case, known)
            cases[case.id] = write_case(folder, case, tensors)
            oldest = max(oldest, case.format_version)
        spec_version = spec_version_of_package() if spec_version is None else spec_version
        manifest = make_manifest(name, set_version, spec_version, file_entry(text), cases, oldest)
        data = manifest_to_json(manifest).encode()
        manifest_from_json(data)
        write_plain(folder / MANIFEST_FILE, data)
    return open_set(target)


def check_names(name: str, set_version: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise OptionError("a name such as 'core' for a set", shown(name), "use a-z, 0-9 and '-'")
    if not isinstance(set_version, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", set_version):
        raise OptionError("a set version such as '1.0'", shown(set_version), "write 'major.minor'")


def spec_version_of_package() -> str:
    # Imported here, because this module must not import the specification when it is loaded.
    import ringspec

    return ringspec.SPEC_VERSION
