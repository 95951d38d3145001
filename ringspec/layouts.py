"""Which worker holds which token: layouts for context parallelism, as exact integers, for use without the rest.

Nothing here needs a GPU, a process group or a tensor of floats. An author of a framework can compare the framework's
tables, lengths, positions and cu_seqlens with these functions in an ordinary unit test. docs/reference/layouts.md has a
picture and one example for each of several published bugs.

>>> from ringspec import layouts
>>> padded = layouts.zigzag_padded(cu_seqlens=[0, 3], cu_seqlens_padded=[0, 4], workers=2)
>>> padded.table.tolist(), layouts.local_lengths(padded).tolist()
([[0, -1], [1, 2]], [[1], [2]])
"""

from ringspec.rings.documents import (
    contiguous_padded,
    interleaved,
    interleaved_lengths,
    local_cu_seqlens,
    local_lengths,
    owner_and_slot,
    positions,
    striped_padded,
    visible_lengths,
    zigzag_padded,
)
from ringspec.rings.layouts import from_table, make_layout, shard, unpermute, unshard
from ringspec.spec.layout import Layout

__all__ = [
    "Layout",
    "contiguous_padded",
    "from_table",
    "interleaved",
    "interleaved_lengths",
    "local_cu_seqlens",
    "local_lengths",
    "make_layout",
    "owner_and_slot",
    "positions",
    "shard",
    "striped_padded",
    "unpermute",
    "unshard",
    "visible_lengths",
    "zigzag_padded",
]
