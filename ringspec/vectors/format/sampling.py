"""Sample sixteen rows of each worker, which large cases store instead of whole tensors.

The sample depends only on the id and the layout of the case. The candidates of worker r are all its rows (b, h, slot),
without padding slots, in C order. Each candidate gets one 64-bit word of the random stream named ``rows.q.<r>`` (or
``rows.k.<r>``), which is seeded with the id. Among the rows of the worker's first slot, the row with the smallest word
is sampled, and likewise for the last slot. The other rows of the sample are those with the smallest words among all
remaining candidates. Sampled rows are stored in C order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import ShapeError
from ringspec.truth.sharded import OF_KEYS, OF_QUERIES
from ringspec.vectors.format.inputs import words
from ringspec.vectors.format.tensor_table import SAMPLED_ROWS

# For a larger dbias, only the digest is stored.
LARGEST_WHOLE = 4096


def rows_of(
    id: str, side: str, table: NDArray[np.int64], batch: int, heads: int
) -> NDArray[np.int64]:
    """Return (b, h, slot) of the rows to sample, int64 [W, 16, 3]; ``side`` is "q" or "k".

    >>> rows_of("ring/example", "q", np.arange(32).reshape(1, 32), 1, 2)[0, ::5].tolist()
    [[0, 0, 0], [0, 0, 11], [0, 1, 3], [0, 1, 29]]
    """
    chosen = [
        rows_of_worker(id, f"rows.{side}.{r}", np.flatnonzero(slots >= 0), batch, heads)
        for r, slots in enumerate(table)
    ]
    return np.stack(chosen)


def rows_of_worker(
    id: str, stream: str, slots: NDArray[np.intp], batch: int, heads: int
) -> NDArray[np.int64]:
    grid = np.meshgrid(np.arange(batch), np.arange(heads), slots, indexing="ij")
    places = np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int64)
    if len(places) < SAMPLED_ROWS:
        raise ShapeError(
            f"at least {SAMPLED_ROWS} rows for each worker of {id}",
            str(len(places)),
            "store the case in full",
        )
    order = np.argsort(words(id, stream, len(places)), kind="stable").tolist()
    ends = [next(n for n in order if places[n, 2] == slot) for slot in (slots[0], slots[-1])]
    taken = list(dict.fromkeys(ends + order))[:SAMPLED_ROWS]
    return places[np.sort(taken)]


def sample(id: str, whole: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return what a sampled case stores: rows of its ``whole`` tensors, layouts and small sums, but no inputs."""
    kept: dict[str, NDArray] = {}
    for side in "qk":
        of_side = [name for name in whole if side_of(name) == side]
        if of_side:
            _, batch, heads, *_ = whole[of_side[0]].shape
            rows = rows_of(id, side, whole[f"layout.{side}"], batch, heads)
            kept[f"rows.{side}"] = rows
            kept |= {name: picked(whole[name], rows) for name in of_side}
    for name, x in whole.items():
        small = name.startswith(("out.d", "scale.d")) and x.size <= LARGEST_WHOLE
        if name.startswith("layout.") or (small and side_of(name) is None):
            kept[name] = x
    return kept


def side_of(name: str) -> str | None:
    """Return "q" if a tensor has a row for each query, "k" if it has a row for each key, else None."""
    group, _, rest = name.partition(".")
    tensor = rest.partition(".")[0]
    if group not in ("out", "scale"):
        return None
    return "q" if tensor in OF_QUERIES else "k" if tensor in OF_KEYS else None


def picked(x: NDArray, rows: NDArray[np.int64]) -> NDArray:
    """Return the sampled rows [W, 16, ...] of a tensor [W, B, H, n, ...]."""
    worker = np.arange(len(rows))[:, None]
    return np.ascontiguousarray(x[worker, rows[..., 0], rows[..., 1], rows[..., 2]])
