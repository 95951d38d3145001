# Promises that the targets of diffusers run with the oldest version that they take and with the newest one known to run.
set -euo pipefail
for version in 0.39.0 0.42.1; do
    .venv/bin/python -m pip install --quiet torch==2.13.0 "diffusers==$version"
    RINGSPEC_REQUIRE=diffusers .venv/bin/python -m pytest -n 0 tests/conformance/targets/test_diffusers.py
done
