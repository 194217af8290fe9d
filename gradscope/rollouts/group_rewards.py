"""Mean and standard deviation of the rewards of each response's group, which GRPO's advantages are made of."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_moments(
    rewards: Float[Tensor, " B"] | Int[Tensor, " B"], group_ids: Int[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return each response's group mean and sample standard deviation (n − 1), in float64.

    The standard deviation is exactly 0 for a group of one response, and for one whose rewards are all equal.

    >>> group_moments(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3]))
    (tensor([0.5000, 0.5000, 5.0000], dtype=torch.float64), tensor([0.7071, 0.7071, 0.0000], dtype=torch.float64))
    """
    _, group = group_ids.unique(return_inverse=True)
    exact = rewards.double()  # so that the rewards' own dtype rounds only once, at the end
    count = torch.bincount(group).double()
    mean = torch.zeros_like(count).index_add_(0, group, exact) / count
    highest = torch.zeros_like(count).scatter_reduce_(0, group, exact, "amax", include_self=False)
    lowest = torch.zeros_like(count).scatter_reduce_(0, group, exact, "amin", include_self=False)
    mean = torch.where(highest == lowest, highest, mean)  # the mean of equal numbers can be off by rounding
    squares = (exact - mean[group]).square()
    variance = torch.zeros_like(count).index_add_(0, group, squares) / (count - 1).clamp_(min=1)
    return mean[group], variance.sqrt()[group]
