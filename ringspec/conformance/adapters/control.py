"""The control stream of a worker's process: JSON lines on the original standard input and output.

Everything else that the process prints goes to standard error, which is its log.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.errors import OptionError, RingspecError

Message = dict[str, Any]
PARTS = ("expected", "got", "fix")
MOST_PART = 4000


@dataclass(frozen=True)
class Control:
    """The queue of requests, and the file descriptor for replies."""

    requests: queue.Queue[Message]
    out: int

    def next(self) -> Message:
        return self.requests.get()

    def reply(self, message: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        data = memoryview(json.dumps(message).encode("ascii") + b"\n")
        while data:
            data = data[os.write(self.out, data) :]


def take_control() -> Control:
    """Take over the standard streams of this process; call it once.

    The process and its group end when the control stream closes, even during a call. Ctrl-C is ignored here; the
    process that started this one handles it.
    """
    control = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    requests: queue.Queue[Message] = queue.Queue()

    def read() -> None:
        for line in control:
            requests.put(json.loads(line))
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return Control(requests, out)


def refusal(error: RingspecError) -> Message:
    """Make the reply of a process that cannot start its work because of ``error``."""
    parts = {name: str(getattr(error, name))[-MOST_PART:] for name in PARTS}
    return {"kind": "error"} | parts


def refused(reply: Mapping[str, Any]) -> OptionError:
    """Turn a reply made by :func:`refusal` back into an error."""
    return OptionError(*(str(reply.get(name)) for name in PARTS))
