"""The pretrained policy after one GRPO run on word problems, beside the one before it: dominance, powers, verl's proxy.

    python -m analyses.paper.words_trained [--out figures]

Drawn from the measurements `words_untrained` and `words_trained` (analyses/measure/words_trained.py), at the start and
the end of the run, and, for shares, norms and powers at the start, from the four batches of `pretrained_batches` at
T = 1: words_trained.png, and words_trained.csv with the intervals' shares and norms, of Σ‖w·g‖² in AdamW's metric, too.
With the same prefix, _powers.csv has the powers of 1 − π that norms follow; _proxy.csv, _saved.csv and _units.csv how
well verl's sums stand for norms and what baselines save (as in analyses/paper/optimal_baseline.py); _sizes.csv the
shares of the summed gradient in batches of fewer prompts; _weightings.csv what token weightings would do (`gradscope
compare`; without bounds, since 3 of the 8 prompts have an advantage); _weights.csv how many weights training changed;
_samples.csv what was sampled. Bounds are over the prompts of one batch (8, and 24 for summed gradients), for
pretrained_batches over the four. This is one run of one seed and says nothing about others.

The paper has no such figure.
"""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import WordsOptions as Options, exit_with
from analyses.common.tables import write_csv
from analyses.measure.words_trained import unflatten
from analyses.paper import pretrained_batches
from analyses.paper.optimal_baseline import compare_units, judge_all, judge_tokens, save_variance
from gradscope.diagnosis import gradient_rows, sum_by_prompt, token_shares
from gradscope.gradients import ADAMW, LAYER, PARAMETERS, Gram
from gradscope.intervals import interval_labels
from gradscope.objective import make_weighting
from gradscope.plots import NEUTRAL, PAGE_WIDTH, TIMES, headline, interval_colors, name_intervals, paper_style
from gradscope.resampling import short_of
from gradscope.theory import fit_powers

NAME, LABELS = "words_trained", interval_labels()
SHARED = ("tokens.parquet", "products.parquet", "responses.parquet", "samples.csv")
"""Tables read from both measurements."""
TABLES = (*SHARED, "summed.parquet", "scaled.parquet", "weightings.csv", "weights.csv")
START, END = "before training", "after 60 steps"
COLORS = dict(zip((START, END), TIMES.values(), strict=True))
QUANTITIES = ("token_share", "squared_share", "norm_ratio", "gradient_share", "signal_fraction")
SHOWN = {"token_share": "share of the tokens", "gradient_share": "share of the summed gradient"}
SCALED_PAIRS = {"‖g‖² by ‖e − π‖², some": PARAMETERS, "‖g‖² in AdamW's metric by ‖e − π‖²": ADAMW}
"""Pairs on the tokens whose norms are known in AdamW's metric."""
NUMBERS = ("cosine", "norm_ratio", "signal_to_noise", "right_sgd", "effective_share")
"""A weighting's numbers that are kept with their bounds."""
DEALS = 200


