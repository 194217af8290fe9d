"""Inside TRL's GRPOTrainer (trl 1.16): Reweight and Lopti, and callbacks that measure, look on, or log rollouts.

    from gradscope.integrations.trl import GradScopeCallback, GradScopeGRPOTrainer

    trainer = GradScopeGRPOTrainer(model, rewards, args, dataset, reweight_alpha=0.3, lopti_eta=0.5)
    trainer.add_callback(GradScopeCallback(trainer, every=10))
    trainer.train()

`GradScopeGRPOTrainer` is `ReweightLoptiMixin` before TRL's GRPOTrainer, and the mixin goes before any subclass of it.
The callback works with each of them, GRPOTrainer itself included, and so do two others: `TokenMonitor`, at every step
and with any loss, and `RolloutWriter`, where rows can say the loss.
"""

from __future__ import annotations

from gradscope.integrations.trl_batch import TRLSettings, batch_from_trl, response_denominators, trl_settings
from gradscope.integrations.trl_callback import GradScopeCallback
from gradscope.integrations.trl_methods import ReweightLoptiMixin
from gradscope.integrations.trl_monitor import TokenMonitor
from gradscope.integrations.trl_writer import RolloutWriter

__all__ = [  # noqa: F822 (made on first use)
    "GradScopeCallback",
    "GradScopeGRPOTrainer",
    "ReweightLoptiMixin",
    "RolloutWriter",
    "TRLSettings",
    "TokenMonitor",
    "batch_from_trl",
    "response_denominators",
    "trl_settings",
]


def __getattr__(name: str) -> object:
    """GradScopeGRPOTrainer is made when it is asked for: all else here can be read and tested without trl."""
    if name != "GradScopeGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trl import GRPOTrainer
    except ImportError as error:
        raise ImportError("GradScopeGRPOTrainer needs trl: pip install 'gradscope[trl]'") from error
    trainer = type(name, (ReweightLoptiMixin, GRPOTrainer), {"__doc__": ReweightLoptiMixin.__doc__})
    trainer.__module__ = __name__
    return globals().setdefault(name, trainer)
