"""How well cheap proxies predict a token's exact gradient norm: rank, explained variance, largest tokens found.

A part of the report:

    gradscope diagnose MODEL --rollouts FILE --part analyses/parts/proxies.py:proxies --out DIR

Trainers that cannot afford a backward pass per token use a proxy of its norm: 1 − π, the logit norm ‖e − π‖ (its square
Σ_v π_v² + 1 − 2π is the optimal token baseline's, arXiv:2602.07078), entropy, surprisal, the bound on ‖e − π‖ by π and
entropy, or the gradient at the last layer. A token table has all of these. Position gradients (of the summed loss) are
not in the table, but can be added as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from gradscope.diagnosis import Block, Diagnosis, Measured, Rows, Sheets
from gradscope.errors import InputError, checked
from gradscope.gradients import ADAMW, LAYER, LOGITS, PARAMETERS, sampling_weights
from gradscope.plots import finish, new_panels, paper_style, require
from gradscope.resampling import Resampling, Seed, bootstrap, prompt_clusters
from gradscope.theory import FLOOR, require_columns

TITLE = "Cheap proxies of the norm"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "spearman": "rank correlation",
    "r2": "R² of the logarithms",
    "found_share": "share of the largest 1 % found",
}

Values = Float[np.ndarray, " K"]
PROXIES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "1 − π": lambda table: np.exp(table["log_one_minus_prob"]),
    "‖e − π‖": lambda table: table[LOGITS],
    "entropy": lambda table: table["entropy"],
    "−log π": lambda table: -table["logprob"],
    "bound by π and entropy": lambda table: _least_logit_norm(table),
}
"""Name → the proxy's values from the columns of a token table; the last layer's gradient goes by its column name."""
FEWEST = 10
"""Fewest measured tokens."""


def rows(m: Measured) -> Rows:
    """proxies: the table of `judge_proxies`."""
    return Rows(frames={"proxies": judge_proxies(m.table, **m.draws("proxies"))}, unweighted=("proxies",))


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    proxies, over = found.frames["proxies"], found.scope.parameters
    caption = (
        "Proxies for the exact norm ‖g‖ that need no backward pass per token: rank correlation, share of the variance "
        "of log ‖g‖ that each explains, and how many of the 1 % of tokens with the largest norm are among the 1 % "
        "with the largest proxy."
    )
    # From the page's folder, with a clone of the repository in PYTHONPATH.
    again = (
        "import pandas as pd; from analyses.parts.proxies import plot_proxies\n"
        f'plot_proxies(pd.read_csv("data/proxies.csv"), parameters={over!r})'
    )
    draw = lambda: plot_proxies(proxies, parameters=over)  # noqa: E731
    drawn = sheets.figure("proxies_drawn", draw, caption, again=again, bars="95 % over prompts")
    whole = proxies[proxies["quantity"].isin([PARAMETERS, ADAMW])]
    whole = whole.rename(columns=lambda name: name.replace("found", "found_share"))
    table = sheets.table("proxies", whole, "The same in numbers; the file has each layer's activations.", folded=True)
    sheets.keep("proxies", proxies)
    return [drawn, table]


@checked
def judge_proxies(
    table: pd.DataFrame,
    *,
    top: float = 0.01,
    floor: float = FLOOR,
    more: Mapping[str, str] | None = None,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Judge each proxy against each exact norm: activations of all layers, all parameters, and these in AdamW's metric.

    Columns: quantity (the norm's column), proxy, tokens (measured); spearman, the rank correlation, and r2, the share
    of the log norm's variance explained by the proxy's log, both over tokens with 1−π > `floor`, since the many nearly
    certain ones would dominate; found: the share of the `top` fraction of tokens by norm that is also in the `top`
    fraction by proxy, NaN if these are fewer than 10. Each has `_lower` and `_upper` from resampled prompts, with ranks
    and top tokens fixed as in the whole table. more: name → column of further proxies. Sampled tokens are weighted by 1
    / their probability. Raises InputError for missing columns, fewer than 10 measured tokens, or an invalid `top`.
    """
    if not 0 < top < 1:
        raise InputError(f"top is {top}; give a fraction of the tokens between 0 and 1, such as 0.01")
    needed = ["group", "log_one_minus_prob", "logprob", "entropy", LOGITS, PARAMETERS]
    require_columns(table, [*needed, *(more or {}).values()])
    layers = sorted((c for c in table if c.startswith(LAYER)), key=lambda c: int(c.removeprefix(LAYER)))
    proxies = {name: make(table).to_numpy(np.float64) for name, make in PROXIES.items()}
    proxies |= {name: table[column].to_numpy(np.float64) for name, column in (more or {}).items()}
    if layers:
        proxies["last layer's ‖δ‖"] = table[layers[-1]].to_numpy(np.float64)
    norms = {name: table[name].to_numpy(np.float64) for name in [*layers, PARAMETERS, ADAMW] if name in table}
    norms = {name: norm for name, norm in norms.items() if not np.isnan(norm).all()}
    if not norms or np.isfinite(norms.get(PARAMETERS, np.empty(0))).sum() < FEWEST:
        raise InputError(f"fewer than {FEWEST} tokens have a measured norm; measure more to judge proxies")
    clusters, counts = prompt_clusters(table), sampling_weights(table)
    above = table["log_one_minus_prob"].to_numpy(np.float64) > np.log(floor)
    # Every row uses the same resampled prompts.
    seed = None if seed is None else int(np.random.default_rng(seed).integers(2**32))
    resampling = Resampling(seed, confidence, resamples)
    rows = []
    for quantity, norm in norms.items():
        for name, values in proxies.items():
            if name.startswith("last") and quantity == layers[-1]:
                continue
            known = np.isfinite(norm) & np.isfinite(values)
            if known.sum() < FEWEST:
                continue
            own = (each[known] for each in (norm, values, counts, clusters, above))
            found = _judge(*own, top, resampling)
            keys = {"quantity": quantity, "proxy": name, "tokens": int(known.sum())}
            ends = zip(("spearman", "r2", "found"), found.T, strict=True)
            rows.append(
                keys | {f"{n}{e}": v for n, three in ends for e, v in zip(("", "_lower", "_upper"), three, strict=True)}
            )
    return pd.DataFrame(rows)


