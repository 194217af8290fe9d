"""SkyRL's policy losses, in an environment that has skyrl: prints the rows as JSON.

    PYTHONPATH=. PYTHON -m analyses.docs.conformance.skyrl_losses

Advantages are scaled by `apply_loss_reduction_to_advantages_minibatch`, and the losses of two micro-batches are added,
as its FSDP worker does. See `losses.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torch import Tensor

from analyses.docs.conformance.losses import (
    BY_RESPONSE,
    CLIPS,
    MICRO_BATCHES,
    averages,
    documented_weights,
    import_alone,
    judge_slopes,
    make_tensors,
)

DOCUMENTED = {
    "token_mean": ("token-mean", "mean over all valid tokens in the batch"),
    "token_mean_legacy": ("micro-batches", "the previous token_mean: mean over micro-batches of token means"),
    "sequence_mean": (BY_RESPONSE, "mean over responses of token means"),
    "seq_mean_token_sum_norm": ("seq-mean-token-sum-norm", "mean over responses of token sums, over max_seq_len"),
    "prompt_mean": ("micro-batches", "mean over prompts of token means"),
}
"""loss_reduction → our average, which for prompts is that of MICRO_BATCHES, and the documentation's."""
LONGEST, DUAL = 6, 1.2


@dataclass(frozen=True)
class Case:
    """A loss under one setting."""

    kind: str = "regular"
    """policy_loss_type"""
    reduction: str = "token_mean"
    """loss_reduction"""
    weighting: str | None = None
    """The documented formula; None: Eq. 2's."""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"policy_loss_type={self.kind}, loss_reduction={self.reduction}, two micro-batches"


CASES = (
    *(Case(reduction=reduction) for reduction in DOCUMENTED),
    Case("dual_clip"),
    Case("gspo", "sequence_mean", "gspo:eps_low=0.2,eps_high=0.24"),
    Case("gspo", "token_mean", "gspo:eps_low=0.2,eps_high=0.24"),
    Case("sapo", "sequence_mean", "sapo:tau_pos=2,tau_neg=1.5", {"sapo": {"tau_pos": 2.0, "tau_neg": 1.5}}),
    Case("cispo", "token_mean", "cispo:eps_low=0.8,eps_high=1.24", {
        "cispo": {"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.24},
    }),
    Case("dppo", "token_mean", "dppo-tv:delta=0.05,cap=1e9", {
        "dppo": {"dppo_type": "binary_tv", "delta_low": 0.05, "delta_high": 0.05},
    }),
    Case("dppo", "sequence_mean", "dppo-kl:delta=0.01,cap=1e9", {
        "dppo": {"dppo_type": "binary_kl", "delta_low": 0.01, "delta_high": 0.01},
    }),
)  # fmt: skip


def slopes(case: Case, old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return −∂loss/∂ log π [B, T], summed over micro-batches."""
    functions = import_alone("skyrl.backends.skyrl_train.utils.ppo_utils")
    config = functions.AlgorithmConfig(policy_loss_type=case.kind, loss_reduction=case.reduction)
    config.eps_clip_low, config.eps_clip_high = CLIPS["clip_ratio_low"], CLIPS["clip_ratio_high"]
    config.clip_ratio_c = DUAL
    for group, values in case.settings.items():
        for name, value in values.items():
            setattr(getattr(config, group), name, value)
    leaf, kept = new.clone().requires_grad_(True), mask.double()
    prompts = [(part[0], part[-1] + 1) for part in MICRO_BATCHES]
    size = len(MICRO_BATCHES[0])
    scaled = functions.apply_loss_reduction_to_advantages_minibatch(
        advantages, kept, case.reduction, size, LONGEST, prompts
    )
    loss = functions.PolicyLossRegistry.get(case.kind)
    for rows in map(list, MICRO_BATCHES):
        loss(leaf[rows], old[rows], scaled[rows], config, kept[rows])[0].backward()
    return -leaf.grad


def make_row(case: Case) -> dict[str, Any]:
    """Return the row of a case."""
    started, tensors = time.perf_counter(), make_tensors()
    clips = CLIPS | {"clip_ratio_c": DUAL if case.kind == "dual_clip" else None}
    weights, mask = documented_weights(case.weighting, *tensors, clips=clips), tensors[-1]
    average, documented = DOCUMENTED[case.reduction]
    row = {"trainer": "SkyRL", "version": version("skyrl"), "case": str(case), "documented": documented}
    row |= judge_slopes(slopes(case, *tensors), weights, mask, averages(mask)[average])
    return row | {"seconds": f"{time.perf_counter() - started:.1f}"}


if __name__ == "__main__":
    print(json.dumps([make_row(case) for case in CASES]))
