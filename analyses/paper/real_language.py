"""Pretrained policies on real language: SmolLM2-135M-Instruct and Gemma 3 270M, on word problems at T = 1.

    python -m analyses.paper.real_language [--out figures]

Drawn from their measurements (analyses/measure/real_language.py). For MODEL smollm2 and gemma3: MODEL_fig1.png (Fig. 1
a, b, d), MODEL_fig2.png, MODEL_norms.png (norms against 1 − π with the fitted power), MODEL_layers.png and
MODEL_drivers.png (log(1 − π) against entropy); MODEL.csv has the intervals beside the paper's numbers and the embedded
policy's, MODEL_theory.csv the powers and gains of Prop. 4.2 by layer. For SmolLM2, with every token measured:
smollm2_kinds.png (kinds of tokens), smollm2_lengths.png (shares by length of response) and smollm2_sizes.png (shares of
Σ‖w·g‖² in batches of fewer of its 16 prompts). real_language.png has all policies side by side, and the tied
embedding's part of Gemma's norms (gemma3_embedding.csv); real_language_measured.csv has what was measured, and its
error against plain autograd.

Differs from the paper: the policies (135 and 268 M parameters instead of 3 B, weights of four bits), word problems
instead of puzzles, temperature 1 instead of 0.7, one small batch each; bounds are over its prompts. Fig. 1 (c, e, f)
are not drawn: no step was taken. The kinds are this script's own, for word problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.contrasts import mean_interval
from analyses.common.measurements import read_facts, read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import PAPER_NORMS, write_csv
from analyses.measure.real_language import EMBEDDING, MODELS, ROLLOUTS
from analyses.paper.base_policy import shown_layers, tabulate
from analyses.paper.fig1 import PAPER_SHARES
from analyses.paper.words import CATEGORIES
from gradscope.gradients import LAYER, PARAMETERS, sampling_weights
from gradscope.intervals import interval_labels
from gradscope.plots import (
    PAGE_WIDTH,
    POLICIES,
    TIMES,
    headline,
    interval_colors,
    name_intervals,
    paper_style,
    plot_figure_1,
    plot_figure_2,
    plot_layers_by_interval,
    plot_norm_against_one_minus_prob,
    plot_norm_drivers,
)
from gradscope.resampling import SHARE, bootstrap
from gradscope.theory import TheoryReport, measured_cones, regress_norms, theory_report

DRAWN = 4000
"""Random tokens in the scatter plots; numbers use all."""
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
    """Return a decoded token's kind.

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


def table(model: str, options: Options) -> tuple[pd.DataFrame, pd.DataFrame, TheoryReport]:
    """Return a policy's token table, the diagnosis's statistics, and what the tokens say about Prop. 4.2."""
    name = MODELS[model].measurement
    tokens, statistics = (read_table(name, file, scale=options.scale) for file in ("tokens.parquet", "statistics.csv"))
    vocab_size = read_facts(name, scale=options.scale)["vocab_size"]
    return tokens, statistics, theory_report(tokens, vocab_size=vocab_size, seed=0)


def describe(model: str, tokens: pd.DataFrame, options: Options) -> dict[str, object]:
    """Return what was measured: sizes, rewards, and the checked norms' largest error against plain autograd."""
    name = MODELS[model].measurement
    check = read_facts(name, scale=options.scale)["self_check"]
    rewards = read_table(name, ROLLOUTS, scale=options.scale)["reward"]
    return {
        "model": model,
        "prompts": tokens["group"].nunique(),
        "responses": len(rewards),
        "tokens": len(tokens),
        "measured_tokens": int(tokens[PARAMETERS].notna().sum()),
        "accuracy": float((rewards >= 1).mean()),
        "checked_tokens": check["tokens"],
        "largest_difference": check["largest_difference"],
    }


