"""Factors of any size: they are read from the results, and the sentence says so."""

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.matches import Match
from ringspec.conformance.readout.search.read_factors import (
    in_words,
    kinds_of_number,
    most_frequent,
    number_in,
)
from ringspec.conformance.readout.search.unexplained import size_text

pytestmark = pytest.mark.usefixtures("no_catalogue")

READ = "(a number read from the results)"


def times(factor, *names):
    def change(results):
        for name in names:
            results[name] = [np.float32(factor) * x for x in results[name]]

    return change


def less_of_delta(p, dp, delta):
    return p * (dp - np.float32(0.7) * delta)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"ds_of": less_of_delta}, f"delta is multiplied by 0.7 {READ}"),
        ({"last_change": times(1.3, "dq")}, f"dq is multiplied by 1.3 {READ}"),
        ({"last_change": times(5**-0.5, "dk", "dv")}, f"dk and dv are multiplied by 0.447214, about 1/sqrt(5) {READ}"),
        ({"last_change": times(0.9, "o")}, f"o is multiplied by 0.9 {READ}"),
    ],
)  # fmt: skip
def test_a_factor_of_any_size_is_read_and_told_as_a_number_that_was_read(faults, words):
    found = explain_target(TiledRing(**faults))
    assert found.wrong == len(found.conclusion.explained) > 0
    assert words in found.sentences[0] and len(found.conclusion.faults) == 1


def test_a_usual_factor_is_told_in_its_own_words():
    found = explain_target(TiledRing(last_change=times(2, "dq")))
    assert found.sentences[0] == "In the backward pass, dq is too large by a factor of 2."


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("value", [0.9, -3.25, 1 / 7, 1e-7, 123456.7])
def test_the_words_of_a_factor_say_its_value(phase, value):
    words = in_words(value, 2e-4)
    for kind in kinds_of_number(phase, words, value):
        text, number = number_in(kind.words)
        assert text == words and number == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("number", ["1.2.3", "1e999", "-", "many"])
def test_words_that_say_no_number_are_no_factor(number):
    assert number_in(f"o is multiplied by {number} {READ}") is None


def test_no_factor_is_read_from_few_ratios_or_from_ratios_that_differ():
    assert most_frequent(np.full(3, 0.9), 1e-3) is None
    assert most_frequent(np.linspace(0.5, 2.0, 50), 1e-3) is None
    assert most_frequent(np.append(np.full(30, 0.9), np.linspace(0.5, 2.0, 20)), 1e-3) == 0.9
    assert most_frequent(np.full(30, np.nan), 1e-3) is None


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([0.5], ", 0.5 times as large as expected"),
        ([0.0], ", most of them 0"),
        ([0.5, 1.5], ", half of the wrong ones 0.5 to 1.5 times as large as expected"),
        ([-0.0, 2.0], ", half of the wrong ones 0 to 2 times as large as expected"),
        ([1.98, 2.02], ", half of the wrong ones 2 times as large as expected"),
    ],
)
def test_what_is_not_explained_is_told_with_its_size(factors, words):
    ours = np.random.default_rng(1).uniform(0.1, 1.0, (1, 1, 1, 8, 8))
    there = ours * np.resize(factors, ours.shape)
    seen = Seen(there, None, np.zeros((1, 1, 8)), np.zeros((1, 1, 8, 1)))
    match = Match({"A": there == ours}, lambda: {"A": ours}, dict)
    assert size_text(seen, match, "A") == words
    right = Match({"A": ours == ours}, lambda: {"A": ours}, dict)
    assert size_text(seen, right, "A") == ""
