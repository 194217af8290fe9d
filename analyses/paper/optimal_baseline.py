"""How well does verl's proxy Σ_t ‖e − π‖² stand for ‖∇ log π(τ)‖², and what does a baseline made with it save?

    python -m analyses.paper.optimal_baseline [--out figures]

Drawn from the measurement `optimal_baseline` (analyses/measure/optimal_baseline.py): the embedded policy at T = 0.7,
and SmolLM2-135M-Instruct, de-quantised from four bits, at T = 1. optimal_baseline.csv: rank correlation, explained
variance of the log, slope of the log and ratio of the means for each pair, and for the tokens of Gemma 3 270M;
optimal_baseline_saved.csv: the share of the estimator's variance that each baseline saves against the mean of the other
responses' rewards; optimal_baseline_units.csv: verl's `variance_proxy` beside the same quantities in units of
parameters. Bounds are over prompts.

The paper has no such figure. verl's formulas are those of its `core_algos` and `metric_utils` in November 2026.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy.stats import rankdata

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.measure.optimal_baseline import ENERGY, LENGTH, POWER, PROXY, SUM, TOKENWISE, WHOLE
from analyses.measure.real_language import MODELS
from gradscope.gradients import LOGITS, PARAMETERS
from gradscope.plots import NEUTRAL, PAGE_WIDTH, headline, paper_style
from gradscope.resampling import ANY, FEWEST, Scale, bootstrap
from gradscope.theory import FLOOR

POLICIES = {"embedded": "embedded, T = 0.7", "smollm2": "SmolLM2-135M-Instruct (4 bits), T = 1"}
ENDS = ("", "_lower", "_upper")
BY_TOKEN = "‖g‖² by ‖e − π‖²"


def table(options: Options) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Return a row per response of both policies, and the tokens of each."""
    responses = read_table("optimal_baseline", "responses.parquet", scale=options.scale)
    tokens = {"embedded": read_table("optimal_baseline", "tokens.parquet", scale=options.scale)}
    tokens["smollm2"] = read_table("real_language", "tokens.parquet", scale=options.scale)
    return responses, tokens


def judge(x: pd.Series, y: pd.Series, prompts: pd.Series) -> dict[str, float]:
    """Measure how well x stands for y, with bounds over prompts.

    spearman: rank correlation; r2, slope: of log y on log x; ratio: Σy/Σx.
    """
    names, clusters = np.unique(prompts, return_inverse=True)
    a, b = x.to_numpy(float), y.to_numpy(float)
    sums = []
    for u, v in ((rankdata(a), rankdata(b)), (np.log(a), np.log(b))):
        columns = (np.ones(len(a)), u, v, u * u, v * v, u * v)
        sums.append(np.stack([np.bincount(clusters, each, len(names)) for each in columns], 1))
    plain = np.stack([np.bincount(clusters, each, len(names)) for each in (a, b)], 1)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        found = []
        for one in sums:
            n, u, v, uu, vv, uv = (weights @ one).T
            uu, vv, uv = uu / n - (u / n) ** 2, vv / n - (v / n) ** 2, uv / n - u * v / n**2
            found.append((uv / np.sqrt(uu * vv), uv / uu))
        whole = weights @ plain
        return np.stack([found[0][0], found[1][0] ** 2, found[1][1], whole[:, 1] / whole[:, 0]], 1)

    scales = (Scale(-1.0, 1.0), Scale(0.0, 1.0), ANY, Scale(0.0))
    found = [bootstrap(evaluate, len(names), scale=scale)[:, place] for place, scale in enumerate(scales)]
    keys = [key + end for key in ("spearman", "r2", "slope", "ratio") for end in ENDS]
    return {"number": len(a), "prompts": len(names)} | dict(zip(keys, np.concatenate(found), strict=True))


def judge_tokens(tokens: pd.DataFrame) -> dict[str, float]:
    """Measure how well ‖e − π‖² stands for ‖g‖² per token, over measured tokens that are not almost certain."""
    some = tokens[(tokens["prob"] < 1 - FLOOR) & tokens[PARAMETERS].notna()]
    squares = some[[LOGITS, PARAMETERS]].astype(float) ** 2
    return judge(squares[LOGITS], squares[PARAMETERS], some["group"])


