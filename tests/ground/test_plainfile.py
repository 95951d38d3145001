"""Files from outside: what is no plain file is refused at once, wherever a file is read."""

import os
import socket

import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.cli.shared.npz import read_npz
from ringspec.conformance.report.report import read_report
from ringspec.conformance.run.expected import read_expected
from ringspec.conformance.target.project import target_in
from ringspec.errors import FileFormatError, RingspecError
from ringspec.plainfile import read_plain_file
from ringspec.plan.hardware_file import read_hardware
from ringspec.tensorfile import read_metadata, read_tensors

READERS = {
    "tensors": read_tensors,
    "metadata": read_metadata,
    "expected failures": read_expected,
    "pyproject": target_in,
    "report": read_report,
    "hardware": read_hardware,
    "npz": lambda path: read_npz(path, ["q"], 100),
}


def make(kind, path):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        socket.socket(socket.AF_UNIX).bind(os.fspath(path))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize("reader", READERS)
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, reader, kind):
    make(kind, tmp_path / "x.json")
    with pytest.raises(RingspecError, match=f"plain file.*a {kind}"):
        READERS[reader](tmp_path / "x.json")


def test_no_more_is_read_than_the_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_plain_file(tmp_path / "x", 5) == b"12345"
    with pytest.raises(FileFormatError, match="at most 4 bytes"):
        read_plain_file(tmp_path / "x", 4)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("option", ["--report", "--junit", "--html"])
def test_a_report_is_not_written_into_what_is_no_file(tmp_path, monkeypatch, kind, option):
    monkeypatch.chdir(tmp_path)
    make(kind, tmp_path / "out")
    given = ["smoke", "reference-float64", option, "out"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert (
        getattr(result.exception, "code", None) == "destination" or "a file at out" in result.output
    )
