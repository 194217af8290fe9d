"""Compute again every number that the pages on the paper's reproduction look up, with code of its own.

    python -m analyses.recompute [--all]

`analyses.paper_repro` tells which cells of the figures' CSVs the pages quote. Each is computed here from what is kept
of runs (tests, metrics, responses) and measurements (analyses/runs/SCALE/measured) in plain pandas, numpy and scipy:
nothing is imported of what made the CSVs. Of summed gradients the norms and shares of each batch are kept, or, at best,
inner products by prompt; from these on. From a CSV only the keys of its rows are read, since Holm's correction needs
the family. Printed are the numbers that differ (--all: every one): page, cell, quoted, recomputed.

A value or a t interval must agree to a thousandth; bounds by resampling prompts, which are drawn again here, to a third
of the interval's width. KEPT_SUMMARIES are not recomputable: only summaries are kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy import optimize, stats

from analyses.common import places
from analyses.common.experiments import RUNS
from analyses.common.kept_runs import read_tables
from analyses.paper_repro import Cell, quoted_cells

Where = Mapping[str, str]
Row = dict[str, float]
KEPT_SUMMARIES = {
    "compare_step0": "made by `gradscope compare` of a checkpoint that is not kept",
    "compare_step40": "made by `gradscope compare` of a checkpoint that is not kept",
    "words/words_compare": "tokens and inner products were not kept",
    "words/words_compare_samples": "tokens were not kept",
    "fig1_similarity: adamw": "each token's change under AdamW was not kept",
    "drivers": "tokens were not kept",
    "certain/drivers": "tokens were not kept",
    "proxies": "tokens were not kept",
    "certain/proxies": "tokens were not kept",
    "smollm2: gradient_share": "inner products were not kept",
    "gemma3: gradient_share": "inner products were not kept",
    "certain/base_policy_gradients: share": "only the batches' mean was kept",
    "certain/base_policy_gradients: share_sd": "only the batches' mean was kept",
    "certain/base_policy_intervals: gradient_norm": "only the batches' mean was kept",
    "words/words_trained_weightings: cosine": "inner products were not kept",
}
"""{table, or table: statistic or column: why}."""
INTERVALS = ("[0, ¼)", "[¼, ½)", "[½, ¾)", "[¾, 1]")
DRAWS = 1000


@dataclass(frozen=True)
class Options:
    figures: Path = Path("figures")
    """Folder of pictures, tables and their CSVs."""
    all: bool = False
    """List every number, not only those that differ."""


@dataclass(frozen=True)
class Near:
    """A number that agrees within some slack: a bound by resampling, drawn again here, or one of rounded tables."""

    value: float
    slack: float


# ---- statistics


def t_interval(values: Iterable[float], level: float = 0.95) -> Row:
    x = np.asarray([*values], dtype=float)
    n, mean = len(x), float(np.mean(x))
    error = float(np.std(x, ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    half = stats.t.ppf((1 + level) / 2, n - 1) * error if n > 1 else np.nan
    p = 2 * stats.t.sf(abs(mean) / error, n - 1) if n > 1 and error > 0 else np.nan
    return {"mean": mean, "lower": mean - half, "upper": mean + half, "p": float(p), "seeds": n, "sd": error * n**0.5}


def holm(p: float, family: Iterable[float]) -> float:
    ordered, corrected = sorted(own for own in family if not np.isnan(own)), 0.0
    for place, own in enumerate(ordered):
        corrected = max(corrected, min(1.0, own * (len(ordered) - place)))
        if np.isclose(own, p, rtol=1e-9):
            return corrected
    return np.nan


def redraw(statistic: Callable[[np.ndarray], float], clusters: int) -> tuple[float, float]:
    """Return 95 % percentiles over draws of clusters; statistic maps each cluster's count to a number."""
    counts = np.random.default_rng(1).multinomial(clusters, np.full(clusters, 1 / clusters), DRAWS)
    low, high = np.nanquantile([statistic(count) for count in counts], [0.025, 0.975])
    return float(low), float(high)


def jackknife(
    statistic: Callable[[np.ndarray], float], clusters: int, *, least: float | None = None, wider: bool = True
) -> tuple[float, float]:
    """Return bounds from leaving out one cluster at a time, by Student's t.

    least: of a statistic that lies between it and 1, so that log odds are taken; wider: by 1/n on their scale, for a
    cluster that was not seen.
    """

    def ahead(value: float) -> float:
        return value if least is None else float(np.log((value - least) / (1 - value)))

    left = np.array([ahead(statistic(1.0 - (np.arange(clusters) == out))) for out in range(clusters)])
    away = left - left.mean()
    freedom = np.clip((away**2).sum() ** 2 / (away**4).sum() - 0.5, 1, clusters - 1)
    half = stats.t.ppf(0.975, freedom) * np.sqrt((clusters - 1) / clusters * (away**2).sum())
    half = np.hypot(half, 1 / clusters) if wider and least is not None else half
    ends = ahead(statistic(np.ones(clusters))) + np.array([-half, half])
    low, high = ends if least is None else least + (1 - least) / (1 + np.exp(-ends))
    return float(low), float(high)


def bounded(value: float, low: float, high: float, names: tuple[str, str, str]) -> dict[str, float | Near]:
    return {names[0]: value, names[1]: Near(low, (high - low) / 3), names[2]: Near(high, (high - low) / 3)}


def power(effect: float, sd: float, n: int, level: float) -> float:
    reach, shift = stats.t.ppf(1 - level / 2, n - 1), effect / sd * np.sqrt(n)
    return float(stats.nct.sf(reach, n - 1, shift))


# ---- what is kept of runs


@cache
def test(scale: str, track: str, variant: str) -> dict[int, pd.DataFrame]:
    return read_tables(scale, track, variant, "test")


@cache
def metrics(scale: str, track: str, variant: str) -> dict[int, pd.DataFrame]:
    return read_tables(scale, track, variant, "metrics")


@cache
def answers(scale: str, variant: str) -> dict[int, pd.DataFrame]:
    """The sampled answers of a variant's runs on puzzles."""
    return {seed: own.query("not greedy") for seed, own in read_tables(scale, "puzzles", variant, "responses").items()}


@cache
def measured(scale: str, name: str) -> pd.DataFrame:
    file = RUNS / scale / "measured" / name
    return pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)