def judge_all(responses: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """Return a row per question and pair for one policy."""
    squares = tokens[[LOGITS, PARAMETERS]].astype(float) ** 2
    upto = squares.groupby(tokens["response"]).cumsum()
    length, prompts = responses[LENGTH], responses["group"]
    verls, whole, energy = responses[PROXY], responses[SUM], responses[ENERGY]
    rows = [
        ("i", "‖Σg‖² by Σ‖g‖²", "response", judge(energy, whole, prompts)),
        ("i", "‖Σg‖² by Σ‖g‖², both per token", "response", judge(energy / length, whole / length, prompts)),
        ("ii", BY_TOKEN, "token", judge_tokens(tokens)),
        ("iii", "Σ‖g‖² to t by verl's W_t", "token", judge(upto[LOGITS], upto[PARAMETERS], tokens["group"])),
        ("iii", "Σ‖g‖² by verl's W", "response", judge(verls, energy, prompts)),
        ("iii", "‖Σg‖² by verl's W", "response", judge(verls, whole, prompts)),
        ("iii", "‖Σg‖² by length", "response", judge(length, whole, prompts)),
        ("iii", "‖Σg‖² by verl's W, both per token", "response", judge(verls / length, whole / length, prompts)),
    ]
    for name, inside in {
        "shorter than the median": length < length.median(),
        "others": length >= length.median(),
    }.items():
        if prompts[inside].nunique() > 1:
            rows.append(("iii", "‖Σg‖² by verl's W", name, judge(verls[inside], whole[inside], prompts[inside])))
    return pd.DataFrame([{"question": q, "pair": pair, "of": of} | found for q, pair, of, found in rows])


def save_variance(responses: pd.DataFrame) -> pd.DataFrame:
    """Return the share of the estimator's variance that each baseline saves against the others' plain mean.

    Only prompts whose responses differ in reward contribute; with fewer than FEWEST of them the table is empty.
    """
    columns = ["baseline", "saved", "lower", "upper"]
    by_prompt = responses.groupby("group").sum(numeric_only=True)
    plain, signal = by_prompt[POWER + "mean"].to_numpy(), by_prompt["signal"].to_numpy()
    if (plain > 0).sum() < FEWEST:
        return pd.DataFrame(columns=columns)
    rows = []
    for name in [*WHOLE, *TOKENWISE]:
        if name == "mean" or POWER + name not in responses or responses[POWER + name].isna().any():
            continue
        own = by_prompt[POWER + name].to_numpy()
        found = bootstrap(lambda w, own=own: (w @ (plain - own) / (w @ (plain - signal)))[:, None], len(plain))[:, 0]
        rows.append({"baseline": name} | dict(zip(("saved", "lower", "upper"), found, strict=True)))
    return pd.DataFrame(rows, columns=columns)


def compare_units(responses: pd.DataFrame) -> pd.DataFrame:
    """Compare verl's variance_proxy with its value in units of parameters, for two ways to sum the loss.

    signal: squared norm of the loss's gradient (verl's proxy1); power: mean squared norm of a response's term in it;
    noise: their difference over N − 1. verl's proxy2 and proxy3 take W for ‖s‖² and do not scale it like the loss.
    """
    advantages, count = responses["advantage"], len(responses)
    verls = float((advantages**2 * responses[PROXY]).mean())
    rows = []
    for loss, scale in {"token-mean": count / responses[LENGTH].sum(), "seq-mean-token-sum": 1.0}.items():
        power = float((advantages**2 * responses[SUM]).mean()) * scale**2
        signal = float(responses["loss_gradient_squared"].iloc[0]) * (scale / count) ** 2
        noise, proxy = (power - signal) / (count - 1), max(0.0, (verls - signal) / (count - 1))
        row = {"loss": loss, "responses": count, "signal": signal, "power": power, "noise": noise}
        rows.append(row | {"proxy2": verls, "proxy3": proxy, "factor": proxy / noise})
    return pd.DataFrame(rows)


POINTS = "#31688e"


@paper_style()
def draw(responses: pd.DataFrame, tokens: dict[str, pd.DataFrame], judged: pd.DataFrame, saved: pd.DataFrame) -> Figure:
    """Draw a row per policy: questions (i), (ii) and (iii); below, on one scale, what baselines save."""
    figure = plt.figure(figsize=(PAGE_WIDTH, 6.8), layout="constrained")
    grid = figure.add_gridspec(len(POLICIES) + 1, 6, height_ratios=[*[1.0] * len(POLICIES), 0.9])
    beside: Axes | None = None
    for number, (name, title) in enumerate(POLICIES.items()):
        own, few = responses[responses["policy"] == name], tokens[name]
        few = few[few["prob"] < 1 - FLOOR]
        few = few.sample(min(1500, len(few)), random_state=0)
        told = judged[judged["policy"] == name].drop_duplicates("pair").set_index("pair")
        drawn = (
            (own[ENERGY], own[SUM], "Σ‖g‖² of a response", "‖Σg‖²", "‖Σg‖² by Σ‖g‖²"),
            (few[LOGITS] ** 2, few[PARAMETERS] ** 2, "‖e − π‖² of a token", "‖g‖²", BY_TOKEN),
            (own[PROXY], own[SUM], "verl's W = Σ‖e − π‖²", "‖Σg‖²", "‖Σg‖² by verl's W"),
        )
        axes = [figure.add_subplot(grid[number, 2 * place : 2 * place + 2]) for place in range(len(drawn))]
        for ax, (x, y, below, left, pair) in zip(axes, drawn, strict=True):
            ax.plot(x, y, ".", ms=3, alpha=0.5, color=POINTS, mew=0)
            row = told.loc[pair]
            head = f"{title}\n" if ax is axes[0] else "\n"
            words = f"{head}rank r {row['spearman']:.2f}, R² {row['r2']:.2f},\nslope {row['slope']:.2f}"
            ax.set_title(words, loc="left")
            ax.set(xscale="log", yscale="log", xlabel=below, ylabel=left)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter(NullFormatter())
                if len(x) == len(own):  # less than two decades
                    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+0", "e")))
        reach = np.array([own[ENERGY].min(), own[ENERGY].max()])
        axes[0].plot(reach, reach, "k--", lw=0.8, label="equal")
        axes[0].legend(loc="lower right")
        ax = figure.add_subplot(grid[-1, 3 * number : 3 * number + 3], sharex=beside)
        beside = ax
        draw_saved(ax, saved[saved["policy"] == name].reset_index(drop=True))
        ax.set_title(f"variance saved, {title.split(',')[0].split(' (')[0]}", loc="left")
    return headline(figure, "", "Bars: 95 % intervals over prompts.")


def draw_saved(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the share of the variance that each baseline saves, and write it at the right."""
    errors = np.abs(rows[["lower", "upper"]].to_numpy().T - rows["saved"].to_numpy())
    ax.errorbar(rows["saved"], rows.index, xerr=errors, fmt="o", ms=4, color=POINTS, elinewidth=1)
    for row in rows.itertuples():
        words = f"{row.saved:.2f} [{row.lower:.2f}, {row.upper:.2f}]".replace("-", "−")
        ax.text(1.0, row.Index, words, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    ax.axvline(0, color=NEUTRAL, lw=0.6, zorder=0)
    ax.set_yticks(rows.index, rows["baseline"])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(-0.8, 1.5), xticks=[-0.5, 0, 0.5], xlabel="share of the variance")
    ax.tick_params(axis="y", length=0)


def main(options: Options) -> None:
    responses, tokens = table(options)
    frames: dict[str, list[pd.DataFrame]] = {"": [], "_saved": [], "_units": []}
    for name in POLICIES:
        own = responses[responses["policy"] == name]
        told = judge_all(own, tokens[name]), save_variance(own), compare_units(own)
        for kept, found in zip(frames.values(), told, strict=True):
            kept.append(found.assign(policy=name))
    gemma3 = read_table(MODELS["gemma3"].measurement, "tokens.parquet", scale=options.scale)
    told = {"question": "ii", "pair": BY_TOKEN, "of": "token"} | judge_tokens(gemma3)
    frames[""].append(pd.DataFrame([told]).assign(policy="gemma3"))
    joined = {end: pd.concat(kept, ignore_index=True) for end, kept in frames.items()}
    figure = draw(responses, tokens, joined[""], joined["_saved"])
    save_picture(figure, options.at("optimal_baseline.png"), joined[""])
    for end, frame in joined.items():
        write_csv(frame, options.at(f"optimal_baseline{end}.csv"), float_format="%.4g")
        print(frame.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
