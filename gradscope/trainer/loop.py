"""The training loop: sample, score, advantages, passes, log, checkpoint; one run is one folder.

    OUT/config.json, manifest.json      what was run, with which versions, where
    OUT/metrics.jsonl                   a line per step
    OUT/checkpoints/step-000020/        a folder that transformers loads, with optimizer and random states
    OUT/rollouts/step-000001.parquet    with save_rollouts: the responses, in the native format
    OUT/trackers/                       what TensorBoard reads
    OUT/.lock                           while it runs

Everything drawn at random is a function of the seed, the step and the place among the processes, so a run resumed with
as many processes goes on to the same numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import DivergedError, InputError, NanLogitsError, SyncError, checked, make_settings
from gradscope.objective import StepResult, TokenStatistics
from gradscope.rollouts import TokenBatch
from gradscope.runs import SILENT, Processes, Progress, locked, settle_progress
from gradscope.sampling import Sampler, make_sampler
from gradscope.tasks import get_task
from gradscope.trainer.algorithm import Update, compute_advantages, plan_update, takes_one_step
from gradscope.trainer.callbacks import OnStep, Step, measure_gradients
from gradscope.trainer.checkpoints import drop_old, list_checkpoints, step_of
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.files import Journal, find_start
from gradscope.trainer.launch import make_accelerator
from gradscope.trainer.learner import Learner, build_learner
from gradscope.trainer.metrics import rollout_metrics, token_metrics, update_metrics
from gradscope.trainer.presets import get_preset
from gradscope.trainer.rollout import Questions, Rollout, derive_seed, sample_rollout

MOST_NONFINITE = 3
"""Optimizer steps in a row without a finite gradient that end a run."""
SYNC_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Mean |Δ log π| in nats of sampler and trainer from which they are taken to hold different weights.

In bfloat16 that finds weights of another model or another temperature, not weights that are one small step old."""


@checked
def train(
    config: TrainConfig | str,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = True,
    **changes: object,
) -> Path:
    """Train, and return the folder of the last checkpoint.

    config: or the name of a preset. changes: fields of TrainConfig, each in the place of that in `config`.

    resume: go on from the newest checkpoint in `out` (from the start, if there is none yet); overwrite: replace a run
    in `out`. With neither, a folder that holds a run is refused. Run under `accelerate launch` for several processes.

    Raises InputError for whatever the user can mend, DivergedError after three steps in a row without a finite
    gradient and for weights or logits that steps have made infinite or NaN, SyncError if the sampler's weights are not
    the trainer's; checkpoints stay in all cases. A run to be overwritten is deleted as the new one begins: settings and
    sampler have been looked at by then.
    """
    config = get_preset(config) if isinstance(config, str) else config
    config, out = make_settings(TrainConfig, "train", vars(config) | changes), Path(out)
    questions = Questions(get_task(config.task), config)
    accelerator = make_accelerator(config, out)
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    with ExitStack() as stack:
        with processes.together():
            if processes.is_main:
                stack.enter_context(locked(out))
        asked = {"resume": resume, "overwrite": overwrite, "tell": processes.is_main}
        start = find_start(config, out, questions.steps, **asked)
        if start is not None and step_of(start) == questions.steps:
            with processes.together():
                if processes.is_main:
                    drop_old(out, config.keep_checkpoints)  # it may have been stopped just then
            accelerator.end_training()
            return start
        learner = build_learner(config, accelerator, start)
        journal = Journal(config, out, questions, learner, accelerator)
        begin = stack.enter_context(journal.opened(start, overwrite=overwrite))
        # Closed before the journal is, whose trackers end the process group that vLLM needs.
        sampler = stack.enter_context(closing(_make_sampler(config, learner)))
        watchers = [] if config.gradients_every is None else [measure_gradients]
        watchers += [] if on_step is None else [on_step]
        nonfinite = begin()
        if progress and processes.is_main:
            for note in learner.policy.length_notes(config.max_new_tokens):
                print(f"note: {note}", file=sys.stderr)
        run = _Run(journal, sampler, watchers, done=0 if start is None else step_of(start), nonfinite=nonfinite)
        run.go(settle_progress(progress) if processes.is_main else SILENT)
    return list_checkpoints(out)[-1]


