"""Diagnose one checkpoint: which tokens dominate the update, by how much, where, and what a step does.

`diagnose` resolves the inputs and computes four parts (tokens, gradients, steps, comparison), which share a time limit
and a list of notes. All headline numbers are rows of one tidy frame (`result.COLUMNS`), explained in
`glossary.DEFINITIONS` and in the files that compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, Unpack

import numpy as np
import pandas as pd
import torch

from gradscope.diagnosis import gradients, steps, tokens
from gradscope.diagnosis.advice import advise
from gradscope.diagnosis.format import as_sentence
from gradscope.diagnosis.minutes import (
    COMPARISON,
    STEPS,
    SUMS,
    TOKENS,
    Minutes,
    compare_cost,
    influence_cost,
    part_costs,
    stage_costs,
)
from gradscope.diagnosis.notes import check_table, count_informative_prompts, has_gradient, note_limits, supply_of
from gradscope.diagnosis.page.contents import make_report
from gradscope.diagnosis.precision import sampling_error
from gradscope.diagnosis.result import (
    LARGE,
    PARTS,
    REWARD_PART,
    VERDICT_PROMPTS,
    WARNINGS,
    BoundMargins,
    Diagnosis,
    DiagnosisKeywords,
    DiagnosisSettings,
    join_rows,
    make_rows,
    one_row,
    strike_bounds,
)
from gradscope.diagnosis.temperatures import temperature_cost, temperature_words, try_temperatures
from gradscope.diagnosis.words import findings
from gradscope.errors import InputError, checked, first_line, make_settings
from gradscope.gradients import (
    ADAMW,
    MeasureSettings,
    Resources,
    Stopwatch,
    SumsPlan,
    TableMeasurement,
    TokenJacobian,
    describe_seconds,
    fill_table,
    largest_share,
    note_logged,
    plan_sums,
    statistics_of,
)
from gradscope.intervals import assign_intervals, interval_labels
from gradscope.objective import LossSettings
from gradscope.policy import AdamWState, Policy, PolicyLike, return_freed_memory
from gradscope.rollouts import BatchLike, Note, TokenBatch, own_responses, read_logged
from gradscope.runs import ALONE, SILENT, Processes, Progress, settle_progress
from gradscope.theory import judge_proxies, regress_norms
from gradscope.updates import (
    Comparison,
    ComparisonSettings,
    RealSteps,
    StepSettings,
    compare_rows,
    distinct_rows,
    moved_against,
    movement_table,
    predict_step,
    settle_step,
    update_cost,
)

Made = TypeVar("Made")


@checked
def diagnose(
    policy: PolicyLike,
    batch: BatchLike,
    table: pd.DataFrame | None = None,
    *,
    settings: DiagnosisSettings | None = None,
    optimizer_state: AdamWState | dict[str, Any] | str | Path | None = None,
    processes: Processes = ALONE,
    progress: bool | Progress = False,
    verdict_minutes: int | float | None = None,
    **changes: Unpack[DiagnosisKeywords],
) -> Diagnosis | None:
    """Diagnose one checkpoint on one batch of rollouts, leaving the policy unchanged.

    policy, batch: objects, or paths for `load_policy` and `read_rollouts`. changes: fields of DiagnosisSettings (loss,
    seed, minutes, …) that override `settings`; if neither gives a loss, the one recorded in the rollouts is used, if
    any. table: from `measure(policy, batch, …)` with the same loss, edges and temperatures, possibly of a sample of
    tokens; None: measure it here. optimizer_state: AdamW's `state_dict()` or its file, for AdamW's metric and as the
    state that steps start from, or an `AdamWState` for the metric alone; None: no numbers in AdamW's metric, and steps
    use `settings.step`, else the paper's SGD.

    processes: all call this with the same arguments, including a table, and share the summed gradients; all but the
    main process get None. verdict_minutes: the time limit with which a given table would suffice for a verdict, for
    the words alone.

    Without advantages or rewards there are no weights, only norms. The 95 % intervals resample whole prompts, and are
    NaN for a single prompt; see `tokens` and `gradients`. Raises InputError if settings, table or state do not fit;
    parts that this policy or batch does not permit are left out with a note.
    """
    own_loss = settings is not None or "loss" in changes
    settings = make_settings(DiagnosisSettings, "diagnose", vars(settings or DiagnosisSettings()) | changes)
    settings.check()
    progress = settle_progress(progress) if processes.is_main else SILENT
    watch = Stopwatch()
    policy, batch, told = read_logged(policy, batch)
    if told and not own_loss:
        settings = replace(settings, loss=LossSettings.from_log(told))
    step, saved, metric = settle_step(policy.model, settings.step, optimizer_state)
    logged = None
    if table is None:
        each = settings.tokens_per_interval if settings.minutes is None else None
        sample = {"tokens_per_interval": each, "minutes": settings.minutes, "seed": settings.seed}
        sample = MeasureSettings(**sample, loss=settings.loss, module_groups=True, metric=metric and "adamw")
        known = {"optimizer_state": metric, "resources": Resources(settings.gradient_memory, progress=progress)}
        measurement = TableMeasurement(policy, batch, sample, edges=settings.edges, **known)
        measurement.watch = watch
        if settings.minutes is not None:
            memory = Resources(settings.gradient_memory).settle(policy.device).vectors
            measurement.follows = plan_sums(policy, batch, memory, keeps_prompts=True, metric=metric is not None)
        with measurement:
            table, logged = fill_table(measurement), measurement.notes
        verdict_minutes = measurement.verdict_minutes
    whole, batch = batch, batch.of_prompts(table["group"].unique()) if "group" in table else batch
    check_table(table, batch, settings)
    batch = steps.with_advantages(batch, table)
    if logged is None and processes.is_main:
        logged = note_logged(policy, batch, table)
    resources = Resources(
        settings.gradient_memory, micro_batch=settings.micro_batch_size, processes=processes, progress=progress
    )
    J = TokenJacobian(policy, batch, resources, statistics=statistics_of(table, policy, batch, processes))
    task = Task(J, table, settings, step, saved, metric, _settle_minutes(J, table, settings, watch))
    task.notes.extend(_first_notes(task, logged or ()))
    if settings.minutes is None:  # else planned by time
        progress.plan(_plan_parts(task))
    with processes.together(), progress.stage(TOKENS):
        token_part = describe_tokens(task) if processes.is_main else TokenPart()
        tried = try_other_temperatures(task) if processes.is_main else None
    with progress.stage(SUMS):
        gradient_part = sum_gradients(task)
    if not processes.is_main:
        return None
    with progress.stage(STEPS):
        step_part = take_steps(task, gradient_part.totals)
    with progress.stage(COMPARISON):
        comparison = compare_weightings(task, step_part.slopes)
    supply = supply_of(table, whole)
    informative = supply.informative
    shares = token_part.rows[0] if task.weighted else None
    error = sampling_error(table, task.labels, shares=shares, seed=settings.seed)
    prompts = gradient_part.prompts
    known = strike_bounds if informative < VERDICT_PROMPTS else lambda part: part
    rows, own = join_rows([*token_part.rows, *gradient_part.rows, *step_part.rows]), own_responses(batch)
    if comparison is not None:
        parts = {name: known(getattr(comparison, name)) for name in ("table", "by_interval")}
        comparison = replace(comparison, **parts)
    found = Diagnosis(
        statistics=known(rows),
        notes=tuple(task.notes),
        left_out=tuple(task.left_out),
        table=table,
        labels=task.labels,
        num_prompts=table["group"].nunique(),
        num_responses=table["response"].nunique(),
        num_informative_prompts=informative,
        of_prompts=supply.of_prompts,
        of_informative_prompts=supply.of_informative,
        own_responses=None if own is None else int((own & batch.response_mask.any(1)).sum()),
        verdict_minutes=verdict_minutes,
        of_tokens=whole.num_tokens,
        by_prompt=None if prompts is None else gradients.add_rollouts(prompts, table, batch),
        precision=None if error is None or np.isnan(error.lower) else error.of_interval("the lowest share's interval"),
        settings=settings,
        step=task.step,
        parameters=policy.parameters_in_words,
        bounds=token_part.bounds,
        layers=token_part.layers,
        drivers=token_part.drivers,
        proxies=token_part.proxies,
        where=known(token_part.where),
        spikes=token_part.spikes,
        modules=token_part.modules,
        mismatch=token_part.mismatch,
        temperatures=tried,
        sums=gradient_part.plan,
        cosines=gradient_part.cosines.get("raw"),
        adamw_cosines=gradient_part.cosines.get("adamw"),
        influence=known(step_part.influence),
        against=step_part.against,
        entropy=known(step_part.entropy),
        directions=pd.concat(step_part.directions, ignore_index=True) if step_part.directions else None,
        movement=step_part.movement,
        comparison=comparison,
    )
    found = replace(found, findings=findings(found), advice=advise(found))
    return replace(found, report=partial(make_report, found, policy, batch))


@dataclass(frozen=True)
class Task:
    """The resolved inputs of a diagnosis; only notes and elapsed time change."""

    jacobian: TokenJacobian
    table: pd.DataFrame
    settings: DiagnosisSettings
    step: StepSettings
    saved: dict[str, Any] | None
    """The full optimizer state that steps start from."""
    metric: AdamWState | None
    minutes: Minutes
    notes: list[Note] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Keys of `PARTS`."""

    @property
    def policy(self) -> Policy:
        return self.jacobian.policy

    @property
    def batch(self) -> TokenBatch:
        return self.jacobian.batch

    @property
    def processes(self) -> Processes:
        return self.jacobian.resources.processes

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(interval_labels(self.settings.edges))

    @cached_property
    def weighted(self) -> bool:
        """Whether there is a gradient: all weights are known, and some are nonzero."""
        return has_gradient(self.table)

    def note(self, kind: str, text: str) -> None:
        self.notes.append(Note(text, kind))

    def leave_out(self, part: str, kind: str, why: str) -> None:
        """Record that a part (a key of `PARTS`) is left out, with a note."""
        self.left_out.append(part)
        self.note(kind, f"Left out: {PARTS[part]} ({why}).")

    def affords(self, part: str, forward_passes: float) -> bool:
        """Return whether this many forward passes fit into the time limit; if not, add a note."""
        fits = forward_passes <= self.minutes.left
        if not fits:
            self.run_out(part, forward_passes)
        return fits

    def run_out(self, part: str, forward_passes: float) -> None:
        """Leave a part out for lack of time."""
        seconds, left = (self.minutes.pass_seconds * passes for passes in (forward_passes, self.minutes.left))
        why = f"it would take {describe_seconds(seconds)}, and {describe_seconds(left)} of the minutes are left"
        self.leave_out(part, "minutes", why)

    def attempt(self, part: str, make: Callable[[], Made]) -> Made | None:
        """Run an optional part; on InputError or lack of memory return None and add a note."""
        try:
            return make()
        except (InputError, torch.OutOfMemoryError) as error:
            self.leave_out(part, "impossible", first_line(error))
            return None
        finally:
            return_freed_memory()

    def draws(self, name: str) -> dict[str, Any]:
        """Return a statistic's own random numbers, so that no other statistic changes them."""
        rng = np.random.default_rng([self.settings.seed, *name.encode()])
        return {"seed": rng, "resamples": self.settings.resamples}

    def step_keywords(self) -> dict[str, Any]:
        return {"loss": self.settings.loss, "step": self.step, "optimizer_state": self.saved}


