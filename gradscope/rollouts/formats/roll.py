"""ROLL's rollout_dump_data.step_{n}.jsonl: one line, a dictionary of lists with an entry per response.

If the data set has a column `messages`, responses were sampled from it through the chat template, and `prompt` is
unrelated. Otherwise `prompt` is the text that was tokenized, without a template.
"""

from __future__ import annotations

from gradscope.rollouts.formats.base import NO_SPECIAL_TOKENS, RETOKENISED, Column, Format

ROLL = Format(
    "roll",
    (
        Column("response", "responses", required=True),
        Column("reward", "scores", required=True),
        Column("step", "global_step"),
        Column("prompt", "messages", kind="chat"),
        Column("prompt"),
        Column("temperature", "sampling_params.temperature"),
        Column("temperature", "sampling_params.generation_config.temperature"),
    ),
    is_lists=True,
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "the log's scores precede the trainer's masking of responses by length or difficulty: all of them count here",
    ),
)
