"""Hints: where in a kernel to look for a fault.

A fault is a wrong *choice*. Choices have names: ``mask`` is the mask of a block, for example, and ``dq_to`` the worker
to which dq is sent.
"""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.kinds import Kind

MASKS = "look at where the mask of a block gets the positions of its queries and keys, especially after the first transfer"
SOURCES = "look at which buffer the block reads: the one that the last transfer filled, or the one that is being sent"
LAST_TILE = (
    "look at how a block is divided into tiles, and at what happens to a last tile that is short"
)
CLEARING = "look at where the accumulators of the gradients are set to 0, and how often"
LOOP = (
    "look at the bounds of the loops over steps and tiles, and at the condition that skips a block"
)
SCORES = "look at where the scores are multiplied by the scale, and with which base the exponential is taken"
HEADS = "look at how a query head finds its key head"
BATCHES = "look at where a batch entry starts in each tensor and buffer"
ORDER = "look at where the halves or tokens of a shard are split, ordered and joined"
MERGING = "look at the function that merges a block's result into the running one"
ENDING = "look at what happens to o and lse after the last step, before they are returned or saved"
STATISTICS = "look at which lse and delta the backward pass uses for a block, in which base and with which order of axes"
GRADIENTS = "look at the factors with which dS, dq, dk and dv are multiplied, and how often a share is added"
ADDING = "look at where a share is added to the accumulator of its gradient, and where the accumulator is set to 0 or sent"
PRODUCTS = "look at the operands of the matrix products for dq, dk and dv"
SINKS = "look at where the sinks enter the softmax sum (once per row, after the last step), and where dsinks is summed"
BIAS = "look at which rows and columns of the bias belong to a block (own rows, global keys), and where dbias is added"
DROPOUT = "look at which positions and head the dropout mask of a pair is made from, and where it is applied (p v, dp and dv)"
ROUTES = "look at where the gradient accumulators are sent, how often, and which worker adds them up at the end"
ROUNDING = "look at where these values are converted to a 16-bit format, or stored in a buffer that has one"

OF_LAST_TILE = ("short last tile", "begins inside the one before", "filled up with copies")
# Hints by the names of the choices; hint_for gives HEADS and ORDER before it looks here.
HINTS = {
    LAST_TILE: ("padded",),
    CLEARING: ("uncleared", "starts"),
    MASKS: ("mask", "value_mask", "hidden_score"),
    LOOP: ("count",),
    SCORES: ("times", "centred", "cap", "cap_slope"),
    MERGING: (
        "merge",
        "started",
        "hidden_merge",
        "stays",
        "resets",
        "not_home",
        "tiles",
        "begins",
        "part_lse",
        "result_of",
        "l_of_group",
    ),
    ENDING: ("finish", "lse_out", "lse_row", "o_row", "o_times", "o_to", "o_tokens"),
    STATISTICS: (
        "lse",
        "lse_of",
        "delta",
        "delta_o",
        "delta_dy",
        "delta_times",
        "delta_dims",
        "dlse_of",
        "dlse_times",
    ),
    PRODUCTS: (
        "dv_dy",
        "dk_q",
        "dq_k",
        "turned",
        "dp_of_k",
        "dy_ones",
        "dy",
        "dq_form",
        "dk_form",
        "dv_form",
        "dq_of_group",
    ),
    ROUTES: ("dq_to", "dk_to", "dv_to", "routed", "mixed", "exchanged", "stacked"),
    SINKS: ("sink_o", "sink_lse", "sink_of", "dsink", "dsink_times", "dsink_of"),
    DROPOUT: ("drop", "drop_q", "drop_k", "drop_times", "drop_l", "drop_ds", "drop_dv"),
    BIAS: ("bias_q", "bias_k", "bias_times", "dbias_to", "dbias_k", "dbias_count", "dbias_form"),
    GRADIENTS: ("ds_times", "dq_count", "dk_count", "dv_count"),
    SOURCES: ("q", "k", "v", "other_o"),
}


def hint_for(kind: Kind) -> str:
    """Return the hint for a kind of fault; '' if none.

    It is the hint of the first group in HINTS with a choice that the fault changes. Wrong heads, and wrong tokens of
    the correct worker, have their own hints, which are chosen first.
    """
    if any(words in kind.words for words in OF_LAST_TILE):
        return LAST_TILE
    if kind.words.endswith(" lost") or "written over what was added up before" in kind.words:
        return ADDING
    if any(slot == "mixed" and "heads" in np.asarray(value) for slot, value in kind.changes):
        return HEADS
    parts = [slot.partition(".") for slot in kind.slots]
    components = {component for _, _, component in parts if component}
    names = {name for name, _, _ in parts}
    if "worker" not in components and not names & {*HINTS[SINKS], *HINTS[BIAS], *HINTS[DROPOUT]}:
        if "head" in components:
            return HEADS
        if "slot" in components:
            return ORDER
    return next((words for words, of in HINTS.items() if names & set(of)), "")
