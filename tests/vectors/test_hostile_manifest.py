"""Manifests, cases and tensors behind good hashes: refused when they break the format or each other."""

import json
import shutil
import struct

import numpy as np
import pytest
from vectors.hostile import refused
from vectors.samples import manifest, relisted, summed

from ringspec.errors import FileFormatError, VectorError
from ringspec.tensorfile import decode, encode
from ringspec.vectors import check_set, open_set

CASE = "merge/three"
FILE = "merge/three/tensors.safetensors"


# The manifest

EMPTY = {"files": {"case.json": {"bytes": 1, "sha256": "0" * 64}}, "content": "0" * 64}
CHANGES = {
    "unknown-key": lambda data: data.update(note=1),
    "missing-key": lambda data: data.pop("set_version"),
    "odd-name": lambda data: data.update(set="../core"),
    "odd-version": lambda data: data.update(set_version="one"),
    "count": lambda data: data.update(count=data["count"] + 1),
    "count-of-true": lambda data: data.update(count=True),
    "count-as-float": lambda data: data.update(count=float(data["count"])),
    "bytes": lambda data: data.update(bytes=data["bytes"] - 1),
    "negative-size": lambda data: data["flags"].update(bytes=-1),
    "short-hash": lambda data: data["flags"].update(sha256="00"),
    "unknown-file": lambda data: data["cases"][CASE]["files"].update(
        {"run.py": {"bytes": 1, "sha256": "0" * 64}}
    ),
    "no-case-file": lambda data: data["cases"][CASE]["files"].pop("case.json"),
    "cases-as-list": lambda data: data.update(cases=[]),
    "escape": lambda data: (data["cases"].update({"../x/y": EMPTY}), summed(data)),
    "absolute": lambda data: (data["cases"].update({"/etc/x": EMPTY}), summed(data)),
    "upper-case": lambda data: (data["cases"].update({"Merge/three": EMPTY}), summed(data)),
    "newline": lambda data: (data["cases"].update({"merge/three\n": EMPTY}), summed(data)),
    "windows-name": lambda data: (data["cases"].update({"con/x": EMPTY}), summed(data)),
    "case-in-case": lambda data: (data["cases"].update({CASE + "/x": EMPTY}), summed(data)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_breaks_the_format_or_itself_is_refused(root, change):
    relisted(root, change)
    refused(root, (VectorError, "manifest"), open_set)


def test_a_wrong_content_digest_of_the_set_is_refused(root):
    relisted(root, lambda data: data.update(content="0" * 64))
    refused(root, (VectorError, "digest-content"), open_set)


def test_a_wrong_content_digest_of_a_case_is_refused(root):
    def change(data):
        data["cases"][CASE]["content"] = "0" * 64
        summed(data)

    relisted(root, change)
    assert CASE in refused(root, (VectorError, "digest-content")).expected


def test_a_case_with_another_meaning_has_another_content_digest(root):
    place = root / CASE / "case.json"
    place.write_text(place.read_text().replace("a small case", "another case"))
    relisted(root)
    refused(root, (VectorError, "digest-content"))


@pytest.mark.parametrize("version", ["2.0", "10.3", "0.9", "x", ""])
def test_another_major_version_is_refused_with_what_to_do(root, version):
    (root / "manifest.json").write_text(json.dumps({"format_version": version, "new": {}}))
    error = refused(root, (VectorError, "manifest-version"), open_set)
    assert ("upgrade" if version in ("2.0", "10.3") else "again") in error.fix


def test_a_later_minor_version_is_read(root):
    relisted(root, lambda data: data.update(format_version="1.7"))
    assert check_set(root).format_version == "1.7"


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"a": NaN}', "{}", "[]", "", "\0", "1" * 5000, "[" * 10**6]
)
def test_a_manifest_that_is_no_strict_json_is_refused(root, text):
    (root / "manifest.json").write_text(text)
    refused(root, (VectorError, "manifest"), open_set)


# Cases, flags and tensors behind good hashes


def test_a_case_in_the_folder_of_another_is_refused(root):
    shutil.copy(root / "block/backward/case.json", root / CASE / "case.json")
    relisted(root)
    refused(root, (VectorError, "case-format"))


def test_digests_beside_all_tensors_are_refused(root):
    place = root / CASE / "case.json"
    text = place.read_text()
    place.write_text(text.replace('"digests": {}', f'"digests": {{"in.parts_o": "{"0" * 64}"}}'))
    assert text != place.read_text()
    relisted(root)
    refused(root, (VectorError, "case-tensors"))


