"""Findings: sentences with a verdict, and how a number's bounds decide it."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isnan
from typing import Any, SupportsIndex, overload

import pandas as pd

from gradscope.diagnosis.format import percent
from gradscope.diagnosis.wording import reword

WARNINGS = (
    *("doubtful-loss", "logged-logprobs", "zero-advantages", "improbable", "certain-tokens", "temperature"),
    *("other-temperature", "other-step", "pooled", "several-runs"),
)
"""Kinds of notes that may change the verdict itself; the page shows them first, unfolded."""


class Verdict(StrEnum):
    """A finding's verdict, for use in code."""

    DOMINATES = "dominates"
    """More than proportional, and more than any other interval."""
    MORE = "more"
    """More than the reference: the share of tokens, 1−π, one half, or the rest."""
    LESS = "less"
    UNDECIDED = "undecided"
    """The bounds contain both, or there are too few prompts."""
    UNKNOWN = "unknown"
    """The numbers are missing."""
    BROKEN = "broken"
    """A bound that must hold is violated."""
    FACT = "fact"
    """A number without anything to decide."""


@dataclass(frozen=True)
class Finding:
    """One sentence of a diagnosis; unpacks as (statement, detail, tone)."""

    kind: str
    """Its subject, such as dominance_raw."""
    verdict: Verdict
    statement: str
    detail: str = ""
    tone: str = "plain"
    """plain, good, warn or bad."""
    brief: str = ""
    """The statement without numbers that the page's first screen already shows; "": use the full statement."""
    next: str = ""
    """What to do because of it; "": nothing."""
    about: tuple[tuple[str, str, str], ...] = ()
    """Statistic, metric and interval of the numbers that it judges."""

    def __iter__(self) -> Iterator[str]:
        return iter((self.statement, self.detail, self.tone))

    def reworded(self, words: Mapping[str, str]) -> Finding:
        """Return the finding with these words replaced in what it says."""
        said = {name: reword(getattr(self, name), words) for name in ("statement", "detail", "brief", "next")}
        return replace(self, **said)


class Findings(tuple[Finding, ...]):
    """The findings of a diagnosis, most important first; index by position or kind: findings["dominance_raw"]."""

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Finding: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for finding in self:
            if finding.kind == key:
                return finding
        raise KeyError(f"no finding of the kind {key!r}; there are {', '.join(finding.kind for finding in self)}")

    def __repr__(self) -> str:
        return "\n".join(f"- {finding.statement}" for finding in self)

    def _repr_html_(self) -> str:
        items = (f"<b>{html.escape(f.statement)}</b><br>{html.escape(f.detail)}" for f in self)
        return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def judge(row: pd.Series, against: float | pd.Series = 0.0, *, write: Callable[[float], str] = percent) -> Verdict:
    """Judge a number by its printed bounds: both above, both below, or on both sides of `against`.

    against: a number, or one with bounds, which must lie apart. write: the format in which both are printed: bounds
    that look alike decide nothing. Without bounds, nothing is decided.
    """
    least, most = (against, against) if isinstance(against, float) else (against["lower"], against["upper"])
    if row["lower"] > most and write(row["lower"]) != write(most):
        return Verdict.MORE
    return Verdict.LESS if row["upper"] < least and write(row["upper"]) != write(least) else Verdict.UNDECIDED


def lack_words(row: pd.Series) -> str:
    """Say why a number has no bounds, and what would give some; "" if it has them."""
    if not isnan(row["lower"]):
        return ""
    if row["lacks"] == "prompts":
        return f"tokens of fewer than {row['wanted']} prompts give no bounds"
    if row["lacks"] == "tokens":
        return f"{row['n']:,} measured tokens are too few for bounds, which need about {row['wanted']:,}"
    return "no bounds: it does not vary between prompts, or comes from a single one"
