"""The paper's six categories of inference words (Table 5), and how often a text uses each.

    python -m analyses.paper.words [--out figures]

writes Table 5, with the forms that are counted, as figures/paper/embedded/data/table5.csv and table5.md.

A form is matched at word boundaries, case-insensitively and across any white space: "so" matches neither in "also" nor
in "sofa". A category's count is the sum over its words, so that "assume" inside an "if … then …" counts twice.

Differs from the paper, which says that verbs and nouns include their conjugated forms ("plural forms of nouns as well
as the past tense and past participle forms of verbs"): verbs in the third person and present participles count too. The
table is read as follows: "XXX's ‘statement’" needs an owner; "if…then…" must lie within one sentence of one line;
"definite", neither noun nor verb, has one form, so that "definitely" is another word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pandas as pd
import tyro

from analyses.common.script import Options, exit_with
from analyses.common.tables import write_table
from gradscope.policy import EMBEDDED


@dataclass(frozen=True)
class Word:
    """A word or phrase of Table 5."""

    name: str
    """As in the table."""
    forms: tuple[str, ...]
    """Forms that count, in lower case; a space separates the parts of a phrase."""
    pattern: str | None = None
    """Regular expression, if the forms alone do not define what counts."""

    def count(self, text: str) -> int:
        """Return its number of occurrences in the text."""
        return len(_compile(self).findall(text))


_POSSESSIVE = r"\b\w+(?:['’]s|(?<=s)['’])\s+statements?\b"
_IF_THEN = r"\bif\b[^.!?\n]*?\bthen\b"

CATEGORIES: dict[str, tuple[Word, ...]] = {
    "Analysis": (
        Word("analyze", ("analyze", "analyzes", "analyzed", "analyzing")),
        Word("consider", ("consider", "considers", "considered", "considering")),
        Word("look at", ("look at", "looks at", "looked at", "looking at")),
        Word("check", ("check", "checks", "checked", "checking")),
        Word("examine", ("examine", "examines", "examined", "examining")),
    ),
    "Statement": (Word("XXX's statement", ("statement", "statements"), _POSSESSIVE),),
    "Causal Indicator": tuple(Word(name, (name,)) for name in ("since", "because", "due to", "given that")),
    "Conclusion Indicator": tuple(
        Word(name, (name,)) for name in ("so", "thus", "hence", "as a result", "consequently", "therefore")
    ),
    "Assumption": (
        Word("assume", ("assume", "assumes", "assumed", "assuming")),
        Word("if…then…", ("if then",), _IF_THEN),
    ),
    "Assertion": (Word("must be", ("must be",)), Word("definite", ("definite",))),
}
"""{category: its words}, in Table 5's order."""


@cache
def _compile(word: Word) -> re.Pattern[str]:
    forms = "|".join(r"\s+".join(map(re.escape, form.split())) for form in word.forms)
    return re.compile(word.pattern or rf"\b(?:{forms})\b", re.IGNORECASE)


def count_categories(text: str) -> dict[str, int]:
    """Count the text's words of each category.

    >>> found = count_categories("So Zoey's statement is checked: if she lies, then Noah must be a knight.")
    >>> [category for category, count in found.items() if count]
    ['Analysis', 'Statement', 'Conclusion Indicator', 'Assumption', 'Assertion']
    """
    return {category: sum(word.count(text) for word in words) for category, words in CATEGORIES.items()}


def can_write(entries: Sequence[str], word: Word) -> bool:
    """Return whether a vocabulary has all parts of a form of the word as words, not letter by letter.

    entries: a tokenizer's words and phrases; single characters do not count.
    """
    known = {part for entry in entries if len(entry) > 1 for part in re.findall(r"\w+", entry.lower())}
    return any(known.issuperset(form.split()) for form in word.forms)


def embedded_vocabulary(name: str) -> list[str]:
    """Return the tokenizer entries of a policy that comes with gradscope: words, phrases, single characters."""
    file = EMBEDDED[name] / "tokenizer.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"])


def embedded_categories(name: str) -> set[str]:
    """Return the categories of which a policy that comes with gradscope can write a word."""
    entries = embedded_vocabulary(name)
    return {category for category, words in CATEGORIES.items() if any(can_write(entries, word) for word in words)}


def table() -> pd.DataFrame:
    """Return Table 5: a row per word, with its forms and whether the embedded policy's vocabulary has it."""
    entries = embedded_vocabulary("embedded")
    rows = [(category, word) for category, words in CATEGORIES.items() for word in words]
    return pd.DataFrame(
        {
            "category": [category for category, _ in rows],
            "word": [word.name for _, word in rows],
            "forms counted": [", ".join(word.forms) for _, word in rows],
            "embedded policy has it": ["yes" if can_write(entries, word) else "no" for _, word in rows],
        }
    )


def main(options: Options) -> None:
    """Write and print Table 5."""
    found = table()
    write_table(found, options.at("table5.md"))
    print(found.to_string(index=False))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