def _settle_minutes(J: TokenJacobian, table: pd.DataFrame, settings: DiagnosisSettings, watch: Stopwatch) -> Minutes:
    processes = J.resources.processes
    if settings.minutes is None or not has_gradient(table):
        return Minutes(settings.minutes)
    with J.resources.progress.stage("timing a forward pass"):
        (seconds,) = processes.gather([_time_pass(J.alone())] if processes.is_main else [])
    return Minutes(settings.minutes, seconds, watch)


def _first_notes(task: Task, logged: Sequence[Note]) -> list[Note]:
    """Return the notes about the rollouts, warnings first."""
    batch = steps.tell_pooled(task.batch, task.table)
    told = (*logged, *batch.without_notes("on-policy").notes)  # the table knows more about that
    first = [note for kind in WARNINGS for note in told if note.kind == kind]
    whole = {"second_moments": task.metric is not None, "whole_state": task.saved is not None}
    limits = note_limits(task.table, task.labels, **whole)
    return [*first, *(note for note in told if note not in first), *limits]


def _plan_parts(task: Task) -> dict[str, float]:
    """Return the parts to compute, and each one's cost in forward passes."""
    if not task.weighted:
        return {TOKENS: 1.0}
    own = {"metric": task.metric is not None, "way": task.settings.gradient_way}
    plan = task.jacobian.plan_gram(len(task.labels), **own)
    known = {"sums": plan.forward_passes, "metric": task.metric is not None}
    return stage_costs(part_costs(task.policy, task.settings, task.step, **known))


