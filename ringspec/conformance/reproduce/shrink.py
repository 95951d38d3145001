"""Shrink a failing case: find the simplest call that the target fails in the same way.

The target is the program under test; a call is one request to it. Reductions, which make a call smaller, are tried one
by one (:mod:`ringspec.conformance.reproduce.reductions`). A smaller call is accepted if all its wrong tensors were wrong
before, with the same kind of error. The original failure may also have an explanation from readouts, which are calls
whose results show the attention weights (:mod:`ringspec.conformance.readout`). Then this explanation must hold for the
smaller call as well.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ringspec.compare.explain import explain_all
from ringspec.conformance.cases.calls import passes_for
from ringspec.conformance.cases.model import Outputs, RunCase
from ringspec.conformance.cases.problems import Seen, judged
from ringspec.conformance.explain.read_problems import run_problem
from ringspec.conformance.readout.conclusion import Conclusion, conclude
from ringspec.conformance.readout.problem.chosen import problems_for
from ringspec.conformance.readout.proof.replay import explains
from ringspec.conformance.readout.reading import Reading
from ringspec.conformance.report.records import Finding
from ringspec.conformance.reproduce.explicit import Explicit, call_for, case_of, explicit_of
from ringspec.conformance.reproduce.reductions import REDUCTIONS, cost
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Call, Target
from ringspec.errors import OptionError, RingspecError

SECONDS = 30.0
LEAST_SECONDS = 1.0  # smallest time limit of a call
READING = 0.4  # fraction of the search time after which no further readout starts
ID = "shrunk"
# Called before each trial with its number and the simplest failing problem so far.
Progress = Callable[[int, Explicit], None]


@dataclass(frozen=True)
class Trial:
    """A problem, its call, the target's results, and the comparison of the results with the correct ones."""

    problem: Explicit
    call: Call
    outputs: Outputs
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> frozenset[tuple[str, str]]:
        """The wrong tensors, each with its kind of error."""
        return frozenset((one.tensor, one.kind) for one in self.findings if one.kind != "ok")

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of wrong tensors."""
        found = [one.tensor for one in self.findings if one.kind != "ok"]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Shrunk:
    """The failing call of case ``id`` (``first``) and the simplest call that fails in the same way (``last``).

    ``steps``: the reductions from ``first`` to ``last``. ``trials``: the number of calls that were tried. ``seconds``:
    how long the search took. ``explanation``: sentences that explain both failures; may be empty. ``finished``: False
    if the time ran out.
    """

    id: str
    first: Trial
    last: Trial
    steps: tuple[str, ...]
    trials: int
    seconds: float
    explanation: tuple[str, ...]
    finished: bool

    @property
    def message(self) -> str:
        """What is wrong with the results of the last call."""
        return explain_all(self.last.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; ``inputs`` of the call are listed for each worker."""
        call = self.last.call
        shapes = {name: vars(one.problem.shape) for name, one in self.ends}
        return {
            "case": self.id,
            **{name: {"workers": one.problem.workers, **shapes[name]} for name, one in self.ends},
            "steps": list(self.steps),
            "trials": self.trials,
            "seconds": self.seconds,
            "finished": self.finished,
            "explanation": list(self.explanation),
            "wrong": list(self.last.tensors),
            "message": self.message,
            "call": {
                "operation": call.operation,
                "passes": list(call.passes),
                "workers": call.workers,
                "layout": call.layout,
                "index_q": None if call.index_q is None else call.index_q.tolist(),
                "index_k": None if call.index_k is None else call.index_k.tolist(),
                "circulation": call.circulation,
                "direction": call.direction,
                **scheme_of(call),
                "terms": dict(call.terms),
                "formats": dict(call.formats),
                "inputs": {name: [x.tolist() for x in xs] for name, xs in call.tensors.items()},
            },
        }

    @property
    def ends(self) -> tuple[tuple[str, Trial], ...]:
        return ("first", self.first), ("last", self.last)


