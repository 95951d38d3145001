"""Open a target: load it in a process of its own, and call it there."""

from __future__ import annotations

import os
from contextlib import suppress

from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.process_target import ProcessTarget
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError, shown


def opened(spec: str, timeout: float | None = None, *, here: bool = False) -> Target:
    """Load the target that ``spec`` names, first in a separate process, because loading may crash.

    The target stays in the separate process, with ``timeout`` seconds for one call. It is loaded again in this process
    if ``here`` is True or if the target has its own processes. Raises OptionError if it cannot be loaded.
    """
    if spec.startswith(("cmd:", "dir:")):
        return called_by(load_target(spec), timeout, spec)
    target = ProcessTarget(spec, timeout=timeout)
    try:
        if target.name and not (here or target.own_processes):
            return target
    except BaseException:
        target.close()
        raise
    target.close()
    loaded = load_target(spec)
    if here and timeout is None and hasattr(loaded, "debug"):
        loaded.debug(rank_of_debugger())
    return called_by(loaded, timeout, spec)


def rank_of_debugger() -> int:
    """Return the rank that a debugger runs in this process: RINGSPEC_RANK, by default 0."""
    text = os.environ.get("RINGSPEC_RANK", "0")
    if not text.isdecimal() or len(text) > 6:
        raise OptionError("RINGSPEC_RANK as the number of a rank", shown(text), "set it to 0")
    return int(text)


def called_by(target: Target, timeout: float | None, spec: str | None) -> Target:
    """Return the target itself, or a proxy that calls it in another process with a time limit.

    A target with an attribute ``timeout`` has its own processes and enforces the limit itself.
    """
    if timeout is None:
        return target
    if hasattr(target, "timeout"):
        target.timeout = timeout
        return target
    if spec is None:
        raise OptionError(
            "with a timeout, a target that another process can load",
            f"the object {target.name}",
            "pass spec='package.module:object', or no timeout",
        )
    return ProcessTarget(spec, target.name, target.capabilities, timeout)


def close(target: Target) -> None:
    """Call ``close()`` if the target has it."""
    end = getattr(target, "close", None)
    if end is not None:
        with suppress(OSError):
            end()
