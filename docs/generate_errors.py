"""Write a page for each class of ringspec.errors: its meaning, its codes, an example, the message and the remedy.

conf.py calls :func:`pages` before Sphinx reads the folder. The examples are the functions of docs/examples/errors.py;
each is run here, and the build fails if it raises another class. The output is not stored in git.
"""

import contextlib
import importlib.util
import inspect
import re
import shutil
import tempfile
import textwrap
from types import ModuleType

from generate import DOCS, heading, plain, table

from ringspec import errors
from ringspec.errors import RingspecError

FOLDER = DOCS / "reference" / "errors"
EXAMPLES = DOCS / "examples" / "errors.py"
# A row of the table of codes in reference/errors.md: class, code, meaning.
ROW = re.compile(r"^\| `(\w+)` \| `([a-z-]+)` \| (.*) \|$", re.M)
Kind = type[RingspecError]


def pages() -> None:
    """Write reference/errors: a page for each class, and their list, which reference/errors.md includes."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    examples = load_examples()
    rows = [["class", "raised when"]]
    for kind in kinds():
        name = kind.__name__
        (FOLDER / f"{name}.rst").write_text(error_page(kind, examples), encoding="utf-8")
        rows.append([f":doc:`{name} <errors/{name}>`", plain(summary(kind))])
    toctree = [".. toctree::", "   :hidden:", "", *(f"   errors/{k.__name__}" for k in kinds()), ""]
    listing = table(rows, "26 74") + "\n" + "\n".join(toctree)
    (FOLDER / "list.txt").write_text(listing, encoding="utf-8")


def kinds() -> list[Kind]:
    """All classes, the base first."""
    found = [getattr(errors, name) for name in errors.__all__]
    return sorted(found, key=lambda kind: (kind is not RingspecError, kind.__name__))


def load_examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_examples", EXAMPLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(kind: Kind) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def error_page(kind: Kind, examples: ModuleType) -> str:
    name = kind.__name__
    example = getattr(examples, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
    error, body = raised(kind, example), body_of(example)
    codes = [row[1:] for row in code_rows() if row[0] == name]
    parts = [
        f".. _error-{name}:\n",
        heading(name),
        f".. autoclass:: ringspec.errors.{name}\n   :no-members:\n",
        "Codes\n-----\n",
        table(
            [["code", "raised when"], *([f"``{c}``", plain(text)] for c, text in codes)], "26 74"
        ),
        "Example\n-------\n",
        "``x`` is an array of shape [1, 2, 8, 4].\n" if re.search(r"\bx\b", body) else "",
        f".. code-block:: python\n\n{textwrap.indent(body, '   ')}",
        f"This raises ``{type(error).__name__}`` with the code ``{error.code}``:\n",
        f".. code-block:: text\n\n{textwrap.indent(textwrap.fill(str(error), 88), '   ')}\n",
        "How to fix it\n-------------\n",
        plain(" ".join((inspect.getdoc(example) or "").split())) + "\n",
    ]
    return "\n".join(parts)


def code_rows() -> list[tuple[str, str, str]]:
    """(class, code, meaning) of the table in reference/errors.md."""
    return ROW.findall((DOCS / "reference" / "errors.md").read_text(encoding="utf-8"))


def raised(kind: Kind, example) -> RingspecError:
    """The error that an example raises, in an empty folder. Another class, or none, is an AssertionError."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            example()
        except RingspecError as error:
            right = isinstance(error, kind) if kind is RingspecError else type(error) is kind
            assert right, f"the example of {kind.__name__} raises {type(error).__name__}: {error}"
            return error
    raise AssertionError(f"the example of {kind.__name__} raises nothing")


def body_of(function) -> str:
    """The source of a function without its first line and docstring.

    >>> body_of(load_examples().option_error)
    'rs.attention(x, x, x, window=-1)\\n'
    """
    source = inspect.getsource(function)
    return textwrap.dedent(source.split('"""\n', 1)[1])