def table(options: Options) -> dict[str, pd.DataFrame]:
    """Return the numbers by the ending of their file's name."""
    of = read_tables(NAME, TABLES, options.scale)
    untrained = read_tables("words_untrained", SHARED, options.scale)
    start = {
        name: pretrained_batches.pick(rows, ("smollm2-words", 1.0)).reset_index(drop=True)
        for name, rows in pretrained_batches.table(pretrained_batches.Options(scale=options.scale)).items()
    }
    shares = token_shares(sum_by_prompt(of["tokens"], len(LABELS)), LABELS)
    products, counts = unflatten(of["products"]), pd.crosstab(of["summed"]["group"], of["summed"]["interval"])
    sums = gradient_rows(Gram.exact(products), counts.to_numpy(float), LABELS, metric="raw")
    in_adamw = token_shares(sum_by_prompt(of["scaled"], len(LABELS), ADAMW), LABELS)
    in_adamw = in_adamw[in_adamw["statistic"] == "squared_share"].assign(metric="adamw")
    end = pd.concat([shares, sums, in_adamw]).assign(when=END)
    before = pretrained_batches.compare(start["gradients"]).assign(when=START, metric="raw")
    before = before.rename(columns={"quantity": "statistic", "mean": "value"})
    columns = ["when", "statistic", "metric", "interval", "value", "lower", "upper"]
    both = {START: untrained, END: of}
    proxy = [stack(both, lambda own: judge_all(own["responses"], own["tokens"]))]
    for name, norm in SCALED_PAIRS.items():
        scaled = of["scaled"].assign(**{PARAMETERS: of["scaled"][norm]})
        row = {"question": "ii", "pair": name, "of": "token"} | judge_tokens(scaled) | {"when": END}
        proxy.append(pd.DataFrame([row]))
    weightings = weigh(of["weightings"], of["tokens"])
    powers = [fit_powers(start["tokens"]).assign(when=START), fit_powers(of["tokens"]).assign(when=END)]
    return {
        "": pd.concat([before, end[end["statistic"].isin(QUANTITIES)]])[columns],
        "_powers": pd.concat(powers),
        "_proxy": pd.concat(proxy),
        "_saved": stack(both, lambda own: save_variance(own["responses"])),
        "_units": stack(both, lambda own: compare_units(own["responses"])),
        "_sizes": stack(both, lambda own: by_size(unflatten(own["products"]))),
        "_weightings": weightings,
        "_weights": share_weights(of["weights"]),
        "_samples": stack(both, lambda own: own["samples"]),
    }


def read_tables(name: str, tables: tuple[str, ...], scale: str) -> dict[str, pd.DataFrame]:
    """Return a measurement's tables by their names without endings."""
    return {table.split(".")[0]: read_table(name, table, scale=scale) for table in tables}


def stack(
    both: dict[str, dict[str, pd.DataFrame]], make: Callable[[dict[str, pd.DataFrame]], pd.DataFrame]
) -> pd.DataFrame:
    """Make a table from each measurement's, and stack them, with a column `when`."""
    return pd.concat(make(own).assign(when=when) for when, own in both.items())


