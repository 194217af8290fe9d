"""Compare weightings on one batch: which tokens each favours, norm and direction of its update, how much is signal.

All weightings are compared with the plain loss on the same tokens, by the policy part of their gradient. Bounds redraw
or leave out whole prompts, including those with equal rewards; with fewer than `FEWEST` others there are none.
Quantities of the whole batch (quantiles of entropy, covariances, random draws) are held fixed, and so is the update
whose directions are judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from gradscope.errors import InputError, checked
from gradscope.gradients import (
    ADAMW,
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
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import (
    COMPARED,
    PAPER,
    WEIGHTINGS,
    LossSettings,
    Weighting,
    check_weighting,
    describe_off_policyness,
    make_weighting,
    resolve_advantages,
    spell_out,
)
from gradscope.policy import AdamWState, PolicyLike
from gradscope.resampling import Supply, short_of
from gradscope.rollouts import BatchLike, Note, TokenBatch, read_logged
from gradscope.runs import counted
from gradscope.updates.apply_update import OptimizerStep, update_cost
from gradscope.updates.comparison.passes import Passes, find_combinations, pass_through
from gradscope.updates.comparison.real_steps import Masks, gains_cost, gains_on_unseen_prompts, take_steps
from gradscope.updates.comparison.statistics import BOUNDS, Judge, columns
from gradscope.updates.influence import entropy_slopes
from gradscope.updates.step_settings import StepSettings, settle_step

PLAIN = "grpo"
SAME = 1e-4
"""Weights that differ by at most this fraction of the largest are the same: log π of sampler and trainer is rounded."""


@dataclass(frozen=True, kw_only=True)
class ComparisonChoices:
    """Settings of a comparison that are flags of `gradscope compare`, too."""

    take_steps: bool = False
    """Also take each weighting's real optimizer step and undo it; with the saved optimizer, or else SGD. Otherwise only
    weightings of two steps take them, if there is a saved optimizer."""
    aggregation: Literal["token-mean", "sequence"] = "token-mean"
    """How losses are averaged: over all tokens, or over responses after averaging each response's tokens."""


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ComparisonChoices):
    """Everything that affects a comparison's numbers, apart from the policy, the batch and the weightings."""

    loss: LossSettings = PAPER
    """The plain loss. Its KL part is ignored, since no weighting changes it."""
    edges: Sequence[int | float] = EDGES
    """Edges of the intervals of π, as in the table."""
    step: StepSettings | None = None
    """Settings of real steps; None: those of the saved optimizer, or else the paper's SGD."""
    seed: int = 0
    confidence: float = 0.95
    resamples: int = 1000

    def check(self) -> None:
        """Raise InputError for settings that do not allow a comparison."""
        interval_labels(self.edges)
        if self.loss.reweight_alpha is not None:
            raise InputError(
                f"reweight_alpha is {self.loss.reweight_alpha}; plain GRPO has none, name reweight among the weightings"
            )
        if self.take_steps and self.aggregation != "token-mean":
            raise InputError(f"real steps use the mean over tokens, but aggregation is {self.aggregation}")


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Effects of each weighting on one batch."""

    table: pd.DataFrame
    """A row per weighting and optimizer step. `method`; `step`: "all"; "low" and "high" for the steps of a two-step
    weighting; "both" for its two real steps together; `same_as`: the earlier row with the same weights (up to rounding)
    and therefore the same numbers, or "". Each number has columns NAME_lower and NAME_upper; NAME_difference is the
    difference to plain GRPO.

    norm_ratio: ‖U‖ over plain's, U being the summed gradient; cosine: of U and plain's; cosine_from_energies: what the
    tokens' energies alone would make of it, Σ r·e/√(Σ e·Σ r²·e) with plain's energies e = (w‖g‖)² and the ratios r of
    the weights to plain's, which is the cosine if token gradients are orthogonal (estimated as energy_share is, where
    norms are of a sample). signal_to_noise: for one prompt (see `IntervalGradients`), with its difference. right_sgd,
    right_adamw: among tokens that have an advantage and move, the share whose log π moves in its direction, to first
    order. right_step: the same after real steps (AdamW with momentum and decay), and step_cosine: the cosine of the two
    displacements; only in rows whose steps were taken.
    entropy_change: first-order change of the mean entropy of all tokens, in nats, by one step on the weighting's own
    gradient, with its difference; momentum and decay, which no weighting changes, are omitted, and v̂ is plain's.
    effective_share: (Σ|w|‖g‖)²/Σw²‖g‖² over the number of tokens, the fraction of tokens that carry the update;
    effective_share_adamw: the same in the optimizer's metric, if the table has norms in it. zero_share: fraction of
    tokens of weight 0. gain: first-order gain in expected reward on prompts that the weighting's own AdamW step has not
    seen (`gains_on_unseen_prompts`), with gain_difference."""
    by_interval: pd.DataFrame
    """A row per weighting, step and interval of π: energy_share, of Σ w²‖g‖², with energy_share_difference;
    energy_share_adamw, if the table has norms in that metric; gradient_share, ⟨U_a, U⟩/‖U‖², which sums to 1 and has no
    bounds (they would require U_a itself)."""
    weights: pd.DataFrame
    """w_t of each token under each weighting: response, position, then a column METHOD or METHOD.STEP, named as the
    user named the weighting."""
    labels: tuple[str, ...]
    num_prompts: int
    num_informative_prompts: int
    """Prompts with a nonzero advantage."""
    notes: tuple[Note, ...]
    passes: Passes
    """The underlying inner products and changes along the sums, and how they were computed."""
    aggregation: str = "token-mean"
    step: StepSettings | None = None
    """Settings of the real steps; None: no step was taken."""
    supply: Supply | None = None
    """The prompts that were compared and those that there are; None: these are all."""

    @property
    def too_few(self) -> str:
        """The headline where too few prompts have unequal rewards (`Supply.too_few`); else ""."""
        return (self.supply or Supply(self.num_informative_prompts, self.num_prompts)).too_few

    def statistics(self) -> pd.DataFrame:
        """Return the table in long form, a row per weighting, step and number: method, step, same_as, statistic (the
        number's column), value, lower, upper (NaN without bounds)."""
        table, keys = self.table.reset_index(drop=True), ["method", "step", "same_as"]
        parts = []
        for name in table.columns.difference(keys, sort=False):
            if not name.endswith(("_lower", "_upper")):
                bounds = {end: table.get(f"{name}_{end}", np.nan) for end in ("lower", "upper")}
                parts.append(table[keys].assign(statistic=name, value=table[name], **bounds))
        long = pd.concat(parts).sort_index(kind="stable")  # a weighting's numbers together
        return long.dropna(subset="value").reset_index(drop=True)

    def products(self) -> pd.DataFrame:
        """Return a row per prompt and distinct sum U = Σ_p u_p, from which norms, cosines and signals follow.

        Columns: method, step, prompt (from 0, by group); own, ‖u_p‖²; along, ⟨u_p, U⟩; own_plain, to_plain and
        from_plain, the products of u_p with plain's u_p and U, and of plain's u_p with U; kernel.Q, ⟨u_p, u_q⟩ for each
        prompt q, possibly sketched.
        """
        sums = self.table[(self.table["same_as"] == "") & (self.table["step"] != "both")]
        parts = self.passes.products
        names = [name for name in parts._fields if name != "kernel"]
        frames = []
        for place, (method, step) in enumerate(zip(sums["method"], sums["step"], strict=True)):
            own = pd.DataFrame({name: getattr(parts, name)[place] for name in names})
            kernel = pd.DataFrame(parts.kernel[place], columns=[f"kernel.{q}" for q in range(len(own))])
            keys = pd.DataFrame({"method": method, "step": step, "prompt": range(len(own))})
            frames.append(pd.concat([keys, own, kernel], axis=1))
        return pd.concat(frames, ignore_index=True)

    def __repr__(self) -> str:
        title = f"Comparison of {self.table['method'].nunique()} weightings on {counted(self.num_prompts, 'prompt')}"
        return "\n".join(filter(None, (title, self.too_few, self._numbers().to_string(na_rep="–"))))

    def _repr_html_(self) -> str:
        title = f"<b>Comparison</b> on {counted(self.num_prompts, 'prompt')}"
        few = f"<p>{self.too_few}</p>" if self.too_few else ""
        return f"<p>{title}</p>{few}{self._numbers().to_html(na_rep='–')}"

    def _numbers(self) -> pd.DataFrame:
        names = ["norm_ratio", "cosine", "cosine_from_energies", "signal_to_noise", "right_sgd", "right_adamw"]
        names += ["effective_share"]
        shown = self.table.set_index(["method", "step"])
        return shown[["same_as", *(name for name in names if name in shown)]].round(3)


@dataclass(frozen=True)
class _Sum:
    """A weighting's summed gradient in one of its optimizer steps."""

    weighting: str
    step: str
    weights: Float[np.ndarray, " K"]
    place: int
    """Index of its numbers among the distinct sums."""
    same_as: str = ""

    @property
    def name(self) -> str:
        return self.weighting if self.step == "all" else f"{self.weighting}.{self.step}"


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
    """Compare token weightings with plain GRPO on one batch; the policy is left unchanged.

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
    if unknown := int(resolve_advantages(batch)[batch.response_mask].isnan().sum()):
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
    J = TokenJacobian(policy, _with_advantages(batch, table), resources)
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
    chosen = _settle([weightings] if isinstance(weightings, str) else weightings, table, notes)
    sums = _make_sums(chosen, table, s.aggregation)
    weights = np.stack([own.weights for own in sums if not own.same_as])
    known = None if slopes is None else lambda _: slopes
    slopes_of = known or partial(entropy_slopes, J.until(None), step=s.step, optimizer_state=saved)
    resources, began = J.resources, monotonic()
    passes, J = pass_through(J, torch.from_numpy(weights), metric=metric, slopes_of=slopes_of), J.until(None)
    made = len(weights) - len(find_combinations(weights)) - len(passes.missing)
    seconds = (monotonic() - began) / (1 + made * (BACKWARD + FORWARD_MODE * (1 + (metric is not None))))

    def fits(part: str, forward_passes: float) -> bool:
        """Return whether a part that nobody named ends before the deadline; if not, add a note."""
        late = resources.deadline is not None and monotonic() + seconds * forward_passes > resources.deadline
        [late, *_] = resources.processes.gather([late])
        if late:
            notes.append(Note(f"Left out for lack of time: {part}.", "late"))
        return not late

    if late := {own.weighting for own in sums if own.place in passes.missing}:
        names = ", ".join(str(weighting) for weighting in chosen if str(weighting) in late)
        notes.append(Note(f"Left out for lack of time: {names}.", "late"))
        chosen = [weighting for weighting in chosen if str(weighting) not in late]
        made = sorted({own.place for own in sums if own.weighting not in late})
        sums, weights, passes = _make_sums(chosen, table, s.aggregation), weights[made], passes.select(made)
    split = _split(sums)
    notes += _notes_on(chosen, split)
    judge = Judge(table, labels, s.seed, s.confidence, s.resamples)
    numbers, energy = _judge(judge, table, weights, passes)
    if passes.entropy_slopes is not None:
        numbers |= columns(judge.entropy(weights, passes, s.step.max_grad_norm))
    else:
        notes.append(Note("Left out for lack of time: the change of entropy.", "late"))
    found, once, real = _join(sums, numbers), _trained_once(chosen, sums, J.batch), None
    if saved is not None or s.take_steps:
        real = OptimizerStep(J.alone().moved(), loss=s.loss, step=s.step, optimizer_state=saved)
    taken: dict[str, Weighting | Masks] = {
        name: [(own.step, own.weights != 0) for own in parts] for name, parts in split.items()
    }
    if s.take_steps:
        taken = {name: weighting for name, weighting in once.items() if name != PLAIN} | taken
        notes += _notes_on_steps(sums, taken)
    stepped = real is not None and bool(taken or s.take_steps)
    if stepped := stepped and (s.take_steps or fits("real steps", update_cost() * (1 + len(taken)))):
        found = _join_steps(found, _judge_steps(judge, *take_steps(real, taken), taken))
    if saved is not None and s.aggregation == "token-mean":  # as the trainer steps
        own = [w for w in chosen if str(w) in once or (str(w) in split and w.rule.lopti_eta is not None)]
        timely = fits("gains on unseen prompts", gains_cost(len(own)))
        gains = gains_on_unseen_prompts(real, own, seed=s.seed) if timely else None
        if gains is not None:
            found = _join_gains(found, pd.DataFrame(columns(judge.gains(gains)), index=[*map(str, own)]))
    informative = table.loc[table["advantage"] != 0, "group"].nunique()
    known = _strike_bounds if short_of(informative) else lambda rows: rows
    return Comparison(
        known(found),
        known(_by_interval(sums, energy, table, labels)),
        _weights(sums, table),
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
    settings: ComparisonSettings = ComparisonSettings(),
) -> int:
    """Return how many rows of weights a comparison on this table would pass through the network: all but those that
    equal another row, or a combination of two, up to rounding.
    """
    sums = _make_sums(_settle(weightings, table, _notes(table, settings.loss)), table, settings.aggregation)
    weights = np.stack([own.weights for own in sums if not own.same_as])
    return len(weights) - len(find_combinations(weights))


def _with_advantages(batch: TokenBatch, table: pd.DataFrame) -> TokenBatch:
    """Return the batch with the table's advantages, so that weights and directions use the same."""
    advantages = torch.zeros(batch.input_ids.shape)
    advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    return replace(batch, advantages=advantages)


def _notes(table: pd.DataFrame, loss: LossSettings) -> list[Note]:
    """Return notes on the tokens."""
    notes = [Note(describe_off_policyness(table, loss), "off-policy")]
    if "sampler_logprob" in table and 0 < (unknown := int(table["sampler_logprob"].isna().sum())) < len(table):
        words = f"{unknown:,} of {len(table):,} tokens lack the sampler's log-probability"
        notes.append(Note(f"{words}: their correction factor k is 1, as in TRL.", "sampler-unknown"))
    return notes


def _settle(given: Sequence[str | Weighting] | None, table: pd.DataFrame, notes: list[Note]) -> list[Weighting]:
    """Return the weightings, plain GRPO first; by default, the known ones that the table has columns for."""
    plain = WEIGHTINGS[PLAIN]()
    if given is not None:
        named = [
            weighting
            for own in given
            for weighting in (map(make_weighting, spell_out(own)) if isinstance(own, str) else [own])
        ]
        chosen = [plain, *(weighting for weighting in named if str(weighting) != PLAIN)]
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
            sums.append(_Sum(str(weighting), step, weights, place, same_as))
    return sums


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= SAME * max(np.abs(one).max(), np.abs(other).max()))


