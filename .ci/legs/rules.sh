# Promises that the tests of each rule fail when the rule is broken, once each, in a copy.
set -euo pipefail
.venv/bin/python -m pytest -q -m slow tests/rules
