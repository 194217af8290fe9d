"""Words for a loss without advantages, where what is said of a token's advantage holds of its weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradscope.objective import LossSettings

WORDS = {"an advantage": "a weight", "advantages": "weights", "advantage": "weight", "Â": "w"}
GIVEN = {"Sample more prompts from this checkpoint": "Take more of the data"}
"""Of a loss on given text."""
_TEXT = re.compile(r"(<script.*?</script>|<style.*?</style>|<[^>]*>)", re.S)


def words_for(loss: LossSettings) -> Mapping[str, str]:
    """Return the words to replace in what is said about this loss."""
    return (WORDS if loss.is_whole else {}) | ({} if loss.is_sampled else GIVEN)


def reword(text: str, words: Mapping[str, str]) -> str:
    """Replace words.

    >>> reword("Tokens with an advantage, Â > 0", WORDS)
    'Tokens with a weight, w > 0'
    """
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def reword_html(html: str, words: Mapping[str, str]) -> str:
    """Replace words in the text of a page, outside tags, scripts and styles."""
    parts = _TEXT.split(html) if words else [html]
    return "".join(part if place % 2 else reword(part, words) for place, part in enumerate(parts))
