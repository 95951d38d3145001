"""One exception class for each kind of bad input.

Every message has the same three parts: what was expected, what came, how to mend it.
All classes derive from :class:`RingspecError`, which is a :class:`ValueError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class RingspecError(ValueError):
    """Base of all errors of ringspec.

    Attributes ``expected``, ``got`` and ``mend`` hold the three parts of the message.

    >>> raise RingspecError("W >= 1 workers", "0", "pass workers=1 or more")
    Traceback (most recent call last):
    ringspec.errors.RingspecError: expected W >= 1 workers; got 0. To mend it: pass workers=1 or more.
    """

    def __init__(self, expected: str, got: str, mend: str) -> None:
        super().__init__(f"expected {expected}; got {got}. To mend it: {mend}.")
        self.expected = expected
        self.got = got
        self.mend = mend

    def __reduce__(self) -> tuple[object, tuple[str, str, str]]:
        return type(self), (self.expected, self.got, self.mend)


class ShapeError(RingspecError):
    """An array has the wrong rank or a length that does not fit the other arrays."""


class HeadCountError(ShapeError):
    """The number of query heads is not a multiple of the number of key/value heads."""


class DtypeError(RingspecError):
    """An array has a dtype that is refused (objects, integers for q, floats for a mask...)."""


class NonFiniteError(RingspecError):
    """NaN or infinity where the definition requires a finite number."""


class OptionError(RingspecError):
    """An option has a value outside its domain, or two options exclude each other."""


class WindowError(OptionError):
    """A sliding window is not None, an int >= 0, or a pair of such (either may be None)."""


class BoundsError(OptionError):
    """Key bounds came without their pair, or with a refused shape."""


class PackingError(OptionError):
    """``cu_seqlens`` is not a sorted list of document starts that begins with 0."""


class DropoutError(OptionError):
    """Dropout probability outside [0, 1), or a seed outside 64 bits."""


class UnknownNameError(OptionError):
    """A name (of a layout, recipe, circulation, format...) is not one of the known ones."""


class UnknownKeywordError(RingspecError, TypeError):
    """A keyword that no function of ringspec takes."""


class FastRecipeError(OptionError):
    """A recipe that the blocks of ``ringspec.fast`` cannot follow."""


class WorkerCountError(RingspecError):
    """The number of workers is not an integer >= 1."""


class LayoutError(RingspecError):
    """Tokens cannot be dealt to the workers as asked, or a layout table is not a permutation."""


class ScheduleError(RingspecError):
    """A permute schedule is invalid; ``problems`` lists every reason that the validator found.

    ``expected``, ``got`` and ``mend`` as in :class:`RingspecError`.
    """

    def __init__(
        self, expected: str, got: str, mend: str, problems: tuple[object, ...] = ()
    ) -> None:
        super().__init__(expected, got, mend)
        self.problems = problems

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:  # type: ignore[override]
        return type(self), (self.expected, self.got, self.mend, self.problems)


class NotRecordedError(RingspecError):
    """A state was asked for that the run did not record or that does not exist."""


class RefusedError(RingspecError):
    """A modelled public interface refuses this call (``ringspec.interfaces``)."""


class MissingPackageError(RingspecError):
    """A package that only this use of ringspec needs is not installed, or in another version."""


class CommunicationError(RingspecError):
    """Base of what goes wrong between the ranks of ``ringspec.comm``."""


class DisagreementError(CommunicationError):
    """The ranks of a ring were given different inputs or options."""


class LostWorkerError(CommunicationError):
    """A rank waited for another in vain: it hangs, was ended, or is slower than the time limit."""


class FailedWorkerError(CommunicationError):
    """Another rank ended its pass with an exception that is not one of these, such as an observer's."""


class MessageError(CommunicationError):
    """A message between ranks is not the one that the schedule calls for."""


class UndecidedError(RingspecError):
    """A correctly rounded result that the precision of ``ringspec.exact`` cannot decide."""


