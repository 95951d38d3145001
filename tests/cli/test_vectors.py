"""``ringspec vectors``: what it prints, its exit codes, and what it refuses."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import jsonschema
import pytest
from cli.commands import assert_one_paragraph, run_program
from click.testing import CliRunner
from vectors import small

import ringspec as rs
from ringspec.cli import main
from ringspec.tensorfile import read_tensors, write_tensors
from ringspec.vectors import open_set
from ringspec.vectors.format.digest import sha256
from ringspec.vectors.format.manifest import make_manifest, manifest_to_json

SCHEMA = json.loads((Path(rs.__file__).parent / "cli" / "vectors.schema.json").read_text())


def call(*arguments):
    return CliRunner().invoke(main, ["vectors", *map(str, arguments)])


def text(*arguments, code=0):
    result = call(*arguments)
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    assert result.stdout.isascii()
    return result.stdout


def document(*arguments, code=0):
    """The JSON document of a call, checked against the schema."""
    data = json.loads(text(*arguments, "--json", code=code))
    jsonschema.validate(data, SCHEMA)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A set of seven cases; no test changes it."""
    return small.write(tmp_path_factory.mktemp("sets") / "small").path


@pytest.fixture
def changed(tmp_path):
    """Another, sound in form, with one wrong element in each of two cases."""
    path = small.write(tmp_path / "changed").path
    for id, name in (("ring/padded", "out.dk.float64"), ("merge/small", "out.o.float64")):
        file = path / id / "tensors.safetensors"
        tensors = read_tensors(file)
        x = tensors[name].copy()
        x.reshape(-1)[0] += 2.0**-30
        write_tensors(file, tensors | {name: x})
    relist(path)
    return path


def relist(path):
    """A manifest that lists the files as they are."""
    from ringspec.vectors.format.container import case_digest, file_entry
    from ringspec.vectors.format.manifest import CaseEntry

    old = open_set(path)
    entries = {}
    for id, entry in old.manifest.cases.items():
        files = {name: file_entry((path / id / name).read_bytes()) for name in entry.files}
        tensors = {}
        if "tensors.safetensors" in files:
            tensors = read_tensors(path / id / "tensors.safetensors")
        entries[id] = CaseEntry(files, case_digest(old.case(id), tensors))
    manifest = make_manifest(
        old.name, old.set_version, old.spec_version, old.manifest.flags, entries, old.format_version
    )
    (path / "manifest.json").write_text(manifest_to_json(manifest))


HEADER = (
    f"set small 1.0, 7 cases; vector format 1.0, specification {rs.SPEC_VERSION}, "
    f"ringspec {rs.__version__}\n"
)


# list, show -------------------------------------------------------------------------------------


def rows_of(printed):
    """The lines of a list that begin with an id."""
    return [line for line in printed.splitlines()[2:-1] if not line.startswith(" ")]


def test_list_prints_the_four_versions_and_a_line_for_each_case(folder):
    printed = text("list", folder)
    assert printed.startswith(HEADER) and printed.endswith("\n7 of 7 cases\n")
    assert [line.split()[0] for line in rows_of(printed)] == list(open_set(folder).ids)
    lines = printed.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("ring/padded"))
    assert all(part in lines[at] for part in ("fwd bwd", "B1 H2 S8 D4", "bfloat16"))
    assert lines[at + 1] == "    W3 table causal dlse bias sinks"


@pytest.mark.parametrize("name", ["core", "kernel"])
def test_the_list_of_a_packaged_set_fits_eighty_columns(name):
    assert max(map(len, text("list", name).splitlines())) <= 80


@pytest.mark.parametrize(
    ("option", "ids"),
    [
        (("--rule", "SOFT-2"), {"merge/small"}),
        (("--flag", "stale-keys"), {"attention/small"}),
        (("--operation", "ring"), {"ring/padded", "ring/pinned", "ring/sampled"}),
        (("--operation", "ring", "--rule", "LAYOUT-5"), {"ring/padded"}),
        (("--operation", "merge", "--rule", "LAYOUT-5"), set()),
    ],
)
def test_list_chooses_by_rule_flag_and_operation(folder, option, ids):
    data = document("list", folder, *option)
    assert {case["id"] for case in data["cases"]} == ids
    assert data["count"] == 7
    printed = text("list", folder, *option)
    assert {line.split()[0] for line in rows_of(printed)} == ids
    assert printed.splitlines()[-1] == f"{len(ids)} of 7 cases"


