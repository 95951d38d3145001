"""Merge a block's result into the running one: correctly, or by one of the mistakes that a readout tries.

A *readout* finds out from results what a kernel computed for each pair of tokens. In the names of mistakes, m is the
maximum of a row's scores, l the sum of their exponentials relative to m, and o the output.
"""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.merge_formulas import LN2, LSES_MERGED, TOO, WEIGHTS
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans
from ringspec.spec.online_softmax import finite_shift

OTHER_TOKENS = "weights of other rows"  # the only merge of a row that depends on other rows
EMPTY, INFINITE = "empty with lse 0", "empty with infinite lse"
ZERO_NOT_NAN = "empty with infinite lse, 0 for NaN"
HIDDEN_TOO = ", and blocks without a visible pair are merged too"  # after the words of a mistake
# Wrong merges by name, with the words that complete "In the forward pass, ...".
WRONG = {
    **{name: words for name, (words, _) in WEIGHTS.items()},
    **{
        name: f"lse becomes {words} (the weights of o are correct)"
        for name, (words, _) in LSES_MERGED.items()
    },
    **{
        f"{name}{TOO}": f"lse becomes {words}, and the weights are relative to it"
        for name, (words, _) in LSES_MERGED.items()
    },
    "lse added": "the lse values of the blocks are added",
    "running not rescaled": "the running o and l are not rescaled when the maximum rises",
    "o not rescaled": "the running o is not rescaled when the maximum rises (l is)",
    "l not rescaled": "the running l is not rescaled when the maximum rises (o is)",
    "block not rescaled": "the new block's o and l are not rescaled to the common maximum",
    "o of block not rescaled": "the new block's o is not rescaled to the common maximum (l is)",
    "l of block not rescaled": "the new block's l is not rescaled to the common maximum (o is)",
    "weights swapped": "the two weights of the merge are swapped",
    "o weights swapped": "the two weights of the merge are swapped for o (lse is correct)",
    "replaced": "the new block's result replaces the running result",
    "last wins": "the new block's o and l replace the running ones, and the maximum is the larger one",
    "first wins": "the merge keeps the earlier result and drops the new block",
    "o last wins": "the new block's o replaces the running o (l is correct)",
    "lse last wins": "the new block's l replaces the running l (o is accumulated)",
    "l not added": "the new block's l is not added to the running l (o is)",
    "o not added": "the new block's o is not added to the running o (l is)",
    "running rescaled twice": "the running o and l are rescaled twice when the maximum rises",
    "running rescaled inversely": "the running o and l are multiplied by exp(m_new - m_old), not exp(m_old - m_new)",
    "o rescaled inversely": "the running o is multiplied by exp(m_new - m_old), not exp(m_old - m_new) (l is correct)",
    "o rescaled twice": "the running o is rescaled twice when the maximum rises (l is once)",
    "block rescaled twice": "the new block's o and l are rescaled twice to the common maximum",
    "o of block rescaled twice": "the new block's o is rescaled twice to the common maximum (l is once)",
    "l overwritten, o kept": "the new block's l replaces the running l, and its o is dropped",
    "equal weights": "the merge averages all blocks so far with equal weights",
    "exp(lse ln 2)": "the merge weights blocks by 2**lse, where lse is natural",
    "exp(lse / ln 2)": "the merge weights blocks by exp(lse), where lse is in base 2",
    "rescaled by l too": "the running o is multiplied by its l once more",
    "normalised as sum": "the block's o, already divided by its l, is merged as if it were not",
    "divided at every merge": "o is divided by the running l after every block, and again at the end",
    "neither rescaled": "neither the running o and l nor the new block's are rescaled to the common maximum",
    "neither o rescaled": "neither the running o nor the new block's is rescaled to the common maximum (l is)",
    "neither l rescaled": "neither the running l nor the new block's is rescaled to the common maximum (o is)",
    "sum rescaled": "o and l are rescaled after the new block is added to them, not before",
    "sum of o rescaled": "o is rescaled after the new block is added to it, not before (l is correct)",
    "sum of l rescaled": "l is rescaled after the new block is added to it, not before (o is correct)",
    "rescaled by block's maximum": "the running o and l are multiplied by exp(m_old - m_block), not exp(m_old - m_new)",
    "o by block's factor": "the running o is rescaled by the new block's factor, exp(m_block - m_new), not exp(m_old - m_new) (l is correct)",
    "running by block's factor": "the running o and l are rescaled by the new block's factor, exp(m_block - m_new), not exp(m_old - m_new)",
    "block by old maximum": "the new block's o and l are multiplied by exp(m_block - m_old), not exp(m_block - m_new)",
    "running, scale lost": "the running o and l are rescaled by the exponential of the unscaled difference of the maxima",
    "running o, scale lost": "the running o is rescaled by the exponential of the unscaled difference of the maxima (l is correct)",
    "both, scale lost": "o and l of both are rescaled by the exponential of the unscaled difference of the maxima",
    "both, scaled twice": "o and l of both are rescaled by the exponential of a difference of the maxima that is scaled twice",
    "running, scaled twice": "the running o and l are rescaled by the exponential of a difference of the maxima that is scaled twice",
    "running in base 2": "the running o and l are rescaled by a power of 2, not of e",
    "both in base 2": "o and l of both are rescaled by a power of 2, not of e",
    "running in base 2, scale lost": "the running o and l are rescaled by 2 to the power of the unscaled difference of the maxima",
    "running in base e": "the running o and l are rescaled by a power of e although the maxima are in base 2",
    "both in base e": "o and l of both are rescaled by a power of e although the maxima are in base 2",
    "only a larger lse": "the new block is merged only where its lse is larger than the running one",
    "only a larger maximum": "the new block is merged only where its maximum is larger than the running one",
    "larger lse wins": "the result with the larger lse replaces the other one",
    "o by the first head's factor": "the running o is rescaled by the factor of the first query head of each key head (l is correct)",
    "running by the first head's factor": "the running o and l are rescaled by the factor of the first query head of each key head",
    "o by head 0's factor": "the running o is rescaled by the factor of head 0 (l is correct)",
    "running by head 0's factor": "the running o and l are rescaled by the factor of head 0",
    OTHER_TOKENS: "the weights of a merge are read in the order (token, head) (lse is correct)",
    "weights of first head": "the weights of a merge are those of the first query head of each key head (lse is correct)",
    "weights of head 0": "the weights of a merge are those of head 0 (lse is correct)",
    "l of the group": "the new block's l is summed over the query heads of a key head",
    "maximum not updated": "the running maximum stays the old one (o and l are rescaled to the common one)",
    "maximum of block": "the running maximum becomes that of the new block (o and l are rescaled to the common one)",
    EMPTY: "where a row sees no key of the new block, the block's lse is taken for 0",
    INFINITE: "where a row sees no key of the new block, the merge gets +infinity as the block's lse (o becomes 0)",
}
# The last is no mistake of a kernel: gradients where NaN of a forward pass is left out are computed with it.
MERGES = ("right", *WRONG, ZERO_NOT_NAN)
# Mistakes that are tried in merging tiles of keys, too.
IN_TILES = (
    "running not rescaled", "o not rescaled", "l not rescaled", "block not rescaled", "o of block not rescaled",
    "neither rescaled", "neither o rescaled", "neither l rescaled", "replaced", "last wins", "o last wins", "lse last wins",
    "running rescaled inversely", "o rescaled inversely", "running rescaled twice", "o rescaled twice", "sum rescaled",
    "sum of o rescaled", "running, scale lost", "running o, scale lost", "running in base 2", "running in base 2, scale lost",
    "running in base e", "o by the first head's factor", "running by the first head's factor", "equal weights", "l of the group",
    "maximum not updated", "maximum of block",
)  # fmt: skip
# Mistakes that make the result wrong from the first block on.
AT_FIRST = (
    "normalised as sum", "block not rescaled", "o of block not rescaled", "l of block not rescaled",
    "divided at every merge", OTHER_TOKENS, "l of the group",
    EMPTY, INFINITE, ZERO_NOT_NAN,
)  # fmt: skip
# Mistakes that raise the correct rescaling factors to a wrong power. Which factors: those of the 'running' o and l, of the
# running 'o' alone, or of 'both' results. Then the power; 'scale lost' and 'scaled twice' add a power of the scale to it.
POWERS = {
    "running, scale lost": ("running", 1.0), "running o, scale lost": ("o", 1.0), "both, scale lost": ("both", 1.0),
    "both, scaled twice": ("both", 1.0), "running, scaled twice": ("running", 1.0), "running in base 2": ("running", LN2),
    "both in base 2": ("both", LN2), "running in base 2, scale lost": ("running", LN2), "running in base e": ("running", 1 / LN2), "both in base e": ("both", 1 / LN2),
}  # fmt: skip