def _time_pass(J: TokenJacobian) -> float:
    """Estimate the seconds of a forward pass over the batch from one over the longest response."""
    lengths = J.batch.attention_mask.sum(1) * J.batch.response_mask.any(1)
    longest = int(lengths.argmax())
    one, start = J.select([longest]).moved(), perf_counter()
    _ = one.statistics
    return (perf_counter() - start) * float(lengths.sum() / lengths[longest])


@dataclass(frozen=True)
class TokenPart:
    """Results from the table alone."""

    rows: tuple[pd.DataFrame, ...] = ()
    bounds: BoundMargins | None = None
    layers: pd.DataFrame | None = None
    drivers: pd.DataFrame | None = None
    proxies: pd.DataFrame | None = None
    where: pd.DataFrame | None = None
    spikes: pd.DataFrame | None = None
    modules: pd.DataFrame | None = None
    mismatch: pd.DataFrame | None = None


def describe_tokens(task: Task) -> TokenPart:
    table, labels, settings = task.table, task.labels, task.settings
    counts = np.bincount(table["interval"], minlength=len(labels))
    shares, where = _without_bounds("token_share", counts / counts.sum(), counts, "share", labels), None
    spikes = modules = None
    if task.weighted:
        shares = tokens.token_shares(tokens.sum_by_prompt(table, len(labels)), labels, **task.draws("dominance"))
        special = frozenset(getattr(task.policy.tokenizer, "all_special_tokens", ()))
        where = task.attempt(
            "where",
            lambda: tokens.shares_by(table, classes=settings.classes, special=special, **task.draws("where")),
        )
        spikes = tokens.largest_tokens(table, settings.top)
        known = {} if task.batch.rewards is None else {"reward": task.batch.rewards}
        known |= {f"{REWARD_PART}{name}": part for name, part in (task.batch.reward_parts or {}).items()}
        spikes = spikes.assign(**{name: own.numpy()[spikes["response"]] for name, own in known.items()})
        modules = tokens.module_shares(table, task.policy)
    layers = tokens.layer_norms(table, settings.edges, **task.draws("layers"))
    drivers = task.attempt("drivers", lambda: regress_norms(table, **task.draws("drivers")))
    proxies = task.attempt("proxies", lambda: judge_proxies(table, **task.draws("proxies")))
    bounds = tokens.bound_margins(table, task.policy.vocab_size)
    batch, uncorrected = task.batch, None
    if batch.uncorrected_advantages is not None:
        scales = 1.0 if batch.loss_scales is None else batch.loss_scales[:, None]
        uncorrected = (batch.uncorrected_advantages * scales)[batch.response_mask].numpy()
    apart, mismatch = steps.mismatch_rows(table, labels, uncorrected=uncorrected, **task.draws("mismatch"))
    rows = (
        shares,
        _without_bounds("tokens", counts, counts, "tokens", labels),
        one_row("prompts", float(count_informative_prompts(table)), len(table), unit="prompts"),
        one_row("bound_violations", float(bounds.violations), bounds.num_tokens, unit="tokens"),
        one_row("bound_lower_margin", bounds.lower_margin, bounds.num_tokens, unit="ratio"),
        one_row("bound_upper_margin", bounds.upper_margin, bounds.num_tokens, unit="ratio"),
        steps.lag_rows(table, settings.loss, **task.draws("off_policy")),
        apart,
    )
    # A log with its loss has all that went into it: without old log-probabilities, the ratio was 1.
    logged = batch.old_logprobs is None and any(note.kind == "loss" for note in batch.notes)
    if table["old_logprob"].isna().any() and not logged:
        task.note("on-policy", "Some or all old log-probabilities are unknown; these tokens count as on-policy.")
    if task.weighted and settings.loss.kl_coef and table["ref_logprob"].isna().any():
        task.note("no-kl", "Some or all reference log-probabilities are unknown; these tokens have no KL part.")
    return TokenPart(rows, bounds, layers, drivers, proxies, where, spikes, modules, mismatch)


