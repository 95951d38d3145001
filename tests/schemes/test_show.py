"""What print shows, and what a scheme costs."""

import numpy as np
import pytest

from ringspec.errors import NotRecordedError, OptionError
from ringspec.schemes.api import context_parallel
from ringspec.schemes.cost import scheme_cost
from ringspec.schemes.exchanges import usp
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import ring

X, K = np.ones((1, 4, 8, 2)), np.ones((1, 2, 8, 2))


def run_of(scheme, mesh, **keywords):
    return context_parallel(X, K, K, X, mesh=mesh, scheme=scheme, **keywords)


def test_print_shows_homes_steps_and_transfers():
    text = run_of("usp", {"ring": 2, "ulysses": 2}, layout="zigzag").text().splitlines()
    assert text[0] == "usp on the mesh ring 2 x ulysses 2, H = 4, Hkv = 2"
    assert "1     0     1        1 6      1 6" in text
    assert "  rank 2  2-5 [h 0-1]      x  0-1 6-7 [h 0]" in text
    assert "  k v: permute along ring: 0 to 2, 1 to 3, 2 to 0, 3 to 1" in text
    assert "    rank 0 holds 0-1 6-7 [h 0-1], then 0 7" in text
    assert text.count("backward, step 2") == 1


def test_print_of_a_run_is_short_and_the_same_if_it_is_recorded():
    x = np.ones((1, 1, 16, 1))
    run = context_parallel(x, x, x, mesh={"ring": 8}, scheme="ring", record=True, causal=True)
    assert str(run) == str(context_parallel(x, x, x, scheme=run.scheme, causal=True))
    lines = str(run).splitlines()
    assert len(lines) < 20 and len(run.text().splitlines()) > 200
    assert "  step 0: visible pairs on a rank 3; k v: permute along ring" in lines
    assert "  step 7: visible pairs on a rank 0 to 4" in lines
    ulysses = str(run_of("ulysses", {"ulysses": 4}))
    assert "step 0: nobody computes; q: all_to_all along ulysses" in ulysses


def test_what_a_recorded_run_did_is_what_its_scheme_shows():
    run = run_of("joint", {"ring": 3, "ulysses": 2}, text=[0, 1], record=True)
    from ringspec.schemes.show import moments_of

    shown = moments_of(run.scheme, "forward") + moments_of(run.scheme, "backward")
    assert [(m.phase, m.step, m.used, m.messages) for m in run.moments] == [
        (m.phase, m.step, m.used, m.messages) for m in shown
    ]


def test_print_of_a_recorded_run_says_rank_by_rank_what_is_held_sent_received_and_merged():
    joint = run_of("joint", {"ring": 3, "ulysses": 2}, text=[0, 1], record=True)
    q = np.ones((1, 4, 2, 2))
    dcp = context_parallel(q, K, K, mesh={"dcp": 2}, scheme="dcp", record=True)
    assert str(dcp.moment(1)).splitlines()[:6] == [
        "forward, step 1",
        "  rank 0 holds q 0-1 [h 0-3]; k v 0 2 4 6 [h 0-1]",
        "    computes 0-1 [h 0-3] x 0 2 4 6 [h 0-1]: starts m l o",
        "    sends m l o 0-1 [h 2-3] to 1",
        "    receives m l o 0-1 [h 0-1] from 1",
        "    merges m l o of 0-1",
    ]
    for run in (joint, dcp):
        for moment in run.moments:
            assert set(str(moment).splitlines()[1:]) <= set(run.text().splitlines())
    # Gradients of the text are added over the ring; of the other keys, only those of one rank arrive.
    lines = [line.strip() for line in str(joint.moments[-1]).splitlines()]
    assert "adds to dq of 0-1" in lines and "adds to dk dv of 0-1" in lines
    assert (
        f"forward: bytes sent by each rank: {' '.join(map(str, joint.cost().sent))};"
        in joint.text()
    )
    assert "sends q" not in str(run_of("ulysses", {"ulysses": 2}).scheme)


