"""Tokens that the policy would hardly sample are told; its own, at any length and temperature, are not."""

import numpy as np
import pandas as pd
import pytest

from gradscope.diagnosis.notes import IMPROBABLE, describe_improbable


def plant_tokens(rng, *, sampled_from: np.ndarray, measured_by: np.ndarray, prompts=8, tokens=60) -> pd.DataFrame:
    """Tokens drawn from one distribution, with log π and entropy of another."""
    size = prompts * 2 * tokens
    chosen = rng.choice(len(sampled_from), size=size, p=sampled_from)
    entropy = -(measured_by * np.log(measured_by)).sum()
    response = np.arange(size) // tokens
    columns = {"logprob": np.log(measured_by[chosen]), "entropy": entropy, "response": response, "group": response // 2}
    return pd.DataFrame(columns)


@pytest.mark.parametrize("seed", range(50))
def test_tokens_that_a_policy_sampled_itself_are_not_improbable(seed):
    rng = np.random.default_rng(seed)
    own = rng.dirichlet([0.3] * 20) * 0.98 + 0.001
    assert (
        describe_improbable(plant_tokens(rng, sampled_from=own, measured_by=own, tokens=int(rng.integers(2, 200))))
        == ""
    )


def test_those_of_another_policy_are_and_the_excess_is_the_mean_surprisal_less_the_entropy():
    rng = np.random.default_rng(0)
    own, other = (rng.dirichlet([0.3] * 20) * 0.98 + 0.001 for _ in range(2))
    table = plant_tokens(rng, sampled_from=other, measured_by=own)
    excess = -(table["logprob"] + table["entropy"]).mean()
    assert excess > IMPROBABLE and f"by {excess:.2g} nats per token" in describe_improbable(table)
    over = (-(table["logprob"] + table["entropy"])).groupby(table["response"]).mean() > 1
    assert f"in {over.sum()} of 16 responses" in describe_improbable(table)
    assert describe_improbable(table[table["group"] == 0]) == ""  # one prompt shows no error
