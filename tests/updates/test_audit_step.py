"""Audits of an applied step: AdamW's, taken here by torch or by hand, sound or with a planted fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.policies import make_policy
from support.tiers import every
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.policy import float_parameters
from gradscope.updates import StepAudit, audit_step

RATE, DECAY, BETAS, EPS = 1e-3, 0.1, (0.9, 0.95), 1e-8


def decays(name: str) -> bool:
    """transformers' rule: all but biases and norms."""
    return not name.endswith("bias") and "norm" not in name


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(p.shape, generator=draw) for name, p in float_parameters(model)}


class Run:
    """Two steps of torch's AdamW by hand-made gradients, then one that a test may take otherwise; all files kept."""

    def __init__(self, folder, *, steps: int = 2) -> None:
        self.folder, self.policy = folder, make_policy("qwen2")
        named = float_parameters(self.policy.model)
        for _, parameter in named:
            parameter.requires_grad_(True)
        groups = [
            {"params": [(n, p) for n, p in named if decays(n)], "weight_decay": DECAY},
            {"params": [(n, p) for n, p in named if not decays(n)], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
        for step in range(steps):
            self._feed(gradients(self.policy.model, step))
            self.optimizer.step()
        self.before = self._save("before.pt") if steps else None
        self.gradient = gradients(self.policy.model, 99)

    def _feed(self, gradient: dict[str, Tensor]) -> None:
        for name, parameter in float_parameters(self.policy.model):
            parameter.grad = gradient[name].clone()

    def _save(self, name: str):
        torch.save(self.optimizer.state_dict(), self.folder / name)
        return self.folder / name

    def check(self, take: Callable[[Run], None], *, after: bool = True) -> StepAudit:
        """Take the third step and audit it."""
        start = replace(self.policy, model=copy.deepcopy(self.policy.model))
        self._feed(self.gradient)
        take(self)
        saved = self._save("after.pt") if after else None
        return audit_step(start, self.policy, self.gradient, before=self.before, after=saved)


def by_hand(
    run: Run,
    *,
    rate: Callable[[str], float] = lambda name: RATE,
    decay: Callable[[str], float] = lambda name: DECAY if decays(name) else 0.0,
    betas: tuple[float, float] = BETAS,
    corrected: bool = True,
    coupled: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """A step of AdamW, written out."""
    for name, parameter in float_parameters(run.policy.model):
        held, gradient = run.optimizer.state[parameter], run.gradient[name].double()
        theta = parameter.detach().double()
        gradient = gradient + (decay(name) * theta if coupled else 0)
        m = betas[0] * held["exp_avg"].double() + (1 - betas[0]) * gradient
        v = betas[1] * held["exp_avg_sq"].double() + (1 - betas[1]) * gradient**2
        step = int(held["step"]) + 1
        if corrected:
            m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        moved = theta - rate(name) * (m / (v.sqrt() + EPS) + (0 if coupled else decay(name) * theta))
        with torch.no_grad():
            parameter.copy_(moved if dtype is None else moved.to(dtype))


def test_a_step_of_torchs_adamw_is_its_own_with_the_settings_found(tmp_path):
    found = Run(tmp_path).check(lambda run: run.optimizer.step())
    assert found.causes == () and found.remedies == ()
    groups = found.groups
    assert (groups["learning_rate"] / RATE - 1).abs().max() < 1e-3
    # Of a weight's rounding, eps/√12 of it: the standard error that each group comes with.
    away = (groups["weight_decay"] - groups["wanted_weight_decay"]).abs()
    assert (away < 5 * groups["weight_decay_error"] + 1e-3).all()
    assert {"biases", "norms", "MLP"} <= {*groups["group"]}


def test_the_first_step_is_judged_without_its_learning_rate(tmp_path):
    run = Run(tmp_path, steps=0)
    found = run.check(lambda run: run.optimizer.step())
    assert found.causes == () and found.groups["wanted_learning_rate"].isna().all()


FAULTS = {
    "learning-rate": {"rate": lambda name: 0.5 * RATE},
    "decay": {"decay": lambda name: 0.3 if decays(name) else 0.0},
    "no-bias-correction": {"corrected": False},
    "betas": {"betas": (0.9, 0.999)},
    "decay-in-gradient": {"coupled": True},
    "half-precision": {"dtype": torch.bfloat16, "rate": lambda name: RATE},
}


@pytest.mark.parametrize("cause", FAULTS)
def test_what_is_wrong_with_a_step_is_named(tmp_path, cause):
    run = Run(tmp_path)
    if cause == "half-precision":  # weights that were so before, at a rate below half of most spacings
        for _, parameter in float_parameters(run.policy.model):
            parameter.data.copy_(parameter.data.bfloat16())
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-5
        run.before = run._save("before.pt")
        FAULTS[cause]["rate"] = lambda name: 1e-5
    found = run.check(lambda run: by_hand(run, **FAULTS[cause]), after=False)
    assert cause in found.causes and len(found.causes) == 1, found.verdict


def test_a_group_that_is_wrong_is_named_alone(tmp_path):
    found = Run(tmp_path).check(
        lambda run: by_hand(run, decay=lambda name: DECAY if decays(name) or "norm" in name else 0.0), after=False
    )
    assert {"decay", "unwanted-decay"} == {*found.causes}
    norms = found.groups.set_index("group").loc["norms"]
    assert norms["weight_decay"] == pytest.approx(DECAY, rel=0.02) and norms["wanted_weight_decay"] == 0


def test_betas_are_told_by_the_moments(tmp_path):
    def take(run: Run) -> None:
        by_hand(run, betas=(0.7, 0.9))
        for name, parameter in float_parameters(run.policy.model):
            held, gradient = run.optimizer.state[parameter], run.gradient[name]
            held["exp_avg"].mul_(0.7).add_(gradient, alpha=0.3)
            held["exp_avg_sq"].mul_(0.9).add_(gradient.square(), alpha=0.1)

    found = Run(tmp_path).check(take)
    assert found.causes == ("betas",) and found.betas == pytest.approx((0.7, 0.9), rel=1e-4)


def test_parameters_that_stay_and_another_gradient_are_named(tmp_path):
    run = Run(tmp_path)
    found = run.check(lambda run: by_hand(run, rate=lambda name: 0.0 if "embed" in name else RATE), after=False)
    assert found.causes == ("no-step",)
    run.gradient = gradients(run.policy.model, 5)
    assert "gradient" in audit_step(make_policy("qwen2"), run.policy, run.gradient, before=run.before).causes


@pytest.mark.all
@pytest.mark.parametrize("seed", every(7, range(40)))
def test_a_sound_step_gives_no_alarm(tmp_path, seed):
    run = Run(tmp_path, steps=seed % 3)
    run.gradient = gradients(run.policy.model, 100 + seed)
    assert run.check(lambda run: run.optimizer.step(), after=bool(seed % 2) or not seed % 3).causes == ()


def test_a_step_without_settings_is_refused(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(InputError):
        audit_step(run.policy, run.policy, run.gradient)
