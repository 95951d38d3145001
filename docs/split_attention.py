"""The pictures and the table of costs in learn/split_attention.md, made from recorded runs.

python docs/split_attention.py     # writes them into the page

A block of the page begins with ``<!-- made: NAME -->`` and ends with ``<!-- end -->``.
tests/schemes/test_page.py compares the stored blocks with the results of :func:`blocks`.
"""

import re
from pathlib import Path

import numpy as np

import ringspec as rs
from ringspec.schemes.api import mask_of
from ringspec.schemes.cost import scheme_cost
from ringspec.schemes.show import home_lines, moment_lines

PAGE = Path(__file__).parent / "learn" / "split_attention.md"
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)

# Scheme, mesh, (H, Hkv), (Sq, Sk), keywords: small enough for a picture.
PICTURES = {
    "ring": ({"ring": 4}, (2, 1), (8, 8), {"layout": "zigzag"}),
    "double_ring": ({"outer": 2, "inner": 2}, (2, 1), (8, 8), {"layout": "zigzag"}),
    "all_gather": ({"cp": 4}, (2, 1), (8, 8), {"layout": "zigzag"}),
    "ulysses": ({"ulysses": 4}, (8, 2), (8, 8), {"layout": "zigzag"}),
    "usp": ({"ring": 2, "ulysses": 2}, (4, 2), (8, 8), {"layout": "zigzag"}),
    "joint": ({"ring": 2, "ulysses": 2}, (4, 2), (10, 10), {"text": [0, 1], "causal": False}),
    "pcp": ({"pcp": 2}, (2, 1), (4, 7), {"q_offset": 3}),
    "dcp": ({"tp": 2, "dcp": 2}, (8, 2), (2, 8), {"interleave": 2, "q_offset": 6}),
}
# The same call for every scheme that trains: 8 ranks.
COSTS = {
    "ring": {"ring": 8},
    "double_ring": {"outer": 2, "inner": 4},
    "all_gather": {"cp": 8},
    "ulysses": {"ulysses": 8},
    "usp": {"ring": 2, "ulysses": 4},
}
HEADS, KV_HEADS, WIDTH, TOKENS = 32, 8, 128, 32


def run_of(scheme: str, mesh: dict, heads: tuple, lengths: tuple, keywords: dict) -> rs.SchemeRun:
    """A recorded run on zeros; the mask is causal unless the keywords say otherwise."""
    q, k = np.zeros((1, heads[0], lengths[0], 1)), np.zeros((1, heads[1], lengths[1], 1))
    options = {"causal": True} | keywords
    return rs.context_parallel(q, k, k, mesh=mesh, scheme=scheme, record=True, **options)


def picture(scheme: str) -> str:
    """The forward pass of a scheme: homes, what each rank computes, the pairs that it computes, what moves."""
    run = run_of(scheme, *PICTURES[scheme])
    cost = scheme_cost(run.scheme, mask_of(run.problem), 1, 1)
    lines = [
        f"{scheme} on the mesh {run.scheme.mesh}, {run.scheme.heads} query heads, {run.scheme.kv_heads} key heads"
    ]
    lines += ["", *home_lines(run.scheme)]
    for moment, step, pairs in zip(run.moments, run.scheme.forward, cost.pairs, strict=True):
        shown = moment_lines(run.scheme, moment, step.transfers)
        if any(pairs):
            after = 1 + run.scheme.mesh.ranks
            shown.insert(after, f"  visible pairs on each rank: {' '.join(map(str, pairs))}")
        lines += ["", *shown]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def costs() -> str:
    """The bytes that a rank sends and holds at most, for one call, in each scheme that trains."""
    rows = [
        ["scheme", "sent forward", "sent backward", "held forward", "held backward", "transfers"]
    ]
    for scheme, mesh in COSTS.items():
        run = run_of(scheme, mesh, (HEADS, KV_HEADS), (TOKENS, TOKENS), {"layout": "zigzag"})
        hidden = np.zeros((1, TOKENS, TOKENS), dtype=bool)
        both = [
            scheme_cost(run.scheme, hidden, WIDTH, WIDTH, phase)
            for phase in ("forward", "backward")
        ]
        unit = HEADS * WIDTH * TOKENS // run.scheme.mesh.ranks  # elements of one rank's q
        texts = [f"{max(one.sent) / unit:.2f}" for one in both]
        texts += [f"{max(one.held) / unit:.2f}" for one in both]
        rows.append([f"`{scheme}`", *texts, " + ".join(str(one.transfers) for one in both)])
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {line} |\n" for line in (" | ".join(row) for row in rows))


def blocks() -> dict[str, str]:
    """All blocks of the page by name."""
    return {scheme: picture(scheme) for scheme in PICTURES} | {"costs": costs()}


def filled(text: str) -> str:
    """The text of the page with its blocks made anew."""
    made = blocks()
    return BLOCK.sub(lambda match: match[1] + made[match[2]] + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
