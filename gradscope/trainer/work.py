"""What a training step computes: how long its texts are taken to be, and its FLOPs by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradscope.gradients import BYTES, Dtype, ModelShape
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


@dataclass(frozen=True)
class Piece:
    """What goes through the network at once."""

    responses: int
    length: int
    """Tokens of each, prompt and padding included."""
    kept: int
    """Tokens of each whose logits are needed."""

    @property
    def tokens(self) -> int:
        return self.responses * self.length

    @property
    def logits(self) -> int:
        """Tokens whose logits are needed, over all responses."""
        return self.responses * self.kept


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


def trained_parameters(shape: ModelShape, lora_rank: int | None = None) -> int:
    """All of them, or those of adapters of this rank on all linear layers of the blocks."""
    return shape.parameters if lora_rank is None else lora_rank * shape.sides


def kv_bytes(shape: ModelShape, precision: Dtype) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * BYTES[precision] * shape.layers * shape.kv_width


def forward_flops(shape: ModelShape, piece: Piece) -> Number:
    """Two per weight and token, and attention's two products, of which a causal mask needs half."""
    matrices = 2 * shape.active * piece.tokens + 2 * shape.hidden * shape.vocab * piece.logits
    pairs = piece.responses * piece.length * (piece.length + 1) / 2
    return matrices + 4 * shape.layers * shape.query_width * pairs


def backward_flops(shape: ModelShape, piece: Piece, *, lora_rank: int | None = None) -> Number:
    """Each product has two gradients; those of frozen weights are not computed, those of the adapters are.

    That attention computes its scores once more is not counted.
    """
    forward = forward_flops(shape, piece)
    if lora_rank is None:
        return 2 * forward
    frozen = 2 * shape.active * piece.tokens + 2 * shape.hidden * shape.vocab * piece.logits
    # The adapters' own forward pass is counted here too.
    return 2 * forward - frozen + 6 * trained_parameters(shape, lora_rank) * piece.tokens


def pass_flops(shape: ModelShape, piece: Piece, *, tokens: Number | None = None) -> Number:
    """A pass without gradient through all blocks, scores of all pairs of positions among it, and the head where logits
    are kept.

    tokens: that go through the layers, where responses share their prompts; None: the piece's.
    """
    tokens = piece.tokens if tokens is None else tokens
    matrices = 2 * shape.active * tokens + 2 * shape.hidden * shape.vocab * piece.logits
    return matrices + _attention(shape, piece)


def _attention(shape: ModelShape, piece: Piece) -> Number:
    return 4 * shape.layers * shape.query_width * piece.tokens * piece.length


def prompt_flops(shape: ModelShape, prompts: int, length: int) -> Number:
    """Reading each prompt once, with the logits of its last token."""
    return pass_flops(shape, Piece(prompts, length, 1))


def decoding_flops(shape: ModelShape, whole: Piece) -> Number:
    """Decoding all responses token by token; whole: they with their prompts, kept the response tokens."""
    keys = whole.logits * (whole.length - whole.kept / 2)
    matrices = 2 * (shape.active + shape.hidden * shape.vocab) * whole.logits
    return matrices + 4 * shape.layers * shape.query_width * keys


def training_flops(
    shape: ModelShape, piece: Piece, *, lora_rank: int | None, checkpointing: bool, tokens: Number | None = None
) -> dict[str, Number]:
    """Forward and backward pass of one micro-batch; tokens as in `pass_flops`."""
    forward, attention = pass_flops(shape, piece, tokens=tokens), _attention(shape, piece)
    # Each product has two gradients; `backward_flops` knows which of them adapters save.
    times = backward_flops(shape, piece, lora_rank=lora_rank) / forward_flops(shape, piece)
    backward = times * (forward - attention) + 2.5 * attention  # sdpa computes its scores once more
    return {"training, forward": (2 if checkpointing else 1) * forward, "training, backward": backward}
