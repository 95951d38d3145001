"""A pool of W processes, each a rank of one process group: started once, used for many calls, ended together.

If one rank crashes, hangs or raises an exception, the others wait for it in a collective. Any of these therefore ends
the whole pool, and the next call starts a new one. :mod:`ringspec.conformance.adapters.rank_start` starts the
processes. They are not forked, because the suite may have threads, and because another Python interpreter may have been
chosen for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters import rank_start, torch_worker
from ringspec.conformance.adapters.process import GLANCE_SECONDS, Program, pump
from ringspec.conformance.adapters.wire import line_of, message_of
from ringspec.conformance.target.protocol import Failed, Garbage, Refused, TimedOut
from ringspec.conformance.target.versions import agreed, said_installed
from ringspec.errors import shown

WORKER = "ringspec.conformance.adapters.torch_worker"
LOG_BYTES = 1 << 14
GRACE_SECONDS = 3.0
ENDING_SECONDS = 20.0  # torch exits slowly on a busy machine
Message = dict[str, Any]


class RankHere:
    """A rank that runs in this process, for a debugger. It has the methods of a :class:`Program`.

    It computes in ``answer``, after the other ranks have received their requests.
    """

    def __init__(self) -> None:
        self.rank = torch_worker.Rank()
        self.request: Message = {}

    def ask(self, line: bytes) -> None:
        self.request = json.loads(line)

    def answer(self) -> bytes:
        joins = self.rank.place is None
        return line_of((self.rank.joined if joins else self.rank.reply)(self.request))

    def log(self) -> str:
        return ""

    def kill(self) -> None:
        """Do nothing, because this process must not end."""

    def end(self) -> None:
        import torch.distributed as dist

        self.rank.standins.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class Pool:
    """The W running processes. ``ask`` raises Refused, Failed, Crashed, Exited, TimedOut or Garbage.

    ``setup``: ``function``, ``options``, ``device``, ``packages`` and ``standins``, which each process gets first. ``alive``: False
    after the pool has ended. ``installed``: the packages of the processes; reading it raises Failed if their versions
    differ. ``printed``: the stdout and stderr of the ranks during the last call. ``here``: the rank that this process
    computes, if any. ``folder``: for the files of calls; it is removed with the pool.
    """

    def __init__(
        self, workers: int, setup: Message, python: str, seconds: float, here: int | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringspec-torch-"))
        self.workers = workers
        self.alive = True
        self.printed = ""
        self.processes: list[Program | RankHere] = []
        try:
            for rank in range(workers):
                one = RankHere() if rank == here else self.started(rank, python)
                self.processes.append(one)
            shared = {"workers": workers, "rendezvous": str(self.folder / "rendezvous")}
            requests = [setup | shared | {"rank": rank} for rank in range(workers)]
            self.installed = agreed([*map(said_installed, self.ask(requests, seconds))])
        except BaseException:
            self.end()
            raise

    def started(self, rank: int, python: str) -> Program:
        command = (python, str(rank_start.__file__), WORKER)
        return Program(command, f"worker {rank}", environment(), ENDING_SECONDS)

    def ask(self, requests: list[Message], seconds: float) -> list[Message]:
        """Send each rank its request and wait for all replies."""
        try:
            replies = self.exchanged(requests, seconds)
        except Refused:  # all ranks refused, so none waits for another
            raise
        except Failed as failure:
            self.end(dump=isinstance(failure, TimedOut))
            failure.log = self.logs()
            self.forget()
            raise
        except BaseException:
            self.end()
            self.forget()
            raise
        self.printed = self.logs()
        return [replies[rank] for rank in range(self.workers)]

    def exchanged(self, requests: list[Message], seconds: float) -> dict[int, Message]:
        deadline = Deadline(seconds)
        for program, request in zip(self.processes, requests, strict=True):
            program.ask(line_of(request))
        others = {n: one for n, one in enumerate(self.processes) if isinstance(one, Program)}
        here = {n: one for n, one in enumerate(self.processes) if isinstance(one, RankHere)}
        if here:
            replies = beside(here, others, deadline)
        else:
            replies = collected(others, deadline)
        judge_replies(replies, self.workers, seconds)
        return replies

    def logs(self) -> str:
        """Return what each rank wrote during the last call, at most its last 16 KiB."""
        texts = [program.log()[-LOG_BYTES:] for program in self.processes]
        parts = [f"--- worker {rank}\n{text}" for rank, text in enumerate(texts) if text.strip()]
        return "\n".join(parts)

    def end(self, dump: bool = False) -> None:
        """End all processes. With ``dump``, each first writes its stack to the log."""
        self.alive = False
        if dump and hasattr(signal, "SIGUSR1"):
            for program in self.processes:
                if isinstance(program, Program) and program.alive():
                    program.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        for program in self.processes:
            program.kill()
        for program in self.processes:
            program.end()

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self.end()
        self.forget()


class Deadline:
    """The time at which waiting for replies ends."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        return self.at - time.monotonic()

    def note(self, reply: Message) -> Message:
        """Shorten the deadline if a rank failed, because the other ranks may wait for it forever, or crash too."""
        if gave_up(reply):
            self.at = min(self.at, time.monotonic() + GRACE_SECONDS)
        return reply


