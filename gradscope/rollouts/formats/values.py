"""Parse and check the values of one row; an error names the row's place in the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gradscope.errors import InputError, show
from gradscope.policy import Policy, check_prompt
from gradscope.rollouts.batch import CANDIDATES, LARGEST, LOGPROBS, ROUNDING, Response
from gradscope.rollouts.formats.base import ReadingOptions, Row
from gradscope.rollouts.formats.text import CUT
from gradscope.runs import parse_json

NUMBERS = (
    *("group_reward_mean", "group_reward_std", "grad_norm", "loss_scale", "process", "micro_batch"),
    *("pair", "chosen", "z0"),
)
"""Columns with a number per response that has no rule of its own."""
Encoded = TypeVar("Encoded")
SURPLUS = 0.05
"""By how much the sum of a teacher's probabilities may exceed 1, as half-precision servers round them."""
LARGEST_ID = 2**31
"""No vocabulary has an id this large."""
MISSING = "they have no prompt or no response"
FOREIGN = "they hold ids that are not in the policy's vocabulary"
TOO_LONG = "they are too long for the policy"
GREEDY = "their sampling temperature is 0 (greedy), below 0 or unknown: there is no gradient to measure"
DATED = (
    "the chat template puts in a date, which the log does not tell: it was taken as {}, when the log's file was last "
    'written; give the run\'s by --chat-template-kwargs \'{{"strftime_now": "YYYY-MM-DD"}}\''
)

ANOTHER_DATE = "1907-08-01T03:04:05"
"""A date on which no log was written: a template that puts in the date gives other ids for it."""


class Unfit(InputError):
    """A row that cannot be measured, though others of its log may; `reason` is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_ids(row: Row, policy: Policy | None, options: ReadingOptions) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Return the ids of prompt and response, checked against the policy's vocabulary, and remarks.

    Where a row has ids they are taken, else its text is tokenized.
    """
    parts = ("prompt", "response")
    has = [name for part in parts for name in (f"{part}_ids", part) if name in row.columns]
    if not all({part, f"{part}_ids"} & {*has} for part in parts):
        raise Unfit(
            MISSING,
            f"{row.place}: a row needs `prompt_ids` or `prompt`, and `response_ids` or `response`; this one has "
            f"{', '.join(has) or 'none of them'}",
        )
    if policy is None and not {"prompt_ids", "response_ids"} <= {*has}:
        raise InputError(f"{row.place}: the row is text; give the policy too, or `prompt_ids` and `response_ids`")
    remarks: tuple[str, ...] = ()
    if "prompt_ids" in has:
        prompt = _check_ids(row, "prompt_ids", policy)
    else:
        check_prompt(row.columns["prompt"], row.place)
        prompt, remarks = _encode_prompt(row, policy, options)
    if "response_ids" in has:
        return prompt, _check_ids(row, "response_ids", policy), remarks
    response = row.columns["response"]
    if not isinstance(response, str):
        raise InputError(f"{row.place}: `{row.label('response')}` is {show(response)}; give a string")
    whole = response.rstrip("\ufffd")
    return prompt, _in_place(row, policy.encode_response, whole), remarks + ((CUT,) if whole != response else ())


def encode_row(row: Row, policy: Policy | None, options: ReadingOptions) -> Row:
    """Return a row with the columns that `Row.encode` makes."""
    if policy is None:
        raise InputError(f"{row.place}: the row is text; give the policy too, or `prompt_ids` and `response_ids`")
    told, remarks = encode_dated(row, policy, options, partial(row.encode, policy))
    remarks = (*row.remarks, *told.pop("remarks", ()), *remarks)
    return replace(row, columns=row.columns | told, remarks=remarks, encode=None)


def check_sizes(row: Row, prompt_ids: list[int], response_ids: list[int], policy: Policy | None) -> None:
    """Raise InputError for an empty prompt, and Unfit for a row longer than the policy's context."""
    if not prompt_ids:
        raise InputError(f"{row.place}: the prompt is empty; give at least one token, or leave the row out")
    if policy and (why := policy.why_too_long(len(prompt_ids) + len(response_ids))):
        raise Unfit(
            TOO_LONG,
            f"{row.place}: prompt and response have {len(prompt_ids)} + {len(response_ids)} tokens, {why}; shorten or "
            "leave out the row",
        )


