"""``pytest -p nki_impl.sim.pytest_plugin``: run the tests of a kernel repository on the simulator.

The plugin makes ``import nki`` import the simulator before any test is collected, and offers the package
``nki_cpu_simulator`` that the simulation mode of AWS's nki-library expects. That mode runs one rank. The plugin runs
tests with W ranks (``collective_ranks``) on W ranks, and writes the outputs of each rank where the library's validator
reads them.

Environment variables:

- RINGSPEC_NKI_SCALE: a number by which every floating-point output is multiplied, to show that tests that pass can fail;
  1.05 makes correct kernels fail.
- RINGSPEC_NKI_RACES: "warn" makes a race a :class:`~nki_impl.sim.errors.RaceWarning` instead of an error, so that the
  numbers are compared nevertheless. The report of a test lists its races in ``user_properties`` under the name "race".
- RINGSPEC_NKI_UNWRITTEN: "zeros" makes memory begin with zeros that count as written, so that the numbers of a test that
  expects zeros in memory that no instruction wrote are compared nevertheless.
- RINGSPEC_NKI_INTERLEAVE: a seed; cores and ranks then take turns at random instructions.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nki_impl.sim.errors import RaceWarning
from nki_impl.sim.install import hide, show
from nki_impl.sim.packages.modules import missing_test_modules
from nki_impl.sim.packages.simulator import on_ranks, scaled

ORCHESTRATOR = "utils.test_orchestrator"
"""The end of the name of the module in nki-library that runs one test."""


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Install the simulator before conftest files are imported, because AWS's import ``nki``."""
    hide()
    show()
    sys.meta_path.append(MissingModules())


class MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the modules of AWS's tests that the published repository lacks. It is last, so a module there wins."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return how to load ``name``, or None if it is another module."""
        return ModuleSpec(name, self) if name in missing_test_modules() else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return missing_test_modules()[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module is complete."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add the races of a test, which come as warnings with RINGSPEC_NKI_RACES=warn, to its report."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            races = [one for one in caught if issubclass(one.category, RaceWarning)]
            item.user_properties += [("race", str(one.message)) for one in races]
    for one in caught:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Make nki-library's orchestrator run tests with collectives on all their ranks."""
    for name, module in list(sys.modules.items()):
        if name.endswith(ORCHESTRATOR) and hasattr(module, "Orchestrator"):
            _add_ranks(module.Orchestrator)


def _add_ranks(orchestrator: Any) -> None:
    single: Callable[..., Any] = orchestrator._run_simulator_inference
    if getattr(single, "runs_all_ranks", False):
        return

    def run(self: Any, kernel_under_test: Any) -> str | None:
        ranks: int = kernel_under_test.inference_args.collective_ranks
        if ranks <= 1:
            path: str | None = single(self, kernel_under_test)
            return path
        try:
            return _run_all(self, kernel_under_test, ranks)
        except Exception as error:
            raise _failure(orchestrator)(str(error)) from error

    run.runs_all_ranks = True  # type: ignore[attr-defined]
    orchestrator._run_simulator_inference = run
    if not hasattr(orchestrator, "_compiled_kernel"):
        # Release 2.29 reads this after each run, and sets it only when it compiles.
        orchestrator._compiled_kernel = None


def _failure(orchestrator: Any) -> type[Exception]:
    """Return the exception that nki-library's tests take for a failed run."""
    named = getattr(sys.modules[orchestrator.__module__], "InferenceException", RuntimeError)
    return named if isinstance(named, type) and issubclass(named, Exception) else RuntimeError


def _run_all(orchestrator: Any, kernel_under_test: Any, ranks: int) -> str:
    """Run the kernel on all ranks, write one folder ``output_worker_RANK`` for each, and return the outer folder."""
    given = kernel_under_test.kernel_input or {}
    per_rank = [given.for_rank(r) if hasattr(given, "for_rank") else given for r in range(ranks)]
    arguments = [
        {k.removesuffix(".must_alias_input"): v for k, v in one.items()} for one in per_rank
    ]
    compiler = kernel_under_test.compiler_input
    os.environ["NKI_NC_VERSION"] = compiler.platform_target.get_nc_gen()
    outcome = on_ranks(kernel_under_test.kernel_func, arguments, compiler.logical_nc_config)
    golden = kernel_under_test.validation_args.golden_output
    module = sys.modules[type(orchestrator).__module__]
    folder = os.path.join(
        orchestrator.fs_config.artifacts_output_directory_path, module.INF_ARTIFACT_DIR_NAME
    )
    for rank, result in enumerate(outcome.results):
        expected = module.normalize_golden_output(golden, rank)
        outputs = list(result) if isinstance(result, tuple) else [result]
        if len(outputs) != len(expected):
            raise RuntimeError(
                f"rank {rank}: expected {len(expected)} outputs {list(expected)}; got {len(outputs)}"
            )
        target = os.path.join(folder, f"output_worker_{rank}")
        os.makedirs(target, exist_ok=True)
        for (name, one), output in zip(expected.items(), outputs, strict=True):
            with open(os.path.join(target, name), "wb") as file:
                file.write(np.asarray(scaled(output), dtype=one.dtype).tobytes())
    return folder
