# Promises that the report page, the page of the ring and the matrix of verdicts work in a browser, Debian's chromium; a skip
# is a failure.
set -euo pipefail
if ! command -v chromium >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
chromium --version
RINGSPEC_REQUIRE=external .venv/bin/python -m pytest -m "external and not slow" tests/conformance/report/test_page.py tests/render/test_explore.py tests/render/test_explore_schemes.py tests/render/test_browse.py tests/render/test_verdicts_page.py
