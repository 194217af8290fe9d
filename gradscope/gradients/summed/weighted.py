"""Products with the Jacobian by the names that callers still use."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.forward_mode import Derivative
from gradscope.gradients.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.gradients.vectors import Vectors
from gradscope.policy import flat_slices
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress

EVERYTHING = 1 << 62


def weighted_gradients(
    model: nn.Module,
    batch: TokenBatch,
    cotangents: Float[Tensor, "C B S"],
    *,
    micro_batch_size: int,
    progress: bool | Progress = False,
    out: Float[Tensor, "C P"] | None = None,
) -> Float[Tensor, "C P"]:
    """Row c is Σ_t cotangents[c, t] · ∇ log π_t; see `TokenJacobian.vjp`."""
    if tuple(cotangents.shape[1:]) != (wanted := tuple(batch.input_ids.shape)):
        raise InputError(
            f"cotangents have shape {tuple(cotangents.shape)}, the batch {wanted}; give rows with one number per column"
        )
    resources = Resources(EVERYTHING if out is None else 0, micro_batch=micro_batch_size, progress=progress)
    J = TokenJacobian(model, batch, resources)
    found = J.vjp(J.kept(cotangents)).rows
    return found if out is None else out.copy_(found)


def predict_changes(
    model: nn.Module,
    batch: TokenBatch,
    directions: Float[Tensor, "C P"],
    *,
    micro_batch_size: int,
    progress: bool | Progress = False,
) -> tuple[Float[Tensor, "C B S"], Derivative]:
    """⟨∇ log π_t, direction⟩ of every kept token for each direction, 0 elsewhere; see `TokenJacobian.jvp`."""
    J = TokenJacobian(model, batch, Resources(EVERYTHING, micro_batch=micro_batch_size, progress=progress))
    changes, how = J.jvp(Vectors(directions, flat_slices(model)))
    return J.spread(changes), how


def vectors_within(model: nn.Module, count: int, memory: int | None) -> Float[Tensor, "count P"]:
    """`Vectors.zeros`, as rows."""
    return Vectors.zeros(model, count, memory).rows
