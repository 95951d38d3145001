"""Run a target on a few readout problems and say in sentences what it computes.

The target is the program under test. The results of a readout problem show the weight of each query and key. A target
that computes only single blocks is read first as one block, and then as a ring that is made of its blocks
(:mod:`ringspec.conformance.explain.block_ring`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ringspec.conformance.explain.block_ring import RingOfBlocks, computes_blocks, ring_of_blocks
from ringspec.conformance.explain.group_ring import rings_of_groups
from ringspec.conformance.explain.head_ring import rings_of_heads, sees_other_heads
from ringspec.conformance.explain.known_bugs import KnownBugs
from ringspec.conformance.explain.read_problems import Run, Search, agreed, one_thread, runs_of
from ringspec.conformance.readout.block_words import (
    BLOCK,
    DENSE,
    GROUPS,
    HEADS,
    OF_A_RING,
    RING,
    hint_without_ring,
    reworded,
)
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.faults.places import LISTED, PAIRS
from ringspec.conformance.readout.problem.chosen import problem_of, problems_for, settings_for
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.proof.all_problems import (
    proved,
    unrefuted,
    with_limits,
    with_others,
    with_rest,
)
from ringspec.conformance.readout.proof.read_proven import NOT_RANDOM
from ringspec.conformance.readout.proof.ways import with_ways
from ringspec.conformance.readout.reading import Reading
from ringspec.conformance.readout.search.not_finite import NOT_FINITE
from ringspec.conformance.report.coverage import coverage_of, used_by
from ringspec.conformance.report.records import Record
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Target

LISTED_IF_NOT_READ = ("layouts", "circulations", "directions", "masks", "features")
BLOCKS_IN_A_ROW = (3, 2)  # parts of the queries and of the keys; three parts tell more


@dataclass(frozen=True)
class Explained:
    """What a target computes, read from the problems in ``runs``.

    ``conclusion``: what the readings show together. ``known``: id, title and links of the known bug with the same
    results; None if no known bug has them. ``unread``: why no problem could be run; '' otherwise. ``made_of``: 'ring';
    'dense' if the target claims only rings of one worker; 'block' if it claims only single blocks; 'groups' if it was
    read as a ring of groups of workers, 'heads' as one of groups of heads. ``notes``: sentences about rows of a block
    without a visible key, or about these groups. ``claimed_not_read``: claimed values that no problem uses, by kind of
    claim.
    """

    runs: tuple[Run, ...]
    conclusion: Conclusion = Conclusion()
    known: dict[str, Any] | None = None
    unread: str = ""
    made_of: str = RING
    notes: tuple[str, ...] = ()
    claimed_not_read: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        return sum(not one.right for one in self.runs)

    @property
    def right(self) -> bool:
        """Tell whether at least one problem was run and all of them have correct results."""
        return bool(self.runs) and self.wrong == 0 and not self.notes

    @property
    def unexplained(self) -> tuple[str, ...]:
        """The ids of the problems that failed, and for which no sentence accounts."""
        explained = {*self.conclusion.explained, *self.conclusion.others}
        ids = [one.problem.id for one in self.runs if not one.right]
        return tuple(id for id in ids if id not in explained)

    @property
    def searched(self) -> bool:
        """Tell whether a problem stays unexplained although it has results, so that a longer search may explain it."""
        return any(
            one.reading is not None
            and not (one.right or one.reading.explained)
            and not any(
                part.left == NOT_RANDOM or NOT_FINITE in part.left for part in one.reading.passes
            )
            for one in self.runs
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the target computes, in sentences; if a problem has no results, the first sentence says why."""
        stopped = [one for one in self.runs if one.stopped]
        said = [f"{one.problem.id}: no results ({one.stopped})." for one in stopped[:1]]
        sentences = [reworded(one, self.made_of) for one in self.conclusion.sentences]
        return (*said, *self.notes, *sentences)

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Other explanations that fit as well, in sentences."""
        return tuple(reworded(one.words, self.made_of) for one in self.conclusion.alternatives)

    @property
    def hint(self) -> str:
        """Where in a kernel to look for the first fault; '' if nothing is known about that."""
        return hint_without_ring(self.conclusion.hint, self.made_of)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "right": self.right,
            "made_of": self.made_of,
            "problems": [
                {"id": one.problem.id, "right": one.right, "stopped": one.stopped}
                for one in self.runs
            ],
            "sentences": list(self.sentences),
            "alternatives": list(self.alternatives),
            "explains": len(self.conclusion.explained),
            "explains_others": len(self.conclusion.others),
            "wrong": self.wrong,
            "unexplained": list(self.unexplained),
            "hint": self.hint,
            "known": self.known,
            "unread": self.unread,
            "claimed_not_read": {kind: list(x) for kind, x in self.claimed_not_read.items()},
        }


def explain_target(
    target: Target,
    *,
    thorough: bool = False,
    catalogue: bool = True,
    progress: Callable[[str], None] = lambda problem: None,
) -> Explained:
    """Run a target on a few problems that it claims, and read what it computes.

    Problems of a feature, such as documents or sinks, are run only if the others are right. If the target fails,
    nothing is raised: the result says which problems have no results, and why. ``thorough``: search three times as long
    before a problem counts as unexplained. ``catalogue``: if a known bug gives the results of a problem, try first what
    is stored for this bug. ``progress`` is called with the id of each problem before it is run.

    >>> from ringspec.conformance.targets.reference import reference_float32
    >>> explain_target(reference_float32).right
    True
    """
    claims = target.capabilities
    how = Search(thorough, catalogue, progress)
    if computes_blocks(claims):
        return explain_block(target, how)
    of_heads = next(filter(simple, explained_in_heads(target, how)), None)
    if of_heads is not None:
        return of_heads
    settings, reason = settings_for(claims)
    problems = (problem_of(setting, claims) for setting in settings)
    made_of = DENSE if claims.workers == (1,) else RING
    bugs = KnownBugs(claims)
    found = explanation(runs_of(target, problems, how, bugs), bugs, reason, made_of)
    if not found.right and not simple(found):
        found = next(filter(simple, explained_in_groups(target, how)), found)
    return dataclasses.replace(found, claimed_not_read=not_read(claims, found.runs))


def simple(found: Explained) -> bool:
    """Tell whether sentences account for every problem that failed, without lists of blocks or of pairs."""
    faults = chain(found.conclusion.faults, *(one.faults for one in found.conclusion.separate))
    listed = any(LISTED in one.place or PAIRS in one.place for one in faults)
    return bool(found.wrong) and not found.unexplained and not listed


def explained_in_groups(target: Target, how: Search) -> Iterator[Explained]:
    """Explain a target as each ring of groups of workers that it may be; see :mod:`.group_ring`."""
    for ring in rings_of_groups(target):
        problems, reason = problems_for(ring.capabilities)
        bugs = KnownBugs(ring.capabilities)
        yield explanation(runs_of(ring, problems, how, bugs), bugs, reason, GROUPS, ring.notes)


def explained_in_heads(target: Target, how: Search) -> Iterator[Explained]:
    """Explain a target whose queries see keys of other heads as the ring that it may be; see :mod:`.head_ring`."""
    for ring, problem in rings_of_heads(target):
        if sees_other_heads(ring, problem):
            yield explanation(runs_of(ring, [problem], how), None, "", HEADS, ring.notes)


def not_read(claims: Capabilities, runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Return the claimed values on which no problem's results depend, by kind of claim."""
    asked = [(one.problem.id, used_by(one.problem.requires, one.problem.asked)) for one in runs]
    untested = coverage_of(claims, [Record(id, "pass", used=used) for id, used in asked]).untested
    return {kind: values for kind, values in untested.items() if kind in LISTED_IF_NOT_READ}


