"""Diagnose one checkpoint: what its update is made of, by the questions of `parts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, Unpack

import pandas as pd

from gradscope.diagnosis.findings import WARNINGS, Findings
from gradscope.diagnosis.measured import Clock, Measured
from gradscope.diagnosis.notes import check_table, note_limits, tell_pooled
from gradscope.diagnosis.page.contents import make_report
from gradscope.diagnosis.page.first_screen import advise
from gradscope.diagnosis.parts import asked_products, settle_parts
from gradscope.diagnosis.products import contributions, follow_table, make_products, plan_products
from gradscope.diagnosis.result import Diagnosis, Scope
from gradscope.diagnosis.rows import Rows
from gradscope.diagnosis.settings import DiagnosisKeywords, DiagnosisSettings
from gradscope.diagnosis.update import has_gradient, with_advantages
from gradscope.diagnosis.wording import words_for
from gradscope.errors import checked
from gradscope.gradients import (
    Afterwards,
    MeasureSettings,
    Resources,
    Stopwatch,
    TokenJacobian,
    fill_table,
    note_logged,
    prepare_measurement,
    statistics_of,
)
from gradscope.objective import LossSettings, settle_loss
from gradscope.policy import AdamWState, Policy, PolicyLike
from gradscope.rollouts import BatchLike, Note, TokenBatch, own_responses, read_logged
from gradscope.runs import ALONE, SILENT, Processes, Progress, settle_progress
from gradscope.updates import settle_step


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
    seed, minutes, …) that override `settings`, and weighting, the loss's; if neither gives a loss, the one recorded in
    the rollouts is used, if any. table: from `measure(policy, batch, …)` with the same loss, edges and temperatures,
    possibly of a sample of tokens; None: measure it here. optimizer_state: AdamW's `state_dict()` or its file, for
    AdamW's metric and as the state that steps start from, or an `AdamWState` for the metric alone; None: no numbers in
    AdamW's metric, and steps use `settings.step`, else the paper's SGD.

    processes: all call this with the same arguments, including a table, and share the summed gradients; all but the
    main process get None. verdict_minutes: the time limit with which a given table would suffice for a verdict, for
    the words alone.

    Without advantages or rewards there are no weights, only norms. The 95 % bounds resample whole prompts, and are NaN
    for a single prompt; see `shares` and `sums`. Raises InputError if settings, table or state do not fit; what this
    policy or batch does not permit is left out with a note.
    """
    own_loss = settings is not None or "loss" in changes
    chosen = {name: changes.pop(name) for name in ("weighting",) if name in changes}
    settings = checked(DiagnosisSettings, "diagnose")(**vars(settings or DiagnosisSettings()) | changes)
    settings = replace(settings, loss=replace(settings.loss, **chosen))
    settings.check()
    parts = settle_parts(settings.parts)
    progress = settle_progress(progress) if processes.is_main else SILENT
    known = {"micro_batch": settings.micro_batch_size, "processes": processes, "progress": progress}
    resources = Resources(settings.gradient_memory, **known)
    wanted = asked_products(parts)
    given = {"table": table, "resources": resources, "verdict_minutes": verdict_minutes}
    m = look_at(policy, batch, settings, optimizer_state, own_loss=own_loss, **given)
    if settings.minutes is None and m.weighted:  # else planned by time
        progress.plan(plan_products(m.case, wanted))
    make_products(m, wanted)
    if not processes.is_main:
        return None
    found = say(assemble(m, parts))
    return replace(found, report=partial(make_report, found, m.policy, m.batch))


def look_at(
    policy: PolicyLike,
    batch: BatchLike,
    settings: DiagnosisSettings,
    state: AdamWState | dict[str, Any] | str | Path | None,
    *,
    own_loss: bool,
    table: pd.DataFrame | None,
    resources: Resources,
    verdict_minutes: int | float | None,
) -> Measured:
    """Resolve the inputs, and measure the token table unless it is given.

    own_loss: whether the settings' loss was asked for; otherwise the log's is taken, if it has one.
    """
    watch, processes = Stopwatch(), resources.processes
    policy, batch, told = read_logged(policy, batch)
    if told and not own_loss:
        logged = LossSettings.from_log(told)
        settings = replace(settings, loss=replace(logged, weighting=settings.loss.weighting or logged.weighting))
    batch = settle_loss(batch, settings.loss)
    step, saved, metric = settle_step(policy.model, settings.step, state)
    logged = None
    if table is None:
        known = {"metric": metric, "progress": resources.progress, "watch": watch}
        if settings.minutes is not None:
            names = asked_products(settle_parts(settings.parts))
            known["following"] = follow_table(policy, batch, settings, step, metric=metric is not None, names=names)
        table, logged, verdict_minutes = _measure_table(policy, batch, settings, **known)
    table = contributions.drop_columns(table)  # of whatever loss and prompts
    whole, batch = batch, batch.of_prompts(table["group"].unique()) if "group" in table else batch
    check_table(table, batch, settings)
    batch = with_advantages(batch, table, settings.loss)
    if logged is None and processes.is_main:
        logged = note_logged(policy, batch, table)
    J = TokenJacobian(policy, batch, resources, statistics=statistics_of(table, policy, batch, processes))
    clock = _start_clock(J, settings, watch) if has_gradient(table) else Clock(settings.minutes, watch=watch)
    m = Measured(J, table, settings, step, whole, saved, metric, clock, verdict_minutes)
    m.notes.extend(_first_notes(m, logged or ()))
    return m


