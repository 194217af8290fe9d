"""An optimizer step of a tiny model, measured as TRL's callback does it: by one process, or by two that share it.

python sharded_steps.py OUT NAME SPREAD, with the environment that torchrun gives its processes: the weights in shards
(`fully_shard`), the responses dealt to "both" or all with the "first". Each writes OUT/RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradscope.gradients import Resources
from gradscope.integrations.trl.measure import measure_step
from gradscope.intervals import EDGES
from gradscope.policy import whole_weights
from support.policies import make_batch, make_model, make_policy

RATE = 1e-3


def main(out: Path, name: str, spread: str) -> None:
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), make_model(name)
    for unit in (*model.model.layers, model):
        fully_shard(unit)
    rows = range(6)[rank::2] if spread == "both" else range(0 if rank else 6)
    (out / f"{rank}.json").write_text(json.dumps(_take(model, name, rows)))
    dist.destroy_process_group()


def step_by_one(name: str) -> dict[str, float]:
    """What one process measures of the step, with all responses and whole weights."""
    return _take(make_model(name), name, range(6))


def _take(model: nn.Module, name: str, rows: Sequence[int]) -> dict[str, float]:
    """Measure and take the step −Σ A_t · log π_t / tokens over these rows of the batch."""
    everything = make_batch(make_policy(name))
    advantages = torch.tensor([1.5, -1.0, 0.5, -0.5, 1.0, -1.5])[:, None]
    everything = replace(everything, advantages=advantages.expand(everything.input_ids.shape))
    batch = everything.select(list(rows) or [0])
    if not rows:
        batch = replace(batch, response_mask=batch.response_mask & False)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    denominators = torch.full((len(batch),), everything.num_tokens / processes)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    logprobs = (logits / batch.temperature[:, None, None]).log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])
    weights = batch.advantages * batch.response_mask
    (-(weights[:, 1:] * logprobs[:, :, 0]).sum() / denominators[0]).backward()
    with whole_weights(model):
        step = measure_step(
            model,
            batch,
            -batch.advantages / denominators[:, None],
            edges=EDGES,
            cosines=True,
            resources=Resources(micro_batch=2),
        )
    optimizer.step()
    with whole_weights(model):
        step.finish()
    return step.numbers | {"num_tokens": step.num_tokens}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
