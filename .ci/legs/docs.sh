# Promises that figures and pages are right, that every notebook runs, and that the documentation, with the executed
# notebooks, is built without a warning and without a dead link inside it.
set -euo pipefail
.venv/bin/python -m pip install --quiet -e ".[docs,notebooks]"
RINGSPEC_REQUIRE=notebook .venv/bin/python -m pytest -n 0 -q -m notebook tests/render tests/project
executed=$CI_SCRATCH/executed
mkdir "$executed"
if compgen -G "notebooks/*.ipynb" >/dev/null; then
    cp notebooks/*.ipynb "$executed"
    # nbmake writes the outputs into the copies. -c /dev/null: not the settings of the test suite.
    # Two notebooks at once, so each uses one thread.
    OPENBLAS_NUM_THREADS=1 .venv/bin/python -m pytest -c /dev/null --rootdir "$executed" -p no:cacheprovider -n 2 --dist worksteal \
        --nbmake --overwrite --nbmake-timeout=300 "$executed"
else
    echo "there are no notebooks"
fi
RINGSPEC_EXECUTED_NOTEBOOKS=$executed .venv/bin/python -m sphinx \
    -q -W --keep-going -b html docs "$CI_SCRATCH/html"
.venv/bin/python docs/check_links.py "$CI_SCRATCH/html"
echo "built $(find "$CI_SCRATCH/html" -name '*.html' | wc -l) pages without a warning"
