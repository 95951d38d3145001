# Promises that the lowest versions of the dependencies that pyproject.toml allows suffice for the specification, its ring
# against dense attention, verdicts, part of the command line, and the suite on one right target.
set -euo pipefail
python3 -m venv "$CI_SCRATCH/lowest"
python3 .ci/lowest.py test >"$CI_SCRATCH/lowest.txt"
"$CI_SCRATCH/lowest/bin/python" -m pip install --quiet -c "$CI_SCRATCH/lowest.txt" -e ".[test]"
"$CI_SCRATCH/lowest/bin/python" -m pip freeze --exclude-editable
"$CI_SCRATCH/lowest/bin/python" -m pytest -q tests/spec tests/rings tests/compare/test_verdict.py tests/cli/test_simulate.py
"$CI_SCRATCH/lowest/bin/python" -m pytest -q tests/cli/test_check.py -k "a_wrong_target or a_right_target"
"$CI_SCRATCH/lowest/bin/ringspec" check nki_impl --profile smoke
