"""The scores of pairs: bias, soft cap, mask and dropout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringspec.conformance.readout.faults.choices import CAP_SLOPES, CAPS, DROPS, Choices, components
from ringspec.conformance.readout.model.arrays import chosen, nonzero
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift

OF_SCORES = (
    *components("q"),
    *components("k"),
    "centred",
    "times",
    *components("bias_q"),
    *components("bias_k"),
    "bias_times",
    "cap",
    "mask",
    "hidden_score",
    "count",
)
OF_DROP = (*components("drop_q"), *components("drop_k"), "drop", "drop_times")


def scores_of_pairs(model: Model, c: Choices) -> Array:
    """Return the scores of the pairs: ``hidden_score`` where a pair is masked, -inf where it is not computed."""

    def compute() -> Array:
        s = capped(model, uncapped(model, c), c["cap"])
        s = np.where(shown(model, c["mask"]), s, c["hidden_score"])
        return np.where(c["count"] != 0, s, -np.inf)

    return np.asarray(model.once("scores", c.several(OF_SCORES), compute))


def uncapped(model: Model, c: Choices) -> Array:
    """Return the scores of the pairs with the bias, before the soft cap and the mask."""
    s = model.s[model.index(c, "q"), model.index(c, "k")]
    if c["centred"].any():
        s = np.where(c["centred"], s - s.mean(axis=4, keepdims=True), s)
    s = c["times"] * s
    if model.pairs.bias is None:
        return np.asarray(s)
    return np.asarray(s + c["bias_times"] * model.entries(model.pairs.bias, c, "bias"))


def capped(model: Model, s: Array, form: Integers) -> Array:
    """Return scores under the soft cap, in the form that ``form`` numbers."""
    cap, scale = model.geometry.softcap, model.geometry.scale
    if cap is None:
        return s

    def once(s: Array) -> Array:
        return np.asarray(cap * np.tanh(s / cap))

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: once(s), "none": lambda: s, "before the scale": lambda: scale * once(s / scale),
        "not multiplied back": lambda: np.tanh(s / cap), "not divided": lambda: cap * np.tanh(s),
        "twice": lambda: once(once(s)),
    }  # fmt: skip
    return chosen(form, CAPS, of)


def cap_slope(model: Model, c: Choices) -> Array | float:
    """Return the derivative of the soft cap as dS is multiplied by it; 1 without a soft cap."""
    cap = model.geometry.softcap
    if cap is None:
        return 1.0
    t = np.tanh(uncapped(model, c) / cap)
    of: dict[str, Callable[[], Array]] = {
        "right": lambda: 1 - t**2, "none": lambda: np.ones_like(t), "of the capped score": lambda: 1 - np.tanh(t) ** 2,
        "not squared": lambda: 1 - t, "capped score not divided": lambda: 1 - (cap * t) ** 2,
    }  # fmt: skip
    return chosen(c["cap_slope"], CAP_SLOPES, of)


def shown(model: Model, mask: Integers) -> Booleans:
    """Return the pattern of visible pairs, where ``mask`` gives the number of the pattern for each pair."""
    if mask.size == 1:
        return model.masks[int(mask.flat[0])]
    numbers = np.unique(mask)
    pattern = model.masks[numbers[0]]
    for number in numbers[1:]:
        pattern = np.where(mask == number, model.masks[number], pattern)
    return pattern


def drop_factors(model: Model, c: Choices) -> Array | float:
    """Return the factors of dropout on the weights of pairs; 1 without dropout."""
    if model.geometry.dropout is None or model.pairs.keep is None:
        return 1.0
    more = 1 / (1 - model.geometry.dropout[0])
    mask, next_keep = more * model.entries(model.pairs.keep, c, "drop"), model.next_keep
    of: dict[str, Callable[[], Array]] = {
        "right": lambda: mask, "none": lambda: np.ones_like(mask), "inverted": lambda: more - mask,
    }  # fmt: skip
    if next_keep is not None:
        of["next seed"] = lambda: more * model.entries(next_keep, c, "drop")
    return c["drop_times"] * chosen(c["drop"], DROPS, of)


def for_values(model: Model, c: Choices, p: Array, m: Array, l: Array) -> Array:
    """Return p as the product with v or dy uses it, with another mask where ``value_mask`` selects one."""
    if (c["value_mask"] < 0).all():
        return p
    free = scores_of_pairs(
        model,
        Choices(
            {**c.of, "mask": np.where(c["value_mask"] < 0, c["mask"], c["value_mask"])},
        ),
    )
    return np.exp(free - finite_shift(m)[..., None]) * c["count"] / nonzero(l)[..., None]
