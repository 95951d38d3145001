"""The documentation is complete: everything with a name that a user meets stands in it.

Names are looked for in the sources of the pages and in the parts that are made from the code, as docs/conf.py
has them made; nothing is built.
"""

import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from project.public import ROOT, SHOWN, public_names, value_of

import ringspec.cli
from ringspec.conformance.diagnose.mutants import MODULES, MUTANTS
from ringspec.recipes import RECIPES
from ringspec.spec.rules import RULES
from ringspec.vectors.catalogue.flags import FLAGS

DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not {"_build", "generated"} & set(path.relative_to(DOCS).parts)
)
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: (\S+)\n((?:   :.*\n)*)", re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(monkeypatch_module):
    """The functions that make parts of the documentation; tests, cases and rings that show a bug are not looked up."""
    monkeypatch_module.syspath_prepend(str(DOCS))
    names = ("generate", "generate_bugs", "generate_vectors", "rule_index")
    modules = {name: importlib.import_module(name) for name in names}
    for name in ("tests_of", "cases_of", "stated_at"):
        monkeypatch_module.setattr(modules["rule_index"], name, lambda _: [])
    monkeypatch_module.setattr(modules["rule_index"], "tests_of", lambda _: {})
    monkeypatch_module.setattr(modules["generate_bugs"], "case_link", str)
    monkeypatch_module.setattr(modules["generate_bugs"], "has_page", lambda _: False)
    yield modules
    for name in [name for name, one in sys.modules.items() if of_docs(one)]:
        del sys.modules[name]


def of_docs(module: object) -> bool:
    return str(getattr(module, "__file__", "")).startswith(str(DOCS))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def directives(text: str) -> list[tuple[str, str, str]]:
    """(directive, full name, options) of the autodoc directives of a page.

    >>> directives(".. currentmodule:: a.b\\n.. autofunction:: c\\n.. autodata:: d.e\\n   :no-value:\\n")
    [('autofunction', 'a.b.c', ''), ('autodata', 'd.e', ':no-value:')]
    """
    found, current = [], ""
    for directive, name, options in DIRECTIVE.findall(text):
        if directive == "currentmodule":
            current = f"{name}."
        else:
            full = name if "." in name else current + name
            found.append((directive, full, " ".join(options.split())))
    return found


def documented() -> tuple[set[str], set[str]]:
    """(names that a directive names, modules of which a directive shows everything) of all pages."""
    # A page for each module of the specification is made, and one for each class of errors.
    names, modules = set(), {*SHOWN, "ringspec.errors"}
    for path in PAGES:
        for directive, name, options in directives(text_of(path)):
            if directive != "automodule":
                names.add(name)
            elif ":no-members:" not in options:
                modules.add(name)
    return names, modules


def is_documented(path: str, name: str, names: set[str], modules: set[str], prose: str) -> bool:
    """By its own directive, with its whole module, or, if it is no function and no class, in prose."""
    value = value_of(path, name)
    if not inspect.isfunction(value) and not inspect.isclass(value):
        short = f"rs.{name}" if path == "ringspec" else f"{path}.{name}"
        return f"{path}.{name}" in names or short in prose
    home = value.__module__
    return bool({f"{path}.{name}", f"{home}.{name}"} & names) or home in modules


def test_every_public_name_is_documented():
    names, modules = documented()
    prose = "".join(text_of(path) for path in PAGES)
    missing = [
        f"{path}.{name}"
        for path, name in public_names()
        if not is_documented(path, name, names, modules, prose)
    ]
    assert missing == []


def test_a_name_that_no_page_has_is_missed():
    assert not is_documented("ringspec", "shard", set(), set(), "ringspec.shard")
    assert not is_documented("ringspec.formats", "FORMATS", set(), set(), "FORMATS")
    assert is_documented("ringspec", "shard", {"ringspec.rings.layouts.shard"}, set(), "")


def test_the_pages_document_nothing_that_is_not_public():
    names, _ = documented()
    public = {f"{path}.{name}" for path, name in public_names()}
    assert sorted(names - public) == []


def test_every_rule_has_a_place_of_its_own(made):
    page = made["generate"].rules_page()
    assert [rule.id for rule in RULES if f".. _{rule.id.lower()}:\n" not in page] == []


