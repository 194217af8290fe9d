"""A token table within minutes: prompts in random order, one at a time, as many as fit.

A prompt is booked when it is scored and a sample of its tokens is measured, as large as `budget.allot` says. Booking
ends with the list, or when the time that is left is the price of what follows, so many forward passes over the booked
prompts. Once all are booked and time is left, the sample grows, up to twice as large at a time. Norms in AdamW's
metric, which need the whole gradient, come last: the same tokens once more.

Processes share the prompts, each by its own clock. Part 0 of an interrupted run holds what was allotted and the seconds
spent, part 1 + i the i-th prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil
from time import perf_counter
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.budget.allot import AFTER, MARGIN, Afterwards, Allotment, Lengths, allot, time_position
from gradscope.gradients.columns import ADAMW, LOGITS, PARAMETERS, to_frame
from gradscope.gradients.engine.grouping import POSITION_COST
from gradscope.gradients.logged_logprobs import note_logged
from gradscope.gradients.operator.forward_mode import BACKWARD
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.sample import SAMPLING_PROBABILITY, ThresholdSample
from gradscope.gradients.settings import DEFAULT_MINUTES, MeasureSettings, settle_minutes
from gradscope.gradients.statistics import find_statistics
from gradscope.gradients.table import Known, Parts, TableMeasurement
from gradscope.objective import LOGPROB, Quantity
from gradscope.policy import Policy
from gradscope.resampling import FEWEST
from gradscope.rollouts import TokenBatch, own_first, served_prompts
from gradscope.runs import counted

SCOUTS = 3
"""Prompts that set the sampling probabilities."""
CHOICE = 0
"""Number of the part that records what was allotted, and the seconds spent so far."""
GROWTH = (2.0, 1.5, 1.25)
"""Factors by which a sample grows, of which the first that fits is taken."""
LATER = 1.1
"""Factor on the price of what follows, so that it starts even on a machine that gets a little slower."""
RECENT = 3
"""Prompts whose speed predicts that of the next one."""


class TimedMeasurement(TableMeasurement):
    """A measurement that ends within `settings.minutes`, together with what follows it; see the module.

    following: what is computed after the table. tell: receives a line that says what the minutes will give, in the main
    process. Other arguments are those of `TableMeasurement`.
    """

    def __init__(
        self,
        policy: Policy,
        batch: TokenBatch,
        settings: MeasureSettings,
        following: Afterwards = Afterwards(),  # noqa: B008  (frozen)
        tell: Callable[[str], None] = lambda text: None,
        **known: Unpack[Known],
    ) -> None:
        super().__init__(policy, batch, settings, **known)
        self._tell, self._finishing = tell, AFTER * bool(following.passes)
        self.following = following if self._is_weighted() else Afterwards(least=following.least)
        """What is computed after the table: no sums if no token has a weight."""
        self.allotment: Allotment | None = None
        """How the minutes are used; None before entering."""
        self._frames: dict[int, pd.DataFrame] = {}
        """Rows of the table by place in the order, of the prompts that this process has booked."""
        self._speeds: list[tuple[float, float, float]] = []
        """Of each booked prompt: positions, seconds of scoring and of measuring."""
        self._measuring, self._carried = 0.0, 0.0
        """Seconds of measuring, and positions that backward passes carried for tokens in them."""

    @cached_property
    def order(self) -> Int[Tensor, " n"]:
        """The prompts in random order, those that the checkpoint itself sampled first."""
        rng = np.random.default_rng([self.settings.seed, 1])
        return own_first(self.whole, torch.from_numpy(rng.permutation(self.J.prompts.numpy())))

    @property
    def left(self) -> float:
        """Seconds that are left for the table and what is computed after it."""
        return 60 * self.settings.minutes - self.watch.seconds() - self._finishing * self.watch.slowness()

    def restore(self, parts: Parts) -> None:
        """Take up an interrupted run: what was allotted, the seconds spent, and the prompts booked."""
        mine = []
        with self.processes.together():
            if self.processes.is_main and parts.has_part(CHOICE):
                known = parts.read_part(CHOICE).iloc[0]
                each = None if known["each"] < 0 else int(known["each"])
                places = [place for place in range(len(self.order)) if parts.has_part(1 + place)]
                booked = {place: parts.read_part(1 + place) for place in places}
                mine = [(Allotment(int(known["prompts"]), each, known["reserved"]), known["spent"], booked)]
        if not (mine := self.processes.gather(mine)):
            return
        self.allotment, self.watch.earlier, booked = mine[0]
        self._frames = {place: booked[place] for place in self._mine if place in booked}

    def fill(self, parts: Parts) -> Iterator[pd.DataFrame]:
        """Book prompts into `parts` until time is up; return the table of all processes, a DataFrame per response."""
        missing, expected = [place for place in self._mine if place not in self._frames], self.allotment.prompts
        self._record(parts)
        with self.processes.together(), self.progress.stage("measuring prompt by prompt", expected, "prompts") as done:
            for place in missing:
                needed = self.processes.is_main and len(self._frames) < self.following.least
                if not needed and not self._fits(place):
                    break
                self._book(place, parts)
                if len(self._speeds) >= RECENT:  # their speed is known, and changes with what else the machine does
                    reserved = self._allot(*self._pace(RECENT))[0].reserved
                    self.allotment = replace(self.allotment, reserved=reserved)
                done(1)
        while self._grow(parts):
            pass
        return self._assemble()

    def describe_sample(self) -> dict[str, Any] | str:
        each, why = self.allotment.each, "minutes"
        if self.asked.minutes == DEFAULT_MINUTES:
            why = "minutes, the default of a large policy"
        seconds = {"preparing": self.watch.seconds() - self._measuring, "measuring": self._measuring}
        of = {"tokens_per_interval": each, "of": "each prompt, on average"}
        return of | {"why": why, "drawn": self.settings.sample, "seconds": seconds}

    def _prepare(self) -> None:
        """Decide how the minutes are used, say so, score the first prompts, and check the engine on one of them."""
        if self.allotment is None:
            with self.processes.together(), self.progress.stage("timing a few responses"):
                mine = [self._allot(time_position(self._alone))] if self.processes.is_main else []
            self.allotment, self.verdict_minutes = self.processes.gather(mine)[0]
            if self.processes.is_main:
                self._tell(self._describe())
        _ = self.meter  # once for all prompts
        with self.processes.together():
            places = range(min(SCOUTS, len(self.order)))
            self._scouts = {place: self._score(place, check=place == 0) for place in places}
            tokens, size = pd.concat([frame for frame, _ in self._scouts.values()]), len(self.edges) - 1
            self._sample = ThresholdSample(tokens, len(places), size, self.settings.sample, self.settings.seed)

    def _allot(self, position: float, measuring: float = 0.0) -> tuple[Allotment, float | None]:
        """Return what the time allows at a pace, and the minutes of a verdict.

        position: seconds of one of a forward pass; measuring: those spent on the tokens of one in a booked prompt.
        """
        lengths, count = self._lengths, self.processes.count
        known = {"prompts": len(self.order), "intervals": len(self.edges) - 1, "wanted": self._wanted}
        # At another pace, what is booked would have taken this long.
        left = self.left + sum(map(self._size, self._frames)) * (position + measuring)
        spent, time = 60 * self.settings.minutes - left, (left * count, position * lengths.positions)
        found = allot(*time, lengths, self.following, **known, again=self._again)
        return found, None if found.verdict is None else (spent + found.verdict / count) / 60

    @cached_property
    def _lengths(self) -> Lengths:
        return Lengths.of(self.whole)

    def _describe(self) -> str:
        """Say what these minutes will give."""
        found, prompts = self.allotment, counted(len(self.order), "prompt")
        limit = " (--minutes none: no limit)" if self.asked.minutes == DEFAULT_MINUTES else ""
        told = f"{self.settings.minutes:g} minutes, loading included{limit}, should do for"
        if found.each is None:
            return f"{told} all {prompts} and every one of their {counted(self.whole.num_tokens, 'token')}"
        told = f"{told} about {found.prompts:,} of {prompts}, {found.each} tokens of each interval measured in each"
        if self.verdict_minutes is None:
            return told
        few = "too few for all that a verdict rests on"
        if found.prompts < found.needed:
            few = f"too few for a verdict, for which {found.needed} prompts must be looked at"
        return f"{told}: {few}; give about {ceil(self.verdict_minutes)}"

    @property
    def _wanted(self) -> int | None:
        """How many prompts, in order, include as many with a gradient as a verdict needs; None: not even all."""
        served = torch.isin(self.order, served_prompts(self.whole)).cumsum(0)
        return int((served < FEWEST).sum()) + 1 if len(served) and served[-1] >= FEWEST else None

    def _is_weighted(self) -> bool:
        """Return whether any token can have a weight, by advantage or KL; otherwise there is nothing to sum."""
        advantages, loss = self.whole.advantages, self.settings.loss
        if loss.is_whole:
            return True
        pulled = loss.kl_coef > 0 and self.whole.ref_logprobs is not None
        return pulled or (advantages is not None and bool(advantages[self.whole.response_mask].any()))

    @property
    def _again(self) -> bool:
        """Whether tokens are measured once more, in AdamW's metric."""
        return self._optimizer_state is not None and self._is_weighted()

    @property
    def _alone(self) -> TokenJacobian:
        return self.J.alone()

    @cached_property
    def _rows(self) -> list[list[int]]:
        """Responses with kept tokens by place in the order."""
        kept = self.whole.response_mask.any(1)
        return [((self.whole.group_ids == prompt) & kept).nonzero()[:, 0].tolist() for prompt in self.order]

    @property
    def _mine(self) -> range:
        """Places in the order whose prompts this process books."""
        return range(self.processes.rank, len(self.order), self.processes.count)

    def _size(self, place: int) -> float:
        """Return the positions of a forward pass over a prompt's responses."""
        return self._sizes[place]

    @cached_property
    def _sizes(self) -> list[float]:
        lengths = self.whole.attention_mask.sum(1)
        return [float(lengths[rows].sum()) for rows in self._rows]

    def _cost(self, place: int, tokens: Bool[np.ndarray, " n"]) -> float:
        """Return the positions that backward passes carry for these tokens, with each response's fixed cost."""
        ends = [self.whole.sequence(row)[1].numpy() for row in self._rows[place]]
        chosen = np.split(tokens, np.cumsum([*map(len, ends)])[:-1])
        reached = [own[mask] for own, mask in zip(ends, chosen, strict=True) if mask.any()]
        return float(sum(own.sum() + POSITION_COST * own.max() for own in reached))

    def _score(self, place: int, *, check: bool = False) -> tuple[pd.DataFrame, float]:
        """Return a prompt's rows without the columns that need a backward pass, and the seconds of a forward pass."""
        start, rows = perf_counter(), self._rows[place]
        J = self._alone.select(rows)
        known = find_statistics(J.meter, J.batch, self.settings.loss, edges=self.edges, names=rows)
        frames = [to_frame(self._known(known, *named)) for named in enumerate(rows)]
        seconds = perf_counter() - start
        if check and self.settings.self_check:
            self.check = self._self_check(J, known, np.random.default_rng(self.settings.seed))
        return pd.concat(frames, ignore_index=True), seconds

    def _measure(self, place: int, tokens: Bool[np.ndarray, " n"]) -> pd.DataFrame:
        """Return the columns of a prompt's rows that need a backward pass, NaN but for these tokens."""
        start, chosen = perf_counter(), torch.tensor(tokens)
        norms, found = self._alone.select(self._rows[place]).row_norms(chosen, scale=self._scale), {}
        for group in norms.groups:
            found |= {row: to_frame(self._norms(own)) for row, own in zip(group, norms.measure(group), strict=True)}
        self._measuring += perf_counter() - start
        self._carried += self._cost(place, tokens)
        return pd.concat([found[row] for row in sorted(found)], ignore_index=True)

    def _fits(self, place: int) -> bool:
        """Return whether the time suffices for another prompt and for all that follows."""
        if not self._speeds:
            return self.left > 0
        scoring, measuring = self._pace(RECENT)
        own, mine = self._size(place), sum(map(self._size, [*self._frames, place]))
        later = self._later_passes() * scoring * mine * self.processes.count + self._again * measuring * mine
        return own * (scoring + measuring) + LATER * later <= self.left

    def _pace(self, recent: int = 0) -> tuple[float, float]:
        """Return the seconds of scoring and of measuring, for a position of the last prompts booked; 0: of all."""
        positions, scoring, measuring = np.sum(self._speeds[-recent:], axis=0)
        return scoring / positions, measuring / positions

    def _later_passes(self) -> float:
        """Return the forward passes over all booked prompts that follow."""
        return self.allotment.reserved + self._again * (1 + BACKWARD)

    def _book(self, place: int, parts: Parts) -> None:
        frame, seconds = self._scouts.pop(place, None) or self._score(place)
        before, chosen = self._measuring, self._sample.take(frame, place, self.allotment.each)
        self._keep(place, pd.concat([frame, self._measure(place, chosen)], axis=1), parts)
        self._speeds.append((self._size(place), seconds, self._measuring - before))

    def _keep(self, place: int, frame: pd.DataFrame, parts: Parts) -> None:
        self._frames[place] = frame
        parts.write_part(1 + place, frame)
        self._record(parts)

    def _record(self, parts: Parts) -> None:
        """Write what was allotted and the seconds spent, for a later run."""
        if self.processes.is_main:
            found, spent = self.allotment, self.watch.seconds()
            known = {"each": -1 if found.each is None else found.each, "reserved": found.reserved}
            parts.write_part(CHOICE, pd.DataFrame([known | {"prompts": found.prompts, "spent": spent}]))

    def _grow(self, parts: Parts) -> bool:
        """Enlarge the sample if every prompt is booked and time is left; return whether it grew."""
        booked = sum(self.processes.gather([len(self._frames)]))
        (each, *_) = self.processes.gather([self._larger_sample() if booked == len(self.order) else None])
        if each is None:
            return False
        self.allotment = replace(self.allotment, each=each)
        with (
            self.processes.together(),
            self.progress.stage("measuring more tokens", len(self._frames), "prompts") as done,
        ):
            for place, frame in self._frames.items():
                more = self._more(place, each)
                if more.any():
                    columns = self._measure(place, more)
                    frame.loc[more, columns.columns] = columns[more]
                    self._keep(place, frame, parts)
                done(1)
        return True

    def _more(self, place: int, each: int) -> Bool[np.ndarray, " n"]:
        """Return the mask of a booked prompt's tokens that a larger sample adds."""
        frame = self._frames[place]
        return self._sample.take(frame, place, each) & frame[PARAMETERS].isna().to_numpy()

    def _larger_sample(self) -> int | None:
        """Return the tokens of each interval and prompt that the time allows; None: no more than now."""
        each = self.allotment.each
        if each is None or not self._speeds or all(frame[PARAMETERS].notna().all() for frame in self._frames.values()):
            return None
        size = sum(map(self._size, self._frames)) * self.processes.count
        left, rate = self.left - LATER * self._later_passes() * self._pace()[0] * size, self._measuring / self._carried
        if self._again:
            known = {place: frame[PARAMETERS].notna().to_numpy() for place, frame in self._frames.items()}
            left -= rate * sum(self._cost(*measured) for measured in known.items())
        for factor in GROWTH:
            more = ceil(each * factor)
            cost = sum(self._cost(place, self._more(place, more)) for place in self._frames)
            if (1 + self._again) * rate * cost <= left:
                return more
        return None

    def _assemble(self) -> Iterator[pd.DataFrame]:
        """Keep to the booked prompts, add norms in AdamW's metric, and return the table, a DataFrame per response."""
        frames = self._all_frames()
        self.J = self.J.of_prompts(self.order[[*frames]])
        self.batch = self.J.batch
        self._finish_prices()
        if self._again:
            self._add_metric(frames)
            frames = self._all_frames()
        each = self.allotment.each
        probabilities = {place: self._sample.probabilities(frame, each) for place, frame in frames.items()}
        table = pd.concat(frames.values(), ignore_index=True)
        if (drawn := np.concatenate([*probabilities.values()])).min() < 1:
            table.insert(table.columns.get_loc(LOGITS), SAMPLING_PROBABILITY, drawn.astype(np.float32))
        table = table.sort_values("response", kind="stable", ignore_index=True)
        if self.processes.is_main:
            self.notes = note_logged(self.policy, self.batch, table)
        parts = dict([*table.groupby("response")])
        empty = pd.DataFrame()
        return (parts[row].reset_index(drop=True) if row in parts else empty for row in range(len(self.batch)))

    def _all_frames(self) -> dict[int, pd.DataFrame]:
        """Return the rows of all processes' prompts, by place in the order."""
        return dict(sorted(self.processes.gather([*self._frames.items()]), key=lambda known: known[0]))

    def _finish_prices(self) -> None:
        """Find, from what prompts took, the seconds of a forward pass and, if there are too few, those of a verdict."""
        if not self._speeds:  # all of them are of an earlier run
            self._speeds = [(self._size(place), seconds, 0.0) for place, (_, seconds) in self._scouts.items()]
        (position, measuring), used = self._pace(), self.batch.response_mask.any(1)
        self.pass_seconds = self.processes.gather([position * float(self.batch.attention_mask[used].sum())])[0]
        booked, wanted = len(self.J.prompts), self._wanted
        if wanted is None or booked >= wanted:
            self.verdict_minutes = None
        else:
            least = MARGIN * self.watch.seconds() / 60 * wanted / booked
            self.verdict_minutes = self._allot(position, measuring)[1] or least

    def _add_metric(self, frames: dict[int, pd.DataFrame]) -> None:
        """Measure the same tokens in AdamW's metric, whose v̂ includes the gradient of all booked prompts."""
        weights = pd.concat(frames.values()).sort_values("response", kind="stable")["weight"]
        self._scale = self._find_scale(torch.tensor(weights.to_numpy()))
        if self._scale is None:
            return
        with self.processes.together(), self.progress.stage("AdamW's metric", len(self._frames), "prompts") as done:
            if self.processes.is_main:
                self._score(0, check=True)
            for place, frame in self._frames.items():
                measured = frame[PARAMETERS].notna().to_numpy()
                frame.loc[measured, ADAMW] = self._measure(place, measured)[ADAMW][measured]
                done(1)


def prepare_measurement(
    policy: Policy,
    batch: TokenBatch,
    settings: MeasureSettings,
    *,
    following: Afterwards = Afterwards(),  # noqa: B008  (frozen)
    tell: Callable[[str], None] = lambda text: None,
    of: Quantity = LOGPROB,
    **known: Unpack[Known],
) -> TableMeasurement:
    """Prepare a measurement of a token table, within minutes if the settings or the defaults for this policy say so.

    Arguments are those of the two classes, and the quantity to measure. Raises InputError for another quantity than log
    π where weights are needed.
    """
    if of != LOGPROB and (settings.minutes, settings.metric) != (None, None):
        raise InputError("minutes and metric=adamw rest on weights of ∇ log π; leave them out, or `of`")
    if settle_minutes(settings, policy, policy.device.type).minutes is None:
        measurement = TableMeasurement(policy, batch, settings, **known)
        measurement.of = of
        return measurement
    return TimedMeasurement(policy, batch, settings, following=following, tell=tell, **known)
