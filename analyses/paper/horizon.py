"""Does Reweight end with more probability on rare tokens than GRPO, because of which tokens it damps, and does it pay?

    python -m analyses.paper.horizon [--out figures]

Experiment B of docs/named-beforehand.md, which has the question, the runs, the test and what is concluded from each
outcome; the named contrasts were written before any run was whole. An arm is read when all of its seeds are there.
Mass and accuracy are means over a run's last three checkpoints; contrasts are tested by Welch's t test over seeds, with
Holm's correction over the three. Writes

    horizon.csv         a row per contrast: the three named ones, those shown beside without a claim, and each arm's
                        mass minus the start's; change: what Reweight does to the mass ("preserves", "adds", "neither")
    horizon_runs.csv    a row per run, with every number that is compared
    horizon_steps.csv   a row per run and checkpoint: mass, over all responses and by source, and training's numbers
    horizon.png         mass and training accuracy over the steps, by arm, and the contrasts
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.accuracy import sampled_name
from analyses.common.colors import COLORS
from analyses.common.contrasts import LEVEL, holm, mean_interval, welch
from analyses.common.experiments import labels, list_runs
from analyses.common.kept_runs import is_finished, read_tables
from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.read_runs import last_checkpoints, read_metrics, read_tests
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.measure.horizon import SCALE, TRACK
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, finish, paper_style

NAMED = (("reweight", "grpo", "mass"), ("reweight", "permuted-weights", "mass"), ("reweight", "grpo", "accuracy"))
"""Variant, baseline, number."""
MASSES = ("mass_on_start", "mass_on_grpo", "mass_on_reweight")
"""Mass on the responses of each source."""
BESIDE = (*MASSES, "greedy", "share", "entropy", "kl", "pass_at_16")
"""Numbers that were named and claim nothing."""
AFTERWARDS = ("text_entropy", "drop", "pass_at_4", "test_tokens", "early_share", "rise")
"""Numbers chosen once the outcome was known; drop: greedy minus sampled accuracy; early_share: over steps 101 to 150;
rise: training accuracy over steps 551 to 600 minus that over steps 351 to 400."""
SMALLEST = 0.04
"""Smallest effect of interest in accuracy."""
LAST = 50
"""Steps over which numbers of training are averaged, as many as between two checkpoints."""


def whole_arms() -> list[str]:
    """Return the variants of which every planned seed is finished."""
    runs = [run for run in list_runs(SCALE) if run.track == TRACK]
    left = {run.variant for run in runs if not is_finished(run)}
    return [variant for variant in dict.fromkeys(run.variant for run in runs) if variant not in left]


def read_arms(variants: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per run (variant, seed, and its numbers), and one per run and checkpoint.

    Columns of the second: variant, seed, step; mass, MASSES, text_entropy (on the same responses); training_accuracy,
    share, entropy and kl, means over the steps since the checkpoint before.
    """
    keys = ["variant", "seed"]
    tests = last_checkpoints(read_tests(variants, scale=SCALE, track=TRACK))
    renamed = {sampled_name(tests): "accuracy", "greedy_accuracy": "greedy"}
    renamed |= {"pass@4": "pass_at_4", "sampled_tokens": "test_tokens"}
    tests = tests[tests["level"] == "all"].rename(columns=renamed)
    metrics = read_metrics(variants, scale=SCALE, track=TRACK)
    metrics = metrics.rename(columns={"accuracy": "training_accuracy", "token_share_0": "share"})
    metrics["step"] = np.ceil(metrics["step"] / LAST).astype(int) * LAST
    trained = metrics.groupby([*keys, "step"])[["training_accuracy", "share", "entropy", "kl"]].mean()
    names = ("rare_mass", "hard")
    rare_mass, solved = ({arm: read_tables(SCALE, TRACK, arm, name) for arm in variants} for name in names)
    scores, hard = [], []
    for variant, seed in tests[keys].itertuples(index=False):
        # Sources count alike, whatever the length of their responses.
        scored = rare_mass[variant][seed].pivot(index="step", columns="source", values=["mass", "entropy"])
        means = {"mass": scored["mass"].mean(axis=1), "text_entropy": scored["entropy"].mean(axis=1)}
        scores.append(scored["mass"].add_prefix("mass_on_").assign(**means, variant=variant, seed=seed).reset_index())
        hard.append((solved[variant][seed]["correct"] > 0).mean())
    steps = pd.concat(scores, ignore_index=True).join(trained, on=[*keys, "step"]).sort_values([*keys, "step"])
    by_run = steps.groupby(keys)
    runs = tests[[*keys, *renamed.values()]].assign(pass_at_16=hard, drop=tests["greedy"] - tests["accuracy"])
    runs = runs.join(by_run.tail(3).groupby(keys)[["mass", *MASSES, "text_entropy"]].mean(), on=keys)
    runs = runs.join(by_run.last()[["share", "entropy", "kl"]], on=keys)
    at = {step: trained.xs(step, level="step") for step in (150, 400, 600)}
    rise = (at[600] - at[400])["training_accuracy"].rename("rise")
    return runs.join(at[150]["share"].rename("early_share"), on=keys).join(rise, on=keys), steps