def test_list_of_flags_says_what_they_do_and_where_they_were_seen(folder):
    printed = text("list", folder, "--flags")
    assert "\nstale-keys (schedule, backward; 1 case)\n" in printed
    flag = open_set(folder).flags["stale-keys"]
    assert flag.effect in printed.replace("\n  ", " ") and flag.reports[0] in printed
    assert len(document("list", folder, "--flags")["flags"]) == len(open_set(folder).flags)


def test_show_says_why_a_case_exists_and_what_it_holds(folder):
    printed = text("show", "attention/small", "--set", folder, "--tensors")
    case, flag = open_set(folder).case("attention/small"), open_set(folder).flags["stale-keys"]
    for part in (case.reason, "operation  attention, forward and backward", flag.effect):
        assert part in printed.replace("\n  ", " ")
    assert "shape      B=1 H=2 Hkv=2 Sq=6 Sk=6 D=4 Dv=4\n" in printed
    for name, x in open_set(folder).tensors("attention/small").items():
        assert f"{sha256(x.tobytes())}\n" in printed and f"\n{name} " in printed
    assert "\nin.q " in printed.partition("values in C order")[2]


def test_show_has_the_digest_of_the_whole_tensor_where_rows_are_stored(folder):
    data = document("show", "ring/sampled", "--set", folder, "--tensors")
    case = open_set(folder).case("ring/sampled")
    rows = {row["name"]: row for row in data["tensors"]}
    for name, digest in case.digests.items():
        assert rows[name]["sha256"] == digest
    assert {rows[n]["stored"] for n in ("in.q", "in.dy")} == {"no"}
    assert rows["out.o.float64"]["stored"] == "rows"
    assert rows["layout.q"]["stored"] == rows["out.dsinks.float64"]["stored"] == "whole"
    assert rows["layout.q"]["values"][0] == list(range(6)) + list(range(18, 24))
    assert "values" not in rows["in.q"]
    assert data["case"]["id"] == "ring/sampled" and data["content"]


@pytest.mark.parametrize("id", [case.id for case in small.cases()])
def test_show_takes_every_kind_of_case(folder, id):
    assert id in text("show", id, "--set", folder, "--tensors")
    document("show", id, "--set", folder, "--tensors")


# verify, diff -----------------------------------------------------------------------------------


def test_verify_of_a_set_as_it_should_be(folder):
    assert text("verify", folder, "--jobs", 1) == HEADER + "7 cases: 7 ok\n"
    data = document("verify", folder, "--only", "merge/*", "--jobs", 1)
    assert (data["ok"], data["fault"], len(data["cases"])) == (True, None, 1)


def test_verify_names_what_differs_with_exit_code_1(changed):
    printed = text("verify", changed, "--jobs", 1, code=1)
    assert "\nring/padded: differs\n  out.dk.float64: 1 of 96 elements, by at most " in printed
    assert "\nmerge/small: differs\n  out.o.float64: 1 of 16 elements, by at most " in printed
    assert printed.endswith("\n7 cases: 5 ok, 2 differs\n")
    data = document("verify", changed, "--jobs", 2, code=1)
    bad = {case["id"]: case["tensors"] for case in data["cases"] if case["outcome"] == "differs"}
    assert {id: [t["name"] for t in tensors] for id, tensors in bad.items()} == {
        "ring/padded": ["out.dk.float64"],
        "merge/small": ["out.o.float64"],
    }
    assert data["ok"] is False


def test_verify_checks_the_files_before_it_derives(changed):
    (changed / "notes.txt").write_text("mine")
    printed = text("verify", changed, code=1)
    assert "the set is damaged: expected only files that the manifest lists" in printed
    data = document("verify", changed, code=1)
    assert "notes.txt" in data["fault"] and data["cases"] == []


def test_diff_of_equal_and_of_changed_sets(folder, changed):
    assert text("diff", folder, folder) == "equal\n"
    assert document("diff", folder, folder)["difference"]["equal"] is True
    printed = text("diff", folder, changed, code=1)
    assert "cases: 0 added, 0 removed, 2 changed\n" in printed
    assert "changed merge/small\n  out.o.float64: 1 of 16 elements" in printed
    data = document("diff", folder, changed, code=1)
    assert [case["id"] for case in data["difference"]["changed"]] == ["merge/small", "ring/padded"]


