"""The machinery of tests/conftest.py: marks, --rule and RINGSPEC_REQUIRE, in a suite of its own."""

import os
import shutil
import subprocess
import sys

import pytest
import threadpoolctl

SUITE = """
import pytest

@pytest.mark.rule("FIRST")
def test_one():
    pass

@pytest.mark.rule("SECOND", "THIRD")
def test_two():
    pass

@pytest.mark.external("no-such-program")
def test_needs_a_program():
    pass

@pytest.mark.jax
def test_skips_itself():
    pytest.skip("for a reason of its own")

@pytest.mark.torch
@pytest.mark.xfail(reason="known", strict=True)
def test_fails_as_expected():
    assert False
"""


@pytest.fixture
def pytest_in(tmp_path, root):
    """A function that runs pytest on SUITE with options and environment; its code and output."""
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    # Stand-ins, so that the marks' needs are met: nothing in the suite imports them.
    for module in ("jax", "torch"):
        (tmp_path / f"{module}.py").write_text("")

    def run(*options, require=""):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:ringspec.conformance.pytest.plugin",  # it would import all of ringspec
            f"--rootdir={tmp_path}",
        ]
        command += ["-c", str(root / "pyproject.toml"), *options, "test_suite.py"]
        environment = os.environ | {"RINGSPEC_REQUIRE": require}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_what_cannot_run_is_skipped_with_a_sentence(pytest_in):
    code, output = pytest_in()
    assert code == 0
    assert "2 passed, 2 skipped, 1 xfailed" in output
    assert "the program no-such-program is not on the path" in output


def test_a_required_mark_turns_its_skips_into_failures(pytest_in):
    code, output = pytest_in(require="external,jax,torch")
    assert code == 1
    # An expected failure has run, so it is none. A skip before the test is an "error".
    assert "1 failed, 2 passed, 1 xfailed, 1 error" in output


def test_a_mark_that_is_not_required_may_be_skipped(pytest_in):
    code, output = pytest_in(require="jax")
    assert code == 1
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed" in output


def test_an_unknown_name_in_ringspec_require_is_refused(pytest_in):
    code, output = pytest_in(require="trch")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "trch" in output


@pytest.mark.parametrize("rule", [pytest.param("FIRST", marks=pytest.mark.slow), "THIRD"])
def test_rule_keeps_the_tests_of_that_rule(pytest_in, rule):
    code, output = pytest_in("--rule", rule)
    assert code == 0
    assert "1 passed, 4 deselected" in output


def test_rule_may_be_repeated(pytest_in):
    code, output = pytest_in("--rule", "FIRST", "--rule", "SECOND")
    assert code == 0
    assert "2 passed, 3 deselected" in output


def test_a_rule_without_tests_is_no_success(pytest_in):
    code, _ = pytest_in("--rule", "NONE")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_file_that_skips_itself_fails_under_ringspec_require(pytest_in, tmp_path):
    (tmp_path / "test_suite.py").write_text(
        "import pytest\npytest.skip('all of it', allow_module_level=True)\n"
    )
    code, output = pytest_in(require="jax")
    assert code != 0
    assert "a whole file skipped under RINGSPEC_REQUIRE" in output


def test_products_use_one_thread_unless_another_number_is_asked_for():
    """Of one process as well, whose plugins import NumPy before tests/conftest.py."""
    wanted = int(os.environ["OPENBLAS_NUM_THREADS"])
    threads = [
        one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"
    ]
    assert threads and set(threads) == {wanted}
