"""The table of rules. Each rule is a sentence of the specification that a kernel can break.

``FILES`` maps the prefix of a rule's id to the file that computes the rule. ``ELSEWHERE`` lists the rules that are
computed in another file or in several. The id of a rule appears in the docstring or comment of the code that states the
rule, in the mark of each test of the rule (``@pytest.mark.rule("RING-1")``) and in golden cases. The meaning of an id
never changes.

>>> rule("SOFT-2").module
'spec.online_softmax'
>>> rule("FWD-5").modules
('spec.dense_forward', 'spec.online_softmax')
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.errors import OptionError, nearest

FILES = {
    "MASK": "spec.masks",
    "DROP": "spec.dropout",
    "FWD": "spec.dense_forward",
    "BWD": "spec.dense_backward",
    "SOFT": "spec.online_softmax",
    "LAYOUT": "spec.layout",
    "RING": "spec.schedule",
    "CP": "schemes.validator",
    "NUM": "recipes",
}
# The first file is the rule's main one; each of the others computes the rule for its own purpose.
ELSEWHERE = {
    "MASK-5": ("problem.checks", "spec.masks"),
    "MASK-8": ("problem.options", "spec.masks"),
    "FWD-2": ("problem.options", "spec.dense_forward"),
    "FWD-4": ("spec.dense_forward", "spec.online_softmax"),
    "FWD-5": ("spec.dense_forward", "spec.online_softmax"),
    "FWD-6": ("spec.dense_forward", "spec.online_softmax"),
    "FWD-7": ("spec.dense_forward", "spec.online_softmax"),
    "FWD-8": ("spec.dense_forward", "spec.online_softmax"),
    "FWD-9": ("spec.dense_forward", "spec.online_softmax"),
    "BWD-10": ("spec.dense_backward", "spec.block"),
    "BWD-11": ("spec.block",),
    "LAYOUT-5": ("spec.layout", "spec.masks"),
    "RING-2": ("spec.schedule", "rings.validator"),
    "RING-3": ("spec.schedule", "rings.validator"),
    "RING-6": ("spec.schedule", "spec.worker"),
    "RING-7": ("spec.ring_backward", "spec.schedule"),
    "RING-8": ("spec.cp_offset",),
    "RING-9": ("spec.cp_offset",),
    "RING-10": ("spec.cp_offset",),
    "RING-11": ("rings.validator", "rings.schedules", "spec.schedule"),
    "RING-12": ("spec.ring_backward", "rings.ring"),
    "RING-13": ("spec.ring_backward", "rings.ring"),
    "CP-1": ("schemes.collectives", "schemes.parts"),
    "CP-3": ("schemes.numbers",),
    "CP-4": ("schemes.sharding",),
    "CP-5": ("schemes.exchanges",),
    "CP-6": ("schemes.numbers",),
    "NUM-1": ("formats",),
    "NUM-2": ("recipes", "spec.block", "spec.ring_backward"),
    "NUM-3": ("spec.online_softmax", "recipes"),
}


@dataclass(frozen=True)
class Rule:
    """A rule: its ``id``, and one ``sentence`` that says what must hold."""

    id: str
    sentence: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of ringspec that compute the rule, such as 'spec.masks'; the main one first."""
        return ELSEWHERE.get(self.id) or (FILES[self.id.partition("-")[0]],)

    @property
    def module(self) -> str:
        """The main module that computes the rule: the first of ``modules``."""
        return self.modules[0]


