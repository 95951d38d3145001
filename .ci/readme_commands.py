"""The set-up commands of README.md, as a reader would copy them.

    python3 .ci/readme_commands.py 2    # prints the second one

A set-up command is a line of a fenced sh block that begins by making the environment .venv. The
README has exactly two: one to use ringspec, one to work on it.
"""

import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BEGINNING = "python3 -m venv .venv && "


def setup_commands(text: str) -> list[str]:
    """The set-up commands in the order of the text.

    >>> setup_commands("```sh\\npython3 -m venv .venv && true\\n```\\npython3 -m venv .venv && false")
    ['python3 -m venv .venv && true']
    """
    commands = []
    language = None
    for line in text.splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```").strip() if language is None else None
        elif language == "sh" and line.startswith(BEGINNING):
            commands.append(line.strip())
    return commands


def main() -> None:
    number = int(sys.argv[1])
    commands = setup_commands(README.read_text(encoding="utf-8"))
    if len(commands) != 2:
        sys.exit(f"README.md has {len(commands)} set-up commands in its sh blocks, expected 2")
    print(commands[number - 1])


if __name__ == "__main__":
    main()
