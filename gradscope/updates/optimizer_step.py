"""An optimizer step from the current weights: predicted to first order, or taken by the trainer's code and undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.gradients import BACKWARD, Resources, TokenJacobian, Vectors, refuse_narrow_weights
from gradscope.intervals import EDGES
from gradscope.objective import PAPER, LossSettings, Update, Updater, Weighting, fitting_size, settle_loss
from gradscope.policy import (
    PART,
    PolicyLike,
    float_parameters,
    model_bytes,
    read_state,
    restoring,
    sum_of_squares,
)
from gradscope.rollouts import BatchLike, TokenBatch, read_inputs
from gradscope.runs import track
from gradscope.updates.influence import Influence, predict_step
from gradscope.updates.make_update import make_update
from gradscope.updates.movement import Movement, resolve
from gradscope.updates.step_settings import ANY, SGD, StepOptimizer, StepSettings, read_moments

Number = int | float


def update_cost(num_passes: int = 1) -> float:
    """Return the forward passes that `apply_update` takes with this many optimizer steps."""
    return 2 + (1 + BACKWARD) * num_passes


class OptimizerStep:
    """A step on one batch from the current weights: predicted to first order, or taken and undone.

    jacobian: of a Policy; to take steps, without a table's statistics, which are scored differently from those after a
    step. Other arguments are those of `apply_update`.
    """

    def __init__(
        self,
        jacobian: TokenJacobian,
        *,
        loss: LossSettings = PAPER,
        step: StepSettings = SGD,
        optimizer_state: dict[str, Any] | str | Path | None = None,
    ) -> None:
        self.jacobian, model = jacobian, jacobian.model
        state = read_state(optimizer_state) if isinstance(optimizer_state, str | Path) else optimizer_state
        step.check()
        loss.check()
        self._step, self._loss, self._moments = step, loss, read_moments(model, step, state)

    def on(self, batch: TokenBatch) -> OptimizerStep:
        """Return the same steps on another batch."""
        steps = copy.copy(self)
        steps.jacobian = TokenJacobian(self.jacobian.policy, batch, self.jacobian.resources)
        return steps

    def predicted(self, *, edges: Sequence[Number] = EDGES, gradients: Float[Tensor, "A P"] | None = None) -> Influence:
        """Predict the plain update's effect on each token's log π, by source; see `influence`."""
        return predict_step(self.jacobian, self._loss, self._step, self._moments, edges=edges, gradients=gradients)

    def take(self, update: str | Weighting | Update = "all", *, displacement: bool = False) -> Movement:
        """Take an update's optimizer steps, measure every token, and restore the policy; see `apply_update`."""
        J, model, step = self.jacobian, self.jacobian.model, self._step
        refuse_narrow_weights(model)
        fits = _fits(model, step, J.resources.vectors)
        size = fitting_size(model, J.batch, J.resources.micro_batch, copies=2)
        # The caller may be in inference mode; gradients are needed all the same.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            restoring(model, memory=None if fits else 0) as start,
        ):
            model.eval()
            before = J.statistics
            batch = resolve(J.batch, before, self._loss)
            if not isinstance(update, Update):
                update = make_update(update, batch, loss=self._loss)
            how = {"num_steps": len(update.steps), "scratch": not fits}
            optimizer = StepOptimizer(model, step, self._moments, **how)
            updater = Updater(model, optimizer, J.device, size, step.max_grad_norm)
            results = [updater.step(part, update.settings, weighting=update.weighting) for part in update.steps]
            after = J.moved().statistics
            square = sum_of_squares(_moved_parts(model, start))
            moved = Vectors.zeros(model, 1, J.resources.vectors) if displacement else None
            for name, part in moved.slices.items() if displacement else ():
                moved.rows[0, part] = model.get_parameter(name).detach().flatten()
                moved.rows[0, part] -= start[name].flatten().to(moved.rows)
        norm = math.sqrt(square)
        return Movement(update.name, batch, before, after, results, norm, self._loss, moved and moved.rows[0])


