"""Compare weightings on one batch: which tokens each favours, norm and direction of its update, how much is signal.

All weightings are compared with the plain loss on the same tokens, by the policy part of their gradient. Bounds redraw
or leave out whole prompts, including those with equal rewards; with fewer than `FEWEST` others there are none.
Quantities of the whole batch (quantiles of entropy, covariances, random draws) are held fixed, and so is the update
whose directions are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from gradscope.errors import InputError, checked
from gradscope.gradients import (
    BACKWARD,
    FORWARD_MODE,
    MeasureSettings,
    Resources,
    TokenJacobian,
    describe_reread,
    fill_table,
    note_logged,
    prepare_measurement,
    refuse_other_loss,
    statistics_of,
)
from gradscope.intervals import interval_labels
from gradscope.objective import (
    COMPARED,
    WEIGHTINGS,
    LossSettings,
    Weighting,
    check_weighting,
    describe_off_policyness,
    make_weighting,
    resolve_advantages,
    settle_loss,
    spell_out,
)
from gradscope.policy import AdamWState, PolicyLike
from gradscope.resampling import short_of
from gradscope.rollouts import BatchLike, Note, TokenBatch, read_logged
from gradscope.updates.comparison.passes import find_combinations, pass_through
from gradscope.updates.comparison.real_steps import Masks, gains_cost, gains_on_unseen_prompts, take_steps
from gradscope.updates.comparison.result import Comparison, ComparisonSettings, in_words
from gradscope.updates.comparison.statistics import BOUNDS, Judge, columns
from gradscope.updates.influence import entropy_slopes
from gradscope.updates.optimizer_step import OptimizerStep, update_cost
from gradscope.updates.step_settings import settle_step

PLAIN = "grpo"
SAME = 1e-4
"""Weights that differ by at most this fraction of the largest are the same: log π of sampler and trainer is rounded."""


@dataclass(frozen=True)
class _Sum:
    """A weighting's summed gradient in one of its optimizer steps."""

    method: str
    step: str
    same_as: str
    place: int
    """Index of its numbers among the distinct sums."""
    weights: Float[np.ndarray, " K"]

    @property
    def name(self) -> str:
        return self.method if self.step == "all" else f"{self.method}.{self.step}"

    @property
    def keys(self) -> dict[str, str]:
        return {"method": self.method, "step": self.step, "same_as": self.same_as}


def compare_cost(rows: int = len(COMPARED) + 2, *, metric: bool, take_steps: bool = False) -> float:
    """Return an upper bound on the forward passes of `compare`.

    rows: of weights, two for a weighting of two steps; by default those of the weightings compared by default. metric:
    whether AdamW's is known.
    """
    real = (rows + 1) * update_cost() * take_steps
    entropy = BACKWARD + FORWARD_MODE
    return 1 + rows * (BACKWARD + FORWARD_MODE * (1 + metric)) + entropy + (gains_cost(rows) if metric else 0) + real