def _split(sums: Sequence[_Sum]) -> dict[str, list[_Sum]]:
    """Return the weightings of several optimizer steps whose weights sum to plain's."""
    steps: dict[str, list[_Sum]] = {}
    for own in sums:
        steps.setdefault(own.weighting, []).append(own)
    plain = sums[0].weights
    return {name: own for name, own in steps.items() if len(own) > 1 and _same(sum(one.weights for one in own), plain)}


def _notes_on(weightings: Sequence[Weighting], split: dict[str, list[_Sum]]) -> list[Note]:
    notes = []
    if split:
        words = "takes two optimizer steps" if len(split) == 1 else "take two optimizer steps"
        words += ", which under SGD equal GRPO's single step to first order."
        notes.append(Note(f"{', '.join(split)} {words}", "two-steps"))
    if any(weighting.rule.control == "matched-norm" for weighting in weightings):
        notes.append(Note("matched-norm is GRPO's update, rescaled to the norm of Reweight's.", "matched-norm"))
    return notes


def _notes_on_steps(sums: Sequence[_Sum], taken: dict[str, Any]) -> list[Note]:
    """Return a note naming the distinct weightings without a real step."""
    left = [own.weighting for own in sums if not own.same_as and own.weighting not in (PLAIN, *taken)]
    names = ", ".join(dict.fromkeys(left))
    why = "a trainer's batch lacks the needed columns, or the steps do not add up to GRPO's"
    return [Note(f"No real step was taken under {names}: {why}.", "no-step")] if left else []


