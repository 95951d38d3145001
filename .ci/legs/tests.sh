# Promises that the README's second set-up command, exactly as a reader would run it, installs ringspec and passes all tests.
set -euo pipefail
command=$(python3 .ci/readme_commands.py 2)
printf '$ %s\n' "$command"
bash -c "$command"
