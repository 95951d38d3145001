"""W processes, one rank of a process group each: started once, asked many times, ended as one.

A crash, a hang or an exception of one rank leaves the others waiting in a collective, so after
any of them the whole pool is ended; whoever asks next starts another. The processes are started
by :mod:`ringspec.conformance.adapters.rank_start` and not forked: the harness may hold threads, and
``python`` may be that of another environment, of which nothing is shadowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters import rank_start
from ringspec.conformance.adapters.versions import agreed, plain_installed
from ringspec.conformance.target import Failed, Garbage, Refused, TimedOut, ended

WORKER = "ringspec.conformance.adapters.torch_worker"
LOG_BYTES = 1 << 14
GRACE_SECONDS = 3.0
ENDING_SECONDS = 20.0  # what torch leaves behind takes its time on a busy machine
Message = dict[str, Any]


class Pool:
    """W running processes. ``ask`` raises Refused, Failed, Crashed, Exited or TimedOut.

    ``setup`` is what each process is told first: ``function``, ``options``, ``device``, ``packages``.
    ``alive`` is False once the pool has been ended. ``installed``: what the processes have of those
    packages (Failed where two have different versions). ``printed`` is what the ranks wrote during the last call, with
    stdout and stderr in one. ``folder`` is for the files of calls, and goes with the pool.
    """

    def __init__(self, workers: int, setup: Message, python: str, seconds: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringspec-torch-"))
        self.workers = workers
        self.alive = True
        self.printed = ""
        self.asked = False
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                self.processes.append(self.started(rank, python))
            shared = {"workers": workers, "rendezvous": str(self.folder / "rendezvous")}
            requests = [setup | shared | {"rank": rank} for rank in range(workers)]
            self.installed = agreed([*map(plain_installed, self.ask(requests, seconds))])
        except BaseException:
            self.end()
            raise

    def started(self, rank: int, python: str) -> subprocess.Popen[bytes]:
        with open(self.log_path(rank), "wb") as log:
            return subprocess.Popen(
                [python, str(rank_start.__file__), WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )

    def ask(self, requests: list[Message], seconds: float) -> list[Message]:
        """Send each rank its request, wait for all replies."""
        # What earlier calls wrote is not of this one; the processes append. What they wrote before they
        # were asked anything is of the first, or a process that cannot start would say nothing.
        offsets = [
            self.log_path(rank).stat().st_size if self.asked else 0 for rank in range(self.workers)
        ]
        self.asked = True
        try:
            replies = self.exchanged(requests, seconds)
        except Refused:  # by all of them: none waits for another
            raise
        except Failed as failure:
            self.end(dump=isinstance(failure, TimedOut))
            failure.log = self.logs(offsets)
            self.forget()
            raise
        except BaseException:
            self.end()
            self.forget()
            raise
        self.printed = self.logs(offsets)
        return [replies[rank] for rank in range(self.workers)]

    def exchanged(self, requests: list[Message], seconds: float) -> dict[int, Message]:
        deadline = time.monotonic() + seconds
        replies: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdin is not None and process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
                with contextlib.suppress(BrokenPipeError):  # it ended: its stdout says so
                    process.stdin.write(json.dumps(requests[rank]).encode() + b"\n")
                    process.stdin.flush()
            while len(replies) < self.workers:
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    break
                for key, _ in ready:
                    # A reply is one short line, written at once.
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise ending(key.data, self.processes[key.data])
                    replies[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
                    if "error" in replies[key.data] or "refused" in replies[key.data]:
                        # Others may wait for this rank for ever, or be the ones that crashed.
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        judge_replies(replies, self.workers, seconds)
        return replies

    def log_path(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def logs(self, offsets: list[int]) -> str:
        """What each rank wrote since ``offsets``, at most its last 16 KiB."""
        parts = []
        for rank, offset in enumerate(offsets):
            with contextlib.suppress(OSError), open(self.log_path(rank), "rb") as log:
                log.seek(max(offset, self.log_path(rank).stat().st_size - LOG_BYTES))
                text = log.read().decode("utf-8", "replace")
                parts += [f"--- worker {rank}\n{text}"] if text.strip() else []
        return "\n".join(parts)

    def end(self, dump: bool = False) -> None:
        """End all processes; with ``dump`` each first writes to its log where it is."""
        self.alive = False
        if dump and hasattr(signal, "SIGUSR1"):
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self.end()
        self.forget()


def judge_replies(replies: dict[int, Message], workers: int, seconds: float) -> None:
    """Raise what the replies say, in the order in which they came."""
    for rank, reply in replies.items():
        if "error" in reply:
            raise Failed(f"worker {rank} raised an exception\n{reply['error']}")
    for rank, reply in replies.items():
        if "refused" in reply:
            missing = "" if len(replies) == workers else ", and others of its group did not"
            if missing:
                raise Failed(f"worker {rank} refused{missing}: {reply['refused']}")
            raise Refused(reply["refused"])
    silent = [rank for rank in range(workers) if rank not in replies]
    if silent:
        who = ", ".join(map(str, silent))
        raise TimedOut(f"no answer from worker {who} of {workers} within {seconds:g} s")


def environment() -> dict[str, str]:
    """This environment, in which gloo needs no name service."""
    chosen = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    chosen.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        chosen.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return chosen


def ending(rank: int, process: subprocess.Popen[bytes]) -> Failed:
    try:
        return ended(f"worker {rank}", process.wait(ENDING_SECONDS))
    except subprocess.TimeoutExpired:
        return Garbage(f"worker {rank} closed its reply stream")
