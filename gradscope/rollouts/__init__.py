"""Rollouts: `TokenBatch` and its alignment rule, and readers of rollout files, in `formats` a file per family."""

from gradscope.rollouts.batch import LARGEST, Note, Response, TokenBatch, collate
from gradscope.rollouts.caveats import own_first, own_responses, served_prompts
from gradscope.rollouts.check_batch import check_batch
from gradscope.rollouts.dump import Dump
from gradscope.rollouts.files import LOSS_KEY, RUN_KEY, list_files, rollouts_hash
from gradscope.rollouts.formats.base import Column, Format
from gradscope.rollouts.formats.native import write_rollouts
from gradscope.rollouts.group_rewards import group_moments
from gradscope.rollouts.reading import (
    READER,
    READERS,
    BatchLike,
    LogSteps,
    Step,
    find_reader,
    list_steps,
    read_checkpoint_dump,
    read_dump,
    read_inputs,
    read_logged,
    read_rollouts,
)
from gradscope.rollouts.trained_run import Precision, TrainedRun

__all__ = [
    "LARGEST", "LOSS_KEY", "READER", "READERS", "RUN_KEY", "BatchLike", "Column", "Dump", "Format", "LogSteps", "Note",
    "Precision", "Response", "Step", "TokenBatch", "TrainedRun", "check_batch", "collate", "find_reader",
    "group_moments", "list_files", "list_steps", "own_first", "own_responses",
    "read_checkpoint_dump", "read_dump", "read_inputs", "read_logged", "read_rollouts", "rollouts_hash",
    "served_prompts", "write_rollouts",
]  # fmt: skip
