"""Use a function of lists of NumPy arrays (one array per worker) as a target."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import RESULTS, Call, Garbage, Result
from ringspec.errors import OptionError, nearest, shown

__all__ = ["NumPyTarget"]

SHARED = ("sinks",)
FROM_CALL = {f.name for f in dataclasses.fields(Call)} - {"id", "tensors", "terms"}


class NumPyTarget:
    """A function ``function(q, k, v, **rest)`` for all workers at once, as a target (implementation under test).

    The function gets lists with one array per worker: q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv]. It may have
    further parameters, each with the name of the part of a call that it gets:

    - tensors (``dy``, ``dlse``, ``bias``...): None if the call lacks the tensor; ``sinks`` [H, N] is one array,
      not a list, except in the operation 'context_parallel'
    - terms (``scale``, ``causal``, ``window``...): the parameter's default if the call lacks the term
    - fields of the call (``workers``, ``layout``, ``index_q``, ``position_q``...)
    - ``call``: the :class:`~ringspec.conformance.target.protocol.Call` itself

    The function returns a dict or a Result with lists of o, lse, dq, dk, dv, dsinks, dbias, or a tuple in that order.

    ``capabilities``: what the function claims to support; ``name`` and ``notes``: for the report. ``run`` raises
    OptionError if the function lacks a parameter for a term or tensor of the call, and Garbage if it returns anything
    else.

    >>> import numpy as np
    >>> def local(q, k, v, scale):
    ...     return {"o": [np.zeros_like(x) for x in q]}
    >>> target = NumPyTarget(local, Capabilities(operations=("ring-forward",), lse="hidden"))
    >>> target.name
    'local'
    """

    def __init__(
        self,
        function: Callable[..., Any],
        capabilities: Capabilities | None = None,
        name: str | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.function = function
        self.capabilities = Capabilities() if capabilities is None else capabilities
        self.name = name or getattr(function, "__name__", "a function")
        self.notes = notes

    def run(self, call: Call) -> Result:
        returned = self.function(**arguments(self.function, call))
        try:
            return result_from(returned)
        except OptionError as error:
            raise Garbage(str(error)) from None


def arguments(function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """Select the parts of a call that a function gets, by the names of its parameters."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    tensors = {
        name: arrays[0] if shared(name, call) else list(arrays)
        for name, arrays in call.tensors.items()
    }
    offered = {**tensors, **call.terms}
    if not takes_all and "call" not in parameters:
        for name in offered:
            if name not in parameters:
                raise OptionError(
                    f"a function with a parameter {name}, which {call.id} needs",
                    f"parameters {', '.join(parameters)}",
                    "add the parameter, or do not claim what needs it",
                )
    offered |= {name: getattr(call, name) for name in FROM_CALL if name in parameters}
    if "call" in parameters:
        offered = {name: value for name, value in offered.items() if name in parameters}
        offered["call"] = call
    for name, parameter in parameters.items():
        if name not in offered and parameter.default is parameter.empty:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                offered[name] = None
    return offered


def shared(name: str, call: Call) -> bool:
    """Tell whether a tensor is one array for all workers; the ranks of a scheme may have sinks of different heads."""
    return call.operation == "merge" or (name in SHARED and call.operation != "context_parallel")


def result_from(value: Any) -> Result:
    """Make a Result from a Result, a mapping by name, or a tuple in the order of RESULTS."""
    if isinstance(value, Result):
        return value
    if isinstance(value, Mapping):
        known = [f.name for f in dataclasses.fields(Result)]
        for name in value:
            if name not in known:
                raise OptionError("names of results", shown(name), nearest(name, known))
        return Result(**dict(value))
    if isinstance(value, tuple) and len(value) <= len(RESULTS):
        return Result(**dict(zip(RESULTS, value, strict=False)))
    raise OptionError(
        "a dict, a Result or a tuple (o, lse, dq, dk, dv, ...)", shown(value), "return a dict"
    )
