"""What a choice of a ring can change in the results that are read: which matrices, and in which rows and columns.

A *share* is what one pair of tokens adds to a row of o, dq, dk or dv.
"""

from __future__ import annotations

from typing import Any

from ringspec.conformance.readout.faults.choices import components
from ringspec.conformance.readout.faults.kinds import Kind

STORED = (
    "o_tokens",
    "o_to",
    *components("o_row"),
    *components("lse_row"),
    "lse_out",
    "o_times",
    "sink_lse",
)

# Choices that change weights outside of their own block, or in other columns.
OF_ROW_SUMS = {
    "merge",
    "part_lse",
    "count",
    "centred",
    "o_times",
    "drop_l",
    "drop_times",
    *components("v"),
}

# Choices that change only lse, and those that change only o.
OF_LSE, OF_O = {"lse_out", "lse_row", "sink_lse"}, {"finish", "o_times", "o_row", "sink_o"}

# Choices of what happens to the merged o and lse before they are returned.
AFTER_MERGES = (*STORED, "finish", "sink_o", *components("v"), "tiles")

# Choices of tokens by which a share can land in a wrong row or column, and the matrix in which that shows.
LANDING = {
    "dbias_to": "dS of bias", "dbias_k": "dS of bias", "dv_dy": "P", "dv_to": "P", "dq_to": "dS of dq", "dq_k": "dS of dq", "dk_q": "dS of dk", "dk_to": "dS of dk",
}  # fmt: skip

# Choices by which o and lse also depend on the merges before the last one, or on those of tiles.
OF_EARLIER_MERGES = ("finish", "lse_out", "tiles")

# Choices by which a row of o or lse depends on other rows.
OF_OTHER_ROWS = (
    "o_tokens", "o_to", *components("o_row"), *components("lse_row"), *components("result_of"), "stays", "not_home",
    "l_of_group",
    "padded", "other_o",
)  # fmt: skip

# Choices by which a gradient adds a share to another row, or adds it again elsewhere; and "exchanged".
OF_STORING = (
    *(x for name in LANDING for x in components(name)), "routed", "uncleared", "mixed", "stacked",
)  # fmt: skip

# Choices by which a share depends on other pairs: of all blocks, and of its row.
OF_WHOLE = ("dy_ones", "turned", "dq_of_group")

OF_ROW = ("lse", "delta", "dv_form", "centred", "value_mask")

OF_SINKS = ("dsink", "dsink_times", "dsink_of", "sink_of", "sink_o")

OF_GRADIENTS = {*OF_SINKS, "computed"} | {
    f"{name}_{what}" for name in ("dq", "dk", "dv", "dbias") for what in ("to", "count", "form", "q", "k", "dy")
}  # fmt: skip

GOALS = {
    "P": ("dv_dy", "dv_to"),
    "dS of dq": ("dq_to", "dq_k"),
    "dS of dk": ("dk_q", "dk_to"),
    "dS of bias": ("dbias_to", "dbias_k"),
    "A": ("dq_to", "v"),
}

# Choices that may leave some of their matrices unchanged.
PERHAPS = {"turned", "dy_ones", "exchanged", "stacked"}


def matrices(kind: Kind) -> tuple[str, ...]:
    """Return the matrices of the backward pass that a kind may change."""
    found = set()
    changes: dict[str, Any] = dict(kind.changes)
    for name in kind.names:
        if name in OF_BUFFERS:  # their values begin with the names of gradients
            found |= {READ_IN[x] for x in changes[name] if x in READ_IN}
        else:
            found |= set(CHANGED_BY.get(name, ("P", *BOTH)))
    if kind.only:
        found &= {"dS of dq", "dS of bias"} if kind.only == "dq" else {"P", "dS of dk"}
    return tuple(sorted(found))


BOTH = ("dS of dq", "dS of dk", "dS of bias")

OF_BUFFERS = ("routed", "uncleared", "mixed", "starts")

READ_IN = {"dq": "dS of dq", "dk": "dS of dk", "dv": "P"}

CHANGED_BY = {
    "dv_dy": ("P",), "dv_to": ("P",), "dv_count": ("P",), "dv_form": ("P",), "value_mask": ("P",),
    "drop_dv": ("P",), "drop_ds": BOTH,
    "dq_to": BOTH[:1], "dq_k": BOTH[:1], "dq_count": BOTH[:1], "dq_form": BOTH[:1],
    "dk_q": BOTH[1:2], "dk_to": BOTH[1:2], "dk_count": BOTH[1:2], "dk_form": BOTH[1:2],
    "dbias_to": BOTH[2:], "dbias_k": BOTH[2:], "dbias_count": BOTH[2:], "dbias_form": BOTH[2:],
    "dy": BOTH, "v": BOTH, "dp_of_k": BOTH, "delta": BOTH, "delta_times": BOTH, "delta_dims": BOTH, "delta_dy": BOTH, "delta_o": BOTH, "ds_times": BOTH, "cap_slope": BOTH, "dlse_of": BOTH, "dlse_times": BOTH,
    "exchanged": ("P", "dS of dk"), "stacked": ("P", "dS of dk"), "computed": (), "dq_of_group": BOTH[:1], **dict.fromkeys(OF_SINKS, ("dsinks",)),
}  # fmt: skip
