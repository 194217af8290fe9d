"""Do tokens with π < ¼ dominate what prompts agree on, or what they do not?

    python -m analyses.paper.signal [--out figures]

Experiment A of docs/named-beforehand.md, which has the quantities, the primary test and what is concluded from each
outcome; written before anything was measured. Policies that are not measured yet are left out. Writes

    signal.csv      by policy, metric, grouping and group: shares of tokens, own part C_a, signal s_a and batches of 8,
                    64 and 512 prompts (with Fieller's bounds, as the signal); the batch at which the share is one
                    half; and of each policy's whole: standard errors from 0, and the noise scale with bounds
    signal_test.csv by policy and metric, rare tokens' share of the signal minus, by `than`, their share of a batch of 8
                    prompts (D; `named`: the primary one), or the signal's share of the tokens with the highest entropy
    signal_cos.csv  by α the cosine of Reweight's expected gradient with GRPO's, with a jackknife over prompts (empty
                    where the signal is not told from 0), and what the energies alone predict (plain: they are not
                    measured in AdamW's metric)
    signal.png      share against the batch's size, and the cosine against α
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.batch_share import BatchShare, noise_scale
from analyses.common.measurements import is_measured, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.measure.signal import HIGHEST, WHOLE
from gradscope.errors import InputError
from gradscope.gradients import GroupSignals
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots import NEUTRAL, finish, interval_colors, paper_style
from gradscope.resampling import bound_by_folds

MEASURED = {
    "signal_start": ("cpu", "embedded, at the start"),
    "signal_trained": ("cpu", "embedded, after 150 steps of GRPO"),
    "signal_words": ("words", "SmolLM2, at the start"),
}
"""Measurement: its scale, and the policy in words."""
PRIMARY = ("signal_start", "plain")
RARE = interval_labels(EDGES)[0]
TRAINED_ON, SIZES = 8, (8, 64, 512)
"""Prompts of a batch here, and those at which shares are given; the paper has 64."""
TOLD = 3.0
"""Standard errors from 0 below which no share of the signal is given."""
ALPHAS = np.linspace(0, 1, 21)


def tabulate(signals: pd.DataFrame) -> pd.DataFrame:
    """Return signal.csv's rows of one policy and metric from those of its signals.csv."""
    frames = []
    for grouping, own in signals.groupby("grouping", sort=False):
        names, tokens, found = _rebuild(own)
        told, (scale, lower, upper) = errors_from_zero(found), bound_noise_scale(found)
        curves, known = [_curve(found, place) for place in range(len(names))], told >= TOLD
        shares = {f"share_{size}": _in_batches(found, size) for size in SIZES} | {"signal_share": found}
        columns = {"grouping": grouping, "group": names, "tokens": tokens, "token_share": tokens / tokens.sum()}
        columns |= {"prompts": found.touched[:-1], "signal": found.signal[:-1], "own": found.own[:-1]}
        columns |= {"own_share": found.own[:-1] / found.own[-1]}
        for name, of in shares.items():
            bounds = of.share_bounds() if known else np.full((3, len(names)), np.nan)
            columns |= dict(zip((name, f"{name}_lower", f"{name}_upper"), bounds, strict=True))
        columns |= {"half_at": [curve.crossing(0.5) if known else None for curve in curves], "errors_from_zero": told}
        columns |= {"noise_scale": scale, "noise_scale_lower": lower, "noise_scale_upper": upper}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def errors_from_zero(found: GroupSignals) -> float:
    """Return the whole signal over its jackknife standard error."""
    return float(found.signal[-1] / found.signal_errors()[-1])


def bound_noise_scale(found: GroupSignals) -> np.ndarray:
    """Return B with bounds: a falling function of s/C, it has no upper bound where s may be 0."""
    ratios = bound_by_folds(found.signal[-1:] / found.own[-1:], found.left_signal[:, -1:] / found.left_own[:, -1:])
    return np.array([noise_scale(float(ratio), 1.0) for ratio in ratios[[0, 2, 1], 0]])


def compare_rare(signals: pd.DataFrame) -> pd.DataFrame:
    """Return differences, with intervals and p, of s_a/s from what it is compared with, a: rare tokens."""
    rare, uncertain = (_curves_by_fold(signals, *of) for of in (("interval", RARE), ("entropy", HIGHEST)))
    differences = {
        f"batch of {TRAINED_ON}": [curve.limit - curve.at(TRAINED_ON) for curve in rare],
        HIGHEST: [curve.limit - other.limit for curve, other in zip(rare, uncertain, strict=True)],
    }
    rows, folds = [], len(rare) - 1
    for than, (value, *others) in differences.items():
        _, lower, upper = bound_by_folds(np.array([value]), np.array(others)[:, None])[:, 0]
        p = 2 * stats.t.sf(abs(value) / _error(lower, upper, folds), folds - 1)
        rows.append({"than": than, "difference": value, "lower": lower, "upper": upper, "p": float(p)})
    return pd.DataFrame(rows)