def sampled(table: pd.DataFrame) -> str:
    return next(name for name in table if re.fullmatch(r"avg@\d+", name))


def by_level(own: pd.DataFrame, column: str) -> pd.Series:
    """Mean of the last three checkpoints at each level."""
    last = own[own["step"].isin(sorted(own["step"].unique())[-3:])].astype({"level": str})
    return last[last["level"] != "all"].groupby("level")[column].mean()


@cache
def accuracy(scale: str, track: str, variant: str, column: str | None = None) -> pd.Series:
    """Each run's accuracy over all questions, mean of the last three checkpoints."""
    found = {}
    for seed, own in test(scale, track, variant).items():
        sizes = own.astype({"level": str}).drop_duplicates("level").set_index("level")["questions"]
        levels = by_level(own, column or sampled(own))
        found[seed] = np.average(levels, weights=sizes.reindex(levels.index))
    return pd.Series(found, dtype=float)


@cache
def slope(scale: str, track: str, variant: str) -> pd.Series:
    """Each run's slope of accuracy per person."""
    found = {}
    for seed, own in test(scale, track, variant).items():
        levels = by_level(own, sampled(own))
        found[seed] = stats.linregress(levels.index.astype(float), levels).slope
    return pd.Series(found, dtype=float)


@cache
def record(scale: str, track: str, variant: str, name: str, steps: str = "last 50") -> pd.Series:
    def window(own: pd.DataFrame) -> pd.DataFrame:
        if steps == "last 50":
            return own[own["step"] > own["step"].max() - 50]
        first, last = map(int, steps.split(" to "))
        return own[(own["step"] >= first) & (own["step"] <= last)]

    return pd.Series({seed: window(own)[name].mean() for seed, own in metrics(scale, track, variant).items()})


SUMS = (("2", "greedy_accuracy"), ("3", "greedy_accuracy"), ("4", "greedy_accuracy"), ("5", "avg@16"))
SUMS += (("6", "pass@16"), ("6", "avg@16"))


@cache
def six_scores(variant: str) -> pd.Series:
    parts = {
        seed: [by_level(own, column)[level] for level, column in SUMS]
        for seed, own in test("cpu", "math", variant).items()
    }
    return 100 * pd.Series({seed: np.mean(own) for seed, own in parts.items()})


@cache
def word_counts(scale: str, variant: str, category: str) -> pd.DataFrame:
    """Words of a category in each sampled response."""
    listed = pd.read_csv(places.place(Path("figures"), "table5.csv")).query("category == @category")["forms counted"]
    forms = "|".join(re.escape(form.strip()) for forms in listed for form in forms.split(","))
    frames = []
    for seed, own in answers(scale, variant).items():
        count = own["response"].str.count(rf"(?i)\b(?:{forms})\b")
        more = {"reward": own["reward"], "tokens": own["tokens"], "group": own["group"], "seed": seed}
        frames.append(pd.DataFrame({"words": count} | more))
    return pd.concat(frames, ignore_index=True)


@cache
def words_per_response(scale: str, variant: str, category: str) -> pd.Series:
    return word_counts(scale, variant, category).groupby("seed")["words"].mean()


# ---- differences between variants


def statistic(name: str, scale: str, row: Where) -> Callable[[str], pd.Series]:
    """Return what a table of contrasts compares: a number per run of a variant."""
    if name == "table1_contrasts":
        if row["family"] == "plain accuracy":
            return lambda variant: 100 * accuracy("cpu", "math", variant, "avg@16")
        return six_scores
    if name == "fig4_contrasts" and row["of"] == "slope per person":
        return lambda variant: slope(scale, "puzzles", variant)
    if name == "fig5_contrasts":
        return lambda variant: words_per_response(scale, variant, row["category"])
    if name == "fig7_8_contrasts":
        return lambda variant: record(scale, "puzzles", variant, row["record"])
    if name == "fig9_10_contrasts":
        return lambda variant: record("cpu", "math", variant, row["record"])
    if name == "rare_tokens":
        return lambda variant: record(row["scale"], row["track"], variant, row["record"], row["steps"])
    return lambda variant: accuracy(scale, "puzzles", variant)


FAMILIES = {
    "decision": ("named",),
    "controls_contrasts": ("kind", "level", "block"),
    "fig4_contrasts": ("family",),
    "fig9_10_contrasts": ("family",),
    "fig11_12_contrasts": ("family",),
    "table1_contrasts": ("family",),
    "fig6_contrasts": (),
    "fig7_8_contrasts": (),
    "fig5_contrasts": (),
    "rare_tokens": (),
}
"""{table of contrasts: the columns that are equal within a family of claims}."""


def pair(name: str, scale: str, row: Where) -> tuple[Row, pd.Series]:
    """Return the statistics of a difference, and the baseline's runs."""
    of = statistic(name, scale, row)
    base = of(row["baseline"])
    values = (of(row["variant"]) - base).dropna()
    found = t_interval(values)
    if name == "fig5_contrasts":
        found |= {key: found[key] / base[values.index].mean() for key in ("mean", "lower", "upper")}
    return found, base[values.index]


def contrast(name: str, scale: str, cell: Cell, rows: pd.DataFrame) -> float:
    [row] = find(rows, cell).to_dict("records")
    found, base = pair(name, scale, row)
    if cell.column == "p_holm":
        same = [key for key in FAMILIES[name] if key in rows and key != "block"]
        family = rows[(rows[same].astype(str) == pd.Series(row)[same].astype(str)).all(axis=1)]
        if "block" in rows:  # the contrasts named beforehand, or all others
            family = family[(family["block"] == "named beforehand") == (row["block"] == "named beforehand")]
        family = family[family["seeds"] > 1]
        return holm(found["p"], [pair(name, scale, own)[0]["p"] for own in family.to_dict("records")])
    if cell.column == "relative":
        return found["mean"] / base.mean()
    claims = int(rows["named"].sum()) if "named" in rows else 1
    corrected = t_interval(pair_values(name, scale, row), 1 - 0.05 / claims)
    told = {
        "difference": found["mean"],
        "corrected_lower": corrected["lower"],
        "corrected_upper": corrected["upper"],
    }
    if cell.column == "half_width":
        spreads = [pair(name, scale, own)[0]["sd"] for own in rows[rows["named"]].to_dict("records")]
        return float(stats.t.ppf(0.975, 11) * np.sqrt(np.mean(np.square(spreads))) / np.sqrt(12))
    if cell.column == "smallest_told":
        sd, n, level = found["sd"], found["seeds"], 0.05 / claims
        return optimize.brentq(lambda effect: power(effect, sd, n, level) - 0.8, 1e-6, 10 * sd)
    if cell.column == "seeds_needed":
        where = dict(cell.where)
        level, effect = 0.05 / int(where["claims"]), float(where["effect"])
        return next(n for n in range(2, 10_000) if power(effect, found["sd"], n, level) >= 0.8)
    return (found | told)[cell.column]