# Mistakes in the factors of a merge: on the running o, on the block's o, on the running l, and on the block's l. The correct
# factors are c, e, c and e: c rescales the running state to the common maximum, and e the block (:func:`factor`).
FACTORS = {
    "running not rescaled": ("1", "e", "1", "e"),
    "o not rescaled": ("1", "e", "c", "e"),
    "l not rescaled": ("c", "e", "1", "e"),
    "block not rescaled": ("c", "1", "c", "1"),
    "o of block not rescaled": ("c", "1", "c", "e"),
    "l of block not rescaled": ("c", "e", "c", "1"),
    "weights swapped": ("e", "c", "e", "c"),
    "o weights swapped": ("e", "c", "c", "e"),
    "replaced": ("0", "e", "0", "e"),
    "last wins": ("0", "1", "0", "1"),
    "first wins": ("c", "0", "c", "0"),
    "o last wins": ("0", "e", "c", "e"),
    "lse last wins": ("c", "e", "0", "e"),
    "l not added": ("c", "e", "c", "0"),
    "o not added": ("c", "0", "c", "e"),
    "running rescaled twice": ("c c", "e", "c c", "e"),
    "running rescaled inversely": ("1/c", "e", "1/c", "e"),
    "o rescaled inversely": ("1/c", "e", "c", "e"),
    "o rescaled twice": ("c c", "e", "c", "e"),
    "block rescaled twice": ("c", "e e", "c", "e e"),
    "o of block rescaled twice": ("c", "e e", "c", "e"),
    "l overwritten, o kept": ("c", "0", "0", "e"),
    "neither rescaled": ("1", "1", "1", "1"),
    "neither o rescaled": ("1", "1", "c", "e"),
    "neither l rescaled": ("c", "e", "1", "1"),
    "sum rescaled": ("c", "e c", "c", "e c"),
    "sum of o rescaled": ("c", "e c", "c", "e"),
    "sum of l rescaled": ("c", "e", "c", "e c"),
    "rescaled by block's maximum": ("c/e", "e", "c/e", "e"),
    "o by block's factor": ("e", "e", "c", "e"),
    "running by block's factor": ("e", "e", "e", "e"),
    "block by old maximum": ("c", "e/c", "c", "e/c"),
    "o by the first head's factor": ("c of first head", "e", "c", "e"),
    "o by head 0's factor": ("c of head 0", "e", "c", "e"),
    "running by head 0's factor": ("c of head 0", "e", "c of head 0", "e"),
    "running by the first head's factor": ("c of first head", "e", "c of first head", "e"),
}

