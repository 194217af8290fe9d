"""What a diagnosis is asked for, and what it returns: settings, rows of statistics, and one frozen result."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, overload

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.errors import InputError
from gradscope.intervals import EDGES, Column, interval_labels
from gradscope.objective import PAPER, LossSettings
from gradscope.resampling import FEWEST, Shortage
from gradscope.updates import StepSettings

if TYPE_CHECKING:
    from gradscope.gradients import SumsPlan
    from gradscope.rollouts import Note
    from gradscope.updates import Comparison

TITLE = "gradscope diagnosis"
"""Title of a diagnosis's page."""
COLUMNS = ["statistic", "metric", "interval", "value", "lower", "upper", "n", "unit"]
"""metric: "raw" or "adamw" for a gradient, "none" for what is none; interval: a label such as "[0, ¼)", "all", or "";
n: the tokens that the number rests on, measured ones where norms are meant; unit: share, bits, nats, ratio, cosine,
correlation, squared (the unit of a squared gradient norm), norm, tokens, prompts."""
SHORTAGE = ["lacks", "wanted"]
"""lacks: "prompts" or "tokens" where a number has no bounds because these are too few, else ""; wanted: how many of
them would give bounds, of tokens measured ones of that interval; else 0."""


def make_rows(
    statistic: str,
    found: Float[np.ndarray, "3 k"],
    n: Column | int,
    *,
    unit: str,
    metric: str = "none",
    intervals: Sequence[str] = ("",),
    short: Sequence[Shortage | None] = (),
) -> pd.DataFrame:
    """Make a row per interval of one statistic, from its values and bounds; non-finite numbers become NaN.

    n: a count per interval, or one for all. short: what each lacks for bounds; with too little, it has none.
    """
    found = np.array(found, dtype=np.float64)
    short = [
        None if np.isnan(value) else each
        for value, each in zip(found[0], short or [None] * found.shape[1], strict=True)
    ]
    found[1:, [each is not None for each in short]] = np.nan
    value, lower, upper = np.where(np.isfinite(found), found, np.nan)
    columns = {"statistic": statistic, "metric": metric, "interval": list(intervals)}
    columns |= {"value": value, "lower": lower, "upper": upper, "n": np.broadcast_to(np.asarray(n), value.shape)}
    columns |= {"unit": unit, "lacks": [each.of if each else "" for each in short]}
    columns |= {"wanted": [each.wanted if each else 0 for each in short]}
    return pd.DataFrame(columns)[[*COLUMNS, *SHORTAGE]].astype({"n": np.int64, "wanted": np.int64})


def one_row(
    statistic: str, value: float, n: int, *, unit: str, metric: str = "none", interval: str = ""
) -> pd.DataFrame:
    """Make the row of a number that belongs to no interval."""
    found = np.array([[value], [np.nan], [np.nan]], dtype=np.float64)
    return make_rows(statistic, found, n, unit=unit, metric=metric, intervals=[interval])


