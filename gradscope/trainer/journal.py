"""What a run writes while it goes: records, rollouts, checkpoints, and what trackers draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.batch import TokenBatch
from gradscope.errors import DivergedError, InputError
from gradscope.processes import Processes
from gradscope.run_folder import write_text
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
from gradscope.trainer.folder import (
    METRICS,
    ROLLOUTS,
    TRACKERS,
    bring_back,
    drop_replaced,
    remove_run,
    set_aside,
    write_description,
    writing,
)
from gradscope.trainer.learner import Learner
from gradscope.trainer.metrics import lines_up_to, scalars, write_line
from gradscope.trainer.rollout import Questions, Rollout

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Journal:
    """The folder of a run that is going on; the main process writes, all call alike."""

    config: TrainConfig
    out: Path
    questions: Questions
    learner: Learner
    accelerator: Accelerator

    @property
    def processes(self) -> Processes:
        return self.learner.processes

    @contextmanager
    def opened(self, start: Path | None, *, overwrite: bool) -> Iterator[int]:
        """Make the folder ready, and the trackers, which are closed in the end.

        Yields how many optimizer steps in a row had no finite gradient so far. A run that is overwritten comes back
        where this one fails before it has logged a step.
        """
        done = 0 if start is None else checkpoint_step(start)
        try:
            with self._tracking():
                nonfinite = 0
                with self.processes.together():
                    if start is not None:
                        nonfinite = restore_checkpoint(start, self.learner)
                    if self.processes.is_main:
                        self._make_ready(done, overwrite=overwrite)
                self._init_trackers(done)
                yield nonfinite
        except BaseException as error:
            untouched = not list_checkpoints(self.out) and isinstance(error, InputError)
            if self.processes.is_main and not bring_back(self.out) and not done and untouched:
                remove_run(self.out)  # nothing was learnt: the next attempt is not held up by this one's settings
            raise

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        try:
            yield
        finally:
            with writing(self.out / TRACKERS):
                self.accelerator.end_training()

    def _make_ready(self, done: int, *, overwrite: bool) -> None:
        size = set_aside(self.out) if overwrite else 0
        config, total = self.config, self.questions.steps
        ahead = count_checkpoints(done, total, every=config.save_every, keep=config.keep_checkpoints)
        check_space(self.out, self.learner, ahead, to_be_freed=size)
        kept = lines_up_to(self.out / METRICS, done)
        write_description(self.out, config, self.learner, self.questions.hash, resumed=done > 0)
        write_text(self.out / METRICS, kept)

    def _init_trackers(self, done: int) -> None:
        settings = {"tensorboard": {"purge_step": done + 1}}
        chosen = {name: value for name, value in settings.items() if name in self.config.trackers}
        with self.processes.together(), writing(self.out / TRACKERS):
            try:
                self.accelerator.init_trackers(TRACKERS, init_kwargs=chosen)
            except OSError:
                self.accelerator.trackers.clear()  # what has not started cannot be ended
                raise

    def log(self, record: dict[str, Any]) -> None:
        """Write a step's record; with the first one, a run that was overwritten is gone."""
        with self.processes.together():
            if self.processes.is_main:
                with writing(self.out / METRICS):
                    write_line(self.out / METRICS, record)
                drop_replaced(self.out)
            with writing(self.out / TRACKERS):
                self.accelerator.log(scalars(record), step=record["step"])

    def save(self, step: int, *, nonfinite_in_a_row: int) -> None:
        """Write a checkpoint."""
        keep = self.config.keep_checkpoints
        save_checkpoint(self.out, step, self.learner, nonfinite_in_a_row=nonfinite_in_a_row, keep=keep)

    def has_checkpoint(self, step: int) -> bool:
        return (self.out / CHECKPOINTS / f"step-{step:06d}").is_dir()

    def keep_rollout(self, step: int, rollout: Rollout, batch: TokenBatch) -> None:
        """Write the responses of a step, with what it trains on, in the native format; where that is asked for."""
        with self.processes.together():
            if self.config.save_rollouts and self.processes.is_main:
                with writing(self.out / ROLLOUTS):
                    self._write_rollout(step, rollout, batch)

    def _write_rollout(self, step: int, rollout: Rollout, batch: TokenBatch) -> None:
        from gradscope.readers import write_rollouts

        folder = self.out / ROLLOUTS
        folder.mkdir(exist_ok=True)
        found = {"old_logprobs": batch.old_logprobs, "advantage": batch.advantages, "ref_logprobs": batch.ref_logprobs}
        rows = []
        for i, row in enumerate(rollout.rows):
            mask = batch.response_mask[i]
            kept = {name: values[i][mask].tolist() for name, values in found.items() if values is not None}
            rows.append(row | kept | {"step": step})
        write_rollouts(folder / f"step-{step:06d}.parquet", rows)

    def diverged(self, words: str, *, up_to: int | None = None) -> DivergedError:
        """With the last checkpoint that was written after no more than `up_to` steps; None: the last one."""
        good = [path for path in list_checkpoints(self.out) if up_to is None or checkpoint_step(path) <= up_to]
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint from before"
        return DivergedError(f"{words}; {kept}; try a lower learning_rate")
