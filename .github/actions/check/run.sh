#!/usr/bin/env bash
# The step of the action: run ringspec check, write all reports and a badge, and put the verdict into the summary of the job.
#
# Reads TARGET, PROFILE, ARGUMENTS, BASELINE and FOLDER from the environment, and GITHUB_STEP_SUMMARY, the file of the
# summary. Exit status: that of ringspec check; with a BASELINE, that of ringspec diff if the check ran.
set -uo pipefail

read -ra more <<<"${ARGUMENTS:-}"
target=()
if [ -n "${TARGET:-}" ]; then target=("$TARGET"); fi
mkdir -p "$FOLDER"
report=$FOLDER/report.jsonl

python -m ringspec check ${target[@]+"${target[@]}"} --profile "$PROFILE" --report "$report" --junit "$FOLDER/report.xml" \
    --html "$FOLDER/report.html" ${more[@]+"${more[@]}"} | tee "$FOLDER/verdict.txt"
status=${PIPESTATUS[0]}
shown=("$FOLDER/verdict.txt")
if [ "$status" -ne 2 ]; then python -m ringspec badge "$report" -o "$FOLDER/badge.json"; fi

if [ -n "${BASELINE:-}" ] && [ "$status" -le 1 ]; then
    python -m ringspec diff "$BASELINE" "$report" | tee "$FOLDER/diff.txt"
    status=${PIPESTATUS[0]}
    shown+=("$FOLDER/diff.txt")
fi

if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    for file in "${shown[@]}"; do
        printf '```text\n%s\n```\n\n' "$(cat "$file")" >>"$GITHUB_STEP_SUMMARY"
    done
fi
exit "$status"
