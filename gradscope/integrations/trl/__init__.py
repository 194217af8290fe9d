"""Integration with TRL's trainers (trl 1.16): Reweight, Lopti, and callbacks that measure, monitor or log training.

    from gradscope.integrations.trl import GradScopeCallback, GradScopeGRPOTrainer

    trainer = GradScopeGRPOTrainer(model, rewards, args, dataset, reweight_alpha=0.3, lopti_eta=0.5)
    trainer.add_callback(GradScopeCallback(trainer, every=10))
    trainer.train()

`GradScopeGRPOTrainer` combines `ReweightLoptiMixin` with TRL's GRPOTrainer; put the mixin before a subclass of your
own. The callback works with all of them, including GRPOTrainer itself. So do two other callbacks: `TokenMonitor`, at
every step, and `RolloutWriter`. All three take any loss, from the trainer's own backward pass (`watch.py`), and
SFTTrainer, DPOTrainer and KTOTrainer, too (`texts.py`).
"""

from __future__ import annotations

from gradscope.integrations.trl.batch import TRLSettings, batch_from_trl, response_denominators, trl_settings
from gradscope.integrations.trl.callback import GradScopeCallback
from gradscope.integrations.trl.mixin import ReweightLoptiMixin
from gradscope.integrations.trl.monitor import TokenMonitor
from gradscope.integrations.trl.recorder import SpikeRecorder
from gradscope.integrations.trl.writer import RolloutWriter

__all__ = [
    "GradScopeCallback",
    "GradScopeGRPOTrainer",
    "ReweightLoptiMixin",
    "RolloutWriter",
    "SpikeRecorder",
    "TRLSettings",
    "TokenMonitor",
    "batch_from_trl",
    "response_denominators",
    "trl_settings",
]


def __getattr__(name: str) -> object:
    """Make GradScopeGRPOTrainer on first use, so that everything else here can be imported without trl."""
    if name != "GradScopeGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from trl import GRPOTrainer
    except ImportError as error:
        raise ImportError("GradScopeGRPOTrainer needs trl: pip install 'gradscope[trl]'") from error
    trainer = type(name, (ReweightLoptiMixin, GRPOTrainer), {"__doc__": ReweightLoptiMixin.__doc__})
    trainer.__module__ = __name__
    return globals().setdefault(name, trainer)
