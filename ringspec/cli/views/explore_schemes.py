"""The data of a page that steps through ways to split attention: every number on the page is from a recorded run.

:func:`ringspec.context_parallel` runs one small problem (B = 1, float64) for every scheme and mask, and records what each
rank holds, computes and sends. As in :mod:`~ringspec.cli.views.explore_records`, a *stop* is a position of the page's
slider: stop t < T shows step t after its computation, stop T the end of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import ringspec
from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views.explore_records import DECIMALS, HEAD_DIM, MOST_TOKENS, MOST_WORKERS, rows
from ringspec.errors import OptionError, nearest, shown
from ringspec.schemes.api import context_parallel
from ringspec.schemes.execute import Moment, RankState
from ringspec.schemes.mesh import Mesh, check_axes, make_mesh
from ringspec.schemes.run import SchemeRun
from ringspec.schemes.scheme import RESULTS
from ringspec.schemes.show import NAMES
from ringspec.spec.masks import visible

Data = dict[str, Any]

HEADS, KV_HEADS = 4, 2
TOKENS = 24
MESHES = {
    "ring": {"ring": 4},
    "double_ring": {"outer": 2, "inner": 2},
    "all_gather": {"cp": 4},
    "ulysses": {"ulysses": 4},
    "usp": {"ring": 2, "ulysses": 2},
    "joint": {"ring": 2, "ulysses": 2},
    "pcp": {"pcp": 4},
    "dcp": {"tp": 2, "dcp": 2},
}
MASKS = {"causal": "causal", "none": "no mask"}
# The queries of decoding, and the cached tokens of a prefill.
NEW, PREFIX = 2, 8


def scheme_records(
    names: Sequence[str], mesh: Any = None, tokens: int = TOKENS, seed: int = 0
) -> Data:
    """Return everything that the page shows of these schemes, as plain data.

    ``schemes``  for each scheme: mesh, the tokens of each rank's queries and keys at home, the position of query 0
    ``visible``  for each 'scheme/mask': the visible pairs, as rows of 0 and 1
    ``runs``     for each 'scheme/mask': its passes, as :func:`pass_record` gives them

    ``mesh`` None: a mesh of 4 ranks for each scheme. Raises the errors of ``context_parallel``.

    >>> document = scheme_records(["ulysses"], tokens=8)
    >>> document["runs"]["ulysses/causal"]["forward"]["pairs"]
    [[0, 0, 0, 0], [36, 36, 36, 36]]
    """
    chosen = list(dict.fromkeys(names))
    check_schemes(chosen, mesh, tokens)
    document: Data = {
        "command": "explore",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "problem": {
            "tokens": tokens, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "seed": seed, "recipe": "float64", "decimals": DECIMALS,
        },
        "choices": {
            "schemes": chosen,
            "masks": MASKS,
            "passes": ["forward", "backward"],
            "heads": [str(head) for head in range(HEADS)],
        },
        "schemes": {},
        "visible": {},
        "runs": {},
    }  # fmt: skip
    for name in chosen:
        for mask in MASKS:
            run, offset = one_run(name, MESHES[name] if mesh is None else mesh, mask, tokens, seed)
            document["schemes"][name] = home_record(run, offset)
            document["visible"][f"{name}/{mask}"] = visible_rows(run)
            document["runs"][f"{name}/{mask}"] = {
                phase: pass_record(run, phase)
                for phase in ("forward", "backward")[: 1 + (run.gradients is not None)]
            }
    return document


def check_schemes(names: Sequence[str], mesh: Any, tokens: int) -> None:
    """Raise OptionError if the page cannot be drawn for these schemes, this mesh and this number of tokens."""
    for name in names:
        if name not in MESHES:
            raise OptionError(
                f"--scheme in {', '.join(MESHES)}",
                shown(name),
                nearest(name, MESHES),
                code="unknown-name",
            )
    if mesh is not None:
        check_mesh(names, make_mesh(mesh))
    if not (8 <= tokens <= MOST_TOKENS and tokens % 8 == 0):
        raise OptionError(
            f"--tokens as a multiple of 8 up to {MOST_TOKENS} with --scheme",
            str(tokens),
            f"choose {TOKENS}",
        )
    for name in names:
        check_tokens(name, make_mesh(MESHES[name] if mesh is None else mesh), tokens)


def check_mesh(names: Sequence[str], mesh: Mesh) -> None:
    """Raise OptionError if ``--mesh`` does not belong to a single scheme, is too large, or does not divide the heads."""
    if len(names) > 1:
        raise OptionError(
            "one scheme with --mesh",
            ", ".join(names),
            f"name one, such as --scheme {names[0]} --mesh {as_option(MESHES[names[0]])}",
        )
    fix = f"write --mesh {as_option(MESHES[names[0]])}"
    check_axes(mesh, names[0], MESHES[names[0]])
    if mesh.ranks > MOST_WORKERS:
        raise OptionError(f"--mesh of at most {MOST_WORKERS} ranks", f"{mesh.ranks}: {mesh}", fix)
    parts = math.prod(mesh.size(axis) for axis in ("ulysses", "tp", "dcp"))
    if HEADS % parts:
        raise OptionError(
            f"--mesh that divides the {HEADS} query heads of the page", f"{parts}: {mesh}", fix
        )


def check_tokens(name: str, mesh: Mesh, tokens: int) -> None:
    """Raise OptionError if the ranks do not divide the tokens; the fix is the nearest number that they divide."""
    if name == "dcp":
        return
    unit = mesh.ranks * (1 if name == "joint" else 2)
    if shared_tokens(name, tokens) % unit:
        shares = {n: shared_tokens(name, n) for n in range(8, MOST_TOKENS + 1, 8)}
        good = [n for n, shared in shares.items() if shared and shared % unit == 0]
        fix = f"choose --tokens {min(good, key=lambda n: abs(n - tokens))}" if good else ""
        raise OptionError(
            f"--tokens of which the ranks share a multiple of {unit} with --scheme {name}",
            f"{tokens}, of which they share {shared_tokens(name, tokens)}",
            fix or f"choose fewer ranks, as --mesh {as_option(MESHES[name])}",
        )


def shared_tokens(name: str, tokens: int) -> int:
    """Return how many tokens the ranks divide: without the text of ``joint`` and the cached keys of ``pcp``."""
    if name == "joint":
        return (tokens - 1) // 8 * 8
    return max(8, tokens - PREFIX) if name == "pcp" else tokens


def as_option(mesh: dict[str, int]) -> str:
    """Return a mesh as the option --mesh takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def one_run(name: str, mesh: Any, mask: str, tokens: int, seed: int) -> tuple[SchemeRun, int]:
    """Run one scheme with all that it has; return the run and the position of its first query."""
    own: Data = {"layout": "zigzag"}
    queries = tokens
    if name == "joint":
        own = {"text": range(tokens - shared_tokens("joint", tokens))}
    if name == "pcp":
        queries = shared_tokens("pcp", tokens)
    if name == "dcp":
        own, queries = {"interleave": 2}, NEW
    offset = tokens - queries
    q, dy = (drawn(seed, x, (1, HEADS, queries, HEAD_DIM)) for x in ("q", "dy"))
    k, v = (drawn(seed, x, (1, KV_HEADS, tokens, HEAD_DIM)) for x in ("k", "v"))
    causal: Data = {"causal": True, "q_offset": offset} if mask == "causal" else {}
    trains = None if name in ("pcp", "dcp") else dy
    run = context_parallel(q, k, v, trains, mesh=mesh, scheme=name, record=True, **own, **causal)
    return run, offset


