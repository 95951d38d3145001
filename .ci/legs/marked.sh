# Promises that all tests with one mark pass with what they need installed; a skip is a failure.
#
#   marked.sh torch
set -euo pipefail
mark=$1
# Only the files that give the mark: to collect all takes as long as some of these legs. tests/project/test_ci.py checks
# that marks are given in test files.
mapfile -t files < <(grep -rlE --include='test_*.py' "mark\.$mark\b" tests | sort)
if [ "${#files[@]}" -eq 0 ]; then
    if [ "$mark" = torch ]; then
        echo "no test is marked torch, but the specification is compared with torch's autograd"
        exit 1
    fi
    echo "no test is marked $mark: nothing to install, nothing to run"
    exit 0
fi
case $mark in
    # One command for both, so that pip does not choose another torch. Its CPU build is enough; which
    # build comes is up to the index that pip is set up with.
    torch) .venv/bin/python -m pip install --quiet torch==2.13.0 -e ".[torch]" ;;
    *) .venv/bin/python -m pip install --quiet -e ".[$mark]" ;;
esac
RINGSPEC_REQUIRE=$mark .venv/bin/python -m pytest -m "$mark and not slow" "${files[@]}"
