# The program in C of the documentation, compiled strictly and with sanitizers, over hostile files and
# the core set; here a skip is a failure.
set -euo pipefail
cc --version | head -1
RINGSPEC_REQUIRE=external .venv/bin/python -m pytest -m 'external' \
    tests/vectors/test_c_example.py tests/vectors/test_transcripts.py tests/conformance/test_command.py
