"""What a training step computes: FLOPs by part, and the work that its seconds are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradscope.cost import ModelShape, Piece, backward_flops, forward_flops
from gradscope.cost_train import optimizer_work, sampling_work, scoring_work, training_work
from gradscope.machine_speed import Sizes, Speeds, Work, gpu_speeds, measure_speeds
from gradscope.models import DTYPES, find_device
from gradscope.trainer.config import TrainConfig

Number = int | float


@dataclass(frozen=True)
class Lengths:
    """How long the texts are taken to be, in tokens."""

    prompt: int
    longest: int
    """Response that the memory must hold."""
    mean: int
    """Response that times and FLOPs are counted for."""


def step_flops(config: TrainConfig, shape: ModelShape, lengths: Lengths, passes: int) -> dict[str, Number]:
    """By part of a step. Each pass of Lopti runs the blocks on whole responses and the head on its own tokens."""
    count, length = config.num_responses, lengths.prompt + lengths.mean
    whole, part = Piece(count, length, lengths.mean), Piece(count, length, math.ceil(lengths.mean / passes))
    forward, backward = forward_flops(shape, part), backward_flops(shape, part, lora_rank=config.lora_rank)
    again = 2 if config.gradient_checkpointing else 1
    gradients = 2 if config.control == "matched-norm" else 1
    return {
        "sampling": forward_flops(shape, whole),
        "scoring": forward_flops(shape, whole) * (2 if config.kl_coef > 0 else 1),
        "training, forward": passes * gradients * forward * again,
        "training, backward": passes * gradients * backward,
    }


def step_work(config: TrainConfig, shape: ModelShape, lengths: Lengths, passes: int) -> dict[str, Work]:
    """By the same parts, and the optimizer's, as gradscope's trainer does it in micro-batches, in one process.

    Responses have their mean length and differ little from it within a micro-batch: they are sorted by length. There
    the responses to a question share its prompt, and the first mini-batch is scored by its training pass.
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
    scored = (count if config.kl_coef > 0 else 0) + (count - min(count, config.mini_batch_size))
    if config.old_logprobs == "trainer" and not _scores_in_first_pass(config):
        scored += min(count, config.mini_batch_size)
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


def _scores_in_first_pass(config: TrainConfig) -> bool:
    """Whether nobody needs π_old before the first pass."""
    returns = config.algorithm == "reinforce++" and config.kl_coef > 0
    return config.old_logprobs == "trainer" and config.control is None and not returns


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
    sizes = Sizes(
        size * length, alive, shape.hidden, shape.head_dim, shape.heads, length, shape.vocab, size * lengths.mean
    )
    device = torch.device(find_device(config.device))
    return measure_speeds(sizes, device=device, dtype=DTYPES[config.precision])
