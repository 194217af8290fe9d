import math
import os
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from support.refusals import refused
from support.tiers import every

from gradscope.errors import InputError
from gradscope.intervals import interval_labels
from gradscope.plots import (
    drawn_numbers,
    headline,
    make_series,
    plot_advantages,
    plot_cosines,
    plot_figure_1,
    plot_figure_2,
    plot_interval_gradient_norms,
    plot_layers_by_interval,
    plot_modules,
    plot_norm_against_one_minus_prob,
    plot_series,
    plot_token_shares,
    save_figure,
    style as plot_style,
)
from gradscope.plots.style import norm_column

VOCAB = 145
FIT = {"slope": 0.96, "slope_lower": 0.93, "slope_upper": 0.99, "intercept": 0.5}


def tokens(count=3000, *, layers=4, vocab=VOCAB, measured=1.0, seed=0):
    """A token table as `measure` writes it: 85 % of tokens near π = 1, norms that follow 1 − π with scattered gains."""
    rng = np.random.default_rng(seed)
    certain = rng.random(count) < 0.85
    one_minus_prob = np.where(certain, 10 ** rng.uniform(-8, np.log10(0.25), count), rng.uniform(0.001, 1, count))
    prob = 1 - one_minus_prob
    rest = np.sqrt(1 / (vocab - 1)) + (1 - np.sqrt(1 / (vocab - 1))) * rng.random(count)  # ‖others‖ / (1 − π)
    logit_norm = one_minus_prob * np.sqrt(1 + rest**2)
    group = rng.integers(0, 40, count)
    rewards = rng.choice([-3.0, -1.0, -0.5, 3.0], size=(40, 8), p=[0.2, 0.2, 0.2, 0.4])
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    table = pd.DataFrame(
        {
            "prob": prob,
            "log_one_minus_prob": np.log(one_minus_prob),
            "interval": np.minimum((4 * prob).astype(int), 3),
            "advantage": advantages[group, rng.integers(0, 8, count)],
            "logit_grad_norm": logit_norm,
        }
    )
    table["weight"] = table["advantage"]
    unmeasured = rng.random(count) >= measured
    for layer in range(layers + 1):
        gain = np.exp(rng.normal(0.3 * (layers - layer), 0.35, count)) * one_minus_prob**-0.03
        table[f"act_grad_norm.{layer}"] = np.where(unmeasured, np.nan, logit_norm * gain)
    table["param_grad_norm"] = np.where(unmeasured, np.nan, logit_norm * np.exp(rng.normal(2, 0.4, count)))
    return table.astype({name: "float32" for name in table.columns if name != "interval"})


def interval_norms():
    return pd.DataFrame(
        {
            "interval": [0, 1, 2, 3, "all"],
            "label": [*interval_labels(), "all"],
            "norm": [0.0412, 0.0287, 0.0205, 0.0154, 0.0519],
            "norm_sd": [0.004, 0.003, 0.003, 0.0012, 0.006],
            "paper": [0.71, 0.36, 0.24, 0.15, 0.82],
        }
    )


def cones():
    rows = [(4, 0.3, 6.0, "measured"), (2, 0.5, 12.0, "measured"), (2, 1e-9, 300.0, "certified")]
    return pd.DataFrame(rows, columns=["layer", "lower_gain", "upper_gain", "kind"])


def fits(*quantities):
    return pd.DataFrame([{"quantity": quantity, **FIT} for quantity in quantities])


def cosines():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, 9)) + 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return pd.DataFrame(vectors @ vectors.T)


def cone(table, lower_gain=0.3, upper_gain=6.0):
    """Fig. 2 with one layer beside the logits."""
    gains = pd.DataFrame([(4, lower_gain, upper_gain, None)], columns=["layer", "lower_gain", "upper_gain", "kind"])
    return plot_figure_2(table, gains, vocab_size=VOCAB)


def power(table):
    return plot_norm_against_one_minus_prob(table, fits(4, "parameters"))


