"""RINGSPEC_NKI chooses the backend; placeholders of the public index are refused with a command."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from nki_impl import lang

INDEX = "https://pip.repos.neuron.amazonaws.com"


def test_the_default_is_the_simulator(monkeypatch):
    monkeypatch.delenv("RINGSPEC_NKI", raising=False)
    assert lang.chosen_backend() == "simulator"
    root, language, isa, collectives = lang.load_backend("simulator")
    assert root.__name__ == "nki_impl.sim.nki"
    assert (language.__name__, isa.__name__) == ("nki_impl.sim.language", "nki_impl.sim.isa")
    assert collectives.__name__ == "nki_impl.sim.collectives"


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("RINGSPEC_NKI", "gpu")
    with pytest.raises(lang.BackendError, match="simulator, nki-simulate, device"):
        lang.chosen_backend()


def python(code, tmp_path, **environment):
    """Run code in a process of its own, with tmp_path first on the path."""
    import os

    path = os.pathsep.join([str(tmp_path), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def install(tmp_path, name, version, files):
    """What pip leaves behind of a distribution."""
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


PLACEHOLDER = {"nki/__init__.py": "raise ImportError('WRONG PACKAGE')\n"}
REAL = {
    "nki/__init__.py": "",
    "nki/language.py": "",
    "nki/isa/__init__.py": "",
    "nki/collectives/__init__.py": "",
}
IMPORT = "from nki_impl.lang import BACKEND, nki, nl, nisa, ncc; print(BACKEND, nl.__name__)"


@pytest.fixture
def no_official_packages():
    try:
        importlib.metadata.version("nki")
    except importlib.metadata.PackageNotFoundError:
        return
    pytest.skip("the official nki is installed here")


@pytest.mark.usefixtures("no_official_packages")
@pytest.mark.parametrize("backend", ["nki-simulate", "device"])
def test_an_absent_package_is_refused_with_the_command_that_installs_it(tmp_path, backend):
    done = python(IMPORT, tmp_path, RINGSPEC_NKI=backend)
    assert done.returncode == 1
    assert (
        'BackendError: nki is not installed. To install it: pip install --upgrade "nki>=0.3"'
        in done.stderr
    )
    assert f"--extra-index-url {INDEX}" in done.stderr


@pytest.mark.parametrize("backend", ["nki-simulate", "device"])
def test_the_placeholder_of_nki_is_recognised_without_being_imported(tmp_path, backend):
    install(tmp_path, "nki", "0.0.1", PLACEHOLDER)
    done = python(IMPORT, tmp_path, RINGSPEC_NKI=backend)
    assert "nki 0.0.1 is the placeholder of the public index" in done.stderr
    assert "WRONG PACKAGE" not in done.stderr
    assert f"--extra-index-url {INDEX}" in done.stderr


def test_a_package_of_that_name_without_submodules_is_refused(tmp_path):
    install(tmp_path, "nki", "9.0", {"nki/__init__.py": ""})
    done = python(IMPORT, tmp_path, RINGSPEC_NKI="nki-simulate")
    assert "the package nki 9.0 has no nki.language" in done.stderr


def test_the_placeholder_of_the_compiler_is_recognised(tmp_path):
    install(tmp_path, "nki", "0.6.0", REAL)
    install(tmp_path, "neuronx-cc", "1.0.post1", {"neuronx-cc/__init__.py": ""})
    done = python(IMPORT, tmp_path, RINGSPEC_NKI="device")
    assert "neuronx-cc 1.0.post1 is the placeholder of the public index" in done.stderr
    assert '"neuronx-cc>=2.24"' in done.stderr


def test_what_looks_like_the_official_packages_is_taken(tmp_path):
    install(tmp_path, "nki", "0.6.0+g123", REAL)
    done = python(IMPORT, tmp_path, RINGSPEC_NKI="nki-simulate")
    assert (done.stdout, done.stderr) == ("nki-simulate nki.language\n", "")
    install(tmp_path, "neuronx-cc", "2.24.8799.0+6f62ff7c", {})
    done = python(IMPORT, tmp_path, RINGSPEC_NKI="device")
    assert (done.stdout, done.stderr) == ("device nki.language\n", "")


def test_the_simulator_needs_no_official_package_even_beside_a_placeholder(tmp_path):
    install(tmp_path, "nki", "0.0.1", PLACEHOLDER)
    done = python(IMPORT, tmp_path, RINGSPEC_NKI="simulator")
    assert (done.stdout, done.stderr) == ("simulator nki_impl.sim.language\n", "")


def test_the_floors_are_those_of_the_extra():
    import tomllib
    from pathlib import Path

    project = Path(lang.__file__).parent.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("an installed package has no pyproject.toml")
    extra = tomllib.loads(project.read_text())["project"]["optional-dependencies"]["neuron"]
    floors = [f"{name}>={'.'.join(map(str, floor))}" for name, floor in lang.FLOORS.items()]
    assert sorted(extra) == sorted(floors)
