"""What must hold for any bytes: an error of ringspec, or data that come back from their own text.

Used by ``fuzz_vectors.py`` (atheris) and ``tests/vectors/test_fuzz.py`` (hypothesis). A seed is a byte
that picks the target, then the input.
"""

import math

from vectors import samples

from ringspec.errors import RingspecError
from ringspec.tensorfile import decode, encode
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.flagfile import flags_from_json, flags_to_json
from ringspec.vectors.format.inputs import inputs_of, shape_of
from ringspec.vectors.format.manifest import make_manifest, manifest_from_json, manifest_to_json
from ringspec.vectors.format.tensor_table import stored_tensors

MOST_ELEMENTS = 1000


def tensors(data: bytes) -> bool:
    """Whether the bytes are a file of tensors."""
    try:
        read = decode(data)
    except RingspecError:
        return False
    assert all(not x.flags.writeable for x in read.values())
    again = decode(encode(read))
    assert set(again) == set(read)
    for name, x in read.items():
        assert (again[name].dtype, again[name].shape) == (x.dtype, x.shape)
        assert again[name].tobytes() == x.tobytes()
    return True


def case(data: bytes) -> bool:
    """Whether the bytes are a case; if so its inputs can be made, or are refused."""
    try:
        read = case_from_json(data)
    except RingspecError:
        return False
    assert case_from_json(case_to_json(read)) == read
    stored_tensors(read)
    sizes = [math.prod(shape_of(read, name)) for name in read.inputs.tensors]
    if sum(sizes) <= MOST_ELEMENTS:
        try:
            made = inputs_of(read)
        except RingspecError:
            return True
        assert sorted(x.size for x in made.values()) == sorted(sizes)
    return True


def manifest(data: bytes) -> bool:
    """Whether the bytes are a manifest."""
    try:
        read = manifest_from_json(data)
    except RingspecError:
        return False
    assert manifest_from_json(manifest_to_json(read)) == read
    again = make_manifest(
        read.set, read.set_version, read.spec_version, read.flags, read.cases, read.format_version
    )
    assert (again.count, again.bytes, again.content) == (read.count, read.bytes, read.content)
    return True


def flags(data: bytes) -> bool:
    """Whether the bytes are a flags.json."""
    try:
        read = flags_from_json(data)
    except RingspecError:
        return False
    assert flags_from_json(flags_to_json(read.values())) == read
    return True


TARGETS = (tensors, case, manifest, flags)


def run(data: bytes) -> None:
    """One input: its first byte picks the target."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds(folder) -> list[bytes]:
    """Good inputs of every target; ``folder`` must not exist yet."""
    samples.write(folder)
    numbers = {"tensors.safetensors": 0, "case.json": 1, "manifest.json": 2, "flags.json": 3}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [bytes([numbers[path.name]]) + path.read_bytes() for path in paths]
