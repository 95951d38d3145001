"""What the figures draw, read back as data: patches, lines and texts, never pixels."""

import numpy as np
import pytest

import ringspec as rs
from ringspec.errors import MissingPackageError, OptionError, ShapeError
from ringspec.render import figures, figures_style

drawn = pytest.mark.notebook
W, S = 4, 8


@pytest.fixture(autouse=True)
def without_a_window():
    """matplotlib where it is installed, drawing into memory; every figure is closed afterwards."""
    try:
        import matplotlib
    except ImportError:
        yield
        return
    matplotlib.use("Agg")
    yield
    import matplotlib.pyplot

    matplotlib.pyplot.close("all")


def patches(axes, start=""):
    return [patch for patch in axes.patches if str(patch.get_gid()).startswith(start)]


def box(patch):
    """(left, bottom, width, height)."""
    return (*patch.get_xy(), patch.get_width(), patch.get_height())


def lines(axes):
    return {line.get_gid(): line for line in axes.lines}


def legend_words(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def causal_ring(layout="contiguous", length=S, **options):
    values = np.random.default_rng(0).standard_normal((3, 1, 1, length, 2))
    return rs.ring(*values, workers=W, causal=True, layout=layout, **options)


def meetings(schedule):
    return [schedule.pairs(t) for t in range(len(schedule.steps))]


def hops(schedule):
    return [[(" ".join(t.carries), t.pairs) for t in step.transfers] for step in schedule.steps]


# --- every figure -----------------------------------------------------------------------------


def one_of_each():
    run = causal_ring(record=True)
    spans = rs.timeline(run.cost(), pairs_per_second=10.0, bytes_per_second=100.0)
    table, uses = run.layout_q.table, [step.uses for step in run.schedule.steps]
    z = np.linspace(-2, 2, 50)
    return {
        "attention_pattern": (np.tri(S), table, table, meetings(run.schedule)),
        "schedule_diagram": (uses, hops(run.schedule)),
        "work_balance": ({"contiguous": run.cost().pairs},),
        "row_state": ([-np.inf, 0.0], [0.0, 1.0], [[0.0], [2.0]]),
        "cost_timeline": ([(s.worker, s.step, s.what, s.start, s.stop) for s in spans],),
        "pattern_beside": (np.tri(S), np.tri(S, k=1)),
        "error_against_workers": ([1, 2], {"bf16": [1e-3, 2e-3]}),
        "error_by_row": ({"right": [0.0, 1e-3], "wrong": [0.0, 1e-1]}, {"a rule": 1e-2}),
        "noise_scores": (z, 10 * z),
    }


def test_every_public_figure_is_drawn_by_these_tests():
    assert sorted(one_of_each()) == sorted(figures.__all__)


@drawn
@pytest.mark.parametrize("name", figures.__all__)
def test_every_axis_has_a_label_or_a_title_that_says_what_it_is(name):
    figure = getattr(figures, name)(*one_of_each()[name])
    for axes in figure.axes:
        assert axes.get_xlabel()
    assert all(axes.get_ylabel() or axes.get_title() for axes in figure.axes)


@drawn
@pytest.mark.parametrize("name", figures.__all__)
def test_a_figure_leaves_the_settings_of_matplotlib_as_they_were(name):
    import matplotlib

    matplotlib.rcdefaults()
    before = dict(matplotlib.rcParams)
    getattr(figures, name)(*one_of_each()[name])
    assert dict(matplotlib.rcParams) == before


@drawn
@pytest.mark.parametrize("name", figures.__all__)
def test_nothing_that_is_drawn_lies_outside_the_sheet(name):
    figure = getattr(figures, name)(*one_of_each()[name])
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    sheet, tight = figure.bbox, figure.get_tightbbox(renderer)
    inches = sheet.transformed(figure.dpi_scale_trans.inverted())
    slack = 0.06
    assert tight.x0 >= inches.x0 - slack and tight.x1 <= inches.x1 + slack
    assert tight.y0 >= inches.y0 - slack and tight.y1 <= inches.y1 + slack


@pytest.mark.parametrize("name", figures.__all__)
def test_without_matplotlib_the_error_says_how_to_install_it(name, monkeypatch):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr(figures_style.importlib, "import_module", absent)
    with pytest.raises(MissingPackageError, match="pip install"):
        getattr(figures, name)(*one_of_each()[name])


def test_workers_differ_in_colour_and_also_in_hatch_and_mark():
    looks = [figures_style.look_of(r) for r in range(8)]
    assert len({look["facecolor"] for look in looks}) == 8
    assert len({look["hatch"] for look in looks}) == 8
    assert len(set(figures_style.MARKERS)) == 8


# --- the ring ---------------------------------------------------------------------------------


@drawn
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_the_pattern_draws_every_pair_once_and_a_number_on_every_visible_one(layout):
    run = causal_ring(layout)
    table = run.layout_q.table
    figure = figures.attention_pattern(np.tri(S), table, table, meetings(run.schedule))
    assert [axes.get_title() for axes in figure.axes] == [f"step {t}" for t in range(W)]
    cells = {}
    for t, axes in enumerate(figure.axes):
        for patch in patches(axes):
            left, bottom, width, height = box(patch)
            assert (width, height) == (1, 1)
            pair = int(bottom + 0.5), int(left + 0.5)
            assert pair not in cells
            cells[pair] = patch.get_gid()
        counted = [len(patches(axes, f"seen {r}")) for r in range(W)]
        assert counted == run.cost().pairs[t].tolist()
        numbers = sorted(text.get_text() for text in axes.texts)
        assert numbers == sorted(str(r) for r in range(W) for _ in range(counted[r]))
    owner = {token: r for r in range(W) for token in table[r]}
    assert cells == {
        (i, j): f"{'seen' if j <= i else 'hidden'} {owner[i]}" for i in range(S) for j in range(S)
    }


@drawn
def test_a_large_pattern_has_hatches_in_place_of_numbers():
    run = causal_ring(length=32)
    table = run.layout_q.table
    figure = figures.attention_pattern(np.tri(32), table, table, meetings(run.schedule))
    assert not figure.axes[0].texts
    assert {p.get_hatch() for p in patches(figure.axes[0], "seen")} == set(
        figures_style.HATCHES[:W]
    )
    assert legend_words(figure)[:W] == [f"worker {r}" for r in range(W)]


@drawn
@pytest.mark.parametrize("direction", [1, -1])
def test_the_schedule_draws_who_holds_what_and_where_it_goes(direction):
    schedule = rs.forward_schedule("kv", W, direction)
    uses = [step.uses for step in schedule.steps]
    (axes,) = figures.schedule_diagram(uses, hops(schedule)).axes
    words = {(x, y): text.get_text() for text in axes.texts for x, y in [text.get_position()]}
    for t in range(W):
        for r in range(W):
            assert words[t, r] == f"k{(r - direction * t) % W}"
    arrows = [patch for patch in patches(axes) if " to " in patch.get_gid()]
    assert len(arrows) == W * (W - 1)
    assert {patch.get_gid() for patch in arrows} == {
        f"k v columns: {r} to {(r + direction) % W}" for r in range(W)
    }
    for (
        patch
    ) in arrows:  # it is drawn where its name says, from the source to the head at the target
        source, target = (int(end) for end in patch.get_gid().partition(": ")[2].split(" to "))
        points = patch.get_path().vertices
        assert abs(points[0][1] - source) < 0.05
        assert abs(points[:, 1] - target).min() < 0.05
        assert points[0][0] % 1 == pytest.approx(0.2, abs=0.02)
    # The hop round the end is dashed, in each of the three moves.
    assert sum(patch.get_linestyle() == "--" for patch in arrows) == W - 1


@drawn
@pytest.mark.parametrize(("circulation", "symbol"), [("kv", "k"), ("q", "q")])
def test_the_last_column_shows_the_accumulators_at_home(circulation, symbol):
    schedule = rs.backward_schedule(circulation, W)
    uses, both = [step.uses for step in schedule.steps], f"{symbol} d{symbol}"
    (axes,) = figures.schedule_diagram(uses, hops(schedule), both, home=f"d{symbol}").axes
    words = {text.get_position(): text.get_text() for text in axes.texts}
    assert [words[0, r] for r in range(W)] == [f"{symbol}{r}, d{symbol}{r}" for r in range(W)]
    assert [words[W, r] for r in range(W)] == [f"d{symbol}{r}" for r in range(W)]
    assert [tick.get_text() for tick in axes.get_xticklabels()][-1] == "home"
    assert len([patch for patch in patches(axes) if " to " in patch.get_gid()]) == W * W


@drawn
def test_a_worker_that_computes_nothing_has_a_dash():
    run = causal_ring(skip_masked=True)
    uses = [step.uses for step in run.schedule.steps]
    assert uses[1][0] is None
    (axes,) = figures.schedule_diagram(uses, hops(run.schedule)).axes
    assert [t.get_text() for t in axes.texts if t.get_position() == (1, 0)] == ["–"]


@drawn
def test_the_balance_shows_every_count_the_totals_and_both_imbalances():
    counted = {name: causal_ring(name, 64).cost() for name in ("contiguous", "zigzag")}
    figure = figures.work_balance({name: one.pairs for name, one in counted.items()})
    for (name, one), above, below in zip(
        counted.items(), figure.axes[:2], figure.axes[2:], strict=True
    ):
        assert above.get_title() == (
            f"{name}\nimbalance {one.imbalance:.2f}, lockstep {one.lockstep_imbalance:.2f}"
        )
        for (t, r), count in np.ndenumerate(one.pairs):
            (text,) = [x.get_text() for x in above.texts if x.get_position() == (t, r)]
            busiest = count == one.pairs[t].max() > one.pairs[t].min()
            assert text == f"{count}{'*' if busiest else ''}"
        assert [box(bar)[3] for bar in patches(below, "total")] == one.pairs.sum(axis=0).tolist()
        assert lines(below)["mean"].get_ydata()[0] == one.pairs.sum() / W
    assert figure.axes[2].get_ylim() == figure.axes[3].get_ylim()


@drawn
def test_the_state_of_a_row_ends_on_the_dense_result():
    values = np.random.default_rng(1).standard_normal((3, 1, 1, S, 2))
    run = rs.ring(*values, workers=W, causal=True, record=True)
    dense = rs.attention(*values, causal=True)
    states = [run.state(3, 0, when="before")] + [run.state(3, t) for t in range(W)]
    m, l, o = (np.array([getattr(x, n)[0, 0, 1] for x in states]) for n in ("m", "l", "o"))
    figure = figures.row_state(m, l, o, lse=dense.lse[0, 0, 7], final_o=dense.o[0, 0, 7])
    shown = [lines(axes) for axes in figure.axes]
    assert np.isnan(shown[0]["m 0"].get_ydata()[0])  # the empty state
    assert np.array_equal(shown[0]["m 0"].get_ydata()[1:], m[1:])
    assert np.array_equal(shown[1]["l 0"].get_ydata(), l)
    for column in range(2):
        assert np.array_equal(shown[2][f"o {column}"].get_ydata(), o[:, column])
        line, goal = shown[4][f"o / l {column}"], shown[4][f"goal {column}"]
        assert abs(line.get_ydata()[-1] - goal.get_ydata()[0]) < 1e-14
    assert abs(shown[3]["lse 0"].get_ydata()[-1] - shown[3]["goal 0"].get_ydata()[0]) < 1e-14


def test_a_state_of_unequal_lengths_is_refused():
    with pytest.raises(ShapeError, match="l of shape"):
        figures.row_state([0.0, 1.0], [0.0], [[0.0], [1.0]])


@drawn
@pytest.mark.parametrize("overlap", [True, False])
def test_the_timeline_draws_all_of_the_computing_and_all_of_the_sending(overlap):
    counted = causal_ring(length=64).cost()
    rates = {"pairs_per_second": 50.0, "bytes_per_second": 500.0}
    made = rs.timeline(counted, overlap=overlap, **rates)
    spans = [(s.worker, s.step, s.what, s.start, s.stop) for s in made]
    (axes,) = figures.cost_timeline(spans, "ms").axes
    computing = sum(box(bar)[2] for bar in patches(axes, "compute"))
    covered = sum(box(bar)[2] for bar in patches(axes, "send, overlapped"))
    bare = sum(box(bar)[2] for bar in patches(axes, "send, not overlapped"))
    assert computing == pytest.approx(counted.pairs.sum() / 50)
    assert covered + bare == pytest.approx(counted.sent.sum() / 500)
    assert (covered > 0) == overlap
    assert [line.get_gid() for line in axes.lines] == ["begin 1", "begin 2", "begin 3"]
    assert "time (ms)" in axes.get_xlabel()
    (other,) = figures.cost_timeline(spans, until=1000.0).axes
    assert other.get_xlim()[1] == pytest.approx(1010)


# --- errors -----------------------------------------------------------------------------------


@drawn
def test_the_recovered_pattern_marks_what_is_too_much_and_what_is_missing():
    expected = np.tri(S) > 0
    got = expected.copy()
    got[2, 3], got[5, 1] = True, False
    left, right = figures.pattern_beside(expected, got, origin=(10, 20), block=4).axes
    assert len(patches(left, "seen")) == expected.sum()
    assert not patches(left, "extra") and not patches(left, "missing")
    assert right.get_title() == "recovered: 1 too many, 1 missing"
    (extra,), (missing,) = patches(right, "extra"), patches(right, "missing")
    assert box(extra) == (22.5, 11.5, 1, 1) and box(missing) == (20.5, 14.5, 1, 1)
    # Not by colour alone.
    assert extra.get_hatch() and missing.get_hatch() != extra.get_hatch()
    assert left.get_xlim() == (19.5, 27.5) and left.get_ylim() == (17.5, 9.5)


@drawn
def test_every_recipe_has_a_line_with_a_mark_of_its_own():
    errors = {"float64": [1e-16, 2e-16, 3e-16], "bf16": [1e-3, 1e-3, 2e-3]}
    figure = figures.error_against_workers([1, 2, 8], errors)
    (axes,) = figure.axes
    for name, values in errors.items():
        assert lines(axes)[name].get_xdata().tolist() == [1, 2, 8]
        assert lines(axes)[name].get_ydata().tolist() == values
    assert len({line.get_marker() for line in axes.lines}) == 2
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert legend_words(figure) == list(errors)


@drawn
def test_errors_within_a_decade_have_plain_numbers_on_their_axis():
    figure = figures.error_against_workers([1, 8], {"bf16": [1.3, 1.2], "nki": [1.6, 2.9]})
    figure.canvas.draw()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert {"1.5", "2"} <= set(shown) and not any("10" in words for words in shown)


@drawn
@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_an_error_that_a_logarithmic_axis_cannot_show_is_refused(bad):
    with pytest.raises(OptionError, match="errors > 0"):
        figures.error_against_workers([1, 2], {"x": [1e-3, bad]})


@drawn
def test_every_row_has_its_error_and_every_rule_a_limit_at_each_row():
    errors = {"right": [0.0, 1e-3, 2e-3], "wrong": [0.5, 0.1, 0.2]}
    limits = {"one for all": 0.04, "each its own": [0.1, 0.02, 0.01]}
    figure = figures.error_by_row(errors, limits)
    (axes,) = figure.axes
    shown = {name: line.get_ydata() for name, line in lines(axes).items()}
    assert np.isnan(shown["right"][0]) and shown["right"][1:].tolist() == [1e-3, 2e-3]
    assert shown["wrong"].tolist() == errors["wrong"]
    assert shown["one for all"].tolist() == [0.04] * 3
    assert shown["each its own"].tolist() == limits["each its own"]
    assert {name for name, line in lines(axes).items() if line.get_linestyle() == "None"} == {
        *errors
    }
    assert len({line.get_marker() for line in axes.lines}) == 3  # two kernels, and none
    assert len({line.get_linestyle() for line in axes.lines}) == 3
    assert axes.get_yscale() == "log" and legend_words(figure) == [*errors, *limits]


@drawn
@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_an_error_of_a_row_that_is_no_size_is_refused(bad):
    with pytest.raises(OptionError, match="numbers >= 0"):
        figures.error_by_row({"x": [1e-3, bad]}, {})


@drawn
def test_kernels_with_unlike_numbers_of_rows_are_refused():
    with pytest.raises(ShapeError, match="numbers of b"):
        figures.error_by_row({"a": [1.0, 2.0], "b": [1.0]}, {})


@drawn
def test_the_scores_have_a_histogram_of_area_one_and_the_slope_of_a_wrong_scale():
    random = np.random.default_rng(2)
    size = 300 * random.standard_normal(20_000)
    z = random.standard_normal(20_000) + 1e-3 * size
    left, right = figures.noise_scores(z, size).axes
    assert sum(box(bar)[2] * box(bar)[3] for bar in patches(left, "z")) == pytest.approx(1.0)
    normal = lines(left)["normal"]
    assert normal.get_ydata().max() == pytest.approx(1 / np.sqrt(2 * np.pi))
    slope = np.polyfit(size, z, 1)[0]  # with a constant, which is near 0 here
    shown = lines(right)["slope"]
    (x0, x1), (y0, y1) = shown.get_xdata(), shown.get_ydata()
    assert (y1 - y0) / (x1 - x0) == pytest.approx(slope, rel=0.02)
    assert (
        f"slope {(y1 - y0) / (x1 - x0):.2e}, +4" in right.get_title()
    )  # 0.001 * 300 * sqrt(20000)


def test_sizes_that_are_all_zero_are_refused():
    with pytest.raises(OptionError, match="sizes that are not all 0"):
        figures.noise_scores(np.ones(3), np.zeros(3))
