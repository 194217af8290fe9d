"""The shape of a network: what of it decides FLOPs and bytes, behind every --plan.

The blocks are taken to be those of Llama and Qwen2: two RMS norms, attention by sdpa (no matrix of scores is kept), a
gated MLP. Other blocks are computed as one of those with as many weights; their activations are 0.7 (OPT) to 1.9
times (Gemma 2) its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradscope.gradients.engine.decoder.parts import SANDWICH
from gradscope.policy import find_blocks, find_context

Number = int | float
Dtype = Literal["float32", "bfloat16"]

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one number that a matrix multiplication reads."""


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
    scores: int
    """Tensors of all scores that a block's backward pass by rules takes: probabilities, and a soft cap's slopes."""
    norms: int
    """Norms of the residual stream's width in a block."""

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
            context=find_context(model),
            embedding=embedding.numel(),
            blocks=blocks,
            head=own_head,
            rest=sum(p.numel() for p in model.parameters()) - known,
            matrices=sum(p.numel() for p in flat + experts),
            active=sum(p.numel() for p in flat) + sum(p[0].numel() * (visited or len(p)) for p in experts),
            sides=sum(sum(p.shape) for p in flat),
            capped=bool(getattr(text, "final_logit_softcapping", None)),
            scores=1 if getattr(text, "attn_logit_softcapping", None) is None else 2,
            norms=4 if hasattr(model.get_submodule(find_blocks(model))[0], SANDWICH[2]) else 2,
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
