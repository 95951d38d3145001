"""A Python target (program under test) in a separate process, so that the target cannot affect the suite.

The process loads the target by its name and is called like a ``cmd:`` program
(:mod:`ringspec.conformance.adapters.command`). JSON lines travel over pipes with a deadline, and tensors in safetensors
files. There is a log of limited length, and a process group that ends together. The answers contain more than those of
a program: the outcome of an exception, what was printed, and the dtype and shape of each array. So the suite can report
a list that is too short, or a dtype that a file cannot hold.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.adapters import rank_start
from ringspec.conformance.adapters.command import (
    RESULT,
    Answer,
    CommandTarget,
    Dialect,
    hello_answer,
)
from ringspec.conformance.adapters.control import refused
from ringspec.conformance.adapters.wire import Claims, most_bytes, stored
from ringspec.conformance.report.records import FAILURES
from ringspec.conformance.run.call import Stop
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import INTEGERS, RESULTS, Call, Failed, Garbage, Result
from ringspec.conformance.target.versions import Installed
from ringspec.errors import OptionError, shown

WORKER = "ringspec.conformance.run.target_worker"
WHO = "the target's process"
START_SECONDS = 120.0
ANSWER_KEYS = {"kind", "id", "outcome", "message", "printed", "results", "versions", "files"}


class ProcessTarget:
    """The target that ``spec`` names, called in another process.

    ``name`` and ``capabilities``: by default, those of the target. ``timeout``: seconds for one call, None for no
    limit. Loading the target has a separate limit, :data:`START_SECONDS`. ``own_processes``: whether the target has its
    own processes (it then has an attribute ``timeout``); such a target is called directly, not through this process.
    ``printed``: the end of what the last call printed. Raises OptionError if the target cannot be loaded.
    """

    def __init__(
        self,
        spec: str,
        name: str | None = None,
        capabilities: Capabilities | None = None,
        timeout: float | None = None,
    ) -> None:
        self.spec, self.timeout, self.printed = spec, timeout, ""
        self.own_processes, self._closed = False, False
        self._name, self._capabilities = name, capabilities
        setup = json.dumps({"spec": spec, "path": sys.path})
        self._program = CommandTarget(
            (sys.executable, str(rank_start.__file__), WORKER, setup),
            start_timeout=START_SECONDS,
            dialect=Dialect(WHO, self.claims_of, self.result_of, self.refusal),
        )

    @property
    def name(self) -> str:
        return self._program.name if self._name is None else self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._program.capabilities if self._capabilities is None else self._capabilities

    @property
    def notes(self) -> tuple[str, ...]:
        return self._program.notes

    @property
    def installed(self) -> Installed:
        return self._program.installed

    def run(self, call: Call) -> Result:
        if self._closed:
            raise Failed("the target was closed")
        self.printed = ""
        self._program.timeout = math.inf if self.timeout is None else self.timeout
        try:
            return self._program.run(call)
        except OptionError as error:  # it was loaded earlier and cannot be loaded again
            raise Failed(str(error)) from None

    def close(self) -> None:
        """End the process; no other process is started."""
        self._closed = True
        self._program.close()

    def refusal(self, said: str, command: tuple[str, ...]) -> OptionError:
        return OptionError(
            f"a target {self.spec} that can be loaded",
            said,
            f"make this work: python -c 'from ringspec.conformance.run.load import load_target; "
            f"load_target({self.spec!r})'",
        )

    def claims_of(self, answer: Answer, command: tuple[str, ...]) -> Claims:
        """Return the claims of the target; raise the OptionError that the process reports if loading failed."""
        if answer.get("kind") == "error":
            raise refused(answer)
        self.own_processes = answer.pop("own_processes", False) is True
        return hello_answer(answer, command)

    def result_of(self, answer: Answer, folder: Path, call: Call) -> Result:
        """Return the result of a call, or raise Stop with the outcome that the process reports."""
        check_form(answer, call)
        if answer["kind"] == "stop":
            raise Stop(answer["outcome"], answer["message"])
        self.printed = answer["printed"]
        tensors = stored(folder, RESULT, most_bytes(call))
        listed: Mapping[str, Any] = answer["results"]
        return Result(
            **{
                name: None
                if said is None
                else [array_of(tensors.get(f"{name}.{n}"), one) for n, one in enumerate(said)]
                for name, said in listed.items()
            }
        )


def check_form(answer: Answer, call: Call) -> None:
    """Raise Garbage unless an answer has the form that ``target_worker`` writes."""
    texts = [answer.get(key, "") for key in ("id", "outcome", "message", "printed")]
    right = answer.keys() <= ANSWER_KEYS and all(isinstance(text, str) for text in texts)
    if right and answer.get("kind") == "stop":
        right = answer.get("outcome") in FAILURES and "message" in answer
    elif right:
        listed = answer.get("results")
        right = answer.get("kind") == "result" and "printed" in answer and isinstance(listed, dict)
        right = right and all(
            name in (*RESULTS, *INTEGERS) and (said is None or isinstance(said, list))
            for name, said in answer["results"].items()
        )
    if not right or answer.get("id") != call.id:
        raise Garbage(f"unexpected answer of the target's process: {shown(answer)[1:]}")


def array_of(array: NDArray | None, said: Any) -> NDArray | None:
    """Return one array of one worker.

    If the file cannot hold the array, return zeros of its dtype and shape.
    """
    if said is None or array is not None:
        return array
    try:
        dtype, shape = said
        return np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)
    except (TypeError, ValueError):
        raise Garbage(f"an array described as {shown(said)}") from None
