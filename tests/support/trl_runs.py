"""Short TRL trainings on the CPU: a tiny policy that speaks in w4 … w95, a reward of its token ids, and who watches."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from .policies import make_tokenizer, save_checkpoint

needs_trl = [pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install -e '.[trl]'")]
"""Marks of every test that runs TRL."""

TEMPERATURE = 0.9
PROMPTS = ("w7 w8 w9", "w20", "w31 w32 w33 w34 w35", "w40 w41")


def import_trl() -> Any:
    """The module, its trainers loaded: where vLLM is installed they import it, and all that it stands on warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        from trl import GRPOTrainer  # noqa: F401 (that loads it)
    return trl


def save_policy(folder: Path) -> Path:
    """A checkpoint whose policy is sure enough of some tokens for every interval to have its share."""
    import_trl()
    return save_checkpoint(folder, "qwen2", sharpness=5.0)


def make_trainer(
    checkpoint: Path,
    out: Path,
    *,
    kind: Any = None,
    methods: dict[str, Any] | None = None,
    peft: Any = None,
    move: float = 0.0,
    eval_rows: int = 0,
    config: Any = None,
    prompts: Sequence[str] = PROMPTS,
    quantization: Any = None,
    **settings: Any,
) -> Any:
    """A GRPOTrainer of that kind (None: TRL's own) on these prompts, eight responses of ten tokens to a step.

    methods: further arguments of the trainer. move: noise on the weights, so that the policy is not the reference.
    config: the class of its settings (None: GRPOConfig). quantization: transformers' configuration of packed weights.
    """
    from datasets import Dataset

    trl = import_trl()
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "max_grad_norm": 1e9,  # clipping at a norm that is never reached changes no bit
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
    }
    packed = {} if quantization is None else {"quantization_config": quantization, "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **packed)
    rows = Dataset.from_dict({"prompt": list(prompts)})
    trainer = (kind or trl.GRPOTrainer)(
        model=model,
        reward_funcs=even_tokens,
        args=(config or trl.GRPOConfig)(output_dir=str(out), **defaults | settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(eval_rows)) if eval_rows else None,
        processing_class=make_tokenizer(),
        peft_config=peft,
        **methods or {},
    )
    if not move:
        return trainer
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in trainer.model.parameters():
            parameter += move * torch.randn(parameter.shape, generator=generator)
    return trainer


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of even ids among the response's tokens."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def train(trainer: Any) -> str:
    """Train from one random state, whatever was made before, and return what was printed."""
    set_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.train()
    return printed.getvalue()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_slopes(trainer: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The trainer's log-probabilities [B, C] with their graph, and ∂loss/∂log π of its own loss."""
    own, kept = type(trainer)._get_per_token_logps_and_entropies, []

    def leaf(*args: Any, **keywords: Any) -> Any:
        logprobs, *rest = own(trainer, *args, **keywords)
        kept.append((logprobs, logprobs.detach().requires_grad_(True)))
        return kept[0][1], *rest

    trainer._get_per_token_logps_and_entropies = leaf
    loss = trainer._compute_loss(trainer.model, inputs)
    del trainer._get_per_token_logps_and_entropies
    return kept[0][0], torch.autograd.grad(loss, kept[0][1])[0]


class Recorder(TrainerCallback):
    """What every optimizer step saw: weights and gradient before it, its learning rate, its micro-batches, the mode."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps = trainer, []
        self.window: list[dict[str, Any]] = []
        prepare = trainer._prepare_inputs

        def prepared(batch: Any) -> Any:
            inputs = prepare(batch)
            self.window.append(inputs)
            return inputs

        trainer._prepare_inputs = prepared
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.window.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model, size = self.trainer.model, self.trainer.current_gradient_accumulation_steps
        rate = self.trainer.optimizer.param_groups[0]["lr"]
        self.steps.append(
            {
                "weights": weights(model),
                "gradient": gradients(model),
                "window": self.window[:size],
                "rate": rate,
                "global_step": state.global_step,
                "random": torch.get_rng_state(),
                "training": [m.training for m in model.modules()],
            }
        )
