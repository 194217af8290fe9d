"""Redraw all figures and tables from the runs and measurements in the repository.

    python -m analyses.figures [--out figures] [--scale cpu] [--only fig4 fig6]

By default those listed in `drawn` of analyses/runs.toml: scale cpu goes to OUT, another one to OUT/SCALE. Nothing is
trained, no policy is loaded, and no network is needed. Each script begins with what it draws and how that differs from
the paper; `python -m analyses.paper.NAME` draws one alone and prints its numbers. Figures whose runs are missing are
skipped and named at the end, with exit status 2.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import tyro

from analyses.common.experiments import drawn_as, read
from analyses.common.script import MAIN_SCALE, exit_with
from gradscope.errors import InputError, first_line

SCRIPTS = (
    *("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7_8", "fig9_10", "fig11_12"),
    *("table1", "tables2_4", "words", "table6"),
    *("decision", "controls", "sharpening", "over_training", "dominance_adamw", "drivers", "proxies"),
    *("base_policy", "kinds", "batch_sizes", "layer_constants", "cost_growth"),
    *("real_language", "preferences", "optimal_baseline"),
    *("words_gates", "words_compare", "pretrained_batches", "words_trained"),
)
"""Modules of analyses/paper with Options(out, scale) and main(options), in drawing order."""
BOTH = ("rates", "prediction", "rare_tokens", "clipping", "signal", "horizon")
"""Modules with Options(out) that are drawn at scale cpu: of several scales together, or of that scale alone."""


@dataclass(frozen=True)
class Options:
    out: Path = Path("figures")
    scale: str | None = None
    """The scale of analyses/runs.toml whose runs are drawn."""
    only: tuple[str, ...] = ()
    """Scripts to run, or pages of the paper such as fig7 or table3; none: all."""


def draw_one(name: str, scale: str, out: Path) -> str | None:
    """Run a script without its output; return its complaint if its data are missing."""
    script = importlib.import_module(f"analyses.paper.{name}")
    try:
        with matplotlib.rc_context(), contextlib.redirect_stdout(io.StringIO()):
            script.main(script.Options(out=out) if name in BOTH else script.Options(out=out, scale=scale))
    except InputError as error:
        return first_line(error)
    finally:
        plt.close("all")
    return None


def main(options: Options) -> int:
    """Run the scripts; return 2 if data were missing, else 0."""
    wanted = tuple(dict.fromkeys(map(drawn_as, options.only)))
    known = (*SCRIPTS, *BOTH) if options.scale in (None, MAIN_SCALE) else SCRIPTS
    if unknown := [name for name in wanted if name not in known]:
        where = "" if options.scale is None else f" of scale {options.scale}"
        raise InputError(f"no figure{where} is called {unknown[0]!r}; give some of {', '.join(known)}")
    drawn = read()["drawn"] if options.scale is None else {options.scale: known}
    matplotlib.use("agg")
    missing = []
    for scale, names in drawn.items():
        for name in names:
            if wanted and name not in wanted:
                continue
            start = time.perf_counter()
            if complaint := draw_one(name, scale, options.out):
                missing.append(f"{scale}, {name}: {complaint}")
            took = "not drawn" if complaint else f"{time.perf_counter() - start:.1f} s"
            print(f"{scale}, {name}: {took}", flush=True)
    for line in missing:
        print(line, file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
