"""Settings, rows of statistics, and the frozen result of a diagnosis."""

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
from gradscope.resampling import FEWEST, Shortage, Supply
from gradscope.runs import counted
from gradscope.updates import StepSettings

if TYPE_CHECKING:
    from gradscope.gradients import SumsPlan
    from gradscope.rollouts import Note
    from gradscope.updates import Comparison

TITLE = "gradscope diagnosis"
"""Title of a diagnosis's page."""
COLUMNS = ["statistic", "metric", "interval", "value", "lower", "upper", "n", "unit"]
"""metric: "raw" or "adamw" for gradients, else "none"; interval: a label such as "[0, ¼)", "all", or ""; n: number of
tokens behind the value (measured tokens for norms); unit: share, bits, nats, ratio, cosine, correlation, squared (the
unit of a squared gradient norm), norm, tokens, prompts."""
SHORTAGE = ["lacks", "wanted"]
"""lacks: "prompts" or "tokens" if there are too few of them for bounds, else ""; wanted: how many prompts, or measured
tokens of that interval, would give bounds, else 0."""


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
    """Make one statistic's row for each interval from its values and bounds; non-finite numbers become NaN.

    n: counts per interval, or one for all. short: what each interval lacks; those that lack anything get no bounds.
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


def one_row(statistic: str, value: float, n: int, *, unit: str) -> pd.DataFrame:
    """Make the row of a number that is not specific to an interval."""
    found = np.array([[value], [np.nan], [np.nan]], dtype=np.float64)
    return make_rows(statistic, found, n, unit=unit, metric="none", intervals=[""])


def join_rows(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate rows; return an empty table if there are none."""
    parts = [part for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS, *SHORTAGE])


def strike_bounds(rows: pd.DataFrame | None) -> pd.DataFrame | None:
    """Remove the bounds of weighted statistics (`statistics` or others) if too few prompts have an advantage.

    The bootstrap also draws prompts without an advantage, which say nothing about the variation between the others.
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
    """Return a statistic's row, or None if it was not computed. Raises InputError if there are several."""
    chosen = statistics[
        (statistics["statistic"] == statistic) & (statistics["metric"] == metric) & (statistics["interval"] == interval)
    ]
    if len(chosen) > 1:
        raise InputError(f"{statistic} ({metric}, {interval}) occurs {len(chosen)} times; give one diagnosis's rows")
    return chosen.iloc[0] if len(chosen) else None


Number = int | float

LARGEST_SEED = 2**57
"""torch seeds have 63 bits."""
LARGE = 100_000_000
"""Size from which weightings are compared only on request, since this takes more passes than all the rest."""
WARNINGS = (
    *("logged-logprobs", "zero-advantages", "improbable", "certain-tokens", "temperature", "other-temperature"),
    *("other-step", "pooled", "several-runs"),
)
"""Kinds of notes that may change the verdict itself; the page shows them first, unfolded."""
CAVEATS = (
    *WARNINGS,
    *("unknown-advantages", "no-gradient", "one-prompt", "few-prompts", "impossible-advantages", "mixed-groups"),
    *("padding", "unknown-values", "left-out", "groups-of-one", "idle-prompts", "fewer-sums", "inexact"),
    *("sampled-norms", "influence-sample", "minutes", "impossible", "large", "late", "empty-interval", "dump"),
    *("on-policy", "no-kl", "second-moments", "no-optimizer", "step", "loss"),
)
"""Kinds of notes, those first that may change most of the page; other kinds come last."""
REWARD_PART = "reward."
"""Prefix of the columns with a response's `reward_parts`."""
VERDICT_PROMPTS = FEWEST
"""Minimum number of prompts for a confidence interval (`resampling`) and a verdict."""


UNWEIGHTED = ("token_share", "logprob_difference_mean", "ratio_mean")
"""Statistics whose bounds rest on all prompts, including those without an advantage."""
PARTS = {
    "temperatures": "other temperatures",
    "where": "where the norm is",
    "drivers": "probability against entropy",
    "proxies": "proxies of the norm",
    "sums": "the summed gradient, even of a single prompt",
    "adamw_sums": "the AdamW-preconditioned summed gradient",
    "adamw_energy": "the AdamW-preconditioned gradient energy",
    "actual_step": "the actual step",
    "influence": "influence between probability intervals",
    "comparison": "what each weighting would change",
}
"""Optional parts and their names in sentences."""