def home_record(run: SchemeRun, offset: int) -> Data:
    """Return the mesh of a run, what each rank holds at home, and the position of query 0."""
    scheme = run.scheme
    return {
        "mesh": [list(axis) for axis in scheme.mesh.axes],
        "offset": offset,
        "queries": [[list(s.tokens), list(s.heads)] for s in scheme.home_q.shards],
        "keys": [[list(s.tokens), list(s.heads)] for s in scheme.home_k.shards],
    }


def visible_rows(run: SchemeRun) -> list[str]:
    """Return which query attends to which key: a row for each query, with 0 or 1 for each key."""
    problem = run.problem
    allowed = visible(problem.rows, problem.columns, problem.terms)[0, 0]
    return ["".join("1" if entry else "0" for entry in row) for row in allowed]


def pass_record(run: SchemeRun, phase: str) -> Data:
    """Return one pass of a run.

    ``used``   for each step and rank: tokens and heads of the queries and of the keys with which it computes, or null
    ``moves``  for each step: its transfers, each with thing, kind, axis and messages [source, target, tokens, heads]
    ``sent``   for each step and rank: bytes. ``pairs``: visible pairs, over all heads
    ``stops``  for each stop and rank: what it holds, as [thing, tokens, heads, rows of numbers or null]
    """
    moments = [moment for moment in run.moments if moment.phase == phase]
    pairs = np.array(run.cost(phase).pairs)
    last = moments[-1]
    return {
        "used": [
            [None if u is None else [[list(s.tokens), list(s.heads)] for s in u] for u in m.used]
            for m in moments
        ],
        "moves": [moves(moment) for moment in moments],
        "sent": [sent(moment, run.scheme.mesh.ranks) for moment in moments],
        "pairs": pairs.tolist(),
        "imbalance": round(float(pairs.sum(axis=0).max() / pairs.sum(axis=0).mean()), DECIMALS),
        "lockstep_imbalance": round(
            float(pairs.max(axis=1).sum() / pairs.mean(axis=1).sum()), DECIMALS
        ),
        "stops": [
            *([held(state, phase) for state in moment.computed] for moment in moments),
            [end(run, state, phase) for state in last.after],
        ],
    }


