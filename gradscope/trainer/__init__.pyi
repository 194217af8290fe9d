"""What is at the door: a file is loaded when one of its names is first used."""

from .checkpoints import OPTIMIZER as OPTIMIZER, list_checkpoints as list_checkpoints, step_of as step_of
from .config import TrainConfig as TrainConfig
from .loop import train as train
from .metrics import scalars as scalars
from .presets import PRESETS as PRESETS, get_preset as get_preset
from .rollout import Questions as Questions