def explain_block(target: Target, how: Search) -> Explained:
    """Explain a target that computes single blocks: first one block alone, then a ring of blocks.

    The ring is run only if o and lse of the block alone are right; otherwise the merge would hide what is wrong.
    """
    alone = ring_of_blocks(target, 1)
    problems, reason = problems_of_blocks(alone)
    bugs = KnownBugs(alone.capabilities)
    runs = runs_of(alone, problems, how, bugs)
    if any(run.reading is None or wrong_in_forward(run.reading) for run in runs):
        return explanation(runs, bugs, reason, BLOCK, alone.notes)
    for workers in BLOCKS_IN_A_ROW if target.capabilities.lse != "hidden" else ():
        several = ring_of_blocks(target, workers)
        problems, _ = problems_of_blocks(several)
        if problems:
            bugs = KnownBugs(several.capabilities)
            runs += runs_of(several, problems, how, bugs, runs)
            return explanation(runs, bugs, reason, BLOCK, alone.notes + several.notes)
    return explanation(runs, bugs, reason, BLOCK, alone.notes)


def wrong_in_forward(reading: Reading) -> bool:
    forward = reading.forward
    return forward is not None and bool(forward.sets or forward.left)


def problems_of_blocks(ring: RingOfBlocks) -> tuple[list[Problem], str]:
    """Return the problems of a ring of blocks that the target can run, with ids of their own; if none, also why."""
    problems, reason = problems_for(ring.capabilities)
    found = []
    for problem in problems:
        if all(ring.can_run(call) for call in problem.asked):
            setting = problem.id.removeprefix("readout/").removesuffix("-kv")
            alone = problem.call.workers == 1
            id = f"block/{setting.replace('-contiguous', '')}" if alone else f"blocks/{setting}"
            first, proof = problem.cases
            found.append(
                dataclasses.replace(problem, cases=(dataclasses.replace(first, id=id), proof))
            )
    return found, reason or ("" if found else "it needs a block that the target claims")