@paper_style()
@checked
def plot_proxies(proxies: pd.DataFrame, *, parameters: str = "all parameters") -> Figure:
    """Draw how well each proxy stands for the exact norm: rank correlation, R² of logs, share of largest tokens found.

    proxies: `judge_proxies`; drawn for the norm over all parameters, also AdamW-preconditioned if known. Bars
    are 95 % intervals over prompts. parameters: what ‖g‖ is over.
    """
    panels = {"spearman": "Rank correlation", "r2": "R² of the logarithms", "found": "Largest 1 % found"}
    require(proxies, ["quantity", "proxy", *panels], what="the table of proxies")
    kinds = {PARAMETERS: (f"‖g‖ over {parameters}", "black"), ADAMW: ("AdamW-preconditioned", "#2a7f62")}
    kinds = {name: told for name, told in kinds.items() if (proxies["quantity"] == name).any()}
    figure, axes = new_panels(len(panels), width=2.4, height=2.3)
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        parts = []
        for number, (quantity, (word, color)) in enumerate(kinds.items()):
            own = proxies[proxies["quantity"] == quantity].reset_index(drop=True)
            height = np.arange(len(own)) + 0.2 * (number - (len(kinds) - 1) / 2)
            ax.hlines(height, own[f"{column}_lower"], own[f"{column}_upper"], color=color, lw=0.9)
            ax.plot(own[column], height, "o", color=color, ms=3.5, label=word)
            parts.append(own[["quantity", "proxy", "tokens", column, f"{column}_lower", f"{column}_upper"]])
        ax.set_yticks(range(len(own)), own["proxy"] if ax is axes[0] else [""] * len(own))
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlim(min(0.0, ax.get_xlim()[0]), 1.02)
        ax.set_xticks([0.0, 0.5, 1.0])
        ax.set_title(title, loc="left")
        finish(ax, pd.concat(parts, ignore_index=True))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    return figure


