"""Check what an optimizer step did to the weights: Δθ beside AdamW's −η·(m̂ ⊘ (√v̂ + ε) + λ·θ) of a gradient.

η and λ of every group of parameters come from a least-squares fit of Δθ on u = m̂ ⊘ (√v̂ + ε) and θ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.policy import (
    AdamWSettings,
    Policy,
    PolicyLike,
    float_parameters,
    group_settings,
    load_policy,
    module_groups,
    optimizer_names,
    read_state,
)

CLOSE = 0.01
"""Largest relative difference of two learning rates, or decays, that are called equal."""
ERRORS = 5.0
"""Standard errors, from rounding of the weights, that are added to that."""
UNDECAYED = ("norms", "biases")
"""Groups of parameters that usually have no decay."""
BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.95, 0.95), (0.8, 0.99))
"""Betas to try if no optimizer state was saved after the step."""
CAUSES = {
    "no-step": ("did not move", "look which parameters the optimizer was given, and what is frozen"),
    "no-bias-correction": ("is AdamW's without bias correction", "set bias_correction, or use torch's AdamW"),
    "decay-in-gradient": ("has its decay inside the gradient, as Adam's", "use AdamW instead of Adam"),
    "betas": ("has other betas than {betas}", "look what betas the optimizer was made with"),
    "learning-rate": ("has another learning rate", "look at the groups' learning rates and when the scheduler steps"),
    "decay": ("has another decay", "look at the groups' weight_decay"),
    "unwanted-decay": ("decays norms or biases", "put norms and biases into a group with weight_decay 0"),
    "half-precision": ("is rounded away", "keep float32 weights beside the half-precision ones, or round at random"),
    "gradient": ("is not AdamW's of this gradient", "look at clipping, the state before the step, and the gradient"),
}
"""Cause → what is said of the step, and the remedy."""


@dataclass(frozen=True, eq=False)
class StepAudit:
    """Comparison of an applied step with AdamW's."""

    causes: tuple[str, ...]
    """What differs, of CAUSES; empty: nothing."""
    groups: pd.DataFrame
    """A row per module group (biases apart) and settings: parameters, learning_rate and weight_decay as fitted, wanted
    (wanted_learning_rate is NaN if unknown), the standard errors of the fit (from rounding or, if more, from what is
    left), distance
    ‖Δθ − fit‖/‖Δθ‖ and what rounding explains of it; still: the share of entries that did not move though their step is
    not 0; half: the share of these whose step is less than half of the weights' spacing; narrow: the share of entries
    in parameters of half precision."""
    betas: tuple[float, float]
    """AdamW's, as saved or fitted."""
    verdict: str
    """Verdict in words."""

    @property
    def remedies(self) -> tuple[str, ...]:
        return tuple(CAUSES[cause][1] for cause in self.causes)

    def __repr__(self) -> str:
        return self.verdict


