"""Targets whose workers form groups, which are a ring, as in USP: mistakes of this ring are said in its words."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import REFERENCES

WORKERS = 4


class Groups:
    """Four workers whose groups of two are the workers of ``ring``, which has the layout ``layout``."""

    name = "groups"

    def __init__(self, ring, layout="contiguous"):
        self.ring, self.layout = ring, layout
        self.capabilities = Capabilities(
            circulations=("gather",), directions=(1,), workers=(WORKERS,), head_ratios=(2,),
            only_causal=layout != "contiguous", batch=(1,), layouts=("contiguous",), formats=("float32",),
        )  # fmt: skip

    def tokens(self, length):
        """Return the tokens of each group."""
        if self.layout == "contiguous":
            return np.arange(length).reshape(2, -1)
        return np.arange(length).reshape(-1, 2).T.copy()

    def run(self, call):
        length = call.index_q.size
        table = self.tokens(length)

        def shared(shards, order, parts):
            whole = np.concatenate(shards, axis=2)[:, :, order]
            return tuple(np.split(whole, parts, axis=2))

        asked = dataclasses.replace(
            call, workers=2, layout=self.layout, circulation="kv", index_q=table, index_k=table,
            position_q=table[:, None], position_k=table[:, None],
            tensors={name: shared(x, table.ravel(), 2) for name, x in call.tensors.items()},
        )  # fmt: skip
        found, back = self.ring.run(asked), np.argsort(table.ravel())
        names = ("o", "lse", "dq", "dk", "dv")
        return Result(*(shared(getattr(found, name), back, WORKERS) for name in names))


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("contiguous", ""),
        pytest.param("striped", " with the layout striped", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_merge_between_groups_is_named_as_a_mistake_of_a_ring_of_groups(layout, how):
    wrong = MutantTarget(MUTANTS["merge-averages"], "float32")
    found = explain_target(Groups(wrong, layout))
    note, words, *_ = found.sentences
    assert note == f"Read as a ring of 2 groups of workers (0 and 1; 2 and 3){how}."
    averages = "the merge averages the running o and the new one with equal weights"
    assert words.startswith(f"In the forward pass, {averages}")
    assert found.made_of == "groups" and not found.unexplained
    assert found.known is not None and found.known["id"] == "merge-averages"


def test_right_groups_are_read_as_a_ring_of_all_workers():
    found = explain_target(Groups(REFERENCES["float32"]))
    assert found.right and found.made_of == "ring" and found.runs[0].problem.call.workers == WORKERS
