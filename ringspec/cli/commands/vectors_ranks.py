"""``mpiexec -n N ringspec vectors generate``: cases are derived by all ranks, and rank 0 writes them.

The bytes do not depend on the number of ranks: rank 0 takes the cases in the order of the catalogue, case n
from rank n mod N. A derived case travels as its case.json and its tensor file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ringspec.comm.mpi import MpiLinks, abort
from ringspec.errors import OptionError, RingspecError
from ringspec.tensorfile import decode, encode
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.files import check_destination
from ringspec.vectors.generate import Derived, cases_of, derive_named, generate
from ringspec.vectors.sets.stored import VectorSet

SIZES_TAG, CASE_TAG, TENSORS_TAG = (16 * 1024 + 40 + n for n in range(3))
FOREVER = float("inf")
USAGE = 2
WRONG = b"!"  # a case.json begins with {


def over_ranks(
    links: MpiLinks, name: str, destination: Path, only: str | None, progress: Any
) -> VectorSet | None:
    """Called on all ranks: the set on rank 0, None on the others.

    What is refused before the work is refused on all ranks; an error that comes later ends them, status 2.
    """
    cases = agreed_cases(links, name, destination, only)
    if links.rank:
        for case in cases[links.rank :: links.size]:
            send(links, case)
        return None
    try:
        return generate(
            name,
            destination,
            progress=progress,
            only=only,
            derived=lambda cases: taken(links, cases),
        )
    except RingspecError as error:
        click.echo(f"Error: {error}", err=True)
        abort(USAGE)
        raise


def agreed_cases(
    links: MpiLinks, name: str, destination: Path, only: str | None
) -> tuple[Case, ...]:
    """The cases, or on every rank the error of rank 0, which alone looks at the destination."""
    error: RingspecError | None = None
    if links.rank == 0:
        try:
            cases_of(name, only)
            check_destination(destination)
        except RingspecError as refused:
            error = refused
        for rank in range(1, links.size):
            what = f"waits at the start until {links.name(rank)} knows what is asked"
            words = words_of(error) if error else b""
            for tag, data in ((SIZES_TAG, sizes_of(words)), (CASE_TAG, bytes_of(words))):
                links.awaited(links.send(rank, tag, data, what), FOREVER)
    else:
        what = f"waits at the start for {links.name(0)}"
        size = links.awaited(links.receive(0, SIZES_TAG, 16, what), FOREVER).view(np.int64)[0]
        words = links.awaited(links.receive(0, CASE_TAG, int(size), what), FOREVER).tobytes()
        error = OptionError(*json.loads(words)) if words else None
    if error is not None:
        raise error
    return cases_of(name, only)


def words_of(error: RingspecError) -> bytes:
    return json.dumps([error.expected, error.got, error.mend]).encode()


def sizes_of(*parts: bytes) -> Any:
    """Two lengths as 16 bytes."""
    lengths = [len(part) for part in parts]
    return np.array([*lengths, 0][:2], np.int64).view(np.uint8)


def taken(links: MpiLinks, cases: Sequence[Case]) -> Iterator[Derived]:
    """Rank 0: the derived cases, in their order."""
    for n, case in enumerate(cases):
        rank = n % links.size
        yield derive_named(case) if rank == 0 else received(links, rank)


def send(links: MpiLinks, case: Case) -> None:
    """One derived case, or the error that came of it, to rank 0, which may be busy for long."""
    try:
        derived = derive_named(case)
        text = case_to_json(derived.case).encode()
        tensors = b"" if derived.tensors is None else encode(derived.tensors)
    except RingspecError as error:
        text = WRONG + words_of(error)
        tensors = b""
    sizes = sizes_of(text, tensors)
    for tag, data in (
        (SIZES_TAG, sizes),
        (CASE_TAG, bytes_of(text)),
        (TENSORS_TAG, bytes_of(tensors)),
    ):
        what = f"waits until {links.name(0)} has taken {case.id}"
        links.awaited(links.send(0, tag, data, what), FOREVER)


def bytes_of(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def received(links: MpiLinks, rank: int) -> Derived:
    """The next case of a rank. Raises OptionError with the words of an error there."""
    what = f"waits for the next case of {links.name(rank)}"
    sizes = links.awaited(links.receive(rank, SIZES_TAG, 16, what), FOREVER).view(np.int64)
    text, tensors = (
        links.awaited(links.receive(rank, tag, int(size), what), FOREVER).tobytes()
        for tag, size in ((CASE_TAG, sizes[0]), (TENSORS_TAG, sizes[1]))
    )
    if text.startswith(WRONG):
        raise OptionError(*json.loads(text[1:]))
    return Derived(case_from_json(text), decode(tensors) if tensors else None)
