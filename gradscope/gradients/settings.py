"""Settings of a measurement, their checks, and their defaults for a given policy and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypedDict, get_args

import torch

from gradscope.errors import InputError
from gradscope.gradients.engine.products import Precision
from gradscope.gradients.sample import Design
from gradscope.intervals import EDGES
from gradscope.objective import PAPER, LossSettings, resolve_advantages, settle_loss
from gradscope.policy import Policy
from gradscope.rollouts import LARGEST, TokenBatch

Number = int | float

BUDGET = 50_000
"""Response tokens up to which "auto" measures every one."""
ENOUGH, EACH_PROMPT = 500, 25
"""Tokens per interval for "enough": the least, and the number per prompt. If tokens vary as much as prompts do, 25 per
prompt add 4 % to the variance of a share, 2 % to the width of its interval."""
MINUTES = 10
"""Default time limit for a large policy, in minutes."""
DEFAULT_MINUTES: Literal["default"] = "default"
"""Value of minutes that `settle_minutes` replaces: MINUTES for a large policy, else none."""
CHOSEN_HERE = (None, "auto", "enough")
"""Values of tokens_per_interval other than numbers."""
LARGE = {"cpu": 10**8, "gpu": 3 * 10**9}
"""Parameters above which a policy counts as large, by kind of device."""


@dataclass(frozen=True)
class MeasureSettings:
    """Everything that changes a number in the table."""

    temperature: Number | None = None
    """Sampling temperature; None: each response's own, from the rollouts (1.0 if they have none)."""
    tokens_per_interval: int | Literal["auto", "enough"] | None = None
    """Measure a seeded random sample with this many tokens per probability interval. None: every token; auto: every
    token up to 50,000, else 12,500 per interval; enough: 25 per prompt, between 500 and 12,500. Other tokens keep their
    rows, with NaN in the columns that need a backward pass."""
    minutes: Number | Literal["default"] | None = None
    """Take about this many minutes, including loading and everything after the table, for as many prompts and tokens
    as fit; other prompts have no rows in the table. Excludes a number of tokens per interval. None: no limit; default:
    10 minutes for a large policy."""
    sample: Design = "proportional"
    """How to draw the sample. proportional: probabilities grow with |w|·‖e − π‖ and ‖e − π‖, which are known for every
    token, and each measured token is weighted by 1 / its probability; stratified: equal probabilities within each
    interval."""
    loss: LossSettings = PAPER
    """The objective that defines the weights."""
    advantage_eps: Number = 1e-6
    """Added to the standard deviation of a group's rewards when advantages are computed; TRL adds 1e-4."""
    seed: int = 0
    """Seeds the sample and the self-check's tokens."""
    per_module: bool = False
    """Add a column `param_grad_norm.NAME` for each module that owns parameters."""
    module_groups: bool = False
    """Add such a column for each group of modules with the same role in every block, such as `attention q`."""
    metric: Literal["adamw"] | None = None
    """adamw: add the column `param_grad_norm_adamw`, the exact norm ‖g ⊘ (√v̂ + ε)‖ in AdamW's metric, with v̂ after
    the batch's plain clipped step; NaN without a saved optimizer or advantages."""
    fast: bool = False
    """Round the factors of the backward pass's matrix products, to tf32 for a float32 policy on a GPU and to bfloat16
    otherwise; for common decoders only. The self-check reports the error of the norms."""
    self_check: bool = True
    """First recompute some tokens of every interval with plain autograd, and stop if they differ."""


class MeasureKeywords(TypedDict, total=False):
    """The fields of `MeasureSettings`, as keywords of `measure`; weighting: that of `loss`."""

    weighting: str | None

    temperature: Number | None
    tokens_per_interval: int | Literal["auto", "enough"] | None
    minutes: Number | Literal["default"] | None
    sample: Design
    loss: LossSettings
    advantage_eps: Number
    seed: int
    per_module: bool
    module_groups: bool
    metric: Literal["adamw"] | None
    fast: bool
    self_check: bool


