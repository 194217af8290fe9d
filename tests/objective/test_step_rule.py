"""Token weightings as columns: the weights that a method gives are those of the loss that is trained with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import policies

from gradscope.errors import InputError
from gradscope.objective import LossSettings, StepRule, batch_weights, resolve_advantages
from gradscope.rollouts import collate


def make_columns() -> tuple[dict[str, np.ndarray], torch.Tensor, object]:
    """Columns of a batch that is some steps old, its log π and the batch."""
    batch = collate(policies.make_responses(policies.make_policy("llama")), pad_id=policies.PAD)
    batch = replace(batch, advantages=resolve_advantages(batch), old_logprobs=batch.old_logprobs.nan_to_num(-1.0))
    logprobs = batch.old_logprobs + 0.3 * torch.randn(batch.old_logprobs.shape, generator=torch.manual_seed(3))
    kept = batch.response_mask
    weights = batch_weights(logprobs, batch, LossSettings(kl_coef=0), num_tokens=1).policy[kept]
    columns = {"policy_weight": weights, "logprob": logprobs[kept], "old_logprob": batch.old_logprobs[kept]}
    return {name: values.numpy() for name, values in columns.items()}, logprobs, batch


@pytest.mark.parametrize("alpha", [None, 0.3, 1.0])
def test_weights_of_the_columns_are_those_of_the_loss(alpha):
    columns, logprobs, batch = make_columns()
    settings = LossSettings(kl_coef=0, reweight_alpha=alpha)
    trained = batch_weights(logprobs, batch, settings, num_tokens=1).policy[batch.response_mask]
    np.testing.assert_allclose(StepRule(alpha).weights(columns)["all"], trained.numpy(), rtol=1e-6)


@pytest.mark.parametrize("order", [["low", "high"], ["high", "low"]])
def test_passes_of_lopti_part_the_weights_at_eta(order):
    columns, _, _ = make_columns()
    columns["old_logprob"][0] = np.nan  # on-policy
    found = StepRule(lopti_eta=0.5, lopti_order=f"{order[0]}-first").weights(columns)
    old = np.where(np.isnan(columns["old_logprob"]), columns["logprob"], columns["old_logprob"])
    assert list(found) == order
    np.testing.assert_array_equal(found["low"], np.where(old < np.log(0.5), columns["policy_weight"], 0))
    np.testing.assert_array_equal(found["low"] + found["high"], columns["policy_weight"])


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"reweight_alpha": 1.5}, "1.5"),
        ({"lopti_eta": -0.1}, "-0.1"),
        ({"lopti_order": "up"}, "'up'"),
        ({"mask_probs": (0.5, 0.2)}, "(0.5, 0.2)"),
        ({"mask_probs": (0, 1)}, "0 to 1"),
        ({"control": "random-split"}, "lopti_eta"),
        ({"control": "matched-norm", "lopti_eta": 0.5}, "reweight_alpha"),
        ({"control": "random-split", "lopti_eta": 0.5, "mask_probs": (0, 0.5)}, "random-split"),
    ],
)
def test_what_is_no_weighting_is_refused_with_its_value(fields, value):
    with pytest.raises(InputError) as refused:
        StepRule(**fields)
    assert value in str(refused.value)


def test_a_control_has_no_weights_of_columns_alone():
    with pytest.raises(InputError):
        StepRule(0.3, control="permuted-weights").weights(make_columns()[0])