@checked
def compare(
    policy: PolicyLike,
    batch: BatchLike,
    weightings: str | Sequence[str | Weighting] | None = None,
    *,
    table: pd.DataFrame | None = None,
    optimizer_state: AdamWState | dict[str, Any] | str | Path | None = None,
    settings: ComparisonSettings | None = None,
    resources: Resources = Resources(micro_batch=4),  # noqa: B008  (frozen)
) -> Comparison:
    """Compare token weightings with the plain update on one batch (GRPO's, or that of `settings.loss.weighting`).

    Each distinct row of weights costs a backward pass over the batch and a forward-mode derivative along its sum. An
    optimizer state adds another derivative and, on each half of the prompts, real steps and one derivative;
    `settings.take_steps` adds a real step.

    Args:
        weightings: Weightings, or strings as for `make_weighting`, with slashes between several values of a parameter
            (`reweight:alpha=.1/.3`). None: those of COMPARED that the batch has columns for; a note names the others.
        table: Result of `measure(policy, batch, …)` with the settings' loss and edges, possibly of a sample; None:
            measured here.
        optimizer_state: AdamW's `state_dict()` or its file, from which real steps continue; or an `AdamWState`, which
            provides the metric only. None: no numbers under AdamW.
        settings: None: the defaults, with the loss recorded in the log at a path, if any.
        resources: The bytes for parameter-sized vectors determine how many weightings are processed together. Processes
            share the prompts, and each gets the result. With a deadline, weightings that would end much later are left
            out, and a note names them.

    Raises:
        InputError: if a weighting is unknown or lacks a column, the batch has neither advantages nor rewards, or
            settings, table or state do not match.
    """
    policy, batch, told = read_logged(policy, batch)
    s = ComparisonSettings(loss=LossSettings.from_log(told)) if settings is None else settings
    resources = resources.settle(policy.device)
    s.check()
    batch = settle_loss(batch, s.loss)
    if not s.loss.is_whole and (unknown := int(resolve_advantages(batch)[batch.response_mask].isnan().sum())):
        raise InputError(f"{unknown} tokens have no advantage and thus no weight; give rewards or advantages for all")
    step, saved, metric = settle_step(policy.model, s.step, optimizer_state)
    given = table is not None
    if not given:
        sample = MeasureSettings(tokens_per_interval="enough", seed=s.seed, loss=s.loss, metric=metric and "adamw")
        known = {"optimizer_state": metric, "resources": Resources(progress=resources.progress)}
        table = fill_table(prepare_measurement(policy, batch, sample, edges=s.edges, **known))
    batch = batch.of_prompts(table["group"].unique()) if "group" in table else batch
    if told := describe_reread(table, batch):
        raise InputError(f"the given table {told}; give a table measured on this batch")
    if given:
        statistics_of(table, policy, batch, resources.processes)  # refuses another policy's
        refuse_other_loss(table, batch, s.loss)
    advantages = torch.zeros(batch.input_ids.shape)  # the table's, so that weights and directions use the same
    advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    J = TokenJacobian(policy, replace(batch, advantages=advantages), resources)
    found = compare_rows(J, table, weightings, settings=replace(s, step=step), saved=saved, metric=metric)
    told = (*note_logged(policy, batch, table), *batch.without_notes("on-policy").notes)
    return replace(found, notes=tuple(dict.fromkeys((*told, *found.notes))))