def join_rows(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate rows; the empty table if there are none."""
    parts = [part for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS, *SHORTAGE])


def strike_bounds(rows: pd.DataFrame | None) -> pd.DataFrame | None:
    """Remove the bounds of weighted statistics if too few prompts have an advantage; of `statistics` or others.

    Prompts without an advantage are redrawn, too, and say nothing of how much others would differ.
    """
    if rows is None:
        return None
    ends = [name for name in rows if name.endswith(("lower", "upper")) and not name.startswith("token_")]
    if "statistic" not in rows:
        return rows.assign(**dict.fromkeys(ends, np.nan))
    struck = ~rows["statistic"].isin(UNWEIGHTED) & rows["lower"].notna()
    known = {name: rows[name].mask(struck) for name in ends}
    return rows.assign(**known, lacks=rows["lacks"].mask(struck, "prompts"), wanted=rows["wanted"].mask(struck, FEWEST))


def pick_row(statistics: pd.DataFrame, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
    """Return the row of that name; None if it was not computed. Raises InputError if the name occurs twice."""
    chosen = statistics[
        (statistics["statistic"] == statistic) & (statistics["metric"] == metric) & (statistics["interval"] == interval)
    ]
    if len(chosen) > 1:
        raise InputError(f"{statistic} ({metric}, {interval}) is there {len(chosen)} times; give one diagnosis's rows")
    return chosen.iloc[0] if len(chosen) else None


Number = int | float

LARGEST_SEED = 2**57
"""torch takes seeds of 63 bits, and each part of a diagnosis has its own of the 64 that are made of one."""
LARGE = 100_000_000
"""Parameters from which on weightings are compared only on demand: it takes more passes than all the rest."""
WARNINGS = ("logged-logprobs", "zero-advantages", "improbable", "certain-tokens", "temperature", "other-step", "pooled")
"""Kinds of notes that may change the verdict itself; the page shows them first and unfolded."""
CAVEATS = (
    *WARNINGS,
    *("unknown-advantages", "no-gradient", "one-prompt", "few-prompts", "impossible-advantages", "mixed-groups"),
    *("padding", "unknown-values", "left-out", "groups-of-one", "idle-prompts", "fewer-sums", "inexact"),
    *("sampled-norms", "influence-sample", "minutes", "impossible", "large", "late", "empty-interval", "dump"),
    *("on-policy", "no-kl", "second-moments", "no-optimizer", "step", "loss"),
)
"""Kinds of notes, the one first that may change most of what a page says; others come last."""
REWARD_PART = "reward."
"""Beginning of the columns of a response's `reward_parts`."""
VERDICT_PROMPTS = FEWEST
"""Fewest prompts for an interval (`resampling`) and a verdict."""


UNWEIGHTED = ("token_share", "logprob_difference_mean", "ratio_mean")
"""Statistics with bounds that rest on all prompts, with an advantage or without."""
PARTS = {
    "temperatures": "other temperatures",
    "where": "where the norm is",
    "drivers": "probability against entropy",
    "proxies": "proxies of the norm",
    "adamw_sums": "the AdamW-preconditioned summed gradient",
    "adamw_energy": "the AdamW-preconditioned gradient energy",
    "actual_step": "the actual step",
    "influence": "influence between probability intervals",
    "comparison": "what each weighting would change",
}
"""Optional parts, in words."""


@dataclass(frozen=True)
class DiagnosisSettings:
    """Settings that change a diagnosis's numbers."""

    loss: LossSettings = PAPER
    """The objective; a table that is given must have been measured with it."""
    edges: tuple[Number, ...] = EDGES
    """Edges of the intervals of π; a table that is given must have the same."""
    tokens_per_interval: int | Literal["auto", "enough"] | None = "enough"
    """Where the table is measured here: see `MeasureSettings`."""
    classes: int = 4
    """Classes of position and of entropy, of equally many tokens."""
    top: int = 20
    """Tokens shown of the largest ‖w·g‖, and of those that move farthest against their advantage."""
    gradient_memory: int | None = None
    """Bytes for gradients: those of prompts and intervals are made whole or as sketches (see
    `TokenJacobian.gram`); those of steps, predicted and taken, lie in scratch files where they need more.
    None: a sixth of what is free."""
    gradient_way: Literal["whole", "sketches"] | None = None
    """How those of prompts and intervals are made, whatever it costs."""
    minutes: Number | None = None
    """For all of it, the table among it where none is given. Some prompts are looked at and of fewer gradients are
    summed, as many as fit; AdamW's metric, steps and the comparison are left out, with a note, where they would take
    longer. None: everything, as long as it takes."""
    influence_tokens: int | None = 16_000
    """Tokens, of whole prompts, of the step whose movement is split by source; None: skipped."""
    actual_step: bool = True
    """Take the whole batch's step, look, and rewind it."""
    compare: bool | None = None
    """Compare every weighting that the table has columns for; None: of policies below `LARGE` parameters."""
    step: StepSettings | None = None
    """Optimizer of all steps; None: as the optimizer state says, else the paper's SGD."""
    micro_batch_size: int = 8
    """Most responses in a forward pass of the gradients; changes nothing but rounding."""
    resamples: int = 1000
    """Resamples of every bootstrap."""
    seed: int = 0
    """Seed of every random number."""

    def check(self) -> None:
        """Raise InputError for settings with which nothing can be diagnosed."""
        self.loss.check()
        interval_labels(self.edges)
        if self.step is not None:
            self.step.check()
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise InputError(f"minutes is {self.minutes}; give a positive number, or None: as long as it takes")
        for name in ("classes", "top", "gradient_memory", "influence_tokens", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")
        if self.resamples < 1 or not 0 <= self.seed < LARGEST_SEED:
            raise InputError(
                f"resamples is {self.resamples} and seed {self.seed}; give 1 or more, and 0 or more (below 2**57)"
            )


class DiagnosisKeywords(TypedDict, total=False):
    """The fields of `DiagnosisSettings`, as keywords of `diagnose`."""

    loss: LossSettings
    edges: tuple[Number, ...]
    tokens_per_interval: int | Literal["auto", "enough"] | None
    classes: int
    top: int
    gradient_memory: int | None
    gradient_way: Literal["whole", "sketches"] | None
    minutes: Number | None
    influence_tokens: int | None
    actual_step: bool
    compare: bool | None
    step: StepSettings | None
    micro_batch_size: int
    resamples: int
    seed: int


class Verdict(StrEnum):
    """A finding's verdict, for code to ask instead of reading its sentence."""

    DOMINATES = "dominates"
    """More than in proportion, and more than any other interval."""
    MORE = "more"
    """More than what it is compared with: its number, 1−π, one half, the rest."""
    LESS = "less"
    UNDECIDED = "undecided"
    """The interval holds both, or the prompts are too few."""
    UNKNOWN = "unknown"
    """The numbers are not there."""
    BROKEN = "broken"
    """A bound that must hold does not."""
    FACT = "fact"
    """A number of this batch with nothing to decide."""


@dataclass(frozen=True)
class Finding:
    """One sentence of a diagnosis; unpacks as (statement, detail, tone)."""

    kind: str
    """What it is about: dominance_raw, dominance_adamw, concentration, added, norms, summed_raw, summed_adamw, signal,
    influence, direction_positive, direction_negative, where_token_class, where_position_class, driver, spikes, kl,
    mismatch, lag, bounds or setting."""
    verdict: Verdict
    statement: str
    detail: str = ""
    tone: str = "plain"
    """plain, good, warn or bad."""
    brief: str = ""
    """The statement without numbers that a page's first screen has already; "": it is said whole."""

    def __iter__(self) -> Iterator[str]:
        return iter((self.statement, self.detail, self.tone))


class Findings(tuple[Finding, ...]):
    """The findings of a diagnosis, the most telling first; by place, or by kind: findings["dominance_raw"]."""

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


def by_weight(notes: Sequence[Note]) -> list[Note]:
    """Return the notes, those first that may change most; a sentence without a kind counts as one of the log's.

    >>> from gradscope.rollouts import Note
    >>> by_weight([Note("b", "no-optimizer"), "a", Note("c", "few-prompts")])
    ['c', 'a', 'b']
    """
    places = {kind: place for place, kind in enumerate(CAVEATS)}
    return sorted(notes, key=lambda note: places.get(getattr(note, "kind", "dump"), len(places)))


def few_words(informative: int, prompts: int) -> str:
    """So many prompts with an advantage, of all, are too few: the subject of a sentence and its verb."""
    served = "" if informative == prompts else " with an advantage"
    one = informative == 1
    return f"{informative} prompt{'' if one else 's'}{served} {'is' if one else 'are'} too few"


@dataclass(frozen=True)
class Shares:
    """Shares by probability interval of what is no whole diagnosis: enough for a verdict on dominance."""

    statistics: pd.DataFrame
    """Rows of `token_shares`."""
    labels: tuple[str, ...]
    num_prompts: int
    num_informative_prompts: int
    """Those with a gradient."""

    @property
    def few_prompts(self) -> str:
        return few_words(self.num_informative_prompts, self.num_prompts)

    def pick(self, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
        """Return the row of `statistics` of that name; None if it was not computed."""
        return pick_row(self.statistics, statistic, metric, interval)


@dataclass(frozen=True, repr=False, eq=False)
class Diagnosis:
    """What one checkpoint does with one batch of rollouts. Parts that were not computed are None, with a note."""

    statistics: pd.DataFrame
    """Every headline number, a row each: see `COLUMNS` and `SHORTAGE`."""
    notes: tuple[Note, ...]
    """What a reader must know: what is missing, sampled or rough; sentences, each with a `kind`."""
    table: pd.DataFrame
    """The token table."""
    labels: tuple[str, ...]
    """Labels of the intervals."""
    num_prompts: int
    num_responses: int
    settings: DiagnosisSettings
    step: StepSettings
    """The one that was used for steps, predicted or taken."""
    parameters: str = "all parameters"
    """What ‖g‖ and G_a are over, in words."""
    of_prompts: int | None = None
    """Prompts of the whole batch, of which `num_prompts` were looked at; None: all were."""
    of_tokens: int | None = None
    """Tokens of the whole batch; None: those of the table."""
    by_prompt: pd.DataFrame | None = None
    """A row per prompt whose gradient is summed: `gradients.prompt_table` and `add_rollouts`."""
    precision: str | None = None
    """What a larger sample of tokens would add: `precision.sampling_error` in words; None: all were measured."""
    num_informative_prompts: int | None = None
    """Prompts with an advantage other than 0, on which all that is said of gradients rests; None: all."""
    left_out: tuple[str, ...] = ()
    """Parts that were asked for and are not there, of `PARTS`; a note says why."""
    sums: SumsPlan | None = None
    """How the summed gradients were made; None: there are none."""
    bounds: BoundMargins | None = None
    layers: pd.DataFrame | None = None
    """Mean norms by place and interval: `tokens.layer_norms`."""
    drivers: pd.DataFrame | None = None
    """Probability or entropy: `drivers.regress_norms`."""
    proxies: pd.DataFrame | None = None
    """How well cheap numbers stand for the norms: `theory.judge_proxies`."""
    where: pd.DataFrame | None = None
    """Shares by token class, position, length of the response, entropy, sign of Â: `tokens.shares_by`."""
    spikes: pd.DataFrame | None = None
    """Tokens of the largest ‖w·g‖: `tokens.largest_tokens`, with their response's `reward`, and its parts as columns
    REWARD_PART + name, where those are known."""
    modules: pd.DataFrame | None = None
    """Shares of the gradient energy by module, over all blocks: `tokens.module_shares`."""
    temperatures: pd.DataFrame | None = None
    """The headline at other temperatures, where the rollouts' own is not known: `temperatures.try_temperatures`."""
    cosines: pd.DataFrame | None = None
    """Between the intervals' summed gradients."""
    adamw_cosines: pd.DataFrame | None = None
    influence: pd.DataFrame | None = None
    """Who moves whom: `updates.influence_table`."""
    against: pd.DataFrame | None = None
    """Tokens predicted to move farthest against their advantage: `updates.moved_against`."""
    directions: pd.DataFrame | None = None
    """Right-direction shares by interval and sign, with a column `kind`: predicted or actual."""
    mismatch: pd.DataFrame | None = None
    """How far the sampler's log π is from the trainer's, by interval: `steps.mismatch_rows`."""
    entropy: pd.DataFrame | None = None
    """Whose gradients change the mean entropy, by interval and sign of Â: `steps.entropy_rows`."""
    movement: pd.DataFrame | None = None
    """`updates.movement_table` of the actual step, whose columns end with .all; it joins `table` by response and
    position."""
    comparison: Comparison | None = None
    """What each weighting would change: `updates.compare`."""
    findings: Findings = field(default_factory=Findings)
    """What the numbers say, in sentences: found.findings["dominance_raw"].verdict."""
    report: Callable[..., Any] | None = None
    """`make_report` of this diagnosis, its policy and its batch; None for one that was put together by hand."""

    def __post_init__(self) -> None:
        known = {"num_informative_prompts": self.num_prompts, "of_prompts": self.num_prompts}
        for name, value in (known | {"of_tokens": len(self.table)}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def prompts(self) -> str:
        """How many prompts there are, and how many of them have an advantage."""
        served = self.num_informative_prompts
        of = "" if served == self.num_prompts else f" ({served:,} of them with an advantage)"
        return f"{self.num_prompts:,} prompt{'' if self.num_prompts == 1 else 's'}{of}"

    @property
    def sums_prompts(self) -> int | None:
        """Prompts whose gradients are summed; None: there are no sums."""
        return None if self.by_prompt is None else len(self.by_prompt)

    @property
    def summed_prompts(self) -> str:
        """Which prompts the summed gradients are of."""
        partial = self.sums_prompts is not None and self.sums_prompts < self.num_prompts
        return f"{self.sums_prompts:,} of the {self.prompts}" if partial else self.prompts

    @property
    def few_prompts(self) -> str:
        """How many prompts the numbers rest on, which are too few: the subject of a sentence and its verb."""
        return few_words(self.num_informative_prompts, self.num_prompts)

    @property
    def warnings(self) -> tuple[Note, ...]:
        """The notes that may change the verdict itself."""
        return tuple(note for note in self.notes if getattr(note, "kind", "") in WARNINGS)

    def pick(self, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
        """Return the row of `statistics` of that name; None if it was not computed."""
        return pick_row(self.statistics, statistic, metric, interval)

    def __repr__(self) -> str:
        return f"{self._title()}\n{self.findings!r}"

    def _repr_html_(self) -> str:
        return f"<p><b>{self._title()}</b></p>{self.findings._repr_html_()}"

    def _title(self) -> str:
        return (
            f"Diagnosis of {len(self.table):,} tokens of {self.num_responses} responses to {self.num_prompts} prompts; "
            f"{len(self.statistics)} statistics, {len(self.notes)} notes"
        )

    def to_html(
        self, path: str | Path, *, title: str = TITLE, facts: Mapping[str, str] | None = None, notes: Sequence[str] = ()
    ) -> Path:
        """Write the page as one file that fetches nothing; return its path. The rest is as in `make_report`."""
        if self.report is None:
            raise InputError(
                "this diagnosis was put together by hand; make_report(found, policy, batch) makes its page"
            )
        return self.report(title=title, facts=facts, notes=notes).to_html(path)


@dataclass(frozen=True)
class BoundMargins:
    """Prop. 4.2 on the logits of every token, and how near the nearest comes to breaking it."""

    num_tokens: int
    violations: int
    """Tokens outside a bound by more than rounding explains."""
    lower_margin: float
    """Smallest ‖e − π‖ / lower bound − 1 of all tokens that are not certain: below 0 is rounding, or a violation."""
    upper_margin: float
    """Smallest 1 − ‖e − π‖ / upper bound."""
    tolerance: float
    """Largest relative slack granted to a token, for the rounding of float32."""
