"""The tree as a whole: what lies where, and what no file may hold."""

import re

TOP_LEVEL = {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "docs",
    "nki_impl",
    "notebooks",
    "pyproject.toml",
    "ringspec",
    "tests",
}
# Folders in which somebody's checkout, home or packages lie. Not preceded by what makes it the
# middle of a longer path or of a URL.
FOLDERS = ("home", "Users", "root", "work", "farm", "opt", "mnt", "tmp")
MACHINE_PATH = re.compile(rf"(?<![\w.:/~<>}}$-])/({'|'.join(FOLDERS)})/[\w.]")


def texts(root, files):
    for name in files:
        raw = (root / name).read_bytes()
        if b"\0" not in raw:
            yield name, raw.decode("utf-8")


def test_the_top_level_holds_nothing_else(files):
    top = {name.split("/")[0] for name in files}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_no_file_names_a_path_of_the_machine_it_was_written_on(root, files):
    found = [
        (name, match[0])
        for name, text in texts(root, files)
        if (match := MACHINE_PATH.search(text))
    ]
    assert found == []


def test_every_text_file_ends_in_one_newline_and_has_no_carriage_return(root, files):
    for name, text in texts(root, files):
        assert "\r" not in text, name
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), name


def test_every_module_says_what_it_is_for(root, files):
    for name in files:
        if name.startswith(("ringspec/", "nki_impl/")) and name.endswith(".py"):
            assert (root / name).read_text(encoding="utf-8").startswith('"""'), name
