"""Whatever is asked of a policy, it is as it was, bit for bit; also where a forward pass fails in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.gradients import fail_in_the_last_pass, fused, snapshot
from support.policies import make_batch, make_policy
from support.steps import warm_state
from support.tiers import every

from gradscope.diagnosis import DiagnosisSettings, diagnose
from gradscope.gradients import TokenJacobian, Vectors, interval_gradients, measure
from gradscope.policy import Policy, flat_slices
from gradscope.rollouts import TokenBatch
from gradscope.updates import StepSettings, apply_update, influence

pytestmark = pytest.mark.usefixtures("undrawn")

# As warm_state has them.
ADAMW = StepSettings("adamw", 1e-3, 0.1, betas=(0.8, 0.95), eps=1e-6)


def move(policy: Policy, batch: TokenBatch) -> object:
    direction = torch.ones(1, sum(p.numel() for p in policy.model.parameters()))
    return TokenJacobian(policy, batch).jvp(Vectors(direction, flat_slices(policy.model)))


def by_differences(policy: Policy, batch: TokenBatch) -> object:
    with pytest.warns(UserWarning):
        return move(policy, batch)


def step(name: str, settings: StepSettings = StepSettings()) -> Callable[[Policy, TokenBatch], object]:  # noqa: B008
    def take(policy: Policy, batch: TokenBatch) -> None:
        assert apply_update(policy, batch, name, step=settings).update_norm > 1e-6

    return take


def predict(policy: Policy, batch: TokenBatch) -> None:
    state = warm_state(policy)
    kept = copy.deepcopy(state["state"])
    influence(policy, batch, step=ADAMW, optimizer_state=state)
    for index, moments in kept.items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in moments.items())


ASKED = {
    "table": measure,
    "intervals": interval_gradients,
    "sums": lambda policy, batch: TokenJacobian(policy, batch).vjp(torch.ones(2, batch.num_tokens)),
    "changes": move,
    "changes by differences": by_differences,
    "influence": predict,
    **{f"{name} by sgd": step(name) for name in ("all", "lopti", "random-split", "top-entropy", "only-1")},
    **{f"{name} by AdamW": step(name, ADAMW) for name in ("all", "lopti")},
    "diagnosis": lambda policy, batch: diagnose(policy, batch, settings=DiagnosisSettings(resamples=20)),
}


def comparable(policy: Policy) -> dict[str, object]:
    """The run-time check of annotations draws from Python's generator, so that state is no part of it."""
    found = snapshot(policy.model) | {"grad mode": torch.is_grad_enabled()}
    found |= {"attention": policy.model.config._attn_implementation}
    found |= {"hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in policy.model.modules()]}
    return {name: value for name, value in found.items() if name != "python"}


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failing"])
@pytest.mark.parametrize("asked", every(2, ASKED))
def test_the_policy_is_as_it_was_bit_for_bit(asked, fails):
    policy = make_policy("gpt2", attention="sdpa")
    batch = make_batch(policy)
    policy.model.train()  # dropout and all
    policy.model.transformer.h[1].eval()
    for i, parameter in enumerate(policy.model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
        parameter.grad = torch.full_like(parameter, 0.5) if i % 3 == 0 else None
    if asked == "changes by differences":
        fused(policy)
    before = comparable(policy)
    if fails:
        fail_in_the_last_pass(policy.model, lambda: ASKED[asked](policy, batch))
    else:
        with torch.no_grad():
            ASKED[asked](policy, batch)
    assert comparable(policy) | {"grad mode": True} == before
