"""Audits of TRL's own gradient: the reading of each of its losses is named, and faults planted while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.tiers import every
from support.trl_runs import PROMPTS, TEMPERATURE, Recorder, make_trainer, needs_trl, save_policy, train
from torch import Tensor

from gradscope import load_policy
from gradscope.integrations.trl import RolloutWriter, batch_from_trl, response_denominators, trl_settings
from gradscope.policy import find_checkpoint
from gradscope.rollouts import read_dump
from gradscope.updates import Audit, audit

pytestmark = needs_trl


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("loss_type", "reading"), [("dapo", "token-mean"), ("grpo", "sequence-mean"), ("bnpo", "micro-batches")]
)
def test_the_reading_of_trls_losses_is_named(checkpoint, tmp_path, loss_type, reading):
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1, "beta": 0.0}
    trainer = make_trainer(checkpoint, tmp_path, loss_type=loss_type, **small)
    recorder = Recorder(trainer)
    train(trainer)
    step = recorder.steps[0]
    batch, loss = batch_from_trl(step["window"], TEMPERATURE), trl_settings(trainer.args).loss
    scales = batch.num_tokens / response_denominators(trainer.args, step["window"])
    told = audit(load_policy(checkpoint), replace(batch, loss_scales=scales), step["gradient"], loss=loss)
    assert (told.kind, told.reading) == ("same", "logged")
    found = audit(load_policy(checkpoint), batch, step["gradient"], loss=loss, micro_batch=4)
    typical = found.readings.set_index("reading")["typical"]
    assert found.kind == "same" and found.odd == ()
    # Where all responses are as long as each other these readings are one.
    assert typical[reading] == pytest.approx(typical.min(), abs=1e-4)


def test_a_constant_divisor_is_the_logs_or_a_factor(checkpoint, tmp_path):
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1, "beta": 0.0}
    trainer = make_trainer(checkpoint, tmp_path, loss_type="dr_grpo", **small)
    recorder = Recorder(trainer)
    train(trainer)
    step, loss = recorder.steps[0], trl_settings(trainer.args).loss
    batch = batch_from_trl(step["window"], TEMPERATURE)
    divisor = float(response_denominators(trainer.args, step["window"])[0])
    found = audit(load_policy(checkpoint), batch, step["gradient"], loss=loss)
    assert found.factor == pytest.approx(batch.num_tokens / divisor, rel=1e-4)
    scales = torch.full((len(batch),), batch.num_tokens / divisor)
    told = audit(load_policy(checkpoint), replace(batch, loss_scales=scales), step["gradient"], loss=loss)
    assert (told.kind, told.reading) == ("same", "logged")


@dataclass(frozen=True)
class Fault:
    """What is wrong in one optimizer step of TRL's, while it trains."""

    factor: float = 1.0
    """Of its loss."""
    late: int = 0
    """Tokens at the start of each response that the mask leaves out."""
    forget: float | None = None
    """The run's temperature, where log π is taken at 1."""
    mean_of_means: bool = False
    """Each micro-batch divides by its own tokens."""
    shorter: int | None = None
    """Tokens that one response lacks, where all others have eight; None: lengths from 4 to 10."""


FAULTS = {
    "sound": (Fault(),),
    "multiple": (Fault(2.0), Fault(1.1), Fault(1.003)),
    "mask": (Fault(late=3), Fault(late=2), Fault(late=1)),
    "temperature": (Fault(forget=0.7), Fault(forget=0.97), Fault(forget=0.997)),
    "means": (Fault(mean_of_means=True), Fault(mean_of_means=True, shorter=3), Fault(mean_of_means=True, shorter=1)),
}
"""Each at three strengths, the smallest last."""
PLANTED = [(name, fault) for name, faults in FAULTS.items() for fault in faults]
STEPS = [
    pytest.param(step, name, fault, marks=[] if fault is FAULTS[name][-1] else pytest.mark.all)
    for step, (name, fault) in enumerate(PLANTED)
]
"""`make test` has the smallest ones."""


def plant(patch: pytest.MonkeyPatch, trainer: Any, faults: Sequence[Fault]) -> None:
    """Have each optimizer step make its fault, in TRL's own code; the log of it is that of a sound one."""
    from trl.trainer.utils import add_fused_lm_head

    loss, generate = type(trainer)._compute_loss, trainer._generate_single_turn
    draw = torch.Generator().manual_seed(0)

    def compute_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        fault, mask = faults[trainer.state.global_step], inputs["completion_mask"]
        if fault.late:
            inputs = inputs | {"tool_mask": mask * (torch.arange(mask.shape[1]) >= fault.late)}  # the loss alone has it
        if fault.mean_of_means:
            inputs = inputs | {"num_items_in_batch": mask.sum() * trainer.args.gradient_accumulation_steps}
        return fault.factor * loss(trainer, model, inputs)

    def generate_single_turn(*args: Any, **keywords: Any) -> Any:
        fault = faults[trainer.state.global_step]
        trainer.temperature = trainer.generation_config.temperature = fault.forget or TEMPERATURE
        of_head = 1.0 if fault.forget else TEMPERATURE
        add_fused_lm_head(trainer.model, temperature=of_head, outputs=("log_probs", "entropy"))
        ids, *rest = generate(*args, **keywords)
        lengths = torch.randint(4, 11, (len(ids),), generator=draw).tolist()
        if fault.shorter is not None:
            lengths = [8 - fault.shorter] + [8] * (len(ids) - 1)
        return [own[:length] for own, length in zip(ids, lengths, strict=True)], *rest

    patch.setattr(type(trainer), "_compute_loss", compute_loss)  # a subclass's would be logged as its own
    trainer._generate_single_turn = generate_single_turn