def _check_ids(row: Row, name: str, policy: Policy | None) -> list[int]:
    ids = row.columns[name]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise InputError(f"{row.place}: `{row.label(name)}` is {show(ids)}; give a list of whole numbers")
    limit = policy.vocab_size if policy else LARGEST_ID
    if ids and (min(ids) < 0 or max(ids) >= limit):
        position, token = next((at, i) for at, i in enumerate(ids) if not 0 <= i < limit)
        bound = f"0 to {limit - 1}" + (", the policy's vocabulary" if policy else "")
        raise Unfit(
            FOREIGN,
            f"{row.place}: `{row.label(name)}` holds {token} at position {position}; give ids of {bound}; were these "
            "made with another tokenizer?",
        )
    return ids


def _encode_prompt(row: Row, policy: Policy, options: ReadingOptions) -> tuple[list[int], tuple[str, ...]]:
    """Return a prompt's ids, and a remark if its template put in a date: that of the log's file unless one is given."""
    prompt = row.columns["prompt"]
    return encode_dated(row, policy, options, lambda told: policy.encode_prompt(prompt, chat_template_kwargs=told))


def encode_dated(
    row: Row, policy: Policy, options: ReadingOptions, encode: Callable[[dict[str, Any]], Encoded]
) -> tuple[Encoded, tuple[str, ...]]:
    """Return what the template makes of a row, and a remark if it put in a date: the log's file's unless one is given.

    encode: takes the template's arguments.
    """
    told = {**_template_kwargs(row), **(options.chat_template_kwargs or {})}

    def at(**date: str) -> Encoded:
        return _in_place(row, encode, told | date)

    if not policy.puts_in_date or row.path is None or Policy.DATE in {**(policy.chat_template_kwargs or {}), **told}:
        return at(), ()
    written = datetime.fromtimestamp(row.path.stat().st_mtime)
    found = at(**{Policy.DATE: written.isoformat()})
    put_in = found != at(**{Policy.DATE: ANOTHER_DATE})
    return found, (DATED.format(f"{written:%Y-%m-%d}"),) if put_in else ()


def _in_place(row: Row, encode: Callable[[Any], Encoded], text: Any) -> Encoded:
    """Encode text; an error names the row."""
    try:
        return encode(text)
    except InputError as error:
        raise InputError(f"{row.place}: {error}") from error


def _template_kwargs(row: Row) -> dict[str, Any]:
    """Return the row's chat template arguments (an object or its JSON), without nulls from parquet."""
    given = row.columns.get("chat_template_kwargs", {})
    if isinstance(given, str):
        with suppress(ValueError):
            given = parse_json(given)
    if not isinstance(given, dict):
        raise InputError(
            f"{row.place}: `{row.label('chat_template_kwargs')}` is {show(given)}; give an object, such as "
            '{"enable_thinking": false}'
        )
    return {name: value for name, value in given.items() if value is not None}


def parse_response(
    row: Row,
    prompt_ids: list[int],
    response_ids: list[int],
    group: int,
    kept: np.ndarray,
    options: ReadingOptions,
    policy: Policy | None = None,
) -> Response:
    """Return the row's response. Per-token lists have its length; unknown values are None, or NaN at a token."""
    advantage, uncorrected = row.columns.get("advantage"), None
    if isinstance(advantage, list):
        advantage = parse_per_token(row, "advantage", kept)
        if np.isnan(np.array(advantage)[kept]).all():
            advantage = None
    elif advantage is not None:
        advantage = parse_number(row, "advantage")
    if "sampler_correction" in row.columns:
        if advantage is None:
            raise InputError(f"{row.place}: `sampler_correction` multiplies an advantage, and there is none; give both")
        factors = np.array(parse_per_token(row, "sampler_correction", kept))
        uncorrected = advantage if (factors[kept] == 0).any() else None
        advantage = (np.array(advantage) * factors).tolist()
    numbers = {name: parse_number(row, name) for name in NUMBERS}
    if "loss_scale" in row.columns and not (numbers["loss_scale"] or 0.0) > 0:
        raise InputError(f"{row.place}: `loss_scale` is {show(row.columns['loss_scale'])}; give a number above 0")
    temperature = options.temperature
    if temperature is None:
        temperature = parse_number(row, "temperature") if "temperature" in row.columns else 1.0
        if temperature is None or temperature < 1 / LARGEST:
            raise Unfit(
                GREEDY,
                f"{row.place}: `{row.label('temperature')}` is {show(row.columns['temperature'])}; give a positive "
                f"one, {1 / LARGEST:g} or more (0, greedy, has no gradient)",
            )
    return Response(
        prompt_ids,
        response_ids,
        group,
        temperature,
        reward=parse_reward(row, options, needed=advantage is None),
        reward_parts=_reward_parts(row),
        advantage=advantage,
        uncorrected_advantage=uncorrected,
        response_mask=None if kept.all() else kept.tolist(),
        step=row.step,
        **{name: parse_logprobs(row, name, kept) for name in LOGPROBS},
        **_parse_candidates(row, kept, policy),
        **numbers,
    )


