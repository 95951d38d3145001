"""Small problems that show the bugs of ``bugs.py``, their truth in float64, and what counts as seen.

The truth is dense attention over global tensors, differentiated by autograd: it knows no ring, no
block and no hand-written gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from independent.torch_ring import Ring, attention, inputs_of
from torch import Tensor

NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
Results = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Problem:
    """``S`` keys and ``Sq`` queries over ``W`` workers, by ``layout``; features by their names.

    ``documents``: lengths, -n for n tokens of padding. ``bias``: axes (b, h, q, k) that are full.
    ``shift``: added to all scores, or (keys) to those of each worker in turn. ``hidden``: the first
    keys, hidden from everybody; ``empty``: rows that see nothing.
    """

    layout: str = "contiguous"
    W: int = 3
    S: int = 48
    Sq: int | None = None
    B: int = 1
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 8
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    bias: str = ""
    shift: tuple[float, ...] = ()
    hidden: int = 0
    empty: tuple[int, ...] = ()
    sinks: tuple[float, ...] = ()
    dlse: bool = False
    keep: bool = False
    circulation: str = "kv"
    direction: int = 1
    spread: float = 1.0


PROBLEMS = {
    "plain": Problem(),
    "causal": Problem(W=4, S=64, causal=True),
    "batches": Problem(B=2, H=6, Hkv=2, causal=True),
    "striped": Problem("striped", causal=True),
    "striped-long": Problem("striped", W=2, S=64, causal=True),
    "zigzag": Problem("zigzag", W=4, S=64, causal=True),
    "reversed": Problem(W=4, S=64, causal=True, direction=-1),
    "q-ring": Problem(W=4, S=64, causal=True, circulation="q"),
    "gather": Problem("zigzag", causal=True, circulation="gather"),
    "table": Problem("table", S=45, causal=True),
    "window": Problem(causal=True, window=(9, 0)),
    "two-sided": Problem("striped", window=(5, 7)),
    "end-aligned": Problem(S=48, Sq=24, causal=True, window=(11, None)),
    "documents": Problem(causal=True, documents=(19, 14, 15)),
    "documents-padded": Problem("striped", documents=(19, 20, -9)),
    "softcap": Problem(softcap=2.0, bias="hqk", spread=2.0),
    "bias": Problem("zigzag", bias="bhqk", B=2),
    "bias-of-keys": Problem(bias="k", B=2, causal=True),
    "sinks": Problem(sinks=(3.0, 0.5)),
    "large-sink": Problem(bias="k", shift=(97.0,), sinks=(100.0,)),
    "dlse": Problem("zigzag", W=4, S=64, causal=True, dlse=True, sinks=(1.0,)),
    "dropout": Problem(keep=True, causal=True),
    "empty": Problem("striped", causal=True, empty=(0, 7, 31)),
    "low": Problem(bias="k", shift=(-200.0,), hidden=6, causal=True, sinks=()),
    "very-low": Problem(bias="k", shift=(-60000.0,)),
    "huge": Problem(bias="k", shift=(120.0,)),
    "rising": Problem(bias="k", shift=(0.0, 100.0, 220.0)),
    "square": Problem(H=16, Hkv=16, S=48, D=16, Dv=16, causal=True),
    "heads": Problem(H=6, Hkv=2, W=4, S=64),
    "one-key-head": Problem(H=4, Hkv=1, causal=True),
    "many-workers": Problem(W=8, S=256, H=2, Hkv=1, D=32, Dv=32),
}


def table(layout: str, W: int, S: int) -> Tensor:
    """Token of each slot [W, n]; -1 is padding."""
    n = -(-S // W)
    r, t = torch.meshgrid(torch.arange(W), torch.arange(n), indexing="ij")
    if layout == "contiguous":
        return r * n + t
    if layout == "striped":
        return t * W + r
    if layout == "zigzag":
        half = n // 2
        return torch.where(t < half, r * half + t, (2 * W - 1 - r) * half + t - half)
    padded = torch.full((W * (n + 1),), -1)
    padded[torch.randperm(W * (n + 1), generator=seeded(5))[:S]] = torch.arange(S)
    return padded.reshape(W, n + 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def tensors(name: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Global inputs by name, as ``dtype`` holds them; bias, sinks and dlse in float32."""
    problem, random = PROBLEMS[name], seeded(1000 * seed + len(name))
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    B, H, S, rows = problem.B, problem.H, problem.S, problem.Sq or problem.S
    given = {
        "q": normal(B, H, rows, problem.D) * problem.spread,
        "k": normal(B, problem.Hkv, S, problem.D),
        "v": normal(B, problem.Hkv, S, problem.Dv),
        "dy": normal(B, H, rows, problem.Dv),
    }
    given = {key: x.to(dtype) for key, x in given.items()}
    if problem.bias:
        sizes = zip("bhqk", (B, H, rows, S), strict=True)
        given["bias"] = normal(*(n if axis in problem.bias else 1 for axis, n in sizes)).to(wide)
        if problem.shift:
            steps = torch.tensor(problem.shift).repeat_interleave(S // len(problem.shift))
            given["bias"] += steps.to(wide)
    if problem.sinks:
        base = torch.tensor(problem.sinks).expand(H, -1)
        given["sinks"] = (base + 0.5 * normal(*base.shape)).to(wide)
    if problem.dlse:
        given["dlse"] = normal(B, H, rows).to(wide)
    if problem.keep:
        given["keep"] = torch.rand(B, H, rows, S, generator=random) >= 0.5
    if problem.hidden or problem.empty:
        mask = torch.ones(1, 1, rows, S, dtype=torch.bool)
        mask[..., : problem.hidden] = False
        mask[:, :, list(problem.empty)] = False
        given["mask"] = mask
    if problem.documents:
        numbers = [i if n > 0 else -1 for i, n in enumerate(problem.documents)]
        lengths = torch.tensor([abs(n) for n in problem.documents])
        given["segments"] = torch.tensor(numbers).repeat_interleave(lengths)[None]
    return given


def ring_of(
    name: str,
    dtype: torch.dtype,
    parts: Mapping[str, Callable[..., Any]] | None = None,
    seed: int = 0,
    **changes: Any,
) -> tuple[Ring, dict[str, list[Tensor]]]:
    """The ring of a problem, and dy and dlse of each worker."""
    problem, given = PROBLEMS[name], tensors(name, dtype, seed)
    rows = problem.Sq or problem.S
    token_q, token_k = (table(problem.layout, problem.W, n) for n in (rows, problem.S))

    def shard(x: Tensor, token: Tensor, axis: int) -> list[Tensor]:
        whole = x.shape[axis] == 1
        return [x.clone() if whole else x.index_select(axis, t.clamp(min=0)) for t in token]

    held = {key: shard(given[key], token_q, 2) for key in ("q", "dy", "dlse") if key in given}
    held |= {key: shard(given[key], token_k, 2) for key in ("k", "v")}
    more = {key: shard(given[key], token_q, 2) for key in ("bias", "mask", "keep") if key in given}
    if "segments" in given:
        more["segments_q"] = shard(given["segments"], token_q, 1)
        more["segments_k"] = shard(given["segments"], token_k, 1)
    if "sinks" in given:
        more["sinks"] = [given["sinks"].clone() for _ in range(problem.W)]
    options = {
        "causal": problem.causal,
        "window": problem.window,
        "softcap": problem.softcap,
        "dropout_p": 0.5 if problem.keep else 0.0,
        "circulation": problem.circulation,
        "direction": problem.direction,
        "out": dtype,
        "statistics": torch.float64 if dtype == torch.float64 else torch.float32,
        "parts": parts or {},
    }
    shift = problem.S - rows
    ring = Ring(
        held["q"],
        held["k"],
        held["v"],
        list(token_q),
        list(token_k),
        [(t + shift)[None] for t in token_q],
        [t[None] for t in token_k],
        problem.S,
        problem.D**-0.5,
        **(options | more | changes),
    )
    return ring, {key: held[key] for key in ("dy", "dlse") if key in held}


def results(ring: Ring, seeds: dict[str, list[Tensor]]) -> Results:
    """Outputs and gradients of each worker, through autograd."""
    inputs = inputs_of(ring)
    for x in inputs:
        x.requires_grad_()
    o, lse = attention(ring)
    dlse = seeds.get("dlse") or [torch.zeros_like(x) for x in lse]
    torch.autograd.backward([*o, *lse], [*seeds["dy"], *dlse])
    found = {"o": [x.detach() for x in o], "lse": [x.detach() for x in lse]}
    for name in ("q", "k", "v", "bias", "sinks"):
        found[f"d{name}"] = [x.grad for x in getattr(ring, name) or ()]
    return found


def dense(name: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """o, lse and all gradients of the whole, in float64, from the inputs as ``dtype`` holds them."""
    problem = PROBLEMS[name]
    given = tensors(name, dtype, seed)
    leaves = {
        key: given[key].to(torch.float64, copy=True).requires_grad_()
        for key in ("q", "k", "v", "bias", "sinks")
        if key in given
    }
    group = problem.H // problem.Hkv
    k, v = (leaves[key].repeat_interleave(group, dim=1) for key in ("k", "v"))
    s = leaves["q"] @ k.mT * problem.D**-0.5 + leaves.get("bias", 0.0)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    s = s.masked_fill(~seen_by(problem, given), -torch.inf)
    logits = s
    if problem.sinks:
        sinks = leaves["sinks"][None, :, None, :].expand(*s.shape[:3], -1)
        logits = torch.cat([s, sinks], dim=3)
    some = (logits > -torch.inf).any(dim=3)
    safe = torch.where(some[..., None], logits, 0.0)
    lse = torch.where(some, torch.logsumexp(safe, dim=3), -torch.inf)
    p = torch.exp(s - torch.where(some, lse, 0.0)[..., None])
    used = p * (given["keep"].double() / 0.5) if problem.keep else p
    o = used @ v
    loss = (o * given["dy"].double()).sum()
    if problem.dlse:
        loss = loss + (torch.where(some, lse, 0.0) * given["dlse"].double()).sum()
    loss.backward()
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{key}": x.grad for key, x in leaves.items()}


def seen_by(problem: Problem, given: dict[str, Tensor]) -> Tensor:
    """Bool [1, 1, Sq, S], by positions of the whole."""
    rows = (torch.arange(problem.Sq or problem.S) + problem.S - (problem.Sq or problem.S))[:, None]
    columns = torch.arange(problem.S)[None]
    seen = columns <= rows if problem.causal else torch.ones_like(columns + rows, dtype=torch.bool)
    left, right = problem.window or (None, None)
    if left is not None:
        seen = seen & (rows - columns <= left)
    if right is not None:
        seen = seen & (columns - rows <= right)
    if "segments" in given:
        number = given["segments"][0]
        seen = seen & (number[:, None] == number[None]) & (number[:, None] >= 0)
    return seen[None, None] & given.get("mask", torch.tensor(True))


def whole(name: str, found: Results) -> dict[str, Tensor]:
    """Results of all workers in global order; dsinks and a dbias of broadcast rows summed."""
    problem = PROBLEMS[name]
    rows = problem.Sq or problem.S
    together = {}
    for key, parts in found.items():
        if not parts:
            continue
        if key == "dsinks" or (key == "dbias" and parts[0].shape[2] == 1):
            together[key] = torch.stack([x.double() for x in parts]).sum(dim=0)
            continue
        size = problem.S if key in ("dk", "dv") else rows
        token = table(problem.layout, problem.W, size).reshape(-1)
        stacked = torch.cat([x.double() for x in parts], dim=2)
        order = torch.argsort(torch.where(token < 0, size + 1, token), stable=True)[:size]
        together[key] = stacked.index_select(2, order)
    return together
