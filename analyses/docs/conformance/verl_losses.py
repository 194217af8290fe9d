"""verl's policy losses, in an environment that has verl: prints the rows as JSON.

    PYTHONPATH=. VERL_PYTHON -m analyses.docs.conformance.verl_losses

Each function gets the numbers of the whole batch that verl's `ppo_loss` passes, and the losses of two micro-batches are
added: its FSDP engine, too, calls `loss.backward()` for each. See `losses.py`.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from analyses.docs.conformance.losses import (
    BY_RESPONSE,
    CLIPS,
    MICRO_BATCHES,
    averages,
    documented_weights,
    judge_slopes,
    make_tensors,
)


@dataclass(frozen=True)
class Case:
    """A loss of verl under one setting."""

    mode: str
    """loss_mode"""
    weighting: str | None
    """The documented formula; None: Eq. 2's."""
    settings: dict[str, Any] = field(default_factory=dict)
    average: str = "token-mean"
    """loss_agg_mode"""
    whole: bool = True
    """Whether the losses get the numbers of the whole batch."""
    empty: bool = False
    """Whether a response is masked altogether."""


DOCUMENTED = {
    "token-mean": "mean over the tokens of the global batch",
    "token-sum": "sum over the tokens of the global batch",
    "seq-mean-token-sum": "mean over responses of token sums",
    BY_RESPONSE: "mean over responses of token means",
    "seq-mean-token-sum-norm": "mean over responses of token sums, over the response length",
}
METHODS = {
    "gspo": ("gspo:eps_low=0.05,eps_high=0.1", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    "sapo": ("sapo:tau_pos=2,tau_neg=1.5", {"tau_pos": 2.0, "tau_neg": 1.5}),
    "cispo": ("cispo:eps_low=0.8,eps_high=1.24", {}),
    "geo_mean": ("gmpo:eps_low=0.05,eps_high=0.1", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    "dppo_tv": (
        "dppo-tv:delta=0.05,cap=1.2",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2},
    ),
    "dppo_kl": (
        "dppo-kl:delta=0.01,cap=1.2",
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.2},
    ),
    "dro": ("dro:beta=0.7", {"dro_beta": 0.7}),
}
CASES = (
    *(Case("vanilla", None, average=average) for average in DOCUMENTED),
    *(Case("vanilla", None, average=average, whole=False) for average in ("token-mean", BY_RESPONSE)),
    *(Case("vanilla", None, average=BY_RESPONSE, empty=True, whole=whole) for whole in (True, False)),
    *(Case(mode, *given) for mode, given in METHODS.items() if mode != "geo_mean"),  # which has one average
    *(Case(mode, *METHODS[mode], average=BY_RESPONSE) for mode in ("gspo", "sapo", "geo_mean")),
    Case("geo_mean", *METHODS["geo_mean"], average=BY_RESPONSE, whole=False),
)


def verl_slopes(case: Case, old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return −∂loss/∂ log π [B, T] of verl's function, summed over micro-batches."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    given = CLIPS | case.settings
    own = {name: given.pop(name) for name in list(given) if name.startswith("dro")}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=PolicyLossConfig(**own), **given
    )
    if case.whole:
        numbers = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
        config.global_batch_info.update(numbers)
    leaf = new.clone().requires_grad_(True)
    for part in MICRO_BATCHES if case.whole else (tuple(range(len(mask))),):
        rows = list(part)
        call = {"old_log_prob": old[rows], "log_prob": leaf[rows], "advantages": advantages[rows]}
        call |= {"response_mask": mask[rows], "loss_agg_mode": case.average, "config": config}
        get_policy_loss_fn(case.mode)(**call)[0].backward()
    return -leaf.grad


def make_row(case: Case) -> dict[str, Any]:
    """Return the row of a case."""
    started, tensors = time.perf_counter(), make_tensors(empty=case.empty)
    mask = tensors[-1]
    told = f"loss_mode={case.mode}, loss_agg_mode={case.average}"
    told += ", two micro-batches" if case.whole else ", the batch's numbers not given"
    told += ", a response masked altogether" if case.empty else ""
    row = {"trainer": "verl", "case": told, "documented": DOCUMENTED[case.average]}
    weights = documented_weights(case.weighting, *tensors)
    row |= judge_slopes(verl_slopes(case, *tensors), weights, mask, averages(mask)[case.average])
    return row | {"seconds": f"{time.perf_counter() - started:.1f}"}


def main(show: Callable[[str], None] = print) -> None:
    """Print the rows."""
    warnings.simplefilter("ignore")
    import verl

    show(json.dumps([make_row(case) | {"version": verl.__version__} for case in CASES]))


if __name__ == "__main__":
    main()
