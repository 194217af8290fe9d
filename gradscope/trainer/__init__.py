"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), read in one sitting.

Read `train` first: sample, score, advantages, optimizer steps, log, checkpoint. The loss and the code of an optimizer
step are in `gradscope.objective`.
"""

from gradscope.trainer.checkpoints import OPTIMIZER, list_checkpoints, step_of
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.presets import PRESETS, get_preset
from gradscope.trainer.rollout import Questions
from gradscope.trainer.train import train

__all__ = [
    "OPTIMIZER", "PRESETS", "Questions", "TrainConfig", "get_preset", "list_checkpoints", "step_of", "train",
]  # fmt: skip
