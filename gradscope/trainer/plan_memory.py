"""What lies in the memory of a training process at each moment of a step, and what a checkpoint takes on disk."""

from __future__ import annotations

import math

from gradscope.cost import (
    BYTES,
    ModelShape,
    Piece,
    embedding_gradient_bytes,
    frozen_copies_bytes,
    loss_bytes,
    optimizer_bytes,
    recompute_bytes,
    sampling_bytes,
    scoring_bytes,
    state_bytes,
    trained_parameters,
    working_weights_bytes,
)
from gradscope.logprobs import rows_at_once
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.plan_work import Lengths

Number = int | float

GIB = 2**30


def step_memory(
    config: TrainConfig, shape: ModelShape, lengths: Lengths, processes: int, sharded: bool, device_memory: Number
) -> dict[str, dict[str, Number]]:
    """What lies in one process's memory at each moment of a step."""
    shards = processes if sharded else 1
    state = state_bytes(shape, lora_rank=config.lora_rank, shards=shards)
    resident = state | _beside(config, shape, processes, shards, device_memory)
    without_gradients = {name: size for name, size in resident.items() if name != "gradients"}
    length, precision = lengths.prompt + lengths.longest, config.precision
    chunk = rows_at_once(shape.vocab, "cpu" if config.device == "cpu" else "cuda")
    piece = Piece(min(config.micro_batch_size, config.mini_batch_size), length, lengths.longest)
    kept = working_weights_bytes(shape, precision, lora_rank=config.lora_rank, shards=shards)
    settings = {"checkpointing": config.gradient_checkpointing, "lora_rank": config.lora_rank}
    checkpointing, frozen, frozen_block = config.gradient_checkpointing, {}, {}
    if config.lora_rank is not None:
        frozen = frozen_copies_bytes(shape, precision, blocks=0 if checkpointing else shape.layers, head=True)
        frozen_block = frozen_copies_bytes(shape, precision, blocks=1, head=False)
    training = [frozen | loss_bytes(shape, piece, precision, chunk=chunk, **settings)]
    training.append(embedding_gradient_bytes(shape, precision, lora_rank=config.lora_rank))
    if checkpointing:
        training.append(frozen_block | recompute_bytes(shape, piece, precision))
    scored = scoring_bytes(shape, piece, precision, chunk=chunk, lora_rank=config.lora_rank)
    moments = {
        "sampling": without_gradients,
        "scoring": without_gradients | kept | scored,
        "training": resident | kept | max(training, key=lambda parts: sum(parts.values())),
        "optimizer step": resident | kept | optimizer_bytes(shape, lora_rank=config.lora_rank, shards=shards),
    }
    if config.engine == "hf":
        responses = math.ceil(config.questions_per_step / processes) * config.group_size
        decoded = Piece(min(config.sampling_batch_size, responses), length, lengths.longest)
        own = kept if shards == 1 else {}
        moments["sampling"] = without_gradients | own | sampling_bytes(shape, decoded, precision)
    if shards > 1:
        # Policy and reference are loaded whole, one after the other, before they are cut.
        moments = {"loading": {"weights": 4 * shape.parameters * (2 if config.engine == "hf" else 1)}} | moments
    return moments


def _beside(
    config: TrainConfig, shape: ModelShape, processes: int, shards: int, device_memory: Number
) -> dict[str, Number]:
    """What lies in memory all the time beside what is trained."""
    parts = {}
    if config.kl_coef > 0 and config.lora_rank is None:
        parts["reference policy"] = 4 * shape.parameters / shards
    if processes > 1 and shards == 1:
        parts["DDP's buckets"] = 4 * trained_parameters(shape, config.lora_rank)
    if config.engine == "vllm":
        parts["vLLM"] = config.vllm_memory * device_memory * GIB
    elif shards > 1:
        parts["sampling copy"] = weights_bytes(config, shape)
    return parts


def weights_bytes(config: TrainConfig, shape: ModelShape) -> Number:
    """Of a copy that only samples."""
    return BYTES[config.precision] * shape.parameters


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> Number:
    """Whole weights and the optimizer's moments, in float32; with adapters, those by themselves too."""
    trained = trained_parameters(shape, config.lora_rank)
    return 4 * (shape.parameters + 2 * trained + (trained if config.lora_rank is not None else 0))
