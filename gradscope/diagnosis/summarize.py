"""What `gradscope measure` prints and draws: a view of the parts that need a table and its summed gradients alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from gradscope.diagnosis.diagnose import assemble, look_at, say
from gradscope.diagnosis.format import number_words, share_words
from gradscope.diagnosis.page.page import Figure
from gradscope.diagnosis.page.sheets import Sheets
from gradscope.diagnosis.parts import PARTS
from gradscope.diagnosis.products import make_products
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.errors import InputError
from gradscope.gradients import LOGITS, PARAMETERS, MeasureSettings, Resources
from gradscope.intervals import name_interval
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import RunFolder, track, write_text
from gradscope.theory import TheoryReport, theory_report

FIGURES, SUMMARY, THEORY = "figures", "figures/summary.txt", "figures/theory.txt"
"""Paths in a run's folder of its figures, the printed summary, and the check of Prop. 4.2 on its tokens."""
VIEWED = ("layers", "dominance", "summed", "signal", "theory", "modules")
"""Parts, in the order of the sentences."""
COLUMNS = (
    ("tokens", "token_share", "none"),
    ("energy", "squared_share", "raw"),
    ("summed gradient", "gradient_share", "raw"),
)
"""Columns of the printed table: words, statistic and metric."""
ENOUGH = 30
"""Minimum number of tokens to report a fitted power."""


def summarize(
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame,
    settings: MeasureSettings,
    *,
    resources: Resources | None = None,
    minutes: float | None = None,
    verdict_minutes: float | None = None,
) -> Diagnosis | None:
    """Diagnose a measured table by its sums alone: no step is predicted or taken, and nothing is compared.

    table: from `measure(policy, batch, settings)`. minutes: limit for the summed gradients. Other arguments are those
    of `diagnose`; all but the main process get None.
    """
    resources = (resources or Resources()).settle(policy.device)
    own = {"gradient_memory": resources.vectors, "minutes": minutes, "seed": settings.seed}
    given = {"table": table, "resources": resources, "verdict_minutes": verdict_minutes}
    m = look_at(policy, batch, DiagnosisSettings(loss=settings.loss, **own), None, own_loss=True, **given)
    make_products(m, ["sums"])
    return say(assemble(m, {name: PARTS[name] for name in VIEWED})) if m.processes.is_main else None


def describe_summary(found: Diagnosis) -> str:
    """Return the parts' sentences, and a table of the intervals."""
    few = found.scope.supply.too_few
    said = [finding.statement for finding in found.findings]
    notes = [str(note) for note in found.notes if note.kind in ("sampled-norms", "inexact", "fewer-sums")]
    lines = [few, *said] if few and few not in "".join(said) else said
    lines.append(f"Norms and sums are over {found.scope.parameters}.")
    return "\n\n".join(["\n".join(lines), _tabulate(found).to_string(index=False), *notes])


def _tabulate(found: Diagnosis) -> pd.DataFrame:
    """Return a row per interval: shares, and mean norms of single tokens."""
    rows: dict[str, list[str]] = {"interval": [name_interval(label) for label in found.labels]}
    for words, statistic, metric in COLUMNS:
        picked = [found.pick(statistic, metric, label) for label in found.labels]
        if all(row is not None for row in picked):
            rows[words] = [share_words(row) for row in picked]
    layers = found.frames["layers"]
    norms = layers[layers["quantity"] == PARAMETERS]
    rows["mean ‖g‖"] = [number_words(row) for _, row in norms.iterrows()]
    return pd.DataFrame(rows)


def theory_words(theory: TheoryReport) -> str:
    """Report how Prop. 4.2 and powers of 1−π fit these tokens."""
    powers, words = theory.powers, []
    fits = powers[(powers["quantity"] != LOGITS) & (powers["tokens"] >= ENOUGH)].dropna(subset="slope")
    if len(fits):
        fits = fits.sort_values("slope")
        least, most = _power(fits.iloc[0]), _power(fits.iloc[-1])
        words.append(
            f"Below the logits, norms grow like (1−π)^s with s from {least} to {most} by layer (theory: 1, √ law: ½; "
            f"[95 %]), fitted on the {int(powers['tokens'].max()):,} tokens that are not nearly certain; Prop. 4.2 "
            "bounds norms and does not fix s."
        )
    return "\n\n".join([*words, "Prop. 4.2 on these tokens:", str(theory)])


def _power(fit: pd.Series) -> str:
    """Format a power, with its interval if there is one."""
    between = f" [{fit['slope_lower']:.2f}, {fit['slope_upper']:.2f}]" if np.isfinite(fit["slope_lower"]) else ""
    return f"{fit['slope']:.2f}{between}"


def add_summary(
    folder: RunFolder,
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame,
    settings: MeasureSettings,
    *,
    resources: Resources,
    minutes: float | None = None,
    gradient_memory: int | None = None,
) -> None:
    """Add figures and summary to the folder of a finished measurement, unless they exist.

    With several processes, all call this: all sum gradients, then the main process draws and writes.

    gradient_memory: bytes for vectors as requested; existing figures are reused only if it agrees. resources: resolved;
    other arguments are those of `summarize`.
    """
    drawn, processes = {"gradient_memory": gradient_memory}, resources.processes
    # Earlier versions wrote more settings there.
    had = processes.is_main and drawn.items() <= ((folder.manifest or {}).get("figures") or {}).items()
    if processes.gather([had and (folder.folder / SUMMARY).is_file()])[0]:
        return
    known = {"minutes": minutes, "verdict_minutes": folder.manifest.get("verdict_minutes")}
    found = summarize(policy, batch, table, settings, resources=resources, **known)
    if found is None:
        return
    with folder.writing():
        folder.stage()
        write_figures(folder.staged / FIGURES, found)
        told = {} if found.sums_plan is None else {"summed_gradients": asdict(found.sums_plan)}
        folder.publish(folder.manifest | {"figures": drawn, **told})


def write_figures(folder: Path, found: Diagnosis) -> None:
    """Write the parts' figures, the summary and, if enough tokens were measured, theory.txt."""
    from gradscope import plots

    folder.mkdir(parents=True, exist_ok=True)
    sheets, progress = Sheets(), found.measured.jacobian.resources.progress
    parts = [part for name, part in found.parts.items() if name in found.rows and hasattr(part, "show")]
    for part in track(parts, "drawing", progress, unit="parts"):
        for block in part.show(found, sheets):
            if isinstance(block, Figure):
                plots.save_figure(block.drawing, folder / f"{Path(block.csv).stem}.png")
    if any(name.startswith(f"{PARAMETERS}.") for name in found.table):
        plots.save_figure(plots.plot_modules(found.table), folder / "modules.png")
    rng = np.random.default_rng(found.scope.settings.seed)
    try:
        theory = theory_report(found.table, vocab_size=found.measured.policy.vocab_size, seed=rng)
    except InputError:  # too few measured tokens for a fit
        pass
    else:
        write_text(folder / Path(THEORY).name, f"{theory_words(theory)}\n")
    write_text(folder / Path(SUMMARY).name, f"{describe_summary(found)}\n")
