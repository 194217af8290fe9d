"""Solve a Knights & Knaves puzzle in writing by depth-first case analysis, the chain of thought that a policy learns.

A line of the trace copies one person's claim with the status of everybody in it (+ knight, - knave, ? not known yet)
and only then gives the verdict: ` ok`, ` no` (a contradiction), ` open` (nothing follows yet) or ` so NAME-` (what
follows). `try NAME+` assumes, `else NAME-` takes that back and lists whose status is unknown again, so a name's last
mention always has its status. A check of every claim ends the trace.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradscope.tasks.knights_knaves_wording import Statement, claim_text

_SIGNS = {True: "+", False: "-", None: "?"}
_MAX_SEARCHES = 2


@dataclass(frozen=True)
class Verdict:
    """What a claim implies about a partial assignment."""

    word: str
    """"ok", "no", "open" or "so"."""
    forced: Mapping[int, bool] = field(default_factory=dict)
    """For "so": who must be a knight (True) or a knave, given the claim."""


def holds(statement: Statement, knights: Mapping[int, bool]) -> bool:
    """Return whether the claim is true if `knights` says who is one."""
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return knights[parts[0]] == (operator == "telling-truth")
    values = [holds(part, knights) for part in parts]
    if operator == "not":
        return not values[0]
    return {
        "and": values[0] and values[-1],
        "or": values[0] or values[-1],
        "->": not values[0] or values[-1],
        "<=>": values[0] == values[-1],
    }[operator]


def mentioned(statement: Statement) -> set[int]:
    """Return the people whom the claim is about."""
    if statement[0] in ("telling-truth", "lying"):
        return {statement[1]}
    return set().union(*(mentioned(part) for part in statement[1:]))


def judge(statement: Statement, speaker: int, status: Sequence[bool | None]) -> Verdict:
    """Return what follows from the claim of a speaker whose status is known.

    >>> judge(("and", ("telling-truth", 1), ("lying", 2)), 0, [True, None, None])
    Verdict(word='so', forced={1: True, 2: False})
    """
    known = {person: value for person, value in enumerate(status) if value is not None}
    unknown = sorted(mentioned(statement) - known.keys())
    values = itertools.product((True, False), repeat=len(unknown))
    completions = [dict(zip(unknown, drawn, strict=True)) for drawn in values]
    possible = [c for c in completions if holds(statement, known | c) == status[speaker]]
    if not possible:
        return Verdict("no")
    if len(possible) == len(completions):
        return Verdict("ok")
    forced = {p: possible[0][p] for p in unknown if len({c[p] for c in possible}) == 1}
    return Verdict("so", forced) if forced else Verdict("open")


class _Trace:
    def __init__(
        self, statements: Sequence[Statement], names: Sequence[str], noise: float, free: bool, rng: random.Random
    ):
        self.statements, self.names, self.noise, self.free, self.rng = statements, names, noise, free, rng
        self.status: list[bool | None] = [None] * len(statements)
        self.queue: list[int] = []
        """Speakers whose claims are to be judged next."""
        self.open: set[int] = set()
        """Speakers from whose claims nothing followed yet."""
        self.text = ""

    def search(self) -> None:
        """Try and take back until everybody has a status and no claim objects."""
        tries: list[tuple[int, bool, list[bool | None], set[int]]] = []
        while self.queue or None in self.status:
            if not self.queue:
                person = self.chosen([p for p, value in enumerate(self.status) if value is None])
                value = self.chosen([True, False])
                tries.append((person, value, list(self.status), set(self.open)))
                self.text += f"try {self.names[person]}{_SIGNS[value]}\n"
                self.assign(person, value)
            elif not self.judge_next():
                if not tries:  # Only wrong verdicts lead here: there is nothing left to take back.
                    self.guess()
                    return
                self.take_back(*tries.pop())

    def chosen(self, among: list) -> int | bool:
        return self.rng.choice(among) if self.free else among[0]

    def assign(self, person: int, value: bool) -> None:
        self.status[person] = value
        again = sorted(s for s in self.open if person in mentioned(self.statements[s]))
        self.open -= set(again)
        self.queue += [s for s in (person, *again) if s not in self.queue]

    def judge_next(self) -> bool:
        speaker = self.chosen(self.queue)
        self.queue.remove(speaker)
        verdict = judge(self.statements[speaker], speaker, self.status)
        if self.rng.random() < self.noise:
            verdict = self.corrupted(verdict, speaker)
        self.text += self.line(speaker, verdict)
        if verdict.word == "open":
            self.open.add(speaker)
        for person, value in verdict.forced.items():
            self.assign(person, value)
        return verdict.word != "no"

    def corrupted(self, verdict: Verdict, speaker: int) -> Verdict:
        unknown = sorted(p for p in mentioned(self.statements[speaker]) if self.status[p] is None)
        others = [Verdict("no" if verdict.word == "ok" else "ok")]
        if verdict.word == "so":
            others = [Verdict("so", {p: not value for p, value in verdict.forced.items()}), Verdict("no")]
        elif verdict.word == "open":
            others = [Verdict("so", {self.rng.choice(unknown): self.rng.random() < 0.5})]
        return self.rng.choice(others)

    def take_back(self, person: int, value: bool, status: list[bool | None], open_: set[int]) -> None:
        undone = [p for p, now in enumerate(self.status) if now is not None and status[p] is None and p != person]
        self.text += (
            f"else {self.names[person]}{_SIGNS[not value]}" + "".join(f" {self.names[p]}?" for p in undone) + "\n"
        )
        self.status, self.open, self.queue = status, open_, []
        self.assign(person, not value)

    def guess(self) -> None:
        for person, value in enumerate(self.status):
            if value is None:
                self.text += f"try {self.names[person]}+\n"
                self.status[person] = True

    def check(self) -> bool:
        """Copy every claim once more; stop at the first that objects."""
        self.text += "check\n"
        for speaker, statement in enumerate(self.statements):
            verdict = judge(statement, speaker, self.status)
            self.text += self.line(speaker, verdict)
            if verdict.word == "no":
                return False
        return True

    def start_again(self) -> None:
        self.text += "again" + "".join(f" {name}?" for name in self.names) + "\n"
        self.status, self.open, self.queue = [None] * len(self.names), set(), []

    def line(self, speaker: int, verdict: Verdict) -> str:
        signs = {name: _SIGNS[value] for name, value in zip(self.names, self.status, strict=True)}
        claim = re.sub(r"\w+(?= is )", lambda m: m[0] + signs[m[0]], claim_text(self.statements[speaker], self.names))
        follows = "".join(f" {self.names[p]}{_SIGNS[value]}" for p, value in verdict.forced.items())
        return f"{self.names[speaker]}{signs[self.names[speaker]]}: {claim} {verdict.word}{follows}\n"


def write_response(
    statements: Sequence[Statement],
    names: Sequence[str],
    *,
    rng: random.Random,
    noise: float = 0.0,
    check: float = 1.0,
    free: bool = False,
) -> str:
    """Trace, `</think>` and answer: what follows a prompt that ends with `<think>`.

    `noise` is the share of wrong verdicts (the trace goes on as if they were right), `check` the share of traces that
    end with the check. A failed check starts one more search. `free` draws whom to try, as what, and whose claim to
    judge next; otherwise it is the first person, as a knight, and claims in order.

    >>> claims = [("lying", 1), ("not", ("lying", 0))]
    >>> print(write_response(claims, ["Zoey", "Oliver"], rng=random.Random(0)))
    try Zoey+
    Zoey+: Oliver? is a knave so Oliver-
    ...
    """
    trace = _Trace(statements, names[: len(statements)], noise, free, rng)
    checks = rng.random() < check
    for search in range(_MAX_SEARCHES):
        if search:
            trace.start_again()
        trace.search()
        if not checks or trace.check():
            break
    answer = ", ".join(
        f"{name} is a {'knight' if knight else 'knave'}" for name, knight in zip(trace.names, trace.status, strict=True)
    )
    return f"{trace.text}</think><answer> {answer} </answer>"
