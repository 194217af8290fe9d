"""The values of one row, checked: whatever a TokenBatch could not hold is refused with the row's place in the file."""

from __future__ import annotations

import numpy as np

from gradscope.errors import InputError, show
from gradscope.policy import Policy, check_prompt
from gradscope.rollouts.batch import LARGEST, ROUNDING, Response
from gradscope.rollouts.formats.base import Row

ID_COLUMNS = ("prompt_ids", "response_ids", "prompt", "response")

LARGEST_ID = 2**31
"""No vocabulary is that large; an id beyond is none."""


def parse_ids(row: Row, policy: Policy | None) -> tuple[list[int], list[int]]:
    """Ids of prompt and response, checked against the policy's vocabulary; text is encoded."""
    if "prompt_ids" in row.columns and "response_ids" in row.columns:
        return _check_ids(row, "prompt_ids", policy), _check_ids(row, "response_ids", policy)
    if "prompt" in row.columns and "response" in row.columns:
        return _encode(row, policy)
    has = ", ".join(name for name in ID_COLUMNS if name in row.columns) or "none of them"
    raise InputError(
        f"{row.place}: a row needs `prompt_ids` and `response_ids`, or `prompt` and `response`; this one has {has}"
    )


def check_sizes(row: Row, prompt_ids: list[int], response_ids: list[int], policy: Policy | None) -> None:
    """Raise InputError for an empty prompt or response, and for a row longer than the policy's context."""
    for name, ids in (("prompt", prompt_ids), ("response", response_ids)):
        if not ids:
            raise InputError(f"{row.place}: the {name} is empty; give at least one token, or leave the row out")
    context = policy.context if policy else None
    if context is not None and len(prompt_ids) + len(response_ids) > context:
        raise InputError(
            f"{row.place}: prompt and response have {len(prompt_ids)} + {len(response_ids)} tokens, longer than the "
            f"policy's context of {context}; shorten or leave out the row"
        )


def _check_ids(row: Row, name: str, policy: Policy | None) -> list[int]:
    ids = row.columns[name]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise InputError(f"{row.place}: `{row.label(name)}` is {show(ids)}; give a list of whole numbers")
    size = policy.vocab_size if policy else None
    limit = LARGEST_ID if size is None else size
    if ids and (min(ids) < 0 or max(ids) >= limit):
        position, token = next((at, i) for at, i in enumerate(ids) if not 0 <= i < limit)
        bound = f"0 to {limit - 1}" + ("" if size is None else ", the policy's vocabulary")
        raise InputError(
            f"{row.place}: `{row.label(name)}` holds {token} at position {position}, wanted {bound}; were these ids "
            "made with another tokenizer?"
        )
    return ids


def _encode(row: Row, policy: Policy | None) -> tuple[list[int], list[int]]:
    prompt, response = row.columns["prompt"], row.columns["response"]
    if policy is None:
        raise InputError(f"{row.place}: the row is text; give the policy too, or `prompt_ids` and `response_ids`")
    if not isinstance(response, str):
        raise InputError(f"{row.place}: `{row.label('response')}` is {show(response)}; give a string")
    check_prompt(prompt, row.place)
    try:
        return policy.encode_prompt(prompt), policy.encode_response(response)
    except InputError as error:
        raise InputError(f"{row.place}: {error}") from error


def parse_response(row: Row, prompt_ids: list[int], response_ids: list[int], group: int) -> Response:
    """All that a row says about its response, each value as long as it and finite where the response is kept."""
    kept = parse_mask(row, len(response_ids))
    advantage = row.columns.get("advantage")
    if advantage is not None:
        per_token = isinstance(advantage, list)
        advantage = parse_per_token(row, "advantage", kept) if per_token else _number(row, "advantage")
    temperature = _number(row, "temperature") if "temperature" in row.columns else 1.0
    if temperature < 1 / LARGEST:
        raise InputError(
            f"{row.place}: `{row.label('temperature')}` is {temperature:g}; give a positive one, {1 / LARGEST:g} or "
            "more (0, greedy, has no gradient)"
        )
    return Response(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=group,
        temperature=temperature,
        reward=_number(row, "reward") if "reward" in row.columns else None,
        advantage=advantage,
        old_logprobs=parse_logprobs(row, "old_logprobs", kept),
        ref_logprobs=parse_logprobs(row, "ref_logprobs", kept),
        sampler_logprobs=parse_logprobs(row, "sampler_logprobs", kept),
        response_mask=kept.tolist() if "response_mask" in row.columns else None,
    )


def parse_mask(row: Row, length: int) -> np.ndarray:
    """Which response tokens are kept, [length] of bool; all of them where the row has no mask."""
    if "response_mask" not in row.columns:
        return np.ones(length, dtype=bool)
    mask, name = row.columns["response_mask"], row.label("response_mask")
    if not isinstance(mask, list) or not set(map(type, mask)) <= {bool, int, float} or not set(mask) <= {0, 1}:
        raise InputError(f"{row.place}: `{name}` is {show(mask)}; give a list of true/false (or 1/0) per token")
    _check_length(row, "response_mask", mask, length)
    kept = np.array(mask, dtype=bool)
    if not kept.any():
        raise InputError(f"{row.place}: `{name}` keeps no token; leave the row out")
    return kept


def parse_logprobs(row: Row, name: str, kept: np.ndarray) -> list[float] | None:
    """Log-probabilities per response token, at most 0; None where the row has none."""
    if name not in row.columns:
        return None
    values = np.array(parse_per_token(row, name, kept))
    above = values > ROUNDING  # False for NaN
    if above.any():
        position = int(above.argmax())
        raise InputError(
            f"{row.place}: `{row.label(name)}` holds {values[position]:g} at position {position}; a log-probability is "
            "at most 0 (natural logarithm; are these probabilities?)"
        )
    return np.minimum(values, 0.0).tolist()


def parse_per_token(row: Row, name: str, kept: np.ndarray, *, holes: bool = False) -> list[float]:
    """One finite number per kept token; NaN where a dropped token's is unknown, and with `holes` a kept one's too."""
    values, label = row.columns[name], row.label(name)
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float, bool, type(None)}:
        raise InputError(f"{row.place}: `{label}` is {show(values)}; give a list of numbers, one per response token")
    _check_length(row, name, values, len(kept))
    try:
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    except OverflowError as error:
        raise InputError(f"{row.place}: `{label}` holds a number beyond 1e308; give finite ones") from error
    beyond = np.abs(numbers) > LARGEST  # False for NaN
    numbers[beyond & ~kept] = np.nan  # such as -inf for a token that was not sampled
    wrong = (beyond | (np.isnan(numbers) & (not holes))) & kept
    if wrong.any():
        position = int(wrong.argmax())
        raise InputError(
            f"{row.place}: `{label}` holds {numbers[position]} at position {position}; give a finite number within "
            f"±{LARGEST:g}, or drop the token with `response_mask`"
        )
    return numbers.tolist()


def _check_length(row: Row, name: str, values: list, length: int) -> None:
    if len(values) != length:
        raise InputError(
            f"{row.place}: `{row.label(name)}` has {len(values)} entries for {length} response tokens; give one per "
            "token"
        )


def _number(row: Row, name: str) -> float:
    value = row.columns[name]
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:  # NaN is not, either
        raise InputError(f"{row.place}: `{row.label(name)}` is {show(value)}; give a finite number within ±{LARGEST:g}")
    return float(value)
