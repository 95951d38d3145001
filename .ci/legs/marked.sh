# The tests with one mark, with what they need installed; there a skip is a failure.
#
#   marked.sh torch
set -euo pipefail
mark=$1
collected=0
.venv/bin/python -m pytest -n 0 -m "$mark and not slow" --collect-only -q >"$CI_SCRATCH/collected" || collected=$?
case $collected in
    0) ;;
    5) # pytest's code for "no test selected"
        if [ "$mark" = torch ]; then
            echo "no test is marked torch, but the specification is compared with torch's autograd"
            exit 1
        fi
        echo "no test is marked $mark: nothing to install, nothing to run"
        exit 0
        ;;
    *)
        cat "$CI_SCRATCH/collected"
        exit "$collected"
        ;;
esac
case $mark in
    # One command for both, so that pip does not choose another torch. Its CPU build is enough; which
    # build comes is up to the index that pip is set up with.
    torch) .venv/bin/python -m pip install --quiet torch==2.13.0 -e ".[torch]" ;;
    *) .venv/bin/python -m pip install --quiet -e ".[$mark]" ;;
esac
RINGSPEC_REQUIRE=$mark .venv/bin/python -m pytest -m "$mark and not slow"
