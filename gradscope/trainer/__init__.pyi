"""What is at the door: a file is loaded when one of its names is first used."""

from .checkpoints import OPTIMIZER as OPTIMIZER, list_checkpoints as list_checkpoints, step_of as step_of
from .config import TrainConfig as TrainConfig
from .loop import train as train
from .metrics import scalars as scalars
from .plan import (
    GIB as GIB,
    Plan as Plan,
    find_lengths as find_lengths,
    plan_training as plan_training,
    step_rates as step_rates,
)
from .presets import PRESETS as PRESETS, get_preset as get_preset
from .rollout import Questions as Questions