def test_every_flag_and_every_mutant_has_a_section(made):
    flags = made["generate_vectors"].flags_page()
    assert [
        name for name in FLAGS if f".. _flag {name}:\n\n       {name}\n     - " not in flags
    ] == []
    bugs = made["generate_bugs"]
    families = "".join(bugs.family_page(module, lambda *_: "") for module in bugs.MODULES)
    assert [name for name in MUTANTS if f".. _bug-{name}:\n\n{name}\n---" not in families] == []
    listing = bugs.known_bugs()
    assert [name for name in MUTANTS if f"<bug-{name}>" not in listing] == []


def test_the_kill_table_lists_each_bug_in_its_family_once_for_each_recipe():
    page = text_of(DOCS / "conform" / "kill_table.md")
    _, *groups = re.split(
        r'^<details class="browse"><summary>(\w+): (\d+) bugs</summary>$', page, flags=re.M
    )
    families = {module.__name__.rpartition(".")[2]: module.BUGS for module in MODULES}
    assert [f"{name}_bugs" for name in groups[::3]] == list(families)
    for name, count, rows in zip(groups[::3], groups[1::3], groups[2::3], strict=True):
        bugs = [bug.id for bug in families[f"{name}_bugs"]]
        listed = re.findall(r"^\| ([\w-]+) \| (bf16|float32) \|", rows, re.M)
        assert listed == [(bug, recipe) for bug in bugs for recipe in ("bf16", "float32")]
        assert int(count) == len(bugs)


def test_every_recipe_is_a_column_of_the_table(made):
    table = made["generate"].recipe_table()
    assert [name for name in RECIPES if f"  - ``{name}``\n" not in table] == []


def commands(group: click.Command, path: str = "ringspec") -> list[tuple[str, click.Command]]:
    """(words, command) of all commands and groups."""
    found = [(path, group)]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, f"{path} {name}")
    return found


COMMANDS = commands(ringspec.cli.main)


def sections(page: str) -> dict[str, str]:
    """The generated page of the command line by its headings; what comes first is `ringspec` itself."""
    parts = re.split(r"^(ringspec .*)\n-+\n", page, flags=re.M)
    return {"ringspec": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def names_of(parameter: click.Parameter, command: click.Command) -> list[str]:
    """What the help must show of an option or an argument."""
    if isinstance(parameter, click.Option):
        return [*parameter.opts, *parameter.secondary_opts]
    return [parameter.make_metavar(click.Context(command)).strip("[].")]


def test_every_option_of_every_command_is_on_its_page(made):
    shown = sections(made["generate"].command_line())
    assert sorted(shown) == sorted(path for path, _ in COMMANDS)
    missing = [
        f"{path} {name}"
        for path, command in COMMANDS
        for parameter in command.params
        for name in names_of(parameter, command)
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown[path])
    ]
    assert missing == []


