"""What a training step computes, by part: the work that its FLOPs and its seconds are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradscope.cost import ModelShape, Piece
from gradscope.cost_train import optimizer_work, sampling_work, scoring_work, training_work
from gradscope.machine_speed import JobSizes, Speeds, Work, gpu_speeds, measure_speeds
from gradscope.models import DTYPES, find_device
from gradscope.trainer.algorithm import scores_in_first_pass
from gradscope.trainer.config import TrainConfig


@dataclass(frozen=True)
class Lengths:
    """How long the texts are taken to be, in tokens."""

    prompt: int
    longest: int
    """Response that the memory must hold."""
    mean: int
    """Response that times and FLOPs are counted for."""


def step_work(config: TrainConfig, shape: ModelShape, lengths: Lengths, passes: int) -> dict[str, Work]:
    """By part, as gradscope's trainer does it in micro-batches, in one process.

    Responses have their mean length and differ little from it within a micro-batch: they are sorted by length. There
    the responses to a question share its prompt, and the first mini-batch is scored by its training pass where the
    algorithm lets it be.
    """
    length, count = lengths.prompt + lengths.mean, config.num_responses
    size = min(config.micro_batch_size, config.mini_batch_size)
    tokens = None  # recomputation knows no shared prompts
    if not config.gradient_checkpointing:
        tokens = size * lengths.mean + max(1, size / config.group_size) * lengths.prompt
    part = training_work(
        shape,
        Piece(size, length, math.ceil(lengths.mean / passes)),
        lora_rank=config.lora_rank,
        checkpointing=config.gradient_checkpointing,
        tokens=tokens,
    )
    times = passes * (2 if config.control == "matched-norm" else 1) * count / size
    trained_first = min(count, config.mini_batch_size) if scores_in_first_pass(config) else 0
    scored = count - trained_first + (count if config.kl_coef > 0 else 0)  # by the policy, by its reference
    whole = Piece(count, length, lengths.mean)
    return {
        "sampling": sampling_work(
            shape,
            whole,
            prompts=config.questions_per_step,
            longest=lengths.longest,
            at_once=min(config.sampling_batch_size, count),
        ),
        "scoring": scoring_work(shape, Piece(size, length, lengths.mean), tokens=tokens) * (scored / size),
        **{name: work * times for name, work in part.items()},
        "optimizer": optimizer_work(shape, lora_rank=config.lora_rank) * optimizer_steps(config, passes),
    }


def optimizer_steps(config: TrainConfig, passes: int) -> int:
    """Of one batch of responses."""
    return passes * math.ceil(config.num_responses / config.mini_batch_size)


def step_speeds(config: TrainConfig, shape: ModelShape, lengths: Lengths, machine: str | None = None) -> Speeds:
    """Of a GPU of machine_speed.GPUS; None: of this machine, measured on arrays like a step's."""
    # Decoding begins with all rows and ends with one.
    alive = max(1, round(min(config.sampling_batch_size, config.num_responses) * lengths.mean / lengths.longest))
    if machine is not None:
        return gpu_speeds(machine, config.precision, thin_rows=alive)
    size, length = min(config.micro_batch_size, config.mini_batch_size), lengths.prompt + lengths.mean
    sizes = JobSizes(
        rows=size * length,
        thin_rows=alive,
        hidden=shape.hidden,
        head_dim=shape.head_dim,
        heads=shape.heads,
        length=length,
        vocab=shape.vocab,
        logit_rows=size * lengths.mean,
    )
    device = torch.device(find_device(config.device))
    return measure_speeds(sizes, device=device, dtype=DTYPES[config.precision])