# generate, export, materialise ------------------------------------------------------------------


def test_generate_writes_a_set_and_refuses_to_overwrite_it(tmp_path):
    target = tmp_path / "new"
    arguments = ("generate", "core", target, "--only", "merge/*", "--jobs", 1)
    data = document(*arguments)
    made = open_set(target)
    assert data["count"] == len(made) > 0 and data["content"] == made.manifest.content
    assert_one_paragraph(call(*arguments), "a path that does not exist", "choose another")
    assert text("verify", target, "--jobs", 1).endswith(f": {len(made)} ok\n")


def test_export_writes_a_reproducible_archive(folder, tmp_path):
    printed = text("export", folder, tmp_path / "a.tar")
    assert printed.startswith(HEADER)
    data = document("export", folder, tmp_path / "b.tar")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.tar", "b.tar"))
    assert first == second and data["bytes"] == len(first)
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert "small/ring/padded/case.json" in archive.getnames()
    assert_one_paragraph(call("export", folder, tmp_path / "a.zip"), ".tar or .tar.gz")


def test_materialise_says_what_it_did_and_where(folder, tmp_path):
    arguments = ("materialise", folder, "--cache", tmp_path / "cache", "--jobs", 1)
    printed = text(*arguments)
    assert printed.startswith(HEADER)
    assert "2 cases with the correct digests, 2 of them derived now" in printed
    data = document(*arguments)
    assert (data["materialised"], data["derived"]) == (2, 0)
    assert data["folder"] == str(tmp_path / "cache")


def test_materialise_takes_the_folder_of_the_environment(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RINGSPEC_CACHE_DIR", str(tmp_path / "mine"))
    assert document("materialise", folder, "--jobs", 1)["folder"] == str(tmp_path / "mine")


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", "corr"), "write 'core'"),
        (("list", "SET", "--rule", "SOFT-22"), "write 'SOFT-2'"),
        (("list", "SET", "--flag", "stale-key"), "write 'stale-keys'"),
        (("list", "SET", "--operation", "rings"), "write 'ring'"),
        (("show", "ring/pad", "--set", "SET"), "write 'ring/padded'"),
        (("show", "../secret", "--set", "SET"), "the id of a case"),
        (("show", "rong/zigzag-causal-w4"), "write 'ring/zigzag-causal-w4'"),
        (("verify", "SET", "--only", "wing/*"), "a pattern that some id matches"),
        (("verify", "SET", "--jobs", "0"), "--jobs"),
        (("generate", "cores", "new"), "write 'core'"),
        (("generate", "core", "no/folder"), "make the folder first"),
        (("generate", "core"), "Missing argument 'DEST'"),
        (("diff", "SET", "other"), "the folder of a set"),
        (("verifi",), "write 'verify'"),
        (("list", "SET", "--jsn"), "--json"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(folder, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [folder if argument == "SET" else argument for argument in arguments]
    assert_one_paragraph(call(*given), says)
    assert os.listdir(tmp_path) == []


def test_every_command_has_help():
    for name in ("", "list", "show", "verify", "generate", "diff", "export", "materialise"):
        result = call(*([name] if name else []), "--help")
        assert result.exit_code == 0 and "Usage: main vectors " + name in result.stdout


# As a program -----------------------------------------------------------------------------------


def test_a_pipe_gets_plain_text_and_nothing_on_stderr(folder, tmp_path):
    result = run_program("vectors", "list", str(folder), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == text("list", folder)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_bar_that_counts_cases(folder, tmp_path):
    import pty

    terminal, end = pty.openpty()
    command = [
        "-m",
        "ringspec",
        "vectors",
        "materialise",
        str(folder),
        "--cache",
        "c",
        "--jobs",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, *command, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    out, _ = process.communicate(timeout=600)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.returncode == 0
    jsonschema.validate(json.loads(out), SCHEMA)
    assert b"materialise small" in shown and b"2/2" in shown


def test_other_commands_start_without_what_vectors_needs():
    program = "import sys, ringspec.cli; print([m for m in ('jsonschema', 'platformdirs', 'concurrent.futures.process') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "[]\n", result.stderr
