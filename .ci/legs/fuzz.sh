# One minute of coverage-guided fuzzing of everything that reads files from outside.
set -euo pipefail
.venv/bin/python -m pip install --quiet -e ".[fuzz]"
.venv/bin/python tests/fuzz/fuzz_vectors.py -max_total_time=60 -rss_limit_mb=1024 -timeout=10