EVERY_FIGURE = {
    "shares": lambda table: plot_token_shares(table),
    "advantages": lambda table: plot_advantages(table),
    "norms": lambda table: plot_interval_gradient_norms(interval_norms()),
    "figure_1": lambda table: plot_figure_1(table, interval_norms()),
    "cone": cone,
    "figure_2": lambda table: plot_figure_2(table, cones(), vocab_size=VOCAB),
    "layers": lambda table: plot_layers_by_interval(table),
    "power": power,
    "cosines": lambda table: plot_cosines(cosines()),
}
OF_TOKENS = [name for name in EVERY_FIGURE if name not in ("norms", "cosines")]
every_figure = pytest.mark.parametrize("draw", EVERY_FIGURE.values(), ids=EVERY_FIGURE)
every_figure_of_tokens = pytest.mark.parametrize("name", every(3, OF_TOKENS))


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    plt.close("all")


def root(drawn):
    return drawn if isinstance(drawn, Figure) else drawn.figure


def test_a_bar_is_the_share_of_its_interval_and_the_density_integrates_to_one():
    table = tokens()
    ax = plot_token_shares(table)
    shares = [100 * sum(number == interval for number in table["interval"]) / len(table) for interval in range(4)]
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    np.testing.assert_allclose(tops, shares, rtol=1e-12)
    drawn = drawn_numbers(ax)
    np.testing.assert_allclose(drawn["share_percent"].dropna(), shares, rtol=1e-12)
    density = drawn.dropna(subset="density")
    # Bins are as wide as 1/40, so that each interval's density adds up to its share.
    area = (density["density"] * (density["prob_high"] - density["prob_low"])).to_numpy().reshape(4, 10).sum(1)
    np.testing.assert_allclose(100 * area, shares, rtol=1e-9)


def test_few_distinct_advantages_are_bars_as_wide_as_their_share_with_nothing_between():
    table = tokens(600)
    table["advantage"] = np.where(np.arange(600) % 3 == 0, 1.5, -0.5).astype("float32")
    drawn = drawn_numbers(plot_advantages(table))
    assert set(drawn["drawn_as"]) == {"bar"} and set(drawn["advantage"]) == {1.5, -0.5}
    for number, label in enumerate(interval_labels()):
        here = table[table["interval"] == number]["advantage"].tolist()
        rows = drawn[drawn["interval"] == label].set_index("advantage")
        assert rows["half_width"][1.5] / rows["half_width"][-0.5] == pytest.approx(here.count(1.5) / here.count(-0.5))
        assert set(rows["median"]) == {sorted(here)[len(here) // 2]} and set(rows["tokens"]) == {len(here)}


def test_the_papers_norms_are_scaled_so_that_all_coincides():
    ax = plot_interval_gradient_norms(interval_norms())
    norms, drawn = interval_norms(), drawn_numbers(ax)
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], norms["norm"], rtol=1e-12)
    for row in drawn.itertuples():
        assert row.paper_scaled == pytest.approx(row.paper / 0.82 * 0.0519)
    assert drawn["paper_scaled"].iat[-1] == pytest.approx(norms["norm"].iat[-1])


def test_the_cone_is_equation_3_and_outside_counts_every_token(monkeypatch):
    monkeypatch.setattr(plot_style, "_POINTS_PER_INTERVAL", 1000)
    table = tokens(4000)
    table["interval"] = 3  # only 1,000 points are drawn, all 4,000 are counted
    ax = cone(table, lower_gain=0.8, upper_gain=1.1).axes[1]
    assert "4,000 tokens,\n≤ 1,000 drawn an interval" in ax.get_title(loc="left")
    drawn = drawn_numbers(ax)
    outline, points = drawn[drawn["lower"].notna()], drawn[drawn["norm"].notna()]
    for row in outline.itertuples():
        assert row.lower == pytest.approx(0.8 * math.sqrt(VOCAB / (VOCAB - 1)) * (1 - row.prob), abs=1e-12)
        assert row.upper == pytest.approx(1.1 * math.sqrt(2) * (1 - row.prob), abs=1e-12)
    outside = 0
    for norm, log_one_minus_prob in zip(table["act_grad_norm.4"], table["log_one_minus_prob"], strict=True):
        one_minus_prob = math.exp(log_one_minus_prob)
        low, high = 0.8 * math.sqrt(VOCAB / (VOCAB - 1)) * one_minus_prob, 1.1 * math.sqrt(2) * one_minus_prob
        outside += not low <= norm <= high
    assert outside > 400 and set(outline["outside"]) == {outside}
    assert len(points) == 1000