def parse_reward(row: Row, options: ReadingOptions, *, needed: bool = True) -> float | None:
    """Return the row's reward or, if it is a dictionary, the entry named by the options; None if unknown.

    needed: False accepts a dictionary although the options name no entry.
    """
    reward = row.columns.get("reward")
    if not isinstance(reward, dict):
        return parse_number(row, "reward")
    reward = {name: value for name, value in reward.items() if value is not None}
    key = options.reward_key if options.reward_key is not None or len(reward) != 1 else next(iter(reward))
    if key in reward:
        return parse_number(Row(row.place, {"reward": reward[key]}, labels={"reward": key}), "reward")
    if key is None and not needed:
        return None
    named = ", ".join(sorted(map(str, reward))) or "no entry"
    raise InputError(
        f"{row.place}: `{row.label('reward')}` is a dictionary ({named})"
        + (f" without {key!r}; " if key is not None else "; ")
        + "say which entry is the reward: --reward-key NAME (in Python reward_key=)"
    )


def _reward_parts(row: Row) -> dict[str, float]:
    """Return the finite numbers in the row's `reward_parts` or, without that column, in a dictionary of rewards."""
    parts = row.columns.get("reward_parts", row.columns.get("reward"))
    if "reward_parts" in row.columns and not isinstance(parts, dict):
        raise InputError(f"{row.place}: `reward_parts` is {show(parts)}; give a dictionary of numbers")
    parts = parts if isinstance(parts, dict) else {}
    return {str(n): float(v) for n, v in parts.items() if isinstance(v, int | float) and abs(v) <= LARGEST}


def parse_mask(row: Row, length: int) -> np.ndarray:
    """Return the response mask as bool [length]; all True if the row has none."""
    if "response_mask" not in row.columns:
        return np.ones(length, dtype=bool)
    mask, name = row.columns["response_mask"], row.label("response_mask")
    if not isinstance(mask, list) or not set(map(type, mask)) <= {bool, int, float} or not set(mask) <= {0, 1}:
        raise InputError(f"{row.place}: `{name}` is {show(mask)}; give a list of true/false (or 1/0) per token")
    _check_length(row, "response_mask", mask, length)
    return np.array(mask, dtype=bool)


def parse_logprobs(row: Row, name: str, kept: np.ndarray) -> list[float] | None:
    """Return each response token's log-probability, clipped to at most 0, NaN if unknown; None without the column."""
    if name not in row.columns:
        return None
    values = np.array(parse_per_token(row, name, kept))
    above = values > ROUNDING  # False for NaN
    values[above & ~kept] = np.nan
    if (above & kept).any():
        position = int((above & kept).argmax())
        raise InputError(
            f"{row.place}: `{row.label(name)}` holds {values[position]:g} at position {position}; a log-probability is "
            "at most 0 (natural logarithm; are these probabilities?)"
        )
    return np.minimum(values, 0.0).tolist()


