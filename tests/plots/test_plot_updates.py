"""Pictures of updates: what is drawn are the table's own numbers, and a table that lacks them is refused."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from support.refusals import refused

from gradscope.intervals import interval_labels
from gradscope.plots import drawn_numbers, plot_influence, plot_movement, plot_norm_drivers, save_figure
from gradscope.updates import influence_table


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    prob = rng.random(800)
    table = pd.DataFrame({"interval": np.minimum((4 * prob).astype(int), 3), "advantage": rng.normal(size=800)})
    table["group"] = rng.integers(0, 10, 800)
    for name, size in (("all", 1e-3), ("lopti", 2e-3)):
        table[f"delta_prob.{name}"] = size * rng.standard_t(2, 800)
        table[f"delta_log_odds.{name}"] = size * rng.standard_t(2, 800)
    return table


def test_a_movement_is_drawn_by_interval_and_sign_without_the_top_share_of_each_interval(tokens):
    ax = plot_movement(tokens, "lopti")
    drawn = drawn_numbers(ax)
    assert list(drawn["interval"]) == [label for label in interval_labels() for _ in range(2)]
    for row in drawn.itertuples():
        own = tokens[tokens["interval"] == interval_labels().index(row.interval)]
        moved = own["delta_prob.lopti"]
        assert row.mean_abs_of_all == pytest.approx(moved.abs().mean())
        kept = own[moved.abs().rank(ascending=False) > round(0.01 * len(own))]
        sign = {"positive": 1, "negative": -1}[row.sign]
        expected = kept.loc[np.sign(kept["advantage"]) == sign, "delta_prob.lopti"]
        assert row.num_drawn == len(expected)
        assert row.median == pytest.approx(expected.median())
        assert (row.q05, row.q95) == pytest.approx(tuple(expected.quantile([0.05, 0.95])))
    halves = [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert len(halves) == 8
    # Each half is on the side of its sign and reaches from its lowest to its highest drawn movement.
    for half, row in zip(halves, drawn.itertuples(), strict=True):
        across, along = half.get_paths()[0].vertices.T
        place = interval_labels().index(row.interval)
        side = across.max() - place if row.sign == "positive" else place - across.min()
        assert side == pytest.approx(0.44)
        assert along.min() <= row.q05 and row.q95 <= along.max()


def test_the_influence_map_shows_every_share_and_leaves_out_sources_that_do_nothing(tokens):
    rng = np.random.default_rng(1)
    parts = {f"by.{name}": rng.normal(size=len(tokens)) for name in ("0", "1", "2", "3", "kl")}
    contributions = tokens.assign(**parts, **{"by.decay": 0.0}, predicted=sum(parts.values()))
    table = influence_table(contributions, seed=None)
    ax = plot_influence(table)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        *(w.replace(", ", ",") for w in interval_labels()),
        "kl",
    ]
    shown = np.array([float(text.get_text()) for text in ax.texts]).reshape(5, 5)
    wide = table.pivot(index="source", columns="target", values="share").loc[[0, 1, 2, 3, "kl"], [0, 1, 2, 3, "all"]]
    np.testing.assert_allclose(shown, wide.to_numpy(float), atol=0.0051)
    np.testing.assert_allclose(shown.sum(0), 1, atol=0.03)


@pytest.mark.parametrize("layers", [2, 30])
def test_norm_drivers_show_both_coefficients_of_every_place_with_their_bounds(layers):
    """Upright or, of many layers, lying: on a page no wider than its text."""
    rows, count, value_axis = [], layers + 1, int(layers == 2)
    for number, quantity in enumerate((*(f"act_grad_norm.{n}" for n in range(layers)), "param_grad_norm", "layers")):
        for driver, value in (("log_one_minus_prob", 0.8), ("entropy", 0.1), ("difference", 0.7)):
            bounds = {"lower": value - 0.1, "upper": value + 0.2 + 0.01 * number}
            rows.append({"quantity": quantity, "driver": driver, "coefficient": value, **bounds})
    ax = plot_norm_drivers(pd.DataFrame(rows))
    for container, value in zip(ax.containers, (0.8, 0.1), strict=True):
        line, _, [bars] = container
        assert line.get_data()[value_axis] == pytest.approx([value] * count)
        ends = [tuple(segment[:, value_axis]) for segment in bars.get_segments()]
        assert ends == [pytest.approx((value - 0.1, value + 0.2 + 0.01 * number)) for number in range(count)]
    assert len((ax.get_yticks, ax.get_xticks)[value_axis]()) == count
    assert ax.figure.get_figwidth() <= 7.3


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda t: plot_movement(t, "reweight"), "delta_prob.reweight"),
        (lambda t: plot_movement(t.assign(**{"delta.all": 0.0}), value="delta"), "delta_prob"),
        (plot_influence, "source"),
        (plot_norm_drivers, "quantity"),
    ],
)
def test_a_table_without_what_is_drawn_is_refused(tokens, draw, named):
    with refused(named):
        draw(tokens)


def test_a_movement_is_saved_with_its_numbers(tokens, tmp_path):
    save_figure(plot_movement(tokens, value="delta_log_odds"), tmp_path / "moved.png")
    assert len(pd.read_csv(tmp_path / "moved.csv")) == 8
