"""verl's policy loss "gradscope", registered when this is imported, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from gradscope.errors import InputError
from gradscope.integrations.verl.methods import changed_policy_loss, check_methods

LOSS_MODE = "gradscope"


@dataclass
class GradScopePolicyLossConfig(PolicyLossConfig):
    """verl's PolicyLossConfig with the methods' settings; None (null): off."""

    loss_mode: str = LOSS_MODE
    reweight_alpha: float | None = None
    """α of Reweight, 0 to 1."""
    lopti_eta: float | None = None
    """η of Lopti, a probability."""
    lopti_pass: str | None = None
    """"low" or "high": train only that group, in one pass. None: both, in two passes."""
    lopti_order: str = "low-first"
    """Order of the two passes: "low-first" or "high-first"."""
    weighting: str | None = None
    """Instead of the above, a weighting of one optimizer step that needs neither entropies nor the sampler's log π."""

    def __post_init__(self) -> None:
        check_methods(self)
        given = [name for name in ("reweight_alpha", "lopti_eta", "weighting") if getattr(self, name) is not None]
        if given and self.loss_mode != LOSS_MODE:
            raise InputError(
                f"{given[0]} is set and loss_mode is {self.loss_mode!r}, which ignores it; give loss_mode={LOSS_MODE}"
            )


gradscope_policy_loss = register_policy_loss(LOSS_MODE)(partial(changed_policy_loss, get_policy_loss_fn("vanilla")))
"""The registered policy loss, with the signature of vanilla: see `methods.changed_policy_loss`."""
