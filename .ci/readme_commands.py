"""The commands of README.md, as a reader would copy them.

    python3 .ci/readme_commands.py 2           # prints the second set-up command
    python3 .ci/readme_commands.py script      # prints a shell script of all commands but the second set-up
    python3 .ci/readme_commands.py compare 1 FILE   # fails unless FILE is what the first transcript shows

A set-up command is a line of a fenced sh block that begins by making the environment .venv. The README has exactly
two: one to use ringspec, one to work on it. A transcript is a console block: a command and what it prints, in which
``...`` stands for what is left out.
"""

import doctest
import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BEGINNING = "python3 -m venv .venv && "


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, what is in it) of each fenced block.

    >>> blocks("```sh\\ntrue\\n```\\n```text\\nx\\n```\\n")
    [('sh', 'true\\n'), ('text', 'x\\n')]
    """
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M)


def setup_commands(text: str) -> list[str]:
    """The set-up commands in the order of the text."""
    lines = [
        line for language, body in blocks(text) if language == "sh" for line in body.splitlines()
    ]
    return [line.strip() for line in lines if line.startswith(BEGINNING)]


def transcripts(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of each console block."""
    found = []
    for language, body in blocks(text):
        if language == "console":
            command, _, printed = body.partition("\n")
            found.append((command.removeprefix("$ "), printed))
    return found


def script(text: str) -> str:
    """All commands but the second set-up, in order, for one shell; what a transcript prints is compared."""
    second, lines, number = setup_commands(text)[1], ["set -e"], 0
    for language, body in blocks(text):
        if language == "sh":
            lines += [line for line in body.splitlines() if line.strip() != second]
        elif language == "console":
            number += 1
            command = body.splitlines()[0].removeprefix("$ ")
            # A check of a wrong kernel ends with status 1.
            lines.append(f"{command} > printed.txt || test $? -eq 1")
            lines.append(f"python3 .ci/readme_commands.py compare {number} printed.txt")
    return "\n".join(lines) + "\n"


def agrees(shown: str, printed: str) -> bool:
    """Whether a program printed what a transcript shows."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def main(arguments: list[str]) -> None:
    text = README.read_text(encoding="utf-8")
    commands = setup_commands(text)
    if len(commands) != 2:
        sys.exit(f"README.md has {len(commands)} set-up commands in its sh blocks, expected 2")
    if arguments[0] == "script":
        print(script(text), end="")
    elif arguments[0] == "compare":
        shown, printed = transcripts(text)[int(arguments[1]) - 1][1], Path(arguments[2]).read_text()
        if not agrees(shown, printed):
            sys.exit(f"expected what the README shows:\n{shown}\ngot:\n{printed}")
    else:
        print(commands[int(arguments[0]) - 1])


if __name__ == "__main__":
    main(sys.argv[1:])
