"""Has a policy learnt, or only become more certain? Trained policies against the untrained one at equal entropy.

    python -m analyses.paper.sharpening [--out figures] [--scale cpu]

Sampled accuracy can rise because the policy has learnt, or only because it is surer of what it knew, which helps if
untrained greedy answers beat samples. So each trained policy (its last checkpoint) is compared with the untrained one
at the temperature at which the latter's samples have the same entropy, interpolated between measured temperatures
(analyses/measure/untrained.py; 0 is greedy), and both are also compared greedily.

Writes sharpening.png, its CSV (a row per run and level), and sharpening_contrasts.csv: gains over seeds, with Holm's
correction over the claims. There is one untrained policy, judged once, so no interval includes its sampling error.

The paper has no such control.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.accuracy import accuracy_by_people, within_shares
from analyses.common.colors import COLORS
from analyses.common.contrasts import holm, mean_interval, vary
from analyses.common.experiments import needs, test_of
from analyses.common.places import save_picture
from analyses.common.read_runs import read_responses, read_tests, read_untrained
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, finish, paper_style

GAINS = {
    "sampled at equal entropy": ("sampled", "untrained_matched"),
    "greedy": ("greedy", "untrained_greedy"),
    "sampled": ("sampled", "untrained_sampled"),
}
"""Gains over the untrained policy; the first two are claims."""
KINDS = {
    "sampled": ("o", "sampled"),
    "untrained_matched": ("_", "untrained, sampled at its entropy"),
    "greedy": ("^", "greedy"),
}


def table(scale: str, track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run and level: entropy and accuracies, and those of the untrained policy (`match`)."""
    variants = [variant for place, variant in needs("sharpening", scale) if place == track]
    tests = read_tests(variants, scale=scale, track=track)
    last = tests[tests["step"] == tests.groupby(["variant", "seed"])["step"].transform("max")]
    entropies = measure_entropy(read_responses(variants, scale=scale, track=track), last)
    runs = accuracy_by_people(last).merge(entropies, on=["variant", "seed", "level"])
    untrained = {level: own for level, own in read_untrained(scale).groupby("level")}
    at = test_of(scale, track).temperature
    both = zip(runs["level"], runs["entropy"], strict=True)
    matched = [match(entropy, untrained[level], at) for level, entropy in both]
    return pd.concat([runs, pd.DataFrame(matched)], axis=1)


def measure_entropy(responses: pd.DataFrame, tests: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run and level, "all" too: the entropy of its sampled answers in nats per token.

    The mean −log π of sampled tokens estimates it. If only a part of the test's questions was answered, levels are
    weighted in "all" as in the test.

    responses: from `read_responses`; tests: a row per run and level with its number of questions.
    """
    keys = ["variant", "seed", "level"]
    sampled = responses[~responses["greedy"]].assign(level=responses["level"].astype(str))
    means = sampled.groupby(keys)[["logprob", "tokens"]].mean()
    sums = means.mul(tests.set_index(keys)["questions"].reindex(means.index), axis=0)
    whole = sums.groupby(keys[:2]).sum().assign(level="all").set_index("level", append=True)
    sums = pd.concat([sums, whole])
    return (-sums["logprob"] / sums["tokens"]).rename("entropy").reset_index()


def match(entropy: float, untrained: pd.DataFrame, temperature: float) -> dict[str, float]:
    """Interpolate the untrained policy linearly between temperatures to where its entropy is the trained one's.

    untrained: a row per temperature; temperature: the test's. Raises InputError if entropy does not rise with
    temperature, or never reaches the trained policy's.
    """
    rows = untrained.sort_values("temperature")
    [tested] = rows[rows["temperature"] == temperature].to_dict("records")
    entropies = [0.0, *rows["entropy"]]
    if (np.diff(entropies) <= 0).any():
        raise InputError(f"the untrained policy's entropies {rows['entropy'].round(4).to_list()} do not rise; ask more")
    if entropy > entropies[-1]:
        raise InputError(
            f"a trained policy's entropy, {entropy:.4g}, is above the untrained one's at the highest temperature, "
            f"{rows['temperature'].max():g}; add higher ones to analyses/measure/untrained.py and measure again"
        )
    return {
        "matched_temperature": float(np.interp(entropy, entropies, [0.0, *rows["temperature"]])),
        "untrained_matched": float(np.interp(entropy, entropies, [tested["greedy"], *rows["sampled"]])),
        "untrained_sampled": float(tested["sampled"]),
        "untrained_greedy": float(tested["greedy"]),
        "untrained_entropy": float(tested["entropy"]),
    }


def compare_gains(results: pd.DataFrame) -> pd.DataFrame:
    """Return a row per level, gain and variant: seeds, mean, 95 % t interval, p; Holm's correction over the claims.

    Claims are the first two gains over all puzzles; the rest is corrected separately.
    """
    rows = []
    for level, own in results.groupby("level", sort=False):
        for place, (gain, (after, before)) in enumerate(GAINS.items()):
            family = "claims" if level == "all" and place < 2 else "others"
            for (variant, label), runs in own.groupby(["variant", "label"], sort=False):
                values = runs[after] - runs[before]
                mean, lower, upper = mean_interval(values)
                p = float(stats.ttest_1samp(values, 0.0).pvalue) if vary(values) else np.nan
                row = {"family": family, "level": level, "gain": gain, "variant": variant, "label": label}
                rows.append(row | {"seeds": len(values), "mean": mean, "lower": lower, "upper": upper, "p": p})
    frame = pd.DataFrame(rows).sort_values("family", kind="stable")
    return pd.concat([holm(own) for _, own in frame.groupby("family")], ignore_index=True)


@paper_style()
def draw(results: pd.DataFrame) -> Figure:
    """Draw accuracy on all puzzles, sampled and greedy, a mean with its interval, beside the untrained policy's."""
    figure, ax = plt.subplots(figsize=(6.0, 3.0), layout="constrained")
    results = results[results["level"] == "all"]
    names, drawn = [], []
    for place, ((variant, label), own) in enumerate(results.groupby(["variant", "label"], sort=False)):
        names.append(f"{label}\n({len(own)} seed{'s' if len(own) > 1 else ''})")
        for shift, (kind, (marker, words)) in zip((-0.15, 0.0, 0.15), KINDS.items(), strict=True):
            mean, lower, upper = mean_interval(own[kind])
            color = NEUTRAL if kind == "untrained_matched" else COLORS[variant]
            size = 12 if marker == "_" else 4.5
            error, named = [[mean - lower], [upper - mean]], words if place == 0 else None
            ax.errorbar(place + shift, mean, error, fmt=marker, markersize=size, color=color, elinewidth=1, label=named)
            drawn.append({"variant": variant, "kind": kind, "mean": mean, "lower": lower, "upper": upper})
    for kind, line in (("untrained_sampled", "-"), ("untrained_greedy", ":")):
        level = results[kind].iloc[0]
        ax.axhline(level, color=NEUTRAL, linewidth=0.8, linestyle=line, zorder=0)
        ax.text(len(names) - 0.5, level, " " + kind.replace("_", ", "), va="center", fontsize=7.5)
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel="accuracy on the test", xlim=(-0.5, len(names) - 0.5), title="Mean and 95 % interval over seeds")
    within_shares(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    finish(ax, pd.DataFrame(drawn))
    return figure


def main(options: Options) -> None:
    results = table(options.scale)
    contrasts = compare_gains(results)
    save_picture(draw(results), options.at("sharpening.png"), results)
    write_table(contrasts, options.at("sharpening_contrasts.md"))
    print(contrasts[contrasts["level"] == "all"].to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