@one_thread()
def explanation(
    made: Sequence[Run],
    bugs: KnownBugs | None,
    reason: str,
    made_of: str,
    notes: Sequence[str] = (),
) -> Explained:
    """Combine what was read from the problems; ``reason``: why there are none. ``bugs``: None if no known bug is looked for."""
    runs = agreed(made)
    if not runs:
        return Explained((), unread=reworded(reason, made_of), made_of=made_of)
    wrong = [one for one in runs if one.reading is not None and not one.right]
    readings = [one.reading for one in wrong if one.reading is not None]
    right = [(one.problem, one.outputs) for one in runs if one.right]
    found = unrefuted(readings, right)
    adopted = [
        one
        for one in wrong
        if one.problem.pairs.geometry.batches or (one.reading and not one.reading.evaluations)
    ]
    own = found.explained
    found = with_others(found, [(one.problem, one.outputs) for one in adopted])
    found = with_rest(found, [one.reading for one in adopted if one.reading is not None])
    proved_already = [id for id in found.explained if id not in own]
    found = proved(found, [(one.problem, one.outputs) for one in wrong], proved_already)
    found = with_limits(found, readings, right)
    found = with_ways(found, [(one.problem, one.outputs) for one in wrong])
    known = None if bugs is None else known_bug(bugs, found, wrong)
    if known is not None and made_of in (BLOCK, DENSE) and OF_A_RING.search(known["title"]):
        known = None
    return Explained(runs, found, known, made_of=made_of, notes=tuple(dict.fromkeys(notes)))


def known_bug(bugs: KnownBugs, found: Conclusion, wrong: Sequence[Run]) -> dict[str, Any] | None:
    """Find the known bug that gives the same results in the problem that shows the fault; return None without one."""
    shown = [one for one in wrong if one.problem.id == found.shown_by]
    mutant = bugs.named(shown[0].problem, shown[0].outputs[0], found) if shown else None
    if mutant is None:
        return None
    return {"id": mutant.id, "title": mutant.title, "links": list(mutant.links)}
