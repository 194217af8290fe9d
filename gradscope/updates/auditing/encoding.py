"""Responses that are decoded to text and encoded again, beside the ids that were sampled."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.policy import Policy

THINK = "</think>"
CLOSINGS = re.compile(r"[<\[◁]/[\w:|]*(?:think|thought|reason)[\w:|]*[>\]▷]", re.IGNORECASE)
"""What ends thinking, as chat templates name it; what begins it has no slash."""


class Row(NamedTuple):
    """A prompt and response in place of another."""

    ids: Int[Tensor, " n"]
    source: Int[Tensor, " n"]
    """Where in the other each token is, or what it is in place of; −1: nowhere."""
    same: Bool[Tensor, " n"]
    """Whether it is that token."""


def encode_again(policy: Policy, ids: list[int], *, stripped: bool = False) -> list[int]:
    """Decode ids to text, if stripped without special tokens, and encode that; the ids themselves where there is no
    tokenizer, or none that encodes the text."""
    if policy.tokenizer is None:
        return ids
    try:
        return policy.encode_response(policy.tokenizer.decode(ids, skip_special_tokens=stripped))
    except InputError:
        return ids


def align(old: list[int], new: list[int], decode: Callable[[list[int]], str]) -> tuple[list[int], list[bool]]:
    """Return, of each new id, its place among the old ones, and whether it is that one, after the same text; else it is
    in place of that one, in which its text begins.

    >>> words = ["a", "b", "ab", "c"]
    >>> align([3, 0, 1, 3], [3, 2, 3], lambda ids: "".join(words[own] for own in ids))
    ([0, 1, 3], [True, False, True])
    """
    source, same, low = [], [], 0
    for high, last, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if size and decode(old[:high]) != decode(new[:last]):
            continue
        first, back = len(source), min(low, 1)  # some decoders strip the first token's blank: rather one before
        texts = [decode(old[low - back : place]) for place in range(low, high)]
        for place in range(first, last):
            text = decode(new[first - back : place])
            at = low + max(bisect_right([*map(len, texts)], len(text)) - 1, 0)
            source.append(min(at, len(old) - 1))
            same.append(at < high and new[place] == old[at] and texts[at - low] == text)
        source += range(high, high + size)
        same += [True] * size
        low = high + size
    return source, same


def find_thinking(texts: Sequence[str], sampled: Sequence[bool], closings: Iterable[str], *, blanks: bool) -> set[int]:
    """Return the places of the tokens of thinking that is followed by a later turn: sampled tokens after others.

    texts: of each token. blanks: with the line ends after it.

    >>> texts = ["<think>", "hm", "</think>", "yes", "?", "<think>", "</think>", "no"]
    >>> sampled = [True, True, True, True, False, True, True, True]
    >>> find_thinking(texts, sampled, ["</think>"], blanks=False)
    {0, 1, 2}
    """
    text, starts = "".join(texts), [0, *accumulate(map(len, texts))]
    last = max((place for place, own in enumerate(sampled) if own), default=0)
    before = max((place for place in range(last) if not sampled[place]), default=0)  # the last turn
    after, found = r"\n*" * blanks, set()
    for closing in closings:
        opening = re.escape(closing.replace("/", "", 1))
        for span in re.finditer(f"{opening}.*?{re.escape(closing)}{after}", text, re.DOTALL):
            inside = range(*(bisect_left(starts, edge) for edge in span.span()))
            found |= {*inside} if inside and inside[-1] < before else set()
    return found
