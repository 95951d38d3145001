"""What the judge says of each precision fault of the NumPy ring, held against the fault's own switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from independent.numpy_faults import FAULTS, RIGHT
from independent.numpy_target import NumpyRing

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely
from ringspec.conformance.run.case import run_case

CLAIM = ": fits better by"  # what an inference says before it is its claim
RIGHTLY = ("named", "inferred")


@dataclass(frozen=True)
class Said:
    """``failed`` of ``cases``; ``name`` of the run's verdict; ``claim``: what most inferences say."""

    fault: str
    failed: int
    cases: int
    name: str | None
    claim: str | None

    @property
    def name_is_wrong(self) -> bool:
        return self.name is not None and self.name not in (FAULTS | RIGHT)[self.fault].ids

    @property
    def claim_is_wrong(self) -> bool:
        words = (FAULTS | RIGHT)[self.fault].words
        return self.claim is not None and not any(one in self.claim for one in words)

    @property
    def kind(self) -> str:
        """'wrong name', 'named', 'wrong inference', 'inferred', 'unexplained' or 'unseen'."""
        if self.name is not None:
            return "wrong name" if self.name_is_wrong else "named"
        if self.claim is not None:
            return "wrong inference" if self.claim_is_wrong else "inferred"
        return "unexplained" if self.failed else "unseen"


def said_of(fault: str, cases: Sequence[RunCase], recipe: str | None = "bf16") -> Said:
    """Run a fault over some noise cases, each with a diagnosis."""
    target, diagnose = NumpyRing(fault, recipe), Diagnoser()
    diagnose.taken["noise"] = -len(cases)
    records = [run_case(target, case, diagnose) for case in cases]
    failed = [record for record in records if record.outcome != "pass"]
    verdict = most_likely(records)
    claims = Counter(
        line.split(CLAIM)[0]
        for record in failed
        for line in (record.noise or {}).get("inferred", ())
        if CLAIM in line
    )
    return Said(
        fault,
        len(failed),
        len(records),
        None if verdict is None else verdict["id"],
        claims.most_common(1)[0][0] if claims else None,
    )
