"""The run that scripts about updates share, against its own next step."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analyses.common import in_training
from analyses.common.experiments import configure
from gradscope import read_rollouts
from gradscope.objective import batch_statistics
from gradscope.policy import AdamWState
from gradscope.updates import apply_update

TINY = {"questions_per_step": 2, "group_size": 4, "mini_batch_size": 8, "max_new_tokens": 150, "save_rollouts": True}
TINY["save_every"], TINY["weight_decay"] = 1, 5.0  # large enough to be seen in one step


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two steps, made in two starts: its folder, its moments, and what was logged by the first start."""
    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_training, "configure", lambda *place: replace(configure(*place), **TINY, steps=1))
        in_training.moments(run=run)
        first = (run / "metrics.jsonl").read_text()
        patch.setattr(in_training, "configure", lambda *place: replace(configure(*place), **TINY, steps=2))
        yield SimpleNamespace(run=run, moments=in_training.moments(run=run), first=first)


@pytest.fixture(scope="module")
def batch(made):
    return made.moments[1].sample(3, seed=in_training.FRESH, responses=4)


def weights(policy):
    return {name: p.detach().double() for name, p in policy.model.named_parameters()}


def test_each_checkpoint_has_the_optimizer_state_of_its_policy(made, batch):
    for moment in made.moments:
        state = AdamWState.from_state_dict(moment.policy.model, moment.optimizer_state)
        assert set(state.step.values()) == {moment.step}
        kept = weights(moment.policy)
        settings, step = moment.config.loss, moment.step_settings
        movement = apply_update(moment.policy, batch, loss=settings, step=step, optimizer_state=moment.optimizer_state)
        assert [result.outcome for result in movement.results] == ["taken"]
        assert all(torch.equal(weight, kept[name]) for name, weight in weights(moment.policy).items())


def test_a_step_from_a_checkpoint_is_the_step_that_the_run_took(made):
    one, two = made.moments
    trained_on = read_rollouts(made.run / "rollouts" / "step-000002.parquet", one.policy)
    keywords = {"loss": one.config.loss, "step": one.step_settings, "optimizer_state": one.optimizer_state}
    movement = apply_update(one.policy, trained_on, **keywords)
    theirs = batch_statistics(two.policy.model, trained_on, micro_batch_size=8, device=two.policy.device).logprob
    keep = trained_on.response_mask
    # The trainer pads its batch otherwise: float32 sums differ, and AdamW's quotient with them where gradients vanish.
    torch.testing.assert_close(movement.after.logprob[keep], theirs[keep], rtol=0, atol=1e-3)
    assert (movement.before.logprob[keep] - theirs[keep]).abs().max() > 0.05
    after = weights(two.policy)
    norm = math.sqrt(sum((after[name] - weight).square().sum() for name, weight in weights(one.policy).items()))
    assert movement.update_norm == pytest.approx(norm, rel=1e-3)


def test_a_sample_has_both_policies_probabilities_and_grpo_advantages(made, batch):
    moment = made.moments[1]
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for row in range(len(batch)):
        real = batch.attention_mask[row]
        ids, keep = batch.input_ids[row][real], batch.response_mask[row]
        for policy, found in ((moment.policy, batch.old_logprobs), (moment.reference, batch.ref_logprobs)):
            with torch.no_grad():
                logits = policy.model(ids[None]).logits[0, :-1].double() / moment.config.temperature
            expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            # float32's log softmax, of logits of size 20
            torch.testing.assert_close(found[row][keep].double(), expected[keep[real][1:]], rtol=0, atol=1e-4)
        group = batch.rewards[batch.group_ids == batch.group_ids[row]].tolist()
        spread = np.std(group, ddof=1)
        advantage = (float(batch.rewards[row]) - np.mean(group)) / spread if spread else 0.0
        assert batch.advantages[row][keep].tolist() == pytest.approx([advantage] * int(keep.sum()), abs=1e-5)
    assert batch.advantages[batch.response_mask].unique().numel() > 2
    assert (batch.old_logprobs - batch.ref_logprobs)[batch.response_mask].abs().max() > 0.05