def _curves_by_fold(signals: pd.DataFrame, grouping: str, group: str) -> list[BatchShare]:
    """Return a group's share against the batch's size: of all prompts, then without each fold."""
    names, _, found = _rebuild(signals[signals["grouping"] == grouping])
    folds = zip(found.left_signal, found.left_own, strict=True)
    parts = [found, *(replace(found, signal=signal, own=own) for signal, own in folds)]
    return [_curve(part, names.index(group)) for part in parts]


def cosines(prompts: pd.DataFrame, energies: pd.DataFrame) -> pd.DataFrame:
    """Return a row per α: the expected gradients' cosine, its 95 % interval, and the energies' prediction."""
    whole = prompts.sum(numeric_only=True)
    pairs = {"gg": ("gg", "gg", "gg_own"), "gh": ("gh", "hg", "hg_own"), "hh": ("hh", "hh", "hh_own")}
    # Σ_{q≠r}⟨X_q, Y_r⟩, and what is left of it without prompt p: U − ⟨X_p, Y⟩ − ⟨X, Y_p⟩ + 2⟨X_p, Y_p⟩.
    total = {name: whole[one] - whole[own] for name, (one, _, own) in pairs.items()}
    left = {
        name: (total[name] - prompts[one] - prompts[other] + 2 * prompts[own]).to_numpy()
        for name, (one, other, own) in pairs.items()
    }
    e, e_pi, e_pi2 = np.average(energies[["e", "e_pi", "e_pi2"]], weights=energies["tokens"], axis=0)
    rows = []
    for alpha in ALPHAS:
        bounds = bound_by_folds(np.array([_cosine(alpha, **total)]), _cosine(alpha, **left)[:, None])
        rows.append((alpha, *bounds[:, 0], _cosine(alpha, e, e_pi, e_pi2)))
    return pd.DataFrame(rows, columns=["alpha", "cosine", "lower", "upper", "from_energies"])


def _cosine(alpha: float, gg: np.ndarray | float, gh: np.ndarray | float, hh: np.ndarray | float) -> np.ndarray | float:
    """Return the cosine of (1 − α)·G + α·H with G (Eq. 4, arXiv:2505.12929), from products; or of orthogonal tokens."""
    keep = 1 - alpha
    return (keep * gg + alpha * gh) / np.sqrt(gg * (keep**2 * gg + 2 * keep * alpha * gh + alpha**2 * hh))


def _rebuild(rows: pd.DataFrame) -> tuple[list[str], np.ndarray, GroupSignals]:
    """Return a grouping's groups with tokens but the whole, their tokens, and the signals of all, the whole's last."""
    point = rows[(rows["left_out"] == -1) & (rows["tokens"] > 0)].set_index("group")
    order = [*point.index.drop(WHOLE), WHOLE]
    left = rows[rows["left_out"] >= 0].pivot(index="left_out", columns="group", values=["signal", "own"])
    point, left = point.loc[order], [left[name][order].to_numpy() for name in ("signal", "own")]
    touched = point["prompts"].to_numpy()
    found = GroupSignals(point["signal"].to_numpy(), point["own"].to_numpy(), int(touched.max()), touched, *left)
    return order[:-1], point["tokens"].to_numpy()[:-1], found


def _in_batches(found: GroupSignals, prompts: int) -> GroupSignals:
    """Return E⟨G_a, G⟩ of one prompt in a batch of so many, (N − 1)·s_a + C_a, in the signals' place."""
    signal, left = ((prompts - 1) * s + c for s, c in ((found.signal, found.own), (found.left_signal, found.left_own)))
    return replace(found, signal=signal, left_signal=left)


def _curve(found: GroupSignals, place: int) -> BatchShare:
    return BatchShare(found.signal[place], found.own[place], found.signal[-1], found.own[-1])


def _error(lower: float, upper: float, folds: int) -> float:
    return (upper - lower) / 2 / stats.t.ppf(0.975, folds - 1)


@paper_style()
def draw(found: Sequence[tuple[str, pd.DataFrame, pd.DataFrame, pd.DataFrame]]) -> Figure:
    """Draw a row per policy and metric: its name, its signals.csv, `tabulate`'s rows and `cosines`'."""
    figure, axes = plt.subplots(len(found), 2, figsize=(7.2, 2.6 * len(found)), layout="constrained", squeeze=False)
    for (left, right), (name, signals, table, turned) in zip(axes, found, strict=True):
        _draw_shares(left, signals, table[table["grouping"] == "interval"])
        right.set_title(name, fontsize=8, loc="right")
        _draw_cosines(right, turned)
    return figure


