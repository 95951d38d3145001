"""Make a release: check the tree and its versions, pack the golden vectors, tag the commit.

    python .ci/release.py                     check everything and print what a release would contain
    python .ci/release.py --out DIR           also write the archive, its digest and its manifest to DIR
    python .ci/release.py --out DIR --tag     also tag HEAD, in this clone

Nothing is ever pushed or uploaded: the last lines printed are the commands that publish. The archive holds all sets of
golden vectors of the package. Its bytes depend only on the files: sorted names, no times, owners or modes, no
compression (the bytes of which depend on the version of a library). CONTRIBUTING.md lists what else a release needs.
"""

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the sets of this tree, also if another ringspec is installed

from ringspec.vectors import open_set  # noqa: E402
from ringspec.vectors.export import add_set  # noqa: E402
from ringspec.vectors.sets.stored import SETS, VectorSet  # noqa: E402

# The file and the pattern of each place that states the version of the package.
VERSIONS = {
    "ringspec/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## (\S+)(?: .*)?$",
}
UNRELEASED = re.compile(r"^## \S+ \(not released yet\)$", re.M)


class Refused(Exception):
    """The tree cannot be released; the text says why and how to fix it."""


def git(root: Path, *words: str) -> str:
    ran = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    if ran.returncode:
        raise Refused(f"expected that git {words[0]} works; got {ran.stderr.strip()}")
    return ran.stdout


def check_clean(root: Path) -> None:
    """Refuse a tree with changes or new files, which the tag would not contain."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        raise Refused(
            f"expected a tree without changes; got {len(changed)}, the first is {changed[0]!r}. "
            "Fix: commit or remove them."
        )


def version_of(root: Path) -> str:
    """Return the version of the package; refuse if the files that state it differ."""
    found = {}
    for name, pattern in VERSIONS.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.M)
        found[name] = match[1] if match else "none"
    if len(set(found.values())) != 1:
        told = ", ".join(f"{name} {version}" for name, version in found.items())
        raise Refused(f"expected one version; got {told}. Fix: change the files with an older one.")
    return found["CITATION.cff"]


def check_dated(root: Path) -> None:
    """Refuse a changelog that still calls the newest version unreleased."""
    newest = (root / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2]
    if UNRELEASED.match(f"## {newest.splitlines()[0]}"):
        raise Refused(
            "expected a date in the first heading of CHANGELOG.md; got 'not released yet'. "
            "Fix: write the date of the release."
        )


def check_new_tag(root: Path, tag: str) -> None:
    if git(root, "tag", "--list", tag).strip():
        raise Refused(f"expected that there is no tag {tag} yet. Fix: raise the version.")


def archive_of(sets: Sequence[VectorSet], top: str) -> bytes:
    """Return the archive of some sets in the folder ``top``; every file is compared with its set's manifest."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for vectors in sorted(sets, key=lambda one: one.name):
            add_set(vectors, archive, f"{top}/{vectors.name}")
    return stream.getvalue()


def manifest_of(archive: bytes, sets: Sequence[VectorSet], version: str) -> dict[str, Any]:
    """Return what the archive contains: its digest, the versions of the sets, and the digest of every file."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        files = {
            member.name: {"bytes": member.size, "sha256": digest(opened.extractfile(member).read())}
            for member in opened.getmembers()
            if member.isreg()
        }
    return {
        "format": "ringspec-release-1",
        "version": version,
        "archive": {"bytes": len(archive), "sha256": digest(archive)},
        "sets": {
            one.name: {
                "set_version": one.set_version,
                "format_version": one.manifest.format_version,
                "spec_version": one.manifest.spec_version,
                "cases": one.manifest.count,
                "content": one.manifest.content,
            }
            for one in sorted(sets, key=lambda one: one.name)
        },
        "files": dict(sorted(files.items())),
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, name: str, archive: bytes, manifest: Mapping[str, Any]) -> list[Path]:
    """Write the archive, its digest (as sha256sum reads it) and its manifest to new files."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        f"{name}.tar": archive,
        f"{name}.tar.sha256": f"{digest(archive)}  {name}.tar\n".encode(),
        f"{name}.json": (json.dumps(manifest, indent=1) + "\n").encode(),
    }
    for one in contents:
        if (folder / one).exists():
            raise Refused(
                f"expected no file {folder / one}. Fix: remove it, or pass another --out."
            )
    for one, data in contents.items():
        (folder / one).write_bytes(data)
    return [folder / one for one in contents]


def release(root: Path, sets: Sequence[VectorSet], out: Path | None, tagging: bool) -> list[str]:
    """Check, pack, write and tag as asked; return what to print."""
    check_clean(root)
    version = version_of(root)
    tag, name = f"v{version}", f"ringspec-vectors-{version}"
    check_new_tag(root, tag)
    if tagging:
        check_dated(root)
    archive = archive_of(sets, name)
    manifest = manifest_of(archive, sets, version)
    commit = git(root, "rev-parse", "HEAD").strip()
    lines = [
        f"version {version}, commit {commit}",
        f"{name}.tar: {len(archive)} bytes, {len(manifest['files'])} files",
        f"sha256 {manifest['archive']['sha256']}",
    ]
    for one, told in manifest["sets"].items():
        lines.append(f"set {one} {told['set_version']}: {told['cases']} cases, {told['content']}")
    if out is not None:
        lines += [f"written: {path}" for path in write(out, name, archive, manifest)]
    if tagging:
        message = f"ringspec {version}\n\n{name}.tar sha256 {manifest['archive']['sha256']}"
        git(root, "tag", "--annotate", tag, "--message", message)
        lines += [f"tagged {commit[:12]} as {tag}", f"to publish: git push origin {tag}"]
    else:
        lines.append(f"dry run: no tag. A release is tagged {tag}.")
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the archive to this folder")
    parser.add_argument("--tag", action="store_true", help="tag HEAD (needs --out)")
    parser.add_argument("--dry-run", action="store_true", help="the default: tag nothing")
    given = parser.parse_args(words)
    if given.tag and (given.dry_run or given.out is None):
        parser.error("--tag needs --out, and excludes --dry-run")
    try:
        print("\n".join(release(ROOT, [open_set(name) for name in SETS], given.out, given.tag)))
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
