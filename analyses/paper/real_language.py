"""A pretrained policy on real language: SmolLM2-135M-Instruct, de-quantised from four bits, on word problems at T = 1.

    python -m analyses.paper.real_language [--out figures]

Drawn from the measurement `real_language` (analyses/measure/real_language.py), every token measured: smollm2_fig1.png
(Fig. 1 a, b, d), smollm2_fig2.png, smollm2_norms.png (norms against 1 − π with the fitted power), smollm2_layers.png,
smollm2_drivers.png (log(1 − π) against entropy), smollm2_kinds.png (kinds of tokens) and smollm2_lengths.png (shares
by length of response). smollm2.csv has the intervals beside the paper's numbers and the embedded policy's,
smollm2_theory.csv the powers and gains of Prop. 4.2 by layer.

Differs from the paper: the policy (135 M parameters instead of 3 B, weights of four bits), word problems instead of
puzzles, temperature 1 instead of 0.7, one batch of 16 × 8; bounds are over its prompts. Fig. 1 (c, e, f) are not drawn:
no step was taken. Its kinds are this script's own, for word problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_facts, read_table
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from analyses.paper.base_policy import shown_layers, tabulate
from analyses.paper.fig1 import PAPER_SHARES
from analyses.paper.words import CATEGORIES
from gradscope.diagnosis import PAPER_NORMS
from gradscope.gradients import LAYER, PARAMETERS
from gradscope.intervals import interval_labels
from gradscope.plots import (
    interval_colors,
    paper_style,
    plot_figure_1,
    plot_figure_2,
    plot_layers_by_interval,
    plot_norm_against_one_minus_prob,
    plot_norm_drivers,
    save_figure,
)
from gradscope.resampling import SHARE, bootstrap
from gradscope.theory import TheoryReport, measured_cones, regress_norms, theory_report

TITLE = "SmolLM2-135M-Instruct, de-quantised from four bits"
DRAWN = 4000
"""Tokens of the scatter plots, drawn at random; numbers are of all."""
INFERENCE = {form for words in CATEGORIES.values() for word in words for form in word.forms if " " not in form}
ARITHMETIC = {
    *("add", "adding", "added", "addition", "sum", "total", "plus", "more", "subtract", "subtracting", "subtracted"),
    *(
        "minus",
        "difference",
        "left",
        "less",
        "fewer",
        "remaining",
        "remain",
        "multiply",
        "multiplied",
        "times",
        "twice",
    ),
    *("divide", "divided", "half", "each", "altogether", "many", "much", "equal", "equals", "number", "calculate"),
}
FUNCTION = {
    *("the", "a", "an", "of", "to", "in", "on", "at", "for", "from", "with", "by", "and", "or", "but", "as", "is"),
    *("are", "was", "were", "be", "been", "has", "have", "had", "do", "does", "did", "will", "would", "can", "could"),
    *("should", "it", "its", "he", "she", "they", "you", "we", "i", "his", "her", "their", "your", "our", "this"),
    *("that", "these", "those", "there", "which", "who", "what", "when", "how", "if", "then", "not", "no", "s"),
}
KINDS = ("digit", "operator", "inference word", "arithmetic word", "function word", "other word", "punctuation")


def kind_of(token: str) -> str:
    """Tell a decoded token's kind.

    >>> [kind_of(token) for token in (" 12", " +", " therefore", " left", " the", " cookies", ".\\n")]
    ['digit', 'operator', 'inference word', 'arithmetic word', 'function word', 'other word', 'punctuation']
    """
    word = token.strip().lower()
    if re.search(r"\d", word):
        return "digit"
    if re.search(r"[-+*/=×÷%$]", word):
        return "operator"
    listed = {"inference word": INFERENCE, "arithmetic word": ARITHMETIC, "function word": FUNCTION}
    for kind, words in listed.items():
        if word in words:
            return kind
    return "other word" if re.search(r"[^\W_]", word) else "punctuation"


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, TheoryReport]:
    """The token table, the diagnosis's statistics, and what of Prop. 4.2 the tokens say."""
    tokens = read_table("real_language", "tokens.parquet", scale=options.scale)
    statistics = read_table("real_language", "statistics.csv", scale=options.scale)
    vocab_size = read_facts("real_language", scale=options.scale)["vocab_size"]
    return tokens, statistics, theory_report(tokens, vocab_size=vocab_size, seed=0)


