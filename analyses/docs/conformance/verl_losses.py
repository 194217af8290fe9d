"""verl's policy losses, in an environment that has verl: prints the rows as JSON.

    PYTHONPATH=. VERL_PYTHON -m analyses.docs.conformance.verl_losses

Each function of verl gets random log-probabilities in float64, in two micro-batches whose losses are added, with the
numbers of the whole batch that verl's `ppo_loss` passes: its FSDP engine, too, calls `loss.backward()` for each. The
slopes at the tokens are compared with the weights of the documented formula (Eq. 2's, or a weighting's).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradscope.objective import make_weighting, token_weights

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24, "clip_ratio_c": 3.0}
LENGTHS = (6, 3, 5, 1)
MICRO_BATCHES = ((0, 1), (2, 3))
EXACT = 1e-6
"""Largest relative distance of two float64 programs, some with an epsilon of 1e-8 in a denominator."""


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


BY_RESPONSE = "seq-mean-token-mean"
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


def make_tensors(*, empty: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log π_old, log π, Â and the mask [B, T], with a hole in one response."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False
    mask[3] &= not empty
    old = torch.rand(mask.shape, generator=draw, dtype=torch.float64).clamp(min=0.02).log()
    new = old + 0.3 * torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), 1, generator=draw, dtype=torch.float64).expand(mask.shape)
    return old, new, advantages, mask


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


def documented_weights(case: Case, old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return w_t [B, T] of the documented formula."""
    plain = token_weights(new, old, advantages, mask, **CLIPS, num_tokens=1)
    if case.weighting is None:
        return plain
    columns = {"logprob": new, "old_logprob": old, "advantage": advantages, "policy_weight": plain}
    columns = {name: values[mask].numpy() for name, values in columns.items()}
    columns |= dict(zip(("response", "position"), mask.nonzero().T.numpy(), strict=True))
    (found,) = make_weighting(case.weighting).weights(columns).values()
    return torch.zeros_like(new).masked_scatter(mask, torch.from_numpy(found))


def averages(mask: Tensor) -> dict[str, Tensor]:
    """Return what a token's weight is divided by under each average [B, 1]."""
    lengths = mask.sum(1, keepdim=True).double().clamp(min=1)
    size, one = int(mask.any(1).sum()), torch.ones(len(mask), 1, dtype=torch.float64)
    parts = [mask[list(part)].sum() * len(MICRO_BATCHES) * one[list(part)] for part in MICRO_BATCHES]
    found = {"token-mean": mask.sum() * one, BY_RESPONSE: lengths * size, "token-sum": one}
    found |= {"seq-mean-token-sum": size * one, "seq-mean-token-sum-norm": size * mask.shape[1] * one}
    return found | {"micro-batches": torch.cat(parts)}


READINGS = {"token-mean": "token-mean", "sequence-mean": BY_RESPONSE, "micro-batches": "micro-batches"}


def make_row(case: Case) -> dict[str, Any]:
    """Return the row of a case."""
    started, tensors = time.perf_counter(), make_tensors(empty=case.empty)
    slopes, weights, divided = verl_slopes(case, *tensors), documented_weights(case, *tensors), averages(tensors[-1])
    wanted = weights / divided[case.average]
    fits = {name: _fit(slopes, weights / divided[own]) for name, own in READINGS.items()}
    reading = min(fits, key=lambda name: fits[name][1] + 1e-12 * (name != "token-mean"))
    factor, distance = fits[reading]
    right = float((slopes - wanted).norm() / slopes.norm()) < EXACT
    told = f"loss_mode={case.mode}, loss_agg_mode={case.average}"
    told += ", two micro-batches" if case.whole else ", the batch's numbers not given"
    told += ", a response masked altogether" if case.empty else ""
    away = f"{_fit(slopes, wanted)[0]:.4g} times the documented one"
    away += "" if _fit(slopes, wanted)[1] < EXACT else f", cosine {_cosine(slopes, wanted):.3f}"
    return {
        **{"trainer": "verl", "case": told, "documented": DOCUMENTED[case.average], "agrees": "yes" if right else "no"},
        **{"reading": reading if distance < EXACT else "none", "factor": f"{factor:.4g}", "cause": "", "fault": ""},
        **{"distance": f"{distance:.1e}", "responses": str(len(LENGTHS)), "tokens": str(int(tensors[-1].sum()))},
        **{"seconds": f"{time.perf_counter() - started:.1f}", "reason": "" if right else f"The gradient is {away}"},
    }


def _fit(theirs: Tensor, ours: Tensor) -> tuple[float, float]:
    factor = float((theirs * ours).sum() / (ours * ours).sum())
    return factor, float((theirs - factor * ours).norm() / theirs.norm())


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def main(show: Callable[[str], None] = print) -> None:
    """Print the rows."""
    warnings.simplefilter("ignore")
    import verl

    show(json.dumps([make_row(case) | {"version": verl.__version__} for case in CASES]))


if __name__ == "__main__":
    main()
