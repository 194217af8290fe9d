"""ROLL's rollout_dump_data.step_{n}.jsonl: one line, a dictionary of lists with an entry per response."""

from __future__ import annotations

from typing import Any

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

NEEDS = ("prompt", "responses", "scores")
NAMES = {"response": "responses", "reward": "scores", "temperature": "sampling_params"}


def _row(record: Record, _policy: Policy | None) -> Row:
    columns = pick(record, {"response": "responses", "reward": "scores"})
    if "prompt" in record.columns:
        columns["prompt"] = prompt_of(record, "prompt")
    temperature = _temperature(record.columns.get("sampling_params"))
    if temperature is not None:
        columns["temperature"] = temperature
    return Row(record.place, columns, whole_number(record, "global_step"), NAMES)


def _temperature(settings: Any) -> int | float | None:
    """The temperature in sampling_params, a JSON text; None where it says none."""
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
        "global_step id source difficulty messages ground_truth case_type test_case_function test_cases tag domain "
        "sampling_params"
    ),
    rows=list_by_list(_row, NEEDS, ("global_step", "sampling_params")),
    notes=(
        RETOKENISED,
        NO_SPECIAL_TOKENS,
    ),
    answers=Answers(
        group="identical prompts of a step",
        step="`global_step`",
        sampled="all of the text; no end-of-sequence token",
        logprobs="none; the temperature is in `sampling_params`",
        left_out="none",
        checked="after the source",
    ),
)
