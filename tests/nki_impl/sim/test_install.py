"""``import nki`` means the simulator inside installed(), and what it meant before outside."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

from nki_impl.sim import collectives, isa, language
from nki_impl.sim.install import installed

SCRIPT = """
import sys
import numpy as np
import nki
import nki.language as nl
import nki.isa as nisa
from nki.collectives import ReplicaGroup

@nki.jit
def double(x):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=float(sys.argv[1]))
    nisa.dma_copy(dst=out, src=tile)
    return out

if __name__ == "__main__":
    import neighbour
    print(double(np.ones((2, 2), np.float32)).sum() + neighbour.VALUE)
"""


def test_nki_and_its_modules_are_the_simulator_inside():
    with installed():
        import nki
        import nki.collectives as ncc
        import nki.isa as nisa
        import nki.language as nl

        assert (nl, nisa, ncc) == (language, isa, collectives)
        assert (nki.language, nki.isa, nki.collectives) == (language, isa, collectives)
        assert nki.dtype is language.DType
        assert nki.dtype.float8_e4m3 is nl.float8_e4m3
        with pytest.raises(ImportError):
            importlib.import_module("nki.profiler")


def test_what_published_kernels_import_besides_is_there():
    with installed():
        from nki.isa.constants import oob_mode
        from nki.language.opcode import maximum
        from nki.typing import tensor

        assert (maximum, oob_mode, tensor) == (language.maximum, isa.oob_mode, language.NkiTensor)
    assert "nki.typing" not in sys.modules


def test_sys_modules_is_as_before_afterwards(monkeypatch):
    real = types.ModuleType("nki")
    below = types.ModuleType("nki.language")
    monkeypatch.setitem(sys.modules, "nki", real)
    monkeypatch.setitem(sys.modules, "nki.language", below)
    monkeypatch.delitem(sys.modules, "nki.isa", raising=False)
    with installed():
        assert sys.modules["nki"] is not real
        sys.modules["nki.made_inside"] = types.ModuleType("nki.made_inside")
    assert sys.modules["nki"] is real
    assert sys.modules["nki.language"] is below
    assert not {"nki.isa", "nki.collectives", "nki.made_inside"} & set(sys.modules)


def test_an_error_inside_restores_all_the_same():
    before = {name for name in sys.modules if name.split(".")[0] == "nki"}
    with pytest.raises(ValueError, match="inside"), installed():
        raise ValueError("inside")
    assert {name for name in sys.modules if name.split(".")[0] == "nki"} == before


def test_installations_nest():
    with installed():
        with installed():
            pass
        assert sys.modules["nki.language"] is language


def test_a_script_runs_with_its_arguments_and_its_neighbours(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("VALUE = 100\n")
    done = subprocess.run(
        [sys.executable, "-m", "nki_impl.sim", str(tmp_path / "script.py"), "2.5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "110.0\n"


def test_the_command_line_explains_itself_and_refuses_no_file(tmp_path, capsys):
    from nki_impl.sim.__main__ import main

    assert main([]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: python -m nki_impl.sim script.py") == 2
    assert main([str(tmp_path / "absent.py")]) == 2
    assert "no file" in capsys.readouterr().err
