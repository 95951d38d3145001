"""Wrong masks of calls with packed documents or with padding slots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringspec.conformance.readout.faults.visible import Mask, document_of, owners, same, seen
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Booleans, Integers


def document_masks(geometry: Geometry, q: Integers, k: Integers, slot: Integers) -> Iterator[Mask]:
    """Yield masks that treat the boundaries of documents wrongly."""
    starts = geometry.documents
    assert starts is not None
    alone = seen(q, k, geometry.causal, geometry.window)  # as if there were one document
    of_q, of_k = document_of(q, starts), document_of(k, starts)

    def within(of_q: Integers, of_k: Integers) -> Booleans:
        return alone & same(of_q, of_k)

    yield Mask("documents are ignored", alone)
    local = document_of(slot, starts)
    words = "the boundaries of documents are compared with slot numbers within a worker"
    yield Mask(words, within(local, local))
    everything = seen(slot, slot, geometry.causal, geometry.window, 0, starts)
    yield Mask("the mask and the documents use slot numbers within a worker", everything)
    numbered = (x - x.min(axis=2, keepdims=True) for x in (of_q, of_k))
    yield Mask("documents are numbered within each worker", within(*numbered))
    for by, words in ((1, "late"), (-1, "early")):
        moved_starts = tuple(x + by for x in starts)
        late = within(document_of(q, moved_starts), document_of(k, moved_starts))
        yield Mask(f"documents begin one token too {words}", late)
    q_inside, k_inside = (x - np.asarray(starts)[document_of(x, starts)] for x in (q, k))
    words = "positions are counted within documents, whose boundaries are ignored"
    yield Mask(words, seen(q_inside, k_inside, geometry.causal, geometry.window))
    first = (of_k == 0)[:, :, None, None, :]
    words = "the keys of the first document are visible to all documents"
    yield Mask(words, within(of_q, of_k) | (alone & first))
    q_first, k_first = (np.broadcast_to(x[:, :, :1], x.shape) for x in (of_q, of_k))
    words = "in each block count as of the document of the first"
    yield Mask(f"all queries {words}", within(q_first, of_k))
    yield Mask(f"all keys {words}", within(of_q, k_first))
    yield Mask(f"all queries and keys {words}", within(q_first, k_first))


def padding_masks(geometry: Geometry, q: Integers, k: Integers) -> Iterator[Mask]:
    """Yield masks that show padded keys, or take other slots for padding."""
    causal, real = geometry.causal, geometry.real
    slot = np.arange(geometry.tokens).reshape(real.shape)
    of_q, of_k = np.broadcast_arrays(slot[:, None], slot[None])
    by_slot = seen(of_q, of_k, causal, None)
    # Positions of padding are before all others, so that a causal mask does not hide padded keys.
    rows, by_position = real[:, None, None, :, None], seen(q, k, causal, None)
    yield Mask("the causal mask is ignored, and padding hidden", geometry.real_pairs)
    yield Mask("padded keys are visible to every query", by_position & rows, 0.9)
    yield Mask("padded keys are visible to the queries of later slots", by_slot & rows, 0.9)
    number = real.sum(axis=1, keepdims=True)
    at = np.arange(geometry.slots)
    taken = {
        "at the end of each worker": at < number,
        "at the start of each worker": at >= geometry.slots - number,
        "at the end of the last worker": slot < real.sum(),
        "at the start of worker 0": slot >= len(geometry.padding),
    }
    for words, table in taken.items():
        shown, words = table[None, :, None, None, :], f"padding is taken to be {words}"
        too = table[:, None, None, :, None]
        for more, pattern in (("", by_position), (" (masked by slot)", by_slot)):
            yield Mask(f"{words}, for keys{more}", pattern & rows & shown, 1.0)
            yield Mask(f"{words}{more}", pattern & too & shown, 1.0)
    for owner, of in owners(geometry, "k").items():
        shown = real[of][:, :, None, None, :]
        for more, pattern in (("", by_position), (" (masked by slot)", by_slot)):
            words = f"the padding is that of the keys of {owner}{more}"
            yield Mask(words, pattern & rows & shown, 1.1)
