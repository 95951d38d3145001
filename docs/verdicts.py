"""Make the matrix of verdicts: public implementations of ring attention by features.

    python docs/verdicts.py [REPORT.jsonl ...]

adds or replaces the rows of the given reports (of ``ringspec check NAME --report REPORT.jsonl``), and makes
docs/conform/verdicts.json, the table of docs/conform/verdicts.md and that of the README again, from all reports in
docs/conform/reports. docs/conform/verdicts.toml says what the reports do not: titles, and which failures a program
without ringspec confirms. A target that is not in it is taken as well. conf.py calls :func:`pages`, which writes the
page, the feed, the badges and the reports for the built documentation.
"""

import dataclasses
import html
import json
import lzma
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verdict_cells import VERDICTS
from verdict_columns import COLUMNS
from verdict_rows import FACTS, ROOT, name_of, profile_ids, read_facts, row_of, row_without_report

from ringspec.conformance.report.report import (
    MAX_BYTES,
    Report,
    case_line,
    read_report,
    report_from,
    report_lines,
)
from ringspec.render import page
from ringspec.render.verdicts import verdicts_page

DOCS = ROOT / "docs"
STORED = DOCS / "conform" / "verdicts.json"
SCHEMA = DOCS / "conform" / "verdicts.schema.json"
REPORTS = DOCS / "conform" / "reports"
REPRODUCERS = DOCS / "conform" / "reproducers"
FORMAT = "ringspec-verdicts-1"
SUFFIX = ".jsonl.xz"
MARK = "<!-- docs/verdicts.py generates this table from the reports -->\n"
# The rows and columns of the README.
FRONT = ("lucidrains", "zhuzilin-ring", "haoliuhl")
FRONT_COLUMNS = ("forward", "backward", "w2", "w3")
PATH = re.compile(r"(?<![\w.:/~<>}$-])/(?:home|Users|root|work|opt|mnt|tmp)/[\w.][^\s\"',)\\]*")


def stored_reports(folder: Path = REPORTS, only: str = "*") -> dict[str, Report]:
    """The stored reports by the name of their file. They are checked like any other file from outside."""
    return {
        path.name.removesuffix(SUFFIX): report_from(unpacked(path), path.name, partial=True)
        for path in sorted(folder.glob(only + SUFFIX))
    }