def scheme_of(call: Call) -> dict[str, Any]:
    """Return how a call splits attention over ranks, as plain data; nothing for a ring or a block."""
    if not call.scheme or call.heads_q is None or call.heads_k is None:
        return {}
    heads = {"heads_q": call.heads_q.tolist(), "heads_k": call.heads_k.tolist()}
    return {"scheme": call.scheme, "mesh": [list(axis) for axis in call.mesh], **heads}


def shrink(
    target: Target, case: RunCase, seconds: float = SECONDS, progress: Progress | None = None
) -> Shrunk:
    """Find the simplest call that a target fails in the same way as it fails a case.

    ``seconds``: time limit of the search, which begins after the readouts. Raises :class:`~ringspec.errors.OptionError`
    for a case that passes, for a case that merges partial results, and for a failure other than wrong numbers in one
    call.

    >>> from ringspec.conformance.cases.profiles import run_cases
    >>> from ringspec.conformance.targets.reference import reference_float32
    >>> [one] = [case for case in run_cases("smoke") if case.id == "ring/contiguous-w2"]
    >>> shrink(reference_float32, one)
    Traceback (most recent call last):
    ...
    ringspec.errors.OptionError: expected a failing case; got ring/contiguous-w2, which passes: nothing to \
shrink. Fix: leave --shrink out.
    """
    begun = time.monotonic()
    first = failing(target, case)
    explanation = explanation_for(target, first, time.monotonic() + seconds * READING)
    search = Search(target, first, explanation, time.monotonic() + seconds, progress)
    search.run()
    return Shrunk(
        case.id,
        first,
        search.best,
        tuple(search.steps),
        search.trials,
        time.monotonic() - begun,
        sentences(search.conclusion, search.best.call),
        search.finished,
    )


OTHERS = {
    "merge": "which merges partial results",
    "layout": "which has integers and no tensors",
    "context_parallel": "which splits attention by a scheme; ringspec replay --shrink makes it smaller",
}


def failing(target: Target, case: RunCase) -> Trial:
    """Run a case and return the first call with wrong results."""
    claims = target.capabilities
    reason = case.why_not(claims)
    if reason is not None:
        refuse(f"{case.id}, which the target does not claim ({reason})")
    calls = list(case.make(claims))
    for call in calls:
        if call.operation in OTHERS:
            fix = "choose a case ring/* or block/*, or do without a smaller case or a reproducer"
            refuse(
                f"{case.id}, {OTHERS[call.operation]}", "a case that calls a ring or a block", fix
            )
    try:
        outputs = [results(target, call) for call in calls]
    except Stop as stop:
        text = f"{case.id}: {stop.outcome}"
        refuse(text, "a case that fails by wrong numbers", "repair this failure first")
    verdict = case.judge(claims, calls, outputs)
    if verdict.passed:
        refuse(f"{case.id}, which passes: nothing to shrink")
    for call in suspects(calls, outputs, verdict.findings):
        trial = tried(target, explicit_of(call))
        if trial is not None and trial.wrong:
            return trial
    text = f"{case.id}, in which the results of each single call are within their bounds"
    refuse(text, "a case with a call whose results are wrong")


def refuse(got: str, expected: str = "a failing case", fix: str = "leave --shrink out") -> NoReturn:
    raise OptionError(expected, got, fix)


def results(target: Target, call: Call) -> Outputs:
    """Run one call. Raises Stop if it returns no valid results."""
    claims = target.capabilities
    result, _ = ask(target, as_seen(call, claims))
    return outputs_of(result, call, claims)


def suspects(
    calls: Sequence[Call], outputs: Sequence[Outputs], findings: Sequence[Finding]
) -> Sequence[Call]:
    """Return the calls with wrong results.

    If the comparisons in ``findings`` cannot be assigned to calls, return all calls.
    """
    counts = [sum(map(len, one.values())) for one in outputs]
    if sum(counts) != len(findings):
        return calls
    rest, wrong = list(findings), []
    for call, count in zip(calls, counts, strict=True):
        if any(one.kind != "ok" for one in rest[:count]):
            wrong.append(call)
        rest = rest[count:]
    return wrong


