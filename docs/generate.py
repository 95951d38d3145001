"""Write the pages made from the code: specification, rules, command line, recipes.

conf.py calls these functions before Sphinx reads the folder. Their output is not stored in git.
"""

import ast
import dataclasses
import html
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import architecture
import click
import rule_index
from formulas import ESSENCE, FORMULAS

import ringspec.cli
from ringspec.conformance.report.report import read_report, report_lines
from ringspec.merges import MERGES
from ringspec.recipes import RECIPES, ROUNDING_POINTS
from ringspec.render import page
from ringspec.spec.rules import RULES, Rule

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGE = ROOT / "ringspec"
ROOMS = ("spec", "problem", "rings")  # the packages of the specification

CODE = re.compile(r"`+([^`]+)`+")
SPECIAL = re.compile(r"([\\*_|])")
# A line of a list in a docstring: ``name`` or ``name``, ``name``, two spaces or more, its meaning.
LISTED = re.compile(
    r"^(?P<mark>\d+\. )?(?P<names>``[^`]+``(?:, ``[^`]+``)*) {2,}(?P<meaning>\S.*)$"
)
RULE_IDS = {rule.id for rule in RULES}
# Code and roles come first, so that a rule's name inside them is not found.
RULE_ID = re.compile(r"``.+?``|`.+?`|(?<![\w-])(?P<rule>[A-Z]+-\d+)(?![\w-])")


def notebooks(executed: str | None) -> None:
    """Copy the notebooks (executed ones if given), with links that fit their new place, and write their list."""
    source = Path(executed) if executed else ROOT / "notebooks"
    target = DOCS / "learn" / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    entries = []
    for path in sorted(source.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../../")
        (target / path.name).write_text(text, encoding="utf-8")
        entries.append(f"   notebooks/{path.stem}")
    # Sphinx warns about a toctree with no entry.
    listing = "\n".join([".. toctree::", "   :maxdepth: 1", "", *entries, ""]) if entries else ""
    (target / "list.txt").write_text(listing, encoding="utf-8")


def example_report() -> None:
    """Write the report of the H200 record as a page, like `ringspec check --html`."""
    folder = DOCS / "_extra"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    report = read_report(DOCS / "conform" / "h200" / "report.jsonl")
    (folder / "h200-report.html").write_text(page(report_lines(report)), encoding="utf-8")


def specification() -> None:
    """Write one page for each file of the specification: its docstrings, then the file.

    spec/index.md lists them in reading order; Sphinx warns about a page that is missing there.
    """
    folder = DOCS / "spec" / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    paths = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("[a-z]*.py"))]
    for path in paths:
        is_rules = path.stem == "rules"
        page = rules_page() if is_rules else module_page(path.parent.name, path.stem)
        (folder / f"{path.stem}.rst").write_text(page, encoding="utf-8")


def module_page(room: str, module: str) -> str:
    """The page of a file: its docstring, then each definition as its rendered docstring and its code."""
    name = f"ringspec.{room}.{module}"
    source = (PACKAGE / room / f"{module}.py").read_text(encoding="utf-8")
    parts = [heading(f"{module}.py"), f".. automodule:: {name}\n   :no-members:\n"]
    for definition, code in pieces(source):
        if definition:
            parts.append(f".. auto{definition[0]}:: {name}.{definition[1]}\n")
        if code.strip():
            parts.append(f".. code-block:: python\n\n{textwrap.indent(code, '   ')}")
    return "\n".join(parts)


Piece = tuple[tuple[str, str] | None, str]


def pieces(source: str) -> Iterator[Piece]:
    """((function or class, name), code without docstrings) of a file in order; None for other code.

    >>> text = "import os\\n\\n\\ndef f():\\n    'Return 1.'\\n    return 1\\n"
    >>> list(pieces(text))
    [(None, 'import os\\n'), (('function', 'f'), 'def f():\\n    return 1\\n')]
    """
    lines, body = source.splitlines(), ast.parse(source).body
    start, other = 0, ""
    for node in body:
        part = code_of(node, lines[start : node.end_lineno], start)
        start = node.end_lineno
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            if other.strip():
                yield None, other.strip("\n") + "\n"
            other = ""
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield (kind, node.name), part.strip("\n") + "\n"
        elif node is not body[0] or not ast.get_docstring(ast.parse(source)):
            other += part
    if other.strip():
        yield None, other.strip("\n") + "\n"


