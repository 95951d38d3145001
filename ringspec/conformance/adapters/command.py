"""``cmd:PROGRAM ARGUMENT...``: a program under test in any language, called through its standard streams.

Each request and each answer is one JSON line; tensors are in safetensors files (docs/conform/protocol.md). The first
request is 'hello', which asks for the program's name and for its claims: what it supports. The program runs without a
shell, in a separate process group; its standard error is kept as a log. After a crash, a timeout or an invalid answer,
its process group is killed, and the next call starts a new process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters.process import PROGRAM, Program
from ringspec.conformance.adapters.wire import (
    PROTOCOL,
    Claims,
    call_message,
    check_answer,
    claims_from,
    inputs_file,
    line_of,
    message_of,
    read_result,
)
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import (
    Call,
    Crashed,
    Exited,
    Failed,
    Garbage,
    Mutated,
    Result,
    TimedOut,
)
from ringspec.conformance.target.versions import Installed, said_installed
from ringspec.errors import OptionError, VectorError, shown
from ringspec.vectors.format.files import read_plain

__all__ = ["CommandTarget"]

START_SECONDS = 120.0
CALL_SECONDS = 60.0
RESULT = "result.safetensors"
MOST_LOG = 4000
# After one of these the process is not used again.
FATAL = (Crashed, Exited, TimedOut, Garbage)
Answer = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """The functions that read the answers of a program; ``who`` names the program in messages.

    ``claims`` makes Claims from the answer to hello. ``result`` makes a Result from the answer to a call and the folder
    of the call's files. Both raise Garbage or another kind of Failed. ``refusal`` makes the error for a command that
    does not answer hello.
    """

    who: str
    claims: Callable[[Answer, tuple[str, ...]], Claims]
    result: Callable[[Answer, Path, Call], Result]
    refusal: Callable[[str, tuple[str, ...]], OptionError]


def hello_answer(answer: Answer, command: tuple[str, ...]) -> Claims:
    """Read the claims in an answer to hello."""
    if answer.get("kind") != "hello":
        raise Garbage(f"the answer to hello has the kind {shown(answer.get('kind'))}")
    if answer.get("protocol", PROTOCOL) != PROTOCOL:
        raise Garbage(f"protocol {shown(answer['protocol'])}; this is protocol {PROTOCOL}")
    return claims_from(answer, os.path.basename(command[0]))


def call_answer(answer: Answer, folder: Path, call: Call) -> Result:
    """Read the result of a call from its file."""
    check_answer(answer, call.id)
    return read_result(folder, RESULT, call)


def no_hello(said: str, command: tuple[str, ...]) -> OptionError:
    return OptionError(
        f"a program that answers hello as {shown(shlex.join(command))}",
        said,
        "see the protocol in docs/conform/protocol.md",
    )


PUBLIC = Dialect(PROGRAM, hello_answer, call_answer, no_hello)


class CommandTarget:
    """A program as a target, which is what the suite calls an implementation under test.

    ``command``: text (split as a shell would, but run without one) or a list of arguments. ``timeout``: seconds to
    answer one call; ``start_timeout``: seconds to answer hello. ``dialect``: how to read answers, by default as
    docs/conform/protocol.md says. ``log``: the last 64 KiB that the program wrote to stderr during the last call.

    The program reports ``name``, ``capabilities``, ``notes`` and ``installed`` (versions). It starts when one of these
    attributes is first read, which raises OptionError if the program does not answer. ``run`` raises Refused, Crashed,
    Exited, TimedOut, Garbage, Mutated if the inputs file changed, and Failed if the program reports an error.

    >>> CommandTarget("python3 -c 'print()'").command
    ('python3', '-c', 'print()')
    """

    def __init__(
        self,
        command: str | list[str] | tuple[str, ...],
        *,
        timeout: float | None = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
        dialect: Dialect = PUBLIC,
    ) -> None:
        self.command = arguments_of(command)
        self.dialect = dialect
        self.timeout = CALL_SECONDS if timeout is None else timeout
        self.start_timeout = start_timeout
        self.log = ""
        self._claims: Claims | None = None
        self._installed = Installed()
        self._program: Program | None = None
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return self.claims().name

    @property
    def capabilities(self) -> Capabilities:
        return self.claims().capabilities

    @property
    def notes(self) -> tuple[str, ...]:
        return self.claims().notes

    @property
    def installed(self) -> Installed:
        self.claims()
        return self._installed

    def claims(self) -> Claims:
        """Return the program's answer to hello."""
        with self._lock:
            try:
                with self.guarded():
                    if self._claims is None:
                        self.started()
            except Failed as fault:
                said = f"{fault}\nit wrote:\n{fault.log[-MOST_LOG:]}" if fault.log else str(fault)
                raise self.dialect.refusal(said, self.command) from None
            assert self._claims is not None
            return self._claims

    def run(self, call: Call) -> Result:
        """Run one call and remove its files."""
        with self._lock:
            folder = Path(tempfile.mkdtemp(prefix="ringspec-"))
            try:
                with self.guarded():
                    program = self.started()
                    inputs = folder / "inputs.safetensors"
                    data = inputs_file(call)
                    inputs.write_bytes(data)
                    message = call_message(call, str(inputs), str(folder / RESULT))
                    answer = asked(program, message, self.timeout)
                    result = self.dialect.result(answer, folder, call)
                    self._installed = self._installed.merged(said_installed(answer))
                    check_unchanged(folder, inputs.name, data)
                    return result
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Close the program's standard input, give it time to exit, then kill it.

        If another thread is waiting for an answer, the program is killed at once.
        """
        while not self._lock.acquire(timeout=0.1):
            if (waiting := self._program) is not None:
                waiting.kill()
        try:
            program, self._program = self._program, None
            if program is not None:
                program.close()
                self.log = program.log()
        finally:
            self._lock.release()

    def started(self) -> Program:
        """Return the running program; start it if necessary."""
        if self._program is None:
            self._program = Program(self.command, self.dialect.who)
            message = {"kind": "hello", "protocol": PROTOCOL}
            answer = asked(self._program, message, self.start_timeout)
            claims = self.dialect.claims(answer, self.command)
            self._claims = self._claims or claims
            self._installed = self._installed.merged(claims.installed)
        return self._program

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """If the program crashes, hangs or writes garbage in the body, end its process; keep its log in any case."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) or isinstance(error, FATAL):
                program, self._program = self._program, None
                if program is not None:
                    program.end()
                    self.log = program.log()
            elif self._program is not None:
                self.log = self._program.log()
            if isinstance(error, Failed):
                error.log = self.log
            raise
        if self._program is not None:
            self.log = self._program.log()


