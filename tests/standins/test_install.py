"""``installed`` and ``python -m ringspec.standins``: what is replaced, what is refused, and what is restored."""

import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

from ringspec.errors import OptionError
from ringspec.standins import installed, standin

VERSIONS = {"flash_attn==2.6": "2.6.3", "flash_attn==2.7.4.post1": "2.7.4", "flash_attn": "2.8.3"}


@pytest.mark.parametrize(("name", "version"), VERSIONS.items())
def test_the_version_is_the_one_named(name, version):
    with installed(name):
        import flash_attn

        assert flash_attn.__version__ == version


def test_sys_modules_is_restored_after_an_exception():
    finders = list(sys.meta_path)
    with pytest.raises(KeyError), installed("flash_attn"):
        import flash_attn.flash_attn_interface  # noqa: F401

        assert importlib.util.find_spec("flash_attn") is not None
        raise KeyError("of the program")
    assert [name for name in sys.modules if name.split(".")[0] == "flash_attn"] == []
    assert sys.meta_path == finders


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.layers", "flash_attn_2_cuda"])
def test_a_package_that_is_already_imported_is_refused_and_stays(monkeypatch, name):
    real = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, real)
    with (
        pytest.raises(OptionError, match=f"not yet imported.* got {name}"),
        installed("flash_attn"),
    ):
        raise AssertionError
    assert sys.modules[name] is real


def test_a_second_stand_in_for_the_same_package_is_refused():
    with installed("flash_attn"):
        import flash_attn

        with pytest.raises(OptionError, match="in use"), installed("flash_attn==2.6"):
            raise AssertionError
        assert sys.modules["flash_attn"] is flash_attn


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash_atn", "Fix: write 'flash_attn'"),
        ("flash_attn==2.5", "2.6, 2.7, 2.8; got 2.5"),
        ("flash_attn==2.65", "got 2.65"),
        (None, "the name of a stand-in"),
    ],
)
def test_an_unknown_name_or_version_is_refused(name, words):
    with pytest.raises(OptionError, match=words):
        standin(name)
    with pytest.raises(OptionError, match=words), installed(name):
        raise AssertionError


def test_no_name_is_refused():
    with pytest.raises(OptionError, match="the name of a stand-in"), installed():
        raise AssertionError


def test_a_function_that_the_stand_in_lacks_is_named():
    with installed("flash_attn"):
        import flash_attn

        with pytest.raises(
            AttributeError, match="got 'flash_attn_fun'.*Fix: write 'flash_attn_func'"
        ):
            flash_attn.flash_attn_fun  # noqa: B018
        with pytest.raises(ImportError, match="cannot import name 'flash_attn_fun'.*standins"):
            from flash_attn import flash_attn_fun  # noqa: F401


def test_a_module_that_the_stand_in_lacks_is_named():
    with installed("flash_attn"), pytest.raises(ModuleNotFoundError, match=r"got flash_attn\.ops"):
        import flash_attn.ops  # noqa: F401


def test_every_version_has_functions_that_a_program_can_inspect():
    """Rings read the defaults of these functions."""
    for name in VERSIONS:
        with installed(name):
            from flash_attn.flash_attn_interface import _flash_attn_forward
        assert inspect.isfunction(_flash_attn_forward)
        names = list(inspect.signature(_flash_attn_forward).parameters)
        window = ["window_size"] if "2.6" in name else ["window_size_left", "window_size_right"]
        assert names == [
            *("q", "k", "v", "dropout_p", "softmax_scale", "causal"),
            *window,
            *("softcap", "alibi_slopes", "return_softmax"),
        ]


def test_importing_the_package_does_not_import_torch():
    code = "import sys, ringspec.standins as s\nwith s.installed('flash_attn'):\n    import flash_attn\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


SCRIPT = """
import sys
import flash_attn
from beside import WORD
print(flash_attn.__version__, WORD, sys.argv[1:], __name__)
sys.exit(3)
"""


def command(folder, *arguments):
    given = [sys.executable, "-m", "ringspec.standins", *arguments]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("program", [("script.py",), ("-m", "script")])
def test_a_program_runs_as_itself_with_the_stand_in(tmp_path, program):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'here'\n")
    ran = command(tmp_path, "flash_attn==2.7", "--", *program, "--steps", "2")
    assert (ran.returncode, ran.stdout) == (3, "2.7.4 here ['--steps', '2'] __main__\n"), ran.stderr
    assert "stand-in with the interface of flash_attn 2.7" in ran.stderr


@pytest.mark.parametrize(
    "arguments", [("flash_attn", "x.py"), ("--", "x.py"), ("flash_attn", "--")]
)
def test_a_command_without_stand_in_or_script_says_how_to_write_it(tmp_path, arguments):
    ran = command(tmp_path, *arguments)
    assert ran.returncode == 1 and "python -m ringspec.standins NAME... -- script.py" in ran.stderr