def pair_values(name: str, scale: str, row: Where) -> pd.Series:
    of = statistic(name, scale, row)
    return (of(row["variant"]) - of(row["baseline"])).dropna()


def find(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    for key, value in cell.where:
        if key in rows:
            rows = rows[rows[key].astype(str) == value]
    return rows


@cache
def after_horizon(variant: str, number: str) -> np.ndarray:
    """A number of each of a variant's runs on experiment B; of the start alone: its mass."""
    if variant == "start":
        return measured("cpu", "horizon/rare_mass.csv").groupby("source")["mass"].mean().to_numpy()
    if number.startswith("mass") or number == "text_entropy":
        tables = read_tables("cpu", "horizon", variant, "rare_mass").values()
        last = (own[own["step"].isin(sorted(set(own["step"]))[-3:])] for own in tables)
        if number.startswith("mass_on_"):
            last = (own[own["source"] == number.removeprefix("mass_on_")] for own in last)
        column = "entropy" if number == "text_entropy" else "mass"
        return np.array([own[column].mean() for own in last])
    if number == "pass_at_16":
        tables = read_tables("cpu", "horizon", variant, "hard").values()
        return np.array([(own["correct"] >= 1).mean() for own in tables])
    if number == "drop":
        return after_horizon(variant, "greedy") - after_horizon(variant, "accuracy")
    judged = {"accuracy": None, "greedy": "greedy_accuracy", "pass_at_4": "pass@4", "test_tokens": "sampled_tokens"}
    if number in judged:
        return accuracy("cpu", "horizon", variant, judged[number]).to_numpy()
    if number == "rise":
        late, early = (record("cpu", "horizon", variant, "accuracy", steps) for steps in ("551 to 600", "351 to 400"))
        return (late - early).to_numpy()
    trained = {"share": ("token_share_0",), "early_share": ("token_share_0", "101 to 150")}.get(number, (number,))
    return record("cpu", "horizon", variant, *trained).to_numpy()


def welch(own: np.ndarray, other: np.ndarray, level: float = 0.95) -> Row:
    parts = [np.var(x, ddof=1) / len(x) for x in (own, other)]
    error = np.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (own, other), strict=True))
    mean, half = own.mean() - other.mean(), stats.t.ppf((1 + level) / 2, freedom) * error
    p = 2 * stats.t.sf(abs(mean) / error, freedom)
    return {"difference": mean, "lower": mean - half, "upper": mean + half, "p": float(p), "seeds": len(own)}


def horizon(cell: Cell) -> float:
    """Experiment B: Welch's contrasts, by Holm over three, of which those not made have p = 1."""
    where = dict(cell.where)
    own, other = (after_horizon(where[arm], where["number"]) for arm in ("variant", "baseline"))
    if where["baseline"] == "start":
        found = t_interval(own - other.mean())
        found |= {"difference": found["mean"], "mean": own.mean(), "baseline_mean": other.mean()}
        return found[cell.column]
    found = welch(own, other) | {"mean": own.mean(), "baseline_mean": other.mean()}
    if cell.column == "with_entropy":
        entropies = (after_horizon(where[arm], "text_entropy") for arm in ("variant", "baseline"))
        rest = [np.concatenate([x - x.mean() for x in arms]) for arms in ((own, other), entropies)]
        return float(stats.pearsonr(*rest)[0])
    if cell.column == "p_holm":
        named = [("grpo", "mass"), ("permuted-weights", "mass"), ("grpo", "accuracy")]
        both = [[after_horizon(arm, number) for arm in ("reweight", base)] for base, number in named]
        return holm(found["p"], [welch(*arms)["p"] if min(map(len, arms)) == 12 else 1.0 for arms in both])
    if cell.column.startswith("corrected_"):
        return welch(own, other, 1 - 0.05 / 3)[cell.column.removeprefix("corrected_")]
    return found[cell.column]


# ---- measurements


@cache
def powers(scale: str, name: str, quantity: str) -> dict[str, float | Near]:
    """The slope of log norm on log(1 − π), where 1 − π > .001."""
    tokens = measured(scale, name)
    tokens = tokens[tokens["temperature"] == 1.0] if "temperature" in tokens else tokens
    own = tokens[(tokens["log_one_minus_prob"] > np.log(1e-3)) & (tokens[quantity] > 0)]
    keys = [key for key in ("batch", "group") if key in own]
    x, y = own["log_one_minus_prob"].to_numpy(float), np.log(own[quantity].to_numpy(float))
    prompt = own.groupby(keys).ngroup().to_numpy()
    sums = np.stack([np.bincount(prompt, part) for part in (np.ones_like(x), x, y, x * x, x * y)])

    def fit(count: np.ndarray) -> float:
        n, sx, sy, sxx, sxy = sums @ count
        return float((sxy - sx * sy / n) / (sxx - sx**2 / n))

    value = fit(np.ones(prompt.max() + 1))
    facts = {"tokens": len(x), "prompts": prompt.max() + 1, "carried": value * x.var() / y.var()}
    return facts | bounded(value, *redraw(fit, prompt.max() + 1), ("slope", "slope_lower", "slope_upper"))


def rare_share(tokens: pd.DataFrame, column: str) -> float | Near:
    """The share of the tokens that has π < ¼."""
    prompts = tokens.assign(low=tokens["interval"] == 0).groupby("group")["low"].agg(["sum", "size"])
    rare, whole = prompts["sum"].to_numpy(float), prompts["size"].to_numpy(float)
    of = lambda count: float(count @ rare / (count @ whole))  # noqa: E731
    ends = jackknife(of, len(rare), least=0.0)
    return bounded(of(np.ones(len(rare))), *ends, ("value", "lower", "upper"))[column]


