"""A small good set to spoil."""

import shutil

import pytest
from vectors import samples


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "set"
    samples.write(path)
    return path


@pytest.fixture
def root(pristine, tmp_path):
    """A good set of one's own, to be spoilt."""
    shutil.copytree(pristine, tmp_path / "set")
    return tmp_path / "set"
