"""Recipe inference against simulated kernels that do not compute as they declare."""

import functools

import numpy as np
import pytest
from compare import noise_problems as simulated

from ringspec.compare.inference.candidates import (
    Candidate,
    candidates_for,
    in_words,
    predictions_of,
)
from ringspec.compare.inference.infer import Fit, concluded, infer
from ringspec.compare.noise.predict import predict
from ringspec.compare.statistics.tests import errors_of
from ringspec.formats import product, round_to
from ringspec.recipes import RECIPES, recipe
from ringspec.spec.block import BlockGradients
from ringspec.spec.dense_forward import scores
from ringspec.spec.online_softmax import SoftmaxState

BF16 = recipe("bf16")


def truncate(x, name):
    """Towards zero, to bfloat16."""
    assert name == "bfloat16"
    bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def forward_block(q, k, v, block, round_p=round_to):
    """One key block, with a way of rounding P; one key head per query head."""
    used, (s, _) = block.recipe, scores(q, k, block)
    m = s.max(axis=3)
    e = round_to(np.exp(s - np.where(np.isneginf(m), 0.0, m)[..., None]), "float32")
    return SoftmaxState(m, e.sum(axis=3), product(round_p(e, used.p), v, "float32"))


def backward_block(q, k, v, dy, lse, row_term, block, round_p=round_to, dp_format="float32"):
    """The gradients of one block, with a way of rounding P and a format of dp - delta."""
    used, terms, (s, _) = block.recipe, block.terms, scores(q, k, block)
    p = np.exp(s - lse[..., None])
    inner = round_to(dy @ v.swapaxes(2, 3) - row_term[..., None], dp_format)
    ds = round_to(p * inner, used.ds)
    p = round_p(p, used.p)
    return BlockGradients(
        terms.scale * (ds @ k),
        terms.scale * (ds.swapaxes(2, 3) @ q),
        p.swapaxes(2, 3) @ dy,
        None,
    )


@functools.cache
def problem(name="bf16", workers=4, mask="causal", seed=5):
    return simulated.random_problem(
        seed, name, workers=workers, length=64, width=32, heads=1, group=1, spread=1.0,
        unlike=False, mask=mask, layout="striped", circulation="kv",
    )  # fmt: skip


@functools.cache
def known(name="bf16", workers=4):
    """The truth of a problem, its attention and geometry, and a predict that computes nothing twice."""
    given = problem(name, workers)
    attention, geometry = simulated.attention_of(given), simulated.geometry_of(given)
    predictions = {}

    def remembered(attention, recipe, geometry=None, **more):
        # Inference may go on with one head of the problem, which q tells from the whole.
        key = (attention.q.tobytes(), recipe, tuple(sorted(more.items())))
        if key not in predictions:
            predictions[key] = predict(attention, recipe, geometry, **more)
        return predictions[key]

    return simulated.truth_of(given), attention, geometry, remembered


def inferred(declared, kernel_recipe=None, name="bf16", workers=4, **blocks):
    """What is inferred of a kernel with this recipe and these blocks that declares another."""
    got = simulated.run(problem(name, workers), other=kernel_recipe or declared, **blocks)
    truth, *rest = known(name, workers)
    errors = {name: errors_of(got[name], truth[name]) for name in truth}
    attention, geometry, remembered = rest
    return infer(errors, attention, geometry, declared, remembered)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", ["bf16", "bf16_partials", slow("fp16"), "float32", "nki", "float64"]
)
def test_a_kernel_that_computes_as_it_declares_is_not_contradicted(name):
    found = inferred(name, name=name if name != "float64" else "float32")
    assert not found.contradicted, found.lines()


