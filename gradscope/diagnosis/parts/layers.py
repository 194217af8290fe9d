"""Unweighted norms of single tokens' gradients, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import pandas as pd

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.format import norm_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Table
from gradscope.diagnosis.page.sheets import DATA, TOKENS, Sheets, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.gradients import LAYER, LOGITS, PARAMETERS, sampling_probabilities
from gradscope.intervals import name_interval, summarize
from gradscope.plots import label_of
from gradscope.resampling import Resampling, Seed
from gradscope.runs import digits

TITLE = "Layer by layer"
ASKS = ("table",)
FOLDED = True


def rows(m: Measured) -> Rows:
    """layers: the mean norms of `layer_norms`."""
    return Rows(frames={"layers": layer_norms(m.table, m.settings.edges, **m.draws("layers"))}, unweighted=("layers",))


def layer_norms(
    table: pd.DataFrame, edges: Sequence[int | float], *, seed: Seed = 0, resamples: int = 1000
) -> pd.DataFrame:
    """Compute mean norms of the unweighted token gradients by layer and interval, logits first.

    Columns: quantity (logit_grad_norm, act_grad_norm.0, …, param_grad_norm), then those of `intervals.summarize`.
    """
    layers = sorted((c for c in table if c.startswith(LAYER)), key=lambda c: int(c.removeprefix(LAYER)))
    parts, settings = [], {"resampling": Resampling(seed, resamples=resamples), "edges": edges}
    drawn = sampling_probabilities(table)
    for name in (LOGITS, *layers, PARAMETERS):
        # At the logits, every token is measured.
        own = settings | {"probabilities": None if name == LOGITS else drawn, "sizes": table[LOGITS]}
        part = summarize(table[name], table["interval"], table["group"], **own)
        part.insert(0, "quantity", name)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def say(found: Diagnosis) -> list[Finding]:
    """Say how many times larger the norms of the lowest interval's tokens are than the highest's."""
    layers, labels = found.frames["layers"], found.labels
    means = layers.pivot(index="quantity", columns="interval", values="value")
    ratios = (means[0] / means[len(labels) - 1]).replace(inf, np.nan).dropna()
    if PARAMETERS not in ratios:
        return []
    ends = layers[layers["quantity"] == PARAMETERS].iloc[[0, -1]]
    if ends["lower"].isna().any():  # of a few prompts
        return []
    low, top = (norm_words(row) for _, row in ends.iterrows())
    statement = (
        f"Unweighted, the gradient norm of a token with {name_interval(labels[0])} is "
        f"{digits(ratios[PARAMETERS])} times that of one with {name_interval(labels[-1])} on average: "
        f"{low} against {top}, over {found.scope.parameters}."
    )
    inner = ratios[[name.startswith(LAYER) for name in ratios.index]]
    if inner.empty:
        return [Finding("norms", Verdict.FACT, statement)]
    least, most = (label_of(name) for name in (inner.idxmin(), inner.idxmax()))
    detail = f"By layer, from {digits(inner.min())} times ({least}) to {digits(inner.max())} ({most})."
    return [Finding("norms", Verdict.FACT, statement, detail)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    layers, over, edges = found.frames["layers"], found.scope.parameters, found.scope.settings.edges
    if not layers["quantity"].str.startswith(LAYER).any():
        return []
    sheets.tables[f"{DATA}/layer_norms.csv"] = layers
    told = layers.assign(told=[norm_words(row) for _, row in layers.iterrows()])
    wide = told.pivot(index="quantity", columns="label", values="told").loc[[*dict.fromkeys(layers["quantity"])]]
    wide = wide[list(found.labels)].rename(index=label_of, columns=name_interval)
    wide = wide.rename_axis("mean norm").rename_axis(None, axis=1).reset_index()
    return [
        sheets.figure(
            "layers_by_interval",
            lambda: plots.plot_layers_by_interval(found.table, edges=edges, parameters=over),
            "Median norm of the unweighted token gradients by layer and probability interval.",
            again=redraw(plots.plot_layers_by_interval, TOKENS, f"parameters={over!r}", edges=edges),
        ),
        Table(wide, "Mean norms.", csv=f"{DATA}/layer_norms.csv"),
    ]