def compare(statistics: pd.DataFrame, options: Options) -> pd.DataFrame:
    """A row per interval and quantity: this policy's number with its bounds, the paper's, and the embedded policy's."""
    sums = read_table("base_policy", "gradients.csv", scale=options.scale).set_index("interval")
    numbers = [str(number) for number in range(len(interval_labels()))]
    sums.index = sums.index.astype(str)
    tokens, norms = sums["num_tokens"], sums["norm"]
    embedded = {
        "token_share": (tokens[numbers] / tokens[numbers].sum()).tolist(),
        "norm_ratio": (norms[numbers] / norms["all"]).tolist(),
        "gradient_share": sums["share"][numbers].tolist(),
    }
    paper = {
        "token_share": [share / 100 for share in PAPER_SHARES],
        "norm_ratio": [norm / PAPER_NORMS[-1] for norm in PAPER_NORMS[:-1]],
    }
    rows = []
    for quantity in (*embedded, "squared_share", "half_cosine"):
        own = statistics[(statistics["statistic"] == quantity)].set_index("interval")
        for place, label in enumerate(interval_labels() if len(own) else ()):
            row = {"quantity": quantity, "interval": label} | own.loc[label, ["value", "lower", "upper"]].to_dict()
            others = {"paper": paper, "embedded": embedded}
            rows.append(row | {name: found[quantity][place] for name, found in others.items() if quantity in found})
    return pd.DataFrame(rows)


