"""ROLL's rollout_dump_data.step_{n}.jsonl: one line, a dictionary of lists with an entry per response.

If the data set has a column `messages`, responses were sampled from it through the chat template, and `prompt` is
unrelated. Otherwise `prompt` is the text that was tokenized, without a template.
"""

from __future__ import annotations

from typing import Any

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import (
    NO_SPECIAL_TOKENS,
    RETOKENISED,
    Answers,
    Format,
    Row,
    list_by_list,
    pick,
    whole_number,
)
from gradscope.rollouts.formats.text import prompt_of
from gradscope.runs import parse_json

NEEDS = ("responses", "scores")
TAKES = ("global_step", "prompt", "messages", "sampling_params")
NAMES = {"response": "responses", "reward": "scores", "temperature": "sampling_params"}


def _row(record: Record, _policy: Policy | None) -> Row:
    columns = pick(record, {"response": "responses", "reward": "scores"})
    chat = "messages" in record.columns
    columns["prompt"] = _prompt(record) if chat else prompt_of(record, "prompt")
    temperature = _temperature(record.columns.get("sampling_params"))
    if temperature is not None:
        columns["temperature"] = temperature
    return Row(record.place, columns, whole_number(record, "global_step"), NAMES)


def _prompt(record: Record) -> Any:
    """Return the chat in `messages`, a JSON string or a list."""
    given = record.columns["messages"]
    try:
        found = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InputError(f"{record.place}: `messages` is {show(given)}; give a chat, as JSON") from error
    return prompt_of(Record(record.path, record.place, {"messages": found}), "messages")


def _temperature(settings: Any) -> int | float | None:
    """Return the temperature in sampling_params, a JSON string or object; None if it has none."""
    try:
        found = parse_json(settings) if isinstance(settings, str) else settings
    except ValueError:
        return None
    for place in (found, found.get("generation_config") if isinstance(found, dict) else None):
        if isinstance(place, dict) and isinstance(place.get("temperature"), (int, float)):
            return place["temperature"]
    return None


ROLL = Format(
    "roll",
    needs=frozenset(NEEDS),
    knows=(
        "global_step id source difficulty prompt messages ground_truth case_type test_case_function test_cases tag "
        "domain sampling_params"
    ),
    rows=list_by_list(_row, NEEDS, TAKES),
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
        "the log's scores precede the trainer's masking of responses by length or difficulty: all of them count here",
    ),
    answers=Answers(
        group="identical prompts of a step; ROLL groups by position, `num_return_sequences` at a time",
        step=(
            "`global_step`, from 0; `checkpoint-N` is the checkpoint after step N, so step N + 1 is read; asynchronous "
            "runs sample earlier (not in the log)"
        ),
        sampled="the whole text; no end-of-sequence token",
        logprobs="none; the temperature is in `sampling_params`",
        left_out="none",
        checked="ROLL 8eb27cc2 (2026-08-19): a writer after its source; 2026-11-27",
    ),
)
