"""Measure the constants of Eq. 3 at some tokens' contexts, beside real tokens' gains.

The policy is a scale's, in float64, on its responses to two-person puzzles (its shortest contexts); or a pretrained one
at temperature 1, continuing the first two words of word problems without a chat template. At some tokens' contexts the
singular values of every block's Jacobian over the whole context are computed, by an exact SVD at the first response
tokens (*certified*) and by Lanczos later (*estimated*). Writes

    tokens.parquet      the token table, with the number of each token's context (NaN: none)
    constants.csv       the constants at these contexts, a row per context and layer
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analyses.common.experiments import WORK, configure
from analyses.common.in_training import PLACE
from analyses.common.measurements import keep, part
from analyses.parts.constants import layer_constants, token_contexts
from gradscope import load_policy, measure as measure_tokens
from gradscope.gradients import LAYER, LOGITS, PARAMETERS
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import batch_rows, rollout_rows, sample
from gradscope.tasks import get_task

TEMPERATURE = 0.7
LENGTH = 12
KEPT = ["group", "context", "log_one_minus_prob", LOGITS, PARAMETERS]
"""Columns of the token table, besides the layers' norms."""


def measure(
    out: Path,
    *,
    scale: str = "cpu",
    pretrained: str | None = None,
    prompts: int = 24,
    certified: int = 4,
    estimated: int = 4,
) -> None:
    """Measure the tokens, compute the constants at the chosen ones, and keep both.

    pretrained: folder of a policy below WORK; None: the scale's. certified: number of contexts, each at the first
    response token of a prompt, with an exact SVD; estimated: number of contexts, of 30 to 60 tokens, with Lanczos.
    """
    policy = load_policy(WORK / pretrained if pretrained else configure(scale, *PLACE).model, dtype="float64")
    batch = sample_openings(policy, prompts) if pretrained else sample_batch(policy, prompts)
    temperature = float(batch.temperature[0])
    tokens = part(out, "tokens", lambda: measure_tokens(policy, batch))
    chosen = choose_tokens(tokens, batch, certified, estimated)
    contexts = token_contexts(batch, chosen)
    limit = max(len(ids) for ids in contexts[:certified]) * policy.config.hidden_size
    parts = []
    for index, ids in enumerate(contexts):
        largest = limit if index < certified else 1
        parts.append(layer_constants(policy, [ids], temperature=temperature, max_exact=largest).assign(context=index))
        print(f"context {index + 1} of {len(contexts)}: {len(ids)} tokens", flush=True)
    numbers = pd.Series(np.arange(len(chosen), dtype=float), index=chosen.index)
    tokens = tokens.assign(context=numbers.reindex(tokens.index))
    layers = [column for column in tokens if column.startswith(LAYER)]
    tables = {"tokens.parquet": tokens[[*KEPT, *layers]], "constants.csv": pd.concat(parts, ignore_index=True)}
    facts = {"prompts": prompts, "responses": len(batch) // prompts, "certified": certified, "estimated": estimated}
    keep(out, tables, **facts, temperature=temperature, vocab_size=policy.vocab_size)


def sample_batch(policy: Policy, prompts: int) -> TokenBatch:
    """Sample two responses to each of some two-person puzzles."""
    task = get_task("knights-knaves-compact")
    questions = task.questions(prompts, seed=0, people=(2,))
    settings = {"n": 2, "temperature": TEMPERATURE, "max_new_tokens": 256, "seed": 0}
    return batch_rows(rollout_rows(policy, questions, task=task, **settings))


def sample_openings(policy: Policy, prompts: int) -> TokenBatch:
    """Continue some beginnings of word problems, all different, by LENGTH tokens each."""
    problems = get_task("word-problems-plain").questions(4 * prompts, seed=0)
    first = list(dict.fromkeys(" ".join(str(problem.prompt).split()[:2]) for problem in problems))[:prompts]
    return sample(policy, first, n=1, temperature=1.0, max_new_tokens=LENGTH, seed=0)


def choose_tokens(tokens: pd.DataFrame, batch: TokenBatch, certified: int, estimated: int) -> pd.DataFrame:
    """Choose the uncertain tokens at which to compute constants: the earliest for the SVD, later ones for Lanczos."""
    starts = batch.response_start - batch.attention_mask.int().argmax(1)
    context = tokens["position"] + starts.numpy()[tokens["response"]]
    uncertain = tokens.assign(length=context)[tokens["log_one_minus_prob"] > np.log(1e-3)]
    uncertain = uncertain.drop_duplicates(["group", "length"]).sort_values("length", kind="stable")
    first = uncertain.drop_duplicates("group").head(certified)
    later = uncertain[uncertain["length"].between(30, 60) & ~uncertain["group"].isin(first["group"])]
    return pd.concat([first, later.drop_duplicates("group").head(estimated)])