def check_unchanged(folder: Path, name: str, data: bytes) -> None:
    """Raise Mutated if the inputs file exists and differs from what was written."""
    if not os.path.lexists(folder / name):
        return
    try:
        same = read_plain(folder, name, len(data)) == data
    except VectorError:
        same = False
    if not same:
        raise Mutated(f"the target changed the file of its inputs, {name}")


def asked(program: Program, message: dict[str, Any], seconds: float) -> dict[str, Any]:
    return message_of(program.exchange(line_of(message), seconds), "a line on stdout")


def arguments_of(command: object) -> tuple[str, ...]:
    """Split a command into program and arguments, and check them without starting the program."""
    if isinstance(command, str):
        try:
            parts: Any = shlex.split(command)
        except ValueError as cause:
            raise OptionError(
                "a command with balanced quotes", f"{shown(command)} ({cause})", "close the quote"
            ) from None
    else:
        parts = command
    plain = isinstance(parts, (list, tuple)) and all(
        isinstance(part, str) and "\0" not in part for part in parts
    )
    if not plain or not parts or not parts[0]:
        raise OptionError(
            "a program and its arguments", shown(command), "write cmd:PROGRAM ARGUMENT..."
        )
    if shutil.which(parts[0]) is None:
        raise OptionError(
            "an executable program", shown(parts[0]), "write its path, and make it executable"
        )
    return tuple(parts)
