"""Measure the pretrained policy at the start or the end of a training run on word problems, on its own answers.

The policy that starts the GRPO run of track words-low at seed 20 (the measurement `words_untrained`), or the run's last
checkpoint with its AdamW state (`words_trained`). It answers 8 validation problems, eight times each at the start and
four times at the end, sampled as in the run, and every token's norm is measured; the gradients of 24 further problems ×
4 are summed. Writes

    tokens.parquet      the token table
    summed.parquet      prompt and interval of each token of the 24
    products.parquet    ⟨g_{p,a}, g_{q,b}⟩ of their summed gradients: a row and a column per prompt and interval (`p.a`)
    responses.parquet   the columns of analyses/measure/optimal_baseline.py, a row per response
    samples.csv         responses, tokens, accuracy, and problems whose responses differ in reward

and at the end of the run

    scaled.parquet      the token table with SCALED measured tokens per interval, also in AdamW's metric
    weightings.csv      `Comparison.table` of WEIGHTINGS; compared.parquet has their inner products by prompt
    weights.csv         by group of parameters: number of weights, how many training changed, how many of
                        these also in bfloat16, and the norm of the change
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

import analyses.common.dealt_problems  # noqa: F401  (registers its tasks)
from analyses.common.experiments import WORK, Run, find_run
from analyses.common.in_training import FRESH
from analyses.common.measurements import keep, part
from analyses.measure import optimal_baseline, real_language
from analyses.measure.pretrained_batches import as_batch, sample
from analyses.measure.words_compare import describe, products_by_prompt
from gradscope import load_policy, measure as measure_tokens
from gradscope.errors import InputError
from gradscope.gradients import ADAMW, LAYER, LOGITS, PARAMETERS, SAMPLING_PROBABILITY, Resources, TokenJacobian
from gradscope.intervals import interval_labels
from gradscope.policy import Policy, float_parameters, module_groups
from gradscope.rollouts import TokenBatch
from gradscope.trainer import OPTIMIZER, list_checkpoints
from gradscope.updates import Comparison, compare

KEPT = [
    *("response", "group", "position", "token", "prob", "log_one_minus_prob", "entropy", "advantage", "weight"),
    *("interval", LOGITS, PARAMETERS),
]
"""Columns of the token table, besides the layers' norms."""
SCALED, RESPONSES = 20, 4
WEIGHTINGS = ("reweight", "up-weight", "lopti", "top-entropy")
"""With their defaults: Reweight at the paper's α = .3, its opposite at its authors' .2."""


def measure(
    out: Path,
    *,
    when: Literal["start", "end"] = "end",
    questions: int = 8,
    responses: int = RESPONSES,
    folders: tuple[str, str] | None = None,
    task: str | None = None,
) -> None:
    """Sample and measure, and keep the tables.

    when: which end of the run to measure. responses: to each question; the summed gradients are of RESPONSES.
    folders, task: the policies at the start and at the end, and the questions; None: the run's.
    """
    run = find_run("words", "words-low", "grpo", 20)
    start = folders[0] if folders else run.config.model
    own = start if when == "start" else Path(folders[1]) if folders else find_end(run)
    policy = load_policy(own)
    settings = {"temperature": run.config.temperature, "max_new_tokens": run.config.max_new_tokens}
    draw = partial(sample, policy, task or run.test.task, **settings)
    rows = part(out, "rows", partial(draw, questions, FRESH, n=responses))
    batch = as_batch(rows)
    tokens = part(out, "tokens", partial(measure_tokens, policy, batch))
    others = as_batch(part(out, "rows-sums", partial(draw, 3 * questions, FRESH + 1, n=RESPONSES)))
    unmeasured = {"tokens": torch.empty(0, dtype=torch.long), "self_check": False}
    summed = part(out, "tokens-sums", partial(measure_tokens, policy, others, **unmeasured))
    of_responses = optimal_baseline.by_prompt(out, when, policy, batch, tokens, by_token=False)
    layers = [column for column in tokens if column.startswith(LAYER)]
    tables = {
        "tokens.parquet": tokens[[*KEPT, *layers]].astype(real_language.SMALL),
        "summed.parquet": summed[["group", "interval"]].astype(np.int8),
        "products.parquet": part(out, "products-sums", partial(multiply, policy, others, summed)),
        "responses.parquet": of_responses.drop(columns="policy"),
        "samples.csv": describe(rows),
    }
    if when == "end":
        once = cache(partial(weigh, policy, batch, tokens))
        tables |= {
            "scaled.parquet": part(out, "scaled", partial(scale, policy, batch, own / OPTIMIZER)),
            "weightings.csv": part(out, "weightings", lambda: once().table),
            "compared.parquet": part(out, "compared", lambda: products_by_prompt(once())),
            "weights.csv": part(out, "weights", lambda: count_changes(load_policy(start), policy)),
        }
    steps = run.config.steps if when == "end" else 0
    keep(out, tables, questions=questions, responses=responses, run=run.place.as_posix(), steps=steps)