def check_settings(settings: MeasureSettings) -> None:
    """Raise InputError for settings out of range or in conflict."""
    if settings.temperature is not None and not 1 / LARGEST <= settings.temperature <= LARGEST:
        raise InputError(f"temperature is {settings.temperature}; give a positive number (0, greedy, has no gradient)")
    wanted = settings.tokens_per_interval
    if wanted not in CHOSEN_HERE and (isinstance(wanted, str) or wanted < 1):
        raise InputError(
            f"tokens_per_interval is {wanted!r}; give 1 or more, auto, enough, or none to measure every token"
        )
    _check_minutes(settings)
    if not 0 <= settings.advantage_eps < inf:
        raise InputError(f"advantage_eps is {settings.advantage_eps}; give a finite number, 0 or more")
    if settings.seed < 0:
        raise InputError(f"seed is {settings.seed}; give 0 or more")
    settings.loss.check()


def _check_minutes(settings: MeasureSettings) -> None:
    if settings.sample not in get_args(Design):
        raise InputError(f"sample is {settings.sample!r}; known are {' and '.join(get_args(Design))}; give one of them")
    if settings.minutes in (None, DEFAULT_MINUTES):
        return
    if not 0 < settings.minutes < inf:
        raise InputError(f"minutes is {settings.minutes}; give a finite number above 0")
    if settings.tokens_per_interval not in CHOSEN_HERE:
        raise InputError(
            f"minutes is {settings.minutes:g} and tokens_per_interval {settings.tokens_per_interval}, but each sets "
            "how many tokens to measure; give one of the two"
        )


def settle(settings: MeasureSettings, policy: Policy, batch: TokenBatch, *, intervals: int) -> MeasureSettings:
    """Check the settings, and resolve "auto", "enough" and "default" for this policy and batch."""
    check_settings(settings)
    limited = settle_minutes(settings, policy, policy.device.type)
    prompts = len(batch.group_ids.unique())
    return settle_sample(limited, batch.num_tokens, num_prompts=prompts, intervals=intervals)


def settle_sample(
    settings: MeasureSettings, num_tokens: int, *, num_prompts: int = 0, intervals: int = len(EDGES) - 1
) -> MeasureSettings:
    """Resolve tokens_per_interval="auto" or "enough" for a batch of this size; None with `minutes`.

    >>> [settle_sample(MeasureSettings(tokens_per_interval="auto"), n).tokens_per_interval for n in (50_000, 50_001)]
    [None, 12500]
    """
    if settings.tokens_per_interval not in ("auto", "enough"):
        return settings
    each, all_up_to = BUDGET // intervals, BUDGET
    if settings.tokens_per_interval == "enough":
        each = all_up_to = min(each, max(ENOUGH, EACH_PROMPT * num_prompts))
    sampled = settings.minutes is None and num_tokens > all_up_to
    return replace(settings, tokens_per_interval=each if sampled else None)


def settle_minutes(settings: MeasureSettings, policy: Policy, device: str) -> MeasureSettings:
    """Replace the default minutes: by MINUTES for more than LARGE parameters if no number of tokens is given."""
    if settings.minutes != DEFAULT_MINUTES:
        return settings
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    large = parameters > LARGE["cpu" if device == "cpu" else "gpu"]
    limited = large and settings.tokens_per_interval in ("auto", "enough")
    return replace(settings, minutes=MINUTES if limited else None)


def settle_batch(settings: MeasureSettings, batch: TokenBatch) -> TokenBatch:
    """Return the batch with the temperatures and advantages to measure with."""
    if settings.temperature is not None:
        batch = batch.at_temperature(settings.temperature)
    batch = settle_loss(batch, settings.loss)
    if not settings.loss.is_whole and batch.advantages is None and batch.rewards is not None:
        batch = replace(batch, advantages=resolve_advantages(batch, eps=settings.advantage_eps))
    return batch


def fast_precision(dtype: torch.dtype, device: str) -> Precision:
    """Return the fast mode's precision for a policy of this dtype on this type of device."""
    if dtype == torch.float64:
        raise InputError("the fast mode rounds below float32, and the policy is float64; leave fast out")
    return "tf32" if device == "cuda" and dtype == torch.float32 else "bfloat16"


def no_fast_mode(policy: Policy) -> InputError:
    """Return the error for a policy that is measured by autograd, where products are always exact."""
    return InputError(
        f"{type(policy.model).__name__} is not built of blocks that the fast mode supports (RMS norms, "
        "rotary attention, gated MLP); leave fast out, or load the policy with dtype bfloat16"
    )