def try_other_temperatures(task: Task) -> pd.DataFrame | None:
    """Return the headline at other temperatures if the rollouts' is unknown, and add it to the note that says so."""
    unknown = [place for place, note in enumerate(task.notes) if note.kind == "temperature"]
    if not task.weighted or not unknown:
        return None
    if not task.affords("temperatures", temperature_cost(task.batch, len(task.labels))):
        return None
    numbers = {"seed": task.draws("temperatures")["seed"]}
    tried = try_temperatures(task.policy, task.batch, task.table, task.settings, **numbers)
    place, words = unknown[0], f" {temperature_words(tried, task.labels[0])}"
    if count_informative_prompts(task.table) < VERDICT_PROMPTS:  # nothing is said of shares, at any temperature
        words = ""
    task.notes[place] = Note(f"{as_sentence(task.notes[place])}{words}", "temperature")
    return tried


def compare_weightings(task: Task, slopes: np.ndarray | None) -> Comparison | None:
    """Return the effect of each weighting; None if not requested, or left out.

    slopes: `updates.entropy_slopes`, if known.
    """
    s, size = task.settings, sum(p.numel() for p in task.policy.model.parameters())
    if not task.weighted or s.compare is False:
        return None
    if s.compare is None and size >= LARGE:
        task.leave_out("comparison", "large", f"because the policy has {size:,} parameters; --compare forces it")
        return None
    settings = ComparisonSettings(loss=s.loss, edges=s.edges, step=task.step, seed=s.seed, resamples=s.resamples)

    def price() -> float:
        settings.check()
        return compare_cost(distinct_rows(task.table, settings=settings), metric=task.metric is not None)

    cost = task.attempt("comparison", price)
    if cost is None or not task.affords("comparison", cost):
        return None

    def make() -> Comparison:
        given = {"settings": settings, "saved": task.saved, "metric": task.metric, "slopes": slopes}
        return compare_rows(task.jacobian.alone().until(task.minutes.deadline), task.table, **given)

    return task.attempt("comparison", make)


