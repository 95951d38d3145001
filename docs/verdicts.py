"""Make the verdict tables from the reports of the bundled targets on public implementations.

    python docs/verdicts.py REPORT.jsonl ...

writes docs/conform/verdicts.json from reports of ``ringspec check NAME --report REPORT.jsonl`` and prints
the table of docs/conform/verdicts.md and the shorter one of the README, which tests/project/test_verdicts.py
compares with that file. Each row keeps the day of its run, the versions, and the commands that repeat it; a
target that is not in ``ABOUT`` is refused.
"""

import json
import re
import sys
from pathlib import Path

from ringspec.compare.bounds import RESULTS
from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.report import Report, counts_of, read_report

STORED = Path(__file__).parent / "conform" / "verdicts.json"
REQUIREMENTS = "ringspec/conformance/targets/requirements-{}.txt"
EXPECTED = "ringspec/conformance/targets/torch_cp_expected_{}.toml"
# target: (what it is, where, the requirements file, the packages whose versions matter)
ABOUT = {
    "haoliuhl": (
        "ringattention (JAX), by the authors of the ring attention paper",
        "https://github.com/haoliuhl/ringattention",
        "haoliuhl",
        ("ringattention", "jax"),
    ),
    "lucidrains": (
        "ring-attention-pytorch (lucidrains), CPU",
        "https://github.com/lucidrains/ring-attention-pytorch",
        "lucidrains",
        ("ring-attention-pytorch", "torch"),
    ),
    "diffusers-ring": (
        "diffusers, ring attention",
        "https://github.com/huggingface/diffusers",
        "diffusers",
        ("diffusers", "torch"),
    ),
    "nki_impl": ("nki_impl on the bundled simulator", "../nki/index.md", None, ("ringspec",)),
}
TORCH = "https://github.com/pytorch/pytorch/tree/main/torch/distributed/tensor/experimental"
for _layout in ("contiguous", "zigzag"):
    for _rotation in ("alltoall", "allgather"):
        for _inputs in ("", "-16bit"):
            name = f"torch-{_layout}-{_rotation}{_inputs}"
            formats = "bfloat16, float16" if _inputs else "float32"
            title = f"PyTorch context parallel, CPU, {_layout}, {_rotation}, {formats}"
            ABOUT[name] = (title, TORCH, "torch", ("torch",))


def row_of(report: Report) -> dict:
    """One report as a row, plain data. Raises ValueError for an incomplete report."""
    target = report.header["target"]["spec"]
    if not report.complete:
        raise ValueError(f"expected a report with a footer; {target} has none: run the check again")
    title, link, requirements, packages = ABOUT[target]
    counts = counts_of(report.records)
    profile = report.header["profile"]
    command = f"ringspec check {target}" + ("" if profile == "core" else f" --profile {profile}")
    if counts.get("expected failure"):
        command += f" --expected-failures {EXPECTED.format(target.split('-')[1])}"
    found = most_likely(report.records)
    return {
        "target": target,
        "title": title,
        "link": link,
        "date": report.header["started"][:10],
        "versions": {name: report.header["versions"][name] for name in packages},
        "specification": report.header["versions"]["specification"],
        "install": REQUIREMENTS.format(requirements) if requirements else None,
        "command": command,
        "counts": counts,
        "failed_in": failed_in(report),
        "diagnosis": found and {key: found[key] for key in ("id", "title", "count", "of", "links")},
    }


def failed_in(report: Report) -> dict[str, int]:
    """Tensors by the number of cases in which they are wrong, over all cases that did not pass."""
    wrong: dict[str, int] = {}
    for record in report.records:
        names = {one.tensor for one in record.findings if one.kind != "ok"}
        for name in names if record.outcome == "mismatch" else ():
            wrong[name] = wrong.get(name, 0) + 1
    return {name: wrong[name] for name in RESULTS if name in wrong}


# The rows of the README: two that fail in different ways, and one that passes.
FRONT = ("lucidrains", "diffusers-ring", "haoliuhl")


def table(rows: list[dict]) -> str:
    """All rows in Markdown, for docs/conform/verdicts.md."""
    lines = [
        "| implementation | versions; date | cases passed, of those claimed | what is wrong | command |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        command = f"`{row['command']}`"
        if row["install"]:
            command += f" with the packages in `{row['install']}`"
        lines.append(
            f"| [{row['title']}]({row['link']}) | {versions(row)}; {row['date']} | {passed(row)} "
            f"| {wrong(row)} | {command} |"
        )
    return "\n".join(lines) + "\n"


def front_table(rows: list[dict]) -> str:
    """The first row of each target in FRONT, for the README."""
    lines = [
        "| implementation, versions, date of the run | cases passed, of those claimed | what is wrong |",
        "|---|---|---|",
    ]
    for target in FRONT:
        row = next(row for row in rows if row["target"] == target)
        what = f"[{row['title']}]({row['link']}), {versions(row)}, {row['date']}"
        lines.append(f"| {what} | {passed(row)} | {wrong(row)} |")
    return "\n".join(lines) + "\n"


def versions(row: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def passed(row: dict) -> str:
    counts = row["counts"]
    claimed = sum(n for outcome, n in counts.items() if outcome not in ("not claimed", "not run"))
    return f"{counts.get('pass', 0)} of {claimed}"


def wrong(row: dict) -> str:
    parts = []
    if row["failed_in"]:
        parts.append(", ".join(row["failed_in"]) + " wrong")
    found = row["diagnosis"]
    if found and found["id"]:
        # A report to another project with the same bug does not belong here.
        own = re.escape(row["link"]) + "/(issues|pull|commit)/"
        reports = [link for link in found["links"] if re.match(own, link)]
        where = f" ([report]({reports[0]}))" if reports else ""
        parts.append(f"{found['title']}: `{found['id']}`{where}")
    if row["counts"].get("expected failure"):
        count = row["counts"]["expected failure"]
        parts.append(f"{count} known failure{'s' if count > 1 else ''}, with reasons")
    return "; ".join(parts) or "nothing found"


def main(paths: list[str]) -> None:
    rows = [row_of(read_report(Path(path))) for path in paths]
    STORED.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(rows))
    print(front_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
