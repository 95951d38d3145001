"""Mutated files of a good set: an error of ringspec or the same content, never anything else.

``tests/fuzz/fuzz_vectors.py`` does the same for longer, led by coverage.
"""

import copy
import json

import pytest
from fuzz import targets
from hypothesis import example, given
from hypothesis import strategies as st
from vectors import samples
from vectors.samples import relisted

from ringspec.errors import RingspecError
from ringspec.vectors import check_set

NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**53, 2**63, 2**64 - 1, 2**64, -(2**63), 1e308, 5e-324, -0.0]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["-inf", "q", "../x", "a/b", "float64", "full", "digests", "0" * 64, "2.0"]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 2**20), st.sampled_from(["set", "insert", "delete"]), st.binary(max_size=4)),
    min_size=1,
    max_size=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return targets.seeds(tmp_path_factory.mktemp("fuzz") / "set")


def edited(data: bytes, edits) -> bytes:
    raw = bytearray(data)
    for place, kind, new in edits:
        place %= len(raw) + 1
        if kind == "delete":
            del raw[place : place + len(new)]
        else:
            raw[place : place + (len(new) if kind == "set" else 0)] = new
    return bytes(raw)


def test_every_seed_is_good(seeds):
    assert {seed[0] for seed in seeds} == {0, 1, 2, 3}
    for seed in seeds:
        assert targets.TARGETS[seed[0]](seed[1:])


@given(st.data())
def test_mutated_bytes_give_an_error_of_ringspec_or_data(seeds, data):
    seed = data.draw(st.sampled_from(seeds))
    targets.run(seed[:1] + edited(seed[1:], data.draw(EDITS)))


@given(st.integers(0, 3), st.binary(max_size=200))
@example(0, b"\0" * 8)
@example(1, b"{}")
def test_any_bytes_give_an_error_of_ringspec_or_data(target, data):
    targets.run(bytes([target]) + data)


def places(data, path=()):
    """Every place of JSON data."""
    if isinstance(data, (dict, list)):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield (*path, key)
            yield from places(data[key], (*path, key))


@given(st.data())
def test_mutated_json_gives_an_error_of_ringspec_or_data(seeds, data):
    """Valid JSON of a wrong kind reaches the checks that broken JSON never does."""
    seed = data.draw(st.sampled_from([seed for seed in seeds if seed[0] != 0]))
    tree = json.loads(seed[1:])
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            break
        *parents, last = data.draw(st.sampled_from(found))
        holder = tree
        for key in parents:
            holder = holder[key]
        if data.draw(st.booleans()) and isinstance(holder, dict):
            del holder[last]
        else:
            others = [holder[key] for key in holder] if isinstance(holder, dict) else holder
            holder[last] = copy.deepcopy(data.draw(VALUES | st.sampled_from(list(others))))
    targets.run(seed[:1] + json.dumps(tree).encode())


def content(root):
    """All that a reader gets out of a set, or None for an error of ringspec."""
    try:
        vectors = check_set(root)
        cases = [(case, vectors.tensors(case.id)) for case in vectors]
    except RingspecError:
        return None
    return [
        (case, {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()})
        for case, tensors in cases
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small set; who changes a file of it puts it back."""
    root = tmp_path_factory.mktemp("set") / "set"
    wanted = ("merge/three", "kernel/zigzag-w2", "schedule/q-ring")
    samples.write(root, [entry for entry in samples.entries() if entry[0].id in wanted])
    return root


@pytest.mark.parametrize("hashes", ["old", "new"])
@given(data=st.data())
def test_a_set_with_mutated_bytes_is_refused_or_gives_the_same(root, hashes, data):
    before, manifest = content(root), (root / "manifest.json").read_bytes()
    assert before is not None
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    if hashes == "new":
        names.remove("manifest.json")
    place = root / data.draw(st.sampled_from(names))
    raw = place.read_bytes()
    new = edited(raw, data.draw(EDITS))
    try:
        place.write_bytes(new)
        if hashes == "new":
            relisted(root)
        after = content(root)
    finally:
        place.write_bytes(raw)
        (root / "manifest.json").write_bytes(manifest)
    assert after is None or after == before
    # Flags and white space do not enter the content.
    assert after is None or new == raw or place.suffix == ".json"