def unpacked(path: Path) -> bytes:
    with lzma.open(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes in {path.name}; got more")
    return data


def store(report: Report, facts: Mapping[str, Any], folder: Path = REPORTS) -> Path:
    """Write a report, without the paths of the machine on which it was made, and return the file."""
    folder.mkdir(exist_ok=True)
    report = with_count(report)
    path = folder / f"{row_of(report, facts)['id']}{SUFFIX}"
    if path.exists():
        print(f"replaces {path.name}")
    path.write_bytes(lzma.compress(published(report).encode("ascii"), preset=9))
    return path


def with_count(report: Report) -> Report:
    """Add the number of the profile's cases to a report of an earlier version, if it has all of them."""
    header = report.header
    if "cases" in header or {one.id for one in report.records} != profile_ids(header["profile"]):
        return report
    count = len(report.records)
    added = header | {"cases": {"profile": count, "chosen": count}}
    return dataclasses.replace(report, header=added)


def published(report: Report) -> str:
    """The lines of a report, without the names of files and the paths of a machine."""
    header = {name: value for name, value in report.header.items() if name != "files"}
    lines = [header, *map(case_line, report.records)]
    if report.footer is not None:
        lines.append({name: value for name, value in report.footer.items() if name != "files"})
    text = "".join(json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n" for line in lines)
    return PATH.sub("PATH", text)


def feed_of(reports: Iterable[Report], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The feed: what docs/conform/verdicts.schema.json describes."""
    rows = [row_of(report, facts) for report in reports]
    have = {row["target"] for row in rows}
    targets = facts.get("target", {})
    rows += [row_without_report(name, facts) for name in targets if name not in have]
    order = {name: number for number, name in enumerate(targets)}
    last = len(order)
    rows.sort(
        key=lambda row: (row["date"] is None, order.get(row["target"], last), newest_first(row))
    )
    return {
        "format": FORMAT,
        "columns": [column_data(column) for column in COLUMNS],
        "verdicts": VERDICTS,
        "rows": rows,
    }


def column_data(column: Any) -> dict[str, str]:
    fields = dataclasses.asdict(column)
    return {name: fields[name] for name in ("id", "group", "title", "meaning")}


def newest_first(row: Mapping[str, Any]) -> tuple[list[int], str]:
    version = next(iter((row.get("versions") or {}).values()), "")
    return [-int(part) for part in re.findall(r"\d+", version)], row["id"]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """All rows in Markdown, for docs/conform/verdicts.md."""
    lines = [
        "| implementation | versions; date; profile | cases passed, of those claimed | what is wrong | command |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        command = code(row["command"])
        if row["install"]:
            command += f" with the packages in {code(row['install'])}"
        if row["date"]:
            when = f"{versions(row)}; {row['date']}; {words(row['profile'])}"
        else:
            when = "no report"
        failures = wrong(row, with_reproducers=True)
        lines.append(f"| {linked(row)} | {when} | {passed(row)} | {failures} | {command} |")
    return "\n".join(lines) + "\n"


def front_table(rows: list[dict[str, Any]]) -> str:
    """Three rows and four columns of the matrix in Markdown, for the README."""
    titles = {"w2": "2 workers", "w3": "3 or more workers"}
    heads = " | ".join(titles.get(name, name) for name in FRONT_COLUMNS)
    lines = [
        f"| implementation, versions, date and profile of the run | {heads} | what is wrong |",
        f"|{'---|' * (len(FRONT_COLUMNS) + 2)}",
    ]
    for target in FRONT:
        row = next(row for row in rows if row["target"] == target)
        what = f"{linked(row)}, {versions(row)}, {row['date']}, {words(row['profile'])}"
        cells = " | ".join(front_cell(row["cells"][name]) for name in FRONT_COLUMNS)
        lines.append(f"| {what} | {cells} | {wrong(row)} |")
    return "\n".join(lines) + "\n"


def front_cell(cell: Mapping[str, Any]) -> str:
    """A cell in a word, with the number of cases.

    >>> front_cell({"verdict": "wrong", "counts": {"passed": 3, "wrong": 1, "not claimed": 2}})
    'wrong in 1 of 4'
    >>> front_cell({"verdict": "wrong", "counts": {"wrong": 2, "failed": 1}})
    'wrong in 2 of 3, 1 more failure'
    >>> front_cell({"verdict": "passed", "counts": {"passed": 3, "not run": 1}})
    'passed 3 so far'
    """
    counts, verdict = cell["counts"], cell["verdict"]
    run = sum(n for name, n in counts.items() if name not in ("not claimed", "not run"))
    bad, others = counts.get(verdict, 0), run - counts.get("passed", 0) - counts.get(verdict, 0)
    so_far = " so far" if run and counts.get("not run") else ""
    if verdict == "passed" or not bad:
        return f"{verdict} {run or ''}".strip() + so_far
    more = f", {number(others, 'more failure')}" if others else ""
    return f"{verdict} in {bad} of {run}{more}{so_far}"


def linked(row: Mapping[str, Any]) -> str:
    link = row["link"] or ""
    return (
        f"[{words(row['title'])}]({link})" if link.startswith("https://") else words(row["title"])
    )


def words(text: str) -> str:
    r"""Text for a cell of a Markdown table, in which nothing is markup.

    >>> words("a|b <c>\n`d`")
    'a\\|b &lt;c&gt; \\`d\\`'
    """
    plain = "".join(one if one.isprintable() else "\ufffd" for one in " ".join(text.split()))
    return re.sub(r"([\\`*\[\]|_~])", r"\\\1", html.escape(plain, quote=False))


def code(text: str) -> str:
    """Text as code; text with unusual characters as plain text."""
    return f"`{text}`" if re.fullmatch(r"[\w ./:@=+-]+", text, re.ASCII) else words(text)


def versions(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{words(name)} {words(version)}" for name, version in row["versions"].items())


def passed(row: Mapping[str, Any]) -> str:
    if not row["date"]:
        return ""
    counts = row["counts"]
    claimed = sum(n for outcome, n in counts.items() if outcome not in ("not claimed", "not run"))
    return f"{counts.get('pass', 0)} of {claimed}" + ("; incomplete" if row["cut"] else "")


def wrong(row: Mapping[str, Any], with_reproducers: bool = False) -> str:
    """What is wrong in a row, in a few words.

    ``with_reproducers``: with links to the reproducers, as seen from docs/conform.
    """
    without = not row["date"]
    parts = [
        (f"{words(', '.join(fact['versions']))}: " if without else "")
        + f"{', '.join(fact['tensors'])} wrong; {words(fact['text'])}"
        + (f": `{fact['bug']}`" if fact["bug"] else "")
        + (f" ([report]({fact['public_report']}))" if fact["public_report"] else "")
        + (
            f" ([reproducer]({fact['reproducer']}))"
            if with_reproducers and fact["reproducer"]
            else ""
        )
        for fact in row["wrong"]
        if fact["cases"] or without
    ]
    if without:
        return "; ".join([*parts, words(row["cut"])])
    if row["unchecked"]:
        parts.append(f"{number(row['unchecked'], 'failure')} not yet checked by hand")
    if known := row["counts"].get("expected failure"):
        parts.append(f"{number(known, 'known failure')}, with reasons")
    if row["cut"]:
        parts.append(words(row["cut"]))
    return "; ".join(parts) or "nothing found"


def number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def with_table(text: str, made: str) -> str:
    """A page with the table after the mark replaced by another one."""
    start = text.index(MARK) + len(MARK)
    end = start + len(re.match(r"(\|.*\n)*", text[start:])[0])
    return text[:start] + made + text[end:]


def pages(folder: Path = DOCS / "_extra") -> None:
    """Write matrix.html, verdicts.json and its schema, the reproducers, and for each row a badge and the report."""
    for name in ("badges", "reports"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    feed = json.loads(STORED.read_text(encoding="utf-8"))
    (folder / "matrix.html").write_text(verdicts_page(feed), encoding="utf-8")
    for path in (STORED, SCHEMA):
        shutil.copyfile(path, folder / path.name)
    shutil.copytree(
        REPRODUCERS,
        folder / "reproducers",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    for row in feed["rows"]:
        if row.get("badge_file"):
            (folder / row["badge_file"]).write_text(as_text(row["badge"]), "utf-8")
    for id, report in stored_reports().items():
        (folder / "reports" / f"{id}.html").write_text(page(report_lines(report)), "utf-8")
        (folder / "reports" / f"{id}.jsonl").write_text(published(report), "utf-8")


def as_text(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=True) + "\n"


def main(paths: list[str]) -> None:
    facts = read_facts(FACTS)
    for path in paths:
        report = read_report(Path(path), partial=True)
        print(f"{name_of(report)}: {store(report, facts).relative_to(ROOT)}")
    feed = feed_of(stored_reports().values(), facts)
    STORED.write_text(as_text(feed), encoding="utf-8")
    for path, made in (
        (ROOT / "README.md", front_table(feed["rows"])),
        (DOCS / "conform" / "verdicts.md", table(feed["rows"])),
    ):
        path.write_text(with_table(path.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(f"{len(feed['rows'])} rows in {STORED.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
