"""``cmd:PROGRAM ARGUMENT...``: a program in any language, asked through its standard streams.

One JSON line asks, one JSON line answers, tensors go through safetensors files
(docs/conform/protocol.md). The program runs without a shell, in a process group of its own; its
error stream is a log. A process that crashed, hung or wrote what is no answer is ended with its
group, and the next call starts another one.
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
# After one of these the process gives no second answer.
FATAL = (Crashed, Exited, TimedOut, Garbage)
Answer = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """How the answers of a program are read; ``who`` names the program in messages.

    ``claims``: the answer to hello, for a command, as Claims. ``result``: the answer to a call, whose
    files lie in a folder, as a Result. Both raise Garbage and other kinds of Failed. ``refusal``:
    the error for a command that does not answer hello, of what went wrong.
    """

    who: str
    claims: Callable[[Answer, tuple[str, ...]], Claims]
    result: Callable[[Answer, Path, Call], Result]
    refusal: Callable[[str, tuple[str, ...]], OptionError]


def hello_answer(answer: Answer, command: tuple[str, ...]) -> Claims:
    """The claims in an answer to hello."""
    if answer.get("kind") != "hello":
        raise Garbage(f"an answer to hello of kind {shown(answer.get('kind'))}")
    if answer.get("protocol", PROTOCOL) != PROTOCOL:
        raise Garbage(f"protocol {shown(answer['protocol'])}; this is protocol {PROTOCOL}")
    return claims_from(answer, os.path.basename(command[0]))


def call_answer(answer: Answer, folder: Path, call: Call) -> Result:
    """The result of a call, in the file that it names."""
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
    """A program as a target.

    ``command``: text (split as a shell would, but run without one) or a list of arguments.
    ``timeout``: seconds for the answer to one call; ``start_timeout``: for the answer to hello.
    ``dialect``: how answers are read, by default as docs/conform/protocol.md says.
    ``name``, ``capabilities``, ``notes`` and ``installed``, the versions that it says, come from the
    program, which is started when they are first asked for; OptionError where it does not say them. ``run`` raises Refused, Crashed,
    Exited, TimedOut, Garbage, Mutated where the inputs file is not as it was, and Failed where the
    program says that it could not; ``log`` is what the
    program wrote to stderr during the last call, at most its last 64 KiB.

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
        """What the program answered to hello."""
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
        """One call; its files are removed whatever happens."""
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
        """Close the program's standard input, so that it ends by itself; then end it.

        Where another thread waits for an answer, the program is killed at once.
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
        """The running program, started if there is none."""
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
        """A process that crashed, hung or wrote garbage gives no second answer; keep its log."""
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
    """Raise Mutated unless the inputs file is as it was written, or gone."""
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
    """Program and arguments, checked without starting anything."""
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
