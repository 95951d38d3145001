"""Read one plain file safely: refuse pipes, devices and files that are too large."""

from __future__ import annotations

import os
import stat

from ringspec.errors import FileFormatError, shown

MAX_BYTES = 1 << 34
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_plain_file(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """Return the bytes of the plain file at ``path``, which may be at most ``limit`` bytes long.

    Raises :class:`~ringspec.errors.FileFormatError` for a longer file, and for a folder, a pipe, a socket
    or a device, because reading one of these could block forever. Raises OSError if the file cannot be opened.

    >>> read_plain_file(".")
    Traceback (most recent call last):
    ringspec.errors.FileFormatError: expected a plain file at '.'; got a folder. Fix: pass the path of a file.
    """
    # Opening a pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_plain(path, os.fstat(handle).st_mode)
        with os.fdopen(os.dup(handle), "rb") as file:
            data = file.read(limit + 1)
    finally:
        os.close(handle)
    if len(data) > limit:
        raise FileFormatError(
            f"at most {limit} bytes in {path}", "a longer file", "pass a shorter file"
        )
    return data


def check_plain(path: str | os.PathLike[str], mode: int) -> None:
    """Raise FileFormatError unless ``mode``, the ``st_mode`` of the file at ``path``, is that of a plain file."""
    if not stat.S_ISREG(mode):
        got = KINDS.get(stat.S_IFMT(mode), "a device")
        raise FileFormatError(
            f"a plain file at {shown(os.fspath(path))}", got, "pass the path of a file"
        )