def _parse_candidates(row: Row, kept: np.ndarray, policy: Policy | None) -> dict[str, np.ndarray]:
    """Return a teacher's candidates at each response token: ids [m, c], −1 for none, and their log ν, then −inf.

    Raises InputError unless both columns are lists of lists that fit each other, a kept token's ids are in the
    vocabulary, each once, and their log ν those of probabilities. null for a token, or for log ν, is none.
    """
    given = {name: row.columns[name] for name in CANDIDATES if name in row.columns}
    if not given:
        return {}
    if len(given) == 1:
        raise InputError(f"{row.place}: `{row.label(*given)}` alone; give {' and '.join(map(row.label, CANDIDATES))}")
    for name, sorts in zip(CANDIDATES, ({int}, {int, float, type(None)}), strict=True):
        values = given[name]
        if not isinstance(values, list) or not all(
            own is None or (isinstance(own, list) and set(map(type, own)) <= sorts) for own in values
        ):
            raise InputError(
                f"{row.place}: `{row.label(name)}` is {show(values)}; give a list of numbers for each response token"
            )
        _check_length(row, name, values, len(kept))
    lists = [[own or [] for own in given[name]] for name in CANDIDATES]
    counts, others = (np.array([len(own) for own in values]) for values in lists)

    def refuse(where: np.ndarray, told: str, wanted: str) -> None:
        if (where := where & kept).any():
            words = f"at position {int(where.argmax())} {told}"
            raise InputError(f"{row.place}: `{row.label(CANDIDATES[0])}` {words}; {wanted}")

    refuse(counts != others, f"and `{row.label(CANDIDATES[1])}` have different lengths", "give as many of either")
    places = np.arange(max(counts.max(initial=0), 1)) < np.where(kept, counts, 0)[:, None]
    ids, logprobs = np.full(places.shape, -1), np.full(places.shape, -np.inf)
    for name, values, own in zip(CANDIDATES, (ids, logprobs), lists, strict=True):
        every = [value for one, keep in zip(own, kept, strict=True) if keep for value in one]
        try:
            values[places] = np.array(every, values.dtype)  # null becomes NaN
        except OverflowError as error:
            raise InputError(f"{row.place}: `{row.label(name)}` holds a number of too many digits") from error
    limit = LARGEST_ID if policy is None else policy.vocab_size
    foreign = f"holds an id outside 0 to {limit - 1}" + (", the policy's vocabulary" if policy else "")
    refuse((places & ((ids < 0) | (ids >= limit))).any(1), foreign, "is the teacher's tokenizer the policy's?")
    ids[~np.isfinite(logprobs)], logprobs[~np.isfinite(logprobs)] = -1, -np.inf
    ordered = np.sort(ids, 1)
    refuse(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1), "holds an id twice", "give each once")
    with np.errstate(over="ignore"):
        wrong = (logprobs > ROUNDING).any(1) | (np.exp(logprobs).sum(1) > 1 + SURPLUS)
    refuse(wrong, "has log-probabilities above 0, or of probabilities whose sum is above 1", "give natural logarithms")
    return dict(zip(CANDIDATES, (ids, np.minimum(logprobs, 0.0)), strict=True))


def parse_per_token(row: Row, name: str, kept: np.ndarray) -> list[float]:
    """Return a number per response token, NaN where it is null or not finite.

    Raises InputError unless the column is a list of numbers of the response's length, and those of kept tokens are
    within ±LARGEST.
    """
    values, label = row.columns[name], row.label(name)
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float, bool, type(None)}:
        raise InputError(f"{row.place}: `{label}` is {show(values)}; give a list of numbers, one per response token")
    _check_length(row, name, values, len(kept))
    try:
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    except OverflowError:  # integers of hundreds of digits
        bound = int(1.7e308)
        values = [max(min(value, bound), -bound) if isinstance(value, int) else value for value in values]
        numbers = np.array(values, dtype=np.float64)
    numbers[np.isinf(numbers)] = np.nan
    beyond = np.abs(numbers) > LARGEST  # False for NaN
    numbers[beyond & ~kept] = np.nan
    if (beyond & kept).any():
        position = int((beyond & kept).argmax())
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


def parse_number(row: Row, name: str) -> float | None:
    """Return the row's number of that name; None if it is missing or not finite."""
    value = row.columns.get(name)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InputError(f"{row.place}: `{row.label(name)}` is {show(value)}; give a finite number within ±{LARGEST:g}")
    return float(value)