def _make_sampler(config: TrainConfig, learner: Learner) -> Sampler:
    with learner.processes.together():
        return make_sampler(
            config.engine,
            learner.policy,
            batch_size=config.sampling_batch_size,
            dtype=config.precision,
            memory=config.vllm_memory,
            progress=False,
        )


class _Run:
    """A run in progress."""

    def __init__(
        self, journal: Journal, sampler: Sampler, watchers: list[OnStep], *, done: int, nonfinite: int
    ) -> None:
        self.journal, self.sampler, self.watchers = journal, sampler, watchers
        self.config, self.questions, self.learner = journal.config, journal.questions, journal.learner
        self.processes, self.done, self.nonfinite = journal.processes, done, nonfinite
        self.seconds = dict.fromkeys(("sampling", "training", "other"), 0.0)

    def go(self, progress: Progress) -> None:
        """All steps that are left."""
        total = self.questions.steps
        with progress.stage("training", total, "steps", done=self.done) as advance:
            while self.done < total:
                record = self._step(self.done)
                self.done += 1
                self.journal.log(record)
                advance(1, _show(record, total, printed=progress is not SILENT and not sys.stderr.isatty()))
                if self.nonfinite >= MOST_NONFINITE:
                    raise self.journal.diverged(
                        f"{self.nonfinite} optimizer steps in a row had no finite gradient, up to step {self.done}"
                    )
                if self.done % self.config.save_every == 0 or self.done == total:
                    self._save()

    def _step(self, index: int) -> dict[str, Any]:
        """Step `index` (0, 1, …): what is logged of it."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        started = time.perf_counter()
        rollout = self._sample(index)
        scored = self.watchers or not takes_one_step(self.config)
        batch, statistics = self._prepare(rollout, scored=scored)
        record = {"step": index + 1, **rollout_metrics(rollout)}
        if scored:
            self._check_scores(rollout.batch, statistics)
            record |= token_metrics(batch, statistics, rollout.batch.old_logprobs)
        generator = torch.Generator().manual_seed(derive_seed(self.config.seed, index, 2))
        update = plan_update(batch, self.config, generator)
        learner = self.learner
        step = Step(
            index + 1,
            learner.policy,
            update.batch,
            statistics,
            update.settings,
            self.config,
            learner.statistics_alone,
            record,
        )
        with ExitStack() as stack:
            for watch in self.watchers if self.processes.is_main else []:
                stack.enter_context(watch(step))
            results = self._update(index, update, score=not scored)
        if not scored:
            statistics = results[0].statistics
            self._check_scores(rollout.batch, statistics)
            batch = replace(batch, old_logprobs=statistics.logprob)
            record |= token_metrics(batch, statistics, rollout.batch.old_logprobs)
        self.journal.keep_rollout(index + 1, rollout, batch)
        record |= update_metrics(results)
        total = time.perf_counter() - started
        self.seconds["other"] = total - self.seconds["sampling"] - self.seconds["training"]
        record |= {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
        return record | {"tokens_per_second": record["num_tokens"] / total}

    def _sample(self, index: int) -> Rollout:
        with self._timed("sampling"), self.learner.computing():
            self.learner.sync(self.sampler)
            questions = self.questions.of_step(index)
            try:
                return sample_rollout(self.learner.policy, self.sampler, questions, self.config, index, self.processes)
            except (InputError, KeyboardInterrupt) as error:
                if self.done and isinstance(error, NanLogitsError):
                    raise self._diverged_logits() from error
                # The weights are those of the last finished step: nothing of it is lost. Several processes save
                # together or not at all, and an interruption finds them at different places.
                together = self.processes.count == 1 or isinstance(error, InputError)
                if together and self.done and not self.journal.has_checkpoint(self.done):
                    self._save()
                raise

    def _prepare(self, rollout: Rollout, *, scored: bool) -> tuple[TokenBatch, TokenStatistics | None]:
        """The batch with π_old, π_ref and advantages, and the statistics of its tokens under the policy.

        Not scored: without π_old and statistics.
        """
        batch, config = rollout.batch, self.config
        if config.kl_coef > 0:
            batch = replace(batch, ref_logprobs=self.learner.reference_logprobs(batch))
        statistics = self.learner.statistics(batch) if scored else None
        if not scored:
            batch = replace(batch, advantages=compute_advantages(batch, config))
            return replace(batch, old_logprobs=None, sampler_logprobs=batch.old_logprobs), None
        if config.old_logprobs == "trainer":
            batch = replace(batch, old_logprobs=statistics.logprob, sampler_logprobs=batch.old_logprobs)
        return replace(batch, advantages=compute_advantages(batch, config)), statistics

    def _check_scores(self, sampled: TokenBatch, statistics: TokenStatistics) -> None:
        if self.done and not statistics.logprob[sampled.response_mask].isfinite().all():
            raise self._diverged_logits()
        self._check_sync(sampled, statistics)

    def _check_sync(self, sampled: TokenBatch, statistics: TokenStatistics) -> None:
        """Each process's sampler must hold the trainer's weights: four responses of each have their log π compared."""
        drift = 0.0
        for rank in range(self.processes.count):
            rows = (sampled.group_ids % self.processes.count == rank).nonzero()[:4, 0]
            mismatch = (sampled.old_logprobs[rows] - statistics.logprob[rows])[sampled.response_mask[rows]].abs()
            drift = max(drift, float(mismatch.mean())) if len(rows) else drift
        if not drift <= SYNC_TOLERANCE[self.config.precision]:
            raise SyncError(
                f"the sampler's log-probabilities are {drift:.3g} nats off the trainer's (mean of four responses); it "
                "does not sample with the trained weights, or not at this temperature"
            )

    def _update(self, index: int, update: Update, *, score: bool) -> list[StepResult]:
        """All optimizer steps on the batch; score: the only one also scores its tokens."""
        config, results = self.config, []
        self.learner.set_learning_rate(config.learning_rate * min(1.0, (index + 1) / max(1, config.warmup_steps)))
        with self._timed("training"), self.learner.computing():
            for part in update.passes:
                how = {"match": update.match, "weighting": update.weighting, "score": score}
                result = self.learner.updater.step(part, update.settings, **how)
                results.append(result)
                if result.outcome != "empty":
                    self.nonfinite = self.nonfinite + 1 if result.outcome == "nonfinite" else 0
                if self.nonfinite >= MOST_NONFINITE:
                    break
        if not self.learner.is_finite():
            raise self.journal.diverged(f"the weights are not finite after step {index + 1}")
        return results

    def _save(self) -> None:
        self.journal.save(self.done, nonfinite_in_a_row=self.nonfinite)

    def _diverged_logits(self) -> DivergedError:
        words = f"the policy's logits are NaN or infinite after step {self.done}"
        return self.journal.diverged(words, up_to=self.done - 1)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.learner.updater.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - started


def _show(record: dict[str, Any], total: int, *, printed: bool) -> str:
    """The step in words, for the bar; printed: also on a line of its own."""
    shown = {name: f"{record[name]:.3g}" for name in ("reward_mean", "accuracy", "response_length", "kl")}
    words = ", ".join(f"{name} {value}" for name, value in shown.items())
    if printed:
        seconds = sum(record[f"seconds_{part}"] for part in ("sampling", "training", "other"))
        print(f"step {record['step']} of {total}: {words}, {seconds:.1f} s", file=sys.stderr, flush=True)
    return words
