"""What lies in one process's memory at each moment of a training step, and what a checkpoint takes on the disk.

Blocks are those of `ModelShape`. Weights, gradients and optimizer are float32; with precision "bfloat16", autocast
multiplies bfloat16 copies of weights and activations, while the residual stream and the norms stay float32.
`analyses/benchmarks/plan_memory.py` holds these bytes against measured peaks.
"""

from __future__ import annotations

import math

from gradscope.gradients import BYTES, Dtype, ModelShape, block_activation_bytes
from gradscope.objective import rows_at_once
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.work import Lengths, Number, Piece, kv_bytes, trained_parameters

GIB = 2**30

CAPPED_LOGITS = 3
"""Arrays of logits in the backward pass of `trained_logprobs` where they are capped: the cap's, themselves and their
gradient, which otherwise takes the place of a product's logits."""

STATISTICS_LOGIT_BYTES = 12
"""Bytes of one logit in `token_statistics`, beside itself: three float32 arrays."""

TRAINED_LOGIT_BYTES = {"float32": 4, "bfloat16": 8}
"""Bytes of one logit in `trained_logprobs`, beside itself: its power, made of a widened copy."""

SAMPLED_LOGIT_BYTES = 24
"""Bytes of one logit while a token is drawn: four float32 arrays, or two and their cumulative sum in float64."""


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
    """Bytes of a copy that only samples."""
    return BYTES[config.precision] * shape.parameters


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> Number:
    """Whole weights and the optimizer's moments, in float32; with adapters, those by themselves too."""
    trained = trained_parameters(shape, config.lora_rank)
    return 4 * (shape.parameters + 2 * trained + (trained if config.lora_rank is not None else 0))


def state_bytes(shape: ModelShape, *, lora_rank: int | None = None, shards: int = 1) -> dict[str, Number]:
    """What lies in a process's memory while it trains, by part; `shards` processes share each tensor (FSDP)."""
    trained = trained_parameters(shape, lora_rank)
    return {
        "weights": 4 * (shape.parameters + (trained if lora_rank else 0)) / shards,
        "gradients": 4 * trained / shards,
        "AdamW's moments": 8 * trained / shards,
    }


def working_weights_bytes(
    shape: ModelShape, precision: Dtype, *, lora_rank: int | None = None, shards: int = 1
) -> dict[str, Number]:
    """Weights as they are multiplied, beside those that are trained: autocast's copies, or what FSDP has gathered.

    Autocast keeps its copies of weights that are trained; see `frozen_copies_bytes` for the others. Adapters never come
    with shards.

    FSDP gathers the embedding, the head and the last norm for the whole pass, and the blocks one by one, the next
    one in advance.
    """
    if shards > 1:
        root, block = shape.embedding + shape.head + shape.rest, shape.blocks / shape.layers
        return {"gathered weights": BYTES[precision] * (root + 2 * block)}
    if precision == "bfloat16":
        multiplied = shape.matrices + shape.hidden * shape.vocab
        return {"bfloat16 copies": 2 * (multiplied if lora_rank is None else trained_parameters(shape, lora_rank))}
    return {}


def frozen_copies_bytes(shape: ModelShape, precision: Dtype, *, blocks: int, head: bool) -> dict[str, Number]:
    """Under adapters: autocast's copies of frozen weights, which stay where a graph holds them: of so many blocks."""
    if precision == "float32":
        return {}
    weights = shape.matrices * blocks / shape.layers + shape.hidden * shape.vocab * head
    return {"bfloat16 copies of frozen weights": 2 * weights}