@dataclass(frozen=True)
class DiagnosisSettings:
    """Settings that change a diagnosis's numbers."""

    loss: LossSettings = PAPER
    """The objective; a given table must have been measured with it."""
    edges: tuple[Number, ...] = EDGES
    """Edges of the intervals of π; a given table must have the same."""
    tokens_per_interval: int | Literal["auto", "enough"] | None = "enough"
    """Tokens to measure per interval if no table is given; see `MeasureSettings`."""
    classes: int = 4
    """Number of classes by position and by entropy, each with the same number of tokens."""
    top: int = 20
    """Number of tokens to list by ‖w·g‖ and by movement against their advantage."""
    gradient_memory: int | None = None
    """Bytes for gradients. Gradients of prompts and intervals are computed whole or as sketches (see
    `TokenJacobian.gram`) to fit; those of predicted and real steps use scratch files if they need more. None: a sixth
    of the free memory."""
    gradient_way: Literal["whole", "sketches"] | None = None
    """How to compute the gradients of prompts and intervals, regardless of cost; None: what fits."""
    minutes: Number | None = None
    """Time limit for the whole diagnosis, including the table if none is given. Prompts are subsampled to fit, those
    with summed gradients further; the sums, AdamW's metric, steps and the comparison are left out, with a note, if
    they would take longer. None: no limit."""
    influence_tokens: int | None = 16_000
    """Number of tokens (in whole prompts) of the step whose movement is split by source; None: skip this."""
    actual_step: bool = True
    """Take one real step with the whole batch, measure its effect, and undo it."""
    compare: bool | None = None
    """Compare every weighting whose columns the table has; None: if the policy has fewer than `LARGE` parameters."""
    step: StepSettings | None = None
    """Optimizer of all steps; None: the optimizer state's, else the paper's SGD."""
    micro_batch_size: int = 8
    """Maximum number of responses in a forward pass for gradients; affects only rounding."""
    resamples: int = 1000
    """Number of resamples of every bootstrap."""
    seed: int = 0
    """Seed for all random numbers."""

    def check(self) -> None:
        """Raise InputError for settings that make no diagnosis possible."""
        self.loss.check()
        interval_labels(self.edges)
        if self.step is not None:
            self.step.check()
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise InputError(f"minutes is {self.minutes}; give a positive number, or None for no limit")
        for name in ("classes", "top", "gradient_memory", "influence_tokens", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")
        if self.resamples < 1 or not 0 <= self.seed < LARGEST_SEED:
            raise InputError(f"resamples is {self.resamples} and seed {self.seed}; give 1 or more, and 0 to 2**57 − 1")


class DiagnosisKeywords(TypedDict, total=False):
    """Fields of `DiagnosisSettings` as keywords of `diagnose`."""

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
    """A finding's verdict, for use in code."""

    DOMINATES = "dominates"
    """More than proportional, and more than any other interval."""
    MORE = "more"
    """More than the reference: the share of tokens, 1−π, one half, or the rest."""
    LESS = "less"
    UNDECIDED = "undecided"
    """The confidence interval contains both, or there are too few prompts."""
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
    """Its subject: dominance_raw, dominance_adamw, concentration, added, norms, summed_raw, summed_adamw, signal,
    influence, direction_positive, direction_negative, where_token_class, where_position_class, driver, spikes, kl,
    mismatch, lag, bounds or setting."""
    verdict: Verdict
    statement: str
    detail: str = ""
    tone: str = "plain"
    """plain, good, warn or bad."""
    brief: str = ""
    """The statement without numbers that the page's first screen already shows; "": use the full statement."""

    def __iter__(self) -> Iterator[str]:
        return iter((self.statement, self.detail, self.tone))


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


def by_weight(notes: Sequence[Note]) -> list[Note]:
    """Sort notes by how much they may change; a sentence without a kind counts as a note of the log.

    >>> from gradscope.rollouts import Note
    >>> by_weight([Note("b", "no-optimizer"), "a", Note("c", "few-prompts")])
    ['c', 'a', 'b']
    """
    places = {kind: place for place, kind in enumerate(CAVEATS)}
    return sorted(notes, key=lambda note: places.get(getattr(note, "kind", "dump"), len(places)))


@dataclass(frozen=True)
class Shares:
    """Shares by probability interval without a whole diagnosis: enough for a verdict on dominance."""

    statistics: pd.DataFrame
    """Rows of `token_shares`."""
    labels: tuple[str, ...]
    num_prompts: int
    num_informative_prompts: int
    """Number of prompts with a gradient."""

    @property
    def supply(self) -> Supply:
        return Supply(self.num_informative_prompts, self.num_prompts)

    def pick(self, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
        """Return a row of `statistics`, or None if it was not computed."""
        return pick_row(self.statistics, statistic, metric, interval)


@dataclass(frozen=True, repr=False, eq=False)
class Diagnosis:
    """The diagnosis of one checkpoint on one batch. Parts that were not computed are None; notes say why."""

    statistics: pd.DataFrame
    """All headline numbers, one per row; see `COLUMNS` and `SHORTAGE`."""
    notes: tuple[Note, ...]
    """Sentences about what is missing, sampled or approximate, each with a `kind`."""
    table: pd.DataFrame
    """The token table."""
    labels: tuple[str, ...]
    """Labels of the intervals."""
    num_prompts: int
    num_responses: int
    settings: DiagnosisSettings
    step: StepSettings
    """Optimizer settings of the predicted and real steps."""
    parameters: str = "all parameters"
    """The parameters that ‖g‖ and G_a cover, in words."""
    of_prompts: int | None = None
    """Prompts in the whole batch, of which `num_prompts` were used; None: all were used."""
    of_tokens: int | None = None
    """Tokens in the whole batch; None: as in the table."""
    by_prompt: pd.DataFrame | None = None
    """One row per prompt with a summed gradient: `gradients.prompt_table` and `add_rollouts`."""
    precision: str | None = None
    """What a larger sample of tokens would add to the lowest interval's share: `SamplingError.of_interval`; None: all
    were measured, or that share has no interval."""
    num_informative_prompts: int | None = None
    """Number of prompts with a nonzero advantage, on which all statements about gradients rest; None: all."""
    of_informative_prompts: int | None = None
    """Prompts with a nonzero advantage in the whole batch; None: as many."""
    own_responses: int | None = None
    """Responses that the checkpoint itself sampled; None: as far as is known, all of them."""
    verdict_minutes: float | None = None
    """Time limit that would give a verdict, if a shorter one left prompts or tokens out; None: unknown."""
    left_out: tuple[str, ...] = ()
    """Keys of `PARTS` that were requested but are missing; notes say why."""
    sums: SumsPlan | None = None
    """How the summed gradients were computed; None if they were not."""
    bounds: BoundMargins | None = None
    layers: pd.DataFrame | None = None
    """Mean norms by layer and interval: `tokens.layer_norms`."""
    drivers: pd.DataFrame | None = None
    """Whether probability or entropy drives the norms: `drivers.regress_norms`."""
    proxies: pd.DataFrame | None = None
    """How well cheap proxies predict the norms: `theory.judge_proxies`."""
    where: pd.DataFrame | None = None
    """Shares by token class, position, response length, entropy and sign of Â: `tokens.shares_by`."""
    spikes: pd.DataFrame | None = None
    """Tokens with the largest ‖w·g‖: `tokens.largest_tokens`, with their response's `reward` and its parts (columns
    REWARD_PART + name) if known."""
    modules: pd.DataFrame | None = None
    """Shares of the gradient energy by module, over all blocks: `tokens.module_shares`."""
    temperatures: pd.DataFrame | None = None
    """The headline at other temperatures if the rollouts' is unknown: `temperatures.try_temperatures`."""
    cosines: pd.DataFrame | None = None
    """Cosines between the intervals' summed gradients."""
    adamw_cosines: pd.DataFrame | None = None
    influence: pd.DataFrame | None = None
    """Which interval moves which: `updates.influence_table`."""
    against: pd.DataFrame | None = None
    """Tokens predicted to move most against their advantage: `updates.moved_against`."""
    directions: pd.DataFrame | None = None
    """Right-direction shares by interval and sign, with a column `kind`: predicted or actual."""
    mismatch: pd.DataFrame | None = None
    """Difference between the sampler's and the trainer's log π by interval: `steps.mismatch_rows`."""
    entropy: pd.DataFrame | None = None
    """Contributions to the change of the mean entropy by interval and sign of Â: `steps.entropy_rows`."""
    movement: pd.DataFrame | None = None
    """`updates.movement_table` of the real step, columns ending in .all; join with `table` by response and position."""
    comparison: Comparison | None = None
    """Effect of each weighting: `updates.compare`."""
    findings: Findings = field(default_factory=Findings)
    """The numbers in sentences, e.g. found.findings["dominance_raw"].verdict."""
    advice: tuple[str, ...] = ()
    """What to do next, most urgent first: `advice.advise`."""
    report: Callable[..., Any] | None = None
    """`make_report` for this diagnosis, its policy and batch; None if the diagnosis was assembled by hand."""

    def __post_init__(self) -> None:
        served = self.num_prompts if self.num_informative_prompts is None else self.num_informative_prompts
        known = {"num_informative_prompts": served, "of_informative_prompts": served, "of_prompts": self.num_prompts}
        for name, value in (known | {"of_tokens": len(self.table)}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def prompts(self) -> str:
        """The number of prompts in words, such as "12 prompts (8 of them with an advantage)"."""
        served = self.num_informative_prompts
        of = "" if served == self.num_prompts else f" ({served:,} of them with an advantage)"
        return f"{counted(self.num_prompts, 'prompt')}{of}"

    @property
    def sums_prompts(self) -> int | None:
        """Number of prompts with summed gradients; None if there are none."""
        return None if self.by_prompt is None else len(self.by_prompt)

    @property
    def summed_prompts(self) -> str:
        """The prompts of the summed gradients in words."""
        partial = self.sums_prompts is not None and self.sums_prompts < self.num_prompts
        return f"{self.sums_prompts:,} of the {self.prompts}" if partial else self.prompts

    @property
    def supply(self) -> Supply:
        """The prompts behind all statements about gradients; `supply.too_few` is the headline if there are too few."""
        looked_at = self.num_informative_prompts, self.num_prompts, self.num_responses
        return Supply(*looked_at, self.of_informative_prompts, self.of_prompts, self.verdict_minutes)

    @property
    def warnings(self) -> tuple[Note, ...]:
        """Notes that may change the verdict itself."""
        return tuple(note for note in self.notes if getattr(note, "kind", "") in WARNINGS)

    def pick(self, statistic: str, metric: str = "none", interval: str = "") -> pd.Series | None:
        """Return a row of `statistics`, or None if it was not computed."""
        return pick_row(self.statistics, statistic, metric, interval)

    def __repr__(self) -> str:
        return "\n".join([self._title(), repr(self.findings), *(f"Next: {words}" for words in self.advice)])

    def _repr_html_(self) -> str:
        todo = "".join(f"<p><b>Next</b> {html.escape(words)}</p>" for words in self.advice)
        return f"<p><b>{self._title()}</b></p>{self.findings._repr_html_()}{todo}"

    def _title(self) -> str:
        return (
            f"Diagnosis of {counted(len(self.table), 'token')} of {counted(self.num_responses, 'response')} to "
            f"{counted(self.num_prompts, 'prompt')}; {len(self.statistics)} statistics, "
            f"{counted(len(self.notes), 'note')}"
        )

    def to_html(
        self, path: str | Path, *, title: str = TITLE, facts: Mapping[str, str] | None = None, notes: Sequence[str] = ()
    ) -> Path:
        """Write the page as one self-contained file and return its path; other arguments as in `make_report`."""
        if self.report is None:
            raise InputError("this diagnosis was assembled by hand; use make_report(found, policy, batch)")
        return self.report(title=title, facts=facts, notes=notes).to_html(path)


@dataclass(frozen=True)
class BoundMargins:
    """Prop. 4.2 on the logits of every token: violations and the smallest margins."""

    num_tokens: int
    violations: int
    """Number of tokens outside a bound by more than rounding."""
    lower_margin: float
    """Smallest ‖e − π‖ / lower bound − 1 over tokens that are not certain; negative from rounding or a violation."""
    upper_margin: float
    """Smallest 1 − ‖e − π‖ / upper bound."""
    tolerance: float
    """Largest relative slack allowed for a token because of float32 rounding."""
