"""Does the first-order gain on other prompts predict which method's next ten steps earn more than GRPO's?

    python -m analyses.paper.prediction [--out figures] [--simulate]

Named beforehand (docs/preregistrations.md): one number, the gain of analyses/measure/predictions.py, mean over four
replicates, of Reweight, Lopti, the random split and high-entropy tokens alone, minus GRPO's. It is compared with the
mean reward on test puzzles after ten steps (analyses/measure/branches.py), minus GRPO's, at ten origins: two policies,
each untrained and after 40 and 80 steps of two GRPO runs. Scores are the share of right signs (chance: .5) and
Pearson's correlation, with intervals that resample origins. The gain predicts if the interval of the share lies above
.5 and that of the correlation above 0. These scores also credit differences that a method has everywhere; `within
methods` subtracts each method's means first. Not named beforehand: `right signs, by steps alone`, the score of a rule
that expects more of methods with two optimizer steps to GRPO's one and less of the others; and the correlation without
each of the origins in turn.

prediction.png and .csv (a point per origin and method), prediction_scores.csv, prediction_without.csv. --simulate
writes prediction_power.csv: the probability of that outcome for true correlations from 0 to .9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.colors import COLORS
from analyses.common.experiments import labels
from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Output, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import paper_style

SCALES = ("cpu", "certain")
ORIGIN = ["scale", "seed", "step"]
DRAWS = 2_000
TWO_STEPS = ("lopti", "random-split")
MARKERS = {"reweight": "o", "lopti": "s", "random-split": "^", "high-entropy": "D"}


@dataclass(frozen=True)
class Options(Output):
    simulate: bool = False
    """Only compute the power, without data."""


def table() -> pd.DataFrame:
    """Return a row per origin and method but GRPO: predicted and actual difference from GRPO, means over replicates."""
    frames = []
    for scale in SCALES:
        predicted = read_table("predictions", "predictions.csv", scale=scale)
        actual = read_table("branches", "branches.csv", scale=scale)
        frames.append(predicted.merge(actual, on=["seed", "step", "replicate", "variant"]).assign(scale=scale))
    means = pd.concat(frames).groupby([*ORIGIN, "variant"], sort=False)[["gain", "reward"]].mean()
    wide = means.unstack("variant")
    minus = {name: wide[name].drop(columns="grpo").sub(wide[name]["grpo"], axis=0).stack() for name in means}
    minus["reward"] = minus["reward"].round(12)  # equal means are a tie, whatever their sum's rounding says
    return pd.DataFrame({"predicted": minus["gain"], "actual": minus["reward"]}).reset_index()


def score(found: pd.DataFrame, *, seed: int = 0, draws: int = DRAWS) -> pd.DataFrame:
    """Return share of right signs and correlation, each with a 95 % interval over origins."""
    predicted, actual = (
        found.pivot_table(index=ORIGIN, columns="variant", values=name, sort=False).to_numpy()  # [origins, methods]
        for name in ("predicted", "actual")
    )
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(predicted), size=(draws, len(predicted)))
    rows = []
    for name, statistic in SCORES.items():
        drawn = statistic(predicted[chosen], actual[chosen])
        lower, upper = np.quantile(drawn, (0.025, 0.975))
        value = float(statistic(predicted[None], actual[None])[0])
        rows.append({"score": name, "value": value, "lower": lower, "upper": upper, "origins": len(predicted)})
    return pd.DataFrame(rows)


def right_signs(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Return the share of pairs with equal signs: two arrays […, origins, methods] → […]."""
    return (np.sign(predicted) == np.sign(actual)).mean((-2, -1))


