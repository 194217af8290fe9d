"""torchtitan's rollout recorder (experiments/rl): rollout_samples.jsonl, a line per rollout with its turns.

A turn holds its completion and the whole prompt. If the prompt continues the previous turn, both form one sequence, as
in torchtitan's training samples. The recorder's log_tensors adds ids, log_logprobs adds log-probabilities.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    AS_TEXT,
    EVALUATED,
    Answers,
    Format,
    Row,
    need,
    need_objects,
    pick,
    whole_number,
)
from gradscope.rollouts.formats.sequences import split_sequence
from gradscope.rollouts.formats.text import prompt_of, response_of

UNSAMPLED = "a rollout of their group has no completion: torchtitan drops such groups before training"
WITHOUT_IDS = (
    "the log has no ids for them (set the recorder's log_tensors), and their text cannot be tokenized again: several "
    "turns, thoughts, tool calls, or an answer that was not parsed"
)
FLAT = "all advantages of their group are 0: by default, torchtitan drops groups of equal rewards before training"
NEWER = "some of their tokens were sampled by newer weights than those that began their group"
UNKNOWN_LOGPROB = "tokens whose log-probability by the sampler is not finite are dropped, as in torchtitan's loss"


def _rows(records: Iterable[Record], _policy: Policy | None) -> Iterator[Row]:
    groups: dict[object, list[Record]] = {}
    seen: Counter[object] = Counter()
    for record in records:
        if record.columns.get("is_validation") is True:
            yield Row(record.place, {}, left_out=EVALUATED)
        else:
            # A resumed run restarts its group numbers and its data, in the same file.
            prompt = str([turn.get("prompt_messages") for turn in _turns(record)[:1]])
            again = whole_number(record, "group_id"), prompt, whole_number(record, "rollout_id")
            groups.setdefault((*again[:2], seen[again]), []).append(record)
            seen[again] += 1
    for number, group in enumerate(groups.values()):
        yield from _group_rows(number, group)


def _group_rows(number: int, group: list[Record]) -> Iterator[Row]:
    versions = [version for record in group for turn in _turns(record) for version in _versions(record, turn)[:1]]
    step = min(versions, default=None)
    unsampled = any(not any(turn.get("completion_token_ids", True) for turn in _turns(record)) for record in group)
    flat = len(group) > 1 and all(record.columns.get("advantage") == 0 for record in group)
    for record in group:
        if unsampled:
            yield Row(record.place, {}, step, left_out=UNSAMPLED)
            continue
        columns = pick(record, {"advantage": "advantage", "reward": "reward"}) | {"group": number, "temperature": 1.0}
        newest = max((version for turn in _turns(record) for version in _versions(record, turn)), default=step)
        remarks = ((FLAT,) if flat else ()) + ((NEWER,) if newest != step else ())
        if all("completion_token_ids" in turn for turn in _turns(record)):
            yield from _sequences(record, columns, step, remarks)
        else:
            yield _text(record, columns, step, remarks)


def _sequences(record: Record, columns: dict[str, Any], step: int | None, remarks: tuple[str, ...]) -> Iterator[Row]:
    """Yield a row per sequence of turns in which each prompt continues the previous turn."""
    sequences: list[dict[str, list]] = []
    before: list[int] = []
    for turn in _turns(record):
        own = Record(record.path, record.place, turn)
        prompt, completion = _list(own, "prompt_token_ids"), _list(own, "completion_token_ids")
        logprobs = _list(own, "completion_logprobs") if "completion_logprobs" in turn else [None] * len(completion)
        if not completion:
            continue
        if not sequences or prompt[: len(before)] != before:
            sequences.append({"completion_token_ids": [], "loss_mask": [], "completion_logprobs": []})
            before = []
        between = len(prompt) - len(before)
        known = [not isinstance(value, float) or math.isfinite(value) for value in logprobs]
        sequences[-1]["completion_token_ids"] += prompt[len(before) :] + completion
        sequences[-1]["loss_mask"] += [False] * between + known
        sequences[-1]["completion_logprobs"] += [None] * between + logprobs
        remarks = remarks if all(known) or UNKNOWN_LOGPROB in remarks else (*remarks, UNKNOWN_LOGPROB)
        before = prompt + completion
    for part, values in enumerate(sequences):
        place = record.place if len(sequences) == 1 else f"{record.place}, sequence {part}"
        arrays = {
            "ids": "completion_token_ids",
            "mask": "loss_mask",
            "per_token": {"old_logprobs": "completion_logprobs"},
        }
        row = split_sequence(Record(record.path, place, values), **arrays, columns=columns, step=step)
        yield replace(row, remarks=remarks)


def _text(record: Record, columns: dict[str, Any], step: int | None, remarks: tuple[str, ...]) -> Row:
    turns = [Record(record.path, record.place, turn) for turn in _turns(record)]
    message = turns[0].columns.get("completion_message")
    if len(turns) > 1 or not isinstance(message, dict) or message.keys() - {"role", "content"}:
        return Row(record.place, {}, step, left_out=WITHOUT_IDS)
    said = Record(record.path, record.place, {"completion_message": [message]})
    columns |= {"prompt": prompt_of(turns[0], "prompt_messages"), "response": response_of(said, "completion_message")}
    return Row(record.place, columns, step, remarks=(*remarks, AS_TEXT))


def _turns(record: Record) -> list[dict[str, Any]]:
    return need_objects(record, "turns")


def _versions(record: Record, turn: dict[str, Any]) -> list[int]:
    """Return the oldest and newest weights that sampled a turn, as numbers of optimizer steps."""
    own = Record(record.path, record.place, turn)
    found = [whole_number(own, name) for name in ("min_policy_version", "max_policy_version")]
    return [version for version in found if version is not None]


def _list(turn: Record, name: str) -> list[Any]:
    values = need(turn, name)
    if not isinstance(values, list):
        raise InputError(f"{turn.place}: `{name}` is {show(values)}; give a list, one entry per token")
    return values


TORCHTITAN = Format(
    "torchtitan",
    needs=frozenset({"is_validation", "group_id", "rollout_id", "turns"}),
    knows="status reward reward_breakdown advantage",
    rows=_rows,
    notes=(
        "by default, torchtitan's recorder keeps only the rollouts with the lowest and highest reward of each group: "
        "these are not a random sample of the training data, though advantages are those of whole groups",
        "torchtitan's loss and its sampler's log-probabilities are at temperature 1, whatever the sampling temperature "
        "(default 0.8, top-p 0.95): π is that of the loss",
        "ratios are relative to the sampler's completion_logprobs, as in training, if the log has them; the later step "
        "at which torchtitan trained on a response is not in the log",
    ),
    first_step=0,
    answers=Answers(
        group="`group_id` and the first prompt",
        step="the oldest `min_policy_version` of the group: optimizer steps of the sampling weights, from 0; newer "
        "weights may have sampled later tokens (a note counts these responses)",
        sampled="all completions, but not prompts or the environment's replies between them; tokens without a finite "
        "log π are dropped, as in the loss",
        logprobs="`completion_logprobs`: vLLM's, at temperature 1, denominator of the ratios, as in training",
        left_out="validations; groups with a rollout that has no completion; without ids, text that cannot be "
        "tokenized again",
        checked="0.3.0: its own code (that of b5bcd76c, 2026-08-21), 2026-11-27",
    ),
)