@dataclass(frozen=True)
class _Known:
    """What a saved AdamW knows of a parameter."""

    settings: AdamWSettings
    step: int = 0
    first: Tensor | None = None
    second: Tensor | None = None

    def moments(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(shape, dtype=torch.float64)
        return (zeros, zeros) if self.first is None else (self.first.double(), self.second.double())


@checked
def audit_step(
    policy: PolicyLike,
    moved: PolicyLike,
    gradient: Mapping[str, Tensor],
    *,
    before: str | Path | None = None,
    after: str | Path | None = None,
) -> StepAudit:
    """Compare the weights after a step with those that AdamW makes of a gradient.

    Args:
        policy: the weights before the step, in float32.
        moved: those after it.
        gradient: as AdamW got it, after clipping, by parameter; parameters without one are not looked at.
        before: AdamW's state before the step, whose learning rate is the step's; None: the run's first step.
        after: AdamW's state after the step, with the settings if there is none before; None: unknown.

    Raises:
        InputError: neither state is given, a state is not AdamW's, or the policies have other parameters.
    """
    policy, moved = (own if isinstance(own, Policy) else load_policy(own) for own in (policy, moved))
    if before is None and after is None:
        raise InputError("no state of AdamW is given, before or after the step; give one, for its settings")
    earlier = None if before is None else _read(policy, before)
    later = None if after is None else _read(policy, after)
    ends = dict(float_parameters(moved.model))
    if lacking := [name for name in gradient if name not in ends]:
        raise InputError(f"the weights after the step have no {lacking[0]}; give the same model's")
    homes, names = module_groups(policy), [name for name, _ in float_parameters(policy.model) if name in gradient]
    parts = {
        name: _Part.of(
            policy.model.get_parameter(name).detach(),
            ends[name].detach(),
            gradient[name],
            (earlier or later).get(name),
            None if later is None else later.get(name),
            fresh=earlier is None,
        )
        for name in names
        if name in (earlier or later)
    }
    keys = {
        name: ("biases" if name.endswith("bias") else homes[name][1], part.known.settings.weight_decay)
        for name, part in parts.items()
    }
    return _judge(parts, keys, rate_known=earlier is not None)


@dataclass(frozen=True)
class _Part:
    """A parameter's step, in float64 and flat."""

    theta: Float[Tensor, " p"]
    delta: Float[Tensor, " p"]
    gradient: Float[Tensor, " p"]
    known: _Known
    later: _Known | None
    spacing: float
    """Of the weights' numbers just above 1."""

    @classmethod
    def of(
        cls, start: Tensor, end: Tensor, gradient: Tensor, known: _Known, later: _Known | None, *, fresh: bool
    ) -> _Part:
        flat = [own.flatten().cpu() for own in (start, end)]
        halves = (
            dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(flat[1], flat[1].to(dtype).to(flat[1]))
        )
        spacing = torch.finfo(next(halves, torch.float32)).eps
        if fresh:
            known = replace(known, step=0, first=None, second=None)
        theta = flat[0].double()
        return cls(theta, flat[1].double() - theta, gradient.flatten().double().cpu(), known, later, spacing)

    def direction(self, how: str, betas: tuple[float, float] | None = None) -> Float[Tensor, " p"]:
        """Return u under a way of computing it."""
        settings = self.known.settings
        first, second = betas or settings.betas
        gradient = self.gradient + (settings.weight_decay * self.theta if how == "decay-in-gradient" else 0.0)
        m, v = (own.flatten() for own in self.known.moments(self.theta.shape))
        m, v = first * m + (1 - first) * gradient, second * v + (1 - second) * gradient.square()
        if how != "no-bias-correction":
            step = self.known.step + 1
            m, v = m / (1 - first**step), v / (1 - second**step)
        return m / (v.sqrt() + settings.eps)


def _read(policy: Policy, given: str | Path) -> dict[str, _Known]:
    """Read AdamW's settings and moments by the policy's names."""
    state = read_state(given)
    names, settings = optimizer_names(policy.model, state), group_settings(state)
    if len(names) != len(settings):
        raise InputError(
            f"the optimizer state has {len(settings)} parameters, the policy {len(names)}", path=Path(given)
        )
    found = {}
    for name, (index, own) in zip(names, settings.items(), strict=True):
        held = state["state"].get(index, {})
        found[name] = _Known(own, int(held.get("step", 0)), held.get("exp_avg"), held.get("exp_avg_sq"))
    return found


def _fit_betas(parts: Mapping[str, _Part]) -> tuple[float, float] | None:
    """Return the betas by which the moments went on to those after the step; None: unknown."""
    sums = np.zeros((2, 2))
    for part in parts.values():
        if part.later is None or part.later.first is None:
            continue
        before, after = part.known.moments(part.theta.shape), part.later.moments(part.theta.shape)
        for row, added in enumerate((part.gradient, part.gradient.square())):
            x, y = before[row].flatten() - added, after[row].flatten() - added
            sums[row] += float(x @ y), float(x @ x)
    return tuple((sums[:, 0] / sums[:, 1]).tolist()) if sums[:, 1].all() else None


def _tabulate(
    parts: Mapping[str, _Part], keys: Mapping[str, tuple[str, float]], how: str, betas: tuple[float, float] | None
) -> pd.DataFrame:
    """Make `StepAudit.groups` under a way of computing u."""
    sums: dict[tuple[str, float], np.ndarray] = {}
    counts: dict[tuple[str, float], int] = {}
    for name, part in parts.items():
        u, theta, delta = part.direction(how, betas), part.theta, part.delta
        noise = (part.spacing * theta).square() / 12  # a weight's rounding is within half of its spacing
        rate, decay = part.known.settings.learning_rate, part.known.settings.weight_decay
        step = rate * (u + decay * theta)
        moves = step != 0
        still = moves & (delta == 0)
        half = still & (step.abs() < part.spacing * theta.abs() / 2)
        own = [u @ u, u @ theta, theta @ theta, -(u @ delta), -(theta @ delta), delta @ delta]
        own += [noise @ u.square(), noise @ theta.square(), noise.sum(), moves.sum(), still.sum(), half.sum()]
        own += [rate * len(theta), len(theta), (part.spacing > 1e-6) * len(theta)]
        sums[keys[name]] = sums.get(keys[name], 0.0) + np.array([float(value) for value in own])
        counts[keys[name]] = counts.get(keys[name], 0) + 1
    rows = []
    for (group, decay), own in sums.items():
        uu, ut, tt, ud, td, dd, nu, nt, noise, moves, still, half, rate, size, narrow = own
        a, b = np.linalg.lstsq([[uu, ut], [ut, tt]], [ud, td], rcond=1e-12)[0] if tt else (ud / uu if uu else 0.0, 0.0)
        left = max(0.0, dd - 2 * (a * ud + b * td) + a * a * uu + 2 * a * b * ut + b * b * tt)
        scale = abs(a) if a else 1.0
        row = {"group": group, "parameters": counts[group, decay]}
        row |= {"learning_rate": a, "wanted_learning_rate": rate / size}
        row |= {"learning_rate_error": nu**0.5 / uu if uu else np.inf, "weight_decay": b / a if a else 0.0}
        row |= {"wanted_weight_decay": 0.0 if how == "decay-in-gradient" else decay}
        row |= {"weight_decay_error": nt**0.5 / tt / scale if tt else np.inf}
        row |= {"distance": (left / dd) ** 0.5 if dd else 0.0, "rounding": (noise / dd) ** 0.5 if dd else np.inf}
        # The gradient has rounding of its own, which AdamW enlarges where there is next to none.
        wider = max(1.0, row["distance"] / row["rounding"]) if row["rounding"] else 1.0
        row |= {name: row[name] * wider for name in ("learning_rate_error", "weight_decay_error")}
        shares = {"still": still / moves if moves else 0.0, "half": half / still if still else 0.0}
        rows.append(row | shares | {"narrow": narrow / size})
    return pd.DataFrame(rows)


def _judge(parts: Mapping[str, _Part], keys: Mapping[str, tuple[str, float]], *, rate_known: bool) -> StepAudit:
    if not parts:
        raise InputError("no parameter has both a gradient and a state of AdamW; give those of the same run")
    saved = next(iter(parts.values())).known.settings.betas
    fitted = _fit_betas(parts)
    tried: dict[str, list[tuple[float, float] | None]] = {"adamw": [None], "no-bias-correction": [None]}
    tried["decay-in-gradient"] = [None] if any(decay for _, decay in keys.values()) else []
    same = fitted is not None and max(abs(a - b) for a, b in zip(fitted, saved, strict=True)) < 1e-3
    tried["betas"] = [*BETAS] if fitted is None else [] if same else [fitted]
    found = []
    for how, betas in ((how, own) for how, some in tried.items() for own in some if own != saved):
        groups = _tabulate(parts, keys, how, betas)
        if not rate_known:
            groups["wanted_learning_rate"] = np.nan
        found.append((how, betas, groups))
        if _fits(groups).all():
            break
    else:
        how, betas, groups = min(found, key=lambda own: _off(own[2]))
        if _off(groups) > _off(found[0][2]) / 3:  # no better than the right way
            how, betas, groups = found[0]
    causes, told = [], []
    for cause, where in _differences(groups, how):
        causes.append(cause)
        words = CAUSES[cause][0].format(betas=" and ".join(map(str, saved)))
        told.append(f"The step {words}{where}.")
    if not causes:
        told = ["The step is AdamW's of this gradient, in every group of parameters."]
    if not rate_known:
        told.append("The learning rate was not known: there is no state before the step.")
    return StepAudit(tuple(causes), groups, betas or saved, " ".join(told))


def _off_in(groups: pd.DataFrame, name: str) -> pd.Series:
    """Return which groups' learning rates, or decays, are not the wanted ones."""
    wanted = groups[f"wanted_{name}"]
    return (groups[name] - wanted).abs() > CLOSE * wanted + ERRORS * groups[f"{name}_error"]


def _unlike(groups: pd.DataFrame) -> pd.Series:
    """Return which groups' steps are not of the fitted direction."""
    return groups["distance"] > CLOSE + ERRORS * groups["rounding"]


def _fits(groups: pd.DataFrame) -> pd.Series:
    return ~(_off_in(groups, "learning_rate") | _off_in(groups, "weight_decay") | _unlike(groups))


def _off(groups: pd.DataFrame) -> float:
    """Return how far the steps are from the wanted ones."""
    rate = (groups["learning_rate"] / groups["wanted_learning_rate"] - 1).abs().fillna(0.0)
    return float((groups["distance"] + rate).mean())


def _differences(groups: pd.DataFrame, how: str) -> Iterator[tuple[str, str]]:
    """Yield the causes, and where."""

    def where(rows: pd.DataFrame, numbers: str = "") -> str:
        names = "" if len(rows) == len(groups) and len(groups) > 1 else f" in {', '.join(dict.fromkeys(rows['group']))}"
        return names + numbers

    if how != "adamw":
        yield how, ""
    narrow = groups["narrow"] > 0.5
    stuck = narrow & (groups["still"] > 0) & (groups["half"] > 0.5)
    still = (groups["still"] == 1) & ~stuck
    if still.any():
        yield "no-step", where(groups[still])
    if stuck.any():
        rows = groups[stuck]
        yield "half-precision", where(rows, f": {100 * rows['still'].mean():.2g} % of the weights stayed")
    rest = groups[~still & ~stuck]
    for cause, name in (("learning-rate", "learning_rate"), ("decay", "weight_decay")):
        if (off := _off_in(rest, name)).any():
            first = rest[off].iloc[0]
            yield cause, where(rest[off], f": {first[name]:.3g} instead of {first[f'wanted_{name}']:.3g}")
    wrong = rest["group"].isin(UNDECAYED) & (rest["weight_decay"] > ERRORS * rest["weight_decay_error"])
    wrong &= rest["weight_decay"] > CLOSE * groups["wanted_weight_decay"].max()
    if wrong.any():
        yield "unwanted-decay", where(rest[wrong], f": {rest[wrong].iloc[0]['weight_decay']:.3g}")
    if (unlike := _unlike(rest)).any():
        yield "gradient", where(rest[unlike], f": {100 * rest[unlike]['distance'].max():.2g} % off")
