"""The error classes of ringspec: one for each kind of error that a caller may want to catch separately.

Every message has the same three parts: what was expected, what was given, and how to fix it. All classes
derive from :class:`RingspecError`, which is a :class:`ValueError`. ``error.code`` distinguishes errors
of the same class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CommunicationError",
    "DtypeError",
    "FileFormatError",
    "LayoutError",
    "LostWorkerError",
    "MissingPackageError",
    "NonFiniteError",
    "NotRecordedError",
    "OptionError",
    "RefusedError",
    "RingspecError",
    "ScheduleError",
    "ShapeError",
    "UndecidedError",
    "UnknownKeywordError",
    "VectorError",
]


class RingspecError(ValueError):
    """Base of all errors of ringspec.

    Attributes ``expected``, ``got`` and ``fix`` hold the three parts of the message. ``code`` is a
    short identifier that stays the same between releases, such as 'window'; each class has a default.

    >>> raise RingspecError("W >= 1 workers", "0", "pass workers=1 or more")
    Traceback (most recent call last):
    ringspec.errors.RingspecError: expected W >= 1 workers; got 0. Fix: pass workers=1 or more.
    >>> OptionError("window >= 0", "-1", "pass window=None").code
    'option'
    >>> OptionError("window >= 0", "-1", "pass window=None", code="window").code
    'window'
    """

    code: str = "error"

    def __init__(self, expected: str, got: str, fix: str, *, code: str | None = None) -> None:
        super().__init__(f"expected {expected}; got {got}. Fix: {fix}.")
        self.expected = expected
        self.got = got
        self.fix = fix
        self.code = type(self).code if code is None else code

    def __reduce__(self) -> tuple[object, tuple[str, str, str], dict[str, Any]]:
        # Unpickling passes the three parts to the class; the third item restores the other attributes, such as code.
        return type(self), (self.expected, self.got, self.fix), self.__dict__


class ShapeError(RingspecError):
    """An array has the wrong number of axes, or the length of an axis does not fit the other arrays."""

    code = "shape"


class DtypeError(RingspecError):
    """An array has a dtype that the argument does not accept, such as integers for q or floats for a mask."""

    code = "dtype"


class NonFiniteError(RingspecError):
    """A value is NaN or infinite where the definition requires a finite number."""

    code = "non-finite"


class OptionError(RingspecError):
    """An option has a value outside its domain, or two options exclude each other."""

    code = "option"


class UnknownKeywordError(RingspecError, TypeError):
    """A call has a keyword argument that the function does not accept."""

    code = "unknown-keyword"


class LayoutError(RingspecError):
    """A layout cannot distribute the tokens over the workers, or a layout table does not hold each token once."""

    code = "layout"


class ScheduleError(RingspecError):
    """A schedule of computations and transfers is invalid; the attribute ``problems`` lists every defect found.

    ``expected``, ``got``, ``fix`` and ``code`` are as in :class:`RingspecError`.
    """

    code = "schedule"

    def __init__(
        self,
        expected: str,
        got: str,
        fix: str,
        problems: tuple[object, ...] = (),
        *,
        code: str | None = None,
    ) -> None:
        super().__init__(expected, got, fix, code=code)
        self.problems = problems


class NotRecordedError(RingspecError):
    """A requested worker, step or state of a run was not recorded or does not exist."""

    code = "not-recorded"


class RefusedError(RingspecError):
    """A function of ``ringspec.interfaces`` or ``ringspec.standins`` refuses a call.

    The original refuses or misinterprets it; if ``code`` is 'not-modelled', a stand-in does not compute it.
    """

    code = "refused"


class MissingPackageError(RingspecError):
    """An optional package is missing, or its installed version is not the one required."""

    code = "missing-package"


class CommunicationError(RingspecError):
    """The ranks of ``ringspec.comm`` could not communicate, or did not agree."""

    code = "communication"


class LostWorkerError(CommunicationError):
    """Another rank did not answer within the time limit: it hangs, was killed, or is too slow."""

    code = "lost-worker"


class UndecidedError(RingspecError):
    """A result cannot be rounded with certainty, or values computed in float64 are too far from the exact values."""

    code = "undecided"


class FileFormatError(RingspecError):
    """A file is malformed or not of the expected format."""

    code = "file-format"


class VectorError(RingspecError):
    """Golden vectors do not follow the file format, or disagree with their manifest or their case."""

    code = "vector"


def shown(x: object, width: int = 80) -> str:
    """Return a short ``repr(x)`` for an error message; safe for any object and for integers of any length.

    >>> shown(10**400), shown([1, 2])
    ('an int of 1329 bits', '[1, 2]')
    """
    if isinstance(x, int) and x.bit_length() > 512:
        return f"an int of {x.bit_length()} bits"
    try:
        text = repr(x)
    except Exception:  # a __repr__ that raises, or an integer inside that is too long to print
        return f"a {type(x).__name__}"
    return text if len(text) <= width else text[: width - 4] + " ..."


def described(x: object, cause: BaseException) -> str:
    """Describe an object that could not be read, with its type and the reason, for an error message."""
    try:
        return f"{type(x).__name__} ({cause})"[:200]
    except Exception:  # an exception that cannot be printed
        return f"{type(x).__name__} ({type(cause).__name__})"


MOST_LISTED = 40


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown ``name``: the closest or only known name, otherwise a list of known names.

    >>> nearest("casual", ["causal", "window"])
    "write 'causal'"
    >>> nearest("nope", ["sink-dropped", "stale-keys"])
    'use one of sink-dropped, stale-keys'
    >>> nearest("?", map(str, range(100)))
    'use one of 0, 1, 10, 11, 12, 13, 14, 15, ... (100 in all)'
    """
    names = sorted(known)
    word = name if isinstance(name, str) else shown(name)
    # Letters of a short word are scattered over any long name: 'nope' is half of 'sink-dropped'.
    similar = [one for one in names if len(one) <= 2 * len(word) or one.startswith(word)]
    close = difflib.get_close_matches(word, similar, n=1, cutoff=0.5)
    if close or len(names) == 1:
        return f"write {(close or names)[0]!r}"
    if len(names) > MOST_LISTED:
        return f"use one of {', '.join(names[:8])}, ... ({len(names)} in all)"
    return "use one of " + ", ".join(names)


def refuse_unknown(
    unknown: Iterable[str], known: Iterable[str], instead: Mapping[str, str] | None = None
) -> None:
    """Raise :class:`UnknownKeywordError` for the first name in ``unknown``.

    The message suggests the nearest of the ``known`` names. ``instead`` has other suggestions, by name, for names whose
    nearest known name means something else.
    """
    names = tuple(known)
    for name in unknown:
        fix = (instead or {}).get(name) or nearest(name, names)
        raise UnknownKeywordError("keywords that ringspec knows", f"{name!r}", fix)
