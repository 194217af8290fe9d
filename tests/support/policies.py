"""Tiny random models of many architectures, with nothing degenerate left at its initial value, for every test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from gradscope.policy import Policy, find_blocks
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.runs import Processes

from .words import (
    BOS as BOS,
    EOS as EOS,
    PAD as PAD,
    UNK as UNK,
    VOCAB as VOCAB,
    make_tokenizer as make_tokenizer,
)

HIDDEN, LAYERS, CONTEXT = 32, 3, 64
LLAMA_LIKE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@dataclass(frozen=True)
class Architecture:
    """How to make one: configuration and model class, what its configuration says, and where its last norm is."""

    config: str
    model: str
    settings: dict[str, object] = field(default_factory=dict)
    last_norm: str = "model.norm"


ARCHITECTURES = {
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", LLAMA_LIKE | {"tie_word_embeddings": False}),
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", {"num_attention_heads": 4}, "transformer.ln_f"),
    "gemma2": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        LLAMA_LIKE
        | WINDOW
        | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 60.0},
    ),
    "gemma3": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA_LIKE | WINDOW | {"query_pre_attn_scalar": 8}),
    "mixtral": Architecture(
        "MixtralConfig", "MixtralForCausalLM", LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
    "gpt_neox": Architecture(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"num_attention_heads": 4, "intermediate_size": 48, "use_parallel_residual": True},
        "gpt_neox.final_layer_norm",
    ),
    "phi": Architecture(
        "PhiConfig", "PhiForCausalLM", {"num_attention_heads": 4, "intermediate_size": 48}, "model.final_layernorm"
    ),
    "opt": Architecture(
        "OPTConfig",
        "OPTForCausalLM",
        {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
        "model.decoder.final_layer_norm",
    ),
}
"""Every causal language model here, by the name that make_policy takes; "bert" is apart: it is refused."""

CAUSAL = tuple(ARCHITECTURES)


def _decoder(family: str, **settings: object) -> Architecture:
    return Architecture(f"{family}Config", f"{family}ForCausalLM", LLAMA_LIKE | settings)


def _rope(kind: str, **settings: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, "factor": 4.0} | settings}


RULED = {
    "llama_biases_tied": _decoder("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_one_key_head": _decoder("Llama", num_key_value_heads=1),
    "llama_wide_heads": _decoder("Llama", num_key_value_heads=4, head_dim=16),
    "llama_yarn": _decoder("Llama", **_rope("yarn", original_max_position_embeddings=16)),
    "mistral_window": _decoder("Mistral", sliding_window=4),
    "mistral_longer_window": _decoder("Mistral", sliding_window=20),
    "qwen2_windows": _decoder("Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3_windows": _decoder("Qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "gemma": _decoder("Gemma"),
    "granite_scores": _decoder("Granite", attention_multiplier=0.3),
    "seed_oss": _decoder("SeedOss", attention_bias=True, attention_out_bias=True),
    "smollm3": _decoder("SmolLM3"),
}
"""More decoders that are measured by backward rules, like qwen2, qwen3 and llama."""

UNRULED = {
    "granite_embedding": _decoder("Granite", embedding_multiplier=0.02),
    "granite_residual": _decoder("Granite", residual_multiplier=0.5),
    "smollm3_without_angles": _decoder("SmolLM3", no_rope_layer_interval=2),
    "hunyuan": _decoder("HunYuanDenseV1"),
    "olmo2": _decoder("Olmo2"),
    "phi3": _decoder("Phi3"),
    "glm4": _decoder("Glm4"),
    "helium": _decoder("Helium"),
    "ernie4_5": _decoder("Ernie4_5"),
    "exaone4": _decoder("Exaone4", sliding_window=20),
    "cohere": _decoder("Cohere"),
}
"""Near relatives that must go along their graph."""


def make_model(
    name: str, *, dtype: torch.dtype = torch.float32, sharpness: float = 3.0, seed: int = 0, attention: str = "eager"
) -> transformers.PreTrainedModel:
    """A tiny model of that architecture in eval mode; the same numbers in every dtype, up to rounding.

    sharpness: standard deviation of the logits over the vocabulary, on random text. At 3 the likeliest token has a
    probability of .4 to .7; at 14 of about .9, and 0.4 to 18 % of the tokens that make_batch samples have 1-π < 1e-7.
    """
    config = make_config(name, attention=attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _entry(name).model)(config)
    fill_parameters(model, seed)
    model.eval().double()
    set_sharpness(model, model.get_submodule(_entry(name).last_norm), sharpness)
    return model.to(dtype)


def make_config(name: str, *, attention: str = "eager") -> transformers.PretrainedConfig:
    """The configuration, every id inside the vocabulary and every context CONTEXT long."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | _entry(name).settings
    config = getattr(transformers, _entry(name).config)(**settings)
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    return config