@pytest.mark.parametrize("scheme", [("usp", {"ring": 3, "ulysses": 2}), ("all_gather", {"cp": 3})])
def test_replay_repeats_every_step_bit_for_bit_from_what_was_held_before_it(scheme):
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((1, h, 12, 2)) for h in (4, 2, 2, 4))
    run = context_parallel(
        q, k, v, dy, mesh=scheme[1], scheme=scheme[0], record=True, dropout_p=0.5, dropout_seed=3
    )
    again = list(run.replay())
    assert [(m.phase, m.step, m.used, m.messages) for m in again] == [
        (m.phase, m.step, m.used, m.messages) for m in run.moments
    ]
    for one, two in zip(run.moments, again, strict=True):
        for a, b in zip(one.computed + one.after, two.computed + two.after, strict=True):
            assert tensors_of(a) == tensors_of(b)


def tensors_of(state):
    return {(t, n): x.tobytes() for t, p in state.parts.items() for n, x in p.tensors.items()}


def test_what_was_not_recorded_or_run_is_refused():
    plain, run = run_of("ulysses", {"ulysses": 2}), run_of("ulysses", {"ulysses": 2}, record=True)
    forward = context_parallel(X, K, K, mesh={"ulysses": 2}, scheme="ulysses", record=True)
    for call, words in (
        (lambda: list(plain.replay()), "record=True"),
        (lambda: plain.moment(0), "record=True"),
        (lambda: run.moment(2), "a step from 0 to 1"),
        (lambda: run.moment(True), "a step from 0 to 1"),
        (lambda: run.state(2, 0), "a rank from 0 to 1"),
        (lambda: forward.moment(0, "backward"), "pass dy"),
        (lambda: forward.cost("backward"), "pass dy"),
        (lambda: run.cost(["forward"]), "phase 'forward'"),
    ):
        with pytest.raises(NotRecordedError, match=words):
            call()
    with pytest.raises(OptionError, match="before, computed"):
        run.state(0, 0, when="during")


def test_a_rank_of_a_ring_sends_its_block_w_minus_1_times():
    scheme = ring(Mesh((("ring", 4),)), [[2 * r, 2 * r + 1] for r in range(4)], heads=4, kv_heads=2)
    mask = np.ones((1, 8, 8), dtype=bool)
    forward = scheme_cost(scheme, mask, width=5, value_width=3)
    assert forward.sent == (3 * 2 * 2 * (5 + 3),) * 4  # hops x tokens x key heads x (D + Dv)
    backward = scheme_cost(scheme, mask, width=5, value_width=3, phase="backward")
    assert backward.sent == ((3 + 4) * 2 * 2 * (5 + 3),) * 4
    assert np.sum(forward.pairs) == np.sum(backward.pairs) == 8 * 8 * 4


def test_ulysses_sends_less_than_a_ring_and_needs_no_more_pairs():
    mesh = Mesh((("ulysses", 4),))
    scheme = usp(mesh, [[2 * r, 2 * r + 1] for r in range(4)], heads=4, kv_heads=4)
    cost = scheme_cost(scheme, np.ones((1, 8, 8), dtype=bool), width=5, value_width=5)
    # Of its 2 tokens and 4 heads a rank sends 3/4: q, k, v of width 5, and back o, m, l.
    assert cost.sent == (2 * 3 * (5 + 5 + 5 + 7),) * 4
    assert cost.pairs == ((0,) * 4, (8 * 8,) * 4)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_every_rank_of_a_causal_zigzag_ring_computes_equally_much(phase):
    table = [[r, 7 - r] for r in range(4)]
    scheme = ring(Mesh((("ring", 4),)), table, heads=1, kv_heads=1)
    cost = scheme_cost(scheme, np.tril(np.ones((1, 8, 8), dtype=bool)), 4, 4, phase)
    assert len(set(np.sum(cost.pairs, axis=0))) == 1


def test_the_reading_order_names_every_file_once():
    import re
    from pathlib import Path

    import ringspec.schemes

    named = re.findall(r"^\d+\. ``(\w+)``", ringspec.schemes.__doc__, re.M)
    folder = Path(ringspec.schemes.__file__).parent
    assert sorted(named) == sorted(path.stem for path in folder.glob("[a-z]*.py"))
