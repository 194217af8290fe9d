"""Where a picture, a table or its numbers belong below figures/: a folder per question, the CSVs in its data/."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from analyses.common.experiments import KEPT, RUNS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FOLDERS: dict[str, tuple[str, ...]] = {
    "pretrained": ("smollm2", "gemma3", "real_language"),
    "controls": (
        *("controls", "rates", "rare_tokens", "clipping", "horizon", "field", "signal", "over_training"),
        *("dominance_adamw", "batch_sizes", "kinds", "compare", "prediction", "sharpening", "preferences"),
    ),
    "theory": ("layer_constants", "drivers", "proxies", "optimal_baseline", "norm_against_one_minus_prob"),
    "cost": ("benchmark", "cost_growth", "gpu", "minutes", "sampling_designs", "spikes", "architectures"),
    "verdicts": ("verdicts", "conformance"),
}
"""Folder → how the names begin of what is in it; whatever begins otherwise is a figure or table of the paper."""


FINDINGS = Path(__file__).parents[1] / "pages/findings.toml"


class Finding(NamedTuple):
    """What a picture shows."""

    module: str
    """What draws it, below analyses; empty: nothing that is kept."""
    says: str


@cache
def findings() -> dict[str, dict[str, Finding]]:
    """Return {folder of figures/: {picture: what it shows}}."""
    read = tomllib.loads(FINDINGS.read_text(encoding="utf-8"))
    return {folder: {name: Finding(*told) for name, told in own.items()} for folder, own in read.items()}


def place(out: Path, name: str) -> Path:
    """Return where a file belongs below `out`; SCALE/NAME is drawn from that scale's runs, NAME from the main one's.

    >>> [place(Path("figures"), name).as_posix() for name in ("fig4.png", "certain/fig4.csv", "gpu_checks.csv")]
    ['figures/paper/embedded/fig4.png', 'figures/paper/certain/data/fig4.csv', 'figures/cost/data/gpu_checks.csv']
    """
    scale, _, file = name.rpartition("/")
    own = (folder for folder, begins in FOLDERS.items() if file.startswith(begins))
    folder = out / (f"paper/{scale}" if scale else next(own, "paper/embedded"))
    return folder / "data" / file if file.endswith(".csv") else folder / file


def data_of(picture: Path) -> Path:
    """Return the CSV of a picture or a table in Markdown."""
    return picture.parent / "data" / f"{picture.stem}.csv"


def save_picture(figure: Figure, path: Path, data: pd.DataFrame | None = None) -> None:
    """Write a picture, and its numbers where `data_of` has them; otherwise as gradscope.plots.save_figure.

    What it shows is its title, if it is drawn from the runs that are kept: others may show something else.
    """
    from matplotlib.figure import Figure

    from gradscope.plots import headline, save_figure

    own = next((told for folder, told in findings().items() if path.parent.as_posix().endswith(f"/{folder}")), {})
    if path.stem in own and RUNS == KEPT:
        while not isinstance(figure, Figure):
            figure = figure.figure
        headline(figure, own[path.stem].says)
    save_figure(figure, path, data)
    data_of(path).parent.mkdir(exist_ok=True)
    path.with_suffix(".csv").replace(data_of(path))
