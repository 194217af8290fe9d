"""What each of several processes does in tests/runs/test_distributed.py; what it finds goes into OUT/RANK.pt.

python distributed_worker.py MODEL OUT, with the environment that torchrun gives its processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import LossSettings, StepTokens, lopti_split, resolve_advantages, split_steps
from gradscope.runs import leave_launch
from gradscope.trainer import TrainConfig
from gradscope.trainer.learner import Learner, build_learner
from support.policies import make_batch, make_policy

MODEL = "qwen2"
MICRO_BATCHES = (1, 2, 4, 6)
"""Of six responses: three micro-batches for each of two processes; two and one; one each; one and none."""
FEW_BATCHES = (2, 6)
"""Those of them that are tried with less memory."""
FRUGAL = {"gradient_checkpointing": True, "lora_rank": 2}
LOSS = LossSettings(kl_coef=0.1)


def make_config(folder: str | Path, **settings: Any) -> TrainConfig:
    return TrainConfig(model=str(folder), **({"kl_coef": 0.1, "learning_rate": 1e-2, "steps": 1} | settings))


def make_steps() -> list[StepTokens]:
    """A whole pass over recorded rollouts, and Lopti's two, each over all six responses."""
    batch = make_batch(make_policy(MODEL))
    batch = replace(batch, advantages=resolve_advantages(batch))
    low, high = lopti_split(batch.old_logprobs.nan_to_num(0.0), batch.response_mask, eta=0.5)
    return split_steps(batch, 6, [("all", batch.response_mask)]) + split_steps(batch, 6, [("low", low), ("high", high)])


def measure_gradients(
    learner: Learner, steps: list[StepTokens], sizes: Sequence[int] = MICRO_BATCHES
) -> list[dict[str, Any]]:
    """Of each pass, at each size of micro-batches: the gradient by parameter, its norm, and the totals of the loss."""
    found = []
    for size in sizes:
        updater = replace(learner.updater, micro_batch_size=size)
        for part in steps:
            totals = [*updater.accumulate(part, LOSS)[:4]]
            trained = [(n, p) for n, p in learner.policy.model.named_parameters() if p.requires_grad]
            gradient = {n: p.grad.clone() for n, p in trained}
            found.append({"size": size, "name": part.name, "totals": totals, "gradient": gradient})
            found[-1]["norm"] = updater.grad_norm()
            learner.optimizer.zero_grad()
    return found


def measure_frugally(folder: Path, accelerator: Accelerator, **settings: Any) -> list[dict[str, Any]]:
    """Gradients of the whole pass alone, of a policy that is trained with less memory."""
    return measure_gradients(build_learner(make_config(folder, **settings), accelerator), make_steps()[:1], FEW_BATCHES)


def take_steps(learner: Learner, steps: list[StepTokens]) -> dict[str, Any]:
    """Results of a step on each pass, and the policy, its reference and its optimizer after them."""
    results = [learner.updater.step(part, LOSS) for part in steps]
    return {
        "results": [(r.name, r.outcome, r.loss, r.grad_norm, r.grad_norm_clipped) for r in results],
        "logprobs": learner.statistics(steps[0].batch).logprob,
        "reference": learner.reference_logprobs(steps[0].batch),
        "weights": {name: weight.clone() for name, weight in learner.weights()},
    }


def score_while_training(learner: Learner, part: StepTokens) -> dict[str, Tensor]:
    """log π of the pass's tokens by a pass of their own, and by the pass that trains on them."""
    before = learner.statistics(part.batch).logprob
    totals = learner.updater.accumulate(part, LOSS, score=True)
    learner.optimizer.zero_grad()
    return {"before": before, "by the pass": totals.statistics.logprob}


def fail_apart(learner: Learner, error: type[Exception]) -> str:
    """What each process hears when the second alone fails."""
    try:
        with learner.processes.together():
            if learner.processes.rank == 1:
                raise error("only the second process saw this")
    except (InputError, OSError) as heard:
        return f"{type(heard).__name__}: {heard}"
    return "nothing"


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    learner = build_learner(make_config(folder), accelerator)
    steps = make_steps()
    found: dict[str, Any] = {"type": accelerator.distributed_type.value}
    found["failures"] = [fail_apart(learner, error) for error in (InputError, OSError)]
    found["scored"] = score_while_training(learner, steps[0])
    found["whole"] = {"gradients": measure_gradients(learner, steps), "steps": take_steps(learner, steps)}
    found["frugal"] = measure_frugally(folder, accelerator, **FRUGAL)
    torch.save(found, out / f"{learner.processes.rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave_launch()
