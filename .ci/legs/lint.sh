# Promises that style and types are checked, and that rooms import only what they may.
set -euo pipefail
.venv/bin/python -m pip install --quiet -e ".[lint]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
