"""The error that a test expects: its kind, and the code that says more exactly what is wrong."""

import contextlib

import pytest

from ringspec.errors import RingspecError

Expected = type[RingspecError] | tuple[type[RingspecError], str]


def is_refusal(error: BaseException, expected: Expected) -> bool:
    """The error has exactly this kind and code; a kind alone stands for its own code.

    >>> from ringspec.errors import OptionError
    >>> error = OptionError("window >= 0", "-1", "pass window=None", code="window")
    >>> is_refusal(error, (OptionError, "window")), is_refusal(error, OptionError)
    (True, False)
    """
    kind, code = expected if isinstance(expected, tuple) else (expected, expected.code)
    return type(error) is kind and error.code == code


@contextlib.contextmanager
def refuses(expected: Expected, match: str | None = None):
    """``pytest.raises`` for an error of exactly this kind and code."""
    with pytest.raises(RingspecError, match=match) as caught:
        yield caught
    assert is_refusal(caught.value, expected), f"{caught.value!r} with code {caught.value.code}"
