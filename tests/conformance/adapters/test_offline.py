"""dir: targets. A folder of calls goes to another machine; what comes back is judged, whatever it is."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conformance.diagnose.named_faults import ID, assert_named, each_fault
from refusals import refuses

from ringspec.cli import main
from ringspec.conformance.adapters.offline import OfflineTarget
from ringspec.conformance.adapters.wire import Claims
from ringspec.conformance.cases import write
from ringspec.conformance.cases.golden import cases as golden_cases
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.cases.write import EVERYTHING, write_cases
from ringspec.conformance.report.report import make_header
from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Garbage
from ringspec.errors import FileFormatError, OptionError
from ringspec.tensorfile import encode, read_tensors
from ringspec.vectors import open_set

NAIVE = Path(__file__).parents[3] / "docs" / "examples" / "naive_ring.py"
FILL = Path(__file__).parent / "programs" / "fill.py"
IDS = ("attention/float32", "merge/two-parts", ID, "ring/zigzag-causal-w2")
CLAIMS = Claims(
    "naive, elsewhere",
    Capabilities(
        layouts=("contiguous", "striped", "zigzag"),
        formats=("float32", "bfloat16"),
        features=("scale", "unequal-lengths"),
        head_ratios=(1,),
    ),
    ("run on another machine",),
)
CASES = {case.id: case for case in golden_cases("core")}
SOME = [CASES[id] for id in IDS]


def filled(folder):
    """What the other machine does; it has no ringspec, and sees nothing of this process."""
    command = [sys.executable, "-I", str(FILL), str(NAIVE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env={})
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline") / "calls"
    write_cases(folder, SOME, profile="core")
    return filled(folder)


@pytest.fixture
def folder(once, tmp_path):
    """A filled folder of its own for a test that spoils it."""
    return shutil.copytree(once, tmp_path / "calls")


def outcome(folder, id=ID):
    (record,) = run(OfflineTarget(folder), [CASES[id]]).records
    return record


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# From one end to the other


def test_smoke_goes_to_another_machine_and_back(tmp_path):
    cases = run_cases("smoke")
    write_cases(tmp_path / "calls", cases, profile="smoke", claims=CLAIMS)
    summary = run(OfflineTarget(filled(tmp_path / "calls")), cases)
    assert summary.exit_code == 0
    assert summary.counts["pass"] >= 7
    assert set(summary.counts) == {"pass", "not claimed"}


def test_without_claims_everything_is_claimed_and_a_refusal_is_a_failure(once):
    records = run(OfflineTarget(once), SOME).records
    assert [record.outcome for record in records] == ["pass", "refused", "pass", "pass"]
    assert "no merge with []" in records[1].message


def test_before_anything_came_back_everything_is_missing(tmp_path):
    write_cases(tmp_path / "calls", SOME)
    records = run(OfflineTarget(tmp_path / "calls"), SOME).records
    assert {record.outcome for record in records} == {"missing"}


def test_the_folder_can_be_moved(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    assert outcome(tmp_path / "elsewhere").outcome == "pass"


def test_a_target_spec_finds_the_folder(once):
    target = load_target(f"dir:{once}")
    assert target.name == "dir:calls" and target.capabilities == EVERYTHING


# What is written


def test_the_same_cases_give_the_same_bytes(once, tmp_path):
    write_cases(tmp_path / "calls", SOME, profile="core")
    written = files(tmp_path / "calls")
    kept = {name: data for name, data in files(once).items() if name in written}
    assert written == kept
    assert set(written) == {
        "README.md",
        "index.json",
        *(f"calls/{id}/{name}" for id in IDS for name in ("call.json", "inputs.safetensors")),
    }


def test_no_expected_value_is_written(once):
    core = open_set("core")
    known = {"q", "k", "v", "dy", "parts_o", "parts_lse"}
    known |= {"index_q", "index_k", "position_q", "position_k"}
    for id in IDS:
        inputs = read_tensors(once / "calls" / id / "inputs.safetensors")
        assert set(inputs) <= known
        expected = [x for name, x in core.tensors(id).items() if name.startswith("out.")]
        for x in inputs.values():
            assert not any(x.shape == y.shape and np.array_equal(x, y) for y in expected)


def test_only_what_is_claimed_is_written(tmp_path):
    written = write_cases(tmp_path / "calls", SOME, claims=CLAIMS)
    assert (written.cases, written.calls) == (3, 3)
    assert not (tmp_path / "calls" / "calls" / "merge").exists()
    (record,) = run(OfflineTarget(tmp_path / "calls"), [CASES["merge/two-parts"]]).records
    assert record.outcome == "not claimed"


def test_arrays_are_written_in_the_order_of_axes_that_is_claimed(tmp_path):
    claims = Claims("x", Capabilities(layouts=("zigzag",), axes="BSHD"))
    write_cases(tmp_path / "calls", [CASES[ID]], claims=claims)
    turned = read_tensors(tmp_path / "calls" / "calls" / ID / "inputs.safetensors")["q"]
    write_cases(tmp_path / "plain", [CASES[ID]])
    plain = read_tensors(tmp_path / "plain" / "calls" / ID / "inputs.safetensors")["q"]
    np.testing.assert_array_equal(turned, plain.swapaxes(2, 3))
    assert outcome(tmp_path / "calls").outcome == "missing"


def test_claims_and_notes_come_back_with_the_folder(tmp_path):
    write_cases(tmp_path / "calls", SOME, profile="core", claims=CLAIMS)
    target = OfflineTarget(tmp_path / "calls")
    assert (target.name, target.notes, target.profile) == (CLAIMS.name, CLAIMS.notes, "core")
    assert target.capabilities == CLAIMS.capabilities


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    with refuses((OptionError, "destination")):
        write_cases(tmp_path, SOME)
    with refuses((OptionError, "destination")):
        write_cases(tmp_path / "no" / "such", SOME)

    def failing(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "write_call", failing)
    with pytest.raises(KeyboardInterrupt):
        write_cases(tmp_path / "calls", SOME)
    assert list(tmp_path.iterdir()) == []


# What comes back


def test_a_result_of_another_case_is_a_mismatch(folder):
    shutil.copy(
        folder / "calls/ring/zigzag-causal-w2/result.safetensors",
        folder / "calls" / ID / "result.safetensors",
    )
    assert outcome(folder).outcome in ("wrong shape", "missing")


def test_one_nan_of_one_worker_is_found(folder):
    path = folder / "calls" / ID / "result.safetensors"
    tensors = {name: np.array(x) for name, x in read_tensors(path).items()}
    tensors["dv"][2, 0, 1, 3, 1] = np.nan
    path.write_bytes(encode(tensors))
    record = outcome(folder)
    wrong = [(one.tensor, one.worker, one.kind) for one in record.findings if one.kind != "ok"]
    assert (record.outcome, wrong) == ("mismatch", [("dv", 2, "NaN")])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: os.truncate(path, 100), "result file"),
        (lambda path: os.truncate(path, 1 << 40), "of at most"),
        (lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x")), "symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "a plain file"),
        (lambda path: (path.unlink(), path.mkdir()), "a plain file"),
        (lambda path: path.write_bytes(encode({"dz": np.zeros(4)})), "unknown tensor 'dz'"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")
def test_what_is_no_result_is_garbage_and_says_so(folder, spoil, message):
    spoil(folder / "calls" / ID / "result.safetensors")
    record = outcome(folder)
    assert record.outcome == "garbage" and message in record.message, record.message


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_a_folder_that_is_a_link_is_not_followed(folder, tmp_path):
    place = folder / "calls" / ID
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    record = outcome(folder)
    assert record.outcome == "garbage" and "symbolic link" in record.message


def test_a_long_reason_is_cut(folder):
    (folder / "calls" / ID / "result.safetensors").unlink()
    (folder / "calls" / ID / "refused.txt").write_bytes(b"no\xff" + b"x" * 50_000)
    record = outcome(folder)
    assert record.outcome == "refused" and len(record.message) < 3000
    (folder / "calls" / ID / "refused.txt").write_bytes(b"x" * 100_000)
    assert outcome(folder).outcome == "garbage"


def test_a_result_wins_over_a_refusal(folder):
    (folder / "calls" / ID / "refused.txt").write_text("not this one")
    assert outcome(folder).outcome == "pass"


def test_a_call_that_was_never_written_is_told_apart_from_a_missing_result(folder):
    record = outcome(folder, "ring/contiguous-w2")
    assert record.outcome == "garbage" and "does not contain this call" in record.message
    shutil.rmtree(folder / "calls" / ID)
    assert outcome(folder).outcome == "missing"


def test_inputs_of_another_version_are_not_judged_by_these_values(folder):
    index = json.loads((folder / "index.json").read_text())
    index["calls"][ID] = "0" * 64
    (folder / "index.json").write_text(json.dumps(index))
    (call,) = CASES[ID].make(EVERYTHING)
    with pytest.raises(Garbage, match="written by another version"):
        OfflineTarget(folder).run(call)


def test_a_call_with_one_other_number_is_not_judged_by_these_values(folder):
    (call,) = CASES[ID].make(EVERYTHING)
    q = [np.array(x) for x in call.tensors["q"]]
    q[3][0, 1, 2, 0] += 1
    other = dataclasses.replace(call, tensors={**call.tensors, "q": tuple(q)})
    OfflineTarget(folder).run(call)
    with pytest.raises(Garbage, match="written by another version"):
        OfflineTarget(folder).run(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("calls"),
        lambda index: index.update(calls=[]),
        lambda index: index.update(calls={"../../etc": "0" * 64}),
        lambda index: index.update(calls={"/etc": "0" * 64}),
        lambda index: index.update(calls={"a//b": "0" * 64}),
        lambda index: index.update(calls={"a": 5}),
        lambda index: index.update(kind="ringspec-vectors"),
        lambda index: index.pop("kind"),
        lambda index: index.update(protocol=2),
        lambda index: index.update(surplus=1),
        lambda index: index.update(name=5),
        lambda index: index["capabilities"].update(workers="4"),
    ],
)
def test_an_index_that_is_none_is_refused(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FileFormatError):
        OfflineTarget(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"kind": 1e999}'])
def test_an_index_of_other_bytes_is_refused(folder, text):
    (folder / "index.json").write_bytes(text)
    with pytest.raises(FileFormatError):
        OfflineTarget(folder)


def test_a_folder_without_index_is_refused(tmp_path):
    with pytest.raises(FileFormatError):
        OfflineTarget(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(bytes(8) + path.read_bytes()[8:]),
        lambda path: path.write_bytes(path.read_bytes() + b" "),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_inputs_that_are_not_as_they_were_written_are_mutated(folder, spoil):
    spoil(folder / "calls" / ID / "inputs.safetensors")
    record = outcome(folder)
    assert record.outcome == "mutated" and "inputs.safetensors" in record.message


def test_inputs_need_not_come_back(folder):
    (folder / "calls" / ID / "inputs.safetensors").unlink()
    assert outcome(folder).outcome == "pass"


def spoilt(folder, fault):
    """A folder as the other machine leaves it whose program has the fault."""
    place = folder / "calls" / ID
    result, inputs = place / "result.safetensors", place / "inputs.safetensors"
    tensors = {name: np.array(x) for name, x in read_tensors(result).items()}
    if fault in ("segfault", "hang"):  # it never came to write a result
        result.unlink()
    elif fault == "float16":
        result.write_bytes(encode(tensors | {"o": tensors["o"].astype(np.float16)}))
    elif fault == "wrong worker":
        result.write_bytes(encode(tensors | {"o": np.roll(tensors["o"], 1, axis=0)}))
    elif fault == "NaN":
        tensors["dv"][2, 0, 1, 3, 1] = np.nan
        result.write_bytes(encode(tensors))
    elif fault == "mutate":
        inputs.write_bytes(inputs.read_bytes()[:-1] + b"\x7f")


@each_fault
def test_each_fault_of_the_other_machine_is_named_as_exactly_that(folder, fault):
    spoilt(folder, fault)
    record = outcome(folder)
    if fault in ("segfault", "hang"):
        assert record.outcome == "missing" and "o of worker 0 is missing" in record.message
    elif fault == "print":  # what it printed there has not come here
        assert record.outcome == "pass"
    else:
        assert_named(record, fault)


# The command


def check(*arguments, code):
    done = CliRunner().invoke(main, ["check", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_check_asks_a_folder_for_what_it_was_written_with(tmp_path):
    assert invoke(tmp_path / "smoke", "--profile", "smoke").exit_code == 0
    assert "profile smoke" in check(f"dir:{tmp_path / 'smoke'}", code=1).stdout
    some = tmp_path / "some"
    assert invoke(some, "--profile", "core", "--only", "ring/zigzag-causal-w*").exit_code == 0
    count = len([id for id in CASES if id.startswith("ring/zigzag-causal-w")])
    done = check(f"dir:{some}", code=1)
    assert f"profile core, {count} cases" in done.stdout
    assert done.stdout.splitlines()[-1] == f"passed 0 of {count} claimed, 0 not claimed"
    assert "missing" in done.stdout and "garbage" not in done.stdout
    assert "profile smoke" in check(f"dir:{some}", "--profile", "smoke", code=1).stdout
    full = check(f"dir:{some}", "--profile", "full", code=2)
    assert "ringspec cases write DIR --profile full" in full.stderr and full.stdout == ""


def invoke(*arguments):
    return CliRunner().invoke(main, ["cases", "write", *map(str, arguments)])


def test_the_command_writes_what_the_function_writes(tmp_path):
    done = invoke(tmp_path / "calls", "--profile", "smoke", "--only", "ring/zigzag-*")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("1 cases, 1 calls, 0.0 MiB in")
    chosen = [case for case in run_cases("smoke") if case.id.startswith("ring/zigzag-")]
    write_cases(tmp_path / "again", chosen, profile="smoke")
    same, index = files(tmp_path / "calls"), "index.json"
    again = files(tmp_path / "again")
    assert {name: same[name] for name in same if name != index} == {
        name: again[name] for name in again if name != index
    }


def test_the_command_takes_claims_from_a_file(tmp_path):
    claims = {"name": "mine", "capabilities": {"layouts": ["striped"], "formats": ["bfloat16"]}}
    (tmp_path / "target.json").write_text(json.dumps(claims))
    options = ("--profile", "smoke", "--only", "ring/*", "--claims", tmp_path / "target.json")
    done = invoke(tmp_path / "calls", *options, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["cases"] == 1 and document["not_claimed"] >= 3
    assert OfflineTarget(tmp_path / "calls").name == "mine"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--profile", "cor"), "cor"),
        (("--only", "no/*"), "a pattern that matches the whole id of some case"),
        (("--claims", "no-such.json"), "no-such.json"),
    ],
)
def test_bad_input_of_the_command_ends_with_2_and_writes_nothing(tmp_path, arguments, text):
    done = invoke(tmp_path / "calls", "--profile", "smoke", *arguments)
    assert done.exit_code == 2 and text in done.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"capabilities": {"workers": "4"}}', '{"nam": "x"}'])
def test_claims_that_are_none_end_with_2(tmp_path, text):
    (tmp_path / "target.json").write_text(text)
    done = invoke(tmp_path / "calls", "--profile", "smoke", "--claims", tmp_path / "target.json")
    assert done.exit_code == 2 and "claims of a program in target.json" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_unknown_profiles_are_refused_in_python_too():
    with pytest.raises(OptionError):
        run_cases("nightly")


# What the other machine says of its packages


def test_versions_that_the_other_machine_says_are_in_the_report(folder):
    (folder / "versions.json").write_text('{"versions": {"mine": "1.2"}, "files": {"mine": "/m"}}')
    header = make_header(OfflineTarget(folder), spec=f"dir:{folder}", profile="core")
    assert (header["versions"]["mine"], header["files"]) == ("1.2", {"mine": "/m"})


@pytest.mark.parametrize(
    "text", ["1.2", "[]", '{"versions": {"mine": 1.2}}', '{"versions": "1.2"}']
)
def test_versions_of_another_form_are_refused(folder, text):
    (folder / "versions.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"versions\.json"):
        OfflineTarget(folder)


def test_a_link_in_the_place_of_the_versions_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").write_text('{"versions": {"mine": "1.2"}}')
    (folder / "versions.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileFormatError, match=r"versions\.json"):
        OfflineTarget(folder)