def by_size(products: Float[np.ndarray, "n A n A"]) -> pd.DataFrame:
    """Return ⟨G_a, G⟩/‖G‖² in DEALS batches of fewer of these prompts: mean, and the range of the central 95 %.

    Batches whose rewards are equal within every prompt have no gradient and are skipped.
    """
    count, rng, along, rows = len(products), np.random.default_rng(0), products.sum(3), []
    for size in (2**power for power in range(count.bit_length())):
        dealt = rng.permuted(np.tile(np.arange(count), (DEALS if size < count else 1, 1)), axis=1)
        inside = np.zeros((len(dealt) * (count // size), count))
        np.put_along_axis(inside, dealt[:, : count // size * size].reshape(-1, size), 1.0, axis=1)
        parts = np.einsum("kp,paq,kq->ka", inside, along, inside)
        parts = parts[parts.sum(1) > 0]
        for label, own in zip(LABELS, (parts / parts.sum(1, keepdims=True)).T, strict=True):
            lower, upper = np.quantile(own, [0.025, 0.975])
            row = {"prompts": size, "interval": label, "batches": len(own)}
            rows.append(row | {"mean": own.mean(), "lower": lower, "upper": upper})
    return pd.DataFrame(rows)


def weigh(weightings: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the weightings' numbers, with the cosine with GRPO's gradient that their energies alone would give.

    Without bounds where fewer than six prompts have an advantage.
    """
    ends = [name + end for name in NUMBERS for end in ("", "_lower", "_upper")]
    weightings = weightings[["method", "step", *(end for end in ends if end in weightings)]]
    table = tokens.assign(policy_weight=tokens["weight"], logprob=np.log(tokens["prob"]), old_logprob=np.nan)
    squares, plain = table[PARAMETERS] ** 2, table["weight"]
    for place, row in weightings.iterrows():
        own = make_weighting(row["method"]).weights(table)[row["step"]]
        alone = (plain * own * squares).sum() / np.sqrt((plain**2 * squares).sum() * (own**2 * squares).sum())
        weightings.loc[place, "cosine_from_energies"] = alone
    if short_of(tokens.loc[tokens["advantage"] != 0, "group"].nunique()):
        weightings[[name for name in weightings if name.endswith(("_lower", "_upper"))]] = np.nan
    return weightings


def share_weights(weights: pd.DataFrame) -> pd.DataFrame:
    """Return the share of changed weights, also in bfloat16, and the relative change, by group and overall."""
    whole = weights.drop(columns="group").sum().to_frame().T.assign(group="all")
    weights = pd.concat([weights, whole], ignore_index=True)
    for name in ("changed", "changed_bfloat16"):
        weights[f"{name}_share"] = weights[name] / weights["weights"]
    return weights.assign(relative_change=np.sqrt(weights["square_change"] / weights["square_norm"]))


def draw_shares(ax: Axes, rows: pd.DataFrame, title: str) -> None:
    """Draw a quantity by interval, before and after."""
    for number, (when, color) in enumerate(COLORS.items()):
        own = rows[rows["when"] == when].set_index("interval").loc[LABELS]
        errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["value"].to_numpy())
        ax.bar(np.arange(len(own)) + 0.4 * number, own["value"], 0.4, yerr=errors, color=color, label=when)
    ax.axhline(0, color="0.6", lw=0.8)
    ax.set_xticks(np.arange(len(LABELS)) + 0.2)
    name_intervals(ax, LABELS)
    ax.set_xlabel("π of the tokens")
    ax.set_title(title, loc="left")


@paper_style()
def draw(found: dict[str, pd.DataFrame]) -> Figure:
    """Draw shares by interval and the power of 1 − π by layer; below, shares by batch size before and after."""
    figure = plt.figure(figsize=(PAGE_WIDTH, 5.0), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    top = [figure.add_subplot(grid[0, place : place + 2]) for place in (0, 2, 4)]
    below = [figure.add_subplot(grid[1, place : place + 3]) for place in (0, 3)]
    for ax, (quantity, title) in zip(top, SHOWN.items(), strict=False):
        draw_shares(ax, found[""][found[""]["statistic"] == quantity], title)
    for when, color in COLORS.items():
        powers = found["_powers"][found["_powers"]["when"] == when]
        layers = powers[powers["quantity"].str.startswith(LAYER)]
        places = layers["quantity"].str.removeprefix(LAYER).astype(int)
        top[2].plot(places, layers["slope"], color=color, label=when)
        top[2].fill_between(places, layers["slope_lower"], layers["slope_upper"], color=color, alpha=0.25, lw=0)
    top[2].axhline(1, color=NEUTRAL, lw=0.8, ls="--")
    top[2].set(xlabel="layer (dashed: theory)")
    top[2].set_title("norms' power of 1 − π", loc="left")
    below[1].sharey(below[0])
    for ax, (when, sizes) in zip(below, found["_sizes"].groupby("when", sort=False), strict=True):
        draw_sizes(ax, sizes, when)
    handles = [pair for ax in (top[0], below[0]) for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*handles, strict=True), loc="outside upper center", ncols=len(handles), columnspacing=1)
    words = "Top: 95 % intervals over prompts; another batch before than after. Bottom: mean and central 95 % of "
    return headline(figure, "", f"{words}batches dealt from the same prompts.")


def draw_sizes(ax: Axes, sizes: pd.DataFrame, when: str) -> None:
    """Draw the intervals' shares of the summed gradient by number of prompts."""
    for place, (label, color) in enumerate(zip(LABELS, interval_colors(), strict=True)):
        own = sizes[sizes["interval"] == label]
        errors = np.abs(own[["lower", "upper"]].to_numpy().T - own["mean"].to_numpy())
        beside = own["prompts"] * 1.06 ** (place - 1.5)
        ax.errorbar(beside, own["mean"], errors, fmt="o-", color=color, ms=3.5, lw=1, capsize=2, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes["prompts"].unique(), sizes["prompts"].unique().astype(str))
    ax.set_xlabel("prompts in the batch")
    ax.set_title(f"share of the summed gradient, {when}", loc="left")


def main(options: Options) -> None:
    found = table(options)
    save_picture(draw(found), options.at(f"{NAME}.png"), found[""])
    for end, rows in found.items():
        write_csv(rows, options.at(f"{NAME}{end}.csv"), float_format="%.4g")
        print(rows.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