def compare_rows(
    J: TokenJacobian,
    table: pd.DataFrame,
    weightings: str | Sequence[str | Weighting] | None = None,
    *,
    settings: ComparisonSettings,
    saved: dict[str, Any] | None,
    metric: AdamWState | None,
    slopes: Float[np.ndarray, " K"] | None = None,
) -> Comparison:
    """Compare on the tokens of a Jacobian, with the table's advantages; without notes on the rollouts.

    settings: including the step. saved: the state from which real steps continue. slopes: `entropy_slopes` of plain's
    step, if known.
    """
    s, labels, notes = settings, interval_labels(settings.edges), _notes(table, settings.loss)
    chosen = _settle([weightings] if isinstance(weightings, str) else weightings, table, notes, s.loss)
    plain = str(chosen[0])
    sums = _make_sums(chosen, table, s.aggregation)
    weights = _distinct(sums)
    slopes_of = partial(entropy_slopes, J.until(None), step=s.step, optimizer_state=saved)
    if slopes is not None:
        slopes_of = lambda _: slopes  # noqa: E731
    resources, began = J.resources, monotonic()
    passes, J = pass_through(J, torch.from_numpy(weights), metric=metric, slopes_of=slopes_of), J.until(None)
    made = _num_passes(weights) - len(passes.missing)
    seconds = (monotonic() - began) / (1 + made * (BACKWARD + FORWARD_MODE * (1 + (metric is not None))))

    def fits(part: str, forward_passes: float) -> bool:
        """Return whether a part that nobody named ends before the deadline; if not, add a note."""
        late = resources.deadline is not None and monotonic() + seconds * forward_passes > resources.deadline
        [late, *_] = resources.processes.gather([late])
        if late:
            notes.append(Note(f"Left out for lack of time: {part}.", "late"))
        return not late

    if late := {own.method for own in sums if own.place in passes.missing}:
        names = ", ".join(str(weighting) for weighting in chosen if str(weighting) in late)
        notes.append(Note(f"Left out for lack of time: {names}.", "late"))
        chosen = [weighting for weighting in chosen if str(weighting) not in late]
        passes = passes.select(sorted({own.place for own in sums if own.method not in late}))
        sums = _make_sums(chosen, table, s.aggregation)
        weights = _distinct(sums)
    split = _split(sums)
    if split:
        words = f"{', '.join(split)} {'takes' if len(split) == 1 else 'take'} two optimizer steps"
        notes.append(
            Note(f"{words}, which under SGD equal {in_words(plain)}'s single step to first order.", "two-steps")
        )
    if any(weighting.rule.control == "matched-norm" for weighting in chosen):
        notes.append(
            Note(f"matched-norm is {in_words(plain)}'s update, rescaled to the norm of Reweight's.", "matched-norm")
        )
    judge = Judge(table, labels, s.seed, s.confidence, s.resamples)
    numbers, numbers_by_interval = judge.judge(weights, passes)
    if passes.entropy_slopes is not None:
        numbers |= columns(judge.entropy(weights, passes, s.step.max_grad_norm))
    else:
        notes.append(Note("Left out for lack of time: the change of entropy.", "late"))
    rows = pd.DataFrame(numbers).iloc[[own.place for own in sums]].reset_index(drop=True)
    rows = pd.DataFrame([own.keys for own in sums]).join(rows)
    once, real = _trained_once(chosen, sums, J.batch), None
    if saved is not None or s.take_steps:
        real = OptimizerStep(J.alone().moved(), loss=s.loss, step=s.step, optimizer_state=saved)
    taken: dict[str, Weighting | Masks] = {
        name: [(own.step, own.weights != 0) for own in parts] for name, parts in split.items()
    }
    if s.take_steps:
        taken = {name: weighting for name, weighting in once.items() if name != plain} | taken
        left = [own.method for own in sums if not own.same_as and own.method not in (plain, *taken)]
        if names := ", ".join(dict.fromkeys(left)):
            why = f"a trainer's batch lacks the needed columns, or the steps do not add up to {in_words(plain)}'s"
            notes.append(Note(f"No real step was taken under {names}: {why}.", "no-step"))
    stepped = real is not None and bool(taken or s.take_steps)
    if stepped := stepped and (s.take_steps or fits("real steps", update_cost() * (1 + len(taken)))):
        changes, cosines = take_steps(real, taken)
        kinds = ["all", *("all" if isinstance(own, Weighting) else "both" for own in taken.values())]
        steps = {"method": [plain, *taken], "step": kinds, "step_cosine": cosines}
        rows = _join_steps(rows, pd.DataFrame(steps | columns(judge.directions("right_step", changes))))
    if saved is not None and s.aggregation == "token-mean":  # as the trainer steps
        judged = [w for w in chosen if str(w) in once or (str(w) in split and w.rule.lopti_eta is not None)]
        timely = fits("gains on unseen prompts", gains_cost(len(judged)))
        gains = gains_on_unseen_prompts(real, judged, seed=s.seed) if timely else None
        if gains is not None:
            rows = _join_gains(rows, pd.DataFrame(columns(judge.gains(gains)), index=[*map(str, judged)]))
    by_interval = _by_interval(sums, numbers_by_interval, table, labels)
    informative = table.loc[table["advantage"] != 0, "group"].nunique()
    if short_of(informative):  # bounds would be those of the idle prompts
        rows, by_interval = (
            frame.assign(**{name: np.nan for name in frame if name.endswith(BOUNDS[1:])})
            for frame in (rows, by_interval)
        )
    by_token = pd.DataFrame({own.name: own.weights.astype(np.float32) for own in sums}, index=table.index)
    return Comparison(
        rows,
        by_interval,
        table[["response", "position"]].join(by_token),
        tuple(labels),
        table["group"].nunique(),
        informative,
        tuple(dict.fromkeys(notes)),
        passes,
        s.aggregation,
        s.step if stepped else None,
    )


def distinct_rows(
    table: pd.DataFrame,
    weightings: Sequence[str | Weighting] | None = None,
    *,
    settings: ComparisonSettings,
) -> int:
    """Return how many rows of weights a comparison on this table would pass through the network: all but those that
    equal another, or combine plain and another, up to rounding.
    """
    chosen = _settle(weightings, table, _notes(table, settings.loss), settings.loss)
    return _num_passes(_distinct(_make_sums(chosen, table, settings.aggregation)))


def _num_passes(weights: Float[np.ndarray, "R K"]) -> int:
    return len(weights) - len(find_combinations(weights))


def _notes(table: pd.DataFrame, loss: LossSettings) -> list[Note]:
    """Return notes on the tokens."""
    notes = [Note(describe_off_policyness(table, loss), "off-policy")]
    if "sampler_logprob" in table and 0 < (unknown := int(table["sampler_logprob"].isna().sum())) < len(table):
        words = f"{unknown:,} of {len(table):,} tokens lack the sampler's log-probability"
        notes.append(Note(f"{words}: their correction factor k is 1, as in TRL.", "sampler-unknown"))
    return notes


