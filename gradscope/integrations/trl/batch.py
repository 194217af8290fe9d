"""Convert TRL's batch to a TokenBatch, and its loss to Eq. 1 with TRL's denominators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gradscope.errors import InputError
from gradscope.objective import LossSettings
from gradscope.rollouts import TokenBatch

Number = int | float
Inputs = Mapping[str, Any]
"""Result of GRPOTrainer's `_prepare_inputs`: prompt_ids [B, P], completion_ids [B, C], their masks, advantages, …"""

LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo")
"""TRL's loss types with the terms of Eq. 1; they differ in the divisors of each response's terms."""


@dataclass(frozen=True)
class TRLSettings:
    """Settings translated from a GRPOConfig."""

    loss: LossSettings
    advantage_eps: float
    """Constant that TRL adds to the standard deviation of a group's rewards."""
    temperature: float


def trl_settings(config: Any) -> TRLSettings:
    """Translate a GRPOConfig: clips, KL and the computation of advantages. Denominators: `response_denominators`.

    TRL's `delta` caps the ratio for either sign of Â. If it is at least 1 + epsilon_high, it is the dual clip; if it is
    lower, it is the upper clip for Â > 0, and the dual clip is at 1 + epsilon_high. Advantages that gradscope computes
    from rewards equal TRL's only for scale_rewards="group"; advantages provided by TRL are used as they are.

    Raises InputError for losses outside Eq. 1: loss types other than LOSS_TYPES, ratios of whole sequences, entropy
    bonus, high-entropy and off-policy masks, an auxiliary loss.
    """
    if reason := no_counterpart(config):
        raise InputError(f"{reason}: gradscope's weights (Eq. 2) are not those of that loss; switch it off to measure")
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    dual = config.delta
    if dual is not None:
        if not dual > 1:
            raise InputError(f"delta is {dual}, which clips every ratio around 1; give a number above 1, or None")
        high, dual = min(high, dual - 1), max(dual, 1 + high)
    loss = LossSettings(config.epsilon, high, dual, config.beta, None, bool(config.use_bias_correction_kl))
    loss.check()
    return TRLSettings(loss, 1e-4, float(config.temperature))


def no_counterpart(config: Any) -> str | None:
    """Return the first setting that takes TRL's loss outside Eq. 1; None if there is none."""
    if config.loss_type not in LOSS_TYPES:
        return f"loss_type is {config.loss_type!r}, not one of {', '.join(LOSS_TYPES)}"
    if config.importance_sampling_level != "token":
        return f"importance_sampling_level is {config.importance_sampling_level!r}"
    if config.entropy_coef != 0 or config.use_adaptive_entropy:
        return "the loss has an entropy bonus"
    if config.top_entropy_quantile < 1:
        return f"top_entropy_quantile is {config.top_entropy_quantile}"
    if config.off_policy_mask_threshold is not None:
        return f"off_policy_mask_threshold is {config.off_policy_mask_threshold}"
    if config.router_aux_loss_coef:
        return f"router_aux_loss_coef is {config.router_aux_loss_coef}"
    return None


def response_denominators(
    config: Any, micro_batches: Sequence[Inputs], *, num_processes: int = 1
) -> Float[Tensor, " B"]:
    """Return TRL's divisor D_i of each response's terms in one optimizer step over these micro-batches.

    The gradient of TRL's loss is −Σ_i 1/D_i Σ_t w_t · ∇ log π_t with w_t of Eq. 2; thus −num_tokens · ∂loss/∂logprob_t
    is w_t · num_tokens / D_i. dapo: tokens of the generation batch per optimizer step; bnpo: tokens of the response's
    micro-batch times the number of micro-batches; grpo: the response's tokens times the step's responses; dr_grpo:
    max_completion_length times the step's responses; luspo: the step's responses. With several processes, D_i is for
    this process's gradient, before averaging. Raises InputError for another loss type.
    """
    parts, steps = [], len(micro_batches)
    for inputs in micro_batches:
        lengths = kept_tokens(inputs).sum(1).clamp(min=1).cpu().float()
        if config.loss_type == "dapo":
            items = inputs["num_items_in_batch"].clamp(min=1).cpu() / num_processes
            denominator = items * steps / config.steps_per_generation
        elif config.loss_type == "bnpo":
            denominator = kept_tokens(inputs).sum().clamp(min=1).cpu() * steps
        elif config.loss_type == "grpo":
            denominator = lengths * len(lengths) * steps
        elif config.loss_type == "dr_grpo":
            denominator = torch.tensor(len(lengths) * steps * config.max_completion_length)
        elif config.loss_type == "luspo":
            denominator = torch.tensor(len(lengths) * steps)
        else:
            raise InputError(f"loss_type is {config.loss_type!r}; known are {', '.join(LOSS_TYPES)}; use one of them")
        parts.append(denominator.float().expand(len(lengths)))
    return torch.cat(parts)


