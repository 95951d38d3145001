# Promises that the documentation's program in C, compiled strictly and with sanitizers, reads the core set and refuses
# hostile files; a skip is a failure.
set -euo pipefail
cc --version | head -1
RINGSPEC_REQUIRE=external .venv/bin/python -m pytest -m 'external' \
    tests/vectors/test_c_example.py tests/vectors/test_transcripts.py tests/conformance/adapters/test_command.py