def contrast(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per contrast, the named ones first.

    Columns: number, variant, baseline, seeds (the smaller arm's), mean and baseline_mean (the arms'), difference,
    lower, upper (Welch's 95 % interval), p, with_entropy (correlation with text_entropy over both arms' runs, each
    arm's mean taken away), named, p_holm and differs (corrected over all named ones), corrected_lower,
    corrected_upper, gain_excluded (of SMALLEST, in accuracy).
    """
    arms = list(dict.fromkeys(runs["variant"]))
    named = [pair for pair in NAMED if {*pair[:2]} <= {*arms}]
    others = [(variant, "grpo", number) for variant in arms if variant != "grpo" for number in ("mass", "accuracy")]
    shown = [(variant, "grpo", number) for variant in arms if variant != "grpo" for number in BESIDE + AFTERWARDS]
    tested = _test(runs, named)
    # An arm that is not whole counts with p = 1, so that what is read does not depend on when.
    missing = pd.DataFrame({"p": [1.0] * (len(NAMED) - len(named))}, index=range(len(named), len(NAMED)))
    claims = holm(pd.concat([tested, missing])).iloc[: len(named)].assign(named=True)
    level = 1 - (1 - LEVEL) / len(NAMED)
    corrected = _test(runs, named, level)
    claims["corrected_lower"], claims["corrected_upper"] = corrected["lower"], corrected["upper"]
    claims["gain_excluded"] = (claims["number"] == "accuracy") & (claims["corrected_upper"] < SMALLEST)
    beside = _test(runs, [pair for pair in others + shown if pair not in NAMED])
    claims = claims.astype({"seeds": int})
    return pd.concat([claims, beside.assign(named=False, differs=False, gain_excluded=False)], ignore_index=True)


def _test(runs: pd.DataFrame, pairs: Sequence[tuple[str, str, str]], level: float = LEVEL) -> pd.DataFrame:
    rows = []
    for variant, baseline, number in pairs:
        own, other = (runs.loc[runs["variant"] == name, number].to_numpy() for name in (variant, baseline))
        found = welch(own, other, level)
        both = runs[runs["variant"].isin([variant, baseline])].groupby("variant")
        rest = [both[name].transform(lambda of: of - of.mean()) for name in (number, "text_entropy")]
        together = np.corrcoef(*rest)[0, 1]
        rows.append((number, variant, baseline, min(len(own), len(other)), own.mean(), other.mean(), *found, together))
    columns = ["number", "variant", "baseline", "seeds", "mean", "baseline_mean", "difference", "lower", "upper", "p"]
    return pd.DataFrame(rows, columns=[*columns, "with_entropy"])


def subtract_start(runs: pd.DataFrame, start: float) -> pd.DataFrame:
    """Return a row per arm: its mass minus the start's, with its 95 % t interval over seeds; columns of `contrast`."""
    rows = []
    for arm, own in runs.groupby("variant", sort=False):
        found = dict(zip(("difference", "lower", "upper"), mean_interval(own["mass"] - start), strict=True))
        means = {"mean": own["mass"].mean(), "baseline_mean": start}
        rows.append({"number": "mass", "variant": arm, "baseline": "start", "seeds": len(own)} | means | found)
    return pd.DataFrame(rows).assign(named=False, differs=False, gain_excluded=False)


def judge_change(changes: pd.DataFrame) -> str:
    """Return what Reweight does to the mass, from each arm's difference from the start.

    "preserves" if GRPO's falls and Reweight's does not, "adds" if Reweight's rises, else "neither".
    """
    bounds = changes.set_index("variant")[["lower", "upper"]]
    if bounds.loc["reweight", "lower"] > 0:
        return "adds"
    return "preserves" if bounds.loc["grpo", "upper"] < 0 <= bounds.loc["reweight", "upper"] else "neither"


@paper_style()
def draw(steps: pd.DataFrame, contrasts: pd.DataFrame, start: float) -> Figure:
    """Draw each arm's mass and training accuracy over the steps (mean and 95 % t interval), and the contrasts."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.2, 2.7), layout="constrained")
    words = labels()
    for variant, own in steps.groupby("variant", sort=False):
        for axes, number in ((left, "mass"), (middle, "training_accuracy")):
            found = own.groupby("step")[number].agg(mean_interval)
            mean, lower, upper = np.array([*found]).T
            axes.plot(found.index, mean, color=COLORS[variant], label=words[variant], lw=1.4)
            axes.fill_between(found.index, lower, upper, color=COLORS[variant], alpha=0.15, lw=0)
    left.axhline(start, color=NEUTRAL, lw=0.7, ls="--")
    left.set(xlabel="step (dashed: the start)", ylabel="probability on π < ¼, fixed text")
    left.legend(frameon=False, fontsize=7)
    middle.set(xlabel="step", ylabel=f"training accuracy, means of {LAST} steps")
    shown = contrasts[contrasts["number"].isin(["mass", "accuracy"])].reset_index(drop=True)
    for place, row in shown.iterrows():
        color = COLORS[row["variant"]]
        right.hlines(place, row["lower"], row["upper"], color=color, lw=2)
        if row["named"]:
            right.hlines(place, row["corrected_lower"], row["corrected_upper"], color=color, lw=0.7)
        right.plot(row["difference"], place, "o", color=color, ms=4.5)
    right.axvline(0, color=NEUTRAL, lw=0.7, zorder=0)
    numbers = {"mass": "π < ¼", "accuracy": "test accuracy"}
    names = [f"{numbers[row.number]}:\n{words[row.variant]}\n− {words[row.baseline]}" for row in shown.itertuples()]
    right.set_yticks(range(len(names)), names, fontsize=7)
    right.set_ylim(len(names) - 0.5, -0.5)
    right.set(xlabel="difference (thin: corrected)")
    right.locator_params(axis="x", nbins=4)
    finish(left, steps)
    finish(middle, steps)
    finish(right, shown)
    return figure


def main(options: Options) -> None:
    arms = whole_arms()
    if not {"grpo", "reweight"} <= {*arms}:
        raise InputError(
            f"the runs of GRPO and Reweight of the track {TRACK} are not all made, and none is looked at before; make "
            f"them: python -m analyses.reproduce --scale {SCALE} --only horizon"
        )
    runs, steps = read_arms(arms)
    start = float(read_table("horizon", "rare_mass.csv", scale=SCALE)["mass"].mean())
    between, changes = contrast(runs), subtract_start(runs, start)
    contrasts = pd.concat([between, changes], ignore_index=True).assign(change=judge_change(changes))
    save_picture(draw(steps, between, start), options.at("horizon.png"), contrasts)
    write_csv(runs, options.at("horizon_runs.csv"), float_format="%.6g")
    write_csv(steps, options.at("horizon_steps.csv"), float_format="%.6g")
    print(contrasts.to_string(index=False, float_format="{:.4f}".format, na_rep="–"))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
