"""Whether ids and the text beside them are of one tokenizer: the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from gradscope.errors import InputError
from gradscope.models import Policy
from gradscope.readers.formats import Row
from gradscope.readers.values import show

LOOKED_AT = 8
"""Rows whose text is compared: another tokenizer shows in the first one."""


@dataclass
class Agreement:
    """The first rows that hold both the ids and the text of their response, each compared as it comes."""

    policy: Policy | None
    """Without one, or without its tokenizer, nothing is compared."""
    compared: int = 0
    differing: int = 0
    first: str = ""
    """What the first row that differs says."""

    def take(self, row: Row, response_ids: list[int]) -> None:
        """Compare the row, if it holds both and is among the first."""
        text = row.columns.get("response") if "response_ids" in row.columns else None
        tokenizer = None if self.policy is None else self.policy.tokenizer
        if tokenizer is None or self.compared == LOOKED_AT or not isinstance(text, str):
            return
        decoded, special = tokenizer.decode(response_ids), tokenizer.all_special_tokens
        given, found = (_strip(words, special) for words in (text, decoded))
        if not given or not found:
            return  # nothing, or special tokens alone: that says nothing of the others
        self.compared += 1
        if given in found or found in given:  # one may be cut, as by a stop word
            return
        self.differing += 1
        self.first = self.first or (
            f"{row.place}: `{row.label('response_ids')}` are {show(decoded)} to this checkpoint's tokenizer, "
            f"`{row.label('response')}` is {show(text)}"
        )

    def check(self) -> None:
        """InputError if most of the rows differ. Of few, the ids are what counts: text can be tidied up."""
        if 2 * self.differing > self.compared:
            raise InputError(
                f"{self.first}, and so in {self.differing} of the first {self.compared} rows with both; give the "
                "checkpoint that sampled them, or leave the text out"
            )


def _strip(text: str, special: list[str]) -> str:
    """The text without special tokens, without broken characters, and without blanks, which decoders tidy up."""
    for token in sorted(special, key=len, reverse=True):
        text = text.replace(token, "")
    return "".join(text.replace("\ufffd", "").split())
