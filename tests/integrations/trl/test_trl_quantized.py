"""QLoRA in TRL, watched: training on a packed base is the same bit for bit, and its step is what is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import bits
from support.packings import PACKINGS, save_full
from support.trl_runs import import_trl, make_trainer, needs_trl, train, weights
from torch import Tensor

from gradscope.integrations.trl import GradScopeCallback, RolloutWriter, TokenMonitor

peft = pytest.importorskip("peft")
pytestmark = needs_trl

WATCHERS = {
    "the callback": lambda trainer: GradScopeCallback(trainer, every=1, progress=False),
    "the callback on a budget": lambda trainer: GradScopeCallback(trainer, every=1, budget=0.9, progress=False),
    "the monitor": TokenMonitor,
    "the writer": RolloutWriter,
}


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return save_full(tmp_path_factory.mktemp("full"))


def train_adapter(
    full: Path, out: Path, packing: str, watcher: Any = None, **settings: Any
) -> tuple[dict[str, Tensor], Any, Any]:
    """Two steps of QLoRA: all weights and bits afterwards, the trainer's log, and who watched."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(full, out, peft=lora, quantization=PACKINGS[packing], max_steps=2, **settings)
    seen = None if watcher is None else watcher(trainer)
    if seen is not None:
        trainer.add_callback(seen)
    train(trainer)
    return weights(trainer.model), [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row], seen


def stored(tensor: Tensor) -> Tensor:
    """What a weight's memory holds; of torchao's, what it stands for."""
    return tensor.dequantize() if "torchao" in type(tensor).__module__ else tensor.detach()


@pytest.fixture(scope="module", params=PACKINGS)
def alone(request, full, tmp_path_factory) -> tuple[str, dict[str, Tensor], list[float]]:
    return request.param, *train_adapter(full, tmp_path_factory.mktemp("alone"), request.param)[:2]


@pytest.mark.parametrize("watcher", WATCHERS)
def test_training_on_a_packed_base_is_the_same_bit_for_bit_under_every_watcher(alone, full, tmp_path, watcher):
    packing, wanted, norms = alone
    found, theirs, seen = train_adapter(full, tmp_path, packing, WATCHERS[watcher])
    assert theirs == norms and min(norms) > 0
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert bits(stored(found[name])) == bits(stored(value)), name
    if watcher == "the callback":
        # TRL trains the adapters of a packed base in bfloat16, whose last bit is 2⁻⁸ of a norm.
        assert all(row["grad_norm_ratio"] == pytest.approx(1, abs=2**-7) for row in seen.rows)
        assert len(seen.rows) == 2


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_monitors_own_passes_leave_a_packed_base_as_it_is(full, tmp_path, packing):
    class Apart(import_trl().GRPOTrainer):
        """A loss that never asks TRL for log π, so that the monitor runs a forward pass itself."""

        def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            logits = model(input_ids=ids).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
            logprobs = logits.float().log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
            return -(logprobs * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()

    wanted, norms, _ = train_adapter(full, tmp_path / "alone", packing, kind=Apart)
    watcher = lambda trainer: TokenMonitor(trainer, forward_every=1)  # noqa: E731
    found, theirs, seen = train_adapter(full, tmp_path / "watched", packing, watcher, kind=Apart)
    assert theirs == norms and min(norms) > 0 and len(seen.rows) == 2
    assert not any(math.isnan(row["token_share/p0-25"]) for row in seen.rows)
    assert all(bits(stored(found[name])) == bits(stored(value)) for name, value in wanted.items())
