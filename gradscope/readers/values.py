"""The values of one row, checked: whatever a TokenBatch could not hold is refused with the row's place in the file."""

from __future__ import annotations

import json
import math
from typing import Any

from gradscope.batch import Response
from gradscope.errors import InputError
from gradscope.models import Policy, check_prompt

ID_COLUMNS = ("prompt_ids", "response_ids", "prompt", "response")

ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0: half-precision trainers write such numbers; they are read as 0."""


def parse_ids(place: str, row: dict[str, Any], policy: Policy | None) -> tuple[list[int], list[int]]:
    """Ids of prompt and response, checked against the policy's vocabulary and context; text is encoded."""
    if "prompt_ids" in row and "response_ids" in row:
        prompt_ids, response_ids = (_check_ids(place, row, name, policy) for name in ("prompt_ids", "response_ids"))
    elif "prompt" in row and "response" in row:
        prompt_ids, response_ids = _encode(place, row, policy)
    else:
        has = ", ".join(name for name in ID_COLUMNS if name in row) or "none of them"
        raise InputError(
            f"{place}: a row needs `prompt_ids` and `response_ids`, or `prompt` and `response`; this one has {has}"
        )
    for name, ids in (("prompt", prompt_ids), ("response", response_ids)):
        if not ids:
            raise InputError(f"{place}: the {name} is empty; give at least one token, or leave the row out")
    context = policy.context if policy else None
    if context is not None and len(prompt_ids) + len(response_ids) > context:
        raise InputError(
            f"{place}: prompt and response have {len(prompt_ids)} + {len(response_ids)} tokens, longer than the "
            f"policy's context of {context}; shorten or leave out the row"
        )
    return prompt_ids, response_ids


def _check_ids(place: str, row: dict[str, Any], name: str, policy: Policy | None) -> list[int]:
    ids = row[name]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise InputError(f"{place}: `{name}` is {show(ids)}; give a list of whole numbers")
    size = policy.vocab_size if policy else None
    for position, token in enumerate(ids):
        if token < 0 or (size is not None and token >= size):
            bound = "0 or more" if size is None else f"0 to {size - 1}, the policy's vocabulary"
            raise InputError(
                f"{place}: `{name}` holds {token} at position {position}, wanted {bound}; were these ids made with "
                "another tokenizer?"
            )
    return ids


def _encode(place: str, row: dict[str, Any], policy: Policy | None) -> tuple[list[int], list[int]]:
    prompt, response = row["prompt"], row["response"]
    if policy is None:
        raise InputError(f"{place}: the row is text; give the policy too, or `prompt_ids` and `response_ids`")
    if not isinstance(response, str):
        raise InputError(f"{place}: `response` is {show(response)}; give a string")
    check_prompt(prompt, place)
    try:
        return policy.encode_prompt(prompt), policy.encode_response(response)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def parse_response(
    place: str, row: dict[str, Any], prompt_ids: list[int], response_ids: list[int], group: int
) -> Response:
    """All that a row says about its response, each value as long as it and finite where the response is kept."""
    kept = _mask(place, row, len(response_ids))
    advantage = row.get("advantage")
    if advantage is not None:
        per_token = isinstance(advantage, list)
        advantage = _per_token(place, row, "advantage", kept) if per_token else _number(place, row, "advantage")
    temperature = _number(place, row, "temperature") if "temperature" in row else 1.0
    if temperature <= 0:
        raise InputError(f"{place}: `temperature` is {temperature:g}; give a positive one (0, greedy, has no gradient)")
    return Response(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=group,
        temperature=temperature,
        reward=_number(place, row, "reward") if "reward" in row else None,
        advantage=advantage,
        old_logprobs=_logprobs(place, row, "old_logprobs", kept),
        ref_logprobs=_logprobs(place, row, "ref_logprobs", kept),
        response_mask=kept if "response_mask" in row else None,
    )


def _mask(place: str, row: dict[str, Any], length: int) -> list[bool]:
    mask = row.get("response_mask", [True] * length)
    if not isinstance(mask, list) or not all(isinstance(m, (int, float)) and m in (0, 1) for m in mask):
        raise InputError(f"{place}: `response_mask` is {show(mask)}; give a list of true/false (or 1/0) per token")
    _check_length(place, "response_mask", mask, length)
    if not any(mask):
        raise InputError(f"{place}: `response_mask` keeps no token; leave the row out")
    return [bool(m) for m in mask]


def _logprobs(place: str, row: dict[str, Any], name: str, kept: list[bool]) -> list[float] | None:
    if name not in row:
        return None
    values = _per_token(place, row, name, kept)
    for position, value in enumerate(values):
        if value > ROUNDING:
            raise InputError(
                f"{place}: `{name}` holds {value:g} at position {position}; a log-probability is at most 0 (natural "
                "logarithm; are these probabilities?)"
            )
    return [min(value, 0.0) if value == value else value for value in values]


def _per_token(place: str, row: dict[str, Any], name: str, kept: list[bool]) -> list[float]:
    """One finite number per kept token; NaN where a dropped token's is unknown."""
    values = row[name]
    if not isinstance(values, list) or not all(v is None or isinstance(v, (int, float)) for v in values):
        raise InputError(f"{place}: `{name}` is {show(values)}; give a list of numbers, one per response token")
    _check_length(place, name, values, len(kept))
    values = [math.nan if v is None else float(v) for v in values]
    for position, (value, keep) in enumerate(zip(values, kept, strict=True)):
        if math.isinf(value) or (keep and math.isnan(value)):
            raise InputError(
                f"{place}: `{name}` holds {value} at position {position}; give a finite number, or drop the token with "
                "`response_mask`"
            )
    return values


def _check_length(place: str, name: str, values: list, length: int) -> None:
    if len(values) != length:
        raise InputError(
            f"{place}: `{name}` has {len(values)} entries for {length} response tokens; give one per token"
        )


def _number(place: str, row: dict[str, Any], name: str) -> float:
    value = row[name]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{place}: `{name}` is {show(value)}; give a finite number")
    return float(value)


def show(value: Any) -> str:
    """A value in an error: short, on one line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "…"