def find_end(run: Run) -> Path:
    """Return the run's last checkpoint. Raises InputError if it is missing or has no optimizer state."""
    last = next(iter(list_checkpoints(WORK / run.place)[::-1]), None)
    if last is None or not (last / OPTIMIZER).is_file():
        raise InputError(f"{WORK / run.place} has no checkpoint with {OPTIMIZER}: measure it before the run is judged")
    return last


def multiply(policy: Policy, batch: TokenBatch, tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the products of the sums by prompt and interval; tokens: the batch's, with weight and interval."""
    intervals = torch.arange(len(interval_labels()))[:, None]
    weights = torch.tensor(tokens["weight"]) * (torch.tensor(tokens["interval"]) == intervals)
    J = TokenJacobian(policy, batch, Resources(real_language.MEMORY, micro_batch=4, progress=True))
    gram = J.gram(weights.float())
    rows = pd.MultiIndex.from_product([gram.groups, range(len(intervals))], names=["group", "interval"])
    flat = pd.DataFrame(gram.products.reshape(len(rows), -1), index=rows, columns=[f"{p}.{a}" for p, a in rows])
    return flat.reset_index()


def unflatten(table: pd.DataFrame) -> Float[np.ndarray, "n A n A"]:
    """Return the products as an array, prompts and intervals ascending."""
    size = table["interval"].nunique()
    return table.drop(columns=["group", "interval"]).to_numpy().reshape(-1, size, len(table) // size, size)


def scale(policy: Policy, batch: TokenBatch, state: Path) -> pd.DataFrame:
    """Return the token table with SCALED measured tokens per interval, raw and in AdamW's metric."""
    settings = {"tokens_per_interval": SCALED, "sample": "stratified", "self_check": False}
    tokens = measure_tokens(policy, batch, metric="adamw", optimizer_state=state, **settings)
    return tokens[[*KEPT, SAMPLING_PROBABILITY, ADAMW]].astype(real_language.SMALL)


def weigh(policy: Policy, batch: TokenBatch, tokens: pd.DataFrame) -> Comparison:
    """Compare WEIGHTINGS with plain GRPO."""
    resources = Resources(micro_batch=4, progress=True)
    return compare(policy, batch, WEIGHTINGS, table=tokens, resources=resources)


def count_changes(start: Policy, end: Policy) -> pd.DataFrame:
    """Count the weights that training changed, also in bfloat16, by group of parameters, with norms of both."""
    before, groups, rows = dict(float_parameters(start.model)), module_groups(end), []
    for name, weight in float_parameters(end.model):
        old, new = before[name].detach(), weight.detach()
        rows.append(
            {
                "group": groups[name][1],
                "weights": new.numel(),
                "changed": int((old != new).sum()),
                "changed_bfloat16": int((old.bfloat16() != new.bfloat16()).sum()),
                "square_norm": float(old.double().square().sum()),
                "square_change": float((new.double() - old.double()).square().sum()),
            }
        )
    return pd.DataFrame(rows).groupby("group", sort=False).sum().reset_index()