LIES = {
    "partials": (
        "bf16",
        {"kernel_recipe": "bf16_partials"},
        "partials were rounded to bfloat16 between steps",
    ),
    "no partials": (
        "bf16_partials",
        {"kernel_recipe": BF16.replace(merge_order="normalised")},
        "partials were kept in float32 between steps, wider than the declared bfloat16",
    ),
    "outputs only": (
        "bf16",
        {"kernel_recipe": BF16.replace(p="float32", ds="float32")},
        "only the outputs were rounded",
    ),
    "P float32": (
        BF16.replace(outputs="float32", gradients="float32"),
        {"kernel_recipe": BF16.replace(p="float32", outputs="float32", gradients="float32")},
        "P was not rounded to bfloat16",
    ),
    "P truncated": (
        "bf16",
        {
            "block_forward": functools.partial(forward_block, round_p=truncate),
            "block_backward": functools.partial(backward_block, round_p=truncate),
        },
        "P was truncated",
    ),
    "dS twice": (
        BF16.replace(gradients="float32"),
        {
            "kernel_recipe": BF16.replace(gradients="float32"),
            "block_backward": functools.partial(backward_block, dp_format="bfloat16"),
        },
        "dS was rounded twice",
    ),
    "bf16 inside": (
        "float32",
        {"kernel_recipe": RECIPES["float32"].replace(p="bfloat16", ds="bfloat16")},
        "P and dS were rounded to bfloat16",
    ),
    "float64 inside": (
        "float32",
        {
            "kernel_recipe": RECIPES["float64"].replace(
                outputs="float32", gradients="float32", lse="float32"
            )
        },
        "accumulations are wider than the declared float32",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_kernel_that_computes_otherwise_is_contradicted_in_words(lie):
    declared, kernel, words = LIES[lie]
    found = inferred(declared, name="float32" if declared == "float32" else "bf16", **kernel)
    assert found.contradicted, found.lines()
    assert words in found.best.candidate.words, found.lines()
    assert words in "\n".join(found.lines())


def fitted(name, margin, good=True, rms=1.0):
    """A candidate whose arithmetic is not that of one with another name."""
    terms = ((float(len(name)), BF16),)
    return Fit(Candidate(name, f"words of {name}", terms), margin, good, {"o": rms})


def test_of_candidates_that_fit_alike_the_first_is_named():
    fits = [
        fitted("bf16", 40.0, good=False),
        fitted("simple", 0.6),
        fitted("same in other words", 0.0),
    ]
    assert concluded(fits).best.name == "simple"
    assert concluded(fits[:1] + fits[2:]).best.name == "same in other words"


@pytest.mark.parametrize("rms", [2.05, 685.0])
def test_noise_that_nothing_explains_is_not_called_that_of_any_recipe(rms):
    for fits in (
        [fitted("bf16", 0.0, False, rms), fitted("other", 9.0, False, rms)],
        [fitted("bf16", 9.0, False, rms), fitted("other", 0.0, False, rms)],
    ):
        said = concluded(fits).lines()
        assert said[0] == "no arithmetic that was tried has this noise"
        assert not any("the noise is that of" in line or "fits better" in line for line in said)


def test_an_error_that_is_no_noise_fits_no_recipe():
    truth, attention, geometry, remembered = known()
    got = simulated.run(problem())
    errors = {name: 40 * errors_of(got[name], truth[name]) for name in truth}
    found = infer(errors, attention, geometry, "bf16", remembered)
    assert not found.best.good and "no arithmetic" in found.lines()[0]


def test_a_recipe_that_was_not_declared_is_not_called_declared():
    said = concluded([fitted("bf16", 0.0)]).lines(was_declared=False)
    assert "used because none is declared" in said[0] and "the declared recipe" not in said[0]


@pytest.mark.parametrize("name", ["bf16_partials", "fp16_partials", "nki", "bf16"])
def test_candidates_that_differ_in_the_order_of_summation_alone_are_one_with_the_same_words(name):
    """Which of them fits best changes with the processor: their scores are swapped here."""
    candidates = candidates_for(recipe(name))
    found = []
    for sign in (1, -1):
        margins = [100.0] + [sign * 0.01 * n for n in range(1, len(candidates))]
        fits = [Fit(c, margin) for c, margin in zip(candidates, margins, strict=True)]
        found.append(concluded(fits).fits)
    for fits in found:
        assert len({fit.candidate.meaning for fit in fits}) == len(fits) < len(candidates)
    assert {fit.candidate.words for fit in found[0]} == {fit.candidate.words for fit in found[1]}


def test_partials_cannot_be_told_with_one_worker_and_the_declared_recipe_is_named():
    found = inferred("bf16", workers=1)
    assert found.best is found.declared and not found.contradicted


def test_a_few_wrong_elements_do_not_choose_a_recipe():
    truth, attention, geometry, remembered = known()
    got = simulated.run(problem())
    errors = {name: errors_of(got[name], truth[name]) for name in truth}
    errors["dq"][0, 0, 3] += 100.0
    errors["o"][0, 0, 3, 3] = np.nan
    found = infer(errors, attention, geometry, "bf16", remembered)
    assert found.best is found.declared


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_has_candidates_with_names_of_their_own_and_words(name):
    found = candidates_for(recipe(name))
    assert found[0].terms == ((1.0, recipe(name)),) and found[0].words == "as declared"
    assert len({c.name for c in found}) == len(found) > 1
    assert all(c.words for c in found)
    assert (recipe(name), ()) in predictions_of(found)


def test_words_name_every_changed_rounding_point():
    said = in_words(BF16, RECIPES["nki"])
    for word in ("merges of partials", "o between steps", "the products of dy_o_sum", "gradients"):
        assert word in said
