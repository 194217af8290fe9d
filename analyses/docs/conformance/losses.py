"""Other trainers' loss functions on random log-probabilities: their slopes beside the weights of what is documented.

Each gets log-probabilities in float64, in two micro-batches whose losses are added as its engine adds them. The slopes
at the tokens are compared with the weights of the documented formula (Eq. 2's, or a weighting's), over what is
documented to divide them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradscope.objective import make_weighting, token_weights

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.24, "clip_ratio_c": 3.0}
LENGTHS = (6, 3, 5, 1)
MICRO_BATCHES = ((0, 1), (2, 3))
EXACT = 1e-6
"""Largest relative distance of two float64 programs, some with an epsilon of 1e-8 in a denominator."""
BY_RESPONSE = "seq-mean-token-mean"
READINGS = {"token-mean": "token-mean", "sequence-mean": BY_RESPONSE, "micro-batches": "micro-batches"}


def import_alone(name: str, *unused: str) -> ModuleType:
    """Import a module without its packages' own `__init__`, which need more than it does.

    unused: modules that it imports and does not use, which need not be installed.
    """
    sys.modules |= {other: ModuleType(other) for other in unused if PathFinder.find_spec(other) is None}
    top, *parents = name.split(".")[:-1]
    package, [path] = top, PathFinder.find_spec(top).submodule_search_locations
    for part in ("", *parents):
        package, path = f"{package}.{part}".rstrip("."), str(Path(path, part))
        module = ModuleType(package)
        module.__path__ = [path]
        sys.modules.setdefault(package, module)
    return importlib.import_module(name)


def make_tensors(*, empty: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log π_old, log π, Â and the mask [B, T], with a hole in one response; empty: one is masked altogether."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False
    mask[3] &= not empty
    old = torch.rand(mask.shape, generator=draw, dtype=torch.float64).clamp(min=0.02).log()
    new = old + 0.3 * torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), 1, generator=draw, dtype=torch.float64).expand(mask.shape)
    return old, new, advantages, mask


def documented_weights(
    weighting: str | None,
    old: Tensor,
    new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clips: dict[str, float | None] = CLIPS,
) -> Tensor:
    """Return w_t [B, T] of the documented formula; weighting None: Eq. 2's."""
    plain = token_weights(new, old, advantages, mask, **clips, num_tokens=1)
    if weighting is None:
        return plain
    columns = {"logprob": new, "old_logprob": old, "advantage": advantages, "policy_weight": plain}
    columns = {name: values[mask].numpy() for name, values in columns.items()}
    columns |= dict(zip(("response", "position"), mask.nonzero().T.numpy(), strict=True))
    (found,) = make_weighting(weighting).weights(columns).values()
    return torch.zeros_like(new).masked_scatter(mask, torch.from_numpy(found))


def averages(mask: Tensor) -> dict[str, Tensor]:
    """Return what a token's weight is divided by under each average [B, 1]."""
    lengths = mask.sum(1, keepdim=True).double().clamp(min=1)
    size, one = int(mask.any(1).sum()), torch.ones(len(mask), 1, dtype=torch.float64)
    parts = [mask[list(part)].sum() * len(MICRO_BATCHES) * one[list(part)] for part in MICRO_BATCHES]
    found = {"token-mean": mask.sum() * one, BY_RESPONSE: lengths * size, "token-sum": one}
    found |= {"seq-mean-token-sum": size * one, "seq-mean-token-sum-norm": size * mask.shape[1] * one}
    return found | {"micro-batches": torch.cat(parts)}


def judge_slopes(slopes: Tensor, weights: Tensor, mask: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Return the columns of a row. slopes: −∂loss/∂ log π [B, T]; wanted: what the weights are to be divided by."""
    divided, documented = averages(mask), weights / wanted
    fits = {name: _fit(slopes, weights / divided[own]) for name, own in READINGS.items()}
    reading = min(fits, key=lambda name: fits[name][1] + 1e-12 * (name != "token-mean"))
    factor, distance = fits[reading]
    right = float((slopes - documented).norm() / slopes.norm()) < EXACT
    away = f"{_fit(slopes, documented)[0]:.4g} times the documented one"
    away += "" if _fit(slopes, documented)[1] < EXACT else f", cosine {_cosine(slopes, documented):.3f}"
    return {
        **{"agrees": "yes" if right else "no", "reading": reading if distance < EXACT else "none"},
        **{"factor": f"{factor:.4g}", "cause": "", "fault": "", "distance": f"{distance:.1e}"},
        **{"responses": str(len(LENGTHS)), "tokens": str(int(mask.sum()))},
        "reason": "" if right else f"The gradient is {away}",
    }


def _fit(theirs: Tensor, ours: Tensor) -> tuple[float, float]:
    factor = float((theirs * ours).sum() / (ours * ours).sum())
    return factor, float((theirs - factor * ours).norm() / theirs.norm())


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))