def test_every_option_says_what_it_does():
    silent = [
        f"{path} {parameter.name}"
        for path, command in COMMANDS
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert silent == []


def test_every_command_has_an_example():
    examples = "".join(text_of(path) for path in [*PAGES, ROOT / "README.md"])
    missing = [
        path
        for path, command in COMMANDS
        if not isinstance(command, click.Group) and not re.search(rf"{path}(?![\w-])", examples)
    ]
    assert missing == []


# A prompt, a step of a workflow, a launcher.
BEFORE = re.compile(r"^(\$ | *- run: |srun( --\S+)* )")


def invocations(text: str) -> list[list[str]]:
    """The words of each `ringspec ...` in code spans and on lines of code of a page."""
    parts = text.split("```")
    lines = [BEFORE.sub("", line) for block in parts[1::2] for line in block.splitlines()[1:]]
    spans = [span for prose in parts[::2] for span in re.findall(r"`([^`]*)`", prose)]
    found = [one for one in lines + spans if one.startswith("ringspec ")]
    return [shlex.split(one, comments=True) for one in found]


def unknown_in(words: list[str]) -> list[str]:
    """Commands and options in an example that the program does not have."""
    command, rest = ringspec.cli.main, words[1:]
    while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {name for one in command.params if isinstance(one, click.Option) for name in one.opts}
    known |= {name for one in command.params for name in one.secondary_opts} | {"--help", "-h"}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [word for word in given if word not in known]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_the_commands_on_a_page_have_the_options_that_it_shows(page):
    wrong = {" ".join(words): unknown_in(words) for words in invocations(text_of(page))}
    assert {words: names for words, names in wrong.items() if names} == {}


def test_a_command_that_does_not_exist_is_noticed():
    page = "Run `ringspec check mine.py:target`.\n\n```console\n$ ringspec smoke  # minutes\n```\n"
    found = [["ringspec", "smoke"], ["ringspec", "check", "mine.py:target"]]
    assert invocations(page) == found
    assert invocations("```yaml\n   - run: ringspec check --x\n```") == [
        ["ringspec", "check", "--x"]
    ]
    assert invocations("```sh\nsrun --n=1 --gpus=8 ringspec smoke\n```") == [["ringspec", "smoke"]]
    assert unknown_in(["ringspec", "vectors", "lists"]) == ["lists"]
    assert unknown_in(["ringspec", "check", "x", "--job=2"]) == ["--job"]
    assert unknown_in(["ringspec", "simulate", "--no-causal", "-h"]) == []


# What a page shows of a terminal is run by these tests.
RUN_BY = {
    "README.md": "tests/project/test_readme_commands.py",
    "docs/vectors/use.md": "tests/vectors/test_transcripts.py",
    "docs/conform/index.md": "tests/conformance/test_author_examples.py",
    "docs/conform/standins.md": "tests/standins/test_standins_page.py",
    "docs/conform/readout.md": "tests/conformance/readout/test_readout.py",
    "docs/nki/index.md": "tests/nki_impl/test_page.py",
}
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
VERSION = re.compile(r"\b\d+\.\d+\.\d+\b")
COMMAND = re.compile(r"\b(?:python|pytest|ringspec) [\w.-]+")
# Pages with decimals in tables that are no measurements of ours.
NOT_MEASURED: dict[str, str] = {
    "docs/learn/split_attention.md": "its table is counted, exact, and compared by tests/schemes/test_page.py",
}


def console_blocks(text: str) -> list[tuple[str, str]]:
    """(the paragraph before, what stands in it) of the console blocks that show output."""
    parts = text.split("```")
    found = [
        (prose.strip().rpartition("\n\n")[2], block.removeprefix("console\n"))
        for prose, block in zip(parts[::2], parts[1::2], strict=False)
        if block.startswith("console\n")
    ]
    return [one for one in found if any(not line.startswith("$ ") for line in one[1].splitlines())]


def is_measured(text: str) -> bool:
    """Whether a table has a cell with a decimal point, not in code."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.split("|") if "`" not in cell]
    return any(re.search(r"\d\.\d", cell) for cell in cells)


def is_record(before: str) -> bool:
    """Whether a paragraph says when, and with which version, what follows was printed."""
    return bool(DATE.search(before) and VERSION.search(before))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_what_a_page_shows_of_a_terminal_is_run_or_is_a_dated_record(page):
    name = str(page.relative_to(ROOT))
    if name in RUN_BY:
        runs = text_of(ROOT / RUN_BY[name])
        assert page.name in runs
        return
    undated = [block for before, block in console_blocks(text_of(page)) if not is_record(before)]
    assert undated == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_with_measured_figures_says_when_with_which_version_and_how_to_repeat_it(page):
    name, text = str(page.relative_to(ROOT)), text_of(page)
    said = bool(DATE.search(text) and VERSION.search(text) and COMMAND.search(text))
    assert (is_measured(text) and not said) == (name in NOT_MEASURED)


def test_a_block_without_a_date_is_noticed():
    block = "```console\n$ ringspec smoke\n1.0e-4\n```\n"
    assert not is_record(console_blocks(f"It says:\n\n{block}")[0][0])
    assert is_record(console_blocks(f"On 2026-11-21 ringspec 0.1.0 says:\n\n{block}")[0][0])
    assert console_blocks("```console\n$ ringspec smoke\n```\n") == []
