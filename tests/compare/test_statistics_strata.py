"""Strata: which rows and elements belong to which part."""

import numpy as np

from ringspec.compare.noise.problem import Geometry
from ringspec.compare.statistics.strata import (
    by_exponent,
    by_sign,
    edges,
    positions,
    steps,
    strata_for,
)

OWNER = np.tile(np.arange(4), 4)  # striped, W = 4


def test_edges_are_the_first_and_last_rows_of_each_workers_block():
    labels = edges(np.repeat(np.arange(2), 6), (1, 1, 12)).labels[0, 0]
    assert labels.tolist() == [0, 0, -1, -1, 1, 1] * 2
    assert edges(OWNER, (1, 1, 16)).labels[0, 0].tolist() == [0] * 8 + [1] * 8


def test_positions_are_quarters_of_each_workers_block():
    assert positions(OWNER, (1, 1, 16)).labels[0, 0].tolist() == [n // 4 for n in range(16)]


def test_the_step_of_a_row_is_that_in_which_it_met_most_of_its_weight():
    ring = Geometry.ring(np.repeat(np.arange(3), 2), np.repeat(np.arange(3), 2), 3)
    p = np.zeros((1, 1, 6, 6))
    p[..., 0:2] = 0.5  # all rows look at the keys of worker 0
    parts = {s.kind: s for s in strata_for(ring, p, 1)["o"]}
    # worker 0 holds them at step 0, worker 1 at step 1, worker 2 at step 2
    assert parts["step"].labels[0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert [s.kind for s in strata_for(ring, p, 1)["o"]] == ["worker", "step", "position", "edge"]
    keys = {s.kind: s for s in strata_for(ring, p, 1)["dk"]}
    # keys of workers 1 and 2 have no weight at all
    assert keys["step"].labels[0, 0].tolist()[2:] == [-1] * 4


def test_query_heads_of_one_key_head_add_their_weights():
    ring = Geometry.ring(np.repeat(np.arange(2), 2), np.repeat(np.arange(2), 2), 2)
    p = np.full((1, 4, 4, 4), 0.25)
    parts = strata_for(ring, p, 2)
    assert parts["dk"][0].labels.shape == (1, 2, 4) and parts["dq"][0].labels.shape == (1, 4, 4)


def test_rows_without_weight_are_in_no_step():
    met = np.array([[0, 1], [1, 0]])
    assert (steps(np.zeros((1, 1, 4, 2)), met, np.array([0, 0, 1, 1])).labels == -1).all()


def test_every_nonzero_element_has_one_sign_and_one_exponent():
    truth = np.random.default_rng(0).standard_cauchy((1, 1, 64, 8))
    truth[0, 0, 0] = 0.0
    for parts in (by_sign(truth), by_exponent(truth)):
        assert (sum(mask.astype(int) for _, mask in parts) == (truth != 0)).all()
