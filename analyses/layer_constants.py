"""Are the constants of Eq. 3 tight enough to mean anything? Products of singular values beside real tokens' gains.

    python -m analyses.layer_constants [--out figures]

Measures the embedded policy in float64 on responses that it samples to two-person puzzles (the shortest contexts it
meets). At some tokens' contexts the singular values of every block's Jacobian are computed over the whole context:
by an exact SVD at the first response tokens (*certified*), by Lanczos further on (*estimated*). Writes
layer_constants.png with its .csv, layer_constants_by_context.csv and the theory report layer_constants.txt. About two
minutes on one core.

Not in the paper, which assumes the constants (Assumption 4.1) and does not measure them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.axes import Axes

from gradscope import load_policy, measure
from gradscope.batch import TokenBatch
from gradscope.bounds import TheoryReport, theory_report
from gradscope.jacobians import layer_constants, token_contexts
from gradscope.models import Policy
from gradscope.plot_style import finish, new_axes
from gradscope.plots import paper_style, save_figure
from gradscope.run_folder import write_text
from gradscope.sampling.rollouts import batch_rows, rollout_rows
from gradscope.tasks import get_task

TEMPERATURE = 0.7
COLORS = {
    "gains of real tokens, anywhere": "#222222",
    "reach over the vocabulary": "#35818e",
    "∏c … ∏d, certified": "#d95f02",
}


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    prompts: int = 24
    certified: int = 4
    """Contexts whose Jacobians get an exact SVD: the first response token of as many prompts."""
    estimated: int = 4
    """Contexts, of at most 60 tokens, that get Lanczos."""
    seed: int = 0


def sample_batch(policy: Policy, options: Options) -> TokenBatch:
    """Two responses to each of some two-person puzzles."""
    task = get_task("knights-knaves-compact")
    questions = task.questions(options.prompts, seed=options.seed, people=(2,))
    settings = {"n": 2, "temperature": TEMPERATURE, "max_new_tokens": 256, "seed": options.seed}
    return batch_rows(rollout_rows(policy, questions, task=task, **settings))


def choose_tokens(tokens: pd.DataFrame, batch: TokenBatch, options: Options) -> pd.DataFrame:
    """The uncertain tokens at which constants are computed: the earliest for the SVD, later ones for Lanczos."""
    starts = batch.response_start - batch.attention_mask.int().argmax(1)
    context = tokens["position"] + starts.numpy()[tokens["response"]]
    uncertain = tokens.assign(length=context)[tokens["log_one_minus_prob"] > np.log(1e-3)]
    uncertain = uncertain.drop_duplicates(["group", "length"]).sort_values("length", kind="stable")
    first = uncertain.drop_duplicates("group").head(options.certified)
    later = uncertain[uncertain["length"].between(30, 60) & ~uncertain["group"].isin(first["group"])]
    return pd.concat([first, later.drop_duplicates("group").head(options.estimated)])


def table(options: Options) -> TheoryReport:
    """Measure the tokens, compute the constants at the chosen ones, hold Eq. 3 against them."""
    policy = load_policy("embedded", dtype="float64")
    batch = sample_batch(policy, options)
    tokens = measure(policy, batch, progress=True)
    chosen = choose_tokens(tokens, batch, options)
    contexts = token_contexts(batch, chosen)
    exact = contexts[: options.certified]
    limit = max(len(ids) for ids in exact) * policy.config.hidden_size
    parts = []
    for index, ids in enumerate(contexts):
        largest = limit if index < options.certified else 1
        parts.append(layer_constants(policy, [ids], temperature=TEMPERATURE, max_exact=largest).assign(context=index))
        print(f"context {index + 1} of {len(contexts)}: {len(ids)} tokens", flush=True)
    numbers = pd.Series(np.arange(len(chosen), dtype=float), index=chosen.index)
    tokens = tokens.assign(context=numbers.reindex(tokens.index))
    rng = np.random.default_rng(options.seed)
    return theory_report(tokens, pd.concat(parts, ignore_index=True), vocab_size=policy.vocab_size, rng=rng)


def spans(report: TheoryReport) -> pd.DataFrame:
    """What is drawn, a row per layer and span: columns layer, span, lower, upper (of gains ‖δ_ℓ‖ / ‖e − π‖)."""
    rows = []
    for layer, part in report.constants.groupby("layer"):
        gains = report.gains[report.gains["quantity"] == f"act_grad_norm.{layer}"].iloc[0]
        certified = part[part["product_kind"] == "certified"]
        ends = (
            (gains["min"], gains["max"]),
            (part["reach_min"].min(), part["reach_max"].max()),
            (certified["product_c"].min(), certified["product_d"].max()),
        )
        rows += [{"layer": layer, "span": n, "lower": a, "upper": b} for n, (a, b) in zip(COLORS, ends, strict=True)]
        estimated = part.loc[part["product_kind"] == "estimated", "product_d"]
        rows.append({"layer": layer, "span": "∏d, estimated", "lower": np.nan, "upper": estimated.max()})
    return pd.DataFrame(rows)


@paper_style()
def draw(report: TheoryReport, ax: Axes | None = None) -> Axes:
    """Per layer, spans on a log scale: certified ∏c … ∏d, the exact reach of gains, the gains of real tokens."""
    ax, drawn = new_axes(ax, width=4.4, height=3.4), spans(report)
    bottom = drawn.loc[drawn["lower"] > 0, "lower"].min() / 100
    for number, (name, color) in enumerate(COLORS.items()):
        part = drawn[drawn["span"] == name]
        x = part["layer"] + 0.2 * (number - 1)
        ax.vlines(x, part["lower"].clip(lower=bottom), part["upper"], color=color, lw=5, label=name)
        zero = part["lower"] == 0
        ax.scatter(x[zero], np.full(zero.sum(), bottom * 1.5), marker="v", color=color, s=30, zorder=3)
    part = drawn[drawn["span"] == "∏d, estimated"]
    ax.scatter(part["layer"] + 0.2, part["upper"], marker="_", s=90, color="black", zorder=3, label="∏d, estimated")
    ax.set_yscale("log")
    ax.set_ylim(bottom=bottom)
    ax.set_xticks(sorted(drawn["layer"].unique()))
    ax.set_xlabel("layer ℓ (0: input of the first block; ▾: ∏c is 0)")
    ax.set_ylabel("gain ‖δℓ‖ / ‖e − π‖ of token gradients")
    ax.figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return finish(ax, drawn)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    report = table(options)
    print(report)
    options.out.mkdir(parents=True, exist_ok=True)
    save_figure(draw(report), options.out / "layer_constants.png")
    report.constants.to_csv(options.out / "layer_constants_by_context.csv", index=False)
    write_text(options.out / "layer_constants.txt", f"{report}\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
