"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), short enough to read in one sitting.

Read `loop` first: sample, score, advantages, passes, log, checkpoint. The loss and the optimizer steps are those of
`gradscope.objective`.
"""

from gradscope.trainer.checkpoints import OPTIMIZER, list_checkpoints, step_of
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.loop import train
from gradscope.trainer.metrics import scalars
from gradscope.trainer.presets import PRESETS, get_preset
from gradscope.trainer.rollout import Questions

__all__ = [
    "OPTIMIZER", "PRESETS", "Questions", "TrainConfig", "get_preset", "list_checkpoints", "scalars", "step_of", "train",
]  # fmt: skip