# Of these, those in which only the factors of l are wrong: every weight of a row is wrong by the same factor.
OF_L = tuple(name for name, factors in FACTORS.items() if factors[:2] == ("c", "e"))

State = tuple[Array, Array, Array]


def merge(
    kind: str,
    m: Array,
    l: Array,
    omega: Array,
    m_b: Array,
    l_b: Array,
    t: int,
    geometry: Geometry,
) -> State:
    """Return the running state (m, l, omega) after the part with the number ``t`` is merged into it.

    A part is a block, or a tile of its keys. ``m`` and ``l`` [.., h, i] belong to the running state, ``m_b`` and
    ``l_b`` to the part, for query i of head h.
    ``omega`` [part, .., h, i] contains the weight of each part's normalised o in the running o. ``kind`` is 'right' or the name of a mistake in WRONG.
    """
    new_m = np.maximum(m, m_b)
    shift = finite_shift(new_m)
    c, e = np.exp(m - shift), np.exp(m_b - shift)
    if (m == np.inf).any():  # an earlier block had an infinite lse
        c, e = np.where(m == np.inf, 1.0, c), np.where(m == np.inf, 0.0, e)
    omega = omega.copy()

    def weighed(c_o: Array, e_o: Array, c_l: Array, e_l: Array) -> State:
        omega[:t] *= c_o
        omega[t] = e_o * l_b
        return new_m, c_l * l + e_l * l_b, omega

    if kind == EMPTY:
        empty = l_b == 0
        found = merge(
            "right", m, l, omega, np.where(empty, 0.0, m_b), np.where(empty, 1.0, l_b), t, geometry
        )
        found[2][t] = np.where(empty, 0.0, found[2][t])
        return found
    if kind in (INFINITE, ZERO_NOT_NAN):
        return merged_as_infinite(m, l, omega, m_b, l_b, t, geometry, kind == INFINITE)
    if kind == "right":
        return weighed(c, e, c, e)
    if kind == "l of the group":
        omega[:t] *= c
        omega[t] = e * l_b
        return new_m, c * l + over_group(e * l_b, geometry.group), omega
    if kind in FACTORS:
        c_o, e_o, c_l, e_l = (factor(x, c, e, geometry.group) for x in FACTORS[kind])
        return weighed(c_o, e_o, c_l, e_l)
    if kind in ("maximum not updated", "maximum of block"):
        _, l, omega = weighed(c, e, c, e)
        return (m if kind == "maximum not updated" else m_b), l, omega
    if kind in POWERS:
        of, power = POWERS[kind]
        exponent = power * geometry.scale ** {"lost": -1, "twice": 1}.get(kind.split()[-1], 0)
        c_wrong = c**exponent
        e_wrong = e**exponent if of == "both" else e
        return weighed(c_wrong, e_wrong, *((c, e) if of == "o" else (c_wrong, e_wrong)))
    if kind == "divided at every merge":
        new_l = c * l + e * l_b
        omega[:t] *= c
        omega[t] = e * l_b
        return new_m, new_l, omega / np.where(new_l == 0, 1.0, new_l)
    if kind == "normalised as sum":
        omega[:t] *= c
        omega[t] = e
        return new_m, c * l + e * l_b, omega
    return normalised(kind, m, l, omega, m_b, l_b, t, geometry.group)


