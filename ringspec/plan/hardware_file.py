"""Read the rates of a device from a TOML or JSON file.

All rates are in SI units (FLOP/s, bytes, bytes/s, seconds). The keys are::

    name = "my cluster"
    [flops_per_second]            # one or more number formats of the operands
    bfloat16 = 9.895e14
    [efficiency]                  # of an attention kernel, fractions of the peak
    forward = 0.75
    backward = 0.55
    [memory]
    bytes = 1.41e11
    bytes_per_second = 4.8e12
    [[links]]                     # the fastest first; without workers: a ring of any size
    name = "NVLink"
    bytes_per_second = 4.5e11
    latency = 1.2e-5
    workers = 8

An optional key ``source`` at the top level says where the figures come from. ``workers`` is optional, too; every other
key is required. Unknown keys and any other form of file raise OptionError.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from ringspec import strictjson
from ringspec.errors import FileFormatError, OptionError, nearest, shown
from ringspec.plainfile import read_plain_file
from ringspec.plan.hardware import FORMATS_RATED, Hardware, Link, Rate, positive

MAX_BYTES = 1 << 16
MAX_LINKS = 16
MAX_TEXT = 200
FIX = "write it like the example in docs/reference/plan.md"
TOP = ("name", "flops_per_second", "efficiency", "memory", "links")


def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Return the hardware that the file at ``path`` describes; raise OptionError if the file is not valid.

    A file whose name ends in .json is read as JSON, any other as TOML.
    """
    where = Path(path)
    text = content(where)
    try:
        if where.suffix.lower() == ".json":
            data = strictjson.loads(text)
        else:
            data = tomllib.loads(text)
    except (ValueError, RecursionError) as cause:
        kind = "JSON" if where.suffix.lower() == ".json" else "TOML"
        why = str(cause)[:MAX_TEXT] or type(cause).__name__
        raise OptionError(f"{kind} in {shown(str(where))}", why, FIX, code="hardware") from None
    return hardware_from(data)


def content(where: Path) -> str:
    """Return the text of a regular file of at most 64 KiB; raise OptionError for any other file."""
    try:
        raw = read_plain_file(where, MAX_BYTES)
    except FileFormatError as cause:
        raise OptionError(cause.expected, cause.got, FIX, code="hardware") from None
    except (OSError, ValueError) as cause:
        raise OptionError(
            f"a readable file at {shown(str(where))}",
            type(cause).__name__,
            "check the path",
            code="hardware",
        ) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise OptionError(
            f"UTF-8 in {shown(str(where))}", "other bytes", FIX, code="hardware"
        ) from None


def hardware_from(data: Any) -> Hardware:
    """Return the hardware that ``data`` describes, with the same keys as a file; raise OptionError if it is not valid.

    >>> rates = {"name": "toy", "flops_per_second": {"float64": 1e10},
    ...          "efficiency": {"forward": 1, "backward": 1},
    ...          "memory": {"bytes": 1e9, "bytes_per_second": 1e10},
    ...          "links": [{"name": "loop", "bytes_per_second": 1e9, "latency": 0}]}
    >>> hardware_from(rates).link(1000).name
    'loop'
    """
    fields(data, TOP, ("source",), "hardware")
    source = text_of(data.get("source", "a file"), "source")
    formats = table(data["flops_per_second"], "flops_per_second")
    if not formats:
        raise OptionError("flops_per_second of a number format", "none", FIX, code="hardware")
    fields(formats, (), FORMATS_RATED, "flops_per_second")
    efficiency = fields(data["efficiency"], ("forward", "backward"), (), "efficiency")
    memory = fields(data["memory"], ("bytes", "bytes_per_second"), (), "memory")
    links = data["links"]
    if not isinstance(links, list) or not 1 <= len(links) <= MAX_LINKS:
        raise OptionError(
            f"links as a list of 1 to {MAX_LINKS}", shown(links), FIX, code="hardware"
        )
    return Hardware(
        text_of(data["name"], "name"),
        {
            f: Rate(positive(x, f"flops_per_second.{f}"), "as the file says", source)
            for f, x in formats.items()
        },
        Rate(
            positive(efficiency["forward"], "efficiency.forward", 1.0), "as the file says", source
        ),
        Rate(
            positive(efficiency["backward"], "efficiency.backward", 1.0), "as the file says", source
        ),
        Rate(positive(memory["bytes"], "memory.bytes"), "as the file says", source),
        Rate(
            positive(memory["bytes_per_second"], "memory.bytes_per_second"),
            "as the file says",
            source,
        ),
        tuple(link_from(link, number, source) for number, link in enumerate(links)),
    )


def link_from(data: Any, number: int, source: str) -> Link:
    """Return the link described by ``data``, entry ``number`` of the key ``links``."""
    what = f"links[{number}]"
    fields(data, ("name", "bytes_per_second", "latency"), ("workers",), what)
    workers = data.get("workers")
    if workers is not None and (type(workers) is not int or not 1 <= workers <= 1 << 30):
        raise OptionError(
            f"{what}.workers as an integer >= 1", shown(workers), FIX, code="hardware"
        )
    speed = positive(data["bytes_per_second"], f"{what}.bytes_per_second")
    latency = positive(data["latency"], f"{what}.latency", 3600.0, zero=True)
    return Link(
        text_of(data["name"], f"{what}.name"),
        Rate(speed, "as the file says", source),
        Rate(latency, "as the file says", source),
        workers,
    )


def table(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise OptionError(f"{what} as a table of keys", shown(data), FIX, code="hardware")
    return data


def fields(
    data: Any, needed: tuple[str, ...], allowed: tuple[str, ...], what: str
) -> dict[str, Any]:
    """Return ``data`` if it is a table with all ``needed`` keys and, apart from these, only ``allowed`` keys.

    Otherwise raise OptionError.
    """
    for key in table(data, what):
        if key not in needed + allowed:
            raise OptionError(
                f"known keys in {what}", shown(key), nearest(key, needed + allowed), code="hardware"
            )
    for key in needed:
        if key not in data:
            raise OptionError(f"the key {key!r} in {what}", "none", FIX, code="hardware")
    return table(data, what)


def text_of(x: Any, what: str) -> str:
    """Validate a short text of printable ASCII, because it is shown on a terminal."""
    if (
        not isinstance(x, str)
        or not 1 <= len(x) <= MAX_TEXT
        or not (x.isascii() and x.isprintable())
    ):
        raise OptionError(
            f"{what} as 1 to {MAX_TEXT} printable ASCII characters", shown(x), FIX, code="hardware"
        )
    return x
