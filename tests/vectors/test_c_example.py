"""docs/examples/check_case.c: compiled without a warning, right about every kind of difference, and
safe with files that are not what they claim to be."""

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ringspec.formats import load, store
from ringspec.tensorfile import encode, write_tensors
from ringspec.vectors import open_set

SOURCE = Path(__file__).parents[2] / "docs" / "examples" / "check_case.c"
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CAUGHT = 99
FLOATS = ("float64", "float32", "bfloat16", "float16")
PARTS, FAST = 8, 2  # of the core set, one test each; a part has every eighth case

pytestmark = pytest.mark.external("cc")


def compiled(folder, *options):
    command = ["cc", *STRICT, *options, "-o", str(folder / "check_case"), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return folder / "check_case", done


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path, done = compiled(tmp_path_factory.mktemp("plain"), "-O2")
    assert (done.returncode, done.stderr) == (0, "")
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The program under the sanitizers, which end it with the status CAUGHT."""
    path, done = compiled(tmp_path_factory.mktemp("guarded"), *SANITIZERS)
    if done.returncode:
        pytest.skip("cc cannot compile with -fsanitize=address,undefined here")
    return path


def check(program, *arguments):
    options = f"exitcode={CAUGHT}:detect_leaks=0"
    environment = os.environ | {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": f"exitcode={CAUGHT}"}
    command = [str(program), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )


def compare(program, folder, tensors, name, got, *options):
    """The outcome for a case of these tensors, with ``got`` in the place of one of them."""
    write_tensors(folder / "tensors.safetensors", tensors)
    (folder / "got.bin").write_bytes(got.tobytes())
    return check(program, folder, name, folder / "got.bin", *options)


def with_bits(x, index, step):
    """x with the bits of one element moved by so many steps."""
    moved = x.copy()
    patterns = moved.view(f"u{x.itemsize}")
    patterns[index] += np.array(step).astype(patterns.dtype)
    return moved


def all_finite(name):
    """Every finite number of a 16-bit format, in its storage dtype."""
    patterns = np.arange(2**16, dtype=np.uint16).view(store(np.zeros(1), name).dtype)
    with np.errstate(invalid="ignore"):  # the NaN among them
        return patterns[np.isfinite(load(patterns))]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("step", [1, -1])
def test_one_ulp_is_found_at_its_index_and_is_within_a_limit_of_one(tmp_path, program, name, step):
    x = store(np.linspace(3.0, -2.0, 24).reshape(2, 4, 3), name)
    tensors, tensor = {f"out.o.{name}": x, "in.q": x}, f"out.o.{name}"
    equal = compare(program, tmp_path, tensors, tensor, x)
    assert (equal.returncode, equal.stdout) == (0, f"{tensor}: 0 of 24 elements differ\n")
    moved = with_bits(x, (1, 2, 0), step)
    want, got = (float(load(y)[1, 2, 0]) for y in (x, moved))
    different = compare(program, tmp_path, tensors, tensor, moved)
    place = f"at [1, 2, 0]: expected {want:.17g}, got {got:.17g}\n"
    assert different.stdout == (
        f"{tensor}: 1 of 24 elements differ\nfirst {place}largest difference: 1 ulps {place}"
    )
    assert different.returncode == 1
    assert compare(program, tmp_path, tensors, tensor, moved, "--ulps", 1).returncode == 0
    moved = with_bits(x, (1, 2, 0), 2 * step)
    assert compare(program, tmp_path, tensors, tensor, moved, "--ulps", 1).returncode == 1


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_number_of_a_16_bit_format_is_decoded(tmp_path, program, name):
    x = all_finite(name)
    values = load(x).astype(np.float64)
    tensors = {f"out.o.{name}": x, "out.o.float64": values, "scale.o": np.ones(x.size)}
    done = compare(program, tmp_path, tensors, f"out.o.{name}", x)
    assert "largest error / row scale: 0\n" in done.stdout
    assert done.returncode == 0
    tensors["out.o.float64"] = np.nextafter(values, np.inf)
    done = compare(program, tmp_path, tensors, f"out.o.{name}", x)
    assert "largest error / row scale: 0\n" not in done.stdout


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_numbers_of_the_wide_formats_are_decoded(tmp_path, program, name):
    wide = np.random.default_rng(3).integers(0, 256, (4096, 8), dtype=np.uint8)
    x = wide.reshape(-1).view(store(np.zeros(1), name).dtype)
    least = np.finfo(x.dtype).smallest_subnormal
    x = np.concatenate([x[np.isfinite(x)], [0.0, least, -3 * least, np.finfo(x.dtype).max]])
    x = x.astype(wide.view(f"f{x.itemsize}").dtype)
    tensors = {f"out.o.{name}": x, "out.o.float64": x.astype("f8"), "scale.o": np.ones(x.size)}
    done = compare(program, tmp_path, tensors, f"out.o.{name}", x)
    assert "largest error / row scale: 0\n" in done.stdout


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_ulps_count_the_numbers_between(tmp_path, program, name):
    x = all_finite(name)
    order = np.unique(load(x))  # the two zeros are one number
    stream = np.random.default_rng(5)
    for a, b in stream.choice(x, (8, 2)):
        want = abs(np.searchsorted(order, load(a)) - np.searchsorted(order, load(b)))
        done = compare(program, tmp_path, {"out.o.x": np.array([a])}, "out.o.x", np.array([b]))
        assert f"largest difference: {want} ulps at [0]" in done.stdout


def test_of_a_recipes_bits_only_those_that_are_certain_are_compared(tmp_path, program):
    x = np.array([1.0, np.nan, np.inf, 0.0, 2.0], np.float32)
    known = np.array([True, True, True, False, True])
    tensors = {"bits.te_p2p.o": x, "certain.te_p2p.o": known}
    other = with_bits(x, 3, 77)
    other[1] = -np.nan
    done = compare(program, tmp_path, tensors, "bits.te_p2p.o", other)
    assert (done.returncode, done.stdout) == (0, "bits.te_p2p.o: 0 of 4 elements differ\n")
    for index, value in ((0, np.nan), (1, 0.0), (2, -np.inf), (4, np.nextafter(x[4], x[0]))):
        wrong = other.copy()
        wrong[index] = value
        done = compare(program, tmp_path, tensors, "bits.te_p2p.o", wrong)
        assert (done.returncode, done.stderr) == (1, "") and "1 of 4 elements differ" in done.stdout
    for mask in ({}, {"certain.te_p2p.o": known[:4]}, {"certain.te_p2p.o": x}):
        done = compare(program, tmp_path, {"bits.te_p2p.o": x} | mask, "bits.te_p2p.o", x)
        assert done.returncode == 2 and "does not fit, or is missing" in done.stderr


@pytest.mark.parametrize("name", ["merge", "cp"])
def test_tensors_of_other_sets_are_equal_to_themselves(tmp_path, program, name):
    vectors = open_set(name)
    for id in vectors.ids[::20]:
        for tensor, x in vectors.tensors(id).items():
            (tmp_path / "got.bin").write_bytes(x.tobytes())
            done = check(program, vectors.path / id, tensor, tmp_path / "got.bin")
            assert (done.returncode, done.stderr) == (0, ""), (id, tensor)
            assert ": 0 of " in done.stdout


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ulps_count_across_zero(tmp_path, program, dtype):
    least = np.finfo(dtype).smallest_subnormal
    tensors = {"out.lse.x": np.array([least, -0.0], dtype=dtype)}
    done = compare(program, tmp_path, tensors, "out.lse.x", np.array([-least, 0.0], dtype=dtype))
    assert "2 of 2 elements differ" in done.stdout
    assert "largest difference: 2 ulps at [0]" in done.stdout
    assert done.returncode == 1


def test_another_sign_of_zero_is_another_byte_and_no_distance(tmp_path, program):
    tensors, got = {"out.o.float64": np.zeros(3)}, np.array([0.0, 0.0, -0.0])
    assert compare(program, tmp_path, tensors, "out.o.float64", got).returncode == 1
    assert compare(program, tmp_path, tensors, "out.o.float64", got, "--ulps", 1).returncode == 0


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_a_wrong_infinity_are_beyond_every_limit(tmp_path, program, name, odd):
    x = np.linspace(1.0, 2.0, 12).reshape(3, 4)
    wrong = x.copy()
    wrong[2, 1] = odd
    tensors = {f"out.o.{name}": store(x, name), "out.o.float64": x, "scale.o": np.ones(3)}
    options = ("--ulps", 2**26)
    done = compare(program, tmp_path, tensors, f"out.o.{name}", store(wrong, name), *options)
    assert "NaN, infinite or integer: 1, the first at [2, 1]: expected " in done.stdout
    assert done.returncode == 1


def test_the_lse_of_an_empty_row_equals_itself(tmp_path, program):
    lse = np.array([[-np.inf, 0.5]])
    tensors = {"out.lse.float64": lse, "scale.lse": np.ones((1, 2))}
    assert compare(program, tmp_path, tensors, "out.lse.float64", lse).returncode == 0
    done = compare(program, tmp_path, tensors, "out.lse.float64", lse[:, ::-1].copy())
    assert "NaN, infinite or integer: 2, the first at [0, 0]" in done.stdout


def test_the_error_is_relative_to_the_scale_of_its_own_row(tmp_path, program):
    truth = np.array([[8.0, 4.0], [0.5, 0.25], [0.0, 0.0]])
    tensors = {
        "out.dq.bfloat16": store(truth, "bfloat16"),
        "out.dq.float64": truth,
        "scale.dq": np.array([16.0, 0.5, 0.0]),
    }
    got = truth + [[1.0, 0.0], [0.0, -0.125], [0.0, 0.0]]
    done = compare(program, tmp_path, tensors, "out.dq.bfloat16", store(got, "bfloat16"))
    assert "largest error / row scale: 0.25 at [1, 1]: expected 0.25, got 0.125" in done.stdout
    got[2, 0] = 2.0**-100
    done = compare(program, tmp_path, tensors, "out.dq.bfloat16", store(got, "bfloat16"))
    assert "largest error / row scale: inf at [2, 0]" in done.stdout


def test_integers_and_booleans_are_equal_or_not(tmp_path, program):
    tensors = {"out.target.forward": np.array([[1, -1]]), "in.mask": np.array([True, False])}
    assert compare(program, tmp_path, tensors, "in.mask", tensors["in.mask"]).returncode == 0
    got = np.array([[1, -2]])
    done = compare(program, tmp_path, tensors, "out.target.forward", got, "--ulps", 9)
    assert "the first at [0, 1]: expected -1, got -2" in done.stdout
    assert done.returncode == 1


def test_a_tensor_without_elements_is_equal_to_itself(tmp_path, program):
    empty = np.zeros((1, 0, 4))
    tensors = {"out.o.float64": empty, "scale.o": np.zeros((1, 0))}
    done = compare(program, tmp_path, tensors, "out.o.float64", empty)
    assert (done.returncode, done.stdout) == (0, "out.o.float64: 0 of 0 elements differ\n")


def test_a_case_alone_is_listed(tmp_path, program):
    tensors = {"in.q": np.zeros((1, 2, 3), np.float16), "layout.q": np.zeros((2, 0), np.int64)}
    write_tensors(tmp_path / "tensors.safetensors", tensors)
    done = check(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "in.q F16 [1, 2, 3]\nlayout.q I64 [2, 0]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage"),
        (("FOLDER/none",), "cannot be opened"),
        (("FOLDER", "out.o.float64"), "usage"),
        (("FOLDER", "out.o", "FOLDER/got.bin"), "no such tensor"),
        (("FOLDER", "out.o.float64", "FOLDER/none"), "cannot be opened"),
        (("FOLDER", "out.o.float64", "FOLDER/short.bin"), "is shorter"),
        (("FOLDER", "out.o.float64", "FOLDER/long.bin"), "longer than it may be"),
        (("FOLDER", "out.o.float64", "FOLDER"), "cannot be read"),
        (("FOLDER", "out.o.float64", "FOLDER/got.bin", "--ulps", "-1"), "a number was expected"),
        (("FOLDER", "out.o.float64", "FOLDER/got.bin", "--ulps", "1x"), "a number was expected"),
    ],
)
def test_what_cannot_be_compared_has_status_2(tmp_path, guarded, arguments, message):
    write_tensors(tmp_path / "tensors.safetensors", {"out.o.float64": np.ones(3)})
    for name, size in (("got", 24), ("short", 23), ("long", 25)):
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
    done = check(guarded, *(one.replace("FOLDER", str(tmp_path)) for one in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"check_case: .*{message}.*\n", done.stderr)


def entry(dtype="F64", shape=(1,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header, body=bytes(8)):
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return struct.pack("<Q", len(text)) + text + body


HOSTILE = {
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": struct.pack("<Q", 0),
    "a header beyond the file": struct.pack("<Q", 100) + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header of 2**64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header over 1 MiB": file_of(b"{}" + b" " * 2**20, b""),
    "a header cut off": file_of(b'{"a":{"dtype":"F64","shape":[1'),
    "a 0 in the header": file_of(b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}\0}'),
    "text behind the header": file_of(b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}} x'),
    "a gap": file_of({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "a wrong beginning": file_of({"a": entry(offsets=(4, 8))}),
    "an overlap": file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": file_of({"a": entry(), "b": entry()}),
    "another order": file_of({"b": entry(offsets=(8, 16)), "a": entry()}, bytes(16)),
    "an end before the beginning": file_of({"a": entry(shape=(0,), offsets=(8, 0))}),
    "offsets beyond the file": file_of({"a": entry(shape=(4,), offsets=(0, 32))}),
    "a negative length": file_of({"a": entry(shape=(-1,))}),
    "negative offsets": file_of({"a": entry(offsets=(-8, 0))}),
    "lengths that overflow": file_of({"a": entry(shape=(2**32, 2**32, 8), offsets=(0, 0))}),
    "lengths whose product overflows": file_of(
        {"a": entry(shape=(2**26,) * 3, offsets=(0, 0))}, b""
    ),
    "a length of 2**64": file_of({"a": entry(shape=(2**64,), offsets=(0, 0))}, b""),
    "a fraction": file_of({"a": entry(shape=(1.0,))}),
    "a shape that does not fit": file_of({"a": entry(shape=(2,))}),
    "nine axes": file_of({"a": entry(shape=(1,) * 9)}),
    "a thousand axes": file_of({"a": entry(shape=(1,) * 1000)}),
    "an unknown dtype": file_of({"a": entry("F128")}),
    "an unknown dtype without elements": file_of({"a": entry("F128", (0,), (0, 0))}, b""),
    "an empty dtype": file_of({"a": entry("")}),
    "a long dtype": file_of({"a": entry("F" * 1000)}),
    "a long name": file_of({"a" * 64: entry()}),
    "an empty name": file_of({"": entry()}),
    "an escape in a name": file_of(b'{"\\u0061":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}'),
    "one name twice": file_of(
        b'{"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}'
    ),
    "129 tensors": file_of({f"{n}": entry(shape=(0,), offsets=(0, 0)) for n in range(129)}, b""),
    "metadata": file_of({"__metadata__": {"a": "b"}}, b""),
    "nested objects": file_of(b'{"a":' * 1000 + b"1" + b"}" * 1000, b""),
    "a list": file_of([entry()]),
    "bytes that are no text": file_of(bytes(range(256))),
    "bytes behind the last tensor": file_of({"a": entry()}, bytes(9)),
    "too few bytes": file_of({"a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, guarded, what):
    (tmp_path / "tensors.safetensors").write_bytes(HOSTILE[what])
    done = check(guarded, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"check_case: [^\n]*\n", done.stderr)


def test_the_hostile_files_are_made_from_one_that_is_taken(tmp_path, guarded):
    (tmp_path / "tensors.safetensors").write_bytes(file_of({"a": entry()}))
    assert check(guarded, tmp_path).stdout == "a F64 [1]\n"


@pytest.mark.parametrize(
    "companions",
    [
        {"out.o.float64": np.ones(5)},
        {"out.o.float64": np.ones((2, 3), np.float32)},
        {"scale.o": np.ones(4)},
        {"scale.o": np.ones(12)},
        {"scale.o": np.ones(2, np.float32)},
    ],
    ids=["few values", "narrow values", "four scales", "many scales", "narrow scales"],
)
def test_a_scale_that_does_not_fit_is_not_used(tmp_path, guarded, companions):
    tensors, _ = small_file()
    got = store(np.full((2, 3), 1.5), "bfloat16")
    done = compare(guarded, tmp_path, tensors, "out.o.bfloat16", got)
    assert "largest error / row scale: 0.5 at [0, 0]" in done.stdout
    done = compare(guarded, tmp_path, tensors | companions, "out.o.bfloat16", got)
    assert (done.returncode, done.stderr) == (1, "")
    assert "row scale" not in done.stdout


def small_file():
    tensors = {
        "out.o.bfloat16": store(np.ones((2, 3)), "bfloat16"),
        "out.o.float64": np.ones((2, 3)),
        "scale.o": np.ones(2),
    }
    return tensors, encode(tensors)


def test_no_part_of_a_file_passes_for_the_whole(tmp_path, guarded):
    _, data = small_file()
    for length in range(0, len(data), 5):
        (tmp_path / "tensors.safetensors").write_bytes(data[:length])
        assert check(guarded, tmp_path).returncode == 2, length


def test_no_changed_byte_of_a_header_leads_out_of_memory(tmp_path, guarded):
    tensors, data = small_file()
    (length,) = struct.unpack("<Q", data[:8])
    (tmp_path / "got.bin").write_bytes(tensors["out.o.bfloat16"].tobytes())
    stream = np.random.default_rng(11)
    statuses = []
    for place in range(0, 8 + length, 2):
        changed = bytearray(data)
        changed[place] = stream.choice(np.frombuffer(b'0123456789"[]{},:\\ \x00\xffFBo', np.uint8))
        (tmp_path / "tensors.safetensors").write_bytes(changed)
        done = check(guarded, tmp_path, "out.o.bfloat16", tmp_path / "got.bin")
        statuses.append(done.returncode)
        assert done.returncode in (0, 1, 2), done.stderr
    assert statuses.count(2) > len(statuses) // 2


def finite_places(x):
    return np.argwhere(np.ones(x.shape) if x.dtype.kind == "i" else np.isfinite(load(x)))


def judge(program, folder, name, x, place, got):
    """An expected tensor is equal to itself, and neither to one with a step at a place nor to NaN."""
    got.write_bytes(x.tobytes())
    done = check(program, folder, name, got)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name}: 0 of {x.size} elements differ\n" in done.stdout
    at = f"at [{', '.join(map(str, place))}]"
    step = -1 if x[place] != 0 else 1  # towards zero, so that it does not end at infinity
    got.write_bytes(with_bits(x, place, step).tobytes())
    done = check(program, folder, name, got)
    assert f": 1 of {x.size} elements differ\nfirst {at}" in done.stdout
    assert done.returncode == 1
    if x.dtype.kind == "i":
        assert f"NaN, infinite or integer: 1, the first {at}" in done.stdout
        return
    assert f"largest difference: 1 ulps {at}" in done.stdout
    nan = x.copy()
    nan[place] = np.nan
    got.write_bytes(nan.tobytes())
    done = check(program, folder, name, got, "--ulps", 1000)
    assert f"NaN, infinite or integer: 1, the first {at}" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    "part",
    [pytest.param(n, marks=() if n < FAST else pytest.mark.slow) for n in range(PARTS)],
)
def test_it_judges_every_expected_tensor_of_the_core_set(tmp_path, program, part):
    core, judged = open_set("core"), 0
    for id in core.ids[part::PARTS]:
        for number, (name, x) in enumerate(core.tensors(id).items()):
            places = finite_places(x) if name.startswith("out.") else ()
            if len(places):
                place = tuple(int(n) for n in places[7 * number % len(places)])
                judge(program, core.path / id, name, x, place, tmp_path / "got.bin")
                judged += 1
    assert judged > 50
