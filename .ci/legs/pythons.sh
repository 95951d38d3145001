# Promises that the specification, its rings and the suite on one right target pass in every Python after 3.11, which the
# other legs run, that is installed: on the path or by pyenv. The others are listed as not run.
set -euo pipefail

interpreter_of() { # 3.12: an interpreter that starts, or nothing
    local candidate
    for candidate in "python$1" $(pyenv prefix "$(pyenv latest "$1" 2>/dev/null)" 2>/dev/null | sed 's|$|/bin/python|'); do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

not_run=()
for version in 3.12 3.13 3.14; do
    python=$(interpreter_of "$version")
    if [ -z "$python" ]; then
        not_run+=("$version")
        continue
    fi
    "$python" --version
    environment=$CI_SCRATCH/python$version
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet -e ".[test]"
    "$environment/bin/python" -m pytest -q tests/spec tests/rings
    "$environment/bin/ringspec" check nki_impl --profile smoke
done
echo "Python versions not run, because they are not installed: ${not_run[*]:-none}"
