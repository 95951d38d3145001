"""Write the pages on golden vectors and exact truth that are made from the code: cases, flags, files.

conf.py calls :func:`pages` before Sphinx reads the folder. Its output is not stored in git.
"""

import re
import shutil

from generate import DOCS, ROOT, RULE_IDS, browsable, details, filter_box, heading, plain

from ringspec.vectors.catalogue import SET_VERSIONS, catalogue
from ringspec.vectors.catalogue.flags import FLAGS

EXACT = ROOT / "ringspec" / "exact"
THEMES = {
    "attention": "Dense attention: masks, features, shapes, formats.",
    "ring": "Rings: layouts, circulations, directions, and features in a ring.",
    "block": "One block; its backward pass takes lse and delta of the whole rows.",
    "merge": "Merging normalised partial results.",
    "schedule": "The block that each worker computes with, and the worker that it sends to.",
    "adversarial": "Inputs for which common shortcuts fail.",
    "number": "Hard cases of correct rounding: ties, subnormal numbers, overflow.",
    "kernel-shape": "128 or 256 tokens per worker; sampled rows are stored.",
    "kernel": "128 or 256 tokens per worker; digests are stored.",
    "partials": "Partial results, and the bits that the recipes of public merges give.",
    "cp-ring": "Rings, as one scheme among others.",
    "double-ring": "A ring of rings.",
    "all-gather": "Gathered keys.",
    "ulysses": "Heads in exchange for tokens.",
    "usp": "A ring of Ulysses groups, and Ulysses groups of rings.",
    "joint": "Text tokens on all ranks.",
    "padded": "Padded documents.",
    "pcp": "Prefill with a cached prefix.",
    "dcp": "Decoding: each rank has a part of the cache.",
    "mla": "Multi-head latent attention in its absorbed form.",
    "pair": "Each scheme with each mask, number of key heads, format and layout.",
}


def pages() -> None:
    """Write vectors/generated: all cases, all flags, and one page for each file of ringspec/exact."""
    folder = DOCS / "vectors" / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "cases.rst").write_text(cases_page(), encoding="utf-8")
    (folder / "flags.rst").write_text(flags_page(), encoding="utf-8")
    for path in sorted(EXACT.glob("[a-z]*.py")):
        (folder / f"{path.stem}.rst").write_text(exact_page(path.stem), encoding="utf-8")


def exact_page(module: str) -> str:
    """The page of one file, as source: reStructuredText would break its formulas."""
    return f"""{heading(f"{module}.py")}
.. py:module:: ringspec.exact.{module}

.. literalinclude:: ../../../ringspec/exact/{module}.py
   :language: python
"""


def link(label: str, text: str) -> str:
    return f":ref:`{text} <{label}>`"


def rule_links(rules: tuple[str, ...]) -> str:
    return " ".join(link(rule.lower(), rule) if rule in RULE_IDS else rule for rule in rules)


def section(title: str) -> str:
    return f"{title}\n{'-' * len(title)}\n"


def cases_page() -> str:
    """All cases by theme; a theme opens on a click, and so does a case, which shows its rules and flags."""
    parts = [
        heading("All cases"),
        "Each case exists for one reason. Click a theme to see its cases, and a case to see the "
        ":doc:`rules <../../spec/generated/rules>` that it covers and its flags: the :doc:`bugs <flags>` that it "
        "detects.\n",
        filter_box("words of an id or a reason, a rule or a flag"),
    ]
    for name, version in SET_VERSIONS.items():
        cases = catalogue(name)
        parts.append(section(f"The {name} set, version {version}: {len(cases)} cases"))
        for theme in dict.fromkeys(case.id.split("/")[0] for case in cases):
            rows = [case_row(case) for case in cases if case.id.split("/")[0] == theme]
            summary = f"`{theme}`: {len(rows)} cases. {THEMES.get(theme, '')}"
            parts.append(details(summary, [browsable(["case", "reason"], rows, "36 64")]))
    return "\n".join(parts)


def case_row(case) -> list[str]:
    gone = "" if case.withdrawn is None else f" (withdrawn since {case.withdrawn.since})"
    flags = " ".join(link(f"flag {flag}", flag) for flag in case.flags)
    found = f"Rules: {rule_links(case.rules) or 'none'}. Flags: {flags or 'none'}.\n"
    return [f"_`{case.id}`{gone}", details(case.reason, [found])]


def flags_page() -> str:
    cases = [case for name in SET_VERSIONS for case in catalogue(name)]
    parts = [
        heading("All flags"),
        "A flag is a class of bugs that real implementations had, or that the definition makes "
        "likely. A case with the flag detects bugs of this class. Click a flag to see its reports and cases. The word after a report says how certain the report is: a fix was "
        "merged (fixed), the maintainers agreed (agreed), the public source shows it (code), "
        "it was reported with an analysis or a reproduction (reported), or stated in a code review "
        "(review). For a flag without reports, no public bug is known.\n",
    ]
    rows = [
        [f".. _flag {flag.name}:\n\n{flag.name}", about_flag(flag, cases)]
        for flag in FLAGS.values()
    ]
    parts.append(filter_box("words of a flag, its effect, a report or a case"))
    parts.append(browsable(["flag", "effect of its bugs"], rows, "32 68"))
    return "\n".join(parts)


def about_flag(flag, cases) -> str:
    """The effect of the bugs, and, on a click, their class, public reports and cases."""
    found = [link(case.id, case.id) for case in cases if flag.name in case.flags]
    reports = [
        f"`{report_name(report)} <{report}>`__ ({status})"
        for report, status in zip(flag.reports, flag.statuses, strict=True)
    ]
    body = [
        f"Class: {plain(flag.bug_class)}.\n",
        f"Reports: {', '.join(reports)}.\n" if reports else "",
        f"Cases: {', '.join(found)}.\n" if found else "",
    ]
    return details(flag.effect, body)


def report_name(address: str) -> str:
    """Owner, repository and number of an issue, or the path of another address.

    >>> report_name("https://github.com/some-one/a-kernel/issues/14")
    'some-one/a-kernel 14'
    """
    path = address.split("://", 1)[1].split("/", 1)[1]
    return re.sub(r"/(issues|pull|commit)/", " ", path)
