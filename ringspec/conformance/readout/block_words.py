"""Sentences about targets without a ring: single blocks, and dense kernels.

The *target* is the implementation under test. Explanations are found in a ring, whose words are *worker*, *step* and
*visitor*. A block is read as part of a small ring, and a dense kernel as a ring of one worker. The authors of such
kernels do not know these words, so :func:`reworded` replaces them.

The queries and keys of a ring of blocks lie in *parts*, one for each worker. A block has the queries of one part and
the keys of one part.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ringspec.conformance.readout.conclusion import in_other_words
from ringspec.conformance.readout.faults import hints
from ringspec.conformance.readout.reading import Named, Reading

RING, BLOCK, DENSE, GROUPS, HEADS = "ring", "block", "dense", "groups", "heads"
Rules = tuple[tuple[str, str], ...]

# In this order: the first rules are about a longer text. The texts are regular expressions.
BOTH: Rules = (
    (r"for 1 workers with (\d+) tokens each", r"for \1 tokens"),
    (r" in all (blocks|workers)\b", ""),
    (r"the block is not computed", "the scores are not computed"),
    (r"the block is counted", "each pair is counted"),
    (r"\(slots of a worker, from 0\)", "(counted from 0)"),
    (r", and blocks without a visible pair are merged too", ""),
    (r"the new block", "the new tile"),
    (r"merge weights blocks by", "merge weights tiles by"),
    (r"averages all blocks so far", "averages all tiles so far"),
    (r"lse values of the blocks", "lse values of the tiles"),
    (r" of all blocks,", ","),
    (r" within a block,", ","),
    (r"\b(lse|m)_block\b", r"\1_tile"),
    (r"\bslot numbers\b", "token numbers"),
    (r"\bslot\b", "token"),
    (r"\bslots\b", "tokens"),
)
OF_GROUPS: Rules = ((r"\bworker(s?)\b", r"group\1"),)
OF_HEADS: Rules = (
    (r"documents are ignored", "queries also see the keys of other groups of heads, as if the tokens of all groups were one sequence"),
    (r"(?<=pass, )no pair is masked", "queries also see the keys of other groups of heads"),
    (r"\bworker(s?)\b", r"group\1 of heads"),
)  # fmt: skip
OF_BLOCKS: Rules = (
    (r"in the blocks of a worker's own keys \(step 0\)", "in blocks with queries and keys of the same part"),
    (r"\bfrom step 1 on\b", "in blocks with queries and keys of different parts"),
    (r"in all but the last step\b", "except in blocks with the keys of the next part (part 0 is next to the last)"),
    (r"(in the last step|in step 2|from step 2 on)\b", "in blocks with the keys of the next part (part 0 is next to the last)"),
    (r"(in step 1|in odd-numbered steps)\b", "in blocks with the keys of the previous part (the last is previous to part 0)"),
    (r"in the blocks \(queries of worker, keys of worker\)", "in the blocks (part of queries, part of keys)"),
    (r"the blocks \(queries of worker, keys of worker\)", "the blocks (part of queries, part of keys)"),
    (r"\bon worker (\d)", r"for queries of part \1"),
    (r"\bon all workers but (\d)", r"for queries of all parts but \1"),
    (r"\bon odd-numbered workers", "for queries of odd-numbered parts"),
    (r"of earlier workers and of the worker itself", "of earlier parts and of the queries' own part"),
    (r"of later workers and of the worker itself", "of later parts and of the queries' own part"),
    (r"for the (second|first) half of a worker's", r"for the \1 half of a block's"),
    (r"(quer(y|ies)|keys?) of a worker\b(?!')", r"\1 of a block"),
    (r"token numbers within a worker", "token numbers within the block"),
    (r"\bnot global positions", "not positions"),
    (r"the previous step's visitor", "the next part"),
    (r"the next step's visitor", "the previous part"),
    (r"the worker that computes", "the queries' part"),
    (r"the visitor in a ring of the opposite direction", "the part at the same distance on the other side"),
    (r"the visitor two steps earlier", "the part after the next"),
    (r"the visitor two steps later", "the part before the previous"),
    (r"the visitor of step 1", "the part before the queries' own"),
    (r"the visitor in a chain that is not closed \(its first worker keeps what it has\)", "the part at this distance, but at least part 0"),
    (r"dk and dv travel in this chain, too", "dk and dv are added to those of the same parts"),
    (r"the worker whose number equals the step", "the part whose number is the distance of the two parts"),
    (r"are exchanged at each hop", "are exchanged in every second call"),
    (r"each hop adds the arriving (.+?) to what the worker has already sent on", r"\1 of earlier calls are added again in each call"),
    (r"the accumulators pass a fully masked block", "a fully masked block is called"),
    (r"one step (late|early)", r"one call \1"),
    (r"without the last hop: a worker returns those of another block", "for another part"),
    (r"the visitor\b", "the keys' part"),
    (r"every second step before", "every second call before"),
    (r"\bsteps\b", "calls"),
    (r"\bstep\b", "call"),
    (r"\bworker's\b", "part's"),
    (r"\bworkers\b", "parts"),
    (r"\bworker\b", "part"),
)  # fmt: skip
OF_ONE: Rules = (
    (r"dk is returned as dk \+ dv, and dv as the dk \+ dv of the next worker", "dk and dv are both returned as dk + dv"),
    (r"half of a worker's (queries|keys)", r"half of the \1"),
    (r" of a worker\b(?!')", ""),
    (r"each block's mean over its keys", "the mean over the keys"),
    (r"the block's result", "the result"),
    (r"within half a block", "within half of the tokens"),
    (r"half of a block's queries", "half of the queries"),
    (r"a quarter of a block's queries", "a quarter of the queries"),
    (r"half of its keys", "half of the keys"),
    (r"a quarter of its keys", "a quarter of the keys"),
    (r" of a block\b| (of|in) each block\b", ""),
    (r"over (only )?the block\b", "over the row"),
    (r"<dp, p> of the block,", "<dp, p>,"),
    (r"of the blocks up to this one", "so far"),
    (r"the (last|first) block", r"the \1 tile"),
    (r"\b(a|each|the) block's", "the"),
    (r" on worker 0\b", ""),
)  # fmt: skip


HINTS = {
    hints.MASKS: "look at where the mask gets the positions of queries and keys",
    hints.SOURCES: "look at which queries, keys and values a tile loads",
    hints.LOOP: "look at the bounds of the loop over tiles and at the condition that skips a tile",
    hints.ORDER: "look at where queries or keys are split, ordered and joined",
    hints.MERGING: "look at where a tile of keys is merged into the running o, maximum and sum",
    hints.ENDING: "look at what happens to o and lse after the last tile, before they are returned or saved",
    hints.STATISTICS: "look at which lse and delta the backward pass uses, in which base and with which order of axes",
    **dict.fromkeys(
        (hints.ADDING, hints.ROUTES),
        "look at which rows of dq, dk and dv a tile adds to, and where these are cleared",
    ),
}


HINT_OF_HEADS = "look at what is still sent between workers, or still merged, after the exchange of heads for tokens"

# What the title of a known bug says only about a ring.
OF_A_RING = re.compile(
    r"\b(workers?|rings?|steps?|hops?|visit\w*|travel\w*|owners?|sen[dt]|merged?)\b"
)


def without_ring(reading: Reading) -> Reading:
    """Leave out the sets of faults that one block cannot have, such as a wrong merge, if others explain as much.

    A block that is read alone is not merged with any other. Tiles of keys are merged inside it.
    """
    passes = [
        one and dataclasses.replace(one, sets=of_one_block(one.sets) or one.sets)
        for one in (reading.forward, reading.backward)
    ]
    return dataclasses.replace(reading, forward=passes[0], backward=passes[1])


def of_one_block(sets: Sequence[tuple[Named, ...]]) -> tuple[tuple[Named, ...], ...]:
    return tuple(
        faults
        for faults in sets
        if all(x.hint != hints.MERGING or x.kind.startswith("between tiles") for x in faults)
    )


def hint_without_ring(hint: str, made_of: str) -> str:
    """Return a hint of :mod:`ringspec.conformance.readout.faults.hints` for a target of another kind; 'ring' changes nothing."""
    if made_of == HEADS:
        return hint and HINT_OF_HEADS
    return hint if made_of in (RING, GROUPS) else HINTS.get(hint, hint)


def reworded(sentence: str, made_of: str) -> str:
    """Say a sentence about a ring in the words for targets of another kind.

    ``made_of``: 'ring' leaves it as it is; 'block' is a target that computes single blocks, and 'dense' one that
    computes a ring of only one worker; 'groups' is read as a ring of groups of workers, and 'heads' as one of groups of
    heads.

    >>> reworded("In the forward pass, from step 1 on, the mask compares slot numbers within a worker.", "block")
    'In the forward pass, in blocks with queries and keys of different parts, the mask compares token numbers within the block.'
    """
    rules = {
        RING: (),
        GROUPS: OF_GROUPS,
        HEADS: OF_HEADS,
        BLOCK: (*BOTH, *OF_BLOCKS),
        DENSE: (*BOTH, *OF_ONE, *OF_BLOCKS),
    }[made_of]
    return in_other_words(sentence, rules)