def share_energy(tokens: pd.DataFrame, groups: pd.Series) -> pd.DataFrame:
    """Share of the tokens and of Σ‖w·g‖² by group, with bounds over prompts; mean norms and the share of π < ¼."""
    energy = (tokens["weight"] * tokens[PARAMETERS]).astype(float) ** 2
    prompts, clusters = np.unique(tokens["group"], return_inverse=True)
    names, rows = list(dict.fromkeys(groups)), []
    for name in names:
        inside = (groups == name).to_numpy()
        parts = {"token_share": inside.astype(float), "energy_share": energy.to_numpy() * inside}
        wholes = {"token_share": np.ones(len(tokens)), "energy_share": energy.to_numpy()}
        row = {"group": name, "tokens": int(inside.sum()), "mean_norm": float(tokens[PARAMETERS][inside].mean())}
        row |= {
            "mean_prob": float(tokens["prob"][inside].mean()),
            "low_share": float((tokens["prob"][inside] < 0.25).mean()),
        }
        for quantity, part in parts.items():
            own, whole = (np.bincount(clusters, values, len(prompts)) for values in (part, wholes[quantity]))
            found = bootstrap(lambda w, a=own, b=whole: (w @ a / (w @ b))[:, None], len(prompts), scale=SHARE)[:, 0]
            row |= dict(zip((quantity, f"{quantity}_lower", f"{quantity}_upper"), found, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def by_kind(tokens: pd.DataFrame) -> pd.DataFrame:
    """`share_energy` of KINDS."""
    kinds = {token: kind_of(token) for token in tokens["token"].unique()}
    found = share_energy(tokens, tokens["token"].map(kinds))
    return found.set_index("group").loc[list(KINDS)].reset_index().rename(columns={"group": "kind"})


def by_length(tokens: pd.DataFrame) -> pd.DataFrame:
    """`share_energy` of the intervals: in responses that ended by themselves, and in those of the limit's length."""
    lengths = tokens.groupby("response").size()
    frames = []
    for cut, rows in lengths.groupby(lengths == lengths.max()):
        own = tokens[tokens["response"].isin(rows.index)]
        found = share_energy(own, own["interval"].map(dict(enumerate(interval_labels()))))
        found = found.set_index("group").loc[interval_labels()].rename_axis("interval").reset_index()
        frames.append(found.assign(cut_off=cut, shortest=rows.min(), longest=rows.max(), responses=len(rows)))
    return pd.concat(frames, ignore_index=True)


@paper_style()
def draw_drivers(fits: pd.DataFrame) -> Figure:
    """Both coefficients at every sixth layer and over all parameters."""
    shown = [f"{LAYER}{layer}" for layer in range(0, len(fits["quantity"].unique()), 6)]
    figure, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    plot_norm_drivers(fits[fits["quantity"].isin([*shown, PARAMETERS])], ax=ax)
    return titled(figure)


@paper_style()
def draw_kinds(kinds: pd.DataFrame) -> Figure:
    """Share of the tokens and of Σ‖w·g‖² by kind."""
    figure, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    looks = {"token_share": ("#9aa5b1", "of the tokens"), "energy_share": ("#b5548a", "of Σ‖w·g‖²")}
    for place, (quantity, (color, label)) in enumerate(looks.items()):
        errors = np.abs(kinds[[f"{quantity}_lower", f"{quantity}_upper"]].to_numpy().T - kinds[quantity].to_numpy())
        ax.bar(np.arange(len(kinds)) + 0.4 * place, kinds[quantity], 0.4, yerr=errors, color=color, label=label)
    ax.set_xticks(np.arange(len(kinds)) + 0.2, [kind.replace(" ", "\n") for kind in kinds["kind"]])
    ax.set(ylabel="share (95 % over prompts)", title=TITLE)
    ax.legend()
    return figure


@paper_style()
def draw_lengths(lengths: pd.DataFrame) -> Figure:
    """Shares of the tokens and of Σ‖w·g‖² by interval, in classes of length."""
    figure, axes = plt.subplots(1, 2, figsize=(6.8, 2.6), layout="constrained", sharey=True)
    classes = lengths.drop_duplicates("cut_off")
    for ax, (quantity, title) in zip(
        axes, {"token_share": "share of the tokens", "energy_share": "share of Σ‖w·g‖²"}.items(), strict=True
    ):
        for place, (label, color) in enumerate(zip(interval_labels(), interval_colors(), strict=True)):
            own = lengths[lengths["interval"] == label]
            errors = np.abs(own[[f"{quantity}_lower", f"{quantity}_upper"]].to_numpy().T - own[quantity].to_numpy())
            ax.bar(np.arange(len(own)) + 0.2 * place, own[quantity], 0.2, yerr=errors, color=color, label=label)
        names = [
            f"{row.shortest}–{row.longest}" if not row.cut_off else f"{row.longest}, cut"
            for row in classes.itertuples()
        ]
        ax.set_xticks(np.arange(len(classes)) + 0.3, names)
        ax.set(xlabel="tokens in the response", ylabel=title)
    figure.legend(*axes[0].get_legend_handles_labels(), title="π", loc="outside right center")
    figure.suptitle(TITLE, fontsize=8)
    return figure


def draw(
    tokens: pd.DataFrame, statistics: pd.DataFrame, theory: TheoryReport, vocab: int
) -> Iterator[tuple[str, Figure]]:
    """The names of the pictures, and the pictures."""
    norms = statistics[statistics["statistic"] == "gradient_norm"].reset_index(drop=True)
    labels = [*interval_labels(), "all"]
    bars = pd.DataFrame({"interval": [*range(len(labels) - 1), "all"], "label": labels})
    bars["norm"], bars["paper"] = norms.set_index("interval").loc[labels, "value"].to_numpy(), PAPER_NORMS
    yield "fig1", titled(plot_figure_1(tokens, bars))
    few = tokens.sample(min(DRAWN, len(tokens)), random_state=0)
    layers = shown_layers(tokens)
    yield "fig2", titled(plot_figure_2(few, measured_cones(theory, layers), vocab_size=vocab))
    powers = theory.powers[theory.powers["quantity"].isin([*layers, PARAMETERS])]
    yield "norms", titled(plot_norm_against_one_minus_prob(few, powers))
    ax = plt.subplots(figsize=(5.2, 6.4), layout="constrained")[1]
    yield "layers", titled(plot_layers_by_interval(tokens, ax=ax).figure)


def titled(figure: Figure) -> Figure:
    """Say whose numbers they are."""
    figure.suptitle(TITLE, fontsize=8)
    return figure


def main(options: Options) -> None:
    tokens, statistics, theory = table(options)
    vocab = read_facts("real_language", scale=options.scale)["vocab_size"]
    for name, figure in draw(tokens, statistics, theory, vocab):
        save_figure(figure, options.out / f"smollm2_{name}.png")
    compared, kinds, lengths = compare(statistics, options), by_kind(tokens), by_length(tokens)
    fits = regress_norms(tokens, seed=0)
    save_figure(draw_drivers(fits), options.out / "smollm2_drivers.png")
    write_csv(fits, options.out / "smollm2_drivers.csv")
    save_figure(draw_kinds(kinds), options.out / "smollm2_kinds.png", kinds)
    save_figure(draw_lengths(lengths), options.out / "smollm2_lengths.png", lengths)
    write_csv(compared, options.out / "smollm2.csv")
    write_csv(tabulate(theory), options.out / "smollm2_theory.csv")
    for found in (compared, kinds, lengths, theory.powers):
        print(found.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
