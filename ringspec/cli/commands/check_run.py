"""Code that ``smoke``, ``check`` and ``replay`` share: run cases, write reports, print the verdict.

A *target* is the implementation under test. A *case* is one test, which calls the target once or several times. A
*profile* is a named selection of cases.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from ringspec.cli.shared import output
from ringspec.cli.shared.progress import counting, trying
from ringspec.cli.views import check as check_text
from ringspec.cli.views import shrink as shrink_text
from ringspec.conformance.cases.model import IF_CLAIMED, PROFILES, RunCase
from ringspec.conformance.cases.profiles import cases_for, run_cases
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.junit import junit
from ringspec.conformance.report.limits import limits_of
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import (
    Report,
    ReportWriter,
    make_header,
    plain,
    report_lines,
)
from ringspec.conformance.report.resume import taken_over
from ringspec.conformance.reproduce.shrink_schemes import shrink_case
from ringspec.conformance.run.expected import Expectation, read_expected
from ringspec.conformance.run.load import asked_of, telling
from ringspec.conformance.run.opening import opened
from ringspec.conformance.run.sharp import chosen as larger_case
from ringspec.conformance.run.suite import Summary, run, selected
from ringspec.conformance.target.project import target_or_default
from ringspec.conformance.target.protocol import Target
from ringspec.conformance.target.provenance import changed_since, computed_with
from ringspec.errors import OptionError, nearest, shown
from ringspec.render import page
from ringspec.vectors import open_set

Files = dict[str, Path]


def check(
    target: str | None,
    profile: str | None,
    only: tuple[str, ...],
    jobs: int,
    timeout: float,
    expected_failures: Path | None,
    as_json: bool,
    sharp: float | None = None,
    resume: bool = False,
    **files: Path | None,
) -> None:
    """Run ``ringspec check`` or ``smoke``: all cases of a profile, or those that ``only`` selects.

    ``resume``: cases that passed in the report of an interrupted run do not run again. ``files`` maps the format of
    a report to the file to write. The other parameters are the options of these commands.
    """
    spec = target_or_default(target)
    if resume and files.get("report") is None:
        raise OptionError(
            "--report FILE with --resume, the report of the interrupted run",
            "no --report",
            "name the file that the interrupted run wrote",
        )
    profile, only = asked_of(spec, profile, only)
    expected = None if expected_failures is None else read_expected(expected_failures)
    options: dict[str, Any] = {
        "only": only or None,
        "jobs": jobs,
        "timeout": timeout or None,
        "expected_failures": expected,
        "profile": profile,
    }
    perform(spec, profile, run_cases(profile), options, as_json, files, sharp, resume=resume)


def replay(
    words: tuple[str, ...],
    shrinking: bool,
    shrink_time: float,
    timeout: float,
    as_json: bool,
    **files: Path | None,
) -> None:
    """Run the cases with the ids in ``words``, from any profile.

    ``shrinking``: if the case fails, also search for a simpler call that fails in the same way.
    """
    target, ids = (words[0], words[1:]) if len(words) > 1 else (None, words)
    spec = target_or_default(target)
    cases = [found(id) for id in dict.fromkeys(ids)]
    options = {"timeout": timeout or None}
    if not shrinking:
        perform(spec, "replay", cases, options, as_json, files)
        return
    check_can_shrink(spec, ids)

    def then(target: Target) -> None:
        show_shrunk(target, cases[0], shrink_time, as_json)

    perform(spec, "replay", cases, options, as_json, files, then=then)


def check_can_shrink(spec: str, ids: Sequence[str]) -> None:
    """Raise OptionError if there are several cases to shrink, or if the target is a folder of stored results."""
    if len(ids) > 1:
        raise OptionError("one id with --shrink", f"{len(ids)} ids", "shrink one case at a time")
    if spec.startswith("dir:"):
        raise OptionError(
            "a target that runs new calls, for --shrink",
            f"the stored results in {spec.removeprefix('dir:')}",
            "shrink on the machine that has the target",
        )


def show_shrunk(target: Target, case: RunCase, seconds: float, as_json: bool) -> None:
    """Search for the simplest call that fails in the same way as ``case``, for at most ``seconds``, and print it."""
    with trying("shrinking", sys.stderr.isatty()) as tell:
        found = shrink_case(
            target,
            case,
            seconds,
            lambda trial, best: tell(f"trial {trial}, now {shrink_text.describe(best)}"),
        )
    if as_json:
        click.echo(json.dumps(plain({"kind": "shrunk", **found.as_dict()}), allow_nan=False))
    else:
        output.show(["", *map(output.printable, shrink_text.lines(found))])


def found(id: str) -> RunCase:
    """Find a case by id in the smallest profile that contains it."""
    known: list[str] = []
    for profile in PROFILES:
        cases = {case.id: case for case in run_cases(profile)}
        if id in cases:
            return cases[id]
        known += cases
    raise OptionError("the id of a case", shown(id), nearest(id, known), code="unknown-name")


def perform(
    spec: str,
    profile: str,
    cases: list[RunCase],
    options: dict[str, Any],
    as_json: bool,
    files: dict[str, Path | None],
    sharp: float | None = None,
    then: Callable[[Target], None] | None = None,
    resume: bool = False,
) -> None:
    """Load the target, run the cases and write reports; end the program if the exit code is not 0.

    ``resume``: take over the records of the report that an interrupted run left (:func:`taken_over`).
    ``sharp``: if given, add a larger noise case (see :func:`sharpened`) that takes at most this many seconds. ``then``:
    a function that is called with the target before the program ends.
    """
    wanted: Files = {name: path for name, path in files.items() if path is not None}
    for path in wanted.values():
        check_destination(path)
    # A wrong pattern is refused before the target is loaded.
    selected([*cases, *(x for name in IF_CLAIMED for x in run_cases(name))], options.get("only"))
    timeout = options.get("timeout")
    # A debugger requires the target in this process, and the terminal to itself.
    debugged = timeout is None and options.get("jobs", 1) == 1
    target = opened(spec, timeout, here=debugged)
    try:
        if profile != "replay":
            cases = cases_for(profile, target.capabilities)
        if sharp is not None:
            cases = sharpened(cases, options, target, spec, sharp)
        chosen = selected(cases, options.get("only"))
        Expectation(options.get("expected_failures") or {}, target, cases)
        header = make_header(target, spec=spec, profile=profile, vectors=vectors_data())
        header["options"] = {"timeout": timeout}
        header["cases"] = {"profile": len(cases), "chosen": len(chosen)}
        done = kept_of(wanted["report"], header, chosen) if resume else {}
        if not as_json:
            check_text.show_head(header, len(chosen))
        with (
            writers(header, as_json, wanted.get("report"), list(done.values())) as lines,
            counting(profile, not (debugged and sys.stderr.isatty())) as bar,
        ):
            readouts: list[Record] = []

            def sink(record: Record) -> None:
                for writer in lines:
                    writer(record)
                if record.id.startswith("readout/"):
                    readouts.append(record)
                elif readouts and not as_json:
                    check_text.show_first(readouts)
                    readouts.clear()

            options |= {"progress": bar, "sink": sink, "diagnose": Diagnoser(), "done": done}
            options["capture"] = as_json or not debugged
            summary = run(target, cases, spec=spec, **options)
            # Single cases do not test most claims, so a replay does not list the untested ones.
            coverage = None if profile == "replay" else summary.coverage
            changed = changed_since(header, computed_with(target, spec))
            limits = limits_of(summary.records)
            footers = [
                writer.finish(summary.complete, coverage, changed, limits) for writer in lines
            ]
        report = Report(header, summary.records, footers[0])
        write_files(report, wanted)
        if not as_json:
            check_text.show_end(report, wanted, details=profile in ("smoke", "replay"))
        if then is not None and summary.complete:
            then(target)
        exit_with(summary)
    finally:
        with telling(f"a close() of {spec} that returns"):
            getattr(target, "close", lambda: None)()


def sharpened(
    cases: list[RunCase], options: dict[str, Any], target: Target, spec: str, seconds: float
) -> list[RunCase]:
    """Add to ``cases`` a larger noise case that takes at most ``seconds``, and select it in ``options``.

    A noise case compares errors with the rounding errors that the declared precision predicts.
    """
    added = larger_case(target, spec, seconds)
    click.echo(added.words, err=True)
    if added.case is None:
        return cases
    if options["only"] is not None:
        options["only"] = (*options["only"], added.case.id)
    return [*cases, added.case]


def check_destination(path: Path) -> None:
    """Raise OptionError if the folder of a report does not exist; called before the run."""
    if not path.absolute().parent.is_dir():
        raise OptionError(
            f"the folder of {path}",
            "no such folder",
            "make the folder, or write elsewhere",
            code="destination",
        )
    # Opening a pipe for writing would wait for a reader. A device such as /dev/stdout is allowed.
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise OptionError(
            f"a file at {path}",
            "a folder, a pipe or a socket",
            "write elsewhere",
            code="destination",
        )


def vectors_data() -> dict[str, Any]:
    core = open_set("core")
    return {
        "name": core.name,
        "set_version": core.set_version,
        "format_version": core.format_version,
        "digest": core.manifest.content,
    }


class Nowhere:
    """A stream that discards its text."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def kept_of(path: Path, header: dict[str, Any], cases: Sequence[RunCase]) -> dict[str, Record]:
    """Return by id the records that this run takes over from the report at ``path``, and say on stderr how many."""
    found = taken_over(path, header)
    kept = {case.id: found[case.id] for case in cases if case.id in found}
    passed = sum(record.outcome == "pass" for record in kept.values())
    click.echo(f"resumed: {passed} cases passed in {path} and do not run again", err=True)
    return kept


