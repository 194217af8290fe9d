"""FLOPs and bytes of training a policy, from the shape of its network: the arithmetic behind every --plan.

The blocks are taken to be those of Llama and Qwen2: two RMS norms, attention by sdpa (no matrix of scores is kept), a
gated MLP. Other blocks are computed as one of those with as many weights; their activations are 0.7 (OPT) to 1.9
times (Gemma 2) its own. Weights, gradients and optimizer are float32; with precision "bfloat16", autocast
multiplies bfloat16 copies of weights and activations, while the residual stream and the norms stay float32.
`analyses/benchmarks/plan_memory.py` holds the bytes against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradscope.policy import find_blocks

Number = int | float
Dtype = Literal["float32", "bfloat16"]

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one number that a matrix multiplication reads."""

CAPPED_LOGITS = 3
"""Arrays of logits in the backward pass of `trained_logprobs` where they are capped: the cap's, themselves and their
gradient, which otherwise takes the place of a product's logits."""

STATISTICS_LOGIT_BYTES = 12
"""Bytes of one logit in `token_statistics`, beside itself: three float32 arrays."""

TRAINED_LOGIT_BYTES = {"float32": 4, "bfloat16": 8}
"""Bytes of one logit in `trained_logprobs`, beside itself: its power, made of a widened copy."""

SAMPLED_LOGIT_BYTES = 24
"""Bytes of one logit while a token is drawn: four float32 arrays, or two and their cumulative sum in float64."""


@dataclass(frozen=True)
class ModelShape:
    """What of a network decides its costs."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    vocab: int
    context: int | None
    """Longest sequence; None: no limit is known."""
    embedding: int
    """Parameters of the input embedding, which are the head's too where `head` is 0."""
    blocks: int
    """Parameters of all blocks."""
    head: int
    """Parameters of the output head; 0: it is tied to the embedding."""
    rest: int
    """All other parameters: the last norm, learnt positions."""
    matrices: int
    """Parameters of the matrices in the blocks."""
    active: int
    """Those that one token is multiplied by: all, unless the blocks have experts."""
    sides: int
    """Rows plus columns of the blocks' linear layers, summed: the parameters of adapters of rank 1."""
    capped: bool
    """Whether logits are the head's product through a soft cap."""

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """The shape of AutoModelForCausalLM.from_config(config), counted without memory for a single weight."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = model.config.get_text_config()
        inside = list(model.get_submodule(find_blocks(model)).parameters())
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        own_head = 0 if head.weight is embedding else sum(p.numel() for p in head.parameters())
        blocks = sum(p.numel() for p in inside)
        known = blocks + embedding.numel() + own_head
        flat = [p for p in inside if p.dim() == 2]
        experts = [p for p in inside if p.dim() == 3]  # [experts, rows, columns]
        visited = getattr(text, "num_experts_per_tok", None)
        return cls(
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab=text.vocab_size,
            context=getattr(text, "max_position_embeddings", None),
            embedding=embedding.numel(),
            blocks=blocks,
            head=own_head,
            rest=sum(p.numel() for p in model.parameters()) - known,
            matrices=sum(p.numel() for p in flat + experts),
            active=sum(p.numel() for p in flat) + sum(p[0].numel() * (visited or len(p)) for p in experts),
            sides=sum(sum(p.shape) for p in flat),
            capped=bool(getattr(text, "final_logit_softcapping", None)),
        )

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks + self.head + self.rest

    @property
    def query_width(self) -> int:
        """Numbers of one token's queries, over all heads of a layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of one token's keys in a layer; the values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> float:
        """Width of a gated MLP that has all weights which are not attention's."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return (self.active / self.layers - attention) / (3 * self.hidden)


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


def trained_parameters(shape: ModelShape, lora_rank: int | None = None) -> int:
    """All of them, or those of adapters of this rank on all linear layers of the blocks."""
    return shape.parameters if lora_rank is None else lora_rank * shape.sides


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


def block_activation_bytes(shape: ModelShape, precision: Dtype) -> Number:
    """What one block keeps of one token for the backward pass."""
    # Each norm keeps its input and the normalised input, in float32.
    norms = 2 * 2 * 4 * shape.hidden
    # In float32 the linear layers behind a norm share one input; autocast gives each of the five a copy of its own.
    inputs = (5 * 2 if precision == "bfloat16" else 2 * 4) * shape.hidden
    # Queries, attention's output; keys, values; in float32 the logarithm of each head's normaliser.
    attention = BYTES[precision] * 2 * (shape.query_width + shape.kv_width) + 4 * shape.heads
    # Gate before and after its activation function, up, their product.
    mlp = BYTES[precision] * 4 * shape.mlp_width
    return norms + inputs + attention + mlp


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


def kv_bytes(shape: ModelShape, precision: Dtype) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * BYTES[precision] * shape.layers * shape.kv_width


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
