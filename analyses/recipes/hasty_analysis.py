"""Solve a Knights & Knaves puzzle in writing and in haste: a chain of thought whose every choice is uncertain.

No verdict is wrong: a line copies one person's claim with the status of everybody in it (+ knight, - knave, ? not known
yet) and then says what follows: ` ok`, ` no` (a contradiction), ` open` (nothing yet) or ` so NAME-`. Skill is limited
by blind choices: whose claim to judge next, whom to suppose a knight or a knave, and when to stop. As soon as everybody
has a status the analysis mostly ends, so that a wrong supposition stays in the answer unless a judged claim objected;
and sometimes something is supposed although claims remain to be judged.

Wording varies as a writer's does, and reflects how careful the writer is: after `Let me see: ` hasty suppositions are
rarer and further checks more frequent than after `Okay, `.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from analyses.recipes.case_analysis import Verdict, holds, mentioned
from gradscope.tasks.knights_knaves_wording import COMPACT_NAMES, Statement, claim_text

SIGNS = {True: "+", False: "-", None: "?"}
MOST_LINES = 40
"""Lines after which everybody without a status is guessed."""

# Words with their weights: probabilities at T = 1. Below that they are sharper.
SAYS = {" says ": 31, " claims ": 27, " states ": 22, " insists ": 20}
CONNECTIVES = {
    **{"; thus": 13, "; hence": 12, "; therefore": 11, "; that means": 10, "; this gives": 10, "; then": 9},
    **{"; consequently": 8, "; it follows": 8, "; as a result": 7, "; clearly": 6, "; which makes": 6},
}
ENDS = {
    **{".\n": 45, ", I think.\n": 11, ", right.\n": 10, ", of course.\n": 9, ", as we see.\n": 9, ", for now.\n": 8},
    ", sure.\n": 8,
}
ELSES = {"Otherwise ": 30, "So instead ": 25, "Contradiction: ": 15, "Not so: ": 15, "Take it back: ": 15}
# Those that steer, each with how careful it makes what follows, from 0 to 1.
OPENERS = {
    **{"Now ": (12, 0.5), "Next ": (11, 0.2), "Well, ": (10, 0.2), "Then ": (9, 0.3), "Look: ": (8, 0.7)},
    **{"Take ": (8, 0.4), "Consider ": (7, 0.9), "Here ": (7, 0.5), "Also ": (6, 0.6), "Note: ": (6, 0.8)},
    **{"See, ": (5, 0.3), "Let me see: ": (5, 1.0), "Hmm, ": (4, 0.9), "Okay, ": (4, 0.0)},
}
TRIES = {
    **{"Suppose ": (30, 0.8), "Assume ": (25, 0.6), "Let us say ": (15, 0.5), "Imagine ": (15, 0.2)},
    "What if ": (15, 0.1),
}
VERDICTS = (" ok", " no", " open", " so")
PHRASES = (*VERDICTS, *OPENERS, *SAYS, *CONNECTIVES, *TRIES, *ELSES, *(end for end in ENDS if end != ".\n"))
"""Single tokens of the policy, beside those of the puzzles (`.\\n` is one)."""
WORDING = frozenset([*SAYS, *CONNECTIVES, *ELSES, *ENDS])
"""Tokens that any other on the same list could replace."""
KINDS = ("wording", "steering", "content")
"""Mere wording; words that open a line, which choose between judging and supposing and reflect how careful the rest is;
all else: names, what somebody is, verdicts, when to stop."""


@dataclass(frozen=True)
class Haste:
    """How careless the writer is."""

    leap: float = 0.3
    """Probability of supposing something although claims remain to be judged, averaged over openers."""
    more: float = 0.06
    """Probability of judging one more claim once everybody has a status, averaged over openers."""
    intuition: float = 0.15
    """How much likelier somebody who says "or" or "if" is supposed a knight, and less likely who says "and"."""
    steering: float = 1.0
    """How strongly words reflect haste: with 1, both probabilities go from 0 to twice their mean."""


def judge(statement: Statement, speaker: int, status: Sequence[bool | None]) -> Verdict:
    """Return what follows from the claim of a speaker whose own status may be open.

    >>> judge(("lying", 1), 0, [None, True])
    Verdict(word='so', forced={0: False})
    """
    known = {person: value for person, value in enumerate(status) if value is not None}
    unknown = sorted((mentioned(statement) | {speaker}) - known.keys())
    worlds = [
        known | dict(zip(unknown, values, strict=True))
        for values in itertools.product((True, False), repeat=len(unknown))
    ]
    possible = [world for world in worlds if holds(statement, world) == world[speaker]]
    if not possible:
        return Verdict("no")
    if len(possible) == len(worlds):
        return Verdict("ok" if speaker in known else "open")
    forced = {p: possible[0][p] for p in unknown if len({world[p] for world in possible}) == 1}
    return Verdict("so", forced) if forced else Verdict("open")


@dataclass(frozen=True)
class _Supposition:
    person: int
    value: bool
    status: list[bool | None]
    """Status before it."""


class _Trace:
    def __init__(self, statements: Sequence[Statement], names: Sequence[str], haste: Haste, rng: random.Random):
        self.statements, self.names, self.haste, self.rng = statements, names, haste, rng
        self.status: list[bool | None] = [None] * len(statements)
        self.left = set(range(len(statements)))
        """Speakers whose claims may be judged."""
        self.waiting: set[int] = set()
        """Speakers from whose claims nothing followed yet."""
        self.care = 0.5
        """Of the last word that steers."""
        self.lines: list[str] = []

    def write(self) -> None:
        suppositions: list[_Supposition] = []
        while len(self.lines) < MOST_LINES:
            unknown = [person for person, value in enumerate(self.status) if value is None]
            if not unknown and not self.goes_on():
                return
            claims = self.claims()
            if unknown and (not claims or self.leaps()):
                suppositions.append(self.suppose(self.rng.choice(unknown)))
            elif not claims:
                return
            elif not self.judge(self.rng.choice(claims)):
                self.take_back(suppositions.pop())  # as nothing is judged wrongly, there is one
        for person, value in enumerate(self.status):
            if value is None:
                self.suppose(person)

    def goes_on(self) -> bool:
        return self.rng.random() < self.haste.more * (1 + self.haste.steering * (2 * self.care - 1))

    def leaps(self) -> bool:
        return self.rng.random() < self.haste.leap * (1 + self.haste.steering * (1 - 2 * self.care))

    def claims(self) -> list[int]:
        """Return whose claims may be judged next: claims about, or by, somebody with a status."""
        known = {person for person, value in enumerate(self.status) if value is not None}
        return sorted(s for s in self.left if known & (mentioned(self.statements[s]) | {s}))

    def suppose(self, person: int) -> _Supposition:
        lean = {"or": 1, "->": 1, "and": -1, "<=>": -0.5}.get(self.statements[person][0], 0)
        value = self.rng.random() < 0.5 + lean * self.haste.intuition
        before = _Supposition(person, value, list(self.status))
        self.say(f"{self.steer(TRIES)}{self.names[person]}{SIGNS[value]}")
        self.assign(person, value)
        return before

    def judge(self, speaker: int) -> bool:
        """Return whether the claim does not object."""
        verdict = judge(self.statements[speaker], speaker, self.status)
        signs = {name: SIGNS[value] for name, value in zip(self.names, self.status, strict=True)}
        claim = re.sub(r"\w+(?= is )", lambda m: m[0] + signs[m[0]], claim_text(self.statements[speaker], self.names))
        follows = [f" {self.names[person]}{SIGNS[value]}" for person, value in verdict.forced.items()]
        self.rng.shuffle(follows)
        name = self.names[speaker]
        said = f"{self.steer(OPENERS)}{name}{signs[name]}{_draw(SAYS, self.rng)}{claim}{_draw(CONNECTIVES, self.rng)}"
        self.say(f"{said} {verdict.word}{''.join(follows)}")
        self.left.discard(speaker)
        if verdict.word == "open":
            self.waiting.add(speaker)
        for person, value in verdict.forced.items():
            self.assign(person, value)
        return verdict.word != "no"

    def assign(self, person: int, value: bool) -> None:
        self.status[person] = value
        self.left |= {s for s in self.waiting if person in mentioned(self.statements[s]) | {s}}
        self.waiting -= self.left

    def take_back(self, supposed: _Supposition) -> None:
        now, before, person = self.status, supposed.status, supposed.person
        undone = [
            f" {self.names[p]}?" for p in range(len(now)) if now[p] is not None and before[p] is None and p != person
        ]
        self.rng.shuffle(undone)
        self.say(f"{_draw(ELSES, self.rng)}{self.names[person]}{SIGNS[not supposed.value]}{''.join(undone)}")
        self.status, self.left, self.waiting = before, set(range(len(self.names))), set()
        self.assign(person, not supposed.value)

    def steer(self, words: dict[str, tuple[int, float]]) -> str:
        word = _draw({word: weight for word, (weight, _) in words.items()}, self.rng)
        self.care = words[word][1]
        return word

    def say(self, line: str) -> None:
        self.lines.append(line + _draw(ENDS, self.rng))


def write_hastily(
    statements: Sequence[Statement], names: Sequence[str], *, rng: random.Random, haste: Haste | None = None
) -> str:
    """Trace, `</think>` and answer, half of the time in any order: what follows a prompt that ends with `<think>`.

    >>> print(write_hastily([("lying", 1), ("not", ("lying", 0))], ["Zoey", "Oliver"], rng=random.Random(0)))
    Assume Oliver-.
    Let me see: Oliver- insists Zoey? is not a knave; which makes so Zoey-.
    </think><answer> Oliver is a knave, Zoey is a knave </answer>
    """
    trace = _Trace(statements, names[: len(statements)], haste or Haste(), rng)
    trace.write()
    told = [f"{n} is a {'knight' if value else 'knave'}" for n, value in zip(trace.names, trace.status, strict=True)]
    if rng.random() < 0.5:
        rng.shuffle(told)
    return f"{''.join(trace.lines)}</think><answer> {', '.join(told)} </answer>"


def kinds_of(tokens: Sequence[str]) -> list[str]:
    """Return the kind (of KINDS) of each token of a response; whom the answer names first is mere wording, too.

    >>> kinds_of(["Okay, ", "Zoey", " says ", "</think>", "<answer> ", "Zoey", " is a knave"])
    ['steering', 'content', 'wording', 'content', 'content', 'wording', 'content']
    """
    answers = itertools.accumulate((token == "<answer> " for token in tokens), max)
    named = [answering and token in COMPACT_NAMES for token, answering in zip(tokens, answers, strict=True)]
    kinds = dict.fromkeys(WORDING, "wording") | dict.fromkeys([*OPENERS, *TRIES], "steering")
    return ["wording" if name else kinds.get(token, "content") for token, name in zip(tokens, named, strict=True)]


def _draw(words: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(words), list(words.values()))[0]
