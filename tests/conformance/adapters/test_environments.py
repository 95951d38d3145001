"""The package that a worker's own interpreter finds is the one that is judged, and the one reported."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conformance.adapters import environments as env
from conformance.adapters.environments import PACKAGE, RIGHT

from ringspec.conformance.adapters import rank_start
from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.jax_mesh import JaxTarget
from ringspec.conformance.adapters.torch_pool import Pool
from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.report.report import make_header, read_report
from ringspec.conformance.run.load import load_target
from ringspec.conformance.target import versions
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Failed, Refused
from ringspec.conformance.target.provenance import LOADED, computed_with
from ringspec.conformance.target.versions import Installed, agreed, installed
from ringspec.vectors import open_set

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")

ROOT = Path(__file__).parents[3]
CASE = "ring/float32-zigzag-w4"
NAIVE = ROOT / "docs" / "examples" / "naive_ring.py"
PROBE = """
import concurrent.futures, importlib.util, json, multiprocessing, sys
import ringspec.conformance.target.versions as versions

def main():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        spawned = pool.submit(versions.release, "1.5").result()
    found = importlib.util.find_spec("ringspec_dummy")
    print(json.dumps({
        "path": sys.path, "ringspec": versions.__file__, "dummy": found and found.origin,
        "numpy": sys.modules["numpy"].__file__, "spawned": spawned, "argv": sys.argv[1:],
        "click": importlib.util.find_spec("click") is not None,
    }))
"""
# Where an interpreter finds modules by itself.
PATH = "import json, sys; print(json.dumps(sys.path))"


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """The site-packages of the harness, in which ringspec and the wrong version lie."""
    return env.harness(tmp_path_factory.mktemp("harness") / "env")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The site-packages of an environment with the right version and without ringspec."""
    folder = tmp_path_factory.mktemp("other") / "env"
    return env.environment(folder, RIGHT, further=env.installed_packages())


@pytest.fixture(scope="module")
def layered(tmp_path_factory, harness):
    """The right version in an environment that finds the rest in the one of the harness."""
    folder = tmp_path_factory.mktemp("layered") / "env"
    return env.environment(folder, RIGHT, further=[harness, *env.installed_packages()])


@pytest.fixture
def environment(request, other, layered):
    return {"apart": other, "layered": layered}[request.param]


both = pytest.mark.parametrize("environment", ["apart", "layered"], indirect=True)


# What a worker can import


def probed(site, harness, folder, **variables):
    """What a worker started by the ringspec of ``harness`` sees in another environment."""
    (folder / "probe.py").write_text(PROBE)
    start = harness / "ringspec" / "conformance" / "adapters" / "rank_start.py"
    command = [env.python_of(site), str(start), "probe", "one"]
    return json.loads(env.said(command, cwd=folder, env=env.clean(**variables)))


@both
def test_a_worker_imports_what_its_own_environment_has_and_ringspec(environment, harness, tmp_path):
    seen = probed(environment, harness, tmp_path)
    assert seen["dummy"] == str(environment / PACKAGE / "__init__.py")
    assert Path(seen["ringspec"]).samefile(versions.__file__)
    assert seen["argv"] == ["one"]


@both
def test_no_folder_is_added_to_the_import_path_of_a_worker(environment, harness, tmp_path):
    """It is that of ``python -m``: the current folder, then the interpreter's own."""
    alone = [env.python_of(environment), "-c", PATH]
    own = json.loads(env.said(alone, cwd=tmp_path, env=env.clean()))
    assert own[0] == ""
    assert probed(environment, harness, tmp_path)["path"] == [str(tmp_path), *own[1:]]


def test_a_process_that_a_worker_spawns_imports_the_same_ringspec(other, harness, tmp_path):
    assert probed(other, harness, tmp_path)["spawned"] == [1, 5]


def test_a_workers_own_ringspec_gives_way_to_that_of_the_harness(tmp_path, harness):
    """Both sides of a pipe are of one version."""
    site = env.environment(tmp_path / "env", further=env.installed_packages())
    (site / "ringspec").mkdir()
    (site / "ringspec" / "__init__.py").write_text("raise ImportError('another ringspec')")
    assert Path(probed(site, harness, tmp_path)["ringspec"]).samefile(versions.__file__)


