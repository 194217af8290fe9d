"""What each of several processes does in tests/runs/test_distributed.py; what it finds goes into OUT/RANK.pt.

python distributed_worker.py MODEL OUT, with the environment that torchrun gives its processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

from gradscope.errors import InputError
from gradscope.objective import LossSettings, Pass, lopti_split, resolve_advantages, split_passes, whole_passes
from gradscope.runs import end_at_once, whole
from gradscope.sampling import HFSampler
from gradscope.trainer import TrainConfig
from gradscope.trainer.checkpoints import restore_checkpoint, save_checkpoint
from gradscope.trainer.learner import Learner, build_learner
from support.policies import make_batch, make_policy

MODEL = "qwen2"
MICRO_BATCHES = (1, 2, 4, 6)
"""Of six responses: three micro-batches for each of two processes; two and one; one each; one and none."""
FEW_BATCHES = (2, 6)
"""Those of them that are tried on shards, which are slow on a CPU."""
FRUGAL = {"gradient_checkpointing": True, "lora_rank": 2}
LOSS = LossSettings(kl_coef=0.1)


def make_config(folder: str | Path, **settings: Any) -> TrainConfig:
    return TrainConfig(model=str(folder), **({"kl_coef": 0.1, "learning_rate": 1e-2, "steps": 1} | settings))


def make_passes() -> list[Pass]:
    """A whole pass over recorded rollouts, and Lopti's two, each over all six responses."""
    batch = make_batch(make_policy(MODEL))
    batch = replace(batch, advantages=resolve_advantages(batch))
    low, high = lopti_split(batch.old_logprobs.nan_to_num(0.0), batch.response_mask, eta=0.5)
    return whole_passes(batch, 6) + split_passes(batch, 6, [("low", low), ("high", high)])


def measure_gradients(
    learner: Learner, passes: list[Pass], sizes: Sequence[int] = MICRO_BATCHES
) -> list[dict[str, Any]]:
    """Of each pass, at each size of micro-batches: the gradient by parameter, its norm, and the totals of the loss."""
    found = []
    for size in sizes:
        updater = replace(learner.updater, micro_batch_size=size)
        for part in passes:
            totals = [*updater.accumulate(part, LOSS)]
            trained = [(n, p) for n, p in learner.policy.model.named_parameters() if p.requires_grad]
            gradient = {n: whole(p.grad).clone() for n, p in trained}
            found.append({"size": size, "name": part.name, "totals": totals, "gradient": gradient})
            found[-1]["norm"] = updater.grad_norm()
            learner.optimizer.zero_grad()
    return found


def measure_frugally(folder: Path, accelerator: Accelerator, **settings: Any) -> list[dict[str, Any]]:
    """Gradients of the whole pass alone, of a policy that is trained with less memory."""
    return measure_gradients(
        build_learner(make_config(folder, **settings), accelerator), make_passes()[:1], FEW_BATCHES
    )


def take_steps(learner: Learner, passes: list[Pass]) -> dict[str, Any]:
    """Results of a step on each pass, and the policy, its reference and its optimizer after them."""
    results = [learner.updater.step(part, LOSS) for part in passes]
    return {
        "results": [(r.name, r.outcome, r.loss, r.grad_norm, r.grad_norm_clipped) for r in results],
        "logprobs": learner.statistics(passes[0].batch).logprob,
        "reference": learner.reference_logprobs(passes[0].batch),
        "weights": {name: weight.clone() for name, weight in learner.weights()},
    }


def measure_shards(folder: Path, out: Path, accelerator: Accelerator) -> dict[str, Any]:
    """The same of a policy in shards; what is sampled with it; and how a second one goes on from its checkpoint."""
    config, passes = make_config(folder), make_passes()
    learner = build_learner(config, accelerator)
    found = {"gradients": measure_gradients(learner, passes, FEW_BATCHES), "is_sharded": learner.is_sharded}
    found["local"] = sum(p.to_local().numel() for p in learner.policy.model.parameters())
    found["steps"] = take_steps(learner, passes)
    learner.sync(HFSampler(learner.sampled))
    # Processes that sample unequally long: a sampler of shards would wait for ever.
    prompts = [[5, 6, 7]] * (1 + learner.processes.rank)
    generator = torch.Generator().manual_seed(0)
    samples = HFSampler(learner.sampled, progress=False).sample(
        prompts, n=2, temperature=1.0, max_new_tokens=6, generator=generator
    )
    found["samples"] = [[sample.response_ids, sample.logprobs] for sample in samples[0]]
    checkpoint = save_checkpoint(out, 1, learner)
    again = build_learner(config, accelerator, checkpoint)
    restore_checkpoint(checkpoint, again)
    found["went_on"] = [take_steps(one, passes[:1]) for one in (learner, again)]
    return found


def measure_roughly(folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    """The gradient of shards that are computed with in bfloat16; what the weights are, and what is sampled with."""
    learner = build_learner(make_config(folder, precision="bfloat16"), accelerator)
    part = make_passes()[0]
    on_policy = replace(part, batch=replace(part.batch, old_logprobs=None, ref_logprobs=None))
    dtypes = {weight.dtype for _, weight in learner.weights()}
    return {
        "gradient": measure_gradients(learner, [on_policy], (6,))[0]["gradient"],
        "weights": dtypes,
        "sampled": learner.sampled.dtype,
    }


@contextmanager
def shards_on_a_cpu(accelerator: Accelerator, **settings: Any) -> Iterator[None]:
    """Let accelerate shard (FSDP 2) as it does on GPUs; of itself it takes a CPU's processes for whole ones."""
    state = accelerator.state
    kind, plugin = state.distributed_type, getattr(state, "fsdp_plugin", None)
    settings = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | settings
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin(**settings)
    try:
        yield
    finally:
        state.distributed_type, state.fsdp_plugin = kind, plugin


def refusal(folder: Path, accelerator: Accelerator, **settings: Any) -> str:
    try:
        build_learner(make_config(folder, **settings), accelerator)
    except InputError as error:
        return str(error)
    return "not refused"


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
    passes = make_passes()
    found: dict[str, Any] = {"type": accelerator.distributed_type.value}
    found["failures"] = [fail_apart(learner, error) for error in (InputError, OSError)]
    found["whole"] = {"gradients": measure_gradients(learner, passes), "steps": take_steps(learner, passes)}
    found["frugal"] = measure_frugally(folder, accelerator, **FRUGAL)
    with shards_on_a_cpu(accelerator):
        found["shards"] = measure_shards(folder, out, accelerator)
        found["frugal shards"] = measure_frugally(folder, accelerator, gradient_checkpointing=True)
        found["bfloat16"] = measure_roughly(folder, accelerator)
        found["refused"] = [
            refusal(folder, accelerator, **given) for given in ({"lora_rank": 2}, {"gradients_every": 1})
        ]
    for settings in ({"fsdp_version": 1}, {"cpu_offload": True}, {"activation_checkpointing": True}):
        with shards_on_a_cpu(accelerator, **settings):
            found["refused"].append(refusal(folder, accelerator))
    torch.save(found, out / f"{learner.processes.rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    end_at_once(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])))
