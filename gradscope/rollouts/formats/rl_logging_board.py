"""RLLoggingBoard's JSONL: a line per response with its text, each token's text and log-probabilities, but no ids.

{step, prompt, response, response_tokens, logprobs, ref_logprobs, values, token_rewards, reward}, as written for the
board by OpenRLHF (prompts padded on the left, responses on the right) and by verl's forks (without padding). Tokens
were decoded one by one, so their texts identify the ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.files import Record
from gradscope.rollouts.formats.base import FOUND_BY_TEXT, Format, Row, need, optional, required
from gradscope.rollouts.formats.columns import read_row
from gradscope.rollouts.formats.text import opening_of, others_in

UNFOUND = "the text of some of their tokens fits several ids, and tokenizing the whole text gives other tokens"
INFERRED = (
    "the text of some of their tokens fits several ids (part of a character, a word with or without its leading "
    "space): the ids are those of the whole text, tokenized"
)


class _Tokens:
    """Finds token ids from the text of each token."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._tokenizer = policy, policy.tokenizer
        self._ends = frozenset(map(self._text, policy.stop_ids))
        self._padding = self._ends | ({self._tokenizer.pad_token} - {None})

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        """Each text's id, None if several ids have it."""
        found: dict[str, int | None] = {}
        for token in range(len(self._tokenizer)):
            text = self._text(token)
            found[text] = None if text in found else token
        return found

    def find(self, text: str, tokens: list[str]) -> tuple[list[int] | None, tuple[str, ...]]:
        """Return the ids of tokens, and remarks. If several ids have a token's text, use those of the whole text,
        tokenized, provided that each has its token's text; otherwise return None.
        """
        ids = [self._ids.get(token) for token in tokens]
        if None not in ids:
            return ids, ()
        ids = self._policy.encode_response(text)[: len(tokens)]
        return (ids, (INFERRED,)) if [*map(self._text, ids)] == tokens else (None, ())

    def unpadded(self, prompt: str) -> str:
        """Return the prompt without left padding. A padding token that is also BOS may be genuine and is kept."""
        pads = "|".join(map(re.escape, self._padding - {self._tokenizer.bos_token, ""}))
        return re.sub(rf"\A(?:\s?(?:{pads}))+", "", prompt) if pads else prompt

    def length(self, tokens: list[str]) -> int:
        """Return the response's length without padding, including the token that ends it."""
        end = len(tokens)
        while end and tokens[end - 1] in self._padding:
            end -= 1
        return end + (end < len(tokens) and tokens[end] in self._ends)


def _rows(records: Iterable[Record], policy: Policy | None) -> Iterator[Row]:
    tokens = _Tokens(policy) if policy is not None and policy.tokenizer is not None else None
    opening = opening_of(policy)
    for record in records:
        texts = [need(record, name) for name in ("prompt", "response", "response_tokens")]
        flat = [*texts[:2], *texts[2]] if isinstance(texts[2], list) else [None]
        if not {*map(type, flat)} <= {str}:
            raise InputError(f"{record.place}: `prompt`, `response`, `response_tokens` are {show(texts)}; give text")
        row = read_row(RL_LOGGING_BOARD, record)
        prompt, response, own = texts
        if tokens is None:
            yield replace(row, columns={"prompt": prompt, "response": response})
            continue
        prompt, length = tokens.unpadded(prompt), tokens.length(own)
        found = {name: value for name, value in row.columns.items() if name not in ("prompt", "response")}
        found |= {n: v[:length] for n, v in found.items() if n.endswith("logprobs") and isinstance(v, list)}
        try:
            found["response_ids"], remarks = tokens.find(response, own[:length])
            found["prompt_ids"] = policy.encode_prompt(prompt)
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from error
        found["group"] = prompt
        remarks += others_in(response, opening, policy.tokenizer.all_special_tokens)
        yield replace(row, columns=found, left_out=UNFOUND if found["response_ids"] is None else None, remarks=remarks)


RL_LOGGING_BOARD = Format(
    "rl_logging_board",
    (
        *required(step="step", prompt="prompt", response="response", reward="reward"),
        *required(response_ids="response_tokens", old_logprobs="logprobs"),
        *optional(ref_logprobs="ref_logprobs"),
    ),
    _rows,
    notes=(
        FOUND_BY_TEXT,
        "values and token_rewards, from which PPO computes advantages, are not read: γ, λ and the scaling are not in "
        "the log",
    ),
)