def loss_bytes(
    shape: ModelShape,
    piece: Piece,
    precision: Dtype,
    *,
    checkpointing: bool,
    chunk: int,
    lora_rank: int | None = None,
) -> dict[str, Number]:
    """What lies there in the loss of a piece and its backward pass, log π being made of `chunk` tokens at a time."""
    inputs = 4 * shape.hidden * piece.tokens
    block = inputs if checkpointing else block_activation_bytes(shape, precision) * piece.tokens
    last_norm = 2 * inputs + BYTES[precision] * shape.hidden * piece.logits
    beside = TRAINED_LOGIT_BYTES[precision] * min(chunk, piece.logits)
    if lora_rank is None:
        # The gradient of the logits makes the head's: of autocast's copy first, then of the weight.
        beside = max(beside, (4 if precision == "float32" else 4 + BYTES[precision]) * shape.hidden)
    logits = BYTES[precision] * piece.logits + beside
    if shape.capped:
        logits = max(logits, CAPPED_LOGITS * BYTES[precision] * piece.logits)
    return {"activations": block * shape.layers + last_norm, "logits": shape.vocab * logits}


def embedding_gradient_bytes(shape: ModelShape, precision: Dtype, *, lora_rank: int | None = None) -> dict[str, Number]:
    """What lies there at the end of a backward pass: the embedding's gradient and, of a tied one, the head's.

    In float32 their sum is a third array; autocast's is added in place.
    """
    arrays = 1 if shape.head else 3 if precision == "float32" else 2
    return {"embedding's gradients": 4 * shape.embedding * (arrays if lora_rank is None else 0)}


def recompute_bytes(shape: ModelShape, piece: Piece, precision: Dtype) -> dict[str, Number]:
    """With gradient checkpointing: what lies there while a block is recomputed and differentiated."""
    inputs = 4 * shape.hidden * piece.tokens
    # Gradients of the residual stream and of two arrays of the MLP are on their way.
    on_the_way = inputs + BYTES[precision] * 2 * shape.mlp_width * piece.tokens
    return {"activations": inputs * shape.layers + block_activation_bytes(shape, precision) * piece.tokens + on_the_way}


def scoring_bytes(
    shape: ModelShape, piece: Piece, precision: Dtype, *, chunk: int, lora_rank: int | None = None
) -> dict[str, Number]:
    """What a pass without gradient needs, statistics being made of `chunk` tokens' logits at a time."""
    wide = 3 if lora_rank is None else 4  # an adapter's product is added to the frozen one
    stream = (4 * 4 * shape.hidden + BYTES[precision] * wide * shape.mlp_width) * piece.tokens
    made = BYTES[precision] * shape.vocab * piece.logits
    logits = made + STATISTICS_LOGIT_BYTES * shape.vocab * min(chunk, piece.logits)
    if lora_rank is not None and precision == "bfloat16":
        # While they are made: the frozen head's copy, the last states, those that are kept, and these rounded.
        states = shape.hidden * (4 * piece.tokens + (4 + BYTES[precision]) * piece.logits)
        logits = max(logits, made + BYTES[precision] * shape.hidden * shape.vocab + states)
    return {"activations": stream} if stream > logits else {"logits": logits}


def sampling_bytes(shape: ModelShape, piece: Piece, precision: Dtype) -> dict[str, Number]:
    """What decoding with transformers needs on a GPU: its cache, and a layer's attention or the last logits."""
    # Keys are float32 under autocast, rotated by float32 angles as they are; values are not.
    cache = (kv_bytes(shape, "float32") + kv_bytes(shape, precision)) / 2
    # Where prompts are padded, sdpa gets keys and values once per query; autocast then copies the keys once more.
    attention = 8 * shape.query_width * piece.tokens
    return {
        "KV cache": cache * piece.tokens,
        "decoding": max(attention, SAMPLED_LOGIT_BYTES * shape.vocab * piece.responses),
    }


def optimizer_bytes(shape: ModelShape, *, lora_rank: int | None = None, shards: int = 1) -> dict[str, Number]:
    """What a step of AdamW needs beside its moments: the denominators of all parameters at once, as on a GPU."""
    return {"AdamW's denominators": 4 * trained_parameters(shape, lora_rank) / shards}
