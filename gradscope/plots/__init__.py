"""Figures: DataFrame in, Axes out, the CSV of what is shown beside each."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "comparison": ["plot_comparison"],
        "layers": ["plot_figure_2", "plot_layers_by_interval", "plot_norm_against_one_minus_prob"],
        "proxies": ["plot_modules", "plot_proxies"],
        "style": [
            "NEUTRAL",
            "drawn_numbers",
            "finish",
            "interval_colors",
            "name_intervals",
            "new_axes",
            "new_panels",
            "paper_style",
            "require",
            "save_figure",
        ],
        "tokens": [
            "plot_advantages",
            "plot_cosines",
            "plot_figure_1",
            "plot_interval_gradient_norms",
            "plot_token_shares",
        ],
        "tuning": ["plot_tuning"],
        "updates": ["plot_directions", "plot_influence", "plot_movement", "plot_norm_drivers"],
    },
)
