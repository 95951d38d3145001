# Promises that the wheel has every file of the packages and works outside the clone.
set -euo pipefail
python3 -m venv "$CI_SCRATCH/build"
"$CI_SCRATCH/build/bin/python" -m pip install --quiet build
# Builds the sdist from the clone and the wheel from the sdist.
"$CI_SCRATCH/build/bin/python" -m build --outdir "$CI_SCRATCH/dist" .
ls -l "$CI_SCRATCH/dist"
python3 .ci/wheel_files.py "$CI_SCRATCH"/dist/*.whl

python3 -m venv "$CI_SCRATCH/clean"
"$CI_SCRATCH/clean/bin/python" -m pip install --quiet "$CI_SCRATCH"/dist/*.whl
mkdir "$CI_SCRATCH/empty"
cd "$CI_SCRATCH/empty"
set -x
# -P: nothing beside the installed package can be imported.
"$CI_SCRATCH/clean/bin/python" -P -m ringspec simulate --workers 4
"$CI_SCRATCH/clean/bin/ringspec" simulate --workers 4 --json >simulate.json
"$CI_SCRATCH/clean/bin/python" -P -m json.tool simulate.json >/dev/null
"$CI_SCRATCH/clean/bin/ringspec" vectors list
"$CI_SCRATCH/clean/bin/ringspec" vectors verify core --only 'merge/*'
"$CI_SCRATCH/clean/bin/ringspec" check nki_impl --profile smoke
