"""A program connected by pipes: one line per request and per answer, with a deadline and a log.

POSIX only, because this module waits for several pipes at once and kills process groups.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from ringspec.conformance.adapters.wire import MAX_LINE
from ringspec.conformance.target.protocol import Failed, Garbage, TimedOut, ended
from ringspec.errors import OptionError, shown

LOG_BYTES = 1 << 16
CHUNK = 1 << 16
GLANCE_SECONDS = 0.2
LAST_SECONDS = 2.0
ENDING_SECONDS = 5.0
PROGRAM = "the program"


class Program:
    """A running program. If ``exchange`` raises Crashed, Exited, TimedOut or Garbage, call ``end`` next.

    ``who`` names the program in messages. ``ending_seconds``: how long to wait for the exit status after the program
    closed its stdout. ``longest``: the largest number of bytes in a line of its output.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        who: str = PROGRAM,
        environment: Mapping[str, str] | None = None,
        ending_seconds: float = ENDING_SECONDS,
        longest: int = MAX_LINE,
    ) -> None:
        self.who, self.ending_seconds, self.longest = who, ending_seconds, longest
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )
        except OSError as cause:
            got = f"{shown(command[0])} ({cause.strerror})"
            raise OptionError("an executable program", got, "check its path") from None
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        self.stdin, self.stdout, self.stderr = (pipe.fileno() for pipe in pipes if pipe)
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe, False)
        self.open = {self.stdout, self.stderr}
        self.received = bytearray()
        self.errors = bytearray()
        self.unsent = memoryview(b"")
        self.asked = False

    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        """Return the last 64 KiB written to stderr since the last request."""
        return self.errors.decode("utf-8", "replace")

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Write a line and return the line that answers it."""
        deadline = time.monotonic() + seconds
        self.ask(line)
        while (answer := self.answer(deadline)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"no answer within {seconds:g} seconds")
            pump([self], min(left, GLANCE_SECONDS))
        return answer

    def ask(self, line: bytes) -> None:
        """Begin to write a line, and clear the log."""
        self.take(0.0)
        when = " after its last answer" if self.asked else " before the first request"
        if self.asked:  # output before the first request stays in its log
            self.errors.clear()
        self.asked = True
        self.refuse_noise("before the request")
        if not self.alive():
            raise ended(self.who, self.process.returncode, when)
        self.unsent = memoryview(line)

    def answer(self, deadline: float) -> bytes | None:
        """Return the line that answers the request; None if the line is not complete yet."""
        if b"\n" not in self.received:
            if len(self.received) > self.longest:
                raise Garbage(f"more than {self.longest} bytes on stdout without an end of line")
            if self.stdout in self.open and self.alive():
                return None
            self.take(0.0)
            if b"\n" not in self.received:
                self.raise_ended(deadline)
        answer, _, rest = bytes(self.received).partition(b"\n")
        self.received = bytearray(rest)
        if len(answer) > self.longest:
            raise Garbage(f"a line of {len(answer)} bytes on stdout")
        self.take(0.0)
        if self.received:
            self.refuse_noise(f"after the line {shown(answer)[1:]}")
        return answer

    def refuse_noise(self, when: str) -> None:
        if self.received:
            first = bytes(self.received).split(b"\n")[0]
            raise Garbage(f"stdout is for answers; {self.who} wrote {shown(first)[1:]} {when}")

    def send(self) -> None:
        """Write as much of the line as the pipe takes."""
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent[:CHUNK]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the program ended or closed its input: there will be no answer
            self.unsent = self.unsent[:0]

    def read(self, pipe: int) -> bool:
        """Read one piece from a pipe; return False if it is empty."""
        try:
            piece = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self.open.discard(pipe)
        elif pipe == self.stdout:
            self.received += piece
        else:
            self.errors += piece
            del self.errors[:-LOG_BYTES]
        return bool(piece)

    def take(self, seconds: float) -> None:
        """Read what is in the pipes, for at most ``seconds``.

        The limit is for a program that never stops writing.
        """
        until = time.monotonic() + max(seconds, GLANCE_SECONDS)
        for pipe in tuple(self.open):
            while (
                len(self.received) <= self.longest and time.monotonic() < until and self.read(pipe)
            ):
                pass

    def raise_ended(self, deadline: float) -> None:
        """Raise the error for a program that closed its stdout."""
        left = max(deadline - time.monotonic(), 0.0)
        try:
            status = self.process.wait(min(left, self.ending_seconds))
        except subprocess.TimeoutExpired:
            raise Garbage(f"{self.who} closed its stdout but is still running") from None
        raise ended(self.who, status, " before it answered")

    def close(self) -> None:
        """Close the program's input, give it a moment to exit, then kill its group."""
        self.unsent = memoryview(b"")
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        deadline = time.monotonic() + LAST_SECONDS
        while self.alive() and time.monotonic() < deadline and self.open:
            with contextlib.suppress(Failed):
                pump([self], min(max(deadline - time.monotonic(), 0.0), GLANCE_SECONDS))
                self.received.clear()
        self.end()

    def kill(self) -> None:
        """Kill the process group. This is safe in any thread, even while another thread waits for an answer."""
        # Even if the program has ended: its children are in the same group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process group, keep the end of the log, close the pipes."""
        self.kill()
        self.process.wait()
        self.received.clear()
        self.take(0.0)
        self.open.clear()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def pump(programs: Sequence[Program], seconds: float) -> None:
    """Wait at most ``seconds`` until any program's pipes are ready, then write to them and read from them."""
    with selectors.DefaultSelector() as selector:
        for program in programs:
            for pipe in program.open:
                selector.register(pipe, selectors.EVENT_READ, program)
            if program.unsent:
                selector.register(program.stdin, selectors.EVENT_WRITE, program)
        ready = [(key.data, key.fd) for key, _ in selector.select(seconds)]
    for program, pipe in ready:
        if pipe == program.stdin:
            program.send()
        else:
            program.read(pipe)
