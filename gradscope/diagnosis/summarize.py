"""Sum up a measurement: its summary, and the paper's first figures."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from gradscope.diagnosis.summary import Summary
from gradscope.diagnosis.update import supply_of
from gradscope.errors import InputError
from gradscope.gradients import (
    LAYER,
    LOGITS,
    PARAMETERS,
    IntervalGradients,
    MeasureSettings,
    Resources,
    TokenJacobian,
    sampling_probabilities,
    statistics_of,
    sum_intervals,
)
from gradscope.intervals import summarize
from gradscope.objective import resolve_advantages
from gradscope.policy import Policy
from gradscope.resampling import Resampling, Seed
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress, RunFolder, track, write_text
from gradscope.theory import measured_cones, theory_report

FIGURES, SUMMARY, THEORY = "figures", "figures/summary.txt", "figures/theory.txt"
"""Paths in a run's folder of its figures, the printed summary, and the check of Prop. 4.2 on its tokens."""
PAPER_NORMS = (0.71, 0.36, 0.24, 0.15, 0.82)
"""Fig. 1 (d) of the paper, read off the image: four intervals, then all tokens."""


def summarize_measurement(
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame,
    settings: MeasureSettings,
    *,
    resources: Resources | None = None,
    verdict_minutes: float | None = None,
) -> Summary:
    """Compute the summed gradients, which the table lacks, and collect everything for the summary.

    table: from `measure(policy, batch, settings)`, at the batch's temperatures. resources: for the summed gradients;
    with a deadline, they cover the prompts that are summed by then. verdict_minutes: the time limit that would give a
    verdict, if a shorter one left prompts out.
    """
    supply = supply_of(table, batch, verdict_minutes)
    resources, batch = (resources or Resources()).settle(policy.device), batch.of_prompts(table["group"].unique())
    over, gradients = policy.parameters_in_words, None
    if table["weight"].notna().all():
        # The table's own intervals (by π), so that shares of tokens and of the gradient refer to the same tokens.
        intervals = torch.zeros(batch.input_ids.shape, dtype=torch.long)
        intervals[batch.response_mask] = torch.tensor(table["interval"].tolist())
        known = replace(batch, advantages=resolve_advantages(batch))
        J = TokenJacobian(policy, known, resources, statistics=statistics_of(table, policy, batch, resources.processes))
        gradients = sum_intervals(J, settings.loss, intervals=intervals)
    rng = np.random.default_rng(settings.seed)
    try:
        theory = theory_report(table, vocab_size=policy.vocab_size, seed=rng)
    except InputError:  # too few measured tokens for a fit; the rest of the summary is valid
        theory = None
    return Summary(interval_summary(table, gradients, seed=rng), gradients, theory, over, supply.of_prompts, supply)


def interval_summary(table: pd.DataFrame, gradients: IntervalGradients | None, *, seed: Seed = 0) -> pd.DataFrame:
    """Return tokens, token_share, mean_norm with its 95 % interval over prompts, squared_share, … for each interval.

    squared_share: share of Σ‖w_t g_t‖². If an interval was measured in part, mean_norm and squared_share are estimates
    for all of its tokens (`intervals.summarize`). gradient_norm, gradient_share: ‖G_a‖/‖G‖ and ⟨G_a, G⟩/‖G‖², which
    are different quantities.
    """
    out = _mean_norms(table, seed)
    if gradients is not None:
        drawn = {"resampling": Resampling(seed), "probabilities": sampling_probabilities(table)}
        args = (table["interval"], table["group"])
        sizes = table["weight"] * table[LOGITS]
        squares = summarize(table["weight"] * table[PARAMETERS], *args, statistic="rms", sizes=sizes, **drawn)
        total = squares["value"].fillna(0.0) ** 2 * squares["num_tokens"]
        out["squared_share"] = total / total.sum()
        out = out.join(_gradient_columns(gradients))
    return out