@checked
def influence(
    policy: PolicyLike,
    batch: BatchLike,
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    edges: Sequence[Number] = EDGES,
    gradients: Float[Tensor, "A P"] | None = None,
    resources: Resources | None = None,
) -> Influence:
    """Predict the effect of `apply_update(policy, batch, "all", …)` on each token's log π, by source, without a step.

    The whole batch is one mini-batch. Costs a forward pass, a forward and backward pass per source and for the mean
    entropy, and three forward passes for each of these in forward mode (see `TokenJacobian.jvp` for models without it,
    as reported by a UserWarning and `method`). The policy is restored bit for bit, even if the call raises. Memory
    beside the model, its activations and the given state: a vector as long as the parameters per source (SGD: intervals
    + 2; AdamW: intervals + 3), and 2 more.

    Args:
        batch: unknown old_logprobs are replaced by the policy's own; advantages come from `resolve_advantages`.
        optimizer_state: AdamW's `state_dict()`: continues from its moments and step counts with the settings of `step`,
            and does not move other parameters. None: fresh, with v = 0, so that the step is lr·sign(gradient): entries
            in which the sources' gradients cancel still move by lr, and each source contributes its gradient over their
            sum, without bound. The contributions still add up, but say little about who moved whom, so give a state
            that has taken many steps (see AdamWState).
        gradients: of the loss's policy part for each interval, if known and without a KL part; None: computed here.
        resources: if the vectors exceed its bytes, they go to a scratch file; None: no limit.

    Raises:
        InputError: the weights are below float32, the batch has no response tokens or advantages, the optimizer state
            does not fit, the gradient is not finite (so no step would be taken), or the disk has no room for a scratch
            file.
    """
    J = _look_at(policy, batch, loss, resources)
    given = {"loss": loss, "step": step, "optimizer_state": optimizer_state}
    return OptimizerStep(J, **given).predicted(edges=edges, gradients=gradients)


@checked
def apply_update(
    policy: PolicyLike,
    batch: BatchLike,
    update: str | Weighting | Update = "all",
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    displacement: bool = False,
    resources: Resources | None = None,
) -> Movement:
    """Take an update's optimizer steps with the trainer's code, measure every token, and restore the policy.

    The model runs in eval mode with its own attention. Afterwards weights, buffers, `.grad`, flags, modes and random
    states are restored bit for bit, even if the call raises. Takes memory for a copy of the weights, gradients and
    moments.

    Args:
        batch: unknown old_logprobs default to the policy's own, advantages to `resolve_advantages`.
        update: an argument of `make_update`, on the whole batch with `loss`; or its result.
        optimizer_state: AdamW's `state_dict()`: continues from its moments and step counts with the settings of `step`
            (whose betas and eps must match), and trains only its parameters; None: a fresh optimizer over all float
            parameters.
        displacement: also keep θ_after − θ_before.
        resources: if copy, gradients and moments exceed its bytes, the copy goes to scratch files and the moments stay
            in their file, so that only the gradient takes memory; None: no limit.

    Raises:
        InputError: the weights are below float32, advantages are unknown, the optimizer state does not fit, a gradient
            exceeds the bytes, or the disk has no room for scratch files.
    """
    J = _look_at(policy, batch, loss, resources)
    given = {"loss": loss, "step": step, "optimizer_state": optimizer_state}
    return OptimizerStep(J, **given).take(update, displacement=displacement)


@checked
def apply_updates(
    policy: PolicyLike,
    batch: BatchLike,
    updates: Sequence[str | Weighting | Update],
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    resources: Resources | None = None,
) -> list[Movement]:
    """Call `apply_update` for each update, from the same weights and statistics."""
    J = _look_at(policy, batch, loss, resources)
    steps = OptimizerStep(J, loss=loss, step=step, optimizer_state=optimizer_state)
    told = track(updates, "taking steps", J.resources.progress, unit="updates")
    return [steps.take(update) for update in told]


def _look_at(policy: PolicyLike, batch: BatchLike, loss: LossSettings, resources: Resources | None) -> TokenJacobian:
    policy, batch = read_inputs(policy, batch)
    return TokenJacobian(policy, settle_loss(batch, loss), resources or Resources(ANY))


def _fits(model: nn.Module, step: StepSettings, memory: int) -> bool:
    """Return whether model copy, gradient and AdamW's moments fit. Raises InputError if not even the gradient does."""
    gradient = sum(p.numel() * p.element_size() for _, p in float_parameters(model))
    if gradient > memory:
        raise InputError(
            f"the gradient of a real step takes {gradient / 1e9:.3g} GB, but {memory / 1e9:.3g} GB are allowed; allow "
            "more (--gradient-memory), or take no real step (diagnose --no-actual-step)"
        )
    return model_bytes(model) + gradient * (3 if step.optimizer == "adamw" else 1) <= memory


def _moved_parts(model: nn.Module, start: Mapping[str, Tensor]) -> Iterator[Float[Tensor, " _"]]:
    """Yield the displacement of the parameters in parts of limited size."""
    for name, parameter in float_parameters(model):
        pairs = zip(parameter.detach().flatten().split(PART), start[name].flatten().split(PART), strict=True)
        yield from (new - old.to(new) for new, old in pairs)
