"""On four ranks: every problem over messages and in lockstep; prints how many are bit-identical."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from ranks.ringcases import W, differences, inputs, option, problems, tokens_of
from refusals import is_refusal

from ringspec.comm.library import mpi
from ringspec.comm.mpi import ring_mpi
from ringspec.errors import CommunicationError, NonFiniteError, OptionError, RingspecError
from ringspec.rings.ring import ring

rank, size = mpi().COMM_WORLD.Get_rank(), mpi().COMM_WORLD.Get_size()
assert size == W


def say(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def identical() -> None:
    """The result of every rank against lockstep; and forward alone."""
    wrong, number = [], 0
    for name, keywords in problems():
        x = inputs(number, tokens_of(keywords))
        mine = ring_mpi(**x, **keywords, timeout=60)
        if rank == number % W:  # the ranks share the work of comparing
            wrong += [f"{name}: {d}" for d in differences(mine, ring(**x, workers=W, **keywords))]
        number += 1
    x.pop("dy")
    mine = ring_mpi(**x, layout=keywords["layout"], timeout=60)
    wrong += differences(mine, ring(**x, workers=W, layout=keywords["layout"]))
    assert not wrong, wrong
    say(f"identical: {number + 1}")


def subrings() -> None:
    """Two rings of two share a batch: like one ring of two, but for sums over the batch."""
    for feature in ("causal", "dropout", "segments", "mask", "keep", "dlse", "bounds"):
        x, keywords = inputs(7, batch=4), option(feature, batch=4)
        mine = ring_mpi(**x, **keywords, ring_size=2, root=0, timeout=60)
        assert (mine is None) == (rank != 0)
        if mine is not None:
            assert len(mine.workers) == 2
            assert not differences(mine, ring(**x, workers=2, **keywords)), feature
    x, keywords = inputs(7), option("sinks") | option("bias")
    mine = ring_mpi(**x, **keywords, ring_size=2, timeout=60)
    halves = []
    for b in range(2):
        part = {name: value[b : b + 1] for name, value in x.items()}
        halves.append(ring(**part, **keywords, workers=2))
    for name in ("dsinks", "dbias"):
        workers = zip(*(half.workers for half in halves), strict=True)
        sums = [getattr(one, name) + getattr(other, name) for one, other in workers]
        assert all(
            np.array_equal(getattr(got, name), one)
            for got, one in zip(mine.workers, sums, strict=True)
        )
    assert np.array_equal(mine.dsinks, sum(w.dsinks for w in mine.workers))
    say("subrings: as one ring")


def refusals() -> None:
    """What one rank was given in another way, or cannot do, every rank hears."""
    x = inputs(1)
    for expected, changed in (
        ((CommunicationError, "disagreement"), {"q": x["q"] + (rank == 2)}),
        ((CommunicationError, "disagreement"), {"causal": rank != 1}),
        ((CommunicationError, "disagreement"), {"direction": -1 if rank == 3 else 1}),
        ((CommunicationError, "disagreement"), {"layout": "zigzag" if rank else "striped"}),
        ((OptionError, "window"), {"window": -1 if rank == 2 else None}),
        (NonFiniteError, {"v": np.where(rank == 3, np.nan, x["v"])}),
    ):
        try:
            ring_mpi(**x | changed, timeout=60)
        except RingspecError as error:
            assert is_refusal(error, expected), error
        else:
            raise AssertionError(changed)
    say("refusals: on every rank")


identical()
subrings()
refusals()
