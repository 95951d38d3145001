"""A few small cases of every storage, for tests that derive; and agreement with the specification."""

import numpy as np
from vectors.spec_of_case import results_of

from ringspec.vectors import write_set
from ringspec.vectors.catalogue.build import bias_of, block_backward, case, merge, ring, schedule
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.generate import derive

TABLE = ((3, 0, -1, 6), (5, -1, 1, 7), (-1, 4, 2, -1))
BOUND = 1e-14


def cases():
    """Seven cases, derived in about a second."""
    return (
        case("attention/small", "An example.", "FWD-1", "stale-keys", S=6, causal=True),
        ring(
            "ring/padded", "An example.", "LAYOUT-5", "", W=3, S=8, table_q=TABLE, causal=True,
            sinks=((0.5, 1.0), (2.0, -1.0)), bias=bias_of(1, 2, 1, 8), dlse=True,
        ),
        ring(
            "ring/sampled", "An example.", "RING-1", "", W=2, S=24, layout="zigzag",
            storage="sampled", sinks=((1.0,), (0.0,)),
        ),
        ring("ring/pinned", "An example.", "RING-1", "", W=2, S=8, storage="digests"),
        block_backward("block/small", "An example.", "BWD-11", "", S=4),
        merge("merge/small", "An example.", "SOFT-2", "", N=3, S=2),
        schedule("schedule/small", "An example.", "RING-1", "", W=3, circulation="q"),
    )  # fmt: skip


def named(id):
    return next(one for one in cases() if one.id == id)


def write(path, given=None):
    """A set of derived cases."""
    derived = [derive(one) for one in (cases() if given is None else given)]
    entries = [(one.case, one.tensors) for one in derived]
    return write_set(path, "small", "1.0", entries, FLAGS)


def expected(case, whole, tensor):
    """(expected values in float64, row scale with the same number of axes) of whole tensors."""
    want, scale = whole[f"out.{tensor}.float64"], whole[f"scale.{tensor}"]
    return want, scale if scale.ndim == want.ndim else scale[..., None]


def disagreement(case, whole):
    """(tensor, largest error of the specification in float64 relative to the row scale), each one.

    Where the scale is 0, nothing was summed and the result must be exactly 0; -inf must be -inf.
    Padding slots are left out: the specification does not say what they hold.
    """
    results = results_of(case)
    suffix = {"ring": " worker", "block": "" if "forward" in case.passes else " dense"}
    for tensor in ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias"):
        name = tensor + suffix.get(case.operation, "")
        assert (name in results) == (f"out.{tensor}.float64" in whole), (case.id, tensor)
        if name not in results:
            continue
        got = results[name]
        want, scale = expected(case, whole, tensor)
        assert got.shape == want.shape, (case.id, tensor)
        there = np.ones(want.shape, dtype=bool)
        if case.operation == "ring" and tensor in ("o", "lse", "dq", "dk", "dv"):
            slots = whole["layout.k" if tensor in ("dk", "dv") else "layout.q"] >= 0
            there &= slots.reshape(len(slots), 1, 1, -1, *(1,) * (want.ndim - 4))
        infinite = np.isneginf(want) & there
        assert np.isneginf(got[infinite]).all()
        there &= ~infinite
        error = np.abs(got[there] - want[there])
        scale = np.broadcast_to(scale, want.shape)[there]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(error == 0, 0.0, error / scale)
        yield tensor, relative.max(initial=0.0)


def unsharded(x, table, axis):
    """The global tensor of local ones [W, ...]; ``axis`` counts without the leading W."""
    length = int(table.max()) + 1
    whole = np.zeros((*x.shape[1 : axis + 1], length, *x.shape[axis + 2 :]), dtype=x.dtype)
    moved = np.moveaxis(whole, axis, 0)
    for local, tokens in zip(x, table, strict=True):
        for slot, token in enumerate(tokens):
            if token >= 0:
                moved[token] = np.moveaxis(local, axis, 0)[slot]
    return whole