def theory(scale: str, name: str, cell: Cell) -> float | Near:
    quantity = dict(cell.where)["quantity"]
    if cell.column == "gain_ratio":
        tokens = measured(scale, name)
        gain = (tokens[quantity] / tokens["logit_grad_norm"]).dropna()
        return float(gain.max() / gain.min())
    return powers(scale, name, quantity)[cell.column]


def over_batches(tokens: pd.DataFrame, cell: Cell) -> Near:
    """How much more a step on [0, ¼) than one on [¾, 1] resembles the step on all, in log odds of the other tokens.

    From probabilities in single precision, without tokens that it takes for certain: hence the slack.
    """
    prob, apart = tokens["prob"].astype(float), []

    def change(update: str) -> pd.Series:
        with np.errstate(divide="ignore", invalid="ignore"):
            after, before = (np.log(p) - np.log1p(-p) for p in (prob + tokens[f"delta_prob.{update}"], prob))
        return after - before

    changes = {update: change(update).replace([np.inf, -np.inf], np.nan) for update in ("all", "only-0", "only-3")}
    for _, own in tokens.groupby("batch"):
        low, high = (
            changes["all"][own.index[own["interval"] != place]].corr(changes[update])
            for update, place in (("only-0", 0), ("only-3", 3))
        )
        apart.append(low - high)
    found = t_interval(apart)
    return Near((found | {"correlation": found["mean"]})[cell.column], 0.003)


def at_temperature(temperature: str) -> pd.DataFrame:
    moves = measured("words", "pretrained_batches/moves.parquet")
    return moves[moves["temperature"] == float(temperature)].reset_index(drop=True)


def batch_norms(cell: Cell) -> float:
    """SmolLM2's Fig. 1 (a, d): shares of the tokens and gradient, and norms over that of all, over four batches."""
    where = dict(cell.where)
    own = measured("words", "pretrained_batches/gradients.csv").query(f"temperature == {where['temperature']}")
    column = {"norm_ratio": "norm", "token_share": "num_tokens", "gradient_share": "share"}[where["quantity"]]
    wide = own.pivot(index="batch", columns="interval", values=column)
    values = wide[str(INTERVALS.index(where["interval"]))]
    return t_interval(values if column == "share" else values / wide["all"])[cell.column]


def kinds(cell: Cell) -> float:
    where = dict(cell.where)
    table = measured("cpu", "kinds/kinds.csv")
    whole = table[(table["kind"] == "all kinds") & (table["interval"] == "all")].set_index("batch")["norm"]
    own = table[(table["kind"] == where["kind"]) & (table["label"] == where["interval"])].set_index("batch")
    values = own["norm"] / whole if where["quantity"] == "norm_of_all" else own["share"]
    return t_interval(values)[cell.column]


def base_intervals(scale: str, cell: Cell) -> float:
    tokens = measured(scale, "base_policy/tokens.parquet")
    place = INTERVALS.index(dict(cell.where)["interval"])
    if cell.column == "token_share":
        return float((tokens["interval"] == place).mean())
    return float(tokens.loc[tokens["interval"] == place, "advantage"].median())


def directions(scale: str, cell: Cell) -> float:
    where = dict(cell.where)
    shares = measured(scale, "directions/shares.csv")
    for key in ("optimizer", "against", "method", "sign"):
        shares = shares[shares[key] == where[key]]
    wide = shares.pivot(index="batch", columns="interval", values="share")
    found = t_interval(wide[3] - wide[int(where["interval"])])
    return (found | {"difference": found["mean"]})[cell.column]


def after_start(table: pd.DataFrame, column: str, **where: object) -> pd.Series:
    """GRPO's mean over steps 100 and 150, by seed."""
    own = table[(table["variant"] == "grpo") & (table["step"] > 0)]
    for key, value in where.items():
        own = own[own[key].astype(str) == str(value)]
    return own.groupby("seed")[column].mean()


def over_training(scale: str, cell: Cell) -> float:
    quantity = dict(cell.where)["quantity"]
    if quantity.startswith("signal-to-noise"):
        gradients = measured(scale, "over_training/gradients.csv")
        values = after_start(gradients, "signal_to_noise", metric="raw", interval="all")
    else:
        one, other = (INTERVALS.index(part) for part in quantity.removeprefix("cosine ").split(" · "))
        cosines = measured(scale, "over_training/cosines.csv")
        values = after_start(cosines, "cosine", metric="raw", interval=one, other=other)
    found = t_interval(values)
    return (found | {"difference": found["mean"]})[cell.column]


def dominance(scale: str, cell: Cell) -> float:
    where = dict(cell.where)
    gradients = measured(scale, "over_training/gradients.csv")
    metric = "adamw" if "AdamW" in where["quantity"] else "raw"
    if where.get("step") == "0":
        own = gradients[(gradients["variant"] == "grpo") & (gradients["step"] == 0) & (gradients["metric"] == metric)]
        values = own[own["interval"].astype(str) == "0"].groupby("seed")["gradient_share"].mean()
    elif "step" in where:
        values = after_start(gradients, "gradient_share", metric=metric, interval=0)
    else:
        squares = after_start(gradients, "squared_share", metric=metric, interval=0)
        if "raw" in where["against"]:
            values = squares - after_start(gradients, "squared_share", metric="raw", interval=0)
        else:
            values = squares - after_start(measured(scale, "over_training/tokens.csv"), "token_share", interval=0)
    found = t_interval(values)
    return (found | {"difference": found["mean"]})[cell.column]


def batch_sizes(scale: str, cell: Cell) -> float:
    where, table = dict(cell.where), measured(scale, "batch_sizes/batch_sizes.csv")
    table = table[table["size"] == int(where["size"])].set_index("batch")
    own, whole = table[table["label"] == where["interval"]], table[table["label"] == "all"]
    values = own["norm"] / whole["norm"] if where["quantity"] == "norm_of_all" else own["share"]
    return t_interval(values)[cell.column]


def clipping(cell: Cell) -> float:
    where = dict(cell.where)
    scale = "words" if where["track"].startswith(("words", "varied")) else "cpu"
    own = metrics(scale, where["track"], where["variant"]).values()
    shares = [float((run["grad_norm"] > 1.0).mean()) for run in own]
    return {"clipped": np.mean(shares), "least": min(shares), "most": max(shares)}[cell.column]


