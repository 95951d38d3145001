"""The code of ``ringspec reproduce``."""

from __future__ import annotations

import sys
from pathlib import Path

from ringspec.cli.commands.check_run import check_can_shrink, check_destination, found, vectors_data
from ringspec.cli.shared import output
from ringspec.cli.shared.progress import trying
from ringspec.cli.views import reproduce as text
from ringspec.cli.views.shrink import describe
from ringspec.conformance.report.report import make_header
from ringspec.conformance.reproduce.reproduce import reproduce
from ringspec.conformance.run.opening import close, opened
from ringspec.conformance.target.project import target_or_default
from ringspec.errors import OptionError
from ringspec.tensorfile import replace_file


def run(words: tuple[str, ...], path: Path, shrink_time: float, timeout: float) -> None:
    """Make the reproducer of one case, and write the program and the text."""
    target, ids = (words[0], words[1:]) if len(words) > 1 else (None, words)
    spec = target_or_default(target)
    if path.suffix != ".py":
        raise OptionError("the path of a program, FILE.py", str(path), "pass -o repro.py")
    issue = path.with_suffix(".md")
    for one in (path, issue):
        check_destination(one)
    check_can_shrink(spec, ids)
    case = found(ids[0])
    under_test = opened(spec, timeout or None)
    try:
        with trying("shrinking", sys.stderr.isatty()) as tell:
            made = reproduce(
                under_test,
                spec,
                case,
                shrink_time,
                lambda trial, best: tell(f"trial {trial}, now {describe(best)}"),
            )
        header = make_header(under_test, spec=spec, profile="replay", vectors=vectors_data())
    finally:
        close(under_test)
    replace_file(path.absolute(), made.text.encode())
    replace_file(issue.absolute(), text.report(made, header, path.name).encode())
    output.show(map(output.printable, [*made.output.splitlines(), f"written: {path} and {issue}"]))
