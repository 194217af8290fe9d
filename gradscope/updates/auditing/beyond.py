"""What no weights of tokens make of a gradient T, since it is not of the model's own passes.

Conjugate gradients on min_x ‖T − Σ_t x_t·∇ log π_t‖, a jvp and a vjp each (CGLS: Björck, *Numerical Methods for Least
Squares Problems*, algorithm 7.4.1). Of other passes than the model's, what is left soon stays the same.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from gradscope.gradients import TokenJacobian, Vectors

STEPS, LATE = 40, 10
"""Steps, and of these the last, over which what is left must stay."""
STAYS, MUCH = 0.97, 0.05
"""Least of what was left before these last steps that stays, and least of ‖T‖. Two trainers with another attention mask
left 17 and 57 %, of which 98 and 99.98 % had stayed; random weights of 3,118 tokens left 16 %, of which 85 % had."""
SURE = 1e-3
"""Least 1 − π by which tokens are scaled, as ‖∇ log π‖ is about in proportion to it."""


def find_beyond(J: TokenJacobian, gradient: Vectors) -> float | None:
    """Return what is left of T over ‖T‖ at the best weights; None: weights may make it.

    J: of all real tokens. gradient: T, of all parameters.
    """
    scale = 1 / (1 - J.kept(J.statistics.logprob).double().exp()).clamp(min=SURE)
    rest = Vectors(gradient.rows.clone(), gradient.slices)
    lefts = [float(rest.products())]

    def along() -> Float[Tensor, " K"]:
        return J.jvp(rest).logprob[0].double() * scale

    slope = way = along()
    for _ in range(STEPS):
        step = J.vjp((way * scale).float()[None])
        rest.rows.sub_(step.rows, alpha=float(slope.square().sum()) / float(step.products()))
        del step
        lefts.append(float(rest.products()))
        if lefts[-1] < MUCH**2 * lefts[0]:
            return None
        new = along()
        way, slope = new + new.square().sum() / slope.square().sum() * way, new
    stayed = (lefts[-1] / lefts[-1 - LATE]) ** 0.5
    return (lefts[-1] / lefts[0]) ** 0.5 if stayed >= STAYS else None
