"""The runs of a pretrained policy on word problems: gates, learning rates, and progress.

    python -m analyses.paper.words_gates [--out figures/words]

Named before any of these runs was made (paper_repro.md). The gates are judged on plain GRPO, at each of two rates, by
means over its validation seeds: accuracy on validation problems before training (the measurement `words_start`) and
after it (mean of the last three checkpoints), and the share of the rollouts' tokens with π < ¼ (mean of three steps
around the one named). Each method's rate is the one with its higher mean validation accuracy, or GRPO's if the two
differ by less than CLOSE. Missing runs are listed with the command that makes them.

Writes words_gates.csv (a row per rate and gate), words_rates.csv (a row per method and rate), words_runs.csv (planned
and made, by purpose) and words_power.csv (what the decision's seeds can detect, by the spread of a difference over
seeds).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import tyro

from analyses.common.accuracy import accuracy_by_people
from analyses.common.contrasts import half_width, power_of
from analyses.common.experiments import RUNS, configure, labels, list_runs, needs
from analyses.common.measurements import is_measured, read_table
from analyses.common.read_runs import has_runs, read_metrics, read_tests
from analyses.common.script import WordsOptions as Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.decision import PLANS, SMALLEST
from gradscope.errors import InputError

SCALE = "words"
RATED = ("varied-low", "varied-high")
TRACKS = {"words-low": "words_start", **dict.fromkeys(RATED, "words_start_varied")}
"""Track of the gates → the measurement of its policy before training. The first one's warm start did not pass."""
PARTS = {"words_gates": "gates", "words_rates": "learning rates", "decision": "decision"}
"""{figure of analyses/runs.toml: purpose of its runs}; runs of an earlier figure are not counted again."""
GATES = {
    "right before training": ("start", 0.15, 0.40),
    "gain": ("gain", 0.15, np.inf),
    "right after training": ("end", -np.inf, 0.85),
    "tokens with π < ¼ at the start": ("low_1", 0.08, np.inf),
    "tokens with π < ¼ at step 30": ("low_30", 0.08, np.inf),
}
"""{gate: bounds of its number}."""
AROUND = {"low_1": (1, 2, 3), "low_30": (29, 30, 31)}
"""Steps whose mean share is taken."""
CLOSE = 0.03
SPREADS = (0.03, 0.04, 0.05, 0.06)
NOT_RUN = "not run"


def read_validation(track: str) -> pd.DataFrame:
    """Return a row per judged run of a track: variant, seed, sampled (accuracy on validation problems)."""
    if not has_runs(SCALE, track):
        return pd.DataFrame(columns=["variant", "seed", "sampled"])
    wanted = (*needs("words_gates", SCALE), *needs("words_rates", SCALE))
    variants = list(dict.fromkeys(variant for place, variant in wanted if place == track))
    found = accuracy_by_people(read_tests(variants, scale=SCALE, track=track))
    return found[found["level"] == "all"][["variant", "seed", "sampled"]]


def read_plain(track: str) -> pd.DataFrame:
    """Return a row per judged run of plain GRPO: seed, and the numbers that GATES names."""
    runs = read_validation(track).query("variant == 'grpo'").rename(columns={"sampled": "end"})
    runs["start"] = read_start(track)
    runs["gain"] = runs["end"] - runs["start"]
    if len(runs):
        shares = read_metrics(["grpo"], scale=SCALE, track=track).set_index(["seed", "step"])["token_share_0"]
        for name, steps in AROUND.items():
            runs[name] = [shares.loc[seed].reindex(steps).mean(skipna=False) for seed in runs["seed"]]
    return runs.reindex(columns=["seed", *(number for number, *_ in GATES.values())])


def read_start(track: str) -> float:
    """Return accuracy on the validation problems before training; NaN if it is not measured."""
    if not is_measured(TRACKS[track], SCALE):
        return np.nan
    table = read_table(TRACKS[track], "start.csv", scale=SCALE)
    return float(table.loc[table["level"] == "all", "sampled"].iloc[0])


def judge_gates() -> pd.DataFrame:
    """Return a row per rate and gate: mean over seeds, bounds, and whether it passes."""
    rows = []
    for track in TRACKS:
        runs = read_plain(track)
        rate = configure(SCALE, track, "grpo").learning_rate
        planned = {run.seed for run in list_runs(SCALE) if (run.track, run.variant) == (track, "grpo")}
        whole = planned <= set(runs["seed"]) and is_measured(TRACKS[track], SCALE)
        for gate, (number, lower, upper) in GATES.items():
            value = float(runs[number].mean(skipna=False)) if whole else np.nan
            state = ("passes" if lower <= value <= upper else "fails") if whole else NOT_RUN
            row = {"track": track, "learning_rate": rate, "seeds": len(runs), "gate": gate, "value": value}
            rows.append(row | {"lower": lower, "upper": upper, "state": state})
    return pd.DataFrame(rows)


def choose_rates() -> pd.DataFrame:
    """Return a row per method and rate: seeds, mean accuracy, whether it is chosen, and the decision's planned rate."""
    runs = pd.concat([read_validation(track).assign(track=track) for track in RATED])
    planned = {(run.track, run.variant, run.seed) for run in list_runs(SCALE) if run.track in RATED}
    whole = planned == set(runs[["track", "variant", "seed"]].itertuples(index=False, name=None))
    rows, best = [], {}
    for variant in dict.fromkeys(variant for _, variant in needs("words_rates", SCALE)):
        own = runs[runs["variant"] == variant].groupby("track")["sampled"].agg(["size", "mean"]).reindex(RATED)
        if whole:
            close = variant != "grpo" and abs(own["mean"].diff().iloc[-1]) < CLOSE
            best[variant] = best["grpo"] if close else own["mean"].idxmax()
        for track, (seeds, mean) in own.iterrows():
            row = {"variant": variant, "label": labels()[variant], "track": track}
            row |= {"learning_rate": configure(SCALE, track, variant).learning_rate}
            row |= {"seeds": 0 if np.isnan(seeds) else int(seeds), "mean": mean, "chosen": best.get(variant) == track}
            rows.append(row | {"in_decision": configure(SCALE, "words", variant).learning_rate})
    return pd.DataFrame(rows)


def count_runs() -> pd.DataFrame:
    """Return a row per part: runs planned, runs judged, and the command that makes the missing ones."""
    rows, seen = [], set()
    for figure, part in PARTS.items():
        wanted = set(needs(figure, SCALE))
        runs = [run for run in list_runs(SCALE) if (run.track, run.variant) in wanted and run.place not in seen]
        seen |= {run.place for run in runs}
        made = sum((RUNS / run.place / "test.csv").is_file() for run in runs)
        command = f"python -m analyses.reproduce --scale {SCALE} --only {figure} --jobs 2"
        rows.append({"part": part, "planned": len(runs), "made": made, "command": command})
    return pd.DataFrame(rows)


def tell_power() -> pd.DataFrame:
    """Return a row per number of seeds and spread: the power for a true difference of SMALLEST, and the half-width."""
    plan = PLANS[SCALE]
    return pd.DataFrame(
        {
            "seeds": seeds,
            "spread": spread,
            "power": power_of(SMALLEST, spread, seeds, claims=len(plan.named)),
            "half_width": half_width(spread, seeds),
        }
        for seeds in plan.seeds
        for spread in SPREADS
    )


def main(options: Options) -> None:
    if options.scale != SCALE:
        raise InputError(f"--scale is {options.scale}; these gates were named for the runs of scale {SCALE} alone")
    tables = {"gates": judge_gates(), "rates": choose_rates(), "runs": count_runs(), "power": tell_power()}
    for name, table in tables.items():
        write_csv(table, options.out / f"words_{name}.csv")
        print(table.to_string(index=False, float_format="{:.3g}".format, na_rep="–"), end="\n\n")
    fails = tables["gates"].query("state == 'fails'")
    for row in fails.itertuples():
        print(f"fails at a rate of {row.learning_rate:g}: {row.gate}, {row.value:.3f}")
    for row in tables["rates"].query("chosen and learning_rate != in_decision").itertuples():
        print(f"runs.toml has {row.in_decision:g} for {row.variant} in the decision; put {row.learning_rate:g} there")
    for row in tables["runs"].query("made < planned").itertuples():
        print(f"{row.part}: {row.made} of {row.planned} runs; make the others: {row.command}")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