class ArithmeticModeError(RingspecError):
    """The processor is in a mode that is not IEEE 754 arithmetic."""


class HardwareError(RingspecError):
    """Hardware of ``ringspec.plan`` that is not known, or a rate of it that is none."""


class FileFormatError(RingspecError):
    """A file from outside is not what it claims to be."""


class VectorError(RingspecError):
    """Base of what ``ringspec.vectors`` refuses."""


class CaseFormatError(VectorError):
    """A case.json is not what the format of golden cases allows."""


class FlagFormatError(VectorError):
    """A flags.json is not what the format allows, or a case has a flag that it does not explain."""


class ManifestError(VectorError):
    """A manifest.json is not what the format allows, or contradicts itself or its cases."""


class FormatVersionError(ManifestError):
    """A set of vectors of a major format version that this program does not read."""


class CaseTensorsError(VectorError):
    """The tensors of a case are not those that its case.json calls for."""


class UnknownCaseError(VectorError):
    """A set has no case with this id."""


class DigestError(VectorError):
    """Bytes are not those that a set's manifest pins."""


class FileSizeError(DigestError):
    """A file of a set is longer or shorter than its manifest says, or than any may be."""


class FileHashError(DigestError):
    """The SHA-256 of a file of a set is not the one in its manifest."""


class ContentDigestError(DigestError):
    """A content digest in a manifest is not that of the case, or of the cases."""


class SetPathError(VectorError):
    """A path of a set leads outside of it, or to something that is no plain file or folder."""


class SymlinkError(SetPathError):
    """A symbolic link in a set."""


class SpecialFileError(SetPathError):
    """A device, pipe or socket, or a folder where a file belongs (or the reverse)."""


class MissingFileError(SetPathError):
    """A file that a set lists cannot be read."""


class UnlistedFileError(SetPathError):
    """A set holds a file or folder that its manifest does not list."""


class DestinationError(VectorError):
    """What is written already exists, or has no folder to lie in."""


def shown(x: object, width: int = 80) -> str:
    """``repr(x)`` for a message: short, and safe for any object and for integers of any length.

    >>> shown(10**400), shown([1, 2])
    ('an int of 1329 bits', '[1, 2]')
    """
    if isinstance(x, int) and x.bit_length() > 512:
        return f"an int of {x.bit_length()} bits"
    try:
        text = repr(x)
    except Exception:  # a hostile or broken __repr__, or an integer inside that is too long
        return f"a {type(x).__name__}"
    return text if len(text) <= width else text[: width - 4] + " ..."


def described(x: object, cause: BaseException) -> str:
    """What an object is and why it could not be read, for a message; safe for hostile objects."""
    try:
        return f"{type(x).__name__} ({cause})"[:200]
    except Exception:  # an exception that cannot be printed
        return f"{type(x).__name__} ({type(cause).__name__})"


MOST_LISTED = 40


def nearest(name: object, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, or lists them: all, or of many the first.

    >>> nearest("casual", ["causal", "window"])
    "write 'causal'"
    >>> nearest("?", map(str, range(100)))
    'use one of 0, 1, 10, 11, 12, 13, 14, 15, ... (100 in all)'
    """
    names = sorted(known)
    close = difflib.get_close_matches(
        name if isinstance(name, str) else shown(name), names, n=1, cutoff=0.5
    )
    if close:
        return f"write {close[0]!r}"
    if len(names) > MOST_LISTED:
        return f"use one of {', '.join(names[:8])}, ... ({len(names)} in all)"
    return "use one of " + ", ".join(names)


def refuse_unknown(
    unknown: Iterable[str], known: Iterable[str], instead: Mapping[str, str] | None = None
) -> None:
    """Raise :class:`UnknownKeywordError` for the first name in ``unknown``.

    ``instead``: the remedy by name, where the nearest of the names ``known`` means something else.
    """
    names = tuple(known)
    for name in unknown:
        fix = (instead or {}).get(name) or nearest(name, names)
        raise UnknownKeywordError("keywords that ringspec knows", f"{name!r}", fix)
