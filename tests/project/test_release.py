"""The release script: the same bytes each time, a digest that shows every change, and refusals."""

import hashlib
import json
import subprocess
import tarfile

import pytest
from vectors import small

from ringspec.errors import VectorError
from ringspec.vectors import open_set, write_set
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.generate import derive

FILES = {
    "ringspec/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "version: 1.2.0\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0 (2026-12-31)\n",
}
NAME = "ringspec-vectors-1.2.0"


@pytest.fixture
def script(root, monkeypatch):
    monkeypatch.syspath_prepend(root / ".ci")
    import release

    return release


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The folders of two sets."""
    folder = tmp_path_factory.mktemp("sets")
    written(folder / "a", "attention/small", "merge/small")
    written(folder / "b", "attention/small")
    return [folder / "a", folder / "b"]


def written(path, *ids):
    """A set with the name of its folder."""
    derived = [derive(small.named(id)) for id in ids]
    write_set(path, path.name, "1.0", [(one.case, one.tensors) for one in derived], FLAGS)


def opened(*folders):
    return [open_set(one) for one in folders]


@pytest.fixture
def tree(tmp_path):
    """A clean tree in which all versions agree."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    commit(root, new=True)
    return root


def commit(root, new=False):
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (["init", "-q"] if new else [], ["add", "-A"], [*who, "commit", "-qm", "x"]):
        if words:
            subprocess.run(["git", "-C", str(root), *words], check=True)
    subprocess.run(["git", "-C", str(root), "config", "user.name", "x"], check=True)
    subprocess.run(["git", "-C", str(root), "config", "user.email", "x@example.org"], check=True)


def tags(root):
    ran = subprocess.run(["git", "-C", str(root), "tag"], capture_output=True, text=True)
    return ran.stdout.split()


def test_two_runs_write_the_same_bytes(script, tree, sets, tmp_path):
    given = opened(*sets)
    for name, order in (("one", given), ("two", given[::-1])):
        script.release(tree, order, tmp_path / name, tagging=False)
    for suffix in (".tar", ".tar.sha256", ".json"):
        first, second = ((tmp_path / x / f"{NAME}{suffix}").read_bytes() for x in ("one", "two"))
        assert first == second, suffix


def test_members_are_sorted_and_have_no_time_owner_or_unusual_mode(script, tree, sets, tmp_path):
    script.release(tree, opened(*sets), tmp_path / "out", tagging=False)
    with tarfile.open(tmp_path / "out" / f"{NAME}.tar") as archive:
        members = archive.getmembers()
    names = [one.name for one in members]
    assert names == sorted(names) and names[0] == f"{NAME}/a"
    for one in members:
        assert (one.mtime, one.uid, one.gid, one.uname, one.gname) == (0, 0, 0, "", "")
        assert one.mode == (0o755 if one.isdir() else 0o644) and (one.isdir() or one.isreg())


def test_the_digest_and_the_manifest_are_those_of_the_archive(script, tree, sets, tmp_path):
    lines = script.release(tree, opened(*sets), tmp_path / "out", tagging=False)
    data = (tmp_path / "out" / f"{NAME}.tar").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    assert (tmp_path / "out" / f"{NAME}.tar.sha256").read_text() == f"{sha256}  {NAME}.tar\n"
    assert f"sha256 {sha256}" in lines
    manifest = json.loads((tmp_path / "out" / f"{NAME}.json").read_text())
    assert manifest["archive"] == {"bytes": len(data), "sha256": sha256}
    with tarfile.open(tmp_path / "out" / f"{NAME}.tar") as archive:
        for name, told in manifest["files"].items():
            content = archive.extractfile(name).read()
            want = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            assert told == want, name
    assert manifest["sets"]["a"]["content"] == open_set(sets[0]).manifest.content


def test_another_case_gives_another_digest(script, sets):
    first, second = (script.digest(script.archive_of(opened(one), "x")) for one in sets)
    assert first != second


def test_a_file_that_differs_from_its_manifest_is_refused(script, tmp_path):
    written(tmp_path / "a", "attention/small")
    (given,) = opened(tmp_path / "a")
    path = tmp_path / "a" / "attention" / "small" / "case.json"
    path.write_bytes(path.read_bytes().replace(b"An example.", b"An exampel."))
    with pytest.raises(VectorError):
        script.archive_of([given], "x")


@pytest.mark.parametrize("name", ["new.txt", "CITATION.cff"])
def test_a_tree_with_changes_is_refused(script, tree, sets, tmp_path, name):
    with (tree / name).open("a") as file:
        file.write("# changed\n")
    with pytest.raises(script.Refused, match="without changes"):
        script.release(tree, opened(*sets), tmp_path / "out", tagging=True)
    assert not (tmp_path / "out").exists() and tags(tree) == []


@pytest.mark.parametrize("name", FILES)
def test_versions_that_differ_are_refused(script, tree, sets, tmp_path, name):
    (tree / name).write_text(FILES[name].replace("1.2.0", "1.2.1"))
    commit(tree)
    with pytest.raises(script.Refused, match=r"one version; .*1\.2\.1"):
        script.release(tree, opened(*sets), tmp_path / "out", tagging=True)
    assert not (tmp_path / "out").exists() and tags(tree) == []


def test_without_tag_nothing_is_tagged_and_with_it_only_head_in_this_clone(
    script, tree, sets, tmp_path
):
    assert "dry run" in script.release(tree, opened(*sets), None, tagging=False)[-1]
    assert tags(tree) == []
    lines = script.release(tree, opened(*sets), tmp_path / "out", tagging=True)
    assert tags(tree) == ["v1.2.0"] and lines[-1] == "to publish: git push origin v1.2.0"
    with pytest.raises(script.Refused, match="no tag v1.2.0"):
        script.release(tree, opened(*sets), None, tagging=False)


def test_a_version_that_is_not_released_yet_is_not_tagged(script, tree, sets, tmp_path):
    text = FILES["CHANGELOG.md"].replace("(2027-01-31)", "(not released yet)")
    (tree / "CHANGELOG.md").write_text(text)
    commit(tree)
    assert script.release(tree, opened(*sets), None, tagging=False)
    with pytest.raises(script.Refused, match="not released yet"):
        script.release(tree, opened(*sets), tmp_path / "out", tagging=True)
    assert tags(tree) == []


def test_existing_files_are_not_replaced(script, tree, sets, tmp_path):
    script.release(tree, opened(*sets), tmp_path / "out", tagging=False)
    with pytest.raises(script.Refused, match="no file"):
        script.release(tree, opened(*sets), tmp_path / "out", tagging=False)


@pytest.mark.parametrize("words", [["--tag"], ["--tag", "--dry-run", "--out", "x"]])
def test_tag_needs_out_and_excludes_dry_run(script, words):
    with pytest.raises(SystemExit):
        script.main(words)


def test_the_versions_of_this_tree_agree(script, root):
    assert script.version_of(root)
