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
    MADE_AGAIN,
    Column,
    Format,
    Row,
    need,
    need_objects,
    optional,
    required,
    whole_number,
)
from gradscope.rollouts.formats.columns import read_row
from gradscope.rollouts.formats.text import read_prompt, read_response

UNSAMPLED = "a rollout of their group has no completion: torchtitan drops such groups before training"
WITHOUT_IDS = (
    "the log has no ids for them (set the recorder's log_tensors), and their text cannot be tokenized again: several "
    "turns, thoughts, tool calls, or an answer that was not parsed"
)
FLAT = "all advantages of their group are 0: by default, torchtitan drops groups of equal rewards before training"
NEWER = "some of their tokens were sampled by newer weights than those that began their group"
UNKNOWN_LOGPROB = "tokens whose log-probability by the sampler is not finite are dropped, as in torchtitan's loss"


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    groups: dict[tuple, list[Record]] = {}
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
    began: dict[int, int] = {}
    for (*_, run), group in groups.items():
        began[run] = min(_step(group), began.get(run, _step(group)))
    for number, ((*_, run), group) in enumerate(groups.items()):
        if any(later > run and _step(group) >= first for later, first in began.items()):
            yield from (Row(record.place, {}, _step(group), left_out=MADE_AGAIN) for record in group)
        else:
            yield from _group_rows(number, group)


def _step(group: list[Record]) -> float:
    """Return the number of the oldest weights that sampled a group; infinity if the log has none."""
    return min(
        (v for record in group for turn in _turns(record) for v in _versions(record, turn)[:1]), default=math.inf
    )


def _group_rows(number: int, group: list[Record]) -> Iterator[Row]:
    step = None if _step(group) == math.inf else _step(group)
    unsampled = any(not any(turn.get("completion_token_ids", True) for turn in _turns(record)) for record in group)
    flat = len(group) > 1 and all(record.columns.get("advantage") == 0 for record in group)
    for record in group:
        if unsampled:
            yield Row(record.place, {}, step, left_out=UNSAMPLED)
            continue
        known = {name: record.columns[name] for name in ("advantage", "reward") if name in record.columns}
        known |= {"group": number, "temperature": 1.0}
        newest = max((version for turn in _turns(record) for version in _versions(record, turn)), default=step)
        remarks = ((FLAT,) if flat else ()) + ((NEWER,) if newest != step else ())
        if all("completion_token_ids" in turn for turn in _turns(record)):
            yield from _sequences(record, known, step, remarks)
        else:
            yield _text(record, known, step, remarks)


def _sequences(record: Record, known: dict[str, Any], step: int | None, remarks: tuple[str, ...]) -> Iterator[Row]:
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
        finite = [not isinstance(value, float) or math.isfinite(value) for value in logprobs]
        sequences[-1]["completion_token_ids"] += prompt[len(before) :] + completion
        sequences[-1]["loss_mask"] += [False] * between + finite
        sequences[-1]["completion_logprobs"] += [None] * between + logprobs
        remarks = remarks if all(finite) or UNKNOWN_LOGPROB in remarks else (*remarks, UNKNOWN_LOGPROB)
        before = prompt + completion
    for part, values in enumerate(sequences):
        place = record.place if len(sequences) == 1 else f"{record.place}, sequence {part}"
        row = read_row(SEQUENCE, Record(record.path, place, values), known | {"step": step})
        yield replace(row, remarks=remarks)


def _text(record: Record, known: dict[str, Any], step: int | None, remarks: tuple[str, ...]) -> Row:
    turns = _turns(record)
    message = turns[0].get("completion_message") if turns else None
    if len(turns) != 1 or not isinstance(message, dict) or message.keys() - {"role", "content"}:
        return Row(record.place, {}, step, left_out=WITHOUT_IDS)
    chat = need(Record(record.path, record.place, turns[0]), "prompt_messages")
    known["prompt"], _ = read_prompt(chat, f"{record.place}: `prompt_messages`")
    known["response"], _ = read_response([message], f"{record.place}: `completion_message`")
    return Row(record.place, known, step, remarks=(*remarks, AS_TEXT))


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


SEQUENCE = Format(
    "sequence",
    (
        *required(ids="completion_token_ids", mask="loss_mask"),
        *optional(old_logprobs="completion_logprobs"),
    ),
)
"""Turns that continue each other."""

TORCHTITAN = Format(
    "torchtitan",
    (
        *(Column(name, required=True) for name in ("is_validation", "group_id", "rollout_id", "turns")),
        *(Column(name) for name in ("reward", "advantage")),
    ),
    _rows,
    notes=(
        "by default, torchtitan's recorder keeps only the rollouts with the lowest and highest reward of each group: "
        "these are not a random sample of the training data, though advantages are those of whole groups",
        "torchtitan's loss and its sampler's log-probabilities are at temperature 1, whatever the sampling temperature "
        "(default 0.8, top-p 0.95): π is that of the loss",
        "ratios are relative to the sampler's completion_logprobs, as in training, if the log has them; the later step "
        "at which torchtitan trained on a response is not in the log",
    ),
    first_step=0,
)