def _least_logit_norm(table: pd.DataFrame) -> pd.Series:
    """Return √(1 − 2π + max(e^−H, π²)) ≤ ‖e − π‖, since Σ_v π_v² = E[π_v] ≥ exp(E[log π_v]) = e^−H, and ≥ π²."""
    prob = np.exp(table["logprob"])
    return np.sqrt(np.maximum(np.exp(table["log_one_minus_prob"]) ** 2, 1 - 2 * prob + np.exp(-table["entropy"])))


def _judge(
    norm: Values,
    proxy: Values,
    counts: Values,
    clusters: np.ndarray,
    above: Bool[np.ndarray, " K"],
    top: float,
    resampling: Resampling,
) -> Float[np.ndarray, "3 3"]:
    """Return values, lower and upper bounds of Spearman's ρ, R² of logs, and the share found."""
    _, cluster = np.unique(clusters, return_inverse=True)
    positive = (norm > 0) & (proxy > 0)
    logs = [np.log(np.where(positive, values, 1.0)) for values in (norm, proxy)]
    largest = [_largest(values, counts, top) for values in (norm, proxy)]
    ranks = (_ranks(values, counts * above) for values in (norm, proxy))
    pairs = ((*ranks, counts * above), (*logs, counts * (above & positive)))
    sums = [_moments(*pair, cluster) for pair in pairs]
    hits = np.stack([np.bincount(cluster, counts * chosen) for chosen in (largest[0] & largest[1], largest[0])], 1)

    def evaluate(draws: np.ndarray) -> np.ndarray:
        draws = draws.astype(np.float64)
        ranks, explained = (_correlation(draws @ part) for part in sums)
        with np.errstate(invalid="ignore", divide="ignore"):  # a resample without any of the top tokens
            both, all_ = (draws @ hits).T
            found = np.where((all_ > 0) & (largest[0].sum() >= FEWEST), both / all_, np.nan)
            return np.stack([ranks, explained**2, found], 1)

    return bootstrap(evaluate, int(cluster.max()) + 1, **vars(resampling))


def _ranks(values: Values, counts: Values) -> Values:
    """Return weighted ranks from 0 to 1, averaged over ties."""
    _, place = np.unique(values, return_inverse=True)
    weight = np.bincount(place, counts)
    return ((np.cumsum(weight) - weight / 2) / max(weight.sum(), 1e-300))[place]


def _largest(values: Values, counts: Values, top: float) -> Bool[np.ndarray, " K"]:
    """Return the mask of this fraction of tokens with the largest values, at least one."""
    order = np.argsort(-values, kind="stable")
    within = np.cumsum(counts[order]) <= top * counts.sum()
    within[0] = True
    chosen = np.zeros(len(values), dtype=bool)
    chosen[order[within]] = True
    return chosen


def _moments(x: Values, y: Values, counts: Values, cluster: np.ndarray) -> Float[np.ndarray, "n 6"]:
    """Return sums of 1, x, y, x², y² and xy by prompt, about the overall means."""
    x, y = (v - (counts * v).sum() / max(counts.sum(), 1e-300) for v in (x, y))
    parts = (np.ones_like(x), x, y, x * x, y * y, x * y)
    return np.stack([np.bincount(cluster, counts * part) for part in parts], 1)


def _correlation(sums: Float[np.ndarray, "r 6"]) -> Float[np.ndarray, " r"]:
    """Return Pearson's correlation; NaN without variation."""
    with np.errstate(invalid="ignore", divide="ignore"):
        _, sx, sy, sxx, syy, sxy = (sums / sums[:, :1]).T
        vx, vy = sxx - sx**2, syy - sy**2
        return np.where((vx > 1e-14) & (vy > 1e-14), (sxy - sx * sy) / np.sqrt(vx * vy), np.nan)
