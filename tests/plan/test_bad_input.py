"""What cannot be planned is refused with its own error, and a hardware file is hostile until checked."""

import json
import os

import pytest
from refusals import is_refusal, refuses

from ringspec.errors import LayoutError, OptionError, RingspecError, ShapeError
from ringspec.plan import PRESETS, hardware_from, plan, read_hardware

GOOD = {
    "name": "toy",
    "source": "a data sheet",
    "flops_per_second": {"bfloat16": 1e14, "float32": 2e13},
    "efficiency": {"forward": 0.5, "backward": 0.4},
    "memory": {"bytes": 16e9, "bytes_per_second": 1e12},
    "links": [
        {"name": "near", "bytes_per_second": 1e11, "latency": 1e-6, "workers": 4},
        {"name": "far", "bytes_per_second": 1e9, "latency": 0},
    ],
}
TOML = """
name = "toy"
source = "a data sheet"
[flops_per_second]
bfloat16 = 1e14
float32 = 20_000_000_000_000
[efficiency]
forward = 0.5
backward = 0.4
[memory]
bytes = 16e9
bytes_per_second = 1e12
[[links]]
name = "near"
bytes_per_second = 1e11
latency = 1e-6
workers = 4
[[links]]
name = "far"
bytes_per_second = 1e9
latency = 0
"""

REFUSED = [
    ((0, 1), {}, OptionError),
    ((16, 0), {}, (LayoutError, "worker-count")),
    ((16, True), {}, (LayoutError, "worker-count")),
    ((16, 2.0), {}, (LayoutError, "worker-count")),
    ((1 << 40, (1 << 20) + 1), {}, (LayoutError, "worker-count")),
    ((17, 2), {}, LayoutError),
    ((6, 2), {"layouts": "zigzag"}, LayoutError),
    ((1 << 50, 2), {}, OptionError),
    ((16, 2), {"heads": 3, "kv_heads": 2}, (ShapeError, "head-count")),
    ((16, 2), {"heads": 0}, OptionError),
    ((16, 2), {"head_dim": 1.5}, OptionError),
    ((16, 2), {"batch": "1"}, OptionError),
    ((16, 2), {"window": -1}, (OptionError, "window")),
    ((16, 2), {"causal": 1}, OptionError),
    ((16, 2), {"layouts": "zig"}, (OptionError, "unknown-name")),
    ((16, 2), {"layouts": ()}, OptionError),
    ((16, 2), {"layouts": "zigzag_per_document"}, (OptionError, "unknown-name")),
    ((16, 2), {"circulations": ["kv", None]}, (OptionError, "unknown-name")),
    ((16, 2), {"recipe": "bf17"}, (OptionError, "unknown-name")),
    ((16, 2), {"hardware": "h100"}, (OptionError, "hardware")),
    ((16, 2), {"hardware": 7}, (OptionError, "hardware")),
    ((16, 2), {"recipe": "float64"}, (OptionError, "hardware")),  # no preset has a rate for it
    ((16, 2), {"overlap": None}, OptionError),
]


@pytest.mark.parametrize(("sizes", "options", "expected"), REFUSED)
def test_bad_arguments_have_their_own_error(sizes, options, expected):
    with pytest.raises(RingspecError) as caught:
        plan(*sizes, **options)
    assert is_refusal(caught.value, expected)


def test_lengths_that_zigzag_cannot_deal_leave_it_out():
    assert {one.layout for one in plan(6, 2).options} == {"contiguous", "striped"}


def test_a_ring_larger_than_every_link_is_refused():
    rates = GOOD | {"links": GOOD["links"][:1]}
    with refuses((OptionError, "hardware"), match="a link of toy for 5 workers"):
        plan(40, 5, hardware=hardware_from(rates))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_gives_the_rates_that_stand_in_it(tmp_path, suffix):
    path = tmp_path / f"rates{suffix}"
    path.write_text(TOML if suffix == ".toml" else json.dumps(GOOD))
    device = read_hardware(path)
    assert device == hardware_from(GOOD)
    assert device.peak("float32").value == 2e13 and device.peak("float32").source == "a data sheet"
    assert [device.link(w).name for w in (4, 5)] == ["near", "far"]
    assert plan(64, 4, hardware=device).link.bytes_per_second.value == 1e11


def changed(path, value):
    """GOOD with one entry replaced; the value ... takes it away."""
    data = json.loads(json.dumps(GOOD))
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


BAD = [
    (("name",), ...), (("name",), ""), (("name",), "a\x1b[31m"), (("name",), 3), (("name",), "x" * 300),
    (("flops_per_second",), {}), (("flops_per_second",), 1e14), (("flops_per_second", "bf16"), 1e14),
    (("flops_per_second", "bfloat16"), 0), (("flops_per_second", "bfloat16"), -1),
    (("flops_per_second", "bfloat16"), True), (("flops_per_second", "bfloat16"), "1e14"),
    (("flops_per_second", "bfloat16"), float("nan")), (("flops_per_second", "bfloat16"), float("inf")),
    (("flops_per_second", "bfloat16"), 10**400), (("efficiency", "forward"), 1.01),
    (("efficiency", "forward"), ...), (("efficiency",), []), (("memory", "bytes"), None),
    (("memory", "size"), 1), (("links",), []), (("links",), {}), (("links",), [1]),
    (("links",), GOOD["links"] * 9), (("links", 0, "latency"), -1e-9), (("links", 0, "workers"), 0),
    (("links", 0, "workers"), 2.0), (("links", 0, "workers"), True), (("links", 0, "name"), ...),
    (("extra",), 1),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), BAD)
def test_a_file_with_one_wrong_entry_is_refused(path, value):
    hardware_from(GOOD)
    with refuses((OptionError, "hardware")):
        hardware_from(changed(path, value))


CONTENT = {
    "empty.toml": b"",
    "empty.json": b"",
    "list.json": b"[]",
    "deep.json": b"[" * 50000,
    "deep.toml": b"a=" + b"[" * 30000,
    "twice.json": b'{"name": 1, "name": 2}',
    "constant.json": b'{"name": NaN}',
    "digits.json": b'{"name": ' + b"1" * 6000 + b"}",
    "bytes.toml": b"\xff\xfe",
    "nul.toml": b"\0",
    "large.json": b" " * (1 << 17),
    "word.toml": b"hello",
}


@pytest.mark.parametrize("name", CONTENT)
def test_other_content_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(CONTENT[name])
    with refuses((OptionError, "hardware")):
        read_hardware(path)


def test_what_is_no_plain_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("none.toml", "pipe.toml", ".", "a\0b"):
        with refuses((OptionError, "hardware")):
            read_hardware(tmp_path / name)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", 10**400])
@pytest.mark.parametrize("name", ["flops_per_second", "bytes_per_second", "efficiency", "memory"])
def test_given_rates_are_positive_numbers(name, value):
    with pytest.raises(RingspecError) as caught:
        PRESETS["h200"].with_rates(**{name: value})
    assert is_refusal(caught.value, (OptionError, "hardware"))


def test_an_efficiency_is_at_most_one_and_a_latency_may_be_zero():
    with refuses((OptionError, "hardware")):
        PRESETS["h200"].with_rates(efficiency=1.5)
    assert PRESETS["h200"].with_rates(latency=0).links[0].latency.value == 0