def accuracies(scale: str, cell: Cell) -> float:
    where = dict(cell.where)
    if where["variant"] == "untrained":
        table = measured(scale, "untrained/untrained.csv").astype({"level": str})
        own = table[(table["temperature"] == 0.7) & (table["level"] != "all")]
        return float(np.average(own["sampled"], weights=own["questions"]))
    found = t_interval(accuracy(scale, "puzzles", where["variant"]))
    names = {"sampled": "mean", "sampled_lower": "lower", "sampled_upper": "upper"}
    return found[names[cell.column]]


def at_step(cell: Cell) -> float:
    where, values = dict(cell.where), []
    for own in test("cpu", "puzzles", where["variant"]).values():
        at = own[(own["step"] == int(where["step"])) & (own["level"].astype(str) != "all")]
        values.append(np.average(at[sampled(own)], weights=at["questions"]))
    return float(np.mean(values))


def seconds(scale: str, cell: Cell) -> float:
    logs = {}
    for variant in (dict(cell.where)["variant"], "grpo"):
        own = metrics(scale, "puzzles", variant).items()
        medians = {seed: run[["seconds_training", "seconds_sampling"]].median() for seed, run in own}
        logs[variant] = {seed: np.log(row.iloc[0] / row.iloc[1]) for seed, row in medians.items()}
    one, other = (pd.Series(own) for own in logs.values())
    found = t_interval((one - other).dropna())
    names = {"ratio": "mean", "ratio_lower": "lower", "ratio_upper": "upper"}
    return float(np.exp(found[names[cell.column]]))


@cache
def correlate(scale: str, measure: str, category: str) -> dict[str, float | Near]:
    own = word_counts(scale, "grpo", category)
    words = own["words"] * 100 / own["tokens"] if measure == "words per 100 tokens" else own["words"]
    of, clusters = pearson(words, own["reward"], own["group"])
    return bounded(of(np.ones(clusters)), *redraw(of, clusters), ("correlation", "lower", "upper"))


def correlations(scale: str, cell: Cell) -> float | Near:
    where = dict(cell.where)
    return correlate(scale, where["measure"], where["category"])[cell.column]


def pearson(x: pd.Series, y: pd.Series, group: pd.Series) -> tuple[Callable[[np.ndarray], float], int]:
    """Return the correlation as a function of each group's count, and the number of groups."""
    x, y, (place, names) = x.to_numpy(float), y.to_numpy(float), pd.factorize(group)
    sums = np.stack([np.bincount(place, part) for part in (np.ones_like(x), x, y, x * x, y * y, x * y)])

    def of(count: np.ndarray) -> float:
        n, sx, sy, sxx, syy, sxy = sums @ count
        return float((sxy - sx * sy / n) / np.sqrt((sxx - sx**2 / n) * (syy - sy**2 / n)))

    return of, len(names)


def rates(name: str, cell: Cell) -> float:
    where = dict(cell.where)
    if name == "rates_accuracy":
        return t_interval(accuracy(where["scale"], where["track"], where["variant"]))[cell.column]

    def at(scale: str, track: str, variant: str, baseline: str) -> pd.Series:
        return accuracy(scale, track, variant) - accuracy(scale, track, baseline)

    def claim(variant: str, baseline: str, which: str) -> Row:
        low, middle, high = ("rate-low", "rate-middle", "rate-high")
        of = {(s, r): at(s, r, variant, baseline) for s in ("cpu", "certain") for r in (low, middle, high)}
        rise = {scale: of[scale, high] - of[scale, low] for scale in ("cpu", "certain")}
        means = {scale: sum(of[scale, rate] for rate in (low, middle, high)) / 3 for scale in ("cpu", "certain")}
        values = {
            "highest rate − lowest": (rise["cpu"] + rise["certain"]) / 2,
            "the paper's regime − certain": means["cpu"] - means["certain"],
            "interaction": rise["cpu"] - rise["certain"],
        }
        return {key: t_interval(own) for key, own in values.items()} if not which else t_interval(values[which])

    found = claim(where["variant"], where["baseline"], where["claim"])
    if cell.column == "p_holm":
        pairs = [("reweight", "grpo"), ("lopti", "random-split")]
        return holm(found["p"], [own["p"] for both in pairs for own in claim(*both, "").values()])
    return (found | {"difference": found["mean"]})[cell.column]


@cache
def prediction() -> pd.DataFrame:
    """Predicted and actual differences to GRPO at each origin."""
    rows = []
    for scale in ("cpu", "certain"):
        keys = ["seed", "step", "variant"]
        gain = measured(scale, "predictions/predictions.csv").groupby(keys)["gain"].mean().unstack()
        reward = measured(scale, "branches/branches.csv").groupby(keys)["reward"].mean().unstack()
        for method in ("reweight", "lopti", "random-split", "high-entropy"):
            parts = {"predicted": gain[method] - gain["grpo"], "actual": reward[method] - reward["grpo"]}
            rows.append(pd.DataFrame(parts).reset_index().assign(scale=scale, method=method))
    table = pd.concat(rows, ignore_index=True)
    return table.assign(origin=table.groupby(["scale", "seed", "step"]).ngroup())


def prediction_scores(cell: Cell) -> float | Near:
    name, table = dict(cell.where)["score"], prediction().copy()
    if name == "right signs, by steps alone":
        table["predicted"] = np.where(table["method"].isin(["lopti", "random-split"]), 1.0, -1.0)

    x, y = (table[column].where(table[column].abs() > 1e-9, 0.0).to_numpy() for column in ("predicted", "actual"))
    method, origin = table["method"].astype("category").cat.codes.to_numpy(), table["origin"].to_numpy()

    def score(count: np.ndarray) -> float:
        weight = count[origin].astype(float)

        def centred(values: np.ndarray) -> np.ndarray:
            group = method if "within methods" in name else method * 0
            means = np.bincount(group, weight * values) / np.bincount(group, weight)
            return values - means[group]

        if "correlation" in name:
            dx, dy = centred(x), centred(y)
            return float(weight @ (dx * dy) / np.sqrt(weight @ dx**2 * (weight @ dy**2)))
        one, other = (centred(x), centred(y)) if "within methods" in name else (x, y)
        return float(weight @ (np.sign(one) == np.sign(other)) / weight.sum())

    ones = np.ones(10)
    if cell.column == "value":
        return score(ones)
    return bounded(score(ones), *redraw(score, 10), ("value", "lower", "upper"))[cell.column]