def _trained_once(weightings: Sequence[Weighting], sums: Sequence[_Sum], batch: TokenBatch) -> dict[str, Weighting]:
    """Return by name the distinct weightings under which a single optimizer step can be taken."""
    names = {own.weighting for own in sums if own.step == "all" and not own.same_as}
    return {str(one): one for one in weightings if str(one) in names and _is_trained(one, batch)}


def _is_trained(weighting: Weighting, batch: TokenBatch) -> bool:
    """Return whether a step can be taken under the weighting; some need columns that only the table has."""
    try:
        check_weighting(weighting, sampler_logprobs=batch.sampler_logprobs is not None)
    except InputError:
        return False
    return True


def _judge(
    judge: Judge, table: pd.DataFrame, weights: Float[np.ndarray, "R K"], passes: Passes
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the numbers of each distinct sum, [R], and of its intervals, [R·A]."""
    carried, energy = judge.energies(weights)
    if ADAMW in table and table[ADAMW].notna().any():
        for known, found in zip((carried, energy), judge.energies(weights, ADAMW, "_adamw"), strict=True):
            known |= found
    numbers = columns(judge.gradients(weights, passes) | carried) | {"zero_share": (weights == 0).mean(1)}
    return numbers, columns(energy) | {"gradient_share": judge.gradient_shares(weights, passes).ravel()}


def _judge_steps(
    judge: Judge, changes: Float[np.ndarray, "M K"], cosines: Float[np.ndarray, " M"], taken: Mapping[str, Any]
) -> pd.DataFrame:
    """Return a row for plain's real step and one for each weighting whose steps were taken."""
    kinds = ["all" if isinstance(own, Weighting) else "both" for own in taken.values()]
    keys = {"method": [PLAIN, *taken], "step": ["all", *kinds], "step_cosine": cosines}
    return pd.DataFrame(keys | columns(judge.directions("right_step", changes)))


def _join(sums: Sequence[_Sum], numbers: dict[str, np.ndarray]) -> pd.DataFrame:
    """Return a row for every sum, with the numbers of the distinct sum that it equals."""
    places = [own.place for own in sums]
    keys = {name: [getattr(own, field) for own in sums] for name, field in KEYS.items()}
    return pd.DataFrame(keys | {name: values[places] for name, values in numbers.items()})


KEYS = {"method": "weighting", "step": "step", "same_as": "same_as"}
"""Column of a result → attribute of a sum."""


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
    """Return every sum's numbers by interval."""
    size, intervals = len(labels), np.arange(len(labels))
    counts = np.bincount(table["interval"], minlength=size)
    keys = {name: np.repeat([getattr(own, field) for own in sums], size) for name, field in KEYS.items()}
    same_as = {"same_as": keys.pop("same_as")}
    each = {"interval": intervals, "label": np.array(labels), "num_tokens": counts}
    keys |= {name: np.tile(values, len(sums)) for name, values in each.items()}
    places = (np.array([own.place for own in sums])[:, None] * size + intervals).ravel()
    return pd.DataFrame(keys | {name: values[places] for name, values in numbers.items()} | same_as)


def _strike_bounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out all bounds: over too few prompts with an advantage they would be those of the idle ones."""
    return rows.assign(**{name: np.nan for name in rows if name.endswith(BOUNDS[1:])})


def _weights(sums: Sequence[_Sum], table: pd.DataFrame) -> pd.DataFrame:
    weights = {own.name: own.weights.astype(np.float32) for own in sums}
    return pd.concat([table[["response", "position"]], pd.DataFrame(weights, index=table.index)], axis=1)
