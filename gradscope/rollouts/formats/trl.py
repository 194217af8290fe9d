"""TRL's GRPOTrainer with log_completions: completions/completions_{step:05d}.parquet, a row per completion.

`step` is the trainer's global step when the file was written; the completions are those of the newest generation before
it. An evaluation overwrites the completions of its step with its own; the trainer state in a neighbouring checkpoint
tells at which steps. From TRL 1.15 on, a prompt is the data set's string or messages; before, it is the prompt's ids
decoded without special tokens, even for a chat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import NO_SPECIAL_TOKENS, RETOKENISED, Format, Row, optional, required
from gradscope.rollouts.formats.columns import read_row
from gradscope.rollouts.formats.text import THOUGHT, opening_of
from gradscope.runs import parse_json_file

REPEATED = "the previous file holds the same generation (TRL writes the newest one at every logging step)"
EVALUATION = "TRL evaluated at their step and overwrote the training completions with the evaluation's"
MARKS_LOST = (
    "the prompt is a chat without its special tokens (as TRL up to 1.14 wrote it): the template's marks are lost, so "
    "the ids differ from those in training"
)
MAYBE_LOST = (
    "the prompt is a string without special tokens: if it was a chat (as TRL up to 1.14 wrote it), the template's "
    "marks are lost, and the ids differ from those in training"
)
TWICE_BEGUN = (
    "the prompt begins with the BOS token that the tokenizer adds: TRL samples such a prompt with that token twice, "
    "here it occurs once"
)


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    earlier, opening = None, opening_of(policy)
    for path, group in groupby(records, key=lambda record: record.path):
        file, evaluated = list(group), _evaluated(path.parent)
        content = [{name: v for name, v in record.columns.items() if name != "step"} for record in file]
        for record in file:
            row = read_row(TRL, record)
            left_out = REPEATED if content == earlier else None
            if row.step == 0 or row.step in evaluated:  # nothing is trained before the first step
                left_out = EVALUATION
            doubts = _doubts(row.columns.get("prompt"), policy, opening)
            yield replace(row, left_out=left_out, remarks=row.remarks + doubts)
        earlier = content


def _doubts(prompt: Any, policy: Policy | None, opening: str | None) -> tuple[str, ...]:
    """Return remarks on a string prompt."""
    tokenizer = policy.tokenizer if policy else None
    if tokenizer is None or not isinstance(prompt, str):
        return ()
    if any(token in prompt for token in tokenizer.all_special_tokens):
        begins = tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)
        adds = begins and tokenizer(prompt).input_ids[:2] == [tokenizer.bos_token_id] * 2
        return (TWICE_BEGUN,) if adds else ()
    if opening is None:
        return ()
    if not opening:
        return (MAYBE_LOST,)
    return (MARKS_LOST,) if THOUGHT.sub("", prompt).rstrip().endswith(opening) else ()


def _evaluated(folder: Path) -> frozenset[int]:
    """Return the steps at which the trainer evaluated, from the newest checkpoint next to the folder `completions`."""
    states = folder.parent.glob("checkpoint-*/trainer_state.json") if folder.name == "completions" else ()
    states = sorted(states, key=lambda path: (len(path.parent.name), path))
    if not states:
        return frozenset()
    try:
        history = parse_json_file(states[-1]).get("log_history", [])
        return frozenset(e["step"] for e in history if "step" in e and any(n.startswith("eval_") for n in e))
    except (OSError, ValueError, AttributeError, TypeError):  # not a trainer state
        return frozenset()


TRL = Format(
    "trl",
    (
        *required(step="step", prompt="prompt", response="completion", advantage="advantage"),
        *optional(chat_template_kwargs="chat_template_kwargs", response_ids="completion_ids"),
    ),
    _rows,
    has_parts=True,  # the weights of the reward functions are not in the file: only the advantage is usable
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "TRL's loss settings are not in the log: clip ratios and KL are the paper's unless set by flags, and truncated "
        "completions count, even if mask_truncated_completions excluded them from TRL's loss",
        "when TRL samples with vLLM, it weights a response by the ratio of its own probability to vLLM's, or by 0 if "
        "the ratio exceeds 3 (default vllm_importance_sampling_mode, sequence_mask): these factors are not in the log, "
        "so the measured weights lack them",
        "TRL's tools and chat template are not in the log: chats are rendered with the policy's own template",
    ),
)