def test_a_case_that_breaks_the_format_is_refused(root):
    place = root / CASE / "case.json"
    place.write_text(place.read_text().replace('"B": 2', '"B": 2, "B": 2'))
    relisted(root)
    refused(root, (VectorError, "case-format"))


def test_a_flag_that_the_set_does_not_explain_is_refused(root):
    (root / "flags.json").write_text("{}\n")
    relisted(root)
    refused(root, (VectorError, "flag-format"))


@pytest.mark.parametrize("text", ["[]", '{"a": {}}', '{"A b": 1}', "", '{"a": 1, "a": 1}'])
def test_flags_that_break_the_format_are_refused(root, text):
    (root / "flags.json").write_text(text)
    relisted(root)
    refused(root, (VectorError, "flag-format"))


def header(raw):
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(data, body):
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack("<Q", len(text)) + text + body


def edited(raw, name, **entry):
    data, body = header(raw)
    data[name] = data[name] | entry
    return with_header(data, body)


O = "out.o.float64"
FILES = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0",
    "header-over-1-mib": lambda raw: with_header(json.dumps(header(raw)[0]).encode() + b" " * 2**20, b""),
    "header-length-2-to-63": lambda raw: struct.pack("<Q", 2**63) + raw[8:],
    "key-twice": lambda raw: with_header(
        json.dumps(header(raw)[0]).encode().replace(b"{", b'{"a": 1, "a": 1, ', 1), header(raw)[1]
    ),
    "nan-in-header": lambda raw: with_header(b'{"a": NaN}', b""),
    "gap": lambda raw: edited(raw, O, data_offsets=[8, 296]),
    "overlap": lambda raw: edited(raw, O, data_offsets=[0, 288]),
    "beyond-the-end": lambda raw: edited(raw, O, data_offsets=[2**40, 2**40 + 288]),
    "negative-shape": lambda raw: edited(raw, O, shape=[-2, -2, 3, 4]),
    "huge-shape": lambda raw: edited(raw, O, shape=[2**40, 2**40]),
    "unknown-dtype": lambda raw: edited(raw, O, dtype="O"),
    "pickle": lambda raw: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}  # fmt: skip


@pytest.mark.parametrize("change", FILES.values(), ids=FILES)
def test_a_tensors_file_that_breaks_the_format_is_refused(root, change):
    (root / FILE).write_bytes(change((root / FILE).read_bytes()))
    relisted(root)
    refused(root, FileFormatError)


def without(name):
    return lambda x: {other: value for other, value in x.items() if other != name}


TENSORS = {
    "missing": without(O),
    "one-more": lambda x: x | {"out.q.float64": x[O]},
    "another-shape": lambda x: x | {O: x[O].transpose(1, 0, 2, 3)[:, :1]},
    "another-rank": lambda x: x | {O: x[O].ravel()},
    "another-dtype": lambda x: x | {O: x[O].astype(np.float32)},
    "integers": lambda x: x | {O: x[O].astype(np.int64)},
    "none": lambda x: {},
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_not_those_of_the_case_are_refused(root, change):
    (root / FILE).write_bytes(encode(change(decode((root / FILE).read_bytes()))))
    relisted(root)
    refused(root, (VectorError, "case-tensors"))


def test_metadata_in_a_tensors_file_is_refused(root):
    raw = encode(decode((root / FILE).read_bytes()), {"note": "move the metadata to case.json"})
    (root / FILE).write_bytes(raw)
    relisted(root)
    refused(root, (VectorError, "case-tensors"))


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_tensors_file_beside_digests_is_refused(root, is_empty):
    place = root / "kernel/zigzag-w2/tensors.safetensors"
    place.write_bytes(encode({}) if is_empty else (root / FILE).read_bytes())
    entry = {"tensors.safetensors": {"bytes": 0, "sha256": "0" * 64}}
    data = manifest(root)
    data["cases"]["kernel/zigzag-w2"]["files"].update(entry)
    (root / "manifest.json").write_text(json.dumps(data))
    relisted(root)
    refused(root, (VectorError, "case-tensors"))


def test_a_set_without_a_case_s_tensors_file_is_refused(root):
    (root / FILE).unlink()
    data = manifest(root)
    del data["cases"][CASE]["files"]["tensors.safetensors"]
    (root / "manifest.json").write_text(json.dumps(data))
    relisted(root)
    refused(root, (VectorError, "case-tensors"))
