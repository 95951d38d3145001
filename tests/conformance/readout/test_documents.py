"""Packed documents in the layout zigzag_per_document, whose windows a kernel computes chunk by chunk.

The kernel is dense attention with the visible pairs that loops over queries and keys give. It shares no code with the
masks of the readouts.
"""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.target import Capabilities
from ringspec.conformance.targets.reference import REFERENCES

pytestmark = pytest.mark.usefixtures("no_catalogue")

GRADIENT = "The backward pass is the gradient of this wrong forward pass."
LONGEST = "is computed from the length of the longest document"
FIRST = "the window counts tokens from the first query of a chunk and the first key of its document"


class Packed:
    """Each chunk of a document gets the keys of the document up to the last that it sees, and an adjusted window.

    ``at_end``: the kernel puts the last query and the last key on the diagonal, not the first of both. ``for_longest``:
    the window is adjusted for the longest document. ``at_end`` without ``for_longest`` is right.
    """

    name = "packed documents"

    def __init__(self, at_end, for_longest, layout="zigzag_per_document"):
        self.at_end, self.for_longest = at_end, for_longest
        self.capabilities = Capabilities(
            circulations=("gather",), directions=(1,), workers=(3,), head_ratios=(2,), batch=(1,), layouts=(layout,),
            masks=("causal", "window", "documents"), features=(),
        )  # fmt: skip

    def shown(self, starts, workers, window):
        """Return which key each query sees."""
        left, right = window
        lengths = [stop - first for first, stop in zip(starts[:-1], starts[1:], strict=True)]
        pattern = np.zeros((starts[-1], starts[-1]), bool)
        for first, length in zip(starts[:-1], lengths, strict=True):
            chunk = length // (2 * workers)
            counted = max(lengths) if self.for_longest else length
            for query in range(length):
                number, place = divmod(query, chunk)
                keys = min(length, (number + 1) * chunk + right)
                end = (number + 1) * counted // (2 * workers)
                more = min(counted, end + right) - end
                diagonal = keys - chunk + place if self.at_end else place
                for key in range(keys):
                    seen = diagonal - left - more <= key <= diagonal + right - more
                    pattern[first + query, first + key] = seen
        return pattern

    def run(self, call):
        if "window" not in call.terms or call.terms.get("causal"):
            return REFERENCES["float32"].run(call)
        starts = call.terms["cu_seqlens"]
        shown = self.shown(starts, call.workers, call.terms["window"])
        mask = tuple(shown[rows][None, None] for rows in call.position_q[:, 0])
        terms = {name: x for name, x in call.terms.items() if name != "window"}
        tensors = {**call.tensors, "mask": mask}
        return REFERENCES["float32"].run(dataclasses.replace(call, terms=terms, tensors=tensors))


def test_packed_documents_in_zigzag_per_document_are_read_and_right():
    found = explain_target(Packed(at_end=True, for_longest=False))
    assert found.right
    assert [one.problem.id for one in found.runs] == [
        "readout/documents-zigzag_per_document",
        "readout/documents-band-zigzag_per_document",
    ]


@pytest.mark.parametrize(
    ("at_end", "for_longest", "words"),
    [
        (True, True, f"the window of each document {LONGEST}"),
        pytest.param(False, False, FIRST, marks=pytest.mark.slow),
        (False, True, f"{FIRST}, and {LONGEST}"),
    ],
)
def test_a_window_that_is_wrong_in_chunks_of_documents_is_named(at_end, for_longest, words):
    found = explain_target(Packed(at_end, for_longest))
    assert found.sentences[:2] == (f"In the forward pass, {words}.", GRADIENT)
    assert not found.unexplained


def test_a_target_without_a_readable_layout_is_told_which_layouts_are_read():
    found = explain_target(Packed(at_end=True, for_longest=False, layout="table"))
    layouts = "contiguous, striped, zigzag, zigzag_per_document"
    assert found.unread == f"it needs one of the layouts {layouts}"