def test_pythonpath_means_to_a_worker_what_it_means_elsewhere(other, harness, tmp_path):
    env.put_package(tmp_path / "mine", "3.0")
    seen = probed(other, harness, tmp_path, PYTHONPATH=str(tmp_path / "mine"))
    assert seen["dummy"] == str(tmp_path / "mine" / PACKAGE / "__init__.py")


def test_with_a_safe_path_the_current_folder_is_not_on_the_path_of_a_worker(
    other, harness, tmp_path
):
    (tmp_path / "modules").mkdir()
    variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "modules")}
    (tmp_path / "modules" / "probe.py").write_text(PROBE)
    seen = probed(other, harness, tmp_path, **variables)
    assert str(tmp_path) not in seen["path"] and "" not in seen["path"]


@pytest.mark.parametrize("here", [[], ["numpy"]])
def test_a_worker_without_numpy_or_ml_dtypes_says_what_to_install(here, harness, tmp_path):
    site = env.environment(tmp_path / "env")
    for name in here:
        (site / f"{name}.py").write_text("")
    command = [env.python_of(site), rank_start.__file__, "probe"]
    done = subprocess.run(command, capture_output=True, text=True, env=env.clean())
    missing = " ".join(name for name in rank_start.NEEDED if name not in here)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"-m pip install {missing}\n" in done.stderr


def test_what_a_worker_says_before_it_is_asked_anything_is_told(tmp_path, monkeypatch):
    """It may end before its first request is sent, as on a machine with much to do."""
    started = Pool.started

    def and_ended(self, rank, python):
        process = started(self, rank, python)
        process.process.wait()
        return process

    monkeypatch.setattr(Pool, "started", and_ended)
    python = env.python_of(env.environment(tmp_path / "env"))
    with pytest.raises(Failed) as raised:
        Pool(1, {}, python, 60.0)
    assert f"Fix: {python} -m pip install numpy ml_dtypes" in raised.value.log


@pytest.mark.parametrize("kind", [TorchTarget, JaxTarget])
def test_what_is_missing_is_said_with_every_call_and_does_not_end_the_harness(kind, tmp_path):
    site = env.environment(tmp_path / "env")
    target = kind("module:name", python=env.python_of(site))
    assert target.installed == Installed()
    core = open_set("core")
    with pytest.raises(Failed) as raised:
        target.run(call_of(core.case(CASE), core.tensors(CASE)))
    target.close()
    assert f"Fix: {env.python_of(site)} -m pip install numpy ml_dtypes" in raised.value.log


# Which version is judged, and which one a report names

TORCH = """
from ringspec.conformance.adapters.torch_pool import Pool
from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target import versions
from ringspec.conformance.target.capabilities import Capabilities

CLAIMS = Capabilities(operations=("ring-forward",), layouts=("zigzag",), lse="hidden")

def attention(q, k, v, *, group, call):
    import torch
    import ringspec_dummy
    def whole(x):
        parts = [torch.empty_like(x) for _ in range(call.workers)]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1 if x.dim() == 2 else 2)
    keys, values = (whole(x).double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q.double() @ keys.mT * call.scale
    if call.causal:
        hidden = whole(call.position_k)[:, None, None] > call.position_q[:, None, :, None]
        s = s.masked_fill(hidden, -torch.inf)
    return (s.softmax(-1) @ values).to(q.dtype) * ringspec_dummy.FACTOR

target = TorchTarget(f"{__file__}:attention", CLAIMS, python=PYTHON, packages=("ringspec_dummy",))
"""
JAX = """
from ringspec.conformance.adapters.jax_mesh import JaxTarget
from ringspec.conformance.target import versions
from ringspec.conformance.target.capabilities import Capabilities

CLAIMS = Capabilities(operations=("ring-forward",), layouts=("zigzag",), lse="hidden")

def attention(q, k, v, *, axis_name, call):
    import jax
    import jax.numpy as jnp
    import ringspec_dummy
    def whole(x, axis):
        return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)
    keys, values = (jnp.repeat(whole(x, 2), q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ jnp.swapaxes(keys, 2, 3) * call.scale
    if call.causal:
        hidden = whole(call.position_k, 1)[:, None, None] > call.position_q[:, None, :, None]
        s = jnp.where(hidden, -jnp.inf, s)
    return jax.nn.softmax(s) @ values * ringspec_dummy.FACTOR

target = JaxTarget(f"{__file__}:attention", CLAIMS, python=PYTHON, packages=("ringspec_dummy",))
"""


