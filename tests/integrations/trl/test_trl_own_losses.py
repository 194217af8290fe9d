"""Trainers whose loss is their own: the same bit for bit beside all who watch, and written with their own weights."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from support.refusals import refused
from support.tiers import every
from support.trl_runs import Recorder, import_trl, make_trainer, needs_trl, save_policy, train, weights
from torch.nn.functional import softplus

from gradscope import diagnose, load_policy
from gradscope.gradients import Resources, TokenJacobian
from gradscope.integrations.trl import GradScopeCallback, GradScopeGRPOTrainer, RolloutWriter, TokenMonitor
from gradscope.objective import LossSettings, batch_weights
from gradscope.policy import flat_slices
from gradscope.rollouts import read_dump
from gradscope.updates import audit

pytestmark = needs_trl

EXACT = 1e-5
"""‖Σ w_t g_t − G‖/‖G‖ of two programs' float32 gradients."""
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
OFF_POLICY = {"num_iterations": 2, "move": 0.02, "learning_rate": 1e-3, "max_steps": 4, **ACCUMULATED}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def own_terms(trainer, model, inputs):
    """log π, entropies, Â and mask of the trainer's own forward pass."""
    ids, seen = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    count = inputs["completion_ids"].shape[1]
    found = trainer._get_per_token_logps_and_entropies(model, ids, seen, count, compute_entropy=True)
    return found[0], found[1], inputs["advantages"][:, None], inputs["completion_mask"]


def by_entropy(trainer, model, inputs):
    """REINFORCE on the more uncertain half of the tokens."""
    logprobs, entropies, advantages, mask = own_terms(trainer, model, inputs)
    chosen = mask * (entropies.detach() > entropies.detach()[mask.bool()].median())
    return -(logprobs * advantages * chosen).sum() / mask.sum()


def clipped_twice(trainer, model, inputs):
    """A ratio of three tokens in a row, clipped softly."""
    logprobs, _, advantages, mask = own_terms(trainer, model, inputs)
    old = inputs.get("old_per_token_logps", logprobs.detach() - 0.05)
    ratio = ((logprobs - old) * mask).unfold(1, 3, 1).sum(2).exp()
    return -(softplus(3 * ratio.clamp(0.7, 1.3)) * advantages).mean()


def with_tools(trainer, model, inputs):
    """Every token but the first of each response, whatever the mask says of it."""
    logprobs, _, advantages, _ = own_terms(trainer, model, inputs)
    return -(logprobs * advantages)[:, 1:].sum()


def entropy_bonus(trainer, model, inputs):
    logprobs, entropies, advantages, mask = own_terms(trainer, model, inputs)
    return -((logprobs * advantages + 0.1 * entropies) * mask).sum() / mask.sum()


def decayed(trainer, model, inputs):
    """Weight decay in the loss, which is not of log π."""
    logprobs, _, advantages, mask = own_terms(trainer, model, inputs)
    decay = model.get_output_embeddings().weight.square().sum()
    return -(logprobs * advantages * mask).sum() / mask.sum() + 0.01 * decay


def make(checkpoint, folder, loss, *, base="GRPOTrainer", method="_compute_loss", **settings):
    """A trainer of TRL's whose method is that loss; None: TRL's own, with what the settings make of it."""
    trl, kind = import_trl(), GradScopeGRPOTrainer
    if base != "GradScopeGRPOTrainer":
        kind = getattr(trl, base)
    if loss is not None:

        def compute(self, model, inputs, *_, **__):
            return loss(self, model, inputs)

        kind = type("Mine", (kind,), {method: compute})
    config = trl.RLOOConfig if base == "RLOOTrainer" else None
    return make_trainer(checkpoint, folder, kind=kind, config=config, **settings)


def watch_all(trainer):
    writer = RolloutWriter(trainer)
    callback = GradScopeCallback(trainer, every=1, micro_batch_size=3, progress=False)
    for each in (writer, callback, monitor := TokenMonitor(trainer)):
        trainer.add_callback(each)
    return writer, callback, monitor


def summed(checkpoint, step, path):
    """Σ w_t g_t/N of a step's rows, and the trainer's gradient, both flat."""
    policy = load_policy(checkpoint)
    policy.model.load_state_dict(step["weights"], strict=False)
    dump = read_dump(path, policy)
    J = TokenJacobian(policy, dump.batch, Resources())
    settings = LossSettings.from_log(dump.loss)
    found = batch_weights(J.statistics.logprob, dump.batch, settings, num_tokens=dump.batch.num_tokens).total
    ours = J.vjp(J.kept(-found / dump.batch.num_tokens)[None]).rows[0]
    theirs = torch.cat([step["gradient"][name].flatten() for name in flat_slices(policy.model)])
    return policy, dump, ours.double(), theirs.double()