def fill_parameters(model: nn.Module, seed: int) -> None:
    """Give every parameter a value of its own: norms off 1, biases off 0, attention off uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter += (0.25 * noise).to(parameter.dtype)
            else:
                embeds = any(word in name for word in ("embed", "wte", "wpe"))
                # Gemma multiplies embeddings by √hidden: at 1 they would drown what the blocks add.
                scale = 1.0 if embeds and "Gemma" not in type(model).__name__ else 1.3 / HIDDEN**0.5
                parameter.copy_(scale * noise)


def set_sharpness(model: nn.Module, last_norm: nn.Module, sharpness: float) -> None:
    """Scale the last norm (it works for a tied head too) until the logits' standard deviation is `sharpness`."""
    ids = torch.randint(4, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    # Gemma's norms multiply by (1 + w): scale what they multiply by, not w.
    offset = 1.0 if "Gemma" in type(last_norm).__name__ else 0.0
    with torch.no_grad():
        for _ in range(8):  # soft caps and a head's bias make it inexact the first time
            factor = sharpness / model(input_ids=ids).logits.std(-1).mean()
            last_norm.weight.copy_((last_norm.weight + offset) * factor - offset)
            if getattr(last_norm, "bias", None) is not None:
                last_norm.bias.mul_(factor)


def make_policy(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    sharpness: float = 3.0,
    seed: int = 0,
    attention: str = "eager",
    tokenizer: bool = False,
) -> Policy:
    """A tiny policy; with tokenizer=True it reads and writes the words of make_tokenizer."""
    model = make_model(name, dtype=dtype, sharpness=sharpness, seed=seed, attention=attention)
    return Policy(model, make_tokenizer() if tokenizer else None, find_blocks(model))


def save_checkpoint(
    folder: str | Path, name: str, *, sharpness: float = 3.0, seed: int = 0, tokenizer: bool = True, chat: bool = False
) -> Path:
    """Save a tiny checkpoint as save_pretrained does; "bert" is an encoder, which nothing here can use."""
    folder = Path(folder)
    if name == "bert":
        bert = {"num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCAB}
        config = transformers.BertConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, **bert)
        transformers.BertForMaskedLM(config).save_pretrained(folder)
    else:
        make_model(name, sharpness=sharpness, seed=seed).save_pretrained(folder)
    if tokenizer:
        make_tokenizer(chat=chat).save_pretrained(folder)
    return folder


def make_responses(
    policy: Policy,
    *,
    lengths: tuple[int, ...] = (7, 1, 11, 4, 9, 6),
    prompt_lengths: tuple[int, ...] = (5, 5, 3, 3, 8, 8),
    holes: bool = True,
    temperature: float = 1.0,
    surprise: float = 0.3,
    seed: int = 0,
) -> list[Response]:
    """Responses two by two on one prompt, with rewards and old log-probabilities near the policy's own.

    lengths: of the responses; the default holds a single-token one. surprise: share of the tokens that are drawn
    uniformly and not from the policy, so that π has every size. holes: drop some tokens from response_mask.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = [row // 2 for row in range(len(lengths))]
    prompts = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in prompt_lengths[::2]]
    ids = _sample_naively(policy, [prompts[g] for g in groups], lengths, temperature, surprise, generator)
    responses = []
    for row, (group, response) in enumerate(zip(groups, ids, strict=True)):
        mask = [not (holes and len(response) > 3 and s % 4 == 2) for s in range(len(response))]
        logprobs = torch.log_softmax(
            _logits(policy, [prompts[group] + response])[0, len(prompts[group]) - 1 : -1] / temperature, -1
        )
        own = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
        drift = 0.1 * torch.randn(own.shape, generator=generator, dtype=torch.float64)
        responses.append(
            Response(
                prompt_ids=prompts[group],
                response_ids=response,
                group=group,
                temperature=temperature,
                reward=float(row % 3) - 0.5,
                old_logprobs=(own + drift).clamp(max=0.0).tolist(),
                ref_logprobs=(own - 2 * drift).clamp(max=0.0).tolist(),
                response_mask=mask,
            )
        )
    return responses


def make_batch(policy: Policy, *, side: str = "right", **settings: object) -> TokenBatch:
    """make_responses, padded on that side; settings are those of make_responses."""
    return collate(make_responses(policy, **settings), pad_id=PAD, side=side)


def pad_both_sides(batch: TokenBatch, left: int, right: int) -> TokenBatch:
    """The same batch with that many more columns of padding before and after."""
    from dataclasses import replace

    def widen(value: Tensor) -> Tensor:
        return nn.functional.pad(value, (left, right), value=0)

    wide = {name: widen(value) for name, value in batch.tensors().items() if value.dim() == 2}
    return replace(batch, **wide, response_start=batch.response_start + left)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _entry(name: str) -> Architecture:
    return (ARCHITECTURES | RULED | UNRULED)[name]


@torch.no_grad()
def _logits(policy: Policy, rows: list[list[int]]) -> Tensor:
    """[B, S, N] in float64; attention is causal, so right padding (not PAD: transformers would warn) needs no mask."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [EOS] * (width - len(row)) for row in rows], device=policy.device)
    return policy.model(input_ids=ids, use_cache=False).logits.double().cpu()


def _sample_naively(policy, prompts, lengths, temperature, surprise, generator) -> list[list[int]]:
    """One forward pass of everything per step; a token is uniform with probability `surprise`, else the policy's."""
    rows = [list(p) for p in prompts]
    for _ in range(max(lengths)):
        last = torch.tensor([len(r) - 1 for r in rows])
        logits = _logits(policy, rows)[torch.arange(len(rows)), last] / temperature
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        uniform = torch.randint(4, VOCAB, sampled.shape, generator=generator)
        take = torch.rand(sampled.shape, generator=generator) < surprise
        for row, token in zip(rows, torch.where(take, uniform, sampled).tolist(), strict=True):
            row.append(token)
    return [r[len(p) : len(p) + n] for r, p, n in zip(rows, prompts, lengths, strict=True)]


@dataclass(frozen=True)
class Share(Processes):
    """One of several processes, whose sums are taken by the test."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters."""
    assert a.keys() == b.keys()
    difference = sum((a[name] - b[name]).double().square().sum() for name in a)
    return float((difference / sum(b[name].double().square().sum() for name in b)).sqrt())
