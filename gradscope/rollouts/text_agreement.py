"""Whether a log's texts are what this policy's tokenizer makes of its ids; another checkpoint's would show here."""

from __future__ import annotations

from dataclasses import dataclass

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.formats.base import Row

LOOKED_AT = 8
"""Rows whose text is compared with their ids; a foreign tokenizer shows in the first one."""


@dataclass
class Agreement:
    """Comparison of ids and text in the first rows that have both."""

    policy: Policy | None
    """Without a policy or its tokenizer, nothing is compared."""
    compared: int = 0
    differing: int = 0
    first: str = ""
    """Description of the first row that differs."""

    def take(self, row: Row, response_ids: list[int]) -> None:
        """Compare the row if it has both and is among the first."""
        text = row.columns.get("response") if "response_ids" in row.columns else None
        tokenizer = None if self.policy is None else self.policy.tokenizer
        if tokenizer is None or self.compared == LOOKED_AT or not isinstance(text, str):
            return
        decoded, special = tokenizer.decode(response_ids), tokenizer.all_special_tokens
        given, found = (_strip(words, special) for words in (text, decoded))
        if not given or not found:
            return  # empty, or only special tokens, which shows nothing
        self.compared += 1
        if given in found or found in given:  # one may be cut off, as by a stop word
            return
        self.differing += 1
        self.first = self.first or (
            f"{row.place}: this checkpoint's tokenizer decodes `{row.label('response_ids')}` as {show(decoded)}, but "
            f"`{row.label('response')}` is {show(text)}"
        )

    def check(self) -> None:
        """Raise InputError if most of the rows differ. A few may, since detokenized text is often cleaned up."""
        if 2 * self.differing > self.compared:
            raise InputError(
                f"{self.first}; likewise in {self.differing} of the first {self.compared} rows with both; give the "
                "checkpoint that sampled them, or leave the text out"
            )


def _strip(text: str, special: list[str]) -> str:
    """Strip special tokens, broken characters and blanks, which decoders clean up."""
    for token in sorted(special, key=len, reverse=True):
        text = text.replace(token, "")
    return "".join(text.replace("\ufffd", "").split())