def test_the_theorem_holds_for_every_token_at_the_logits_and_a_violation_is_counted():
    table = tokens()
    figure = plot_figure_2(table, cones(), vocab_size=VOCAB)
    drawn = drawn_numbers(figure)
    assert set(drawn["panel"]) == {"logits", "output of block 4", "output of block 2"}
    assert set(drawn[drawn["panel"] == "logits"]["outside"].dropna()) == {0}
    table.loc[5, "logit_grad_norm"] *= 2
    assert "theorem: 1 outside" in cone(table).axes[0].get_title(loc="left")


def test_the_heat_map_holds_medians_over_the_measured_tokens():
    table = tokens(measured=0.3)
    drawn = drawn_numbers(plot_layers_by_interval(table))
    rows = [("logits", "logits"), ("parameters", "all parameters"), (0, "input of block 1"), (3, "output of block 3")]
    for layer, name in rows:
        for number, label in enumerate(interval_labels()):
            here = [
                norm
                for norm, interval, measured in zip(
                    table[norm_column(layer)], table["interval"], table["param_grad_norm"].notna(), strict=True
                )
                if measured and interval == number
            ]
            row = drawn[(drawn["layer"] == name) & (drawn["interval"] == label)].iloc[0]
            assert row["median_norm"] == pytest.approx(np.median(here)) and row["tokens"] == len(here)


def test_norms_that_are_all_zero_do_not_break_the_heat_map():
    table = tokens(50)
    for column in [norm_column(layer) for layer in ("logits", "parameters", 0, 1, 2, 3, 4)]:
        table[column] = np.float32(0)
    assert (drawn_numbers(plot_layers_by_interval(table))["median_norm"].dropna() == 0).all()


def test_the_fitted_line_is_the_given_power_and_the_laws_cross_it_in_the_middle():
    ax = plot_norm_against_one_minus_prob(tokens(), fits(4)).axes[0]
    fitted, theory, root_law = (line.get_xydata() for line in ax.lines)
    np.testing.assert_allclose(fitted[:, 0], [1e-3, 1.0])
    np.testing.assert_allclose(fitted[:, 1], [math.exp(0.5) * x**0.96 for x in fitted[:, 0]], rtol=1e-12)
    middle = math.log(1e-3) / 2
    for line, slope in ((theory, 1.0), (root_law, 0.5)):
        (x0, y0), (x1, y1) = np.log(line)
        assert (y1 - y0) / (x1 - x0) == pytest.approx(slope)
        assert y0 + slope * (middle - x0) == pytest.approx(0.5 + 0.96 * middle)


def test_cosines_are_drawn_as_given_and_an_empty_interval_as_a_dash():
    matrix = cosines()
    matrix.iloc[2, :] = matrix.iloc[:, 2] = np.nan
    ax = plot_cosines(matrix)
    np.testing.assert_array_equal(drawn_numbers(ax)[interval_labels()].to_numpy(), matrix.to_numpy())
    assert [text.get_text() for text in ax.texts].count("–") == 7
    with refused():
        plot_cosines(cosines() * 3)
    with refused():
        plot_cosines(cosines().iloc[:3])


@every_figure_of_tokens
def test_a_missing_column_is_named(name):
    for column in ("prob", "interval", "advantage", "log_one_minus_prob", "logit_grad_norm", "act_grad_norm.4"):
        table = tokens(100).drop(columns=column)
        try:
            EVERY_FIGURE[name](table)
        except InputError as error:
            # Without its column, block 4 is no row of the heat map rather than a missing one.
            assert f"has no column {column}," in str(error), (column, error)
        else:
            assert column not in NEEDED[name], column