def _measure_table(
    policy: Policy,
    batch: TokenBatch,
    settings: DiagnosisSettings,
    *,
    metric: AdamWState | None,
    progress: Progress,
    watch: Stopwatch,
    following: Afterwards = Afterwards(),  # noqa: B008  (frozen)
) -> tuple[pd.DataFrame, tuple[Note, ...], float | None]:
    """Measure the token table within the settings' minutes; return it, its notes, and the minutes of a verdict."""
    each = settings.tokens_per_interval if settings.minutes is None else None
    sample = {"tokens_per_interval": each, "minutes": settings.minutes, "seed": settings.seed}
    sample = MeasureSettings(**sample, loss=settings.loss, module_groups=True, metric=metric and "adamw")
    known = {"optimizer_state": metric, "resources": Resources(settings.gradient_memory, progress=progress)}
    measurement = prepare_measurement(
        policy, batch, sample, edges=settings.edges, watch=watch, following=following, **known
    )
    return fill_table(measurement), measurement.notes, measurement.verdict_minutes


def _start_clock(J: TokenJacobian, settings: DiagnosisSettings, watch: Stopwatch) -> Clock:
    """Time a forward pass over the longest response, if there is a limit."""
    if settings.minutes is None:
        return Clock(watch=watch)
    processes = J.resources.processes
    with J.resources.progress.stage("timing a forward pass"):
        (seconds,) = processes.gather([_time_pass(J.alone())] if processes.is_main else [])
    return Clock(settings.minutes, seconds, watch)


def _time_pass(J: TokenJacobian) -> float:
    """Estimate the seconds of a forward pass over the batch from one over the longest response."""
    lengths = J.batch.attention_mask.sum(1) * J.batch.response_mask.any(1)
    longest = int(lengths.argmax())
    one, start = J.select([longest]).moved(), perf_counter()
    _ = one.statistics
    return (perf_counter() - start) * float(lengths.sum() / lengths[longest])


def _first_notes(m: Measured, logged: Sequence[Note]) -> list[Note]:
    """Return the notes about the rollouts, warnings first."""
    batch = tell_pooled(m.batch, m.table)
    told = (*logged, *batch.without_notes("on-policy").notes)  # the part off_policy knows more about that
    first = [note for kind in WARNINGS for note in told if note.kind == kind]
    whole = {"second_moments": m.metric is not None, "whole_state": m.saved is not None}
    whole["is_sampled"] = m.settings.loss.is_sampled
    return [*first, *(note for note in told if note not in first), *note_limits(m.table, m.labels, **whole)]


def assemble(m: Measured, parts: Mapping[str, ModuleType]) -> Diagnosis:
    """Ask each part for its rows; those whose products were not made, or that raise InputError, are left out."""
    rows: dict[str, Rows] = {}
    for name, part in parts.items():
        if not {"table", *m.made} & {*part.ASKS}:
            continue
        found = m.attempt(name, part.TITLE, lambda part=part: part.rows(m))
        if found is not None:
            rows[name] = found.without_bounds() if m.supply.too_few else found
    own, sums = own_responses(m.batch), m.made.get("sums")
    scope = Scope(
        m.labels,
        m.supply,
        contributions.add_columns(m.table, m.made.get("contributions")),
        of_tokens=m.whole.num_tokens,
        settings=m.settings,
        step=m.step,
        parameters=m.policy.parameters_in_words,
        own_responses=None if own is None else int((own & m.batch.response_mask.any(1)).sum()),
        summed=None if sums is None else len(sums.raw.groups),
    )
    return Diagnosis(rows, scope, tuple(m.notes), dict(m.left_out), parts=parts, measured=m)


def say(found: Diagnosis) -> Diagnosis:
    """Add what each part says about the numbers, in the order of the parts, and what to do next."""
    asked = (part for name, part in found.parts.items() if name in found.rows and hasattr(part, "say"))
    words = words_for(found.scope.settings.loss)
    findings = Findings(finding.reworded(words) for part in asked for finding in part.say(found))
    return replace(found, findings=findings, advice=advise(findings))
