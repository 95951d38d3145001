"""TARGET as text names an object, or an error says what is near."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ringspec.conformance.run import load
from ringspec.conformance.run.load import load_target
from ringspec.errors import RingspecError

REFERENCE = "ringspec.conformance.targets.reference:reference_bf16"
FILE = """
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target.capabilities import Capabilities
from neighbour import NAME

class Mine:
    name, capabilities = NAME, Capabilities()
    def run(self, call):
        import late_neighbour
        return late_neighbour.NAME

def make():
    return Mine()

def broken():
    raise OSError("no device")

class Box:
    target = Mine()

ready = Mine()
number = 3
half = type("Half", (), {"name": "half", "capabilities": 1, "run": 1})()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("NAME = 'mine'\n")
    (tmp_path / "late_neighbour.py").write_text("NAME = 'late'\n")
    before, loaded = list(sys.path), set(sys.modules)
    yield tmp_path / "mine.py"
    sys.path[:] = before
    for name in set(sys.modules) - loaded:
        if "neighbour" in name or name.startswith("ringspec_target"):
            del sys.modules[name]


def test_an_attribute_of_a_module():
    assert load_target(REFERENCE).name == "reference-bf16"


@pytest.mark.parametrize("name", ["ready", "make", "Mine", "Box.target"])
def test_an_object_a_class_and_a_function_of_a_file(file, name):
    target = load_target(f"{file}:{name}")
    assert target.name == "mine"
    assert target.run(None) == "late"


def test_a_module_in_the_folder_where_the_program_was_started(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_target("mine:ready").name == "mine"
    sys.modules.pop("mine")


def test_a_program_and_a_folder_have_prefixes(tmp_path):
    assert type(load_target("cmd:python3 -c 'pass'")).__name__ == "CommandTarget"
    with pytest.raises(RingspecError):
        load_target(f"dir:{tmp_path}")


def test_a_file_without_an_object_is_refused_with_the_form_to_write():
    with pytest.raises(RingspecError, match=r"got 'mine\.py'.*write mine\.py:target"):
        load_target("mine.py")


def test_registered_names_are_found_and_unknown_ones_list_the_known(monkeypatch):
    entry = EntryPoint("my-kernel", REFERENCE, load.GROUP)
    monkeypatch.setattr(load, "entry_points", lambda group: [entry])
    assert load_target("my-kernel").name == "reference-bf16"
    with pytest.raises(RingspecError, match="my-kernel"):
        load_target("my-kernl")
    with pytest.raises(RingspecError, match="my-kernel"):
        load_target("something")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("redy", "write 'ready'"),
        ("number", "without name"),
        ("broken", "no device"),
        ("half", "capabilities"),
    ],
)
def test_what_is_no_target_is_refused_with_the_reason(file, name, says):
    with pytest.raises(RingspecError, match=says):
        load_target(f"{file}:{name}")


@pytest.mark.parametrize(
    "spec",
    ["", " ", ":", "a:", ":b", "none.py:x", "ringspec.nothing:x", "ringspec..x:y", None, 3],
)
def test_texts_that_name_nothing_are_refused(spec):
    with pytest.raises(RingspecError):
        load_target(spec)


MADE = """
from ringspec.conformance.targets.reference import reference_float64 as good

class Target:
    name, capabilities = "mine", good.capabilities
    def run(self, call):
        return good.run(call)
"""
TOLD = {
    "name = 3": "name",
    "name = ''": "name",
    "name = 'x' * 300": "name",
    "notes = 3": "notes",
    "notes = [3]": "notes",
    "versions = 3": "versions",
    "versions = {'a': 3}": "versions",
    "close = 3": "close",
    "run = 3": "run",
    "name = property(lambda self: 1 / 0)": "ZeroDivisionError",
    "notes = property(lambda self: 1 / 0)": "ZeroDivisionError",
    "capabilities = property(lambda self: 1 / 0)": "ZeroDivisionError",
}


@pytest.mark.parametrize("line", TOLD)
def test_what_a_target_says_wrongly_of_itself_is_told_when_it_is_loaded(tmp_path, line):
    (tmp_path / "told.py").write_text(f"{MADE}    {line}\n")
    with pytest.raises(RingspecError, match=TOLD[line]):
        load_target(f"{tmp_path / 'told.py'}:Target")


def test_notes_may_be_one_sentence(tmp_path):
    (tmp_path / "told.py").write_text(f"{MADE}    notes = 'one sentence'\n")
    assert load_target(f"{tmp_path / 'told.py'}:Target").notes == "one sentence"


def test_an_exception_while_importing_names_it(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(RingspecError, match="no_such_module_at_all"):
        load_target(f"{tmp_path / 'bad.py'}:x")


@pytest.mark.parametrize(
    ("line", "named", "fix"),
    [
        ("import no_such_module_at_all", "no_such_module_at_all", "install what it needs, in the"),
        (
            "import flash_attn",
            "flash_attn",
            "import what needs flash_attn inside the function of one",
        ),
        ("Capabilities(masks=('causl',))", "a name in masks; got 'causl'", "write 'causal'."),
        ("Capabilities(workers_=(2,))", "workers_", "see the last line of the traceback."),
        ("raise SystemExit('no GPU')", "SystemExit: no GPU", "see the last line of the traceback."),
        ("def (", "invalid syntax (bad.py, line 2)", "see the last line of the traceback."),
    ],
)
def test_a_target_that_cannot_be_loaded_is_told_once_with_one_remedy(tmp_path, line, named, fix):
    text = f"from ringspec.conformance.target.capabilities import Capabilities\n{line}\n"
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(RingspecError) as refused:
        load_target(f"{tmp_path / 'bad.py'}:x")
    said = str(refused.value)
    assert named in said.splitlines()[0]
    assert said.count("Fix: ") == 1 and said.partition("Fix: ")[2].startswith(fix)
    assert line.startswith("def") or 'bad.py", line 2' in said


def test_loading_imports_neither_torch_nor_jax():
    program = (
        "import sys; from ringspec.conformance.cases import golden; from ringspec.conformance.run import suite; from ringspec.conformance.run import load;"
        f"load.load_target({REFERENCE!r});"
        "assert not {'torch', 'jax', 'pytest', 'hypothesis'} & set(sys.modules)"
    )
    root = Path(load.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