def share_embedding(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the embedding's share of Σ‖g‖², unweighted, by interval and over all tokens, with bounds over prompts."""
    tokens = tokens[tokens[PARAMETERS].notna()]
    prompts, clusters = np.unique(tokens["group"], return_inverse=True)
    whole, own = (sampling_weights(tokens) * tokens[name].astype(float) ** 2 for name in (PARAMETERS, EMBEDDING))
    rows = []
    for place, label in enumerate([*interval_labels(), "all"]):
        inside = (tokens["interval"] == place) | (label == "all")
        sums = [np.bincount(clusters, squares * inside, len(prompts)) for squares in (own, whole)]
        found = bootstrap(lambda w, s=sums: (w @ s[0] / (w @ s[1]))[:, None], len(prompts), scale=SHARE)[:, 0]
        rows.append({"interval": label} | dict(zip(("share", "lower", "upper"), found, strict=True)))
    return pd.DataFrame(rows)


def compare(statistics: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per interval and quantity: this policy's number with bounds, the paper's, the embedded policy's."""
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
    """Return shares of the tokens and of Σ‖w·g‖² by group, bounds over prompts, mean norms, and the share of π < ¼."""
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
    """Return `share_energy` of KINDS."""
    kinds = {token: kind_of(token) for token in tokens["token"].unique()}
    found = share_energy(tokens, tokens["token"].map(kinds))
    return found.set_index("group").loc[list(KINDS)].reset_index().rename(columns={"group": "kind"})


def by_length(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return `share_energy` of the intervals, separately for responses that ended and those cut off at the limit."""
    lengths = tokens.groupby("response").size()
    frames = []
    for cut, rows in lengths.groupby(lengths == lengths.max()):
        own = tokens[tokens["response"].isin(rows.index)]
        found = share_energy(own, own["interval"].map(dict(enumerate(interval_labels()))))
        found = found.set_index("group").loc[interval_labels()].rename_axis("interval").reset_index()
        frames.append(found.assign(cut_off=cut, shortest=rows.min(), longest=rows.max(), responses=len(rows)))
    return pd.concat(frames, ignore_index=True)


def by_size(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return shares of Σ‖w·g‖² by interval in batches of fewer of these prompts: mean, 95 % t interval, range."""
    energy = (tokens["weight"] * tokens[PARAMETERS]).astype(float) ** 2
    sums = energy.groupby([tokens["group"], tokens["interval"]]).sum().unstack(fill_value=0.0)
    sums = sums.sample(frac=1, random_state=0).to_numpy()
    rows = []
    for size in (2**power for power in range(len(sums).bit_length())):
        batches = sums[: len(sums) // size * size].reshape(-1, size, sums.shape[1]).sum(1)
        for label, shares in zip(interval_labels(), (batches / batches.sum(1, keepdims=True)).T, strict=True):
            mean, lower, upper = mean_interval(shares)
            row = {"prompts": size, "interval": label, "batches": len(shares), "mean": mean}
            rows.append(row | {"lower": lower, "upper": upper, "least": shares.min(), "most": shares.max()})
    return pd.DataFrame(rows)


@paper_style()
def draw_sizes(sizes: pd.DataFrame) -> Figure:
    """Draw a line per interval: means over the batches, and the range from the least to the most of one batch."""
    figure, ax = plt.subplots(figsize=(4.6, 2.8), layout="constrained")
    for place, (label, color) in enumerate(zip(interval_labels(), interval_colors(), strict=True)):
        own = sizes[sizes["interval"] == label]
        errors = np.abs(own[["least", "most"]].to_numpy().T - own["mean"].to_numpy())
        beside = own["prompts"] * 1.06 ** (place - 1.5)
        ax.errorbar(beside, own["mean"], errors, fmt="o-", color=color, ms=3.5, lw=1, capsize=2, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes["prompts"].unique(), sizes["prompts"].unique().astype(str))
    ax.set(xlabel="prompts in the batch, × 8 responses", ylabel="share of Σ‖w·g‖²\n(mean, least, most of the batches)")
    figure.legend(*ax.get_legend_handles_labels(), title="π", loc="outside right center")
    return figure


@paper_style()
def draw_drivers(fits: pd.DataFrame) -> Figure:
    """Draw both coefficients at every sixth layer and over all parameters."""
    shown = [f"{LAYER}{layer}" for layer in range(0, len(fits["quantity"].unique()), 6)]
    figure, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    plot_norm_drivers(fits[fits["quantity"].isin([*shown, PARAMETERS])], ax=ax)
    ax.legend(loc="center", ncols=2)
    return figure


@paper_style()
def draw_kinds(kinds: pd.DataFrame) -> Figure:
    """Draw the share of the tokens and of Σ‖w·g‖² by kind."""
    figure, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    looks = {"token_share": (TIMES["before"], "of the tokens"), "energy_share": (TIMES["after"], "of Σ‖w·g‖²")}
    for place, (quantity, (color, label)) in enumerate(looks.items()):
        errors = np.abs(kinds[[f"{quantity}_lower", f"{quantity}_upper"]].to_numpy().T - kinds[quantity].to_numpy())
        ax.bar(np.arange(len(kinds)) + 0.4 * place, kinds[quantity], 0.4, yerr=errors, color=color, label=label)
    ax.set_xticks(np.arange(len(kinds)) + 0.2, [kind.replace(" ", "\n") for kind in kinds["kind"]])
    ax.set(ylabel="share (95 % over prompts)")
    ax.legend()
    return figure


@paper_style()
def draw_lengths(lengths: pd.DataFrame) -> Figure:
    """Draw shares of the tokens and of Σ‖w·g‖² by interval and class of length."""
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
    return figure


@paper_style()
def draw_beside(compared: pd.DataFrame, embedding: pd.DataFrame) -> Figure:
    """Draw every policy's shares of the tokens and relative norms, and the embedding's part of Gemma's norms."""
    figure, axes = plt.subplots(1, 3, figsize=(PAGE_WIDTH, 2.7), layout="constrained")
    titles = {"token_share": "share of the tokens", "norm_ratio": "norm of summed gradient,\nof all tokens' norm"}
    places = np.arange(len(interval_labels()))
    for ax, (quantity, title) in zip(axes, titles.items(), strict=False):
        own = compared[compared["quantity"] == quantity]
        first = own.drop_duplicates("interval")
        look = {"mfc": "white", "mec": POLICIES["paper"], "ms": 4.5, "ls": ""}
        ax.plot(places - 0.24, first["paper"], marker="D", label="paper, 3 B, T = 0.7", **look)
        look = {"color": POLICIES["embedded"], "ms": 4.5, "ls": ""}
        ax.plot(places - 0.08, first["embedded"], marker="s", label="embedded, 0.8 M, T = 0.7", **look)
        for number, (model, rows) in enumerate(own.groupby("model", sort=False)):
            errors = np.abs(rows[["lower", "upper"]].to_numpy().T - rows["value"].to_numpy())
            label = f"{MODELS[str(model)].title.split(',')[0]}, T = 1"
            look = {"fmt": "o", "ms": 4, "capsize": 2, "color": POLICIES[str(model)]}
            ax.errorbar(places + 0.08 + 0.16 * number, rows["value"], errors, label=label, **look)
        ax.set_title(title, loc="left")
    errors = np.abs(embedding[["lower", "upper"]].to_numpy().T - embedding["share"].to_numpy())
    look = {"fmt": "o", "ms": 4, "capsize": 2, "color": POLICIES["gemma3"]}
    axes[2].errorbar(np.arange(len(embedding)), embedding["share"], errors, **look)
    axes[2].set_title("the tied embedding's share\nof Σ‖g‖², Gemma 3", loc="left")
    for ax, names in zip(axes, (interval_labels(), interval_labels(), embedding["interval"]), strict=True):
        ax.set_xticks(range(len(names)))
        name_intervals(ax, list(names))
        ax.set_ylim(0)
        ax.set_xlabel("π of the tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, columnspacing=1)
    return headline(figure, "", "One batch each. Bars: 95 % intervals over its prompts.")


def draw(
    tokens: pd.DataFrame, statistics: pd.DataFrame, theory: TheoryReport, vocab: int
) -> Iterator[tuple[str, Figure]]:
    """Draw the pictures; returns them by name."""
    norms = statistics[statistics["statistic"] == "gradient_norm"].reset_index(drop=True)
    labels = [*interval_labels(), "all"]
    bars = pd.DataFrame({"interval": [*range(len(labels) - 1), "all"], "label": labels})
    bars["norm"], bars["paper"] = norms.set_index("interval").loc[labels, "value"].to_numpy(), PAPER_NORMS
    yield "fig1", plot_figure_1(tokens, bars)
    few = tokens.sample(min(DRAWN, len(tokens)), random_state=0)
    layers = shown_layers(tokens)
    yield "fig2", plot_figure_2(few, measured_cones(theory, layers), vocab_size=vocab)
    powers = theory.powers[theory.powers["quantity"].isin([*layers, PARAMETERS])]
    yield "norms", plot_norm_against_one_minus_prob(few, powers)
    ax = plt.subplots(figsize=(5.2, 6.4), layout="constrained")[1]
    yield "layers", plot_layers_by_interval(tokens, ax=ax).figure


def draw_model(model: str, options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Draw one policy's own pictures; returns its tokens, and its numbers beside the others'."""
    tokens, statistics, theory = table(model, options)
    vocab = read_facts(MODELS[model].measurement, scale=options.scale)["vocab_size"]
    fits, compared = regress_norms(tokens, seed=0), compare(statistics, options)
    figures, sums = dict(draw(tokens, statistics, theory, vocab)) | {"drivers": draw_drivers(fits)}, {}
    if tokens[PARAMETERS].notna().all():  # these are sums over tokens
        sums = {"kinds": by_kind(tokens), "lengths": by_length(tokens), "sizes": by_size(tokens)}
        drawn = {"kinds": draw_kinds, "lengths": draw_lengths, "sizes": draw_sizes}
        figures |= {name: drawn[name](found) for name, found in sums.items()}
    for name, figure in figures.items():
        headline(figure, "", f"{MODELS[model].title}.")
        save_picture(figure, options.at(f"{model}_{name}.png"), sums.get(name))
    for name, found in {"": compared, "_theory": tabulate(theory), "_drivers": fits}.items():
        write_csv(found, options.at(f"{model}{name}.csv"))
    for found in (compared, *sums.values(), theory.powers):
        print(found.to_string(index=False, float_format="{:.3f}".format))
    return tokens, compared


def main(options: Options) -> None:
    found = {model: draw_model(model, options) for model in MODELS}
    compared = pd.concat([rows.assign(model=model) for model, (_, rows) in found.items()])
    embedding = share_embedding(found["gemma3"][0])
    save_picture(draw_beside(compared, embedding), options.at("real_language.png"), compared)
    measured = pd.DataFrame([describe(model, tokens, options) for model, (tokens, _) in found.items()])
    for name, rows in {"gemma3_embedding": embedding, "real_language_measured": measured}.items():
        write_csv(rows, options.at(f"{name}.csv"))
        print(rows.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