def batch_from_trl(inputs: Inputs | Sequence[Inputs], temperature: Number) -> TokenBatch:
    """Convert TRL's micro-batch, or several concatenated, to a TokenBatch on the CPU.

    inputs: result of GRPOTrainer's `_prepare_inputs` (or `_generate_and_score_completions`): prompts padded on the
    left, completions on the right. temperature: the GRPOConfig's. Responses to equal prompts form one group, even if
    they come from two rows of the dataset. Log-probabilities and advantages that TRL does not keep are unknown; a batch
    without `old_per_token_logps` was on-policy. `tool_mask` excludes tool tokens, as in TRL's loss. Advantages are
    multiplied by `importance_sampling_ratio`, the correction for vLLM, if present, as in TRL's loss.

    Raises InputError if these tensors are missing, and for images, which a TokenBatch cannot hold.
    """
    parts = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for part in parts:
        _check(part)
    input_ids = join_columns(parts, [part["completion_ids"] for part in parts], 0, "prompt_ids")
    real = join_columns(parts, [part["completion_mask"] for part in parts], 0, "prompt_mask").bool()
    start = max(part["prompt_ids"].shape[1] for part in parts)

    def known(name: str) -> Tensor | None:
        return join_columns(parts, [part[name].float() for part in parts]) if name in parts[0] else None

    return TokenBatch(
        input_ids=input_ids,
        attention_mask=real,
        response_mask=join_columns(parts, [kept_tokens(part) for part in parts], 0).bool(),
        response_start=torch.full((len(input_ids),), start),
        group_ids=number_prompts(parts),
        temperature=torch.full((len(input_ids),), float(temperature)),
        advantages=join_columns(parts, [_per_token_advantages(part) for part in parts]),
        old_logprobs=known("old_per_token_logps"),
        ref_logprobs=known("ref_per_token_logps"),
    )


def join_columns(
    parts: Sequence[Inputs], responses: Sequence[Tensor], fill: Number = math.nan, prompt: str | None = None
) -> Shaped[Tensor, "B S"]:
    """Return values over completions, [B, C] of each micro-batch, at their places in `batch_from_trl`, on the CPU.

    fill: for padding and, without `prompt`, for prompts. prompt: the inputs' tensor over prompts to put before them.
    """
    # Micro-batches of several generations are padded to different widths.
    before, after = (max(part[f"{side}_ids"].shape[1] for part in parts) for side in ("prompt", "completion"))
    pieces = []
    for part, right in zip(parts, responses, strict=True):
        shape = part["prompt_ids"].shape
        left = right.new_full(shape, fill) if prompt is None else part[prompt].to(right.dtype)
        pads = (before - shape[1], after - right.shape[1])
        pieces.append(F.pad(torch.cat([left, right], 1), pads, value=fill).detach().cpu())
    return torch.cat(pieces)


def kept_tokens(inputs: Inputs) -> Int[Tensor, "B C"]:
    """Return 1 on completion tokens that are in TRL's loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _per_token_advantages(inputs: Inputs) -> Float[Tensor, "B C"]:
    advantages = inputs["advantages"].float()
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if "importance_sampling_ratio" in inputs:  # [B, C], or [B, 1] of whole sequences
        advantages = advantages * inputs["importance_sampling_ratio"]
    return advantages.expand(inputs["completion_ids"].shape)


def number_prompts(parts: Sequence[Inputs]) -> Int[Tensor, " B"]:
    """Number equal prompts alike over micro-batches, from 0 in order of appearance; where there are, `groups`."""
    if "groups" in parts[0]:
        named = [(number, group) for number, part in enumerate(parts) for group in part["groups"].tolist()]
        known = {name: place for place, name in enumerate(dict.fromkeys(named))}
        return torch.tensor([known[name] for name in named])
    numbers: dict[tuple[int, ...], int] = {}
    arrays = ((part["prompt_ids"].cpu().numpy(), part["prompt_mask"].cpu().numpy() > 0) for part in parts)
    rows = (tuple(ids[seen].tolist()) for each in arrays for ids, seen in zip(*each, strict=True))
    return torch.tensor([numbers.setdefault(row, len(numbers)) for row in rows])


def _check(inputs: Inputs) -> None:
    wanted = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    if missing := [name for name in wanted if name not in inputs]:
        raise InputError(
            f"the inputs have no {', '.join(missing)}, only {', '.join(inputs)}; give the result of "
            "GRPOTrainer._prepare_inputs"
        )
    if "pixel_values" in inputs or inputs.get("num_images") is not None:
        raise InputError("the inputs contain images, but a TokenBatch holds only tokens; measure a text-only policy")