def code_of(node: ast.stmt, lines: list[str], start: int) -> str:
    """The lines of a statement, which begin at ``start``, without the docstrings in it."""
    kept = dict(enumerate(lines, start + 1))
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
            text = inner.body[0]
            for number in range(text.lineno, text.end_lineno + 1):
                kept.pop(number)
            if not kept.get(text.end_lineno + 1, "x").strip():
                kept.pop(text.end_lineno + 1)
    return "".join(f"{line}\n" for line in kept.values())


def heading(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n"


def plain(text: str) -> str:
    """Escape text for reStructuredText; parts in backticks stay code.

    >>> plain("o_i of `x * y`")
    'o\\\\_i of ``x * y``'
    """
    parts = CODE.split(text)
    for number, part in enumerate(parts):
        is_code = number % 2 == 1
        parts[number] = f"``{part}``" if is_code else SPECIAL.sub(r"\\\1", part)
    return "".join(parts)


def table(rows: list[list[str]], widths: str) -> str:
    """A list-table; the first row is its head."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in rows:
        for number, cell in enumerate(row):
            lines.append(f"   {'* -' if number == 0 else '  -'} {cell}")
    return "\n".join(lines) + "\n"


def details(summary: str, body: list[str]) -> str:
    """A summary that shows ``body`` (reStructuredText) when it is clicked; a script is not needed."""
    return "\n".join(
        [
            f".. raw:: html\n\n   <details><summary>{html_text(summary)}</summary>\n",
            *body,
            ".. raw:: html\n\n   </details>\n",
        ]
    )


def html_text(text: str) -> str:
    """Text as HTML; parts in backticks are code.

    >>> html_text("iff `a` < b")
    'iff <code>a</code> &lt; b'
    """
    return CODE.sub(r"<code>\1</code>", html.escape(text, quote=False))


def browsable(head: list[str], rows: list[list[str]], widths: str, classes: str = "") -> str:
    """A table whose cells are blocks of reStructuredText; _static/browse.js filters its rows."""
    lines = [
        ".. list-table::",
        f"   :class: browse {classes}".rstrip(),
        "   :header-rows: 1",
        f"   :widths: {widths}",
        "",
    ]
    for row in [head, *rows]:
        for number, cell in enumerate(row):
            mark = "   * - " if number == 0 else "     - "
            lines.append(mark + textwrap.indent(cell.rstrip(), " " * 7).lstrip())
    return "\n".join(lines) + "\n"


def filter_box(what: str) -> str:
    """The place where _static/browse.js puts a field that filters the tables of the page."""
    return (
        f'.. raw:: html\n\n   <div class="browse-filter" data-what="{html.escape(what)}"></div>\n'
    )


def open_all() -> str:
    """The place where _static/browse.js puts a button that opens and closes all folds of the page."""
    return '.. raw:: html\n\n   <div class="open-all"></div>\n'


def rules_page() -> str:
    """The page of rules: a row for each; a click shows its formula, code, tests and golden cases."""
    parts = [
        heading("rules.py"),
        ".. automodule:: ringspec.spec.rules\n   :no-members:\n",
        f"There are {len(RULES)} rules. {RULES_INTRODUCTION}",
        filter_box("an id, or words of a rule, a function, a test or a case"),
    ]
    for family, meaning in FAMILIES.items():
        title = f"{family}: {meaning}"
        parts.append(f"{title}\n{'-' * len(title)}\n")
        rules = [rule for rule in RULES if rule.id.partition("-")[0] == family]
        rows = [[f".. _{rule.id.lower()}:\n\n{rule.id}", about_rule(rule)] for rule in rules]
        parts.append(browsable(["rule", "what must hold"], rows, "14 86", "short-ids"))
    parts.append("In Python\n---------\n")
    parts.append(".. autoclass:: ringspec.spec.rules.Rule\n")
    parts.append(".. autofunction:: ringspec.spec.rules.rule\n")
    return "\n".join(parts)


FAMILIES = {
    "MASK": "visible pairs",
    "FWD": "the forward pass",
    "DROP": "dropout",
    "BWD": "the backward pass",
    "SOFT": "the running softmax",
    "LAYOUT": "layouts",
    "RING": "the ring",
    "CP": "context parallelism",
    "NUM": "rounding",
}
RULES_INTRODUCTION = """Click a rule to see its formula, code, tests and golden cases. In the formulas i counts queries, j
keys, h query heads, b batches, n the sinks of a head; pq and pk are global positions.
``python -m pytest --rule ID`` runs all tests of a rule, including parametrised ones.
``ringspec vectors list --rule ID`` lists its golden cases. The functions listed under "Code" name the rule in their text.
"""
MOST_CASES = 8


def about_rule(rule: Rule) -> str:
    """The sentence of a rule, and, on a click, its formula and where it is stated, tested and covered."""
    stated = FORMULAS[rule.id]
    body = [f".. math:: {line}\n" for line in stated.lines]
    if stated.where:
        body.append(f"{plain(stated.where)}\n")
    modules = rule_index.modules_of(rule)
    code = [f":py:mod:`{name.rpartition('.')[2]} <{name}>`" for name in modules]
    code += [f":py:obj:`~{name}`" for name in rule_index.stated_at(rule)]
    tests = [
        f"``{path}``: {', '.join(f'``{name}``' for name in names)}"
        for path, names in rule_index.tests_of(rule.id).items()
    ]
    body.append(f"* Code: {', '.join(code)}")
    body.append(f"* Tests: {'; '.join(tests)}")
    body.append(f"* Golden cases: {golden_cases(rule.id)}\n")
    return details(rule.sentence, body)


def golden_cases(rule: str) -> str:
    """Links to the first cases, and the command that lists the others."""
    cases = rule_index.cases_of(rule)
    if not cases:
        named = rule_index.layout_cases_of(rule)
        if not named:
            return "none yet"
        shown = ", ".join(f"``{id}``" for id in named[:MOST_CASES])
        return (
            f"none; cases of the operation ``layout``: {shown}, and {len(named) - MOST_CASES} more"
        )
    shown = ", ".join(f":ref:`{id} <{id}>`" for id in cases[:MOST_CASES])
    more = len(cases) - MOST_CASES
    return (
        shown
        if more <= 0
        else f"{shown}, and {more} more (``ringspec vectors list --rule {rule}``)"
    )


def reference() -> None:
    """Write reference/generated: parts that the pages of reference/ include."""
    folder = DOCS / "reference" / "generated"
    folder.mkdir(exist_ok=True)
    (folder / "cli.rst").write_text(command_line(), encoding="utf-8")
    (folder / "recipes.rst").write_text(recipe_table(), encoding="utf-8")
    (folder / "merges.rst").write_text(merge_table(), encoding="utf-8")
    (folder / "architecture.rst").write_text(architecture.table(), encoding="utf-8")


WHOLE_SENTENCE = 1000  # click cuts a longer first sentence


def command_line() -> str:
    """The help of every command, as click prints it; the commands' help is folded."""
    program = ringspec.cli.main
    context = click_context(program, "ringspec", None)
    parts = [help_of(program, context), open_all(), *commands_of(program, context, "ringspec")]
    return "\n".join(parts)


def commands_of(group: click.Group, context: click.Context, path: str) -> list[str]:
    """Sections of a group's commands: the first sentence, then the help on a click. A group's commands follow it."""
    parts = []
    for name, command in sorted(group.commands.items()):
        title = f"{path} {name}"
        inner = click_context(command, name, context)
        summary = command.get_short_help_str(limit=WHOLE_SENTENCE)
        parts += [f"{title}\n{'-' * len(title)}\n", details(summary, [help_of(command, inner)])]
        if isinstance(command, click.Group):
            parts += commands_of(command, inner, title)
    return parts


def click_context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return command.make_context(
        name, [], parent, resilient_parsing=True, terminal_width=92, max_content_width=92
    )


def help_of(command: click.Command, context: click.Context) -> str:
    text = "\n".join(f"   {line}".rstrip() for line in command.get_help(context).splitlines())
    return f".. code-block:: text\n\n{text}\n"


def merge_table() -> str:
    """The table of merge recipes: a row for each, with its source and what it was compared with."""
    rows = [["recipe", "form", "what it is", "source", "releases", "compared with"]]
    for name, one in MERGES.items():
        compared = one.compared_with or "**nothing**"
        if one.gradients_compared_with:
            compared += f"; gradients: {one.gradients_compared_with}"
        elif one.dq is not None:
            compared += "; gradients: **nothing**"
        rows.append([f"``{name}``", one.form, one.note, one.source, one.versions, compared])
    rows[1:] = [[row[0], *(plain_cell(cell) for cell in row[1:])] for row in rows[1:]]
    return table(rows, "2 2 4 4 2 4")


def plain_cell(text: str) -> str:
    """A cell without reStructuredText's targets and substitutions: a name such as ``fwd_`` is no link.

    >>> plain_cell("flash_attn_fwd_* and x_")
    'flash_attn_fwd\\\\_\\\\* and x\\\\_'
    """
    kept = re.split(r"(\*\*.*?\*\*)", text)
    return "".join(part if part.startswith("**") else SPECIAL.sub(r"\\\1", part) for part in kept)


def recipe_table() -> str:
    """The table of recipes: a row for each rounding point; a blank is float64."""
    names = list(RECIPES)
    rows = [["rounding point", *(f"``{name}``" for name in names)]]
    for point in (*ROUNDING_POINTS, "merge_order", "tile_q", "tile_k", "p_relative_to"):
        values = [getattr(RECIPES[name], point) for name in names]
        rows.append([f"``{point}``", *("" if v in ("float64", None) else str(v) for v in values)])
    return table(rows, " ".join(["2"] * (len(names) + 1)))


def prepare_docstring(app, what, name, obj, options, lines) -> None:
    """Hook of autodoc: turn aligned lists into bullet lists, and names of rules into links."""
    if name == "ringspec.spec.essence":
        lines[:] = with_formulas(lines)
    result: list[str] = []
    margin = ""  # of the list that this line continues
    in_doctest = False
    for line in lines:
        item = LISTED.match(line)
        in_doctest = bool(line.strip()) and (in_doctest or line.lstrip().startswith(">>>"))
        if item:
            if not margin and result and result[-1].strip():
                result.append("")
            mark = item["mark"] or "* "
            margin = " " * len(mark)
            line = f"{mark}{item['names']}: {item['meaning']}"
        elif margin and line.startswith("  "):
            line = margin + line.strip()
        elif line.strip():
            if margin and result[-1].strip():
                result.append("")
            margin = ""
        result.append(line if in_doctest else RULE_ID.sub(link_to_rule, line))
    lines[:] = result


def with_formulas(lines: list[str]) -> list[str]:
    """Replace the indented formulas of the essence, which are text for a terminal, by typeset ones."""
    indented = [number for number, line in enumerate(lines) if line.startswith("    ")]
    first, last = indented[0], indented[-1]
    typeset = [part for one in ESSENCE for part in (f".. math:: {one}", "")]
    return [*lines[:first], *typeset, *lines[last + 1 :]]


def link_to_rule(found: re.Match[str]) -> str:
    """Replace the name of a rule by a link; return any other match unchanged."""
    rule = found["rule"]
    return f":ref:`{rule} <{rule.lower()}>`" if rule in RULE_IDS else found[0]


BACK_LINK = re.compile(
    r'(<div class="viewcode-block" id="(?P<name>[^"]+)">\s*)<a class="viewcode-back" href="[^"]*">(?P<text>.*?)</a>'
)


def correct_back_links(app, pagename, templatename, context, doctree) -> None:
    """For pages of source code: [docs] leads to where an object is documented.

    Sphinx takes one prefix for all names of a file, which fails where some of them are also documented
    as names of the package.
    """
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    module = pagename.removeprefix("_modules/").replace("/", ".")
    objects = app.env.domains["py"].objects

    def back_link(found: re.Match[str]) -> str:
        own = f"{module}.{found['name']}"
        ends = [name for name in objects if name.endswith(f".{found['name']}")]
        name = next(iter([name for name in ends if name == own] or ends), "")
        if not name:
            return found[1]
        address = app.builder.get_relative_uri(pagename, objects[name].docname)
        link = f"{address}#{objects[name].node_id}"
        return f'{found[1]}<a class="viewcode-back" href="{link}">{found["text"]}</a>'

    context["body"] = BACK_LINK.sub(back_link, context["body"])


@dataclasses.dataclass
class Shown:
    """A default value that is shown as this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def signature_as_written(app, what, name, obj, options, arguments, result):
    """Hook of autodoc: show types as in the source; Sphinx would expand every alias."""
    if what not in ("class", "function", "method") or arguments is None:
        return None
    signature = inspect.signature(obj)
    parameters = []
    for parameter in signature.parameters.values():
        if what == "method" and parameter.name == "self":
            continue
        parameter = parameter.replace(default=default_as_written(parameter.default))
        parameters.append(parameter.replace(annotation=as_text(parameter.annotation)))
    own = signature.replace(
        parameters=parameters, return_annotation=as_text(signature.return_annotation)
    )
    arguments, _, result = str(own).partition(" -> ")
    return arguments, "" if what == "class" else result


def default_as_written(value):
    """Return a default value whose text has no memory address: functions are shown by name."""
    if isinstance(value, tuple):
        return tuple(default_as_written(part) for part in value)
    if callable(value) and value is not inspect.Parameter.empty:
        return Shown(value.__name__)
    return value


def as_text(annotation):
    """Return an annotation that prints without quotes."""
    return Shown(annotation) if isinstance(annotation, str) else annotation
