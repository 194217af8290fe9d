"""The training loop: sample, score, advantages, passes, log, checkpoint; one run is one folder.

    OUT/config.json, manifest.json      what was run, with which versions, where
    OUT/metrics.jsonl                   a line per step
    OUT/checkpoints/step-000020/        a folder that transformers loads, with optimizer and random states
    OUT/rollouts/step-000001.parquet    with save_rollouts: the responses, in the native format
    OUT/trackers/                       what TensorBoard reads

Everything drawn at random is a function of the seed, the step and the place among the processes, so a run resumed with
as many processes goes on to the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from gradscope.batch import TokenBatch
from gradscope.errors import DivergedError, InputError, SyncError
from gradscope.logprobs import TokenStatistics
from gradscope.models import find_device
from gradscope.sampling import Sampler
from gradscope.sampling.engines import make_sampler
from gradscope.tasks import get_task
from gradscope.trainer.algorithm import Update, compute_advantages, plan_update
from gradscope.trainer.callbacks import OnStep, Step, measure_gradients
from gradscope.trainer.checkpoints import (
    CHECKPOINTS,
    check_space,
    checkpoint_step,
    count_checkpoints,
    list_checkpoints,
    restore_checkpoint,
    save_checkpoint,
)
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.folder import METRICS, find_start, remove_run, write_description
from gradscope.trainer.learner import Learner, build_learner
from gradscope.trainer.metrics import (
    drop_lines_after,
    rollout_metrics,
    scalars,
    token_metrics,
    update_metrics,
    write_line,
)
from gradscope.trainer.rollout import Questions, Rollout, derive_seed, sample_rollout

MOST_NONFINITE = 3
"""Optimizer steps in a row without a finite gradient that end a run."""
PATIENCE = timedelta(hours=4)
"""For the slowest of several processes: one may sample or measure for long while the others wait."""
SYNC_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Mean |Δ log π| in nats of sampler and trainer from which they are taken to hold different weights.

In bfloat16 that finds weights of another model or another temperature, not weights that are one small step old."""


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    progress: bool = True,
) -> Path:
    """Train, and return the folder of the last checkpoint.

    resume: go on from the newest checkpoint in `out` (from the start, if there is none yet); overwrite: replace a run
    in `out`. With neither, a folder that holds a run is refused. Run under `accelerate launch` for several processes.

    Raises InputError for whatever the user can mend, DivergedError after three steps in a row without a finite
    gradient, SyncError if the sampler's weights are not the trainer's; checkpoints stay in all cases.
    """
    out = Path(out)
    questions = Questions(get_task(config.task), config)
    start = find_start(config, out, questions.steps, resume=resume, overwrite=overwrite)
    if start is not None and checkpoint_step(start) >= questions.steps:
        return start
    accelerator = _make_accelerator(config, out)
    learner = build_learner(config, accelerator, start)
    if on_step is not None and learner.is_sharded:
        raise InputError("on_step looks at whole weights and these lie in shards (FSDP); launch with --multi_gpu")
    with learner.processes.together():
        sampler = make_sampler(
            config.engine,
            learner.sampled,
            batch_size=config.sampling_batch_size,
            dtype=config.precision,
            memory=config.vllm_memory,
            progress=False,
        )
    watchers = [] if config.gradients_every is None else [measure_gradients]
    watchers += [] if on_step is None else [on_step]
    run = _Run(config, out, questions, learner, sampler, accelerator, watchers)
    with run.opened(start, overwrite=overwrite):
        return run.go(progress=progress)