@contextlib.contextmanager
def writers(
    header: dict[str, Any], as_json: bool, path: Path | None, done: Sequence[Record] = ()
) -> Iterator[list[ReportWriter]]:
    """Yield the report writers: one without output, one for stdout if ``as_json``, and one for ``path`` if given.

    The writer without output computes the footer of the report, which is always needed. ``done``: records that are
    already known. All are in the new file before it replaces the old one.
    """
    with contextlib.ExitStack() as stack:
        streams: list[TextIO] = [Nowhere()]  # type: ignore[list-item]
        if as_json:
            # The target's output on sys.stdout must not get between the lines.
            streams.append(sys.stdout)
        begun = path if path is None or not done else path.with_name(path.name + ".begun")
        if begun is not None:
            streams.append(stack.enter_context(begun.open("w", encoding="utf-8", newline="\n")))
        found = [ReportWriter(stream, header) for stream in streams]
        for record in done:
            for writer in found:
                writer(record)
        if begun is not None and path is not None and begun != path:
            begun.replace(path)
        yield found


def write_files(report: Report, wanted: Files) -> None:
    """Write the report as JUnit XML, as an HTML page, or both, as ``wanted`` says."""
    for name, make in (("junit", junit), ("html", lambda one: page(report_lines(one)))):
        if name in wanted:
            # Surrogates in the target's name or messages become question marks.
            wanted[name].write_bytes(make(report).encode("utf-8", "replace"))


def exit_with(summary: Summary) -> None:
    if not summary.complete:
        click.echo("interrupted: the report is not complete", err=True)
    if summary.exit_code:
        click.get_current_context().exit(summary.exit_code)
