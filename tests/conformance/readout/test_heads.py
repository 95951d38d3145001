"""Workers that exchange heads for tokens, and still compute a ring between them: queries see keys of other heads."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import REFERENCES

WORKERS = 3
NOTE = "Read as a ring of 3 groups of heads, each with all tokens."
SEEN = "In the forward pass, queries also see the keys of other groups of heads"


class AfterExchange:
    """Each of three workers gets all tokens of a third of the heads.

    ``ring``: then the workers are a ring, as if the tokens of a worker followed those of the one before it.
    """

    name = "ring after the exchange of heads"

    def __init__(self, ring, masks):
        self.ring = ring
        self.capabilities = Capabilities(
            circulations=("gather",), directions=(1,), workers=(WORKERS,), head_ratios=(1, 2), batch=(1,),
            kv_heads_multiple="workers", layouts=("contiguous",), formats=("float32",), masks=masks, features=(),
        )  # fmt: skip

    def run(self, call):
        length = call.index_q.size

        def exchanged(shards, joined, divided):
            return tuple(np.split(np.concatenate(shards, axis=joined), WORKERS, axis=divided))

        table = np.arange(WORKERS * length).reshape(WORKERS, -1)
        terms = dict(call.terms)
        if not self.ring:
            terms["cu_seqlens"] = tuple(range(0, (WORKERS + 1) * length, length))
        asked = dataclasses.replace(
            call, terms=terms, circulation="kv", index_q=table, index_k=table,
            position_q=table[:, None], position_k=table[:, None],
            tensors={name: exchanged(x, 2, 1) for name, x in call.tensors.items()},
        )  # fmt: skip
        found = REFERENCES["float32"].run(asked)
        names = ("o", "lse", "dq", "dk", "dv")
        return Result(*(exchanged(getattr(found, name), 1, 2) for name in names))


@pytest.mark.parametrize(
    ("masks", "more"),
    [(("causal",), ", as if the tokens of all groups were one sequence"), ((), "")],
)
def test_queries_that_see_keys_of_other_groups_of_heads_are_named(masks, more):
    found = explain_target(AfterExchange(True, masks))
    assert found.sentences[:2] == (NOTE, f"{SEEN}{more}.")
    assert found.made_of == "heads" and not found.unexplained
    assert "exchange of heads" in found.hint and found.known is None


def test_workers_that_exchange_heads_and_compute_nothing_between_them_are_right():
    found = explain_target(AfterExchange(False, ("causal",)))
    assert found.right and found.made_of == "ring"
