"""GRPO and REINFORCE++ with Advantage Reweighting and Lopti (arXiv:2505.12929), short enough to read in one sitting.

Read `loop` first: sample, score, advantages, passes, log, checkpoint. The loss is `gradscope.objective`'s, the
optimizer steps are those of `gradscope.steps`.
"""

from gradscope.trainer.config import TrainConfig
from gradscope.trainer.loop import train
from gradscope.trainer.presets import PRESETS, get_preset

__all__ = ["PRESETS", "TrainConfig", "get_preset", "train"]
