# Promises that one minute of coverage-guided fuzzing finds no crash in what reads files from outside.
set -euo pipefail
.venv/bin/python -m pip install --quiet -e ".[fuzz]"
.venv/bin/python tests/fuzz/fuzz_vectors.py -max_total_time=60 -rss_limit_mb=1024 -timeout=10
