"""What a training step computes: how long its texts are taken to be, and its FLOPs by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradscope.gradients import (
    ModelShape,
    Piece,
    decoding_flops,
    kv_bytes,
    pass_flops,
    prompt_flops,
    trained_parameters,
    training_flops,
)
from gradscope.trainer.algorithm import scores_in_first_pass
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


def step_work(config: TrainConfig, shape: ModelShape, lengths: Lengths, passes: int) -> dict[str, Number]:
    """FLOPs by part, as gradscope's trainer does it in micro-batches, in one process.

    "compacting the cache" is in bytes, "optimizer" in parameters.

    Responses have their mean length and differ little from it within a micro-batch: they are sorted by length. There
    the responses to a question share its prompt, and the first mini-batch is scored by its training pass where the
    algorithm lets it be.
    """
    length, count = lengths.prompt + lengths.mean, config.num_responses
    size = min(config.micro_batch_size, config.mini_batch_size)
    tokens = shared_tokens(config, lengths)
    part = training_flops(
        shape,
        Piece(size, length, math.ceil(lengths.mean / passes)),
        lora_rank=config.lora_rank,
        checkpointing=config.gradient_checkpointing,
        tokens=tokens,
    )
    times = passes * (2 if config.control == "matched-norm" else 1) * count / size
    trained_first = min(count, config.mini_batch_size) if scores_in_first_pass(config) else 0
    scored = count - trained_first + (count if config.kl_coef > 0 else 0)  # by the policy, by its reference
    trained = trained_parameters(shape, config.lora_rank)
    return {
        "reading prompts": prompt_flops(shape, config.questions_per_step, lengths.prompt),
        "sampling": decoding_flops(shape, Piece(count, length, lengths.mean)),
        "compacting the cache": _compacted_bytes(config, shape, lengths),
        "scoring": pass_flops(shape, Piece(size, length, lengths.mean), tokens=tokens) * (scored / size),
        **{name: flops * times for name, flops in part.items()},
        "optimizer": trained * optimizer_steps(config, passes),
    }


def _compacted_bytes(config: TrainConfig, shape: ModelShape, lengths: Lengths) -> Number:
    """Read and written where responses end one by one, and those that go on have their keys and values copied."""
    at_once = min(config.sampling_batch_size, config.num_responses)
    endings = min(at_once, lengths.longest) if lengths.mean < lengths.longest else 0
    each = kv_bytes(shape, "float32") * (at_once / 2) * (lengths.prompt + lengths.mean / 2)
    return 2 * endings * math.ceil(config.num_responses / at_once) * each


def shared_tokens(config: TrainConfig, lengths: Lengths) -> Number | None:
    """Tokens of a micro-batch whose responses share their prompts; None: they do not, under recomputation."""
    size = min(config.micro_batch_size, config.mini_batch_size)
    if config.gradient_checkpointing:
        return None
    return size * lengths.mean + max(1, size / config.group_size) * lengths.prompt


def decoded_together(config: TrainConfig, lengths: Lengths) -> int:
    """Responses decoded at a time, in the mean: decoding begins with all rows and ends with one."""
    at_once = min(config.sampling_batch_size, config.num_responses)
    return max(1, round(at_once * lengths.mean / lengths.longest))


def optimizer_steps(config: TrainConfig, passes: int) -> int:
    """Optimizer steps on one batch of responses."""
    return passes * math.ceil(config.num_responses / config.mini_batch_size)