def judged_responses(cell: Cell) -> pd.DataFrame:
    """The responses, or tokens, whose norms verl's sums are held against, with columns x, y and group."""
    where = dict(cell.where)
    if "when" in where:
        name = "words_untrained" if where["when"] == "before training" else "words_trained"
        responses, tokens = (measured("words", f"{name}/{part}.parquet") for part in ("responses", "tokens"))
    else:
        responses = measured("cpu", "optimal_baseline/responses.parquet")
        responses = responses[responses["policy"] == where["policy"]]
        folder = "optimal_baseline" if where["policy"] == "embedded" else "real_language"
        tokens = measured("cpu", f"{folder}/tokens.parquet")
    pair, of = where["pair"], where["of"]
    if of == "token":
        own = tokens.sort_values(["response", "position"])
        squares = own[["logit_grad_norm", "param_grad_norm"]].astype(float) ** 2
        if "W_t" in pair:
            squares = squares.groupby(own["response"]).cumsum()
        own = own.assign(x=squares["logit_grad_norm"], y=squares["param_grad_norm"])
        return own[own["prob"] < 0.999] if pair.startswith("‖g‖²") else own
    sums = {"by Σ‖g‖²": "sum_of_norms_squared", "by verl's W": "logit_norms_squared", "by length": "length"}
    x = next(responses[column] for name, column in sums.items() if name in pair)
    scale = responses["length"] if "per token" in pair else 1.0
    own = responses.assign(x=x / scale, y=responses["sum_norm_squared"] / scale)
    shorter = own["length"] < own["length"].median()
    return own[shorter if of.startswith("shorter") else ~shorter] if of != "response" else own


@cache
def judge(cell: Cell) -> float | Near:
    own = judged_responses(cell)
    x, y = own["x"].to_numpy(float), own["y"].to_numpy(float)
    if cell.column in ("r2", "slope"):
        fit = stats.linregress(np.log(x), np.log(y))
        return float(fit.slope if cell.column == "slope" else fit.rvalue**2)
    rank, clusters = pearson(own["x"].rank(), own["y"].rank(), own["group"])
    if cell.column == "spearman":
        return rank(np.ones(clusters))
    ends = jackknife(rank, clusters, least=-1.0, wider=False)
    return Near(ends[cell.column.endswith("upper")], (ends[1] - ends[0]) / 3)


def saved_variance(cell: Cell) -> float | Near:
    where = dict(cell.where)
    own = measured("cpu", "optimal_baseline/responses.parquet").query(f"policy == '{where['policy']}'")
    sums = own.groupby("group").sum(numeric_only=True)
    plain, better = sums["power: mean"].to_numpy(), sums[f"power: {where['baseline']}"].to_numpy()
    signal = sums["signal"].to_numpy()
    of = lambda count: float(count @ (plain - better) / (count @ (plain - signal)))  # noqa: E731
    return bounded(of(np.ones(len(plain))), *jackknife(of, len(plain)), ("saved", "lower", "upper"))[cell.column]


def sharpening(cell: Cell) -> float:
    untrained = measured("cpu", "untrained/untrained.csv").astype({"level": str})
    untrained = untrained[untrained["level"] == "all"].sort_values("temperature")
    gains = []
    for seed, own in test("cpu", "puzzles", dict(cell.where)["variant"]).items():
        last = own[own["step"] == own["step"].max()].astype({"level": str}).set_index("level")
        means = answers("cpu", "grpo")[seed].groupby("level")[["logprob", "tokens"]].mean()
        whole = means.mul(last["questions"].reindex(means.index), axis=0).sum()
        xs = [0.0, *untrained["entropy"]]
        ys = [untrained["greedy"].iloc[0], *untrained["sampled"]]
        gains.append(last.loc["all", sampled(own)] - np.interp(-whole["logprob"] / whole["tokens"], xs, ys))
    return t_interval(gains)[cell.column]


def gates(cell: Cell) -> float:
    where = dict(cell.where)
    runs, track = metrics("words", where["track"], "grpo"), where["track"]
    start = measured("words", ("words_start" if track == "words-low" else "words_start_varied") + "/start.csv")
    before = float(start.loc[start["level"].astype(str) == "all", "sampled"].iloc[0])
    after = float(accuracy("words", track, "grpo").mean())

    def share(first: int, last: int) -> float:
        return float(np.mean([run["token_share_0"][run["step"].between(first, last)].mean() for run in runs.values()]))

    return {
        "right before training": before,
        "gain": after - before,
        "right after training": after,
        "tokens with π < ¼ at the start": share(1, 3),
        "tokens with π < ¼ at step 30": share(29, 31),
    }[where["gate"]]


def gate_runs(cell: Cell) -> float:
    made = sum(len(test("words", track, "grpo")) for track in ("words-low", "varied-low", "varied-high"))
    return {"made": made, "planned": 3 * 2}[cell.column]


def trained(cell: Cell) -> float | Near:
    """SmolLM2 at the end of one run: shares of its tokens, and of 24 problems' summed gradient."""
    where = dict(cell.where)
    if where["statistic"] == "token_share":
        return rare_share(measured("words", "words_trained/tokens.parquet"), cell.column)
    flat = measured("words", "words_trained/products.parquet")
    n = flat["group"].nunique()
    gram = flat.drop(columns=["group", "interval"]).to_numpy().reshape(n, 4, n, 4)
    if where["statistic"] == "gradient_share":
        along = gram.sum(3)
        value = lambda count: float(count @ along[:, 0] @ count / (count @ along.sum(1) @ count))  # noqa: E731
    else:
        whole = gram.sum((1, 3))

        def value(count: np.ndarray) -> float:
            size, square = count.sum(), count @ whole @ count
            # A prompt drawn twice is no other prompt.
            own = (count**2) @ np.diag(whole)
            return float(size / (size - 1) * (square - own) / square)

    ones = np.ones(n)
    left = np.array([value(np.where(np.arange(n) == p, 0.0, 1.0)) for p in range(n)])
    half = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())
    return bounded(value(ones), value(ones) - half, value(ones) + half, ("value", "lower", "upper"))[cell.column]


