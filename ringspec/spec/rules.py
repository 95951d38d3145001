"""The table of rules: one for each sentence of the specification that a kernel can break.

A rule's id is written in the docstring or comment of the code that states it, on the tests that
hold it (``@pytest.mark.rule("RING-1")``) and in golden cases. Ids never change their meaning.

>>> rule("SOFT-2").module
'spec.online_softmax'
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.errors import UnknownNameError, nearest


@dataclass(frozen=True)
class Rule:
    """``id``, what must hold in one ``sentence``, and the ``module`` of ringspec that states it."""

    id: str
    sentence: str
    module: str


RULES: tuple[Rule, ...] = (
    Rule("MASK-1", "Causal: a key is visible iff its position is <= the query's.", "spec.masks"),
    Rule(
        "MASK-2",
        "Window: -left <= key - query <= right, both inclusive; None = unbounded side.",
        "spec.masks",
    ),
    Rule("MASK-3", "Segments: equal ids, both >= 0; a negative id is padding.", "spec.masks"),
    Rule("MASK-4", "Bounds: bound_min <= key position < bound_max, half open.", "spec.masks"),
    Rule(
        "MASK-5",
        "Packed documents are segments; tokens behind the last document are padding.",
        "problem.checks",
    ),
    Rule("MASK-6", "A dense mask lets a pair through where it is True.", "spec.masks"),
    Rule(
        "MASK-7",
        "A bias of -inf is a mask term, before the soft cap; its dbias is 0.",
        "spec.masks",
    ),
    Rule(
        "MASK-8",
        "Global positions decide masks, not array indices; query i is at i + q_offset.",
        "problem.options",
    ),
    Rule("MASK-9", "A pair is visible iff every term of the mask allows it.", "spec.masks"),
    Rule(
        "FWD-1", "z = scale * <q, k> + bias; the scale does not touch the bias.", "spec.definition"
    ),
    Rule(
        "FWD-2",
        "The default scale is the float64 nearest to the real 1/sqrt(D).",
        "problem.options",
    ),
    Rule("FWD-3", "Soft cap: s = softcap * tanh(z / softcap), after the bias.", "spec.definition"),
    Rule(
        "FWD-4",
        "lse is the natural log of the sum of exp(s) over all visible keys.",
        "spec.definition",
    ),
    Rule(
        "FWD-5",
        "Sinks join the denominator only, once per row and never per block.",
        "spec.online_softmax",
    ),
    Rule("FWD-6", "o = sum of p * keep / (1 - dropout_p) * v.", "spec.definition"),
    Rule("FWD-7", "lse and p are those of the row before dropout.", "spec.online_softmax"),
    Rule(
        "FWD-8", "A row without keys and sinks: o = 0, lse = -inf, no NaN.", "spec.online_softmax"
    ),
    Rule("FWD-9", "A row with sinks alone: o = 0, lse = their log-sum-exp.", "spec.online_softmax"),
    Rule("FWD-10", "Query head h uses key/value head h // (H / Hkv).", "spec.definition"),
    Rule(
        "DROP-1",
        "The keep mask is Philox4x32-10 of (key position, query position, head, batch) under the "
        "seed, whatever layout, ring size and block order.",
        "spec.dropout",
    ),
    Rule("DROP-2", "An entry is kept iff its word >= floor(dropout_p * 2**32).", "spec.dropout"),
    Rule("DROP-3", "A keep mask that the caller gives is used as it is.", "spec.dropout"),
    Rule("BWD-1", "delta (dy_o_sum) = <dy, o> with the o of the whole row.", "spec.definition"),
    Rule("BWD-2", "dp = <dy, v> * keep / (1 - dropout_p).", "spec.definition"),
    Rule("BWD-3", "ds = p * (dp - delta + dlse).", "spec.definition"),
    Rule("BWD-4", "With a soft cap dz = ds * (1 - t**2).", "spec.definition"),
    Rule("BWD-5", "dq = scale * sum over keys of dz k.", "spec.definition"),
    Rule(
        "BWD-6",
        "dk = scale * sum over rows and the group's query heads of dz q.",
        "spec.definition",
    ),
    Rule(
        "BWD-7",
        "dv = sum over rows and the group's query heads of p keep/(1-p) dy.",
        "spec.definition",
    ),
    Rule(
        "BWD-8",
        "dbias = dz summed over the axes along which bias was broadcast.",
        "spec.definition",
    ),
    Rule("BWD-9", "dsink = sum over b, i of exp(sink - lse) * (dlse - delta).", "spec.definition"),
    Rule("BWD-10", "An empty row sends no gradient anywhere.", "spec.definition"),
    Rule(
        "BWD-11",
        "A block's backward uses lse and delta as given; p is not renormalised.",
        "spec.definition",
    ),
    Rule(
        "SOFT-1",
        "Absorbing and merging rescale l and o by exp(m_old - m_new).",
        "spec.online_softmax",
    ),
    Rule(
        "SOFT-2",
        "Merging two empty states gives the empty state, lse = -inf, never NaN.",
        "spec.online_softmax",
    ),
    Rule(
        "SOFT-3",
        "Normalised partials merge with weights exp(lse_n - lse), natural base.",
        "spec.online_softmax",
    ),
    Rule(
        "SOFT-4",
        "Every exponent in a merge is <= 0: no overflow at any gap.",
        "spec.online_softmax",
    ),
    Rule("LAYOUT-1", "contiguous: worker r holds tokens r*n + t.", "spec.layout"),
    Rule("LAYOUT-2", "striped: worker r holds tokens t*W + r.", "spec.layout"),
    Rule("LAYOUT-3", "zigzag: worker r holds chunks r and 2W-1-r of 2W.", "spec.layout"),
    Rule("LAYOUT-4", "zigzag_per_document: zigzag inside each packed document.", "spec.layout"),
    Rule(
        "LAYOUT-5",
        "A layout is any table; a negative entry is padding and sees nothing.",
        "spec.masks",
    ),
    Rule(
        "LAYOUT-6", "unpermute: local rows of a striped sequence become contiguous.", "spec.layout"
    ),
    Rule("LAYOUT-7", "LSE tiles [B, H, 128, S/128]: row t at [t % 128, t // 128].", "spec.layout"),
    Rule("RING-1", "At step t worker r holds the block of owner (r - t) mod W.", "spec.schedule"),
    Rule("RING-2", "Every (query owner, key owner) pair meets exactly once.", "rings.validator"),
    Rule("RING-3", "Each permute is a permutation of all workers.", "rings.validator"),
    Rule(
        "RING-4",
        "Accumulators travel with their block, one hop more than inputs, and end at its owner.",
        "spec.schedule",
    ),
    Rule("RING-5", "Q ring: dq (and dbias) follow their Q home; dk, dv stay.", "spec.schedule"),
    Rule(
        "RING-6",
        "Positions, segments, bounds and bias rows travel with the block that they index.",
        "spec.worker",
    ),
    Rule("RING-7", "With dlse, dy_o_sum - dlse travels in place of dy_o_sum.", "spec.backward"),
    Rule("RING-8", "contiguous: visible iff j <= i + a*n_q - b*n_k + q_offset.", "spec.schedule"),
    Rule("RING-9", "striped: visible iff j <= i + floor((a + q_offset - b) / W).", "spec.schedule"),
    Rule("RING-10", "zigzag: one such offset for each pair of chunks.", "spec.schedule"),
    Rule("RING-11", "A pair may be skipped only if the mask hides it wholly.", "rings.validator"),
    Rule(
        "RING-12",
        "Each worker's dsinks and dbias are partial sums over its own query rows.",
        "spec.backward",
    ),
    Rule("RING-13", "The backward of every block uses o and lse of the whole row.", "rings.ring"),
    Rule("NUM-1", "A value is rounded once, to nearest even.", "formats"),
    Rule(
        "NUM-2", "Partial results are rounded where the recipe says, and nowhere else.", "recipes"
    ),
    Rule(
        "NUM-3",
        "A merge rounds each product and each sum as the recipe says.",
        "spec.online_softmax",
    ),
)


def rule(which: str) -> Rule:
    """The rule whose id is ``which``; UnknownNameError, with the nearest id, for another."""
    for candidate in RULES:
        if candidate.id == which:
            return candidate
    known = [r.id for r in RULES]
    raise UnknownNameError("the id of a rule", repr(which), nearest(which, known))