LOSSES = {
    "a mask by entropy": (by_entropy, {}),
    "a mask by entropy in compute_loss": (by_entropy, {"method": "compute_loss"}),
    "RLOO, a mask by entropy": (by_entropy, {"base": "RLOOTrainer", **ACCUMULATED}),
    "a clip of its own": (clipped_twice, OFF_POLICY),
    "RLOO, a clip of its own": (clipped_twice, {"base": "RLOOTrainer", **OFF_POLICY}),
    "RLOO": (None, {"base": "RLOOTrainer", "epsilon": 0.05, **OFF_POLICY}),
    "cispo": (None, {"loss_type": "cispo", "epsilon_high": 1.01, "beta": 0.1, **OFF_POLICY}),
    "gspo": (None, {"importance_sampling_level": "sequence", **OFF_POLICY}),
    "a weighting": (None, {"base": "GradScopeGRPOTrainer", "methods": {"weighting": "delightful"}, **ACCUMULATED}),
}


@pytest.mark.parametrize("name", every(3, LOSSES))
def test_training_is_the_same_bit_for_bit_and_rows_sum_to_the_trainers_gradient(checkpoint, tmp_path, name):
    loss, settings = LOSSES[name]
    ends = []
    for folder in ("without", "with"):
        trainer = make(checkpoint, tmp_path / folder, loss, **{"max_steps": 2} | settings)
        watching, recorder = watch_all(trainer) if folder == "with" else None, Recorder(trainer)
        train(trainer)
        ends.append(weights(trainer.model))
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    writer, callback, monitor = watching
    assert writer.steps == [row["step"] for row in callback.rows] == [row["step"] for row in monitor.rows]
    for number, step in enumerate(recorder.steps, 1):
        path = writer.folder / f"step_{number:06d}.parquet"
        policy, dump, ours, theirs = summed(checkpoint, step, path)
        if not theirs.any():  # no response of the step has an advantage
            assert not ours.any() and number > 1
            continue
        assert float((ours - theirs).norm()) < EXACT * float(theirs.norm())
        assert callback.rows[number - 1]["grad_norm_ratio"] == pytest.approx(1, abs=EXACT)
        run = dump.batch.run
        assert run.other_loss == writer.other_loss is not None and run.left_out == ()
        assert [note for note in dump.batch.notes if writer.other_loss in note and note.kind == "loss"]
        old = dump.batch.old_logprobs
        assert (old is not None) == ("old_per_token_logps" in step["window"][0])
        found = audit(policy, path, step["gradient"])
        assert (found.kind, found.reading) == ("same", "logged") and run.words in found.notes


@pytest.mark.parametrize(
    ("loss", "named"), every(2, [(entropy_bonus, "entropies"), (decayed, "log π"), (with_tools, "tokens")])
)
def test_a_gradient_beside_the_kept_tokens_log_probabilities_is_said_and_left_out(checkpoint, tmp_path, loss, named):
    """By each who watches, once in a run, and in the note of what is written; the rest is as without it."""
    trainer = make(checkpoint, tmp_path, loss, max_steps=2, learning_rate=1e-4)
    own = trainer._generate_and_score_completions

    def generate(batch):
        found = own(batch)
        found["tool_mask"] = torch.ones_like(found["completion_mask"])
        found["tool_mask"][:, 4] = 0
        return found

    if loss is with_tools:
        trainer._generate_and_score_completions = generate
    (writer, callback, _), recorder = watch_all(trainer), Recorder(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(trainer)
    said = [str(w.message) for w in caught if "gradscope: the loss" in str(w.message)]
    assert len(said) == 3 and all(named in words for words in said)
    assert all(abs(row["grad_norm_ratio"] - 1) > 1e-4 for row in callback.rows)
    step = recorder.steps[0]
    _, dump, ours, theirs = summed(checkpoint, step, writer.folder / "step_000001.parquet")
    assert len(dump.batch.run.left_out) == 1 and any(dump.batch.run.left_out[0] in note for note in dump.batch.notes)
    # What is missing is the part of the loss that the note names, by autograd.
    trainer.model.load_state_dict(step["weights"], strict=False)
    trainer.model.train()
    (inputs,) = step["window"]
    logprobs, entropies, advantages, mask = own_terms(trainer, trainer.model, inputs)
    beside = {
        entropy_bonus: lambda: -0.1 * (entropies * mask).sum() / mask.sum(),
        decayed: lambda: 0.01 * trainer.model.get_output_embeddings().weight.square().sum(),
        with_tools: lambda: -(logprobs * advantages)[:, 4].sum(),
    }[loss]()
    own = [trainer.model.get_parameter(name) for name in flat_slices(trainer.model)]
    parts = torch.autograd.grad(beside, own, materialize_grads=True, allow_unused=True)
    missing = torch.cat([part.flatten() for part in parts]).double()
    assert float((ours + missing - theirs).norm()) < EXACT * float(theirs.norm()) < float(missing.norm())


def test_a_loss_that_makes_its_own_log_probabilities_is_not_written_and_one_warning_says_so(checkpoint, tmp_path):
    def own_pass(trainer, model, inputs):
        ids, own = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), inputs["completion_ids"]
        logits = model(input_ids=ids).logits[:, -own.shape[1] - 1 : -1]
        return -(logits.log_softmax(-1).gather(-1, own[..., None])[..., 0] * inputs["advantages"][:, None]).mean()

    trainer = make(checkpoint, tmp_path, own_pass, max_steps=3)
    trainer.add_callback(writer := RolloutWriter(trainer))
    with pytest.warns(UserWarning) as caught:
        train(trainer)
    assert len([w for w in caught if "log π" in str(w.message)]) == 1
    assert writer.steps == [] and not writer.folder.exists()