def merged_as_infinite(
    m: Array,
    l: Array,
    omega: Array,
    m_b: Array,
    l_b: Array,
    t: int,
    geometry: Geometry,
    nan: bool,
) -> State:
    """Merge as :func:`merge` does, but with lse = +infinity for a block of which a row sees no key, as flash-attn returns it.

    Such a block gets the whole weight, and its o is 0; later blocks get no weight. ``nan``: a second one gives NaN.
    """
    empty, infinite = l_b == 0, ~(m < np.inf)
    finite = np.where(infinite, 0.0, m)
    new_m, new_l, weights = merge("right", finite, l, omega, m_b, l_b, t, geometry)
    second = infinite & (empty | np.isnan(m)) & nan
    lost, either = np.where(second, np.nan, np.inf), empty | infinite
    weights = np.where(either, np.where(second, np.nan, 0.0), weights)
    return np.where(either, lost, new_m), np.where(either, 1.0, new_l), weights


def depends_on_empty(name: str, geometry: Geometry) -> bool:
    """Return whether a mistake gives another result than a correct merge where one of the two parts has no visible key."""
    rows = (geometry.heads, geometry.slots)
    full, empty = (np.zeros(rows), np.full(rows, 2.0)), (np.full(rows, -np.inf), np.zeros(rows))
    for (m, l), (m_b, l_b) in ((full, empty), (empty, full)):
        omega = np.stack([l, np.zeros(rows)])
        with np.errstate(all="ignore"):
            both = [merge(x, m, l, omega, m_b, l_b, 1, geometry) for x in ("right", name)]
            (lse, weights), (other_lse, other_weights) = (
                (m + np.log(l), omega / np.where(l == 0, 1.0, l)) for m, l, omega in both
            )
        if not (
            np.allclose(lse, other_lse, equal_nan=True)
            and np.allclose(weights, other_weights, equal_nan=True)
        ):
            return True
    return False


