# Promises that every command of the README, but the second set-up (leg tests), runs in order in a fresh clone.
set -euo pipefail
git clone --quiet "$CI_CLONE" "$CI_SCRATCH/readme"
cd "$CI_SCRATCH/readme"
python3 .ci/readme_commands.py script | tee commands.sh
bash commands.sh