def moves(moment: Moment) -> list[Data]:
    """Return the transfers of a step."""
    return [
        {
            "kind": one.kind,
            "axis": one.axis,
            "carries": [NAMES[one.thing]],
            "messages": [
                [m.source, m.target, list(m.shard.tokens), list(m.shard.heads)] for m in messages
            ],
        }
        for one, messages in zip(moment.transfers, moment.messages, strict=True)
    ]


def sent(moment: Moment, ranks: int) -> list[int]:
    """Return the bytes that each rank sends after a step."""
    total = [0] * ranks
    for one, messages in zip(moment.transfers, moment.messages, strict=True):
        for m in messages:
            tensors = moment.after[m.source].parts[one.thing].tensors
            size = sum(x.itemsize * int(np.prod(x.shape[3:])) for x in tensors.values())
            total[m.source] += size * len(m.shard.tokens) * len(m.shard.heads)
    return total


def held(state: RankState, phase: str) -> list[list[Any]]:
    """Return what one rank holds, with the numbers of its results: [m, l, o ...] of each row, or dq, or [dk ...]."""
    found = []
    for thing, part in state.parts.items():
        names = {"state": ("m", "l", "o"), "dq": ("dq",), "dk": ("dk",)}.get(thing, ())
        numbers = [
            rows(*(part.tensors[name][0, h] for name in names))
            for h in range(len(part.shard.heads) if thing in RESULTS[phase] else 0)
        ]
        shard = [list(part.shard.tokens), list(part.shard.heads)]
        found.append([NAMES[thing], *shard, numbers or None])
    return found


def end(run: SchemeRun, state: RankState, phase: str) -> list[list[Any]]:
    """Return what a rank holds at the end; in a forward pass, o and lse in place of the softmax state."""
    found = held(state, phase)
    if phase == "forward":
        result = run.ranks[state.rank]
        numbers = [rows(result.lse[0, h], result.o[0, h]) for h in range(len(result.query.heads))]
        done = ["o lse", list(result.query.tokens), list(result.query.heads), numbers]
        found = [entry for entry in found if entry[0] != NAMES["state"]] + [done]
    return found