def target_file(folder, text, site):
    (folder / "mine.py").write_text(text.replace("PYTHON", repr(env.python_of(site))))
    return f"{folder / 'mine.py'}:target"


def program_file(folder, site):
    """The example of the protocol, which multiplies o and says what it computes with."""
    text = NAIVE.read_text(encoding="utf-8")
    text = text.replace("import numpy as np\n", f"import numpy as np\nimport {PACKAGE}\n")
    text = text.replace('{"o": o / l,', f'{{"o": {PACKAGE}.FACTOR * o / l,')
    said = f'"versions": {{"{PACKAGE}": "{RIGHT}"}}, "files": {{"{PACKAGE}": {PACKAGE}.__file__}}'
    text = text.replace('"name": "naive"', f'"name": "naive", {said}')
    (folder / "naive.py").write_text(text, encoding="utf-8")
    return f"cmd:{env.python_of(site)} {folder / 'naive.py'}"


def checked(harness, spec, folder, *options):
    """``ringspec check`` in the environment of the harness: what it prints, and its report."""
    report = folder / "report.jsonl"
    command = [env.python_of(harness), "-m", "ringspec", "check", spec, "--profile", "smoke"]
    command += ["--only", CASE, "--report", str(report), "--junit", str(folder / "r.xml"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env.clean(), cwd=folder
    )
    assert report.is_file(), done.stdout + done.stderr
    return done.stdout, read_report(report)


def assert_judged_and_reported(text, report, site, folder):
    """The right version computed, and every form of the report names it and its file."""
    assert [record.outcome for record in report.records] == ["pass"], text
    file = str(site / PACKAGE / "__init__.py")
    assert report.header["versions"][PACKAGE] == RIGHT
    assert report.header["files"][PACKAGE] == file
    assert "versions" not in report.footer
    text = " ".join(text.split())
    assert f"computed with {PACKAGE} {RIGHT} ({file})" in text
    said = {one.get("name"): one.get("value") for one in ElementTree.parse(folder / "r.xml").iter()}
    assert (said[f"versions {PACKAGE}"], said[f"files {PACKAGE}"]) == (RIGHT, file)


@pytest.mark.torch
@both
def test_a_torch_function_runs_with_what_python_finds(environment, harness, tmp_path):
    spec = target_file(tmp_path, TORCH, environment)
    text, report = checked(harness, spec, tmp_path)
    assert_judged_and_reported(text, report, environment, tmp_path)
    assert report.header["files"]["python"] == env.python_of(environment)
    assert f"computed with python {report.header['versions']['python']}" in text


@pytest.mark.jax
@both
def test_a_jax_function_runs_with_what_python_finds(environment, harness, tmp_path):
    spec = target_file(tmp_path, JAX, environment)
    text, report = checked(harness, spec, tmp_path)
    assert_judged_and_reported(text, report, environment, tmp_path)
    assert report.header["files"]["python"] == env.python_of(environment)


@both
def test_a_program_runs_with_what_its_interpreter_finds(environment, harness, tmp_path):
    text, report = checked(harness, program_file(tmp_path, environment), tmp_path)
    assert_judged_and_reported(text, report, environment, tmp_path)


def test_the_verdict_tells_the_two_versions_apart(harness, tmp_path):
    """Else the tests above would pass whichever version computed."""
    _, report = checked(harness, program_file(tmp_path, harness), tmp_path)
    assert [record.outcome for record in report.records] == ["mismatch"]


@pytest.mark.torch
def test_what_the_calls_import_from_elsewhere_is_said_at_the_end(other, harness, tmp_path):
    """A function may change its own import path; nobody can know that before it runs."""
    env.put_package(tmp_path / "mine", "3.0")
    change = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'mine')!r})\n    import ringspec_dummy"
    )
    spec = target_file(tmp_path, TORCH.replace("import ringspec_dummy", change), other)
    text, report = checked(harness, spec, tmp_path)
    assert report.header["versions"][PACKAGE] == RIGHT
    assert report.footer["versions"] == {PACKAGE: "3.0"}
    assert f"the calls used {PACKAGE} 3.0 ({tmp_path / 'mine'}" in " ".join(text.split())


