"""Tensor files: what is written comes back, the same tensors give the same bytes, bad files fail.

The format is checked against the `safetensors` package in both directions. Hostile files are built
byte by byte here; whatever they hold, reading gives tensors or a FileFormatError.
"""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ringspec.errors import DtypeError, FileFormatError, RingspecError
from ringspec.tensorfile import (
    DTYPES,
    MAX_HEADER,
    MAX_RANK,
    decode,
    encode,
    read_metadata,
    read_tensors,
    write_tensors,
)

SHAPES = ((), (1,), (5,), (2, 3), (0,), (2, 0, 3), (1, 1, 1, 7))
PACKAGE_DTYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


def sample(code: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of that dtype with every byte value that the dtype allows somewhere in it."""
    dtype, count = DTYPES[code], int(np.prod(shape))
    random = np.random.default_rng(count + len(code))
    if code == "BOOL":
        return random.random(shape) < 0.5
    data = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return data.view(dtype).reshape(shape)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Same dtype, shape and bytes: NaN patterns and signs of zero count."""
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def file_of(header: object, body: bytes = b"") -> bytes:
    """A file with this header, given as data for JSON or as bytes, and this body."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def one_tensor(**changes: object) -> bytes:
    """A valid file of one float64 tensor of two elements, with some header entries changed."""
    entry = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]} | changes
    return file_of({"a": entry}, bytes(16))


# --- what is written comes back ---------------------------------------------------------------


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_and_shape_comes_back_bit_for_bit(code):
    tensors = {str(shape): sample(code, shape) for shape in SHAPES}
    back = decode(encode(tensors))
    assert sorted(back) == sorted(tensors)
    for name, want in tensors.items():
        assert same(back[name], want), name


@pytest.mark.parametrize("code", DTYPES)
def test_strides_do_not_change_the_bytes(code):
    plain = sample(code, (4, 6))
    twice = np.repeat(np.repeat(plain, 2, axis=0), 3, axis=1)
    want = encode({"x": plain})
    for view in (np.asfortranarray(plain), twice[::2, ::3], plain[::-1][::-1], plain.T.copy().T):
        assert encode({"x": view}) == want
    assert same(decode(encode({"x": plain.T}))["x"], np.ascontiguousarray(plain.T))
    assert same(decode(encode({"x": plain[1:, ::-2]}))["x"], np.ascontiguousarray(plain[1:, ::-2]))


@pytest.mark.parametrize("code", ["F64", "F32", "F16", "I64", "U32", "I16"])
def test_big_endian_arrays_are_written_little_endian(code):
    plain = sample(code, (3, 2))
    big = plain.astype(plain.dtype.newbyteorder(">"))
    assert encode({"x": big}) == encode({"x": plain})


def test_python_numbers_and_lists_are_arrays():
    back = decode(encode({"number": 3.5, "list": [[1, 2], [3, 4]]}))
    assert back["number"].shape == () and back["number"] == 3.5
    assert back["list"].tolist() == [[1, 2], [3, 4]]


def test_no_tensor_at_all_is_a_file():
    assert decode(encode({})) == {}


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "../../etc/passwd", "C:\\x", "häß", "日本", "\N{ZERO WIDTH SPACE}",
             "\x00", '"', "\\", "\n", "a" * 1000, "dtype", "\U0001f600"],
)  # fmt: skip
def test_names_are_only_names(name, tmp_path):
    before = sorted(tmp_path.iterdir())
    write_tensors(tmp_path / "x.safetensors", {name: np.arange(3)})
    back = read_tensors(tmp_path / "x.safetensors")
    assert list(back) == [name] and back[name].tolist() == [0, 1, 2]
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "x.safetensors"]


def test_metadata_comes_back_and_is_no_tensor(tmp_path):
    metadata = {"a": "", "日本": '{"x": [1]}'}
    write_tensors(tmp_path / "x", {"t": np.ones(2)}, metadata)
    assert read_metadata(tmp_path / "x") == metadata
    assert list(read_tensors(tmp_path / "x")) == ["t"]
    write_tensors(tmp_path / "y", {"t": np.ones(2)})
    assert read_metadata(tmp_path / "y") == {}


def test_what_was_read_cannot_be_changed():
    for array in decode(encode({"x": np.ones(2), "y": np.zeros((0, 3))})).values():
        assert not array.flags.writeable


# --- same tensors, same bytes -----------------------------------------------------------------


def test_the_bytes_are_these():
    """Fixed for ever: digests of golden vectors stand on them."""
    got = encode({"b": np.array([1, -1], np.int16), "a": np.array(0.5, np.float32)}, {"k": "v"})
    header = (
        b'{"__metadata__":{"k":"v"},'
        b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"I16","shape":[2],"data_offsets":[4,8]}}' + b" " * 5
    )
    assert got == struct.pack("<Q", len(header)) + header + b"\0\0\0\x3f\x01\0\xff\xff"
    assert len(header) % 8 == 0


def test_the_order_of_names_and_metadata_does_not_matter(tmp_path):
    names = ["z", "a", "M", "0", "ä"]
    tensors = {name: sample("F32", (n, 2)) for n, name in enumerate(names)}
    metadata = {name: name for name in names}
    want = encode(tensors, metadata)
    assert want == encode(dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    for file in ("one", "two"):
        write_tensors(tmp_path / file, tensors, metadata)
        assert (tmp_path / file).read_bytes() == want


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_any_tensors_come_back_and_are_written_the_same_again(kinds):
    kinds.pop("__metadata__", None)
    tensors = {name: sample(code, tuple(shape)) for name, (code, shape) in kinds.items()}
    data = encode(tensors)
    back = decode(data)
    assert all(same(back[name], tensors[name]) for name in tensors)
    assert sorted(back) == sorted(tensors) and encode(back) == data


# --- the package reads ours, we read the package's --------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_package_reads_our_files(shape):
    tensors = {code: sample(code, shape) for code in PACKAGE_DTYPES}
    back = safetensors.numpy.load(encode(tensors, {"a": "b"}))
    assert sorted(back) == sorted(tensors)
    assert all(same(back[code], tensors[code]) for code in tensors)


@pytest.mark.parametrize("shape", SHAPES)
def test_we_read_the_files_of_the_package(shape):
    tensors = {
        code: np.ascontiguousarray(sample(code, shape)).reshape(shape) for code in PACKAGE_DTYPES
    }
    back = decode(safetensors.numpy.save(tensors, {"a": "b"}))
    assert sorted(back) == sorted(tensors)
    assert all(same(back[code], tensors[code]) for code in tensors)


@pytest.mark.parametrize("code", DTYPES)
def test_dtype_names_shapes_and_bytes_are_those_of_the_package(code):
    """bfloat16 and the 8-bit formats, too, which the package's NumPy side does not know."""
    x = sample(code, (2, 3))
    ((name, found),) = safetensors.deserialize(encode({"x": x}))
    assert (name, found["dtype"], found["shape"]) == ("x", code, [2, 3])
    assert bytes(found["data"]) == x.tobytes()


def test_the_package_reads_our_metadata(tmp_path):
    write_tensors(tmp_path / "x", {"t": np.ones(2)}, {"key": "value"})
    with safetensors.safe_open(tmp_path / "x", "np") as opened:
        assert opened.metadata() == {"key": "value"}


# --- hostile files ----------------------------------------------------------------------------

ENTRY = b'{"dtype":"F64","shape":[2],"data_offsets":[0,16]}'
NESTED = 200_000

HOSTILE = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a length and no header": struct.pack("<Q", 2),
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "a header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header above the limit": file_of(b"{}" + b" " * MAX_HEADER),
    "an empty header": file_of(b""),
    "a header that is no JSON": file_of(b"{a:1}"),
    "a header that is no UTF-8": file_of(b'{"\xff":1}'),
    "a header with a byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "a header with text behind it": file_of(b"{} {}"),
    "a list as header": file_of(b"[]"),
    "null as header": file_of(b"null"),
    "a string as header": file_of(b'"a"'),
    "NaN": file_of(b'{"a":NaN}'),
    "-Infinity": file_of(b'{"__metadata__":{"a":-Infinity}}'),
    "a tensor twice": file_of(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", bytes(16)),
    "a tensor twice, once escaped": file_of(b'{"a":' + ENTRY + b',"\\u0061":' + ENTRY + b"}", bytes(16)),
    "a key of an entry twice": file_of(b'{"a":{"dtype":"F64","shape":[2],"shape":[2],"data_offsets":[0,16]}}', bytes(16)),
    "a key of the metadata twice": file_of(b'{"__metadata__":{"a":"b","a":"b"}}'),
    "lists 200 000 deep": file_of(b"[" * NESTED + b"]" * NESTED),
    "objects 200 000 deep": file_of(b'{"a":' * NESTED + b"1" + b"}" * NESTED),
    "a shape 200 000 deep": file_of(b'{"a":{"dtype":"F64","shape":' + b"[" * NESTED + b"]" * NESTED + b',"data_offsets":[0,0]}}'),
    "an integer of 100 000 digits": file_of(b'{"a":{"dtype":"F64","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,0]}}'),
    "an entry that is a list": file_of({"a": []}),
    "an entry without shape": file_of({"a": {"dtype": "F64", "data_offsets": [0, 0]}}),
    "an entry with one key more": one_tensor(strides=[1]),
    "an unknown dtype": one_tensor(dtype="F128"),
    "a dtype in small letters": one_tensor(dtype="f64"),
    "a dtype that is a list": one_tensor(dtype=["F64"]),
    "a dtype that is null": one_tensor(dtype=None),
    "the dtype of objects": one_tensor(dtype="O"),
    "a shape that is a number": one_tensor(shape=2),
    "a shape that is an object": one_tensor(shape={"0": 2}),
    "a negative length": one_tensor(shape=[-2]),
    "two negative lengths": one_tensor(shape=[-1, -2]),
    "a length that is a float": one_tensor(shape=[2.0]),
    "a length that is a boolean": one_tensor(shape=[True, 2]),
    "a length that is text": one_tensor(shape=["2"]),
    "more than the greatest rank": one_tensor(shape=[1] * MAX_RANK + [2]),
    "a shape of too many bytes": one_tensor(shape=[3]),
    "a shape of too few bytes": one_tensor(shape=[1]),
    "a product of lengths beyond 64 bits": one_tensor(shape=[2**40, 2**40]),
    "a product of lengths that is 2 modulo 2**64": one_tensor(shape=[2**63 + 1, 2]),
    "one offset": one_tensor(data_offsets=[16]),
    "three offsets": one_tensor(data_offsets=[0, 8, 16]),
    "an offset that is a float": one_tensor(data_offsets=[0, 16.0]),
    "a negative offset": one_tensor(data_offsets=[-16, 0]),
    "offsets in falling order": one_tensor(data_offsets=[16, 0]),
    "an end behind the file": one_tensor(shape=[3], data_offsets=[0, 24]),
    "an end of 10**4000": one_tensor(data_offsets=[0, 10**4000]),
    "bytes behind the last tensor": one_tensor() + b"\0",
    "a cut body": one_tensor()[:-1],
    "a body without tensors": file_of({}, b"\0"),
    "a gap before the first tensor": file_of({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, bytes(3)),
    "a gap between tensors": file_of({
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}}, bytes(5)),
    "tensors that overlap": file_of({
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]}}, bytes(5)),
    "two tensors in the same bytes": file_of({
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(2)),
    "an empty tensor inside another": file_of({
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}}, bytes(4)),
    "a boolean of 2": file_of({"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\1\2"),
    "a boolean of 255": file_of({"a": {"dtype": "BOOL", "shape": [], "data_offsets": [0, 1]}}, b"\xff"),
    "metadata with a number": file_of({"__metadata__": {"a": 1}}),
    "metadata with a list": file_of({"__metadata__": {"a": ["b"]}}),
    "metadata that is a list": file_of({"__metadata__": [["a", "b"]]}),
    "metadata that is null": file_of({"__metadata__": None}),
    "a zip file": b"PK\x03\x04" + bytes(60),
    "a pickle": b"\x80\x04\x95" + bytes(60),
    "an npy file": b"\x93NUMPY\x01\0" + bytes(60),
    "an empty tensor with a length beyond 64 bits": file_of({"a": {"dtype": "F64", "shape": [0, 10**30], "data_offsets": [0, 0]}}),
    "an empty tensor with lengths of 2**80 elements": file_of({"a": {"dtype": "F64", "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}}),
    "a product of lengths of 64 000 digits": one_tensor(shape=[10**4000] * 16),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused(what, tmp_path):
    with pytest.raises(RingspecError) as caught:
        decode(HOSTILE[what])
    error = caught.value
    assert type(error) is FileFormatError
    assert error.expected and error.got and error.fix and len(str(error)) < 1000
    (tmp_path / "x").write_bytes(HOSTILE[what])
    with pytest.raises(FileFormatError):
        read_tensors(tmp_path / "x")


def test_the_message_says_what_came():
    for data, want in (
        (one_tensor() + bytes(3), "3 more bytes"),
        (one_tensor(shape=[3]), "16 bytes"),
        (one_tensor(shape=[1], data_offsets=[8, 16]), "'a' at byte 8"),
        (one_tensor(shape=[3], data_offsets=[0, 24]), "'a' up to byte 24"),
        (one_tensor(dtype="F128"), "'F128'"),
    ):
        with pytest.raises(FileFormatError) as caught:
            decode(data, "this file")
        assert caught.value.got == want and "this file" in caught.value.expected


def outcome(data: bytes) -> str:
    """'tensors' or 'refused'; anything else fails the test."""
    try:
        tensors = decode(data)
    except FileFormatError:
        return "refused"
    assert all(isinstance(x, np.ndarray) and x.dtype in DTYPES.values() for x in tensors.values())
    return "tensors"


GOOD = encode(
    {"a": np.arange(3, dtype=np.float32), "b": np.array([[True, False]]), "c": np.zeros((0, 2)),
     "d": np.ones(2, ml_dtypes.bfloat16)},
    {"k": "v"},
)  # fmt: skip


def test_every_cut_of_a_file_is_refused():
    assert outcome(GOOD) == "tensors"
    assert {outcome(GOOD[:n]) for n in range(len(GOOD))} == {"refused"}
    assert outcome(GOOD + b"\0") == "refused"


def test_every_flip_of_a_bit_gives_tensors_or_an_error():
    counts = {"tensors": 0, "refused": 0}
    for place in range(len(GOOD)):
        for bit in range(8):
            changed = bytearray(GOOD)
            changed[place] ^= 1 << bit
            counts[outcome(bytes(changed))] += 1
    assert min(counts.values()) > 100  # names and data may change; the structure may not


def test_what_we_read_the_package_reads_as_well():
    """Over all one-bit changes of a file: we are never the more lenient of the two readers."""
    for place in range(8, len(GOOD)):
        for bit in range(8):
            changed = bytearray(GOOD)
            changed[place] ^= 1 << bit
            if outcome(bytes(changed)) == "tensors":
                assert len(safetensors.deserialize(bytes(changed))) == 4


@given(st.binary(max_size=200))
def test_random_bytes_give_tensors_or_an_error(data):
    outcome(data)
    outcome(struct.pack("<Q", max(0, len(data) - 20)) + data)


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.sampled_from([2**31, 2**63, 2**64, 10**400, "F64", "U8", "BOOL", 0.5, 1e308, ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
LENGTHS = st.lists(st.integers(0, 3), max_size=3)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        ODD
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*DTYPES, "F65"]),
                "shape": LENGTHS | ODD,
                "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | ODD,
            }
        ),
        max_size=3,
    ),
    st.binary(max_size=24),
)
def test_random_headers_give_tensors_or_an_error(header, body):
    outcome(file_of(header, body))


