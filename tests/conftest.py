"""What the marks mean, the option --rule, and the environment variable RINGSPEC_REQUIRE.

A test that needs more than the extra [test] carries a mark. Where the need is not met, the test is
skipped with a sentence that says what is missing and how to get it. RINGSPEC_REQUIRE=torch,mpi turns
such a skip into a failure: every test with one of these marks then has to run.
"""

import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import threadpoolctl

# Two test processes share the cores, so each of them uses one thread. Processes started from here read the variable. In
# this process, ringspec's own plugin may have imported NumPy already, which reads it then and never again.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threadpoolctl.threadpool_limits(1, user_api="blas")

hypothesis.settings.register_profile(
    "ringspec",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore",
    parent=hypothesis.settings.get_profile("ringspec"),
    derandomize=False,
    max_examples=500,
)
# `pytest --hypothesis-profile explore` replaces this.
hypothesis.settings.load_profile("ringspec")

MODULES = {
    "torch": ("torch",),
    "jax": ("jax",),
    "mpi": ("mpi4py",),
    "diffusers": ("torch", "diffusers"),
    "haoliuhl": ("jax", "ringattention"),
    "lucidrains": ("torch", "ring_attention_pytorch"),
    "zhuzilin": ("torch", "ring_flash_attn", "transformers"),
    "transformer_engine": ("torch", "transformer_engine", "einops", "onnxscript", "pydantic"),
    "yunchang": ("torch", "yunchang"),
    "deepspeed": ("torch", "deepspeed"),
    "xfuser": ("torch", "triton", "xfuser"),
    "gpu": ("torch",),
    "notebook": ("nbformat", "nbclient", "ipykernel", "matplotlib"),
}
EXTRAS = {
    "torch": "torch",
    "jax": "jax",
    "mpi": "mpi",
    "gpu": "torch",
    "notebook": "docs,notebooks",
}
# Targets with an environment of their own.
REQUIREMENTS = {
    "diffusers": "ringspec/conformance/targets/requirements-diffusers.txt",
    "haoliuhl": "ringspec/conformance/targets/requirements-haoliuhl.txt",
    "lucidrains": "ringspec/conformance/targets/requirements-lucidrains.txt",
    "zhuzilin": "ringspec/conformance/targets/requirements-zhuzilin.txt",
    "transformer_engine": "ringspec/conformance/targets/requirements-transformer-engine.txt",
    "yunchang": "ringspec/conformance/targets/requirements-yunchang.txt",
    "deepspeed": "ringspec/conformance/targets/requirements-deepspeed.txt",
    "xfuser": "ringspec/conformance/targets/requirements-xfuser.txt",
}
MARKS = (*MODULES, "external", "nki_kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringspec")
    group.addoption(
        "--rule",
        action="append",
        default=[],
        metavar="ID",
        help="keep only the tests marked with @pytest.mark.rule(ID); may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = required() - set(MARKS)
    if unknown:
        raise pytest.UsageError(
            f"RINGSPEC_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(MARKS)}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Collect without the garbage collector, and keep what there is then out of its sight.

    Tests and imported modules, half a million objects, stay to the end. Looking at them again and again took a quarter
    of the time of collection, and seconds more at the end of the session.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("--rule"))
    if not wanted:
        return
    kept = [item for item in items if wanted & rules_of(item)]
    config.hook.pytest_deselected(items=[item for item in items if not wanted & rules_of(item)])
    items[:] = kept


def rules_of(item: pytest.Item) -> set[str]:
    return {rule for mark in item.iter_markers("rule") for rule in mark.args}


def required() -> set[str]:
    """The marks whose tests must not be skipped."""
    names = os.environ.get("RINGSPEC_REQUIRE", "").split(",")
    return {name.strip() for name in names if name.strip()}


def what_is_missing(mark: pytest.Mark) -> str | None:
    """A sentence, or None when the test with this mark can run."""
    if mark.name == "external":
        program = mark.args[0]
        return None if shutil.which(program) else f"the program {program} is not on the path"
    if mark.name == "nki_kernels":
        directory = os.environ.get("RINGSPEC_NKI_KERNELS", "")
        if directory and Path(directory).expanduser().is_dir():
            return None
        return "RINGSPEC_NKI_KERNELS names no directory with AWS's kernels: docs/nki/external.md"
    for module in MODULES[mark.name]:
        if importlib.util.find_spec(module) is None:
            if mark.name in REQUIREMENTS:
                return f"{module} is not installed: pip install -r {REQUIREMENTS[mark.name]}"
            extra = EXTRAS[mark.name]
            return f"{module} is not installed: pip install -e '.[{extra}]' installs it"
    # PyPI's mpich lays it beside the interpreter, which may not be on the path.
    beside = Path(sys.executable).with_name("mpiexec").is_file()
    if mark.name == "mpi" and not beside and shutil.which("mpiexec") is None:
        return "there is no program mpiexec: pip install -e '.[mpi]' installs one"
    if mark.name == "gpu":
        import torch

        return None if torch.cuda.is_available() else "torch sees no GPU on this machine"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers():
        if mark.name in MARKS:
            sentence = what_is_missing(mark)
            if sentence is not None:
                pytest.skip(sentence)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A skip of a required mark is a failure, whoever skipped."""
    report = yield
    names = required() & {mark.name for mark in item.iter_markers()}
    expected_failure = hasattr(report, "wasxfail")
    if names and report.skipped and not expected_failure:
        report.outcome = "failed"
        report.longrepr = (
            f"skipped, but RINGSPEC_REQUIRE={','.join(sorted(names))}: {report.longrepr}"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A file that skips itself has no marks to look at, so under RINGSPEC_REQUIRE it fails."""
    report = yield
    if required() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole file skipped under RINGSPEC_REQUIRE: {report.longrepr}"
    return report
