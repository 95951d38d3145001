"""The list of expected failures: exact ids with a reason each, in a TOML file.

.. code-block:: toml

    ["ring/bias-w3"]
    reason = "bias is not sharded yet, issue 12"

The list is strict both ways. A listed case that passes is an 'unexpected pass', which is a failure; an
id that names no case of the profile, or a case that the target does not claim, is an error.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from ringspec.errors import FileFormatError, UnknownNameError, nearest, shown
from ringspec.plainfile import read_plain_file

MAX_BYTES = 1 << 20
KEYS = ("reason",)


def read_expected(path: str | Path) -> dict[str, str]:
    """Reasons by id, from the TOML file at ``path``, which is checked.

    Raises :class:`~ringspec.errors.FileFormatError` for what is no such list.
    """
    file = Path(path)
    try:
        data = read_plain_file(file, MAX_BYTES)
    except OSError as error:
        raise FileFormatError(
            "a file of expected failures", f"{file}: {error.strerror}", "name a file"
        ) from None
    return expected_from(data, str(file))


def expected_from(data: bytes, what: str = "the list") -> dict[str, str]:
    """Reasons by id, from the bytes of a list.

    >>> expected_from(b'["ring/bias-w3"]\\nreason = "bias is not sharded yet"')
    {'ring/bias-w3': 'bias is not sharded yet'}
    """
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"TOML in {what}", shown(str(error)), "mend the file") from None
    return {id: reason_of(id, table, what) for id, table in tables.items()}


def reason_of(id: str, table: object, what: str) -> str:
    if not isinstance(table, dict):
        raise FileFormatError(
            f"a table for each id in {what}", f"{id} = {shown(table)}", f'write ["{id}"]'
        )
    for key in table:
        if key not in KEYS:
            raise UnknownNameError(f"a key of {id} in {what}", shown(key), nearest(key, KEYS))
    reason = table.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise FileFormatError(
            f"a reason for {id} in {what}", shown(reason), 'write reason = "why it fails"'
        )
    return reason
