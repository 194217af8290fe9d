"""Compare designs for sampling the tokens to measure, at equal cost, on tables in which every token is known.

    python -m analyses.benchmarks.sampling_designs [--out figures --tables FOLDER]

Two small policies answer questions, every response token is measured, and samples are drawn from these tables
repeatedly; within a draw, larger samples contain the smaller ones. Cost is the sum of the measured tokens' prefixes,
which the backward passes traverse. The designs, with equally many tokens per interval:

stratified    equal chances within the interval
weighted      by |w|·‖e − π‖ alone, with a quarter of the size the same for all
proportional  half by |w|·‖e − π‖ and half by ‖e − π‖, with the same quarter: the default (gradscope.gradients.sample)

For the share of Σ‖w·g‖² and the mean ‖g‖ by interval, and the dominance index (bits), sampling_designs.csv has bias and
root mean square error over draws of tokens, the first two relative to the whole table's values. The picture shows the
root mean square over intervals. For sampling_designs_coverage.csv prompts are redrawn from the table and then tokens:
how often 95 % intervals contain the truth, and their width relative to the statistic's spread, with every token
measured and with samples.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.common import sums
from analyses.common.places import save_picture
from analyses.common.script import Output, exit_with
from analyses.common.tables import write_csv
from gradscope import load_policy, measure
from gradscope.diagnosis import token_shares
from gradscope.diagnosis.shares import sum_by_prompt
from gradscope.diagnosis.terms import weighted_norms
from gradscope.gradients import LOGITS, PARAMETERS, Resources
from gradscope.gradients.sample import EQUAL_PART, SAMPLING_PROBABILITY, TokenSample, token_sizes
from gradscope.intervals import EDGES, interval_labels, summarize
from gradscope.plots import finish, new_panels, paper_style
from gradscope.resampling import Resampling
from gradscope.sampling import batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task

INTERVALS = len(EDGES) - 1
POLICIES = {
    "puzzles": ("embedded-certain", "knights-knaves-compact", 0.7),
    "sums": ("analyses/runs/cpu/arithmetic-policy", sums.TRAIN.name, 1.0),
}
"""Checkpoint, task and temperature."""
COLORS = {"every token": "0.4", "stratified": "#0072b2", "weighted": "#e69f00", "proportional": "#d55e00"}
STATISTICS = {
    "squared_share": ("share of Σ‖w·g‖²", "relative"),
    "mean_norm": ("mean ‖g‖", "relative"),
    "dominance_index": ("dominance index", "bits"),
}
"""Title, and unit of the error."""


@dataclass(frozen=True)
class Options(Output):
    tables: Path | None = None
    """Folder of the full token tables, puzzles.parquet and sums.parquet; missing ones are made."""
    questions: int = 64
    """Questions per policy, with 8 responses each."""
    draws: int = 2000
    each: tuple[int, ...] = (5, 10, 20, 40, 80, 160)
    """Tokens measured per interval."""
    redraws: int = 600
    """Draws of prompts and tokens, for the coverage."""
    covered: int = 100
    """Tokens measured per interval, for the coverage."""


def full_table(name: str, options: Options) -> pd.DataFrame:
    """Measure every token of a policy's responses; adds the length of each token's prefix."""
    path = None if options.tables is None else options.tables / f"{name}.parquet"
    if path is not None and path.is_file():
        return pd.read_parquet(path)
    model, task_name, temperature = POLICIES[name]
    policy, task = load_policy(model, device="cpu"), get_task(task_name)
    settings = {"n": 8, "temperature": temperature, "max_new_tokens": 512, "seed": 0}
    batch = batch_rows(rollout_rows(policy, draw_questions(task, options.questions, seed=0), task=task, **settings))
    table = measure(policy, batch, self_check=False, resources=Resources(progress=True))
    prefixes = np.concatenate([batch.sequence(row)[1].numpy() for row in range(len(batch))])
    table = table.assign(prefix=prefixes)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path, index=False)
    return table


def sizes_of(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return q of every token by design."""
    interval = table["interval"].to_numpy(np.int64)
    norms, weights = table[LOGITS].to_numpy(np.float64), table["weight"].to_numpy(np.float64)
    sizes = {name: token_sizes(name, interval, norms, weights) for name in ("stratified", "proportional")}
    proxy = np.abs(weights) * norms
    means = np.bincount(interval, proxy, minlength=INTERVALS) / np.bincount(interval, minlength=INTERVALS)
    return sizes | {"weighted": EQUAL_PART + (1 - EQUAL_PART) * proxy / means[interval]}


