"""TRL's trainers on given text, watched: training is the same bit for bit, and rows have the trainer's own gradient."""

from __future__ import annotations

import pytest
import torch
from support.refusals import refused
from support.trl_runs import gradients, import_trl, needs_trl, save_policy, train, weights
from support.trl_texts import make_text_trainer
from transformers import TrainerCallback

from gradscope import load_policy
from gradscope.gradients import Resources, TokenJacobian
from gradscope.integrations.trl import GradScopeCallback, RolloutWriter, SpikeRecorder, TokenMonitor
from gradscope.objective import LossSettings, batch_weights
from gradscope.policy import flat_slices
from gradscope.rollouts import read_dump

pytestmark = needs_trl

EXACT = 1e-5
"""‖Σ w_t g_t − G‖/‖G‖ of two programs' float32 gradients."""
LOSSES = {
    "sft": ("SFTTrainer", {}),
    "dft": ("SFTTrainer", {"loss_type": "dft"}),
    "dpo:beta=0.3": ("DPOTrainer", {"beta": 0.3}),
    "ipo": ("DPOTrainer", {"loss_type": ["ipo"]}),
    "kto:beta=0.3,undesirable=1.5": ("KTOTrainer", {"beta": 0.3, "undesirable_weight": 1.5}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Steps(TrainerCallback):
    """Weights and gradient before each step."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *_, **__):
        self.seen.append((weights(self.trainer.model), gradients(self.trainer.model)))


@pytest.mark.parametrize("name", LOSSES)
def test_training_is_the_same_bit_for_bit_and_rows_have_the_trainers_gradient(checkpoint, tmp_path, name):
    kind, settings = LOSSES[name]
    ends = []
    for folder in ("without", "with"):
        trainer = make_text_trainer(checkpoint, tmp_path / folder, kind, **settings)
        watching = ()
        if folder == "with":
            watching = (
                RolloutWriter(trainer),
                GradScopeCallback(trainer, every=1, progress=False),
                TokenMonitor(trainer),
            )
        for each in watching:
            trainer.add_callback(each)
        steps = Steps(trainer)
        train(trainer)
        ends.append(weights(trainer.model))
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    writer, callback, monitor = watching
    assert writer.steps == [row["step"] for row in callback.rows] == [row["step"] for row in monitor.rows] == [1, 2, 3]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    for number, (before, gradient) in enumerate(steps.seen, 1):
        policy = load_policy(checkpoint)
        policy.model.load_state_dict(before, strict=False)
        dump = read_dump(writer.folder / f"step_{number:06d}.parquet", policy)
        loss, batch = LossSettings.from_log(dump.loss), dump.batch
        assert loss.weighting == name
        J = TokenJacobian(policy, batch, Resources())
        found = batch_weights(J.statistics.logprob, batch, loss, num_tokens=batch.num_tokens).total
        ours = J.vjp(J.kept(-found / batch.num_tokens)[None]).rows[0].double()
        theirs = torch.cat([gradient[own].flatten() for own in flat_slices(policy.model)]).double()
        assert float((ours - theirs).norm()) < EXACT * float(theirs.norm())
        assert float(ours.norm()) == pytest.approx(norms[number - 1], rel=EXACT)
        assert batch.grad_norms.unique().tolist() == pytest.approx([norms[number - 1]])
        assert callback.rows[number - 1]["grad_norm_ratio"] == pytest.approx(1, abs=EXACT)
