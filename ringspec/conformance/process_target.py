"""A target in a process of its own, so that a crash or a hang ends one call and not the run.

The process loads the target by its name. What it writes to stdout and stderr is its log. After a
crash or a timeout the next call starts a new one.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ringspec.conformance.answers import MOST_LOG, Stop, ask
from ringspec.conformance.calls import frozen
from ringspec.conformance.capabilities import Capabilities
from ringspec.conformance.conventions import to_numpy
from ringspec.conformance.target import RESULTS, Call, Failed, Result, TimedOut, ended
from ringspec.errors import RingspecError
from ringspec.vectors.processes import begin

START_SECONDS = 120.0


class ProcessTarget:
    """The target that ``spec`` names, called in another process.

    ``timeout``: seconds for one call, None for no limit. Loading the target may take
    :data:`START_SECONDS` more.
    """

    def __init__(
        self, spec: str, name: str, capabilities: Capabilities, timeout: float | None = None
    ) -> None:
        self.spec, self.name, self.capabilities, self.timeout = spec, name, capabilities, timeout
        self.printed = ""
        self._process: Any = None
        self._connection: Connection | None = None
        self._log: Path | None = None
        self._closed = False

    def run(self, call: Call) -> Result:
        connection = self.started()
        try:
            connection.send(call)
            if not connection.poll(self.timeout):
                self.end()
                raise TimedOut(f"no answer within {self.timeout:g} seconds", self.log())
            answer, self.printed = connection.recv()
        except (EOFError, OSError):
            raise self.crashed() from None
        if isinstance(answer, Stop):
            raise answer
        assert isinstance(answer, Result)
        return answer

    def started(self) -> Connection:
        """The connection to a process that has loaded the target."""
        if self._connection is not None:
            return self._connection
        if self._closed:
            raise Failed("the target was closed")
        context = multiprocessing.get_context("spawn")
        handle, path = tempfile.mkstemp(prefix="ringspec-", suffix=".log")
        os.close(handle)
        self._log = Path(path)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self.spec, theirs, path), daemon=False)
        self._process.start()
        theirs.close()
        try:
            if self._closed:  # by another thread, after Ctrl-C
                raise EOFError
            if not self._connection.poll(START_SECONDS):
                self.end()
                raise TimedOut(f"the target was not loaded in {START_SECONDS:g} s", self.log())
            self._connection.recv()
        except (EOFError, OSError):
            raise self.crashed() from None
        return self._connection

    def crashed(self) -> Failed:
        """What ended the process."""
        process = self._process
        if process is not None:
            process.join(5)
        code = None if process is None else process.exitcode
        self.end()
        fault = ended("the target's process", code)
        fault.log = self.log()
        return fault

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process, self._connection = None, None

    def log(self) -> str:
        """The end of what the last process wrote; its file is removed."""
        if self._log is None:
            return ""
        text = self._log.read_bytes()[-MOST_LOG:].decode(errors="replace")
        self._log.unlink()
        self._log = None
        return text

    def close(self) -> None:
        """No process is left, and none is started again."""
        self._closed = True
        self.end()
        self.log()


def serve(spec: str, connection: Connection, log: str) -> None:
    """The process: load the target, then answer one call after the other."""
    from ringspec.conformance.load import load_target

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    begin()
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(written, stream.fileno())
    faulthandler.enable()
    target = load_target(spec)
    connection.send(True)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(answer_to(target, call))


def answer_to(target: Any, call: Call) -> tuple[Result | Stop, str]:
    """The answer of a target, as NumPy arrays, or the outcome that ends the case; what it printed."""
    tensors = {name: frozen(arrays) for name, arrays in call.tensors.items()}
    try:
        result, printed = ask(target, dataclasses.replace(call, tensors=tensors))
        values = {name: getattr(result, name) for name in RESULTS}
        return Result(**{name: as_arrays(name, value) for name, value in values.items()}), printed
    except Stop as stop:
        return Stop(stop.outcome, stop.message, stop.findings), ""


def as_arrays(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        return [None if x is None else to_numpy(x, name) for x in value]
    except (RingspecError, TypeError) as error:
        raise Stop("garbage", f"{name} is no list of arrays: {error}") from None
