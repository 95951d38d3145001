"""Run the suite on processes that torchrun started, and write a report.

torchrun --standalone --nproc-per-node 8 docs/conform/example_cluster.py core report.jsonl
"""

import sys
from pathlib import Path

from example_torch import target

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.report.report import ReportWriter, headline, make_header
from ringspec.conformance.run.suite import run

profile, path = sys.argv[1], Path(sys.argv[2])
# On every rank but 0, this call computes for rank 0 until rank 0 closes the target, and then ends the process.
ring = target.under_torchrun()
header = make_header(ring, spec="example_torch.py:target", profile=profile)
with path.open("w", encoding="utf-8") as file:
    writer = ReportWriter(file, header)
    summary = run(ring, run_cases(profile), sink=writer)
    writer.finish(summary.complete)
ring.close()
print(headline(summary.counts))
for record in summary.failures:
    print(f"{record.id}: {record.outcome}")
sys.exit(summary.exit_code)