def normalised(
    kind: str, m: Array, l: Array, omega: Array, m_b: Array, l_b: Array, t: int, group: int
) -> State:
    """Merge as :func:`merge` does, but by a mistake that a merge of normalised results by their lse can make.

    The returned state has the lse in place of m, and 1 in place of l. ``omega`` is changed in place.
    """
    one = np.ones_like(l)
    safe_l, safe_b = np.where(l == 0, 1.0, l), np.where(l_b == 0, 1.0, l_b)
    with np.errstate(divide="ignore"):
        lse, lse_b = m + np.log(safe_l), m_b + np.log(safe_b)
    new = np.logaddexp(lse, lse_b)
    omega[:t] /= safe_l

    def mixed(w: Array, w_b: Array, value: Array = new) -> State:
        omega[:t] *= w
        omega[t] = w_b
        return value, np.ones_like(l), omega

    if kind in ("weights of first head", "weights of head 0"):
        of = group if kind == "weights of first head" else lse.shape[-2]
        w, w_b = (of_first_head(np.exp(x - new), of) for x in (lse, lse_b))
        return mixed(w, w_b)
    if kind == OTHER_TOKENS:
        seen = (l_b != 0).any(axis=-2)
        return mixed(reordered(np.exp(lse - new), seen), reordered(np.exp(lse_b - new), seen))
    if kind == "equal weights":
        return mixed(t * one / (t + 1), one / (t + 1))
    if kind in WEIGHTS:
        return mixed(*WEIGHTS[kind][1](lse, lse_b, new))
    plain = kind.removesuffix(TOO)
    if plain in LSES_MERGED:
        merged = LSES_MERGED[plain][1](lse, lse_b)
        used = new if kind == plain else merged
        return mixed(np.exp(lse - used), np.exp(lse_b - used), merged)
    if kind in ("only a larger lse", "only a larger maximum", "larger lse wins"):
        larger = m_b > m if kind == "only a larger maximum" else lse_b > lse
        w = np.where(larger, 0.0 if kind == "larger lse wins" else np.exp(lse - new), one)
        w_b = np.where(larger, one if kind == "larger lse wins" else np.exp(lse_b - new), 0.0)
        top = lse_b if kind == "larger lse wins" else new
        return mixed(w, w_b, np.where(larger, top, lse))
    if kind in ("exp(lse ln 2)", "exp(lse / ln 2)"):
        power = LN2 if kind == "exp(lse ln 2)" else 1 / LN2
        wrong = np.logaddexp(power * lse, power * lse_b)
        return mixed(np.exp(power * lse - wrong), np.exp(power * lse_b - wrong), wrong / power)
    assert kind == "rescaled by l too", kind
    return mixed(np.exp(lse - new) * l, np.exp(lse_b - new))


def factor(name: str, c: Array, e: Array, group: int) -> Array:
    """Return a factor of a merge by its name in FACTORS; ``c`` and ``e`` are the correct ones."""
    if name in ("0", "1"):
        return np.full_like(c, float(name))
    if name in ("c of first head", "c of head 0"):
        return of_first_head(c, group if name == "c of first head" else c.shape[-2])
    if name == "1/c":
        return np.where(c > 0, 1 / np.where(c > 0, c, 1.0), 0.0)
    of = {"c": c, "e": e}
    if name in of:
        return of[name]
    x, y = of[name[0]], of[name[-1]]
    return x / y if "/" in name else x * y


def of_first_head(x: Array, group: int) -> Array:
    """Return [.., h, i] in which all query heads of a key head have the values of the first of them."""
    return x[..., np.arange(x.shape[-2]) // group * group, :]


def over_group(x: Array, group: int, axis: int = -2) -> Array:
    """Return ``x`` with the sum over the query heads of each key head in all of these; ``axis``: that of the heads."""
    heads = np.moveaxis(x, axis, 0)
    sums = heads.reshape(-1, group, *heads.shape[1:]).sum(axis=1)
    return np.moveaxis(np.repeat(sums, group, axis=0), 0, axis)


def reordered(x: Array, seen: Booleans) -> Array:
    """Return ``x`` [.., h, i] as a kernel reads it that takes the order in memory for (token, head).

    ``seen`` [.., i]: the tokens that the kernel merges; it has an array of these alone.
    """
    found = x.copy()
    for at in np.ndindex(*seen.shape[:-1]):
        tokens = np.flatnonzero(seen[at])
        h, i = np.indices((x.shape[-2], len(tokens)))
        if len(tokens):
            head, slot = np.divmod(i * x.shape[-2] + h, len(tokens))
            found[at][:, tokens] = x[at][head, tokens[slot]]
    return found