SENTENCES = {
    "MASK-1": "Causal: a key is visible iff its position is <= the query's.",
    "MASK-2": "Window: -left <= key - query <= right, both inclusive; None = unbounded side.",
    "MASK-3": "Segments: equal ids, both >= 0; a negative id is padding.",
    "MASK-4": "Bounds: bound_min <= key position < bound_max, half open.",
    "MASK-5": "Packed documents are segments; tokens after the last document are padding.",
    "MASK-6": "A dense mask allows a pair where it is True.",
    "MASK-7": "A bias of -inf hides the pair, even with a soft cap; its dbias is 0.",
    "MASK-8": "Global positions decide masks, not array indices; query i has position i + q_offset unless positions are given.",
    "MASK-9": "A pair is visible iff every condition of the mask allows it.",
    "FWD-1": "z = scale * <q, k> + bias; the scale does not multiply the bias.",
    "FWD-2": "The default scale is the float64 nearest to the real 1/sqrt(D).",
    "FWD-3": "Soft cap: s = softcap * tanh(z / softcap), applied after the bias is added.",
    "FWD-4": "lse is the natural log of the sum of exp(s) over all visible keys.",
    "FWD-5": "Sinks join the denominator only, once per row and never per block.",
    "FWD-6": "o = sum of p * keep / (1 - dropout_p) * v.",
    "FWD-7": "lse and p are those of the row before dropout.",
    "FWD-8": "A row without keys and sinks has o = 0 and lse = -inf, and no NaN.",
    "FWD-9": "A row with sinks alone has o = 0 and their log-sum-exp as lse.",
    "FWD-10": "Query head h uses key/value head h // (H / Hkv).",
    "DROP-1": "The keep mask is Philox4x32-10 of (key position, query position, head, batch) under the seed; it does not depend on layout, ring size or block order.",
    "DROP-2": "An entry is kept iff its word >= floor(dropout_p * 2**32).",
    "DROP-3": "A keep mask that the caller gives replaces the counter-based one.",
    "BWD-1": "delta (dy_o_sum) = <dy, o> with the o of the whole row.",
    "BWD-2": "dp = <dy, v> * keep / (1 - dropout_p).",
    "BWD-3": "ds = p * (dp - delta + dlse).",
    "BWD-4": "With a soft cap dz = ds * (1 - t**2).",
    "BWD-5": "dq = scale * sum over keys of dz k.",
    "BWD-6": "dk = scale * sum over rows and the group's query heads of dz q.",
    "BWD-7": "dv = sum over rows and the group's query heads of p keep / (1 - dropout_p) dy.",
    "BWD-8": "dbias = dz summed over the axes along which bias was broadcast.",
    "BWD-9": "dsink = sum over b, i of exp(sink - lse) * (dlse - delta).",
    "BWD-10": "An empty row contributes no gradient.",
    "BWD-11": "A block's backward uses lse and row_term as given; p is not renormalised.",
    "SOFT-1": "Absorbing and merging rescale l and o by exp(m_old - m_new).",
    "SOFT-2": "Merging two empty states gives the empty state, with lse = -inf, never NaN.",
    "SOFT-3": "Normalised partial results merge with weights exp(lse_n - lse), natural base.",
    "SOFT-4": "Every exponent in a merge is <= 0, so that no difference of the maxima overflows.",
    "LAYOUT-1": "contiguous: worker r holds tokens r*n + slot.",
    "LAYOUT-2": "striped: worker r holds tokens slot*W + r.",
    "LAYOUT-3": "zigzag: worker r holds chunks r and 2W-1-r of 2W.",
    "LAYOUT-4": "zigzag_per_document: zigzag inside each packed document.",
    "LAYOUT-5": "Any table is a layout; a negative entry is a padding slot, which attends to nothing and which nothing attends to.",
    "LAYOUT-6": "unpermute: local rows of a striped sequence become those of the contiguous layout.",
    "LAYOUT-7": "lse in tiles [B, H, 128, S/128]: row i is at [i % 128, i // 128].",
    "LAYOUT-8": "zigzag_padded: worker r holds chunks r and 2W-1-r of the 2W chunks of each document's padded room; slots at and past its number of tokens are padding.",
    "LAYOUT-9": "interleaved: token i of a document is on worker (i // I) mod W, in slot (i // (W I)) I + i mod I of the document.",
    "LAYOUT-10": "interleaved: of n tokens, worker r holds L_r(n) = (n // (W I)) I + clamp(n mod (W I) - r I, 0, I).",
    "LAYOUT-11": "A token's position is its offset in its document plus the document's prefix, whatever its slot.",
    "LAYOUT-12": "A worker's cu_seqlens count its tokens before each document; padding is not counted.",
    "LAYOUT-13": "interleaved, causal: a query at position p sees the first L_r(p + 1) keys of worker r.",
    "RING-1": "After t hops worker r holds the block of owner (r - t) mod W, or (r + t) mod W if r sends to r - 1. With gathered keys it uses the block of owner r - t in step t + 1.",
    "RING-2": "Every (query owner, key owner) pair that is not skipped is computed exactly once.",
    "RING-3": "Each permute is a permutation of all workers.",
    "RING-4": "Accumulators travel with their block, one hop more than inputs, and end at its owner.",
    "RING-5": "Q ring: dq (and dbias) travel with their queries and return to the owner; dk, dv stay.",
    "RING-6": "Positions, segments, bounds and rows of bias, mask and keep travel with the block that they index.",
    "RING-7": "row_term = delta - dlse travels in place of delta and dlse.",
    "RING-8": "contiguous, causal: query i of worker a attends to key j of worker b iff j <= i + a*n_q - b*n_k + q_offset.",
    "RING-9": "striped, causal: query i of worker a attends to key j of worker b iff j <= i + floor((a + q_offset - b) / W).",
    "RING-10": "zigzag, causal: an offset as in RING-8 for each pair of chunks, which are n/2 tokens long.",
    "RING-11": "A pair of blocks may be skipped only if the mask hides all of it.",
    "RING-12": "Each worker's dsinks, and dbias of a bias that all rows share, are partial sums over its own query rows.",
    "RING-13": "The backward of every block uses o and lse of the whole row.",
    "CP-1": "A transfer moves the difference of two shardings along one axis of the mesh; the collective operation follows from it.",
    "CP-2": "At the end, every copy of every home cell has each visible triple (query, query head, key) exactly once.",
    "CP-3": "Partial results of one cell are joined: gradients are added, softmax states are merged.",
    "CP-4": "A rank holds key head h // G of each of its query heads h: key heads are copied by repetition, never tiled.",
    "CP-5": "Text keys are used in one step of the ring; text rows are differentiated at one ring coordinate, and their gradients are added.",
    "CP-6": "The state of a rank without keys is empty, and joining it changes no bit.",
    "NUM-1": "A value is rounded once, to nearest even.",
    "NUM-2": "Partial results are rounded where the recipe says, and nowhere else.",
    "NUM-3": "In a merge, each product and each sum of o is rounded as the recipe says.",
}
RULES = tuple(Rule(id, sentence) for id, sentence in SENTENCES.items())


def rule(which: str) -> Rule:
    """Return the rule with the id ``which``; for an unknown id, raise OptionError, which names the nearest id."""
    for candidate in RULES:
        if candidate.id == which:
            return candidate
    known = [r.id for r in RULES]
    raise OptionError("the id of a rule", repr(which), nearest(which, known), code="unknown-name")
