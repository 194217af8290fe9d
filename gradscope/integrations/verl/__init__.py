"""Advantage Reweighting, and Lopti as far as verl's extension points allow, in verl (0.9.1). Import it inside verl.

    VERL_USE_EXTERNAL_MODULES=gradscope.integrations.verl python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.actor.policy_loss._target_=gradscope.integrations.verl.GradScopePolicyLossConfig \\
        actor_rollout_ref.actor.policy_loss.loss_mode=gradscope \\
        +actor_rollout_ref.actor.policy_loss.reweight_alpha=0.3

Importing this module registers the policy loss "gradscope": verl's own "vanilla" with changed advantages (see
`verl.methods`). verl's configuration refuses unknown fields; `_target_` names a class that adds some. The environment
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

from importlib.util import find_spec

if find_spec("verl") is not None:
    from gradscope.integrations.verl.policy_loss import LOSS_MODE, GradScopePolicyLossConfig, gradscope_policy_loss

__all__ = ["LOSS_MODE", "GradScopePolicyLossConfig", "gradscope_policy_loss"]


def __getattr__(name: str) -> object:
    """Say what the names of `__all__` need, where verl is not installed."""
    if name in __all__:
        raise ImportError("gradscope.integrations.verl works inside verl: pip install verl==0.9.1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
