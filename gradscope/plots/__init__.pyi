"""What is at the door: a file is loaded when one of its names is first used."""

from .comparison import plot_comparison as plot_comparison
from .labels import LABELS as LABELS, METRICS as METRICS, label_of as label_of
from .layers import (
    plot_figure_2 as plot_figure_2,
    plot_layers_by_interval as plot_layers_by_interval,
    plot_norm_against_one_minus_prob as plot_norm_against_one_minus_prob,
)
from .proxies import plot_modules as plot_modules, plot_proxies as plot_proxies
from .style import (
    NEUTRAL as NEUTRAL,
    drawn_numbers as drawn_numbers,
    finish as finish,
    interval_colors as interval_colors,
    name_intervals as name_intervals,
    new_axes as new_axes,
    new_panels as new_panels,
    paper_style as paper_style,
    require as require,
    save_figure as save_figure,
)
from .tokens import (
    plot_advantages as plot_advantages,
    plot_cosines as plot_cosines,
    plot_figure_1 as plot_figure_1,
    plot_interval_gradient_norms as plot_interval_gradient_norms,
    plot_token_shares as plot_token_shares,
)
from .tuning import plot_tuning as plot_tuning
from .updates import (
    plot_directions as plot_directions,
    plot_influence as plot_influence,
    plot_movement as plot_movement,
    plot_norm_drivers as plot_norm_drivers,
)
