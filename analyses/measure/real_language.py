"""Measures a pretrained policy on real language: SmolLM2-135M-Instruct, its weights de-quantised from four bits.

Made by `python -m analyses.recipes.pretrained` in CHECKPOINT. The 16 word problems ("think step by step") and its 8
responses to each, sampled at temperature 1 with at most 160 tokens, lie beside the tables, so that others measure the
same tokens. Leaves

    rollouts.parquet    the problems and responses, as they were found there
    tokens.parquet      the token table, every token measured
    statistics.csv      the diagnosis's statistics of the batch
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analyses.common.experiments import WORK
from analyses.common.measurements import folder, keep
from gradscope import diagnose, load_policy
from gradscope.gradients import LAYER, LOGITS, PARAMETERS
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, read_rollouts

CHECKPOINT = WORK / "smollm2"
ROLLOUTS = "rollouts.parquet"
KEPT = [
    *("response", "group", "position", "token", "prob", "logprob", "log_one_minus_prob", "entropy", "advantage"),
    *("weight", "interval", LOGITS, PARAMETERS),
]
"""Columns of the token table; and the norms of the layers."""
SMALL = {"response": np.int16, "group": np.int16, "position": np.int16, "interval": np.int8}


def measure(out: Path) -> None:
    """Diagnose the batch with every token measured, and keep the tables."""
    policy, batch = inputs()
    found = diagnose(policy, batch, minutes=None)
    keep(
        out,
        tables(found.tokens, found.statistics, pd.read_parquet(folder("real_language") / ROLLOUTS)),
        **facts(policy),
    )


def inputs() -> tuple[Policy, TokenBatch]:
    """The checkpoint, and the responses that were kept."""
    policy = load_policy(CHECKPOINT)
    return policy, read_rollouts(folder("real_language") / ROLLOUTS, policy)


def tables(tokens: pd.DataFrame, statistics: pd.DataFrame, rollouts: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What figures are drawn from."""
    layers = [column for column in tokens if column.startswith(LAYER)]
    slim = tokens[[*KEPT, *layers]].astype(SMALL)
    return {"tokens.parquet": slim, "statistics.csv": statistics, ROLLOUTS: rollouts}


def facts(policy: Policy) -> dict[str, object]:
    """What the manifest says of the policy."""
    return {"policy": "SmolLM2-135M-Instruct, de-quantised from four bits", "vocab_size": policy.vocab_size}
