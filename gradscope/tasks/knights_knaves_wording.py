"""The wording of Knights & Knaves: claims, the data set's quiz and a compact text."""

from __future__ import annotations

from collections.abc import Sequence

Statement = tuple
"""("telling-truth", person), ("lying", person), ("not", atom), or (connective, atom, atom) with and, or, ->, <=>."""

COMPACT_NAMES = ("Zoey", "Oliver", "Mia", "Jack", "Ava", "Liam", "Emma", "Noah")
"""Names in compact puzzles: always the same, since a small policy cannot learn to bind fifty names."""

SAYINGS = (
    '"{claim}" - {name}.',
    '"{claim}," {name} claimed.',
    '"{claim}," {name} declared.',
    '"{claim}," {name} mentioned.',
    'According to {name}, "{claim}".',
    'As {name} put it, "{claim}".',
    'In a statement by {name}: "{claim}".',
    'In {name}\'s words: "{claim}".',
    '{name} asserted: "{claim}".',
    '{name} commented, "{claim}".',
    "{name} expressed that {claim}.",
    '{name} noted, "{claim}".',
    '{name} remarked, "{claim}".',
    '{name} said, "{claim}."',
    "{name} said that {claim}.",
    '{name} stated, "{claim}".',
    "{name} told you that {claim}.",
    '{name} was heard saying, "{claim}".',
)
"""The data set's phrasings for a person's claim, about equally frequent."""

_PREAMBLE = (
    "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always "
    "lie. You meet {count} inhabitants: {names}. "
)
_QUESTION = " So who is a knight and who is a knave?"
_ATOM_WORDS = {"telling-truth": "is a knight", "lying": "is a knave"}
_NOT_WORDS = {"telling-truth": "is not a knight", "lying": "is not a knave"}
_CONNECTIVES = {"and": "{} and {}", "or": "{} or {}", "->": "If {} then {}", "<=>": "{} if and only if {}"}


def claim_text(statement: Statement, names: Sequence[str]) -> str:
    """Word the claim as the data set does.

    >>> claim_text(("->", ("lying", 1), ("telling-truth", 0)), ["Zoey", "Oliver"])
    'If Oliver is a knave then Zoey is a knight'
    """
    operator = statement[0]
    if operator in _ATOM_WORDS:
        return f"{names[statement[1]]} {_ATOM_WORDS[operator]}"
    if operator == "not":
        kind, person = statement[1]
        return f"{names[person]} {_NOT_WORDS[kind]}"
    return _CONNECTIVES[operator].format(*(claim_text(part, names) for part in statement[1:]))


def quiz_text(statements: Sequence[Statement], names: Sequence[str], sayings: Sequence[str]) -> str:
    """Word the puzzle as the data set does; person i's claim is phrased by `sayings[i]` of SAYINGS."""
    spoken = (
        saying.format(name=name, claim=claim_text(statement, names))
        for statement, name, saying in zip(statements, names, sayings, strict=True)
    )
    listed = f"{', '.join(names[:-1])}, and {names[-1]}"
    return _PREAMBLE.format(count=len(names), names=listed) + " ".join(spoken) + _QUESTION


def compact_prompt(statements: Sequence[Statement], names: Sequence[str] = COMPACT_NAMES) -> str:
    """Word the puzzle for a small policy, in as few words as possible: a line per person, then `<think>`.

    >>> print(compact_prompt([("lying", 1), ("and", ("telling-truth", 0), ("lying", 1))]))
    Zoey: Oliver is a knave.
    Oliver: Zoey is a knight and Oliver is a knave.
    <think>
    """
    lines = (f"{name}: {claim_text(s, names)}.\n" for s, name in zip(statements, names, strict=False))
    return "".join(lines) + "<think>"
