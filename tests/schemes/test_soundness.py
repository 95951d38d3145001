"""What the validator accepts is right: schemes with random changes are refused, or equal dense attention."""

from dataclasses import replace

import numpy as np
import pytest

import ringspec as rs
from ringspec.schemes.exchanges import usp
from ringspec.schemes.gathers import all_gather
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import double_ring, ring
from ringspec.schemes.scheme import KINDS, SIDE_OF
from ringspec.schemes.validator import find_scheme_defects

ZIGZAG = [[r, 7 - r] for r in range(4)]
HEADS = {"heads": 4, "kv_heads": 2}
SCHEMES = {
    "ring": ring(Mesh((("ring", 4),)), ZIGZAG, **HEADS),
    "q ring": ring(Mesh((("ring", 4),)), ZIGZAG, circulation="q", **HEADS),
    "double ring": double_ring(Mesh((("outer", 2), ("inner", 2))), ZIGZAG, **HEADS),
    "all_gather": all_gather(Mesh((("cp", 4),)), ZIGZAG, **HEADS),
    "ulysses": usp(Mesh((("ulysses", 4),)), ZIGZAG, name="ulysses", **HEADS),
    "usp": usp(Mesh((("ring", 2), ("ulysses", 2))), ZIGZAG, **HEADS),
    "joint": usp(
        Mesh((("ring", 2), ("ulysses", 2))), [[1], [3], [5], [7]], text=(0, 2, 4, 6), **HEADS
    ),
}
MASK = np.tril(np.ones((1, 8, 8), dtype=bool))


def changed(scheme, generator):
    """Return a scheme with one random change in one step of one pass."""
    phase = ["forward", "backward"][generator.integers(2)]
    steps = list(scheme.steps(phase))
    n = int(generator.integers(len(steps)))
    what, transfers = generator.integers(7), list(steps[n].transfers)
    if what == 0:
        del steps[n]
    elif what == 1:
        steps.insert(n, steps[int(generator.integers(len(steps)))])
    elif what == 2:
        tables = [tuple(t for t in range(8) if generator.random() < 0.8) for _ in range(4)]
        steps[n] = replace(steps[n], **{["rows", "keys"][generator.integers(2)]: tuple(tables)})
    elif transfers:
        one = int(generator.integers(len(transfers)))
        old = transfers[one]
        if what == 3:
            del transfers[one]
        elif what == 4:
            side = SIDE_OF[old.thing]
            found = [t.to for s in steps for t in s.transfers if SIDE_OF[t.thing] == side]
            found.append(scheme.home_q if side == "q" else scheme.home_k)
            kind = KINDS[generator.integers(len(KINDS))]
            to = found[generator.integers(len(found))]
            transfers[one] = replace(old, to=to, kind=[old.kind, kind][generator.integers(2)])
        elif what == 5:
            axes = scheme.mesh.names
            transfers[one] = replace(old, axis=axes[generator.integers(len(axes))], order="rank")
        else:
            transfers.insert(0, transfers.pop(one))
        steps[n] = replace(steps[n], transfers=tuple(transfers))
    return replace(scheme, **{phase: tuple(steps)})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_randomly_changed_scheme_is_refused_or_right(name):
    generator = np.random.default_rng(len(name))
    q, dy = generator.standard_normal((2, 1, 4, 8, 3))
    k, v = generator.standard_normal((2, 1, 2, 8, 3))
    want = rs.attention(q, k, v, causal=True), rs.attention_backward(q, k, v, dy, causal=True)
    refused = accepted = 0
    for _ in range(25):
        scheme = changed(SCHEMES[name], generator)
        if find_scheme_defects(scheme, MASK):
            refused += 1
            continue
        accepted += 1
        run = rs.context_parallel(q, k, v, dy, scheme=scheme, causal=True)
        assert np.abs(run.o - want[0].o).max() <= 1e-13
        for result in ("dq", "dk", "dv"):
            assert np.abs(getattr(run, result) - getattr(want[1], result)).max() <= 1e-13
    assert refused > 0 and accepted > 0