def _without_bounds(
    statistic: str, values: np.ndarray, counts: np.ndarray, unit: str, labels: tuple[str, ...]
) -> pd.DataFrame:
    found = np.vstack([values, np.full((2, len(labels)), np.nan)])
    return make_rows(statistic, found, counts, unit=unit, intervals=labels)


@dataclass(frozen=True)
class GradientPart:
    """Results from the intervals' summed gradients."""

    rows: tuple[pd.DataFrame, ...] = ()
    cosines: dict[str, pd.DataFrame] = field(default_factory=dict)
    """By metric: raw, adamw."""
    totals: torch.Tensor | None = None
    """[A, P], the summed gradient of each interval's tokens, if in memory."""
    plan: SumsPlan | None = None
    prompts: pd.DataFrame | None = None
    """The prompts included: `gradients.prompt_table`."""


def sum_gradients(task: Task) -> GradientPart:
    """Compute the intervals' summed gradients prompt by prompt."""
    if not task.weighted:
        return GradientPart()
    size, metric, J = len(task.labels), task.metric, task.jacobian
    weights = J.kept(steps.seeds_of(task.table, task.batch, size))
    way = task.settings.gradient_way
    plan = J.plan_gram(size, metric=metric is not None, way=way)
    # The main process decides for all, since each has its own clock. A prompt starts if half of it fits.
    if not task.processes.gather([plan.forward_passes / len(J.prompts) <= 2 * task.minutes.left])[0]:
        task.run_out("sums", plan.forward_passes / len(J.prompts))
        return GradientPart(_adamw_energy(task))
    if metric is not None:
        once = plan.forward_passes * largest_share(len(J.prompts), task.processes.count)
        passes = (1 + (plan.way != "whole")) * once
        if not task.processes.gather([passes <= task.minutes.left])[0]:
            task.run_out("adamw_sums", passes)
            metric = None
    found = J.until(task.minutes.deadline).gram(weights, metric=metric, way=way)
    if metric is not None and found.scaled is None:
        task.run_out("adamw_sums", passes)
    if len(found.groups) < len(J.prompts):
        full = len(found.groups) == found.plan.groups
        limit = "do not fit into --gradient-memory" if full else "would have taken longer than the minutes"
        of = f"{len(found.groups):,} of the {len(J.prompts):,} prompts"
        task.note("fewer-sums", f"Summed gradients are of {of}, drawn at random: more {limit}.")
    if found.plan.way != "whole":
        task.note("inexact", f"{str(found.plan).capitalize()}.")
    return_freed_memory()
    by_prompt = task.table.groupby("group")["interval"].value_counts().unstack(fill_value=0)
    counts = by_prompt.reindex(found.groups, columns=range(size), fill_value=0).to_numpy(np.float64)
    made = {name: own for name, own in (("raw", found), ("adamw", found.scaled)) if own is not None}
    rows = [
        gradients.gradient_rows(own, counts, task.labels, metric=name, **task.draws(f"sums.{name}"))
        for name, own in made.items()
    ]
    rows += _adamw_energy(task)
    if len(rows) == len(made) and metric is not None:
        task.leave_out("adamw_energy", "impossible", "the table lacks norms in this metric; measure with metric adamw")
    cosines = {name: gradients.cosine_matrix(own.products) for name, own in made.items()}
    partial_sums = len(found.groups) < len(J.prompts)
    totals = None if found.totals is None or partial_sums else found.totals.rows
    return GradientPart(tuple(rows), cosines, totals, found.plan, gradients.prompt_table(found))