def statistics_of(
    counts: np.ndarray, totals: Callable[[np.ndarray], np.ndarray], squares: np.ndarray, norms: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute the statistics by interval; totals sums values over tokens."""
    whole = totals(squares)
    shares = whole / whole.sum()
    with np.errstate(divide="ignore"):  # no token with a weight was drawn
        index = np.log2(shares / (counts / counts.sum()))
    return {"squared_share": shares, "mean_norm": totals(norms) / counts, "dominance_index": index}


def compare(table: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Compute bias and root mean square error: a row per design, size, statistic and interval."""
    interval = table["interval"].to_numpy(np.int64)
    counts = np.bincount(interval, minlength=INTERVALS)
    columns = weighted_norms(table) ** 2, table[PARAMETERS].to_numpy(np.float64)
    prefix = table["prefix"].to_numpy(np.float64)
    truth = statistics_of(counts, lambda values: np.bincount(interval, values, minlength=INTERVALS), *columns)
    rows = []
    for design, sizes in sizes_of(table).items():
        found = {(each, name): [] for each in options.each for name in truth}
        costs = dict.fromkeys(options.each, 0.0)
        for seed in tqdm(range(options.draws), design):
            sample = TokenSample(interval, INTERVALS, sizes, np.random.default_rng(seed))
            for each in options.each:
                taken, probabilities = sample.take(each), sample.probabilities(each)
                costs[each] += prefix[taken].sum() / options.draws / prefix.sum()
                totals = make_totals(interval, taken, probabilities)
                for name, values in statistics_of(counts, totals, *columns).items():
                    found[each, name].append(values)
        for (each, name), values in found.items():
            values, true = np.array(values), truth[name]
            errors = values - true if name == "dominance_index" else values / true - 1
            none = np.isinf(errors).any(1)
            errors = errors[~none]
            row = {"design": design, "each": each, "cost": costs[each], "statistic": name, "undefined": none.mean()}
            for a, label in enumerate(interval_labels()):
                error = {"bias": errors[:, a].mean(), "error": np.sqrt((errors[:, a] ** 2).mean())}
                rows.append(row | {"interval": label, "truth": true[a]} | error)
    return pd.DataFrame(rows)


def make_totals(
    interval: np.ndarray, taken: np.ndarray, probabilities: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Return how a sample estimates sums over an interval's tokens, as in gradscope.intervals.summarize."""
    own, scale = interval[taken], 1.0 / probabilities[taken]
    factor = np.bincount(interval, probabilities, minlength=INTERVALS) / np.bincount(own, minlength=INTERVALS)
    return lambda values: factor * np.bincount(own, values[taken] * scale, minlength=INTERVALS)


def cover(table: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Measure the coverage of 95 % intervals if the table is the population: a row per design and statistic."""
    truth = estimate(table, None)
    groups = {group: rows for group, rows in table.reset_index(drop=True).groupby("group").indices.items()}
    labels, found = list(groups), {design: [] for design in ("every token", "stratified", "proportional")}
    for seed in tqdm(range(options.redraws), "coverage"):
        rng = np.random.default_rng([1, seed])
        drawn = [groups[labels[i]] for i in rng.integers(len(labels), size=len(labels))]
        world = table.iloc[np.concatenate(drawn)].reset_index(drop=True)
        world["group"] = np.repeat(np.arange(len(drawn)), [len(rows) for rows in drawn])
        interval = world["interval"].to_numpy(np.int64)
        sizes = sizes_of(world)
        for design, results in found.items():
            own = world
            if design != "every token":
                sample = TokenSample(interval, INTERVALS, sizes[design], rng)
                own = world.assign(**{SAMPLING_PROBABILITY: sample.probabilities(options.covered)})
                own[PARAMETERS] = own[PARAMETERS].where(sample.take(options.covered))
            results.append(estimate(own, rng))
    rows = []
    for design, results in found.items():
        for key, (true, _, _) in truth.items():
            values, lower, upper = np.array([result[key] for result in results]).T
            row = {"design": design, "statistic": key[0], "interval": key[1], "truth": true}
            row |= {"coverage": ((lower <= true) & (true <= upper)).mean()}
            rows.append(row | {"mean_width": (upper - lower).mean(), "standard_deviation": values.std()})
    return pd.DataFrame(rows)


def estimate(table: pd.DataFrame, rng: np.random.Generator | None) -> dict[tuple[str, str], np.ndarray]:
    """Return value, lower and upper of each statistic and interval, as gradscope reports them."""
    labels = interval_labels()
    rows = token_shares(sum_by_prompt(table, INTERVALS), labels, seed=rng, resamples=400)
    rows = rows[rows["statistic"].isin(["squared_share", "dominance_index"])]
    out = {(r.statistic, r.interval): np.array([r.value, r.lower, r.upper]) for r in rows.itertuples()}
    drawn = table.get(SAMPLING_PROBABILITY)
    args = (table[PARAMETERS], table["interval"], table["group"])
    if rng is not None:
        means = summarize(*args, resampling=Resampling(rng, resamples=400), probabilities=drawn)
    else:
        means = pd.DataFrame({"label": labels, "value": table.groupby("interval")[PARAMETERS].mean()})
        means = means.assign(lower=np.nan, upper=np.nan)
    return out | {("mean_norm", r.label): np.array([r.value, r.lower, r.upper]) for r in means.itertuples()}


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (errors, coverage), each with a column `policy`."""
    errors, coverage = {}, {}
    for name in POLICIES:
        full = full_table(name, options)
        errors[name], coverage[name] = compare(full, options), cover(full, options)
    return tuple(pd.concat(parts, names=["policy", None]).reset_index("policy") for parts in (errors, coverage))


@paper_style()
def draw(errors: pd.DataFrame, coverage: pd.DataFrame) -> Figure:
    """Draw a column of panels per policy: each statistic's error against cost, and the coverage."""
    figure, axes = new_panels(8, width=3.4, height=1.9)
    panels = iter(axes)
    for name, words in STATISTICS.items():
        for policy in POLICIES:
            ax = next(panels)
            own = errors[(errors["policy"] == policy) & (errors["statistic"] == name)]
            squares = own.assign(square=own["error"] ** 2).groupby(["design", "each", "cost"])["square"].mean()
            drawn = np.sqrt(squares).rename("error").reset_index()
            for design, part in drawn.groupby("design"):
                ax.plot(100 * part["cost"], part["error"], "o-", ms=3, color=COLORS[design], label=design)
            ax.set(xscale="log", yscale="log", xlabel="cost, % of all tokens'", ylabel=f"error, {words[1]}")
            _label_ticks(ax.xaxis, (0.03, 0.1, 0.3, 1, 3))
            _label_ticks(ax.yaxis, (0.03, 0.1, 0.3, 1, 3, 10))
            ax.set_title(f"{policy}: {words[0]}", loc="left")
            finish(ax, drawn.assign(policy=policy, statistic=name))
    for policy in POLICIES:
        _draw_coverage(next(panels), policy, coverage[coverage["policy"] == policy])
    axes[0].legend()
    return figure


def _label_ticks(axis: Axis, ticks: tuple[float, ...]) -> None:
    """Label the ticks within the axis limits only."""
    low, high = axis.get_view_interval()
    axis.set_ticks([], minor=True)
    inside = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(inside, [f"{tick:g}" for tick in inside])


def _draw_coverage(ax: Axes, policy: str, coverage: pd.DataFrame) -> None:
    """Draw a point per interval and design."""
    for place, name in enumerate(STATISTICS):
        for shift, design in enumerate(("every token", "stratified", "proportional")):
            own = coverage[(coverage["statistic"] == name) & (coverage["design"] == design)]
            at = np.full(len(own), place + 0.22 * (shift - 1))
            ax.plot(at, own["coverage"], "_", ms=8, mew=1.5, color=COLORS[design], label=design if not place else None)
    ax.axhline(0.95, color="0.7", lw=0.8, zorder=0)
    ax.set(xlim=(-0.5, 2.5), ylim=(None, 1.0), ylabel="coverage of 95 % intervals")
    ax.set_xticks(range(3), ["share", "mean", "index"])
    ax.set_xlabel("an interval of π each")
    ax.set_title(f"{policy}: coverage", loc="left")
    ax.legend(loc="lower left")
    finish(ax, coverage)


def main(options: Options) -> None:
    errors, coverage = table(options)
    save_picture(draw(errors, coverage), options.at("sampling_designs.png"), errors)
    write_csv(coverage, options.at("sampling_designs_coverage.csv"))
    keys: Mapping[str, str] = {"error": "mean", "bias": "mean"}
    print(errors.groupby(["policy", "statistic", "each", "design"]).agg(keys).to_string(float_format="{:.3f}".format))
    print(coverage.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
