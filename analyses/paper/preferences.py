"""Does a first-order prediction tell what a DPO step does to chosen and rejected answers, and by whose gradient?

    python -m analyses.paper.preferences [--out figures]

Drawn from analyses/measure/preferences.py: three real steps of TRL's DPOTrainer on SmolLM2-135M-Instruct, each
predicted from the checkpoint before it, its optimizer and its log. preferences.png: (a) predicted and actual change of
each answer's log π, (b) the prediction's sources, means over answers of a side. preferences.csv has a row per answer,
preferences_scores.csv rank correlation and slope of actual on predicted changes, of answers and of tokens, and the
sources' means (nats).
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import NEGATIVE, POSITIVE, paper_style
from gradscope.updates import SIDES

SOURCES = {"chosen": "chosen answers", "rejected": "rejected answers", "momentum": "momentum"}
"""Of a change; TRL's default has no weight decay."""


def table(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return a row per answer: the sums over its tokens."""
    return tokens.groupby(["step", "pair", "side"], as_index=False)[[*SOURCES, "predicted", "actual"]].sum()


def score(tokens: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """Return how predictions agree with what happened, by step and side, and the means of what was predicted."""
    rows = []
    for of, frame in (("answers", answers), ("tokens", tokens)):
        kinds = [("all", "all", frame)]
        kinds += [("all", side, frame[frame["side"] == side]) for side in SIDES]
        kinds += [(step, "all", own) for step, own in frame.groupby("step")]
        for step, side, own in kinds:
            row = {
                "of": of,
                "step": step,
                "side": side,
                "n": len(own),
                "rank_correlation": rank(own),
                "slope": slope(own),
            }
            rows.append(row | own[[*SOURCES, "predicted", "actual"]].mean().to_dict())
    return pd.DataFrame(rows)


def rank(frame: pd.DataFrame) -> float:
    """Return Spearman's rank correlation of predicted and actual changes."""
    return float(stats.spearmanr(frame["predicted"], frame["actual"]).statistic)


def slope(frame: pd.DataFrame) -> float:
    """Return the least-squares slope of actual on predicted changes, with an intercept."""
    return float(np.polyfit(frame["predicted"], frame["actual"], 1)[0])


COLORS = dict(zip(SIDES, (POSITIVE, NEGATIVE), strict=True))


@paper_style()
def draw(answers: pd.DataFrame) -> Figure:
    """Draw actual against predicted changes, and the sources' means."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
    ends = [answers[["predicted", "actual"]].min().min(), answers[["predicted", "actual"]].max().max()]
    left.plot(ends, ends, color="0.8", lw=0.8)
    for (side, color), marker in zip(COLORS.items(), "os", strict=True):
        own = answers[answers["side"] == side]
        left.plot(own["predicted"], own["actual"], marker, ms=4, color=color, label=side)
    left.set(xlabel="predicted Δ log π of an answer (nats)", ylabel="after the real step (nats)", title="(a)")
    left.legend()
    means = answers.groupby("side")[[*SOURCES]].mean().loc[[*SIDES]]
    places = np.arange(means.shape[1])
    for shift, (side, color) in zip((-0.2, 0.2), COLORS.items(), strict=True):
        right.bar(places + shift, means.loc[side], 0.38, color=color, label=f"Δ log π of {side}")
    right.axhline(0, color="0.8", lw=0.8)
    right.set_xticks(places, [SOURCES[name].replace(" ", "\n") for name in means])
    right.set(ylabel="nats, mean over answers", title="(b) by whose gradient")
    right.legend()
    return figure


def main(options: Options) -> None:
    tokens = read_table("preferences", "tokens.csv", scale=options.scale)
    answers = table(tokens)
    scores = score(tokens, answers)
    save_picture(draw(answers), options.at("preferences.png"), answers)
    write_csv(scores, options.at("preferences_scores.csv"))
    print(scores.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