NEEDED = {
    "shares": ["prob", "interval"],
    "advantages": ["interval", "advantage"],
    "figure_1": ["prob", "interval", "advantage"],
    "cone": ["prob", "interval", "log_one_minus_prob", "act_grad_norm.4", "logit_grad_norm"],
    "figure_2": ["prob", "interval", "log_one_minus_prob", "act_grad_norm.4", "logit_grad_norm"],
    "layers": ["interval", "logit_grad_norm"],
    "power": ["interval", "log_one_minus_prob", "act_grad_norm.4"],
}


@every_figure_of_tokens
def test_a_single_token_and_empty_intervals_are_drawn(name):
    table = tokens()
    for part in (table.iloc[:1], table[table["interval"] == 0].iloc[:1], table[table["interval"].isin([0, 3])]):
        root(EVERY_FIGURE[name](part)).draw_without_rendering()


@every_figure
def test_nothing_is_set_too_small_and_no_tick_labels_overlap(draw):
    figure = root(draw(tokens()))
    figure.canvas.draw()
    for text in figure.findobj(Text):
        assert not text.get_text().strip() or text.get_fontsize() >= 8, text
    for ax in figure.axes:
        boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
        for left, right in pairwise(boxes):
            assert left.x1 <= right.x0, ax.get_title(loc="left")


@pytest.mark.parametrize("name", every(2, ["figure_1", "cone", "layers", "power", "cosines"]))
def test_the_users_settings_are_neither_touched_nor_used(name, tmp_path):
    draw = EVERY_FIGURE[name]
    save_figure(draw(tokens(300)), tmp_path / "plain.svg")
    with mpl.rc_context({"font.size": 17, "xtick.labelsize": 29, "axes.grid": True, "savefig.dpi": 40}):
        before = dict(mpl.rcParams)
        save_figure(draw(tokens(300)), tmp_path / "styled.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "styled.svg").read_bytes()


def test_a_given_axes_is_drawn_into_and_otherwise_a_notebook_shows_the_new_one():
    figure, axes = plt.subplots(1, 2)
    assert plot_token_shares(tokens(200), ax=axes[0]) is axes[0] and plot_advantages(tokens(200), ax=axes[1]) is axes[1]
    assert set(drawn_numbers(figure)["panel"]) == {"panel 1", "panel 2"}
    new = plot_advantages(tokens(200))
    assert isinstance(new, Axes) and plt.gcf() is new.figure
    figures = plt.get_fignums()
    assert isinstance(plot_figure_1(tokens(200), interval_norms()), Figure) and plt.get_fignums() == figures


@pytest.mark.parametrize("place", ["outside upper center", "outside lower center", "outside right center"])
def test_a_headline_and_a_note_make_their_own_room_and_lie_on_nothing(place):
    figure = plot_figure_2(tokens(300), cones(), vocab_size=VOCAB)
    figure.legend([mpl.lines.Line2D([], [])], ["a legend"], loc=place)
    width, height = figure.get_size_inches()
    headline(figure, "first words " * 20, "a note")
    headline(figure, "what it shows " * 20)  # replaces the first, and leaves the note
    assert figure.get_figwidth() == width and figure.get_figheight() > height
    figure.draw_without_rendering()
    found, note = sorted(figure.texts, key=Text.get_gid)
    assert found.get_text().startswith("what") and note.get_text() == "a note"
    boxes = [found.get_window_extent(), note.get_window_extent()]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    others = [*figure.axes, *figure.legends]
    boxes += [own.get_tightbbox() for own in others]
    assert not [pair for pair in combinations(boxes, 2) if pair[0] in boxes[:2] and Bbox.intersection(*pair)]
    headline(figure, "short")
    assert figure.get_figheight() == pytest.approx(height + 2 * 0.17)


def test_saving_closes_the_figure_and_writes_the_numbers_beside_it(tmp_path):
    path = save_figure(plot_cosines(cosines()), tmp_path / "new" / "cosines.png")
    assert plt.get_fignums() == [] and sorted(p.name for p in path.parent.iterdir()) == ["cosines.csv", "cosines.png"]
    written = pd.read_csv(path.with_suffix(".csv"))
    np.testing.assert_allclose(written[interval_labels()].to_numpy(), cosines().to_numpy(), rtol=1e-15)
    own = pd.DataFrame({"x": [1, 2]}, index=pd.Index(["a", "b"], name="row"))
    save_figure(plot_cosines(cosines()), path, own)
    assert path.with_suffix(".csv").read_text() == "row,x\na,1\nb,2\n"


def save_in_every_format(folder, *names):
    for suffix in ("png", "svg", "pdf"):
        for name in names:
            save_figure(EVERY_FIGURE[name](tokens(400, measured=0.5)), Path(folder) / suffix / f"{name}.{suffix}")


@pytest.mark.all
def test_files_are_the_same_bytes_in_another_process(tmp_path):
    names = ("figure_1", "cone")
    code = "import sys, test_plots; test_plots.save_in_every_format(*sys.argv[1:])"
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "there"), *names]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=child_environment())
    save_in_every_format(tmp_path / "here", *names)
    files = sorted(path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*.*"))
    assert len(files) == 12  # two pictures in three formats, each with its CSV
    for file in files:
        assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "there" / file).read_bytes(), file


