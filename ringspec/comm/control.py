"""Side messages among all ranks: an error that stops all ranks, and the question 'are you alive?'.

A thread of each rank receives side messages while the rank computes. So a slow rank answers the question, and a stopped
rank does not. The thread also calls the MPI library regularly, because otherwise a large transfer would make no
progress during a long computation.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

import numpy as np

from ringspec.comm.agreement import ERROR_BYTES, error_bytes, error_from
from ringspec.comm.library import mpi
from ringspec.comm.wire import Buffer
from ringspec.errors import RingspecError

STOP, ASK, ANSWER = 1, 2, 3
ATTENDING_SECONDS = 0.005


class Control:
    """The side messages of this rank. Its answer to 'are you alive?' is the text ``doing``.

    If the MPI library does not allow calls from several threads, messages are received only while
    the rank waits, so a rank in a long computation does not answer.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.error: RingspecError | None = None
        self.doing = "starts"
        self.answers: dict[int, str] = {}
        self._sends: list[tuple[Any, Buffer]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.attend, daemon=True)
        if self.size > 1 and mpi().Query_thread() == mpi().THREAD_MULTIPLE:
            self._thread.start()
            atexit.register(self.close)

    def attend(self) -> None:
        """Receive messages and answer questions until the program ends; runs in a thread."""
        while not self._ended.wait(ATTENDING_SECONDS):
            self.take()

    def close(self) -> None:
        """Stop the thread; it does not call MPI afterwards."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def stop(self, error: RingspecError) -> None:
        """Send ``error``, which ends this rank, to all other ranks; only the first call has an effect."""
        with self._lock:
            if self.error is None:
                self.error = error
                for target in range(self.size):
                    if target != self.rank:
                        self.send(target, STOP, error_bytes(error))

    def ask(self, target: int) -> None:
        """Ask a rank whether it is alive; its answer will appear in ``answers``."""
        with self._lock:
            self.answers.pop(target, None)
            self.send(target, ASK, np.zeros(ERROR_BYTES, np.uint8))

    def look(self) -> None:
        """Receive messages; if another rank has stopped with an error, raise this error."""
        self.take()
        if self.error is not None:
            raise self.error

    def take(self) -> None:
        """Receive messages, and answer questions."""
        with self._lock:
            status = mpi().Status()
            while self.comm.Iprobe(mpi().ANY_SOURCE, mpi().ANY_TAG, status):
                source, kind = status.Get_source(), status.Get_tag()
                text = np.zeros(ERROR_BYTES, np.uint8)
                self.comm.Recv([text, mpi().BYTE], source, kind)
                if kind == STOP:
                    self.error = self.error or error_from(text)
                elif kind == ASK:
                    self.send(source, ANSWER, text_bytes(self.doing))
                else:
                    self.answers[source] = text.tobytes().rstrip(b"\0").decode()

    def send(self, target: int, kind: int, text: Buffer) -> None:
        """Start to send a message; keep its buffer until the message has been sent."""
        self._sends = [(one, data) for one, data in self._sends if not one.Test()]
        self._sends.append((self.comm.Isend([text, mpi().BYTE], target, kind), text))


def text_bytes(text: str) -> Buffer:
    """Encode text, in ASCII, as a side message, which has a fixed length."""
    data = text.encode("ascii", "replace")[:ERROR_BYTES]
    buffer = np.zeros(ERROR_BYTES, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer
