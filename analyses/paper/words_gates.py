"""The gates of runs of a pretrained policy on word problems, and how many of their runs are made.

    python -m analyses.paper.words_gates [--out figures]

Named before any of these runs was made (docs/preregistrations.md). The gates are judged on plain GRPO, at each of two
rates, by means over its validation seeds: accuracy on validation problems before training (the measurement
`words_start`) and after it (mean of the last three checkpoints), and the share of the rollouts' tokens with π < ¼ (mean
of three steps around the one named). Missing runs are listed with the command that makes them.

Writes words_gates.csv (a row per track and gate) and words_runs.csv (planned and made).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import tyro

from analyses.common.accuracy import accuracy_by_people
from analyses.common.experiments import configure, list_runs, needs
from analyses.common.kept_runs import list_seeds
from analyses.common.measurements import is_measured, read_table
from analyses.common.read_runs import has_runs, read_metrics, read_tests
from analyses.common.script import WordsOptions as Options, exit_with
from analyses.common.tables import write_csv
from gradscope.errors import InputError

SCALE = "words"
TRACKS = {"words-low": "words_start", **dict.fromkeys(("varied-low", "varied-high"), "words_start_varied")}
"""Track of the gates → the measurement of its policy before training. The first one's warm start did not pass."""
FIGURE = "words_gates"
"""Figure of analyses/runs.toml."""
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
NOT_RUN = "not run"


def read_plain(track: str) -> pd.DataFrame:
    """Return a row per judged run of plain GRPO on a track: seed, and the numbers that GATES names."""
    columns = ["seed", *(number for number, *_ in GATES.values())]
    if not has_runs(SCALE, track):
        return pd.DataFrame(columns=columns)
    found = accuracy_by_people(read_tests(["grpo"], scale=SCALE, track=track))
    runs = found[found["level"] == "all"].rename(columns={"sampled": "end"})
    runs["start"] = read_start(track)
    runs["gain"] = runs["end"] - runs["start"]
    shares = read_metrics(["grpo"], scale=SCALE, track=track).set_index(["seed", "step"])["token_share_0"]
    for name, steps in AROUND.items():
        runs[name] = [shares.loc[seed].reindex(steps).mean(skipna=False) for seed in runs["seed"]]
    return runs.reindex(columns=columns)


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


def count_runs() -> pd.DataFrame:
    """Return a row: runs planned, runs judged, and the command that makes the missing ones."""
    wanted = set(needs(FIGURE, SCALE))
    runs = [run for run in list_runs(SCALE) if (run.track, run.variant) in wanted]
    made = sum(run.seed in list_seeds(run.scale, run.track, run.variant, "test") for run in runs)
    command = f"python -m analyses.reproduce --scale {SCALE} --only {FIGURE} --jobs 2"
    return pd.DataFrame([{"planned": len(runs), "made": made, "command": command}])


def main(options: Options) -> None:
    if options.scale != SCALE:
        raise InputError(f"--scale is {options.scale}; these gates were named for the runs of scale {SCALE} alone")
    tables = {"gates": judge_gates(), "runs": count_runs()}
    for name, table in tables.items():
        write_csv(table, options.at(f"words_{name}.csv"))
        print(table.to_string(index=False, float_format="{:.3g}".format, na_rep="–"), end="\n\n")
    fails = tables["gates"].query("state == 'fails'")
    for row in fails.itertuples():
        print(f"fails at a rate of {row.learning_rate:g}: {row.gate}, {row.value:.3f}")
    for row in tables["runs"].query("made < planned").itertuples():
        print(f"{row.made} of {row.planned} runs; make the others: {row.command}")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
