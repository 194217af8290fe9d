"""Figures: DataFrame in, Axes out, with a CSV of the data shown."""

from gradscope.plots.comparison import plot_comparison
from gradscope.plots.labels import METRICS, label_of
from gradscope.plots.layers import plot_figure_2, plot_layers_by_interval, plot_norm_against_one_minus_prob
from gradscope.plots.modules import plot_modules
from gradscope.plots.series import Look, make_series, plot_module_shares, plot_series, plot_steps, plot_trend
from gradscope.plots.style import (
    NEGATIVE,
    NEUTRAL,
    PAGE_WIDTH,
    POLICIES,
    POSITIVE,
    TIMES,
    drawn_numbers,
    finish,
    headline,
    interval_colors,
    name_intervals,
    new_axes,
    new_panels,
    paper_style,
    require,
    save_figure,
)
from gradscope.plots.tokens import (
    plot_advantages,
    plot_cosines,
    plot_figure_1,
    plot_interval_gradient_norms,
    plot_token_shares,
)
from gradscope.plots.updates import plot_influence, plot_movement, plot_norm_drivers

__all__ = [
    "METRICS", "NEGATIVE", "NEUTRAL", "PAGE_WIDTH", "POLICIES", "POSITIVE", "TIMES", "Look", "drawn_numbers",
    "finish", "headline", "interval_colors", "label_of", "make_series", "name_intervals", "new_axes", "new_panels",
    "paper_style", "plot_advantages", "plot_comparison", "plot_cosines", "plot_figure_1", "plot_figure_2",
    "plot_influence", "plot_interval_gradient_norms", "plot_layers_by_interval", "plot_module_shares",
    "plot_modules", "plot_movement", "plot_norm_against_one_minus_prob", "plot_norm_drivers", "plot_series",
    "plot_steps", "plot_token_shares", "plot_trend", "require", "save_figure",
]  # fmt: skip
