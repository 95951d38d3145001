# The second set-up command of the README, exactly as a reader would run it.
set -euo pipefail
command=$(python3 .ci/readme_commands.py 2)
printf '$ %s\n' "$command"
bash -c "$command"