def from_energies() -> float:
    tokens = measured("words", "words_trained/tokens.parquet")
    energy, ratio = (tokens["weight"] * tokens["param_grad_norm"]) ** 2, 0.7 + 0.3 * tokens["prob"]
    return float((ratio * energy).sum() / np.sqrt(energy.sum() * (ratio**2 * energy).sum()))


SIGNALS = {
    "embedded, at the start": ("cpu", "signal_start"),
    "embedded, after 150 steps of GRPO": ("cpu", "signal_trained"),
    "SmolLM2, at the start": ("words", "signal_words"),
}
"""Scale and measurement of each policy whose prompts' signal is measured."""


def of_signals(where: Where, file: str) -> pd.DataFrame:
    scale, name = SIGNALS[where["policy"]]
    return measured(scale, f"{name}/{file}")


@cache
def signals(policy: str, metric: str, grouping: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Signals s_a and own parts C_a by group, of all prompts and without each fold, [fold, (part, group)]."""
    table = of_signals({"policy": policy}, "signals.csv")
    table = table[(table["metric"] == metric) & (table["grouping"] == grouping)]
    point = table[table["left_out"] < 0].set_index("group")
    return point, table[table["left_out"] >= 0].pivot(index="left_out", columns="group", values=["signal", "own"])


def t_of_folds(value: float, left: np.ndarray) -> Row:
    error, freedom = np.sqrt((len(left) - 1) * np.mean((left - left.mean()) ** 2)), len(left) - 1
    half = stats.t.ppf(0.975, freedom) * error
    return {"lower": value - half, "upper": value + half, "p": float(2 * stats.t.sf(abs(value) / error, freedom))}


def share_of_batch(signal: pd.Series, own: pd.Series, group: str, prompts: int) -> float:
    of = (prompts - 1) * signal + own
    return of[group] / of["all"]


def signal_of_prompts(cell: Cell) -> float:
    where = dict(cell.where)
    group = where.get("group", INTERVALS[0])
    point, left = signals(where["policy"], where["metric"], where.get("grouping", "interval"))
    share = point["signal"][group] / point["signal"]["all"]
    if cell.column.startswith("share_"):
        _, size, *end = cell.column.split("_")
        return bounded_share(lambda row: (int(size) - 1) * row["signal"] + row["own"], group, point, left, *end)
    if cell.file == "signal_test":
        in_batch = where["than"] == "batch of 8"
        whole, without = (point, left) if in_batch else signals(where["policy"], where["metric"], "entropy")
        than = [
            share_of_batch(row["signal"], row["own"], group, 8)
            if in_batch
            else row["signal"][where["than"]] / row["signal"]["all"]
            for row in (whole, *(row for _, row in without.iterrows()))
        ]
        value = share - than[0]
        others = left["signal"][group] / left["signal"]["all"] - than[1:]
        return ({"difference": value} | t_of_folds(value, np.array(others)))[cell.column]
    if cell.column == "token_share":
        return point["tokens"][group] / point["tokens"].drop("all").sum()
    if cell.column == "own_share":
        return point["own"][group] / point["own"]["all"]
    if cell.column == "errors_from_zero":
        without = left["signal"]["all"]
        return point["signal"]["all"] / np.sqrt((len(without) - 1) * without.var(ddof=0))
    if cell.column.startswith("noise_scale"):
        ratio = point["signal"]["all"] / point["own"]["all"]
        ends = t_of_folds(ratio, (left["signal"]["all"] / left["own"]["all"]).to_numpy())
        names = {"noise_scale": ratio, "noise_scale_lower": ends["upper"], "noise_scale_upper": ends["lower"]}
        return 1 / names[cell.column] - 1
    return bounded_share(lambda row: row["signal"], group, point, left, *cell.column.split("_")[2:])


def bounded_share(
    of: Callable[[pd.DataFrame], pd.DataFrame | pd.Series],
    group: str,
    point: pd.DataFrame,
    left: pd.DataFrame,
    end: str | None = None,
) -> float:
    """Share of a group, or an end of Fieller's set: shares θ for which x_a − θ·x is not told from 0."""
    whole, without = of(point), of(left)
    share = whole[group] / whole["all"]
    if end is None:
        return float(share)

    def square(theta: float) -> float:
        found = t_of_folds(whole[group] - theta * whole["all"], (without[group] - theta * without["all"]).to_numpy())
        return found["lower"] * found["upper"]

    ends = {"lower": share - 5, "upper": share + 5}
    return float(optimize.brentq(square, *sorted((share, ends[end]))))


def signal_cosines(cell: Cell) -> float:
    """Reweight's expected cosine, by sums over prompts, or what the energies give."""
    where = dict(cell.where)
    alpha = float(where["alpha"])
    if cell.column == "from_energies":
        e = of_signals(where, "energies.csv")
        of, more, most = ((e[name] * e["tokens"]).sum() for name in ("e", "e_pi", "e_pi2"))
        ratio, square = (1 - alpha) * of + alpha * more, (1 - alpha) ** 2 * of + 2 * alpha * (1 - alpha) * more
        return float(ratio / np.sqrt(of * (square + alpha**2 * most)))
    prompts = of_signals(where, "prompts.parquet").query("metric == @where['metric']")

    def cosine(out: int | None) -> float:
        def product(one: str, other: str, own: str) -> float:
            whole = prompts[one].sum() - prompts[own].sum()
            if out is None:
                return whole
            row = prompts.iloc[out]
            return whole - row[one] - row[other] + 2 * row[own]

        gg, gh, hh = product("gg", "gg", "gg_own"), product("gh", "hg", "hg_own"), product("hh", "hh", "hh_own")
        norm = (1 - alpha) ** 2 * gg + 2 * alpha * (1 - alpha) * gh + alpha**2 * hh
        return float(((1 - alpha) * gg + alpha * gh) / np.sqrt(gg * norm))

    value = cosine(None)
    return ({"cosine": value} | t_of_folds(value, np.array([cosine(out) for out in range(len(prompts))])))[cell.column]


def slack(layer: int) -> float:
    tokens = measured("cpu", "layer_constants/tokens.parquet")
    constants = measured("cpu", "layer_constants/constants.csv")
    constants = constants[(constants["layer"] == layer) & (constants["product_kind"] == "certified")]
    norm = f"act_grad_norm.{layer}"
    own = tokens[["context", "log_one_minus_prob", norm]].dropna().merge(constants, on="context")
    return float((own["product_d"] * np.sqrt(2) * np.exp(own["log_one_minus_prob"]) / own[norm]).median())


def moved(cell: Cell) -> float:
    where, tokens = dict(cell.where), measured("cpu", "updates/tokens.parquet")
    update = {"(c)": "all", "(e)": "only-0", "(f)": "only-3"}[where["panel"][:3]]
    inside = tokens["interval"] == INTERVALS.index(where["interval"])
    return float(tokens.loc[inside, f"delta_prob.{update}"].abs().mean())


def means_of_records(cell: Cell) -> float:
    where = dict(cell.where)
    return float(record(where["scale"], where["track"], where["variant"], where["record"], where["steps"]).mean())


def pretrained(cell: Cell, name: str) -> float | Near:
    if cell.file.endswith("_theory"):
        return theory("cpu", name, cell)
    return rare_share(measured("cpu", name), cell.column)


MEASURED: dict[str, Callable[[str, Cell], float | Near]] = {
    "base_policy_gradients": lambda scale, _: float(len(measured(scale, "base_policy/tokens.parquet"))),
    "base_policy_intervals": base_intervals,
    "base_policy_theory": lambda scale, cell: theory(scale, "base_policy/tokens.parquet", cell),
    "batch_sizes": batch_sizes,
    "clipping": lambda _, cell: clipping(cell),
    "dominance_adamw": dominance,
    "dominance_adamw_contrasts": dominance,
    "fig1": lambda _, cell: moved(cell),
    "fig1_similarity": lambda scale, cell: over_batches(measured(scale, "updates/tokens.parquet"), cell),
    "fig3_intervals": directions,
    "fig4_accuracy": accuracies,
    "fig5_correlations": correlations,
    "fig7_8_accuracy": lambda _, cell: at_step(cell),
    "gemma3": lambda _, cell: pretrained(cell, "real_language_gemma3/tokens.parquet"),
    "gemma3_theory": lambda _, cell: pretrained(cell, "real_language_gemma3/tokens.parquet"),
    "horizon": lambda _, cell: horizon(cell),
    "kinds": lambda _, cell: kinds(cell),
    "layer_constants_bounds": lambda _, cell: slack(int(dict(cell.where)["layer"])),
    "optimal_baseline": lambda _, cell: judge(cell),
    "optimal_baseline_saved": lambda _, cell: saved_variance(cell),
    "over_training_contrasts": over_training,
    "prediction_scores": lambda _, cell: prediction_scores(cell),
    "rare_tokens_means": lambda _, cell: means_of_records(cell),
    "rates_accuracy": lambda _, cell: rates("rates_accuracy", cell),
    "rates_claims": lambda _, cell: rates("rates_claims", cell),
    "sharpening_contrasts": lambda _, cell: sharpening(cell),
    "signal": lambda _, cell: signal_of_prompts(cell),
    "signal_cos": lambda _, cell: signal_cosines(cell),
    "signal_test": lambda _, cell: signal_of_prompts(cell),
    "smollm2": lambda _, cell: pretrained(cell, "real_language/tokens.parquet"),
    "smollm2_theory": lambda _, cell: pretrained(cell, "real_language/tokens.parquet"),
    "table6": seconds,
    "words/pretrained_norms": lambda _, cell: batch_norms(cell),
    "words/pretrained_powers": lambda _, cell: theory("words", "pretrained_batches/tokens.parquet", cell),
    "words/pretrained_similarity": lambda _, cell: over_batches(at_temperature(dict(cell.where)["temperature"]), cell),
    "words/words_gates": lambda _, cell: gates(cell),
    "words/words_runs": lambda _, cell: gate_runs(cell),
    "words/words_trained": lambda _, cell: trained(cell),
    "words/words_trained_proxy": lambda _, cell: judge(cell),
    "words/words_trained_weightings": lambda *_: from_energies(),
}


def why_not(cell: Cell) -> str | None:
    """Return why a cell is not recomputable, if it is not."""
    parts = (cell.file, f"{cell.file}: {cell.column}", *(f"{cell.file}: {value}" for _, value in cell.where))
    return next((KEPT_SUMMARIES[part] for part in parts if part in KEPT_SUMMARIES), None)


def recompute(cell: Cell, figures: Path) -> float | Near:
    name = cell.file.removeprefix("certain/")
    scale = "cpu" if name == cell.file else "certain"
    if name in FAMILIES:
        return contrast(name, scale, cell, pd.read_csv(places.place(figures, f"{cell.file}.csv")))
    return MEASURED[name](scale, cell)


def agrees(cell: Cell, found: float | Near) -> bool:
    if isinstance(found, Near):
        return abs(found.value - cell.value) <= found.slack
    return abs(found - cell.value) <= max(1e-3 * abs(cell.value), 1e-6, 0.05 * 10.0**-cell.digits)


def table(figures: Path) -> pd.DataFrame:
    """Return a row per quoted cell: page, cell, quoted, recomputed, equal ("yes", "no", or why it cannot be told)."""
    rows = []
    for cell in quoted_cells(figures):
        keys = ", ".join(value for _, value in cell.where)
        row = {"page": cell.page, "cell": f"{cell.file}: {keys}: {cell.column}", "quoted": cell.value}
        if reason := why_not(cell):
            rows.append(row | {"recomputed": np.nan, "equal": f"not recomputable: {reason}"})
            continue
        found = recompute(cell, figures)
        value = found.value if isinstance(found, Near) else found
        rows.append(row | {"recomputed": value, "equal": "yes" if agrees(cell, found) else "no"})
    return pd.DataFrame(rows)


def main(options: Options) -> int:
    found = table(options.figures)
    shown = found if options.all else found[found["equal"] == "no"]
    if len(shown):
        print(shown.to_string(index=False, float_format="{:.5g}".format, max_colwidth=None))
    cannot = found["equal"].str.startswith("not recomputable").sum()
    equal = (found["equal"] == "yes").sum()
    print(f"{len(found)} numbers: {equal} equal, {(found['equal'] == 'no').sum()} not, {cannot} not recomputable")
    return 1 if (found["equal"] == "no").any() else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