@pytest.mark.all
def test_slopes_are_without_fp16s_scale(checkpoint, tmp_path):
    """Of a trainer whose loss accelerate scales by 1024, and whose gradients are unscaled before the step."""

    class Scaler:
        def scale(self, loss):
            return 1024 * loss

        def get_scale(self):
            return 1024.0

        def step(self, optimizer, closure):
            return optimizer.step(closure)

        def update(self):
            pass

    found = []
    for scaled in (False, True):
        trainer = make(checkpoint, tmp_path / str(scaled), by_entropy, max_steps=2, **ACCUMULATED)
        if scaled:
            trainer.accelerator.scaler, own_norm = Scaler(), trainer._get_grad_norm

            def unscaled(model, *args, own_norm=own_norm, **keywords):
                for parameter in model.parameters():
                    parameter.grad /= 1024
                return own_norm(model, *args, **keywords)

            trainer._clip_grad_norm, trainer._get_grad_norm = lambda model: None, unscaled
        writer, callback, _ = watch_all(trainer)
        train(trainer)
        found.append((read_dump(writer.folder, step=2).batch, callback.rows))
    (one, rows), (other, others) = found
    assert torch.equal(one.advantages.nan_to_num(), other.advantages.nan_to_num())
    assert [row["grad_norm/all"] for row in rows] == [row["grad_norm/all"] for row in others]


def test_trls_own_advantages_stay_in_the_log(checkpoint, tmp_path):
    import pyarrow.parquet as pq

    trainer = make(checkpoint, tmp_path, by_entropy, max_steps=1)
    trainer.add_callback(writer := RolloutWriter(trainer))
    recorder = Recorder(trainer)
    train(trainer)
    rows = pq.read_table(writer.folder / "step_000001.parquet").to_pylist()
    (inputs,) = recorder.steps[0]["window"]
    for row, advantage in zip(rows, inputs["advantages"].tolist(), strict=True):
        assert row["trainer_advantages"] == pytest.approx([advantage] * len(row["response_ids"]))


def test_a_diagnosis_of_what_is_written_says_whose_loss_it_is(checkpoint, tmp_path):
    trainer = make(checkpoint, tmp_path, by_entropy, max_steps=1)
    trainer.add_callback(writer := RolloutWriter(trainer))
    train(trainer)
    found = diagnose(checkpoint, writer.folder, resamples=50)
    assert [note for note in found.notes if writer.other_loss in note]


def test_deepspeeds_scale_of_a_loss_in_fp16_is_refused_where_weights_would_have_it(checkpoint, tmp_path):
    for loss in (None, by_entropy):
        trainer = make(checkpoint, tmp_path, loss)
        trainer.is_deepspeed_enabled = trainer.args.fp16 = True
        with refused("DeepSpeed", "fp16"):
            GradScopeCallback(trainer)
        with refused("DeepSpeed", "fp16") if loss else nullcontext():
            RolloutWriter(trainer)


def test_lopti_is_refused_by_the_writer(checkpoint, tmp_path):
    with refused("lopti_eta"):
        RolloutWriter(make(checkpoint, tmp_path, None, base="GradScopeGRPOTrainer", methods={"lopti_eta": 0.5}))
