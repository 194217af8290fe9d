"""Advantage Reweighting, and Lopti as far as verl's extension points allow, in verl (0.9.1). Import it inside verl.

    VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.actor.policy_loss._target_=gradscope.integrations.verl.GradScopePolicyLossConfig \\
        actor_rollout_ref.actor.policy_loss.loss_mode=gradscope \\
        +actor_rollout_ref.actor.policy_loss.reweight_alpha=0.3

Importing this module registers the policy loss "gradscope": verl's own "vanilla" with changed advantages (see
`verl_methods`). verl's configuration refuses unknown fields; `_target_` names a class that adds some. The environment
variable must reach every Ray worker (on several nodes, through `ray_kwargs.ray_init.runtime_env`).

Supported through verl's extension points:
- Reweight, with any advantage estimator, loss_agg_mode, micro-batch size and number of processes.
- Any weighting of one optimizer step that `gradscope compare` knows and whose columns verl's policy losses receive (no
  entropies, no log-probabilities of the sampler): +actor_rollout_ref.actor.policy_loss.weighting=cispo
- A single group of Lopti: `lopti_eta` with `lopti_pass=low` or `high`. The KL and entropy terms, which verl adds
  outside of a policy loss, still cover all tokens.
- Lopti's two passes, L1 H1 L2 H2, with FSDP (strategy fsdp or fsdp2): an engine, registered under its own vendor (see
  `verl_engine`), takes two optimizer steps per mini-batch.

Not supported without a fork: the authors' sweep L1 L2 H1 H2 (the loop over mini-batches has no hook for it, and a
trainer mode other than "sync" gets another replay buffer); two passes under Megatron and other engines; and Reweight in
verl's "bypass_mode", which replaces any registered loss with its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradscope.errors import InputError
from gradscope.integrations.verl_methods import changed_policy_loss, check_methods

try:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
    from verl.workers.config import PolicyLossConfig
except ImportError as error:
    raise ImportError("gradscope.integrations.verl works inside verl: pip install verl==0.9.1") from error

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
"""The registered policy loss, with the signature of vanilla: see `verl_methods.changed_policy_loss`."""