def correlation(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation over all pairs: two arrays […, origins, methods] → […]."""
    one, other = (values - values.mean((-2, -1), keepdims=True) for values in (predicted, actual))
    size = np.sqrt((one**2).sum((-2, -1)) * (other**2).sum((-2, -1)))
    return (one * other).sum((-2, -1)) / np.where(size > 0, size, 1.0)


def by_steps_alone(found: pd.DataFrame) -> pd.DataFrame:
    """Return the score of the rule that methods with two steps earn more than GRPO and the others less."""
    ruled = score(found.assign(predicted=np.where(found["variant"].isin(TWO_STEPS), 1.0, -1.0)))
    return ruled[ruled["score"] == "right signs"].assign(score="right signs, by steps alone")


def without_each(found: pd.DataFrame) -> pd.DataFrame:
    """Return the correlation without each origin, a row per origin left out."""
    frames = []
    for origin, own in found.groupby(ORIGIN, sort=False):
        scores = score(found.drop(own.index))
        names = dict(zip(ORIGIN, origin, strict=True))
        frames.append(scores[scores["score"] == "correlation"].assign(**names))
    return pd.concat(frames, ignore_index=True)


def within_methods(statistic: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return the statistic of differences from each method's mean over the origins."""

    def compute(*tables: np.ndarray) -> np.ndarray:
        return statistic(*(values - values.mean(-2, keepdims=True) for values in tables))

    return compute


SCORES = {"right signs": right_signs, "correlation": correlation}
SCORES |= {f"{name}, within methods": within_methods(statistic) for name, statistic in SCORES.items()}


def predicts(scores: pd.DataFrame) -> bool:
    """Apply the rule named beforehand."""
    lower = scores.set_index("score")["lower"]
    return bool(lower["right signs"] > 0.5 and lower["correlation"] > 0)


def simulate(
    correlations: Sequence[float] = (0.0, 0.3, 0.5, 0.7, 0.9),
    noises: Sequence[float] = (0.5, 1.0, 2.0),
    *,
    origins: int = 10,
    methods: int = 4,
    tables: int = 400,
) -> pd.DataFrame:
    """Return how often the rule says that the gain predicts, over simulated tables.

    correlations: of predicted with true differences, both normal; half of the variance is an origin's own and common to
    its methods. noises: standard deviation of a measured difference's error relative to that of the true ones.
    """
    rng, rows = np.random.default_rng(0), []
    index = [("made up", origin, 0, str(method)) for origin in range(origins) for method in range(methods)]
    frame = pd.DataFrame(index, columns=[*ORIGIN, "variant"])

    def draw_differences() -> np.ndarray:
        return (rng.normal(size=(origins, 1)) + rng.normal(size=(origins, methods))) / np.sqrt(2)

    for true in correlations:
        for noise in noises:
            said = 0
            for _ in range(tables):
                gain = draw_differences()
                actual = true * gain + np.sqrt(1 - true**2) * draw_differences() + noise * rng.normal(size=gain.shape)
                made = frame.assign(predicted=gain.ravel(), actual=actual.ravel())
                said += predicts(score(made, seed=int(rng.integers(1 << 30)), draws=400))
            rows.append({"correlation": true, "noise": noise, "says that it predicts": said / tables})
    return pd.DataFrame(rows)


@paper_style()
def draw(found: pd.DataFrame) -> Figure:
    """Draw actual against predicted differences."""
    figure, ax = plt.subplots(figsize=(4.8, 3.4), layout="constrained")
    ax.axhline(0, color="0.8", lw=0.8)
    ax.axvline(0, color="0.8", lw=0.8)
    for variant, marker in MARKERS.items():
        for scale, filled in zip(SCALES, (True, False), strict=True):
            own = found[(found["variant"] == variant) & (found["scale"] == scale)]
            look = {"fillstyle": "full" if filled else "none", "color": COLORS[variant], "ms": 4}
            ax.plot(own["predicted"], own["actual"], marker, label=labels()[variant] if filled else None, **look)
    ax.set(xlabel="predicted gain in reward, minus GRPO's", ylabel="reward after 10 steps, minus GRPO's")
    figure.legend(title="hollow: embedded-certain", loc="outside upper center", ncols=2)
    return figure


def main(options: Options) -> None:
    if options.simulate:
        power = simulate()
        write_csv(power, options.at("prediction_power.csv"))
        print(power.to_string(index=False))
        return
    found = table()
    scores, without = pd.concat([score(found), by_steps_alone(found)]), without_each(found)
    save_picture(draw(found), options.at("prediction.png"), found)
    for name, numbers in {"scores": scores, "without": without}.items():
        write_csv(numbers, options.at(f"prediction_{name}.csv"))
        print(numbers.to_string(index=False, float_format="{:.3f}".format), end="\n\n")
    print("it predicts" if predicts(scores) else "not shown to predict")


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