@pytest.fixture(scope="module")
def audited(checkpoint, tmp_path_factory) -> Callable[[int], Audit]:
    """A training with a fault per step, at weights that stay: the audit of a step from the log of it."""
    folder, small = tmp_path_factory.mktemp("planted"), {"per_device_train_batch_size": 4, "beta": 0.0}
    small |= {"gradient_accumulation_steps": 4, "max_steps": len(PLANTED), "learning_rate": 0.0}
    trainer = make_trainer(checkpoint, folder, generation_kwargs={"min_new_tokens": 10}, **small)
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, trainer, [fault for _, fault in PLANTED])
        train(trainer)
    files = sorted(writer.folder.iterdir())
    policy = load_policy(checkpoint)
    return lambda step: audit(policy, files[step], recorder.steps[step]["gradient"])


@pytest.mark.parametrize(("step", "name", "fault"), STEPS)
def test_a_fault_in_trls_step_is_named(audited, step, name, fault):
    found = audited(step)
    wanted = {"multiple": ("factor", "logged"), "mask": ("same", "mask-late" + f"-{fault.late}" * (fault.late > 1))}
    wanted |= {"temperature": ("same", "no-temperature"), "means": ("same", "micro-batches")}
    assert (found.kind, found.reading) == wanted.get(name, ("same", "logged"))
    assert found.factor == pytest.approx(fault.factor, rel=1e-4) and found.odd == ()


def test_the_log_tells_the_precision_and_what_is_frozen(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, beta=0.0)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.0." not in name)
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    train(trainer)
    (gradient,) = (step["gradient"] for step in recorder.steps)
    batch = read_dump(writer.folder).batch
    assert batch.run.precision == "float32" and {name for name in gradient if not batch.run.trains(name)} == set()
    assert not batch.run.trains("model.embed_tokens.weight")
    found = audit(checkpoint, writer.folder, float(batch.grad_norms[0]))
    assert (found.kind, found.reading) == ("same", "logged") and found.norm_ratio == pytest.approx(1, rel=1e-4)


@pytest.mark.all
def test_a_step_under_autocast_is_within_the_error_of_the_logged_precision(tmp_path):
    embedded = find_checkpoint("embedded")
    trainer = make_trainer(embedded, tmp_path, max_steps=1, beta=0.0, bf16=True, max_completion_length=6)
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    train(trainer)
    found = audit(embedded, writer.folder, recorder.steps[0]["gradient"])
    assert (found.kind, found.reading, found.precision) == ("rounding", "logged", "bfloat16")


def round_gradient(parameter: Tensor) -> None:
    parameter.grad.copy_(parameter.grad.bfloat16())


@pytest.mark.parametrize("count", every(2, [16, 64, 0, 4]))
def test_accumulating_in_bfloat16_is_told_by_its_rounding(tmp_path, count):
    """TRL on the embedded policy, a response to each micro-batch, whose sum is rounded as it grows; 0: it is not."""
    embedded, small = find_checkpoint("embedded"), {"per_device_train_batch_size": 1, "beta": 0.0, "max_steps": 1}
    small |= {"gradient_accumulation_steps": count or 4, "max_completion_length": 6}
    trainer = make_trainer(embedded, tmp_path, prompts=PROMPTS * 4, **small)
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    for parameter in trainer.model.parameters() if count else ():
        parameter.register_post_accumulate_grad_hook(round_gradient)
    train(trainer)
    found = audit(embedded, writer.folder, recorder.steps[0]["gradient"])
    assert (found.kind, found.reading) == ("rounding" if count else "same", "logged")
    if count:
        # Of terms of either sign: eps·√(n/24), which is a fifth of the threshold; as measured, within a factor of 3.
        expected = torch.finfo(torch.bfloat16).eps * (count / 24) ** 0.5
        assert expected / 3 < found.readings["typical"].min() < 3 * expected


@pytest.mark.parametrize("strength", every(2, [1.021, 72.0, 1.0, 1.5]))
def test_a_layers_adapter_b_that_is_scaled_is_named(checkpoint, tmp_path, strength):
    """TRL with a LoRA on two modules of three layers; in the last one B's gradient is scaled while TRL makes it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(checkpoint, tmp_path, peft=lora, gradient_accumulation_steps=2, max_steps=1, beta=0.0)
    draw = torch.Generator().manual_seed(0)
    scaled = [name for name, _ in trainer.model.named_parameters() if ".layers.2." in name and "lora_B" in name]
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # without it A has no gradient
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
        if name in scaled:
            parameter.register_hook(lambda own: strength * own)
    trainer.save_model(str(tmp_path / "adapter"))
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    train(trainer)
    policy = load_policy(tmp_path / "adapter", params="adapter")
    found = audit(policy, writer.folder, recorder.steps[0]["gradient"])
    assert found.reading == "logged" and len(found.parameters) == 12
    if strength == 1.0:
        assert found.kind == "same" and found.parting.empty
        return
    (row,) = found.parting.to_dict("records")
    assert (found.kind, row["layer"], row["group"]) == ("parameters", "2", "adapter B")
    assert row["parameters"] == len(scaled) == len(found.odd) == 2
    assert row["ratio"] == pytest.approx(strength, rel=1e-3)
