"""Schemes as data: what every rank computes with in each step, and what moves afterwards.

A pass, forward or backward, works on named *things*. Inputs are only read; results are added to:

========  ================================================  ==================  ==================
thing     tensors                                           sharded as          copies are joined
========  ================================================  ==================  ==================
``q``     q; in a backward also dy, lse, row_term           queries             an input: copied
``k``     k, v                                              keys                an input: copied
``state`` forward: m, l, o of the softmax                   queries             merged by lse
``dq``    backward: dq                                      queries             added
``dk``    backward: dk, dv                                  keys                added
========  ================================================  ==================  ==================

**A transfer is the difference of two shardings along one axis of the mesh.** Before it a thing has one sharding, after it
the sharding ``to``. Ranks of a group along the axis send each other the cells that they need. If several ranks of a group
hold a result for one cell, these are partial results and are joined. So the collective operation follows from the two
shardings; ``kind`` declares it, and :mod:`~ringspec.schemes.collectives` derives it.

A result starts, empty, in the first step that computes, with the sharding that its side has in that step. A forward pass
ends with ``state`` at home, a backward pass with ``dq`` and ``dk`` at home.

The data of a token (position, segment, row of a mask or bias) are found by its global number, which moves with it (RING-6).
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.schemes.mesh import Mesh
from ringspec.schemes.sharding import Sharding

INPUTS = ("q", "k")
RESULTS = {"forward": ("state",), "backward": ("dq", "dk")}
KINDS = ("local", "permute", "all_gather", "all_to_all", "reduce_scatter", "all_reduce")
ORDERS = ("token", "rank")
# The side (queries or keys) with which each thing is sharded.
SIDE_OF = {"q": "q", "k": "k", "state": "q", "dq": "q", "dk": "k"}

Tokens = tuple[int, ...]


def tensors_of(thing: str, phase: str, width: int, value_width: int) -> dict[str, tuple[int, ...]]:
    """Return the shape that one cell has in each tensor of a thing; D = ``width``, Dv = ``value_width``.

    >>> tensors_of("state", "forward", 8, 5)
    {'m': (), 'l': (), 'o': (5,)}
    """
    d, dv = (width,), (value_width,)
    rows = {"dy": dv, "lse": (), "row_term": ()} if phase == "backward" else {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "q": {"q": d, **rows},
        "k": {"k": d, "v": dv},
        "state": {"m": (), "l": (), "o": dv},
        "dq": {"dq": d},
        "dk": {"dk": d, "dv": dv},
    }
    return shapes[thing]


@dataclass(frozen=True)
class Transfer:
    """One collective operation: ``thing`` has the sharding ``to`` afterwards, within the groups along ``axis``.

    ``kind`` is the declared name of the operation. With ``tokens``, only these tokens take part, and all others stay
    where they are. With ``order`` 'token', each piece that arrives is put into the slots that ``to`` gives it, so a
    program must reorder after the operation unless they agree. With 'rank', pieces stay in the order of the ranks that
    sent them, whatever ``to`` says: this is what a program does that forgets to reorder.
    """

    thing: str
    kind: str
    axis: str
    to: Sharding
    tokens: Tokens | None = None
    order: str = "token"


@dataclass(frozen=True)
class Step:
    """One step: every rank computes, then the ``transfers`` take place one after another.

    ``rows`` and ``keys`` are the tokens with which each rank computes, out of those that it holds; None means all of
    them, on all ranks. In an ``idle`` step nobody computes.
    """

    rows: tuple[Tokens, ...] | None = None
    keys: tuple[Tokens, ...] | None = None
    transfers: tuple[Transfer, ...] = ()
    idle: bool = False


@dataclass(frozen=True)
class Scheme:
    """One way to split attention over the ranks of a mesh.

    ``name`` is a label. ``home_q`` and ``home_k`` are the shardings of queries and keys with which both passes begin;
    gradients end there. ``home_o`` is where the forward pass ends, normally ``home_q``. ``heads`` and ``kv_heads`` are H
    and Hkv. ``backward`` is None if the scheme does not train.
    """

    name: str
    mesh: Mesh
    heads: int
    kv_heads: int
    home_q: Sharding
    home_k: Sharding
    home_o: Sharding
    forward: tuple[Step, ...]
    backward: tuple[Step, ...] | None = None

    @property
    def group(self) -> int:
        """G = H / Hkv: query head h uses key head h // G (FWD-10)."""
        return self.heads // self.kv_heads

    def steps(self, phase: str) -> tuple[Step, ...]:
        """Return the steps of 'forward' or 'backward'; none if the scheme does not train."""
        return self.forward if phase == "forward" else self.backward or ()

    def ends(self, phase: str) -> dict[str, Sharding]:
        """Return the sharding in which each result of a pass must end."""
        if phase == "forward":
            return {"state": self.home_o}
        return {"dq": self.home_q, "dk": self.home_k}


def idle(*transfers: Transfer) -> Step:
    """Return a step in which nobody computes."""
    return Step(transfers=transfers, idle=True)