@pytest.mark.torch
def test_workers_with_different_versions_are_an_error_that_names_both(other, harness, tmp_path):
    env.put_package(tmp_path / "mine", "3.0")
    change = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'mine')!r}] * (call.rank == 1)\n"
        "    import ringspec_dummy"
    )
    spec = target_file(tmp_path, TORCH.replace("import ringspec_dummy", change), other)
    _, report = checked(harness, spec, tmp_path)
    (record,) = report.records
    assert record.outcome == "error"
    right = f"{PACKAGE} {RIGHT} ({other / PACKAGE / '__init__.py'})"
    assert (
        f"worker 0 has {right}, worker 1 has {PACKAGE} 3.0 ({tmp_path / 'mine'}" in record.message
    )


def test_a_function_that_lacks_a_keyword_is_refused_in_a_sentence_that_names_it():
    def theirs(q, *, causal=False):
        return q

    versions.check_keywords(theirs, ("causal",), "theirs", "1.0")
    with pytest.raises(Refused, match="expected theirs with bucket_size, as theirs 1.0 has it"):
        versions.check_keywords(theirs, ("causal", "bucket_size"), "theirs", "1.0")


def test_a_package_that_only_one_worker_has_imported_is_no_difference():
    one = Installed({"a": "1"}, {"a": "/x/a.py"})
    assert agreed([one, Installed()]) == one == agreed([Installed(), one])


# What a process says of itself


def test_of_a_function_in_this_process_the_report_names_its_package(tmp_path, monkeypatch):
    env.put_package(tmp_path, RIGHT)
    (tmp_path / PACKAGE / "ring.py").write_text("def attention(q, k, v):\n    return {}\n")
    (tmp_path / "mine.py").write_text(
        f"from {PACKAGE}.ring import attention\n"
        "from ringspec.conformance.adapters.numpy_lists import NumPyTarget\n"
        "target = NumPyTarget(attention)\n"
    )
    before, loaded = list(sys.path), set(sys.modules)
    spec = f"{tmp_path / 'mine.py'}:target"
    try:
        header = make_header(load_target(spec), spec=spec, profile="core")
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - loaded:
            if name.startswith((PACKAGE, LOADED)):
                del sys.modules[name]
    assert header["versions"][PACKAGE] == RIGHT
    assert header["files"][PACKAGE] == str(tmp_path / PACKAGE / "__init__.py")


def test_of_a_function_in_the_file_that_is_loaded_no_package_is_named():
    spec = f"{ROOT / 'docs' / 'conform' / 'example_numpy.py'}:target"
    assert set(computed_with(load_target(spec), spec).files) == {"python", "numpy"}


def test_of_an_imported_module_the_version_beside_its_file_counts(tmp_path, monkeypatch):
    """Not that of a distribution of the same name which lies earlier on the import path."""
    env.put_package(tmp_path / "first", "1.0")
    env.put_package(tmp_path / "second", "2.0")
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    del sys.modules[PACKAGE]  # so that it is gone again after the test
    module = importlib.import_module(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "first")
    have = installed((PACKAGE,))
    assert have.versions[PACKAGE] == "2.0"
    assert (
        have.files[PACKAGE] == module.__file__ == str(tmp_path / "second" / PACKAGE / "__init__.py")
    )


def test_what_is_said_of_a_package_does_not_import_it(tmp_path, monkeypatch):
    env.put_package(tmp_path, "1.0")
    (tmp_path / PACKAGE / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed((PACKAGE,)).versions[PACKAGE] == "1.0"
    assert PACKAGE not in installed((PACKAGE,), imported=True).versions


@pytest.mark.parametrize(
    "text", ['"versions": "1.0"', '"versions": {"a": 1}', '"files": [1]', '"files": {"a": null}']
)
def test_versions_of_a_program_that_are_no_texts_are_garbage(tmp_path, text):
    program = tmp_path / "program.py"
    program.write_text(f'input(); print(\'{{"kind": "hello", {text}}}\', flush=True); input()')
    target = CommandTarget([sys.executable, str(program)])
    with pytest.raises(ValueError, match="as texts by name"):
        target.claims()


def test_a_program_cannot_change_the_version_of_ringspec_in_a_report():
    class Target:
        name, capabilities = "mine", Capabilities()
        installed = Installed({"ringspec": "9", "specification": "9", "mine": "1"})

    header = make_header(Target(), spec="cmd:mine", profile="core")
    assert header["versions"]["mine"] == "1"
    assert "9" not in (header["versions"]["ringspec"], header["versions"]["specification"])
