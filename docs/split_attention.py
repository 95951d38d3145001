"""The pictures in learn/split_attention.md, made from recorded runs, and its tables, made by ``ringspec.plan``.

python docs/split_attention.py     # writes them into the page

A block of the page begins with ``<!-- made: NAME -->`` and ends with ``<!-- end -->``.
tests/schemes/test_page.py compares the stored blocks with the results of :func:`blocks`.
"""

import re
from pathlib import Path

import numpy as np

import ringspec as rs
from ringspec.plan import plan
from ringspec.plan.advice import amount
from ringspec.plan.scheme_options import LIMITS, USES
from ringspec.schemes.show import home_lines
from ringspec.schemes.show_run import pass_lines

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
# Of the planned schemes, those in the table of costs.
COSTS = ("ring 8", "outer 2 x inner 4", "cp 8", "ulysses 8", "ring 2 x ulysses 4", "pcp 8", "dcp 8")
TOKENS, WORKERS, KV_HEADS = 131072, 8, 8  # 32 query heads


def run_of(scheme: str, mesh: dict, heads: tuple, lengths: tuple, keywords: dict) -> rs.SchemeRun:
    """A recorded run on zeros; the mask is causal unless the keywords say otherwise."""
    q, k = np.zeros((1, heads[0], lengths[0], 1)), np.zeros((1, heads[1], lengths[1], 1))
    options = {"causal": True} | keywords
    return rs.context_parallel(q, k, k, mesh=mesh, scheme=scheme, record=True, **options)


def picture(scheme: str) -> str:
    """The forward pass of a scheme: homes, what each rank computes, the pairs that it computes, what moves."""
    run = run_of(scheme, *PICTURES[scheme])
    lines = [
        f"{scheme} on the mesh {run.scheme.mesh}, {run.scheme.heads} query heads, {run.scheme.kv_heads} key heads"
    ]
    lines += ["", *home_lines(run.scheme), *pass_lines(run.scheme, run.moments, run.cost(), False)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def costs() -> str:
    """What ``ringspec plan`` counts for the busiest rank of each scheme."""
    rows = [
        ["scheme", "mesh", "sent forward", "sent backward", "held forward", "held backward",
         "transfers", "messages"]
    ]  # fmt: skip
    for one in plan(TOKENS, WORKERS, kv_heads=KV_HEADS).schemes:
        if str(one.mesh) in COSTS:
            both = [*one.passes, None][:2]
            sent = ["-" if way is None else f"{amount(way.bytes_sent)}B" for way in both]
            held = ["-" if way is None else f"{amount(way.held)}B" for way in both]
            counts = [" + ".join(str(way.transfers) for way in one.passes)]
            counts += [" + ".join(str(way.messages) for way in one.passes)]
            rows.append([f"`{one.scheme}`", str(one.mesh), *sent, *held, *counts])
    return table(rows)


def choice() -> str:
    """The limits of each scheme, and when to use it."""
    return table(
        [["scheme", "limits", "use it"], *([f"`{x}`", LIMITS[x], USES[x]] for x in LIMITS)]
    )


def table(rows: list[list[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {line} |\n" for line in (" | ".join(row) for row in rows))


def blocks() -> dict[str, str]:
    """All blocks of the page by name."""
    tables = {"costs": costs(), "choice": choice()}
    return {scheme: picture(scheme) for scheme in PICTURES} | tables


def filled(text: str) -> str:
    """The text of the page with its blocks made anew."""
    made = blocks()
    return BLOCK.sub(lambda match: match[1] + made[match[2]] + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
