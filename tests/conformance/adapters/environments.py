"""Environments that hold different versions of one package, made without a network.

``PACKAGE`` has a factor that a kernel multiplies o with: 1 in version 2.0, the one that is to be judged,
and 3 in every other one. So a verdict says which version computed, whatever a report says.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import ringspec

PACKAGE = "ringspec_dummy"
RIGHT, WRONG = "2.0", "1.0"
RINGSPEC = Path(ringspec.__file__).resolve().parent


def installed_packages():
    """The folders in which this interpreter finds what is installed."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def environment(folder, version=None, *, further=()):
    """A virtual environment with PACKAGE in this version; its site-packages folder.

    ``further``: folders in which it finds what it does not have itself, after its own.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    names = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", names))
    if version is not None:
        put_package(site, version)
    if further:
        (site / "further.pth").write_text("".join(f"{path}\n" for path in further))
    return site


def put_package(folder, version):
    """PACKAGE in this version, as pip lays it: the module and what describes its distribution."""
    package, about = folder / PACKAGE, folder / f"{PACKAGE}-{version}.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    factor = 1.0 if version == RIGHT else 3.0
    (package / "__init__.py").write_text(f"FACTOR = {factor}\n")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")


def harness(folder):
    """The environment of the harness: ringspec lies in its site-packages, beside the wrong version."""
    site = environment(folder, WRONG, further=installed_packages())
    (site / "ringspec").symlink_to(RINGSPEC, target_is_directory=True)
    return site


def python_of(site):
    """The interpreter of an environment, by its site-packages folder."""
    return str(site.parents[2] / "bin" / "python")


def clean(**more):
    """This process's variables without those that change an import path."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more}


def said(command, **settings):
    """Standard output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
