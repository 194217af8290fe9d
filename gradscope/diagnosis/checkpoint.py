"""One checkpoint's diagnosis in numbers: who dominates the update, how much, where, what a step does, what to try.

`diagnose` brings together what the other files know; `trend` puts several checkpoints side by side. All headline
numbers are rows of one tidy frame (`diagnosis_rows`); what they mean stands in the files that make them and, in words
that a page can quote, in `diagnosis_words.DEFINITIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from gradscope.diagnosis import gradients, steps, tokens
from gradscope.diagnosis.notes import check_table, count_informative_prompts, has_gradient, note_limits
from gradscope.diagnosis.result import LARGE, Diagnosis, DiagnosisSettings, join_rows, make_rows, one_row
from gradscope.errors import InputError, first_line
from gradscope.gradients import largest_share, measure, measuring, own_rows, plan_batch_sums
from gradscope.intervals import interval_labels
from gradscope.objective import batch_statistics
from gradscope.policy import AdamWState, Policy, gradient_budget, return_freed_memory
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes
from gradscope.theory import regress_norms
from gradscope.updates import (
    KINDS,
    SGD,
    apply_update,
    fits_at_once,
    influence,
    influence_cost,
    linearise_cost,
    moved_against,
    movement_table,
    update_cost,
)


def diagnose(
    policy: Policy,
    batch: TokenBatch,
    table: pd.DataFrame | None = None,
    *,
    settings: DiagnosisSettings | None = None,
    optimizer_state: AdamWState | dict[str, Any] | None = None,
    processes: Processes = ALONE,
    progress: bool = False,
) -> Diagnosis | None:
    """Diagnose one checkpoint by one batch of rollouts; the policy is as it was afterwards.

    table: of `measure(policy, batch, …)` with the settings' loss and edges and the batch's temperatures; it may be of a
    sample of tokens or hold estimates; None: measured here. optimizer_state: what AdamW's `state_dict()` saved, which
    gives its metric and is what steps go on from; or an `AdamWState`, which gives the metric alone; None: no numbers in
    AdamW's metric, and steps are `settings.step`, else the paper's SGD.

    processes: each calls this with the same arguments, a table among them; they share the summed gradients, and all but
    the main one get None.

    Without advantages and rewards there are no weights: only what the norms say is left. Intervals of 95 % redraw whole
    prompts, and are NaN with one; see `diagnosis_tokens` and `diagnosis_gradients`. Raises InputError for settings, a
    table or a state that do not fit; a part that this policy or batch cannot give is left out, and a note says why.
    """
    settings = settings or DiagnosisSettings()
    settings.check()
    if table is None:
        sample = {"tokens_per_interval": settings.tokens_per_interval, "seed": settings.seed, "loss": settings.loss}
        table = measure(policy, batch, edges=settings.edges, progress=progress, **sample)
    check_table(table, batch, settings)
    work = _Work(policy, steps.with_advantages(batch, table), table, settings, optimizer_state, processes, progress)
    with processes.together():
        if processes.is_main:
            work.describe_tokens()
    work.sum_gradients()
    if not processes.is_main:
        return None
    work.take_steps()
    work.recommend()
    return work.result()


def trend(diagnoses: Mapping[int, Diagnosis] | Iterable[tuple[int, Diagnosis]]) -> pd.DataFrame:
    """The statistics of several checkpoints, one below the other by training step, with a column `step` in front.

    Raises InputError for none, and for two of one step.
    """
    pairs = list(diagnoses.items() if isinstance(diagnoses, Mapping) else diagnoses)
    by_step = dict(pairs)
    if not pairs:
        raise InputError("no diagnosis to put side by side; give at least one with its training step")
    if len(by_step) < len(pairs):
        raise InputError(f"{len(pairs)} diagnoses are of {len(by_step)} training steps; give one of each step")
    frame = pd.concat([by_step[step].statistics.assign(step=step) for step in sorted(by_step)], ignore_index=True)
    return frame[["step", *frame.columns.drop("step")]]


@dataclass
class _Work:
    """A diagnosis that is being made."""

    policy: Policy
    batch: TokenBatch
    table: pd.DataFrame
    settings: DiagnosisSettings
    optimizer_state: AdamWState | dict[str, Any] | None
    processes: Processes
    progress: bool
    rows: list[pd.DataFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    """Forward passes over the batch that are planned so far."""

    def __post_init__(self) -> None:
        self.labels = interval_labels(self.settings.edges)
        if (given := self.settings.gradient_memory) is None:
            given = gradient_budget(self.policy.device, self.processes)
        self.memory = given
        state = self.optimizer_state
        self.saved = state if isinstance(state, dict) else None
        self.step = self.settings.step or (steps.state_step(self.saved) if self.saved is not None else SGD)
        if self.saved is not None:
            if self.step.optimizer != "adamw":
                raise InputError("the optimizer state is AdamW's and settings.step sgd; give a step of adamw, or none")
            self.metric = AdamWState.from_state_dict(
                self.policy.model, self.saved, max_grad_norm=self.step.max_grad_norm
            )
        else:
            self.metric = state
        self.counts = np.bincount(self.table["interval"], minlength=len(self.labels))
        self.weighted = has_gradient(self.table)
        self.pass_seconds = 0.0
        """Seconds of a forward pass over the batch, where there are minutes to keep to."""
        if self.weighted and self.settings.minutes is not None:
            (self.pass_seconds,) = self.processes.gather([self._time_pass()] if self.processes.is_main else [])
            self._spend(1.0)
        given = (self.metric is not None, self.saved is not None)
        self.notes += note_limits(self.table, self.labels, second_moments=given[0], whole_state=given[1])

    def describe_tokens(self) -> None:
        """What the table alone says."""
        rng, resamples = self._rng(0), {"resamples": self.settings.resamples}
        if self.weighted:
            sums = tokens.sum_by_prompt(self.table, len(self.labels))
            self.rows.append(tokens.token_shares(sums, self.labels, rng=rng, **resamples))
            special = getattr(self.policy.tokenizer, "all_special_tokens", ())
            more = {"bins": self.settings.bins, "special": frozenset(special), "rng": rng}
            self._keep("where", lambda: tokens.shares_by(self.table, **more, **resamples), "where the norm is")
            self.parts["spikes"] = tokens.largest_tokens(self.table, self.settings.top)
        else:
            found = np.full((3, len(self.labels)), np.nan)
            found[0] = self.counts / self.counts.sum()
            self.rows.append(make_rows("token_share", found, self.counts, unit="share", intervals=self.labels))
        self.rows.append(self._count_rows())
        self.rows.append(
            one_row("prompts", float(count_informative_prompts(self.table)), len(self.table), unit="prompts")
        )
        self.parts["layers"] = tokens.layer_norms(self.table, self.settings.edges, rng=rng, **resamples)
        self._keep("drivers", lambda: regress_norms(self.table, rng=rng, **resamples), "probability against entropy")
        self.rows.append(self._bound_rows())
        self.rows.append(steps.lag_rows(self.table, self.settings.loss, rng=rng, **resamples))
        if self.table["old_logprob"].isna().any():
            self.notes.append("Some or all old log-probabilities are unknown: these tokens are taken as on-policy.")

        if self.weighted and self.settings.loss.kl_coef and self.table["ref_logprob"].isna().any():
            self.notes.append("Some or all reference log-probabilities are unknown: these tokens have no KL part.")

    def sum_gradients(self) -> None:
        """The intervals' summed gradients, prompt by prompt."""
        if not self.weighted:
            return
        s, size = self.settings, len(self.labels)
        asked = {"memory": self.memory, "intervals": size, "micro_batch_size": s.micro_batch_size}
        asked |= {"metric": self.metric is not None, "way": s.gradient_way}
        plan = plan_batch_sums(self.policy, self.batch, keeps_prompts=True, **asked)
        share = largest_share(len(own_rows(self.batch)), self.processes.count)
        once, way = plan.forward_passes * share, s.gradient_way
        known = plan.way == "slices" and way is None and plan.sketched_passes is not None
        if known and not self._in_time(once * (1 + (self.metric is not None))):
            once, way = plan.sketched_passes * share, "sketches"
        self._spend(once)
        metric = self.metric if self.metric is not None and self._affords("AdamW's metric", once) else None
        signs = s.sign_passes
        if metric is not None and signs is not None:
            signs = signs if self._affords("Σ‖w·g‖² in AdamW's metric", signs * once) else None
        found = gradients.sum_gradients(
            self.policy,
            self.batch,
            steps.seeds_of(self.table, self.batch, size),
            metric=metric,
            sign_passes=signs,
            memory=self.memory,
            way=way,
            micro_batch_size=s.micro_batch_size,
            generator=self._generator(1),
            processes=self.processes,
            progress=self.progress,
        )
        if found.plan.way != "whole":
            self.notes.append(f"{str(found.plan).capitalize()}.")
        return_freed_memory()
        by_prompt = self.table.groupby("group")["interval"].value_counts().unstack(fill_value=0)
        counts = by_prompt.reindex(columns=range(size), fill_value=0).to_numpy(np.float64)
        for products, metric in ((found.raw, "raw"), (found.adamw, "adamw")):
            if products is not None:
                self._add_gradients(products, counts, metric)
        if found.squares is not None:
            squares = self._sums_with(found.squares, counts)
            kept = squares["statistic"].isin(["squared_share", "dominance_index"])
            self.rows.append(squares[kept].assign(metric="adamw"))

    def _add_gradients(self, products: gradients.Products, counts: np.ndarray, metric: str) -> None:
        more = {"rng": self._rng(2), "resamples": self.settings.resamples}
        self.rows.append(gradients.gradient_rows(products, counts, self.labels, metric=metric, **more))
        self.parts["cosines" if metric == "raw" else "adamw_cosines"] = gradients.cosine_matrix(products.pairs)

    def _sums_with(self, squares: np.ndarray, counts: np.ndarray) -> pd.DataFrame:
        sums = tokens.PromptSums(counts, counts, squares, np.ones_like(counts))
        return tokens.token_shares(sums, self.labels, rng=self._rng(3), resamples=self.settings.resamples)

    def take_steps(self) -> None:
        """One step, predicted and split by source, and taken."""
        if not self.weighted:
            return
        s, size = self.settings, len(self.labels)
        one_by_one = not fits_at_once(self.policy, self.step, size, self.memory)
        cost = influence_cost(self.step, s.loss, num_intervals=size, one_by_one=one_by_one)
        moves = s.actual_step and self._affords("the actual step", update_cost())
        if s.influence_tokens is not None:
            # A step on fewer prompts, where that on all takes too long.
            # Whole prompts are taken, in random order: it must hold whichever is the first.
            budget, least = self._tokens_in_time(cost), int(self.table["group"].value_counts().max())
            if budget < min(s.influence_tokens, least):
                self._leave_out("who moves whom", cost * least / self.batch.num_tokens)
            else:
                budget = min(s.influence_tokens, budget)
                self._spend(cost * min(1.0, budget / self.batch.num_tokens))
                self._keep("influence", lambda: self._predict(budget), "who moves whom")
        if moves:
            self._keep("movement", self._move, "the actual step")

    def _predict(self, budget: int) -> pd.DataFrame:
        rows = steps.within_budget(self.batch, budget, generator=self._generator(4))
        batch = self.batch.select(rows)
        if len(rows) < len(self.batch):
            self.notes.append(
                f"Who moves whom is of a step on {batch.num_tokens:,} of {len(self.table):,} tokens (whole prompts "
                f"within influence_tokens = {budget:,}, those with an advantage first)."
            )
        found = influence(self.policy, batch, progress=self.progress, **self._step_keywords())
        more = {"rng": self._rng(5), "resamples": self.settings.resamples}
        told, table = steps.influence_rows(found.contributions, self.labels, **more)
        moved = steps.predicted_movement(found.contributions)
        shares, frame = steps.direction_rows(moved, "predicted", self.labels, **more)
        self.rows += [told, shares]
        self.parts["directions"] = frame
        against = moved_against(found.contributions, self.settings.top)
        self.parts["against"] = against.assign(response=rows.numpy()[against["response"]])
        return table

    def _move(self) -> pd.DataFrame:
        table = movement_table([apply_update(self.policy, self.batch, **self._step_keywords())])
        more = {"rng": self._rng(6), "resamples": self.settings.resamples}
        shares, frame = steps.direction_rows(table, "actual", self.labels, **more)
        self.rows.append(shares)
        before = [self.parts["directions"]] if "directions" in self.parts else []
        self.parts["directions"] = pd.concat([*before, frame], ignore_index=True)
        return table

    def _step_keywords(self) -> dict[str, Any]:
        s = self.settings
        numbers = {"settings": s.loss, "step": self.step, "optimizer_state": self.saved, "edges": s.edges}
        return numbers | {"memory": self.memory}

    def recommend(self) -> None:
        """Screen α and η at first order."""
        s = self.settings
        if not self.weighted or s.recommend_batches is None or s.recommend is False:
            return
        size = sum(p.numel() for p in self.policy.model.parameters())
        if s.recommend is None and size >= LARGE:
            self.notes.append(
                f"Left out: α and η (of {size:,} parameters, screening them takes more passes than all the rest; "
                "--recommend does it all the same)."
            )
            return
        cells = 2 * len(self.labels)
        one_by_one = not fits_at_once(self.policy, self.step, KINDS * cells, self.memory)
        if not self._affords("α and η", linearise_cost(cells, self.step, s.loss, one_by_one=one_by_one)):
            return
        keywords = {"loss": s.loss, "step": self.step, "optimizer_state": self.saved, "progress": self.progress}
        keywords |= {"rng": self._rng(7), "generator": self._generator(7), "num_batches": s.recommend_batches}
        keywords |= {"memory": self.memory}
        self._keep(
            "recommendation",
            lambda: steps.recommend(self.policy, self.batch, alphas=s.alphas, etas=s.etas, **keywords),
            "α and η",
        )
        if (best := self.parts.get("recommendation")) is None:
            return
        found = np.array([[best.difference], [best.lower], [best.upper]])
        self.rows.append(make_rows("recommended_difference", found, len(self.table), unit="share"))
        for name, value in (("recommended_alpha", best.alpha), ("recommended_eta", best.eta)):
            self.rows.append(one_row(name, np.nan if value is None else float(value), len(self.table), unit="none"))

    def result(self) -> Diagnosis:
        responses = self.table["response"].nunique()
        return Diagnosis(
            statistics=join_rows(self.rows),
            notes=tuple(self.notes),
            table=self.table,
            labels=tuple(self.labels),
            num_prompts=self.table["group"].nunique(),
            num_responses=responses,
            num_informative_prompts=count_informative_prompts(self.table),
            settings=self.settings,
            step=self.step,
            parameters=self.policy.parameters_in_words,
            **self.parts,
        )

    def _affords(self, what: str, forward_passes: float) -> bool:
        """Whether a part of so many forward passes over the batch fits into the minutes; if not, a note says so."""
        if self._in_time(forward_passes):
            self._spend(forward_passes)
            return True
        self._leave_out(what, forward_passes)
        return False

    def _leave_out(self, what: str, forward_passes: float) -> None:
        wanted = (self.spent + forward_passes) * self.pass_seconds / 60
        self.notes.append(
            f"Left out: {what} (about {forward_passes:.0f} forward passes over the batch, of "
            f"{self.pass_seconds:.3g} s each: gradients and steps would take {math.ceil(wanted)} minutes with it, and "
            f"have {self.settings.minutes:.3g})."
        )

    def _in_time(self, forward_passes: float) -> bool:
        if self.settings.minutes is None:
            return True
        return (self.spent + forward_passes) * self.pass_seconds <= 60 * self.settings.minutes

    def _tokens_in_time(self, forward_passes: float) -> int:
        """Tokens of a batch that is as much smaller than this one as so many forward passes over it are too many."""
        if self.settings.minutes is None:
            return self.settings.influence_tokens
        left = 60 * self.settings.minutes / self.pass_seconds - self.spent
        return max(0, int(left / forward_passes * self.batch.num_tokens))

    def _spend(self, forward_passes: float) -> None:
        self.spent += forward_passes

    def _time_pass(self) -> float:
        """Seconds of a forward pass, response by response: as a table's statistics are made, which costs rest on."""
        start = perf_counter()
        with measuring(self.policy.model):
            batch_statistics(self.policy.model, self.batch, micro_batch_size=1, device=self.policy.device)
        return perf_counter() - start

    def _keep(self, name: str, make: Callable[[], Any], what: str) -> None:
        """Make a part that not every policy and batch can give."""
        try:
            self.parts[name] = make()
        except (InputError, torch.OutOfMemoryError) as error:
            self.notes.append(f"Left out: {what} ({first_line(error)}).")
        return_freed_memory()

    def _count_rows(self) -> pd.DataFrame:
        found = np.full((3, len(self.labels)), np.nan)
        found[0] = self.counts
        return make_rows("tokens", found, self.counts, unit="tokens", intervals=self.labels)

    def _bound_rows(self) -> pd.DataFrame:
        self.parts["bounds"] = found = tokens.bound_margins(self.table, self.policy.vocab_size)
        names = {
            "bound_violations": (found.violations, "tokens"),
            "bound_lower_margin": (found.lower_margin, "ratio"),
            "bound_upper_margin": (found.upper_margin, "ratio"),
        }
        return join_rows([one_row(n, float(value), found.num_tokens, unit=unit) for n, (value, unit) in names.items()])

    def _rng(self, part: int) -> np.random.Generator:
        """Each part's own, so that leaving one out changes no other."""
        return np.random.default_rng([self.settings.seed, part])

    def _generator(self, part: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.seed * 64 + part)