def _adamw_energy(task: Task) -> tuple[pd.DataFrame, ...]:
    """Return the shares of Σ‖w·g‖² in AdamW's metric, if the table has these norms."""
    if ADAMW not in task.table or task.table[ADAMW].isna().all():
        return ()
    sums = tokens.sum_by_prompt(task.table, len(task.labels), ADAMW)
    squares = tokens.token_shares(sums, task.labels, **task.draws("dominance.adamw"))
    kept = squares["statistic"].isin(["squared_share", "dominance_index", "largest_share"])
    return (squares[kept].assign(metric="adamw"),)


@dataclass(frozen=True)
class StepPart:
    """Effect of one step: predicted to first order and split by source, and measured."""

    rows: tuple[pd.DataFrame, ...] = ()
    influence: pd.DataFrame | None = None
    against: pd.DataFrame | None = None
    entropy: pd.DataFrame | None = None
    slopes: np.ndarray | None = None
    """`Influence.entropy_slopes` of the whole batch, if the loss has no KL part."""
    directions: tuple[pd.DataFrame, ...] = ()
    """Tables of the predicted and of the real step."""
    movement: pd.DataFrame | None = None


def take_steps(task: Task, totals: torch.Tensor | None) -> StepPart:
    """Predict and take steps. totals: the intervals' summed gradients, if in memory."""
    if not task.weighted:
        return StepPart()
    s, size, part = task.settings, len(task.labels), StepPart()
    cost = influence_cost(task.step, s.loss, num_intervals=size)
    moves = s.actual_step and task.affords("actual_step", update_cost())
    if s.influence_tokens is not None:
        # If a step on all prompts takes too long, use fewer.
        # Prompts come whole, in random order: any may be first, and must fit.
        whole, least = task.batch.num_tokens, int(task.table["group"].value_counts().max())
        budget = task.minutes.fit_influence(cost, s.influence_tokens, tokens=whole, least=least)
        if budget is None:
            task.run_out("influence", cost * least / whole)
        else:
            part = task.attempt("influence", lambda: _predict(task, budget, totals)) or part
    return (task.attempt("actual_step", lambda: _move(task, part)) or part) if moves else part