def child_environment():
    here = Path(__file__)
    places = os.pathsep.join(map(str, (here.parents[2], here.parents[1], here.parent)))
    # Another hash seed shuffles sets; another date would show in a file that carries one.
    return {**os.environ, "PYTHONPATH": places, "PYTHONHASHSEED": "1234", "SOURCE_DATE_EPOCH": "86400"}


def test_series_are_drawn_side_by_side_in_panels_with_their_bars():
    labels, parts = interval_labels(), []
    for panel, start in (("rose", 0.4), ("fell", 0.6)):
        for look, (words, shift) in enumerate({"predicted step": 0.0, "actual step": 0.05}.items(), start=1):
            value = start + shift + np.array([0.0, 0.05, 0.1])
            rows = pd.DataFrame({"at": labels[:3], "value": value, "lower": value - 0.1, "upper": value + 0.2})
            parts.append(make_series(rows, labels, words, look, panel=panel, factor=100.0))
    figure = plot_series(pd.concat(parts), ylabel="share (%)", rule=50)
    for ax, start in zip(figure.axes, (0.4, 0.6), strict=True):
        assert [bars.get_label() for bars in ax.containers] == ["predicted step", "actual step"]
        for bars, shift in zip(ax.containers, (0.0, 0.05), strict=True):
            points, _, (segments,) = bars
            # Of the last interval nothing is known.
            expected = 100 * (start + shift + np.array([0.0, 0.05, 0.1, np.nan]))
            np.testing.assert_allclose(points.get_ydata(), expected)
            ends = np.array([segment[:, 1] for segment in segments.get_segments()[:3]])
            np.testing.assert_allclose(ends, np.stack([expected[:3] - 10, expected[:3] + 20], 1))
    assert len(drawn_numbers(figure)) == 4 * len(labels)


@pytest.mark.parametrize("lying", [False, True])
def test_points_without_bounds_are_hollow_beside_others_that_have_some(lying):
    known = pd.DataFrame({"at": ["a", "b"], "value": [0.4, 0.5], "lower": [0.3, np.nan], "upper": [0.6, np.nan]})
    bare = known.assign(lower=np.nan, upper=np.nan)
    series = [make_series(rows, ["a", "b"], words, look) for rows, words, look in ((known, "one", 0), (bare, "two", 2))]

    def hollow(*drawn):
        (ax,) = plot_series(pd.concat(drawn), ylabel="share", lying=lying).axes
        lines = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
        return sorted(v for line in lines for v in (line.get_xdata() if lying else line.get_ydata())), ax.get_legend()

    values, legend = hollow(*series)
    assert values == [0.4, 0.5, 0.5]
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    assert hollow(series[1])[0] == []


def test_the_largest_modules_come_with_their_shares_of_the_energy():
    table = pd.DataFrame({"weight": 1.0, "param_grad_norm.a": [3.0, 3.0], "param_grad_norm.b": [4.0, 4.0]})
    assert drawn_numbers(plot_modules(table)).to_dict("list") == {"module": ["b", "a"], "percent": [64.0, 36.0]}
    with refused("per-module"):
        plot_modules(table[["weight"]])
