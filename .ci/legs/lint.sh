# Style, types, and who imports whom.
set -euo pipefail
.venv/bin/python -m pip install --quiet -e ".[lint]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