def _predict(task: Task, budget: int, totals: torch.Tensor | None) -> StepPart:
    rows = steps.within_budget(task.batch, budget, generator=torch.Generator().manual_seed(task.settings.seed))
    batch = task.batch.select(rows)
    whole = batch.num_tokens == len(task.table)
    if not whole:
        within = f"influence_tokens = {budget:,}" if budget == task.settings.influence_tokens else "the minutes"
        task.note(
            "influence-sample",
            f"Influence between probability intervals refers to a step on {batch.num_tokens:,} of {len(task.table):,} "
            f"tokens (whole prompts within {within}, those with an advantage first).",
        )
    # The step's intervals are by π_old, and its KL part is a separate source.
    known = task.table[task.table["old_logprob"].notna()]
    same = assign_intervals(np.exp(known["old_logprob"].clip(upper=0)), task.settings.edges) == known["interval"]
    shared = whole and same.all() and not task.table["kl_weight"].any()
    known = totals if shared else None
    J, given = task.jacobian.alone().select(rows), task.step_keywords()
    found = predict_step(J, edges=task.settings.edges, gradients=known, **given)
    told, table = steps.influence_rows(found.contributions, task.labels, **task.draws("influence"))
    moved = steps.predicted_movement(found.contributions)
    shares, directions = steps.direction_rows(moved, "predicted", task.labels, **task.draws("directions"))
    against = moved_against(found.contributions, task.settings.top)
    against = against.assign(response=rows.numpy()[against["response"]])
    changed, entropy = steps.entropy_rows(found.contributions, found.entropy, task.labels, **task.draws("entropy"))
    slopes = found.entropy_slopes if whole and not task.table["kl_weight"].any() else None
    return StepPart((told, shares, changed), table, against, entropy, slopes, (directions,))


def _move(task: Task, predicted: StepPart) -> StepPart:
    moved = RealSteps(task.jacobian.alone().moved(), **task.step_keywords()).take()
    table = movement_table([moved], edges=task.settings.edges)
    shares, directions = steps.direction_rows(table, "actual", task.labels, **task.draws("directions.actual"))
    change = one_row("entropy_change_actual", table["delta_entropy.all"].mean(), len(table), unit="nats")
    rows, both = (*predicted.rows, shares, change), (*predicted.directions, directions)
    return replace(predicted, rows=rows, directions=both, movement=table)