def gave_up(reply: Message) -> bool:
    return "error" in reply or "refused" in reply


def collected(programs: Mapping[int, Program], deadline: Deadline) -> dict[int, Message]:
    """Return the replies that arrive before the deadline, by rank."""
    replies: dict[int, Message] = {}
    while len(replies) < len(programs) and (left := deadline.left()) > 0:
        pump([*programs.values()], min(left, GLANCE_SECONDS))
        for rank, program in programs.items():
            line = None if rank in replies else program.answer(deadline.at)
            if line is not None:
                replies[rank] = deadline.note(reply_of(line, rank))
    return replies


def beside(
    here: Mapping[int, RankHere], others: Mapping[int, Program], deadline: Deadline
) -> dict[int, Message]:
    """Compute one rank in this process while a thread waits for the other ranks; return all replies.

    If one of the other ranks fails, all of them are killed. That closes their connections to this rank, so that it
    stops waiting.
    """

    def watch() -> dict[int, Message]:
        replies: dict[int, Message] = {}
        try:
            replies = collected(others, deadline)
        finally:
            if len(replies) < len(others) or any(map(gave_up, replies.values())):
                kill_all()
        return replies

    def kill_all() -> None:
        for program in others.values():
            program.kill()

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        try:
            replies = {
                rank: deadline.note(reply_of(one.answer(), rank)) for rank, one in here.items()
            }
        except BaseException:
            kill_all()
            raise
        return watching.result() | replies


def reply_of(line: bytes, rank: int) -> Message:
    return checked_reply(message_of(line, f"the reply of worker {rank}"), rank)


def checked_reply(reply: Message, rank: int) -> Message:
    """Return the reply of a rank; raise Garbage unless it has the form that ``torch_worker`` writes."""
    changed = reply.get("changed", [])
    texts = [reply.get(key, "") for key in ("error", "refused")]
    texts += changed if isinstance(changed, list) else [changed]
    said = reply.keys() & {"error", "refused", "changed", "ready"}
    if len(said) != 1 or not all(isinstance(text, str) for text in texts):
        raise Garbage(f"the reply of worker {rank} is not a reply: {shown(reply)[1:]}")
    said_installed(reply)
    return reply


def judge_replies(replies: dict[int, Message], workers: int, seconds: float) -> None:
    """Raise the error that the replies report, if any.

    Exceptions come first, then refusals, then missing replies.
    """
    for rank, reply in replies.items():
        if "error" in reply:
            raise Failed(f"worker {rank} raised an exception\n{reply['error']}")
    for rank, reply in replies.items():
        if "refused" in reply:
            missing = "" if len(replies) == workers else ", but not all workers replied"
            if missing:
                raise Failed(f"worker {rank} refused{missing}: {reply['refused']}")
            raise Refused(reply["refused"])
    silent = [rank for rank in range(workers) if rank not in replies]
    if silent:
        who = ", ".join(map(str, silent))
        raise TimedOut(f"no answer from worker {who} of {workers} within {seconds:g} s")


def environment() -> dict[str, str]:
    """Return this process's environment variables, with gloo on the loopback interface."""
    chosen = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    chosen.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        chosen.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return chosen
