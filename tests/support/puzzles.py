"""Puzzles read back from their words: the inverses of how gradscope writes them."""

from __future__ import annotations

import re

from gradscope.errors import InputError
from gradscope.tasks.knights_knaves_wording import _PREAMBLE, _QUESTION, SAYINGS, Statement, parse_claim


def parse_quiz(text: str) -> tuple[list[Statement], list[str], list[str]]:
    """Statements, names and sayings of a puzzle in the data set's words: the inverse of `quiz_text`."""
    preamble = _PREAMBLE.replace(".", r"\.").format(count=r"\d+", names="(.+?)")
    match = re.fullmatch(f"{preamble}(.+){re.escape(_QUESTION)}", text)
    if match is None:
        raise InputError(f"not a Knights & Knaves quiz in the data set's words: {text[:60]!r}…")
    names = re.split(", and |, ", match[1])
    statements, sayings, rest = [], [], match[2]
    for name in names:
        claim, saying, rest = _next_spoken(rest, name)
        statements.append(parse_claim(claim, names))
        sayings.append(saying)
    return statements, names, sayings


def _next_spoken(text: str, name: str) -> tuple[str, str, str]:
    for saying in SAYINGS:
        before, after = saying.replace("{name}", name).split("{claim}")
        claim = text.removeprefix(before).partition(after)[0]
        spoken = before + claim + after
        # A claim holds no punctuation: with some, `after` was found in a later sentence.
        if text.startswith(spoken) and not set(claim) & set('",.'):
            return claim, saying, text[len(spoken) :].removeprefix(" ")
    raise InputError(f"{text[:60]!r}… is none of the ways in which {name} may speak; see SAYINGS")


def parse_compact(text: str) -> tuple[list[Statement], list[str]]:
    """Statements and names of a compact puzzle: the inverse of `compact_text`."""
    lines = [re.fullmatch(r"(\w+): (.+)\.", line) for line in text.splitlines()]
    if not lines or None in lines:
        raise InputError(f"not a compact puzzle: {text[:60]!r}…; wanted lines like 'Zoey: Oliver is a knave.'")
    names = [line[1] for line in lines]
    return [parse_claim(line[2], names) for line in lines], names