@pytest.mark.parametrize(
    "value", [object(), 1j, "text", None, np.zeros(2, "M8[s]"), np.zeros(2, "V8")]
)
def test_a_dtype_that_the_format_has_not_is_refused(value):
    with pytest.raises(RingspecError) as caught:
        encode({"x": value})
    assert type(caught.value) is DtypeError


class NotAnArray:
    """Like a tensor on another device."""

    def __array__(self, *arguments, **options):
        raise TypeError("cannot convert a device tensor")


UNWRITABLE = {
    "an object whose __array__ raises": ({"x": NotAnArray()}, None),
    "ragged lists": ({"x": [[1], [2, 3]]}, None),
    "names that are no text": ({"x": np.ones(1), 3: np.ones(1)}, None),
    "a tensor called __metadata__": ({"__metadata__": np.ones(1)}, None),
    "a rank that the reader refuses": ({"x": np.ones((1,) * (MAX_RANK + 1))}, None),
    "metadata with a number": ({"x": np.ones(1)}, {"a": 1}),
    "metadata that is a list": ({"x": np.ones(1)}, ["a"]),
    "a header that the reader refuses": ({"x": np.ones(1)}, {"a": "x" * MAX_HEADER}),
    "no dictionary": ([np.ones(1)], None),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_could_not_be_read_again_is_not_written(what, tmp_path):
    tensors, metadata = UNWRITABLE[what]
    with pytest.raises(RingspecError):
        write_tensors(tmp_path / "x", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def test_the_limits_are_these():
    """A header of 1 MiB and rank 16 are read, one more is not."""
    assert (MAX_HEADER, MAX_RANK) == (2**20, 16)
    assert decode(file_of(b"{}" + b" " * (2**20 - 2))) == {}
    assert outcome(file_of(b"{}" + b" " * (2**20 - 1))) == "refused"
    assert decode(encode({"x": np.ones((1,) * 16)}))["x"].ndim == 16


# --- whole or not at all ----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("function", ["replace", "chmod"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    stop, function, tmp_path, monkeypatch
):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"old": np.ones(2)})
    before = path.read_bytes()

    def interrupted(*arguments: object) -> None:
        raise stop("interrupted")

    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(stop):
        write_tensors(path, {"new": np.zeros(9)})
    assert path.read_bytes() == before
    with pytest.raises(stop):
        write_tensors(tmp_path / "other", {"new": np.zeros(9)})
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_made_beside_the_old_one(tmp_path, monkeypatch):
    """Only within one file system is a replacement whole or not at all."""
    moved = []
    monkeypatch.setattr(os, "replace", lambda source, target: moved.append((source, target)))
    write_tensors(tmp_path / "x", {"t": np.ones(1)})
    ((source, target),) = moved
    assert os.path.dirname(source) == str(tmp_path) and target == tmp_path / "x"


def test_a_bad_tensor_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, {"old": np.ones(2)})
    before = path.read_bytes()
    with pytest.raises(DtypeError):
        write_tensors(path, {"good": np.ones(1), "new": np.array([None])})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_tensors(tmp_path / "x", {"t": np.ones(1)})
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_path_may_be_text_relative_or_replace_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tensors("x", {"t": np.ones(1)})
    write_tensors("x", {"t": np.zeros(1)})
    assert read_tensors("x")["t"] == 0 and os.listdir() == ["x"]
