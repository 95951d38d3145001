"""Cases of the operation 'context_parallel' with sinks, bias, dropout, dlse and several elements in the batch.

Each case needs one term that another number selects on a rank than in the whole problem: of heads, of tokens, or of the
batch. docs/conform/schemes.md lists the bug that each finds. A bias has a forward pass alone.
"""

from __future__ import annotations

from typing import Any

from ringspec.conformance.cases.splits import Split
from ringspec.vectors.catalogue.build import bias_of, coins

RING_OUTER = (("ring", 2), ("ulysses", 2))
CAUSAL = {"causal": True}
DROPPED = {"dropout_p": 0.25, "dropout_seed": 20261126}


def sizes(count: int, kv_heads: int, tokens: int, batch: int = 1) -> dict[str, int]:
    return {"H": count, "Hkv": kv_heads, "S": tokens, "B": batch}


def sinks(count: int, each: int = 1) -> dict[str, Any]:
    """Return sinks [H, N] that differ between heads."""
    return {"sinks": tuple(tuple(0.75 * (n - h) + 0.5 for n in range(each)) for h in range(count))}


TERMS = (
    Split("sinks/ulysses-w2", "After the exchange, a rank has the sinks of its heads.", "ulysses", (("ulysses", 2),), sizes(4, 4, 8), sinks(4) | CAUSAL, smoke=True),
    Split("sinks/ring-w3", "Sinks count once in each row, not once in each block.", "ring", (("ring", 3),), sizes(2, 1, 12), sinks(2, 2) | CAUSAL, "zigzag", smoke=True),
    Split("sinks/usp-w4", "Sinks of a slice of the heads, once for all blocks.", "usp", RING_OUTER, sizes(4, 2, 16), sinks(4) | CAUSAL | {"dlse": True}),
    Split("sinks/dcp-w4", "Sinks join after the merge, once, with the heads of the rank.", "dcp", (("tp", 2), ("dcp", 2)), {"H": 8, "Hkv": 2, "Sq": 1, "Sk": 7}, sinks(8)),
    Split("sinks/pcp-w2", "Sinks of rows that come after cached keys.", "pcp", (("pcp", 2),), {"H": 2, "Hkv": 1, "Sq": 8, "Sk": 13}, sinks(2) | CAUSAL | {"q_offset": 5}),
    Split("bias/ulysses-w2", "A bias of each head is that of the rank's heads.", "ulysses", (("ulysses", 2),), sizes(4, 2, 8), {"bias": bias_of(1, 4, 8, 8)}),
    Split("bias/all-gather-w3", "Gathered keys are not in the order of the columns of a bias.", "all_gather", (("cp", 3),), sizes(2, 1, 12), {"bias": bias_of(1, 1, 12, 12)}, "zigzag"),
    Split("bias/ring-striped-w3", "The columns of a bias are numbers of keys, wherever they are.", "ring", (("ring", 3),), sizes(2, 2, 12), {"bias": bias_of(1, 2, 12, 12)}, "striped"),
    Split("dropout/ulysses-w3", "Dropout depends on the global number of the head.", "ulysses", (("ulysses", 3),), sizes(6, 3, 12), DROPPED | CAUSAL),
    Split("dropout/ring-w3", "Dropout depends on positions, not on slots of a block.", "ring", (("ring", 3),), sizes(2, 1, 12), dict(DROPPED), "zigzag", smoke=True),
    Split("dropout/usp-w4", "Both, in two batches.", "usp", RING_OUTER, sizes(4, 2, 16, 2), DROPPED | CAUSAL, "zigzag"),
    Split("dropout/keep-w4", "A given mask has own rows and global keys.", "usp", RING_OUTER, sizes(4, 2, 16), {"dropout_p": 0.25, "keep": coins(64, 1, 4, 16, 16)}, "zigzag"),
    Split("dlse/ulysses-w2", "The gradient of lse is exchanged with that of o.", "ulysses", (("ulysses", 2),), sizes(2, 2, 8), {"dlse": True} | CAUSAL),
    Split("dlse/ring-w3", "The gradient of lse counts in every block.", "ring", (("ring", 3),), sizes(2, 1, 12), {"dlse": True}),
    Split("batch/ulysses-w2", "Heads are exchanged for tokens in each element of a batch.", "ulysses", (("ulysses", 2),), sizes(4, 4, 8, 2), CAUSAL, smoke=True),
    Split("batch/ulysses-zigzag-w4", "The same, with four ranks and grouped heads.", "ulysses", (("ulysses", 4),), sizes(8, 4, 16, 2), CAUSAL, "zigzag"),
    Split("batch/usp-w6", "The same with a ring of three ranks and no mask.", "usp", (("ring", 3), ("ulysses", 2)), sizes(4, 4, 12, 2)),
    Split("batch/usp-zigzag-w4", "The same with a causal mask.", "usp", RING_OUTER, sizes(8, 4, 16, 2), CAUSAL, "zigzag"),
    Split("batch/dcp-w2", "Partial results of a batch are merged element by element.", "dcp", (("dcp", 2),), {"H": 4, "Hkv": 2, "Sq": 1, "Sk": 5, "B": 3}),
    Split("batch/joint-w4", "Text in each element of a batch.", "joint", RING_OUTER, sizes(2, 2, 11, 2), own={"text": (0, 1, 2), "text_at": "front"}),
    Split("padded/usp-kv2-w4", "Padding in each ring, with a key head on each rank of a group.", "usp", RING_OUTER, {"H": 4, "Hkv": 2, "S": 20}, CAUSAL | {"cu_seqlens": (0, 7, 20)}, rooms=(8, 16)),
)  # fmt: skip