def _mean_norms(table: pd.DataFrame, seed: Seed) -> pd.DataFrame:
    drawn = {"resampling": Resampling(seed), "probabilities": sampling_probabilities(table)}
    mean = summarize(table[PARAMETERS], table["interval"], table["group"], sizes=table[LOGITS], **drawn)
    return pd.DataFrame(
        {
            "interval": mean["label"],
            "tokens": mean["num_tokens"],
            "measured": mean["num_measured"],
            "token_share": mean["num_tokens"] / mean["num_tokens"].sum(),
            "mean_norm": mean["value"],
            "norm_lower": mean["lower"],
            "norm_upper": mean["upper"],
        }
    )


def _gradient_columns(gradients: IntervalGradients) -> pd.DataFrame:
    sums = gradients.table.iloc[:-1]
    columns = {"gradient_norm": sums["norm"] / gradients.table["norm"].iloc[-1], "gradient_share": sums["share"]}
    if "share_error" in sums:
        columns["gradient_share_error"] = sums["share_error"]
    return pd.DataFrame(columns | {"half_cosine": sums["half_cosine"]})


def add_summary(
    folder: RunFolder,
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame,
    settings: MeasureSettings,
    *,
    resources: Resources,
    gradient_memory: int | None = None,
) -> None:
    """Add figures and summary to the folder of a finished measurement, unless they exist.

    With several processes, all call this: all sum gradients, then the main process draws and writes.

    Args:
        resources: Resolved resources for the summed gradients.
        gradient_memory: Bytes for vectors as requested; existing figures are reused only if it agrees.
    """
    drawn, processes = {"gradient_memory": gradient_memory}, resources.processes
    # Earlier versions wrote more settings there.
    known = processes.is_main and drawn.items() <= ((folder.manifest or {}).get("figures") or {}).items()
    if processes.gather([known and (folder.folder / SUMMARY).is_file()])[0]:
        return
    with ExitStack() as held:
        with processes.together():
            if processes.is_main:
                held.enter_context(folder.writing())
                folder.stage()
        minutes = folder.manifest.get("verdict_minutes")
        summary = summarize_measurement(policy, batch, table, settings, resources=resources, verdict_minutes=minutes)
        if not processes.is_main:
            return
        write_figures(folder.staged / FIGURES, policy, table, summary, progress=resources.progress)
        told = {} if summary.gradients is None else {"summed_gradients": asdict(summary.gradients.plan)}
        folder.publish(folder.manifest | {"figures": drawn, **told})


def write_figures(
    folder: Path, policy: Policy, table: pd.DataFrame, summary: Summary, *, progress: bool | Progress = False
) -> None:
    """Write Fig. 1 (a, b, d), Fig. 2, norms by layer, interval and 1−π, cosines, the summary and theory."""
    from gradscope import plots

    folder.mkdir(parents=True, exist_ok=True)
    over = {"parameters": summary.parameters}
    draw = {"layers_by_interval": lambda: plots.plot_layers_by_interval(table, **over)}
    if summary.gradients is not None:
        norms = summary.gradients.table.assign(paper=PAPER_NORMS)
        draw["figure_1"] = lambda: plots.plot_figure_1(table, norms)
        draw["cosines"] = lambda: plots.plot_cosines(summary.gradients.cosines)
    else:
        draw["token_shares"] = lambda: plots.plot_token_shares(table)
    if summary.theory is not None:
        depth = sum(name.startswith(LAYER) for name in table.columns) - 1
        shown = [f"{LAYER}{layer}" for layer in sorted({0, depth // 2, depth})]
        powers = summary.theory.powers
        draw["figure_2"] = lambda: plots.plot_figure_2(
            table, measured_cones(summary.theory, shown), vocab_size=policy.vocab_size
        )
        draw["norm_against_one_minus_prob"] = lambda: plots.plot_norm_against_one_minus_prob(
            table, powers[powers["quantity"].isin([*shown, PARAMETERS])], **over
        )
    if any(name.startswith(f"{PARAMETERS}.") for name in table):
        draw["modules"] = lambda: plots.plot_modules(table)
    for name, make in track(draw.items(), "drawing", progress, unit="figures"):
        plots.save_figure(make(), folder / f"{name}.png")
    if words := summary.theory_words():
        write_text(folder / Path(THEORY).name, f"{words}\n")
    write_text(folder / Path(SUMMARY).name, f"{summary}\n")
