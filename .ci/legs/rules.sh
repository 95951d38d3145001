# Every rule is broken once, in a copy, to see the tests that hold it fail.
set -euo pipefail
.venv/bin/python -m pytest -q -m slow tests/rules
