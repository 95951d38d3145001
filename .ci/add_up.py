"""The closing lines of several pytest runs in a log, added up to one.

python3 .ci/add_up.py LOG FAILED_LEGS
"""

import re
import sys
from pathlib import Path

WORDS = ("passed", "failed", "errors", "skipped", "xfailed")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CLOSING = re.compile(r"^=+ (?P<counts>.*) in [\d.]+s.* =+$")


def add_up(log: str) -> dict[str, int]:
    """How many tests passed, failed, ... in all runs together.

    >>> add_up("== 1 failed, 2 passed in 0.1s ==\\n== 3 passed, 1 error in 0.1s (0:00:01) ==")
    {'passed': 5, 'failed': 1, 'errors': 1, 'skipped': 0, 'xfailed': 0}
    """
    totals = dict.fromkeys(WORDS, 0)
    for line in COLOUR.sub("", log).splitlines():
        closing = CLOSING.match(line)
        if closing is None:
            continue
        for number, word in re.findall(r"(\d+) (\w+)", closing["counts"]):
            word = "errors" if word == "error" else word
            if word in totals:
                totals[word] += int(number)
    return totals


def main() -> None:
    totals = add_up(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    counts = ", ".join(f"{number} {word}" for word, number in totals.items())
    failed_legs = int(sys.argv[2])
    print(counts + (f"; {failed_legs} legs failed" if failed_legs else ""))


if __name__ == "__main__":
    main()
