"""Times of a plan: published thresholds, dimensions, what may only grow, and the model of overlap."""

from dataclasses import replace

import pytest

from ringspec.plan import PRESETS, Rate, advice, plan, ring_spans
from ringspec.plan.advice import amount, warning
from ringspec.plan.options import alternatives, best_of
from ringspec.plan.times import Rates, hides, hides_from, rates
from ringspec.plan.workload import workload

LAYOUTS = ("contiguous", "striped", "zigzag")

# Liu et al., https://arxiv.org/abs/2310.01889, Table 2: FLOP/s (1e12), bytes/s between hosts (1e9), the
# least block size and the least sequence per device, both in thousands. The InfiniBand line differs from
# FLOPS / bandwidth by 2 % in the paper itself (312e12 / 12.5e9 = 24.96e3), the others by rounding.
PAPER = {
    "A100 NVLink": (312, 300, 1.0, 6.2),
    "A100 InfiniBand": (312, 12.5, 24.5, 149.5),
    "TPU v3": (123, 112, 1.1, 6.6),
    "TPU v4": (275, 268, 1.0, 6.2),
    "TPU v5e": (196, 186, 1.1, 6.3),
}


@pytest.mark.parametrize("name", PAPER)
def test_tokens_from_which_transfers_are_hidden_are_those_of_the_ring_attention_paper(name):
    """No mask, H = Hkv, bfloat16, peak rates, no latency: n* is the paper's c = F / B, and s = 6 c."""
    flops, bandwidth, block, sequence = PAPER[name]
    device = PRESETS["h200"].with_rates(
        flops_per_second=flops * 1e12, efficiency=1.0, bytes_per_second=bandwidth * 1e9, latency=0
    )
    planned = plan(8 * 4096, 8, hardware=device, causal=False, circulations="kv")
    for layout in LAYOUTS:
        fewest = planned.option(layout, "kv").forward.hides_from
        # The positions of the keys travel as well: 8 bytes beside 16384 for each token.
        assert fewest == pytest.approx(flops * 1e12 / (bandwidth * 1e9), rel=6e-4, abs=3)
        slack = 0.03 * block if name == "A100 InfiniBand" else 0.05
        assert abs(fewest / 1000 - block) <= slack + 1e-9
        assert abs(6 * fewest / 1000 - sequence) <= 6 * slack


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("circulation", ["kv", "q"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_threshold_is_one_in_rings_of_any_size(layout, circulation, backward, causal):
    """Three workers stand for all: hidden at n*, and one token (two in zigzag) less is not."""
    work = workload(6 * 64, 6, heads=4, kv_heads=2, head_dim=16, causal=causal)
    speed = Rates(rates(backward, work, PRESETS["h200"]).pairs, PRESETS["h200"].links[0])
    fewest = hides_from(layout, circulation, backward, work, speed)
    less = 2 if layout == "zigzag" else 1
    for workers in (3, 4, 7):
        assert hides(layout, circulation, backward, work.resized(workers, fewest), speed)
        assert not hides(layout, circulation, backward, work.resized(workers, fewest - less), speed)


def test_more_workers_than_hidden_are_not_hidden():
    device = PRESETS["trn2"]
    planned = plan(1 << 22, 64, hardware=device, kv_heads=8, circulations="kv")
    for one in planned.options:
        at = one.hides_to
        assert at is not None
        for workers, hidden in ((at, True), (at + 1, False)):
            link = device.link(workers)
            ends = [one_way.hides_from for one_way in one.passes]
            assert None not in ends
            work = workload(workers * 2, workers, kv_heads=8)
            fewest = max(
                hides_from(one.layout, "kv", way, work, Rates(rates(way, work, device).pairs, link))
                for way in (False, True)
            )
            assert ((1 << 22) / workers >= fewest) is hidden


# --- parts and wholes -------------------------------------------------------------------------

CASES = [
    {},
    {"causal": False},
    {"kv_heads": 4, "window": (1000, None)},
    {"overlap": False},
    {"recipe": "float32", "head_dim": 64, "value_dim": 96},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("hardware", ["h200", "trn2"])
def test_time_is_computing_and_waiting_and_exposed_transfers(options, hardware):
    for workers in (1, 96):
        for one in plan(workers * 1536, workers, hardware=hardware, **options).options:
            for way in one.passes:
                parts = way.compute_seconds + way.waiting_seconds + way.exposed_seconds
                assert way.seconds == pytest.approx(parts, rel=1e-12)
                assert min(way.waiting_seconds, way.exposed_seconds) >= 0
                assert 0 <= way.idle < 1
                # The simpler model also hides what cannot be hidden.
                assert way.timeline_seconds <= way.seconds * (1 + 1e-12)
                busiest = float(way.step_compute.sum())
                assert way.seconds <= (busiest + way.transfer_seconds) * (1 + 1e-12)
                assert way.seconds >= max(busiest, 0) * (1 - 1e-12)
                if workers == 1:
                    assert way.exposed_seconds == way.waiting_seconds == 0


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drawn_ring_lasts_as_long_as_it_is_planned_to(layout, circulation):
    for workers in (1, 2, 5):
        planned = plan(workers * 512, workers, kv_heads=8)
        one = planned.option(layout, circulation)
        for way, backward in zip(one.passes, (False, True), strict=True):
            bars = ring_spans(layout, circulation, backward, planned.work, planned.hardware)
            assert max(bar.stop for bar in bars) == pytest.approx(way.seconds, rel=1e-12)
            computing = sum(bar.stop - bar.start for bar in bars if bar.what == "compute")
            assert computing / workers == pytest.approx(way.compute_seconds, rel=1e-12)


def rings(**changes):
    arguments = {"length": 16 * 2048, "workers": 16, "kv_heads": 8} | changes
    arguments = {"layouts": ("contiguous", "zigzag")} | arguments
    return plan(arguments.pop("length"), arguments.pop("workers"), **arguments).options


def test_scaling_all_rates_scales_all_times():
    """Dimensions: twice the FLOP/s and bytes/s and half the latency is half the time."""
    peak = {"flops_per_second": 1e14, "efficiency": 0.5, "bytes_per_second": 1e10, "latency": 1e-5}
    twice = peak | {"flops_per_second": 2e14, "bytes_per_second": 2e10, "latency": 5e-6}
    one, two = (rings(hardware=PRESETS["h200"].with_rates(**rates)) for rates in (peak, twice))
    for slow, fast in zip(one, two, strict=True):
        assert fast.seconds == slow.seconds / 2
        assert fast.hides_from == slow.hides_from
        assert fast.memory == slow.memory


def test_work_and_bytes_grow_as_their_dimensions():
    """Twice the batch is twice the pairs, bytes and memory; twice the heads, the same."""
    for changes in ({"batch": 2}, {"heads": 64, "kv_heads": 16}):
        for small, large in zip(rings(), rings(**changes), strict=True):
            for one, two in zip(small.passes, large.passes, strict=True):
                assert two.pairs == 2 * one.pairs
                assert two.compute_seconds == pytest.approx(2 * one.compute_seconds, rel=1e-15)
                # The positions of a token are the same for all heads and batches.
                assert 1.99 < two.bytes_sent / one.bytes_sent <= 2
                assert 1.99 < two.memory.total / one.memory.total <= 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("flops_per_second", (1e13, 1e15)),
        ("efficiency", (0.2, 1.0)),
        ("bytes_per_second", (1e9, 1e12)),
        ("latency", (1e-3, 0)),
    ],
)
def test_a_faster_device_is_never_slower(name, values):
    plans = [rings(hardware=PRESETS["h200"].with_rates(**{name: value})) for value in values]
    for slow, fast in zip(plans[:-1], plans[1:], strict=True):
        assert all(b.seconds <= a.seconds for a, b in zip(slow, fast, strict=True))
        assert any(b.seconds < a.seconds for a, b in zip(slow, fast, strict=True))


def test_faster_links_and_slower_products_hide_transfers_sooner():
    fewest = [
        [
            one.hides_from
            for one in rings(circulations=("kv", "q"), hardware=PRESETS["h200"].with_rates(**rates))
        ]
        for rates in ({}, {"bytes_per_second": 1e12}, {"bytes_per_second": 1e12, "efficiency": 0.2})
    ]
    for slow, fast in zip(fewest[:-1], fewest[1:], strict=True):
        assert all(b <= a for a, b in zip(slow, fast, strict=True)) and sum(fast) < sum(slow)


def test_a_mask_never_takes_longer_than_none_and_a_narrower_window_never_longer():
    masks = ({"causal": False}, {}, {"window": (9000, 0)}, {"window": (600, 0)})
    times = [[way.compute_seconds for o in rings(**m) for way in o.passes] for m in masks]
    for wide, narrow in zip(times[:-1], times[1:], strict=True):
        assert all(b < a for a, b in zip(wide, narrow, strict=True))


# --- the recommendation -----------------------------------------------------------------------


def test_what_does_not_fit_is_not_taken():
    planned = plan(8 * 4096, 8, hardware=PRESETS["h200"].with_rates(memory=4e8), kv_heads=8)
    assert not all(one.fits for one in planned.options)
    assert planned.best.fits
    fastest = min(planned.options, key=lambda one: one.seconds)
    others = tuple(one for one in planned.options if one is not fastest and one.fits)
    assert best_of((replace(fastest, fits=False), *others)) in others
    assert best_of((replace(fastest, memory=0), *others)).memory == 0
    full = plan(8 * 4096, 8, hardware=PRESETS["h200"].with_rates(memory=1e6))
    assert not full.best.fits and advice(full)[0].startswith("Nothing fits")
    assert full.best.memory == min(one.memory for one in full.options)


def test_the_best_is_within_one_percent_of_the_fastest_that_fits():
    for workers in (8, 1024):
        for length in (workers * 128, workers * 32768):
            planned = plan(length, workers, hardware="trn2", kv_heads=8)
            fastest = min(one.seconds for one in planned.options if one.fits)
            assert planned.best.seconds <= 1.01 * fastest


def test_causal_without_a_balanced_layout_takes_twice_as_long():
    """Striped attention's gain, https://arxiv.org/abs/2311.09431: at most 2, nearly 2 in a large ring."""
    planned = plan(1024 * 65536, 1024, circulations="kv", kv_heads=8)
    ratio = planned.option("contiguous", "kv").seconds / planned.best.seconds
    assert planned.best.layout in ("striped", "zigzag") and 1.99 < ratio < 2


def test_memory_is_what_adding_up_by_hand_gives():
    """n = 4, B = 1, H = 2, Hkv = 1, D = 8, bf16: q 128 bytes, k and v 64 each, a position 8 each."""
    planned = plan(12, 3, heads=2, kv_heads=1, head_dim=8, layouts="contiguous")
    held = {
        c: [w.memory for w in planned.option("contiguous", c).passes] for c in ("kv", "q", "gather")
    }
    state = 4 * 2 * (4 + 4 + 8 * 4)  # m, l, o in float32
    visiting = 64 + 64 + 32
    forward, backward = held["kv"]
    assert (forward.inputs, forward.accumulators) == (256, state)
    assert (forward.buffers, forward.gathered) == (2 * visiting, 0)
    assert backward.inputs == 256 + 128 + 32 + 32  # dy, lse, dy_o_sum
    assert backward.accumulators == 256  # dq in float32
    assert backward.buffers == 2 * (visiting + 128 + 128)  # dk, dv in float32
    assert held["q"][1].buffers == 2 * (128 + 128 + 32 + 32 + 32 + 256)
    assert held["q"][1].accumulators == 256
    assert held["gather"][0].gathered == 3 * visiting
    assert held["gather"][1].gathered == 3 * (visiting + 256)


def test_every_preset_says_where_each_figure_is_from():
    for device in PRESETS.values():
        figures = [*device.flops_per_second.values(), device.memory, device.memory_bytes_per_second]
        figures += [x for link in device.links for x in (link.bytes_per_second, link.latency)]
        for rate in figures:
            assert isinstance(rate, Rate) and rate.value > 0 and rate.says
            assert rate.source.startswith("https://")
        for way in (False, True):
            assert device.efficiency(way).source.startswith(("assumed", "measured"))


def test_a_window_says_how_many_steps_compute():
    planned = plan(64 * 1024, 64, window=(2000, 0), layouts="contiguous", circulations="kv")
    assert planned.best.forward.working_steps == 3  # ceil(2000 / 1024) blocks behind the own one
    assert "only 3 of 64 forward steps compute anything" in " ".join(advice(planned))
    assert planned.best.hides_from is None


def test_amounts_of_bytes_are_decimal():
    assert amount(141e9) == "141 G"


def test_a_plan_that_wastes_most_of_the_time_says_so_and_names_a_better_plan():
    wasteful = plan(4096, 512, kv_heads=8)
    assert wasteful.best.idle > 0.98
    (line,) = warning(wasteful)
    fastest = min(alternatives(wasteful), key=lambda one: one.best.seconds)
    assert line.startswith("100.0 % of the time is wasted")
    assert f"a ring of {fastest.work.workers}, {fastest.best.layout} with" in line
    again = plan(4096, fastest.work.workers, kv_heads=8)
    assert again.best.seconds == fastest.best.seconds < 0.1 * wasteful.best.seconds
    assert warning(again) == [] == warning(plan(65536, 8))


def test_a_better_layout_on_as_many_workers_is_recommended_too():
    restricted = plan(1 << 20, 64, kv_heads=8, layouts="contiguous", circulations="gather")
    assert restricted.best.idle > 0.5
    (line,) = warning(restricted)
    assert "Better: a ring of 64, zigzag" in line


def test_the_better_plan_may_be_slower_but_its_workers_compute_most_of_the_time():
    device = PRESETS["h200"].with_rates(bytes_per_second=9e9)
    planned = plan(1 << 19, 64, hardware=device, kv_heads=8)
    (line,) = warning(planned)
    busy = next(one for one in alternatives(planned) if one.best.idle < 0.5)
    assert busy.best.seconds > planned.best.seconds and planned.best.idle > 0.5
    assert f"Better: a ring of {busy.work.workers}, " in line


def test_nothing_is_recommended_that_does_not_fit():
    device = PRESETS["h200"].with_rates(memory=1e3)
    (line,) = warning(plan(4096, 512, hardware=device))
    assert line.endswith("No smaller ring that fits the device is better.")
