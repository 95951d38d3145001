"""Compare two reports of `ringspec check --report`: exit with 1 if a case that passed no longer passes.

python docs/conform/example_compare.py before.jsonl after.jsonl
"""

import sys
from pathlib import Path

from ringspec.conformance.report.report import read_report

# If an error grows by this factor, and to at least this part of its bound, it is printed although the case passes.
GROWTH, LEAST = 2.0, 0.01


def worst(record):
    """The largest error of any tensor, in units of its bound."""
    return max((finding.error for finding in record.findings), default=0.0)


before, after = ({one.id: one for one in read_report(Path(path)).records} for path in sys.argv[1:])
lost = 0
for id, now in after.items():
    old = before.get(id)
    if old is None:
        continue
    if old.outcome != now.outcome:
        print(f"{id}: {old.outcome} -> {now.outcome}")
        lost += old.outcome == "pass"
    elif now.outcome == "pass" and worst(now) > max(GROWTH * worst(old), LEAST):
        print(f"{id}: largest error {worst(old):.2g} -> {worst(now):.2g} of its bound")
for id in before.keys() - after.keys():
    print(f"{id}: {before[id].outcome} -> not in the second report")
    lost += before[id].outcome == "pass"
print(f"{lost} of {len(before)} cases no longer pass")
sys.exit(lost > 0)