def _draw_shares(ax: Axes, signals: pd.DataFrame, table: pd.DataFrame) -> None:
    _, _, found = _rebuild(signals[signals["grouping"] == "interval"])
    known, prompts = bool(np.isfinite(table["signal_share"]).all()), found.num_prompts
    sizes, start, end = np.geomspace(1, 10 * prompts, 100) if known else np.ones(1), 0.1, 60 * prompts
    for place, (color, row) in enumerate(zip(interval_colors(), table.itertuples(), strict=True)):
        shares, marker = [_curve(found, place).at(size) for size in sizes], "" if known else "o"
        ax.plot(sizes, shares, color=color, label=row.group, lw=1.4, marker=marker, ms=4)
        ax.plot(start, row.token_share, "<", color=color, ms=4)
        if known:
            at = end * 1.35 ** (place - 1.5)  # side by side, or their bounds would hide each other
            ax.plot(at, row.signal_share, "o", color=color, ms=4)
            ax.vlines(at, row.signal_share_lower, row.signal_share_upper, color=color, lw=1.2)
    ax.set_xscale("log")
    powers = range(round(np.log10(sizes[-1])) + 1)
    marks = {start: "tokens"} | {10**power: f"$10^{power}$" for power in powers} | {end: "signal"}
    if not known:
        marks = {start: "tokens", 1: "one prompt"}
        ax.set_xlim(start / 2, 20)
        least = f"signal not told from 0:\nnoise scale at least\n{table['noise_scale_lower'].iloc[0]:,.0f} prompts"
        ax.text(0.97, 0.5, least, transform=ax.transAxes, ha="right", va="center", fontsize=7)
    ax.set_xticks([*marks], labels=[*marks.values()])
    ax.minorticks_off()
    ax.axhline(0, color=NEUTRAL, lw=0.6)
    ax.set(xlabel="prompts in the batch", ylabel="share of the gradient")
    ax.legend(
        frameon=False,
        fontsize=7,
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        columnspacing=1,
        handlelength=1.2,
    )
    finish(ax, table)


def _draw_cosines(ax: Axes, turned: pd.DataFrame) -> None:
    known, expected = turned["cosine"].notna().all(), turned["from_energies"].notna().all()
    if known:
        ax.plot(turned["alpha"], turned["cosine"], color="#0072B2", lw=1.4, label="expected gradients")
        ax.fill_between(turned["alpha"], turned["lower"], turned["upper"], color="#0072B2", alpha=0.15, lw=0)
    if expected:
        ax.plot(turned["alpha"], turned["from_energies"], color=NEUTRAL, lw=1, ls="--", label="from the energies alone")
    ax.set(xlabel="α of Reweight", ylabel="cosine with GRPO", xlim=(-0.05, 1.05))
    if known or expected:
        ax.legend(frameon=False, fontsize=7)
    else:
        ax.set_axis_off()
    if not known:
        at = {"transform": ax.transAxes, "ha": "center", "va": "center", "fontsize": 7}
        ax.text(0.4, 0.5, "expected gradients: signal not told from 0", **at)
    finish(ax, turned)


def main(options: Options) -> None:
    measured = [name for name, (scale, _) in MEASURED.items() if is_measured(name, scale)]
    if not measured:
        raise InputError("nothing is measured; make it: python -m analyses.common.measurements signal_start")
    found, tables, tests, turns = [], [], [], []
    for name in measured:
        scale, policy = MEASURED[name]
        read = [read_table(name, file, scale=scale) for file in ("signals.csv", "prompts.parquet", "energies.csv")]
        for metric, signals in read[0].groupby("metric", sort=False):
            keys = {"policy": policy, "metric": metric}
            table, turned = tabulate(signals), cosines(read[1][read[1]["metric"] == metric], read[2])
            if metric != "plain":
                turned["from_energies"] = np.nan
            if not (known := bool((table["errors_from_zero"] >= TOLD).all())):
                turned[["cosine", "lower", "upper"]] = np.nan
            if known:
                compared = compare_rare(signals)
                named = ((name, metric) == PRIMARY) & (compared["than"] != HIGHEST)
                tests.append(compared.assign(**keys, named=named))
            title = policy if metric == "plain" else f"{policy}, AdamW's metric"
            found.append((title, signals, table, turned))
            tables.append(table.assign(**keys))
            turns.append(turned.assign(**keys))
    shown, keys = pd.concat(tables, ignore_index=True), ["policy", "metric"]
    save_picture(draw(found), options.at("signal.png"), shown[[*keys, *shown.columns.drop(keys)]])
    tested = pd.concat(tests, ignore_index=True)[[*keys, "named", "than", "difference", "lower", "upper", "p"]]
    write_csv(tested, options.at("signal_test.csv"), float_format="%.6g")
    write_csv(pd.concat(turns, ignore_index=True), options.at("signal_cos.csv"), float_format="%.6g")
    print(tested.to_string(index=False, float_format="{:.4f}".format))
    columns = [
        "policy",
        "metric",
        "grouping",
        "group",
        "token_share",
        "own_share",
        "share_8",
        "share_64",
        "signal_share",
    ]
    print(shown[[*columns, "signal_share_lower", "signal_share_upper", "half_at"]].to_string(index=False))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
