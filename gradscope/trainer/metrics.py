"""What is logged of a step: one flat record, a line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals
from gradscope.objective import StepResult, TokenStatistics, kl_k3
from gradscope.rollouts import TokenBatch
from gradscope.runs import plain_json
from gradscope.trainer.rollout import Rollout


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Metrics of the responses: means over responses, format_rate NaN for a task without a format."""
    rewards = rollout.batch.rewards
    formats = [row["format_ok"] for row in rollout.rows if row["format_ok"] is not None]
    lengths = [len(row["response_ids"]) for row in rollout.rows]
    # A group whose rewards are all equal has no advantage: it teaches GRPO nothing.
    spread = [rewards[rollout.batch.group_ids == g].unique().numel() for g in rollout.batch.group_ids.unique()]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_sd": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "accuracy": _mean([row["correct"] for row in rollout.rows]),
        "format_rate": _mean(formats),
        "response_length": _mean(lengths),
        "truncated": _mean([not row["finished"] for row in rollout.rows]),
        "equal_reward_groups": _mean([count == 1 for count in spread]),
        "num_tokens": sum(lengths),
    }


def token_metrics(batch: TokenBatch, statistics: TokenStatistics, sampler_logprobs: torch.Tensor) -> dict[str, float]:
    """Metrics of the response tokens before the update, means over tokens: entropy and KL in nats, shares by interval
    of π_old.

    mismatch is |log π of the sampler − log π of the trainer|.
    """
    keep = batch.response_mask
    prob = batch.old_logprobs[keep].double().exp().clamp(max=1.0).numpy()
    intervals = torch.from_numpy(assign_intervals(prob))
    shares = torch.bincount(intervals, minlength=len(EDGES) - 1) / len(intervals)
    drift = (sampler_logprobs - statistics.logprob)[keep].abs()
    kl = math.nan
    if batch.ref_logprobs is not None:
        kl = float(kl_k3(statistics.logprob[keep], batch.ref_logprobs[keep]).mean())
    return {
        "entropy": float(statistics.entropy[keep].mean()),
        "kl": kl,
        **{f"token_share_{i}": float(share) for i, share in enumerate(shares)},
        "mismatch_mean": float(drift.mean()),
        "mismatch_max": float(drift.max()),
    }


def update_metrics(results: Sequence[StepResult]) -> dict[str, Any]:
    """Metrics of the optimizer steps: lists have an entry per pass; clip fractions are of all tokens of all passes."""
    tokens = max(1, sum(result.num_tokens for result in results))
    return {
        "passes": [result.name for result in results],
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "grad_norm_clipped": [result.grad_norm_clipped for result in results],
        "clip_fraction_low": sum(result.clipped_low for result in results) / tokens,
        "clip_fraction_high": sum(result.clipped_high for result in results) / tokens,
        "clip_fraction_dual": sum(result.clipped_dual for result in results) / tokens,
        "optimizer_steps": sum(result.outcome == "taken" for result in results),
        "empty_passes": sum(result.outcome == "empty" for result in results),
        "nonfinite_steps": sum(result.outcome == "nonfinite" for result in results),
    }


def write_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record; NaN and infinity become null, which every JSON reader takes."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain_json(record), allow_nan=False) + "\n")


def lines_up_to(path: Path, step: int) -> str:
    """The records of steps 1 to `step`, without those of later steps and whatever follows a line that is no record.

    Raises InputError where a record is missing then.
    """
    kept, missing = [], set(range(1, step + 1))
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            text = line.decode("utf-8")
            if (number := json.loads(text)["step"]) <= step:
                kept.append(text + "\n")
                missing.discard(number)
        except (ValueError, TypeError, LookupError):
            break
    if missing:
        raise InputError(
            f"{path} has no sound record of step {min(missing)}, and there is a checkpoint of step {step}; mend the "
            f'file (a line {{"step": {min(missing)}}} will do), or delete the checkpoints after step {min(missing) - 1}'
        )
    return "".join(kept)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker draws: numbers as they are, lists by their mean."""
    out = {}
    for name, value in record.items():
        values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]
        if values and all(map(math.isfinite, values)):
            out[name] = sum(values) / len(values)
    return out


def _mean(values: Sequence[bool | int | float]) -> float:
    return float(sum(values) / len(values)) if values else math.nan
