"""ROLL's rollout_dump_data.step_{n}.jsonl: one line, a dictionary of lists with an entry per response.

Responses were sampled from `messages`, through the chat template, wherever the data set has such a column; `prompt` is
then another column of the data set, and without messages the text that was tokenized as it stands.
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
    """Return the chat in `messages`, a JSON text or a list."""
    given = record.columns["messages"]
    try:
        found = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InputError(f"{record.place}: `messages` is {show(given)}; wanted is a chat, as JSON") from error
    return prompt_of(Record(record.path, record.place, {"messages": found}), "messages")


def _temperature(settings: Any) -> int | float | None:
    """Return the temperature in the JSON text sampling_params; None if it has none."""
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
        "the log has scores before the trainer masked responses by length or difficulty: all of them count here",
    ),
    answers=Answers(
        group="identical prompts of a step, where ROLL takes them by place, `num_return_sequences` at a time",
        step=(
            "`global_step`, from 0; `checkpoint-N` is the one after it, and the next one is taken; asynchronous "
            "runs sample before (not in the log)"
        ),
        sampled="all of the text; no end-of-sequence token",
        logprobs="none; the temperature is in `sampling_params`",
        left_out="none",
        checked="ROLL 8eb27cc2 (2026-08-19): a writer after its source; 2026-11-27",
    ),
)