def tried(target: Target, problem: Explicit) -> Trial | None:
    """Run a problem; return None if it cannot be made, is not supported by the target, or gives no valid results."""
    claims = target.capabilities
    try:
        case = case_of(problem, ID)
        call = call_for(claims, case)
        outputs = results(target, call)
        verdict = judged(Seen(claims, (case,), (call,), (outputs,)))
    except (RingspecError, Stop):
        return None
    return Trial(problem, call, outputs, verdict.findings)


def claimed(claims: Capabilities, problem: Explicit) -> bool:
    """Tell whether a target claims to support a problem; a problem that cannot be made is not claimed."""
    try:
        case = case_of(problem, ID)
    except RingspecError:
        return False
    return why_not(claims, case.requires | {"passes": passes_for(case, claims)}) is None


def explanation_for(target: Target, trial: Trial, deadline: float) -> Conclusion:
    """Run readouts until together they explain a failure; return the explanation.

    It is empty if they do not explain it, or if the time runs out.
    """
    problems, _ = problems_for(target.capabilities)
    readings: list[Reading] = []
    for problem in problems:
        if time.monotonic() > deadline:
            break
        reading = run_problem(target, problem).reading
        if reading is not None and not reading.right:
            readings.append(reading)
            found = conclude(readings)
            if explains(found, [trial.call], [trial.outputs]):
                return found
    return Conclusion()


def sentences(explanation: Conclusion, call: Call) -> tuple[str, ...]:
    """Describe the faults that an explanation gives for the passes of this call."""
    return tuple(one.sentence() for one in explanation.faults if one.phase in call.passes)


@contextlib.contextmanager
def limited(target: Any, seconds: float) -> Iterator[None]:
    """Lower the time limit of a target's calls, if there is one, because a smaller call may hang."""
    before = getattr(target, "timeout", None)
    if before is None or before == math.inf:
        yield
        return
    target.timeout = min(before, max(seconds, LEAST_SECONDS))
    try:
        yield
    finally:
        target.timeout = before


class Search:
    """A greedy search: the first smaller problem that fails in the same way replaces the problem ``best``.

    ``finished``: False if the time ran out before all reductions were tried.
    """

    def __init__(
        self,
        target: Target,
        first: Trial,
        conclusion: Conclusion,
        deadline: float,
        progress: Progress | None,
    ) -> None:
        self.target, self.first, self.best, self.conclusion = target, first, first, conclusion
        self.deadline, self.progress = deadline, progress
        self.trials, self.finished = 0, True
        self.steps: list[str] = []
        self.seen = {first.problem.key()}

    def run(self) -> None:
        """Repeat all reductions until none of them is accepted or the time runs out."""
        before = None
        while before is not self.best:
            before = self.best
            for reduction in REDUCTIONS:
                while self.reduced(reduction):
                    pass

    def reduced(self, reduction: Any) -> bool:
        """Try the problems of one reduction; return True as soon as one is accepted."""
        claims = self.target.capabilities
        for name, problem in reduction(self.best.problem, self.best.call, claims):
            if time.monotonic() > self.deadline:
                self.finished = False
                return False
            if self.is_new(problem) and claimed(claims, problem):
                trial = self.trial(problem)
                if trial is not None and self.same_failure(trial):
                    self.best = trial
                    self.steps.append(name)
                    return True
        return False

    def is_new(self, problem: Explicit) -> bool:
        """Tell whether a problem is simpler than ``best`` and has not been tried yet."""
        key = problem.key()
        if key in self.seen or not cost(problem) < cost(self.best.problem):
            return False
        self.seen.add(key)
        return True

    def trial(self, problem: Explicit) -> Trial | None:
        self.trials += 1
        if self.progress is not None:
            self.progress(self.trials, self.best.problem)
        with limited(self.target, self.deadline - time.monotonic()):
            return tried(self.target, problem)

    def same_failure(self, trial: Trial) -> bool:
        """Tell whether a smaller call fails in the same way as the first call.

        All its wrong tensors must have been wrong before, with the same kind of error, and the explanation must still
        hold.
        """
        if not trial.wrong or not trial.wrong <= self.first.wrong:
            return False
        return not self.conclusion.faults or explains(
            self.conclusion, [trial.call], [trial.outputs]
        )