def _make_accelerator(config: TrainConfig, out: Path) -> Any:
    """Accelerate's view of device, processes and trackers."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    here = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    if missing := [name for name in config.trackers if name not in here]:
        known = "is not installed" if missing[0] in LOGGER_TYPE_TO_CLASS else "is no tracker that accelerate knows"
        raise InputError(f"tracker {missing[0]!r} {known}; at hand: {', '.join(sorted(here)) or 'none'}")
    if config.device not in (None, "cpu"):
        torch.cuda.set_device(find_device(config.device))
    return Accelerator(
        cpu=config.device == "cpu",
        mixed_precision="no",  # the configuration's own precision decides
        log_with=list(config.trackers) or None,
        project_dir=str(out),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


class _Run:
    """A run in progress."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        questions: Questions,
        learner: Learner,
        sampler: Sampler,
        accelerator: Any,
        watchers: list[OnStep],
    ) -> None:
        self.config, self.out, self.questions, self.learner = config, out, questions, learner
        self.sampler, self.accelerator, self.watchers = sampler, accelerator, watchers
        self.processes, self.done, self.nonfinite = learner.processes, 0, 0
        self.seconds = dict.fromkeys(("sampling", "training", "other"), 0.0)

    @contextmanager
    def opened(self, start: Path | None, *, overwrite: bool) -> Iterator[None]:
        """Make the folder ready, and the trackers; close them in the end."""
        self.done = 0 if start is None else checkpoint_step(start)
        with self.processes.together():
            if self.processes.is_main:
                if overwrite:
                    remove_run(self.out)
                check_space(self.out, self.learner, self._checkpoints_ahead)
                resumed, hashed = start is not None, self.questions.hash
                write_description(self.out, self.config, self.learner, hashed, resumed=resumed)
                drop_lines_after(self.out / METRICS, self.done)
        if start is not None:
            self.nonfinite = restore_checkpoint(start, self.learner)
        settings = {"tensorboard": {"purge_step": self.done + 1}}
        self.accelerator.init_trackers(
            "trackers", init_kwargs={k: v for k, v in settings.items() if k in self.config.trackers}
        )
        try:
            yield
        except InputError:
            if not self.done and self.processes.is_main:
                remove_run(self.out)  # nothing was learnt: the next attempt is not held up by this one's settings
            raise
        finally:
            self.accelerator.end_training()
            self.sampler.close()

    def go(self, *, progress: bool) -> Path:
        """All steps that are left; the last checkpoint's folder."""
        from tqdm import tqdm

        total, hidden = self.questions.steps, True if not (progress and self.processes.is_main) else None
        with tqdm(total=total, initial=self.done, desc="training", unit="step", disable=hidden) as bar:
            while self.done < total:
                record = self._step(self.done)
                self.done += 1
                self._log(record, bar)
                if self.nonfinite >= MOST_NONFINITE:
                    raise DivergedError(
                        f"{self.nonfinite} optimizer steps in a row had no finite gradient, up to step {self.done}; "
                        f"checkpoints from before stay in {self.out / CHECKPOINTS}; try a lower learning_rate"
                    )
                if self.done % self.config.save_every == 0 or self.done == total:
                    self._save()
        return list_checkpoints(self.out)[-1]

    def _step(self, index: int) -> dict[str, Any]:
        """Step `index` (0, 1, …): what is logged of it."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        started = time.perf_counter()
        rollout = self._sample(index)
        batch, statistics = self._score(rollout)
        self._check_sync(rollout.batch, statistics)
        with self.processes.together():
            if self.config.save_rollouts and self.processes.is_main:
                self._keep(index, rollout, batch)
        record = {"step": index + 1, **rollout_metrics(rollout)}
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
            record |= self._update(index, update)
        total = time.perf_counter() - started
        self.seconds["other"] = total - self.seconds["sampling"] - self.seconds["training"]
        record |= {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
        return record | {"tokens_per_second": record["num_tokens"] / total}

    def _sample(self, index: int) -> Rollout:
        with self._timed("sampling"), self.learner.autocast():
            self.learner.sync(self.sampler)
            questions = self.questions.of_step(index)
            try:
                return sample_rollout(self.learner.policy, self.sampler, questions, self.config, index, self.processes)
            except (InputError, KeyboardInterrupt) as error:
                # The weights are those of the last finished step: nothing of it is lost. Several processes save
                # together or not at all, and an interruption finds them at different places.
                together = self.processes.count == 1 or isinstance(error, InputError)
                if together and self.done and not (self.out / CHECKPOINTS / f"step-{self.done:06d}").is_dir():
                    self._save()
                raise

    def _score(self, rollout: Rollout) -> tuple[TokenBatch, TokenStatistics]:
        """The batch with π_old, π_ref and advantages, and the statistics of its tokens under the policy."""
        batch, statistics = rollout.batch, self.learner.statistics(rollout.batch)
        if self.config.old_logprobs == "trainer":
            batch = replace(batch, old_logprobs=statistics.logprob)
        if self.config.kl_coef > 0:
            batch = replace(batch, ref_logprobs=self.learner.reference_logprobs(batch))
        return replace(batch, advantages=compute_advantages(batch, self.config)), statistics

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

    def _update(self, index: int, update: Update) -> dict[str, Any]:
        """All optimizer steps on the batch."""
        config, results = self.config, []
        self.learner.set_learning_rate(config.learning_rate * min(1.0, (index + 1) / max(1, config.warmup_steps)))
        with self._timed("training"), self.learner.autocast():
            for part in update.passes:
                result = self.learner.updater.step(part, update.settings, match=update.match)
                results.append(result)
                if result.outcome != "empty":
                    self.nonfinite = self.nonfinite + 1 if result.outcome == "nonfinite" else 0
                if self.nonfinite >= MOST_NONFINITE:
                    break
        return update_metrics(results)

    def _keep(self, index: int, rollout: Rollout, batch: TokenBatch) -> None:
        from gradscope.readers import write_rollouts

        folder = self.out / "rollouts"
        folder.mkdir(exist_ok=True)
        rows = []
        for i, row in enumerate(rollout.rows):
            mask = batch.response_mask[i]
            kept = {
                "old_logprobs": batch.old_logprobs[i][mask].tolist(),
                "advantage": batch.advantages[i][mask].tolist(),
            }
            if batch.ref_logprobs is not None:
                kept["ref_logprobs"] = batch.ref_logprobs[i][mask].tolist()
            rows.append(row | kept | {"step": index + 1})
        write_rollouts(folder / f"step-{index + 1:06d}.parquet", rows)

    def _log(self, record: dict[str, Any], bar: Any) -> None:
        with self.processes.together():
            if self.processes.is_main:
                write_line(self.out / METRICS, record)
        self.accelerator.log(scalars(record), step=self.done)
        shown = ("reward_mean", "accuracy", "response_length", "kl")
        bar.set_postfix({name: f"{record[name]:.3g}" for name in shown}, refresh=False)
        bar.update()

    @property
    def _checkpoints_ahead(self) -> int:
        config = self.config
        return count_checkpoints(self.done, self.questions.steps, every=config.save_every, keep=config.keep_checkpoints)

    def _save(self) -> None:
        kept = self.config.keep_checkpoints
        save_checkpoint(self.out, self.done, self.learner, nonfinite_in_a_row=self.nonfinite, keep=kept)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.learner.updater.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - started
