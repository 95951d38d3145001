"""The target protocol: the calls that a target, the program under test, receives, and its results.

A target is a plain Python object with ``name``, ``capabilities`` and ``run(call) -> result``. It receives inputs, never
expected values. For each tensor, calls and results contain one array per worker, in slot order (the order of tokens on
the worker). The arrays of a call are read-only. The suite converts only the conventions that the capabilities declare,
such as the order of axes and the base of the lse. docs/spec/index.md defines the symbols.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.capabilities import Capabilities

__all__ = [
    "Call",
    "Crashed",
    "Exited",
    "Failed",
    "Garbage",
    "Mutated",
    "Refused",
    "Result",
    "Target",
    "TimedOut",
]

PerWorker = tuple[NDArray, ...]
RESULTS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
INTEGERS = ("table", "positions", "lengths", "cu_seqlens", "visible")
TABLES = ("index_q", "index_k", "position_q", "position_k")
EVERY_TABLE = (*TABLES, "heads_q", "heads_k")  # the heads only in the operation context_parallel


@dataclass(frozen=True)
class Call:
    """One computation that a target is asked to do; ``id`` is the id of the case that makes the call.

    ``operation``    'ring', 'block' (one worker's queries against one block of keys), 'merge' (of partial results),
                     'layout' (integers of a layout: no tensors, no formats), 'context_parallel' (any way to split
                     attention over ranks, which the fields then call workers)
    ``passes``       ('forward',), ('forward', 'backward') or ('backward',); for 'layout', the names of the results
    ``workers``      W; 1 for block and merge
    ``layout``       the layout's name; ``index_q``, ``index_k`` int64 [W, n]: token in each slot, -1 for padding;
                     ``position_q``, ``position_k`` int64 [W, 1|B, n]: the tokens' global positions
    ``scheme``, ``mesh``  'context_parallel': a name of :func:`ringspec.context_parallel`, and the axes of the mesh as
                     pairs (name, size), outermost first; rank numbers are row-major. ``heads_q`` [W, h] and ``heads_k``
                     [W, hkv], int64: the global numbers of the heads that each rank holds
    ``circulation``  what travels: 'kv' (keys and values), 'q' (queries), or 'gather' (each worker collects all keys)
    ``direction``    1 if worker r sends to r + 1, -1 if it sends to r - 1
    ``terms``        plain values: ``scale`` in every ring and block; ``causal``, ``window`` (left,
                     right), ``softcap``, ``dropout_p``, ``dropout_seed``, ``q_offset``,
                     ``cu_seqlens``, ``cu_seqlens_k`` if they are not the default. 'layout': ``cu_seqlens`` always,
                     ``cu_seqlens_padded``, ``interleave``, ``prefix``, ``queries`` if the layout or result needs them.
                     'context_parallel': ``text`` and ``text_at``, ``interleave``, ``cu_seqlens_padded`` if the scheme or
                     layout needs them
    ``formats``      names of formats: ``inputs``, ``outputs``, ``statistics``
    ``tensors``      maps each name to one array per worker, in storage dtypes. q [B, H, n, D], k [B, Hkv, n, D],
                     v [B, Hkv, n, Dv]; for a backward pass dy [B, H, n, Dv] and optionally dlse [B, H, n];
                     ``segments_q``, ``segments_k``, ``bound_min``, ``bound_max`` [1|B, n]; ``bias``,
                     ``mask``, ``keep`` [1|B, 1|H, n|1, Sk|1] (own rows, global keys); ``sinks``
                     [H, N], the same on each worker. Backward pass of a block: ``lse``, ``delta`` [B, H, n].
                     Merge: ``parts_o`` [N, B, H, S, Dv], ``parts_lse`` [N, B, H, S] of one worker.
                     Only the backward pass of a ring: the rounded ``o``, ``lse`` of the forward pass.
                     'context_parallel': each rank has its tokens x heads, [B, h, n, D] and [B, hkv, n, D], so H and Hkv
                     are not in the shapes; replicated tokens are in the arrays of all ranks that hold them. ``sinks`` [h, N],
                     ``bias`` and ``keep`` [1|B, 1|h, n, Sk] are those of the rank's heads and queries, and all keys.
    """

    id: str
    operation: str
    passes: tuple[str, ...]
    workers: int
    tensors: Mapping[str, PerWorker]
    terms: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    layout: str = "contiguous"
    circulation: str = "kv"
    direction: int = 1
    index_q: NDArray[np.int64] | None = None
    index_k: NDArray[np.int64] | None = None
    position_q: NDArray[np.int64] | None = None
    position_k: NDArray[np.int64] | None = None
    scheme: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    heads_q: NDArray[np.int64] | None = None
    heads_k: NDArray[np.int64] | None = None

    def worker(self, name: str, worker: int) -> NDArray:
        """Return the array of one worker."""
        return self.tensors[name][worker]


@dataclass
class Result:
    """The results that a target returns: for each claimed tensor, one array per worker.

    o [B, H, n, Dv], lse [B, H, n], dq [B, H, n, D], dk [B, Hkv, n, D], dv [B, Hkv, n, Dv]; ``dsinks``
    [H, N] and ``dbias`` are each worker's sums over its query rows. Padding slots are not compared. In the operation
    'context_parallel', o, lse and dq have the tokens and heads of the rank's q, dk and dv those of its k; every copy of a
    token must be complete.
    The operation 'layout' has integers of any integer dtype: ``table`` [n], token in each slot, -1 for padding;
    ``positions`` [n]; ``lengths`` [N] of the documents on this worker; ``cu_seqlens`` [N + 1]; ``visible`` [N, Q], keys
    of this worker that the last Q tokens of each document see.
    ``states``: any data that a target records in each step; they are not compared.
    """

    o: Sequence[Any] | None = None
    lse: Sequence[Any] | None = None
    dq: Sequence[Any] | None = None
    dk: Sequence[Any] | None = None
    dv: Sequence[Any] | None = None
    dsinks: Sequence[Any] | None = None
    dbias: Sequence[Any] | None = None
    table: Sequence[Any] | None = None
    positions: Sequence[Any] | None = None
    lengths: Sequence[Any] | None = None
    cu_seqlens: Sequence[Any] | None = None
    visible: Sequence[Any] | None = None
    states: Any = None


class Refused(Exception):
    """Raised by a target for a call that it does not support; this is a failure if the target claims the case."""


class Failed(Exception):
    """A failure of a target's process, described by ``message``; ``log`` is what it wrote to stderr."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Crashed(Failed):
    """A signal ended the process."""


class Exited(Failed):
    """The process exited, with any status, instead of answering."""


class TimedOut(Failed):
    """The process did not answer within the time limit."""


class Mutated(Failed):
    """The target changed its inputs, as its process reports."""


class Garbage(Failed):
    """The answer is not a result: not JSON, an unknown key, an invalid file, or not arrays."""


def ended(who: str, status: int | None, when: str = "") -> Failed:
    """Make the Exited or Crashed error for a return code; a negative code -n means signal n.

    >>> ended("the program", 3, " before it answered")
    Exited('the program ended with exit status 3 before it answered')
    >>> ended("worker 1", -11)
    Crashed('worker 1 was ended by SIGSEGV')
    """
    if status is None:
        return Crashed(f"{who} ended{when}, and its exit status is not known")
    if status >= 0:
        return Exited(f"{who} ended with exit status {status}{when}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return Crashed(f"{who} was ended by {name}{when}")


class Target(Protocol):
    """The interface of a target: ``name``, ``capabilities`` and ``run``, which computes one call at a time.

    Optional: ``close()``, called once at the end; ``notes``, sentences for the report. A target that computes in other
    processes may have ``printed``, the output of these processes during the last call, and ``installed``
    (:class:`~ringspec.conformance.target.versions.Installed`), the versions of the packages in them.
    """

    @property
    def name(self) -> str:
        """The name of the target, for the report."""

    @property
    def capabilities(self) -> Capabilities:
        """The claims of the target, as data."""

    def run(self, call: Call) -> Result:
        """Compute one call; raise :class:`Refused` for one that the target does not support."""