def _settle(
    given: Sequence[str | Weighting] | None, table: pd.DataFrame, notes: list[Note], loss: LossSettings
) -> list[Weighting]:
    """Return the weightings, the plain update first; by default, the known ones that the table has columns for."""
    plain = WEIGHTINGS[PLAIN]()
    object.__setattr__(plain, "_spelled", loss.weighting or "")  # its weights are in the table
    if given is not None:
        named = [
            weighting
            for own in given
            for weighting in (map(make_weighting, spell_out(own)) if isinstance(own, str) else [own])
        ]
        chosen = [plain, *(weighting for weighting in named if str(weighting) != str(plain))]
        names = [*map(str, chosen)]  # one weighting by two names is two
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{twice[0]} is given twice; give each weighting once")
        return chosen
    chosen = [plain]
    for weighting in (WEIGHTINGS[name]() for name in COMPARED):
        try:
            weighting.weights(table)
        except InputError as error:
            notes.append(Note(f"{weighting} is left out: {error.reason}.", "left-out"))
        else:
            chosen += [] if weighting == plain else [weighting]
    return chosen


def _make_sums(weightings: Sequence[Weighting], table: pd.DataFrame, aggregation: str) -> list[_Sum]:
    sums: list[_Sum] = []
    for weighting in weightings:
        for step, weights in weighting.weights(table, aggregation=aggregation).items():
            if not np.isfinite(weights).all():
                raise InputError(f"{weighting} has weights that are not finite; leave it out, or give a valid log")
            distinct = [own for own in sums if not own.same_as]
            same = next((own for own in distinct if _same(own.weights, weights)), None)
            place, same_as = (len(distinct), "") if same is None else (same.place, same.name)
            sums.append(_Sum(str(weighting), step, same_as, place, weights))
    return sums


def _distinct(sums: Sequence[_Sum]) -> Float[np.ndarray, "R K"]:
    return np.stack([own.weights for own in sums if not own.same_as])


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= SAME * max(np.abs(one).max(), np.abs(other).max()))


def _split(sums: Sequence[_Sum]) -> dict[str, list[_Sum]]:
    """Return the weightings of several optimizer steps whose weights sum to plain's."""
    steps: dict[str, list[_Sum]] = {}
    for own in sums:
        steps.setdefault(own.method, []).append(own)
    plain = sums[0].weights
    return {name: own for name, own in steps.items() if len(own) > 1 and _same(sum(one.weights for one in own), plain)}


def _trained_once(weightings: Sequence[Weighting], sums: Sequence[_Sum], batch: TokenBatch) -> dict[str, Weighting]:
    """Return by name the distinct weightings under which a single optimizer step can be taken; some need columns that
    only the table has.
    """
    names, once = {own.method for own in sums if own.step == "all" and not own.same_as}, {}
    for weighting in (own for own in weightings if str(own) in names):
        with suppress(InputError):
            check_weighting(weighting, sampler_logprobs=batch.sampler_logprobs is not None)
            once[str(weighting)] = weighting
    return once


def _join_steps(table: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Add the numbers of real steps to the table; "both" becomes a row after those of the two steps."""
    whole = steps["step"] == "both"
    joined = table.merge(steps[~whole], on=["method", "step"], how="left")
    joined = pd.concat([joined, steps[whole].assign(same_as="")], ignore_index=True)
    order = joined["method"].map({name: place for place, name in enumerate(table["method"].unique())})
    return joined.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)


def _join_gains(table: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """Add the gains to the table, in the row that covers all of a weighting's steps."""
    whole = table["step"].isin(["all", "both"])
    names = table["method"].where(table["same_as"] == "", table["same_as"]).where(whole, "")
    return table.join(gains.reindex(names).set_axis(table.index))


def _by_interval(
    sums: Sequence[_Sum], numbers: dict[str, np.ndarray], table: pd.DataFrame, labels: Sequence[str]
) -> pd.DataFrame:
    """Return every sum's numbers by interval; numbers: [R·A] each."""
    counts, size = np.bincount(table["interval"], minlength=len(labels)), len(labels)
    each = pd.DataFrame({"interval": range(size), "label": labels, "num_tokens": counts})
    frames = []
    for own in sums:
        its = {name: values[own.place * size : (own.place + 1) * size] for name, values in numbers.items()}
        rows = each.assign(**its, same_as=own.same_as)
        rows.insert(0, "method", own.method)
        rows.insert(1, "step", own.step)
        frames.append(rows)
    return pd.concat(frames, ignore_index=True)
