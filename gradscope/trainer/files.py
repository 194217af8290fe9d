"""The folder of a run: where it starts or goes on, and the records, rollouts, checkpoints and trackers it writes."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradscope import __version__
from gradscope.errors import DivergedError, InputError
from gradscope.policy import find_checkpoint, weights_hash
from gradscope.rollouts import TokenBatch
from gradscope.runs import Processes, check_is_folder, library_versions, read_json, refusal, write_json, write_text
from gradscope.trainer.checkpoints import (
    CHECKPOINTS,
    drop_unfinished,
    list_checkpoints,
    newest_whole,
    restore_checkpoint,
    save_checkpoint,
    step_of,
)
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import Learner
from gradscope.trainer.metrics import lines_up_to, scalars, write_line
from gradscope.trainer.rollout import Questions, Rollout

CONFIG, METRICS, MANIFEST = "config.json", "metrics.jsonl", "manifest.json"
ROLLOUTS, TRACKERS = "rollouts", "trackers"
WRITTEN = (METRICS, MANIFEST, CHECKPOINTS, ROLLOUTS, TRACKERS, CONFIG)
CHANGEABLE = ("steps", "epochs", "save_every", "keep_checkpoints", "save_rollouts", "trackers")
"""Fields that a resumed run may have otherwise: they do not change the numbers of a step."""


def find_start(
    config: TrainConfig, out: Path, total: int, *, resume: bool, overwrite: bool, tell: bool = True
) -> Path | None:
    """The checkpoint to go on from; None: the beginning. Nothing is written. tell: of damaged ones, on stderr.

    Raises InputError for a folder that holds a run, unless it is finished, resumed, or to be overwritten; for one that
    was made with other settings, or has more steps; and, always, for one that holds what no run of training wrote.
    """
    check_is_folder(out)
    if resume and overwrite:
        raise InputError("--resume goes on and --overwrite starts anew; give one of them")
    earlier, wanted = read_json(out / CONFIG), json.loads(json.dumps(asdict(config)))
    if earlier is None:
        if found := next((name for name in WRITTEN if _is_something(out / name)), None):
            raise InputError(f"{out} holds {found}, and no {CONFIG} of a run beside it; give another --out")
        return None
    if earlier.keys() != wanted.keys():
        raise InputError(f"{out / CONFIG} is not of a run of this gradscope; give another --out")
    if overwrite:
        return None
    changed = [name for name in wanted if wanted[name] != earlier[name] and name not in CHANGEABLE]
    if changed:
        values = ", ".join(f"{name} {earlier[name]}, not {wanted[name]}" for name in changed[:3])
        raise InputError(f"{out} holds a run with other settings ({values}); give another --out, or --overwrite")
    newest = newest_whole(out, tell=tell)
    done = 0 if newest is None else step_of(newest)
    if done > total:
        raise InputError(
            f"{out} holds a run of {done} steps already, more than the {total} asked for; its last checkpoint is "
            f"{newest}; give {done} steps or more, another --out, or --overwrite"
        )
    finished = done == total
    if not (resume or finished):
        raise InputError(f"{out} holds an unfinished run; give --resume to go on, another --out, or --overwrite")
    return newest


def remove_run(out: Path) -> None:
    """Drop what a run wrote, and nothing else."""
    for name in WRITTEN:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what is written in an OSError: the system's own words may be no more than "No space left on device"."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path, "go on with --resume") from error


def write_description(
    out: Path, config: TrainConfig, learner: Learner, questions: str | None, *, resumed: bool
) -> None:
    """config.json, what was asked for; manifest.json, with what and where it runs.

    questions: a hash of those that are stored. Raises InputError where a resumed run began with another policy or
    other questions; warns where it had another number of processes, which share out the random numbers.
    """
    manifest = {
        "gradscope": __version__,
        "versions": library_versions(),
        "model": {
            "path": config.model,
            "class": type(learner.policy.model).__name__,
            "sha256": weights_hash(find_checkpoint(config.model)),
        },
        "questions": questions,
        "parameters": sum(p.numel() for p in learner.policy.model.parameters()),
        "trained_parameters": sum(p.numel() for p in learner.policy.model.parameters() if p.requires_grad),
        "device": str(learner.updater.device),
        "processes": learner.processes.count,
        "threads": torch.get_num_threads(),
    }
    earlier = read_json(out / MANIFEST) if resumed else None
    if earlier is not None:
        for name in ("model", "questions"):
            if earlier.get(name) != manifest[name]:
                raise InputError(
                    f"the {name} of the run in {out} changed since it began, by its {MANIFEST}; give another --out"
                )
        if (before := earlier.get("processes")) != learner.processes.count:
            warnings.warn(
                f"begun with {before} processes and resumed with {learner.processes.count}: from here on, other "
                "responses are sampled than in an undisturbed run",
                stacklevel=2,
            )
    write_json(out / CONFIG, asdict(config))
    write_json(out / MANIFEST, manifest)


def _is_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


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
    def opened(self, start: Path | None, *, overwrite: bool) -> Iterator[Callable[[], int]]:
        """Yield what begins the run: it restores `start`, makes the folder ready and starts the trackers.

        It returns how many optimizer steps in a row had no finite gradient so far. Until it is called nothing is
        written; a run that is overwritten is deleted by it, and a line on stderr says so. Trackers end with the block.
        """
        done, begun = 0 if start is None else step_of(start), False

        def begin() -> int:
            nonlocal begun
            nonfinite, begun = 0, True
            with self.processes.together():
                if start is not None:
                    nonfinite = restore_checkpoint(start, self.learner)
                if self.processes.is_main:
                    self._make_ready(done, overwrite=overwrite)
            self._init_trackers(done)
            return nonfinite

        try:
            with self._tracking():
                yield begin
        except BaseException as error:
            untouched = begun and not list_checkpoints(self.out) and isinstance(error, InputError)
            if self.processes.is_main and not done and untouched:
                with suppress(OSError):
                    remove_run(self.out)  # nothing was learnt: this one's settings hold up no next attempt
            raise

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        try:
            yield
        finally:
            with writing(self.out / TRACKERS):
                self.accelerator.end_training()

    def _make_ready(self, done: int, *, overwrite: bool) -> None:
        if overwrite and (self.out / CONFIG).is_file():
            print(f"the run in {self.out} is deleted (overwrite)", file=sys.stderr)
            remove_run(self.out)
        kept = lines_up_to(self.out / METRICS, done)
        with writing(self.out):
            drop_unfinished(self.out)
            write_description(self.out, self.config, self.learner, self.questions.hash, resumed=done > 0)
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
        """Write a step's record."""
        with self.processes.together():
            if self.processes.is_main:
                with writing(self.out / METRICS):
                    write_line(self.out / METRICS, record)
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
        from gradscope.rollouts import write_rollouts

        folder = self.out / ROLLOUTS
        folder.mkdir(exist_ok=True)
        found = {"old_logprobs": batch.old_logprobs, "advantage": batch.advantages, "ref_logprobs": batch.ref_logprobs}
        rows = []
        for i, row in enumerate(rollout.rows):
            mask = batch.response_mask[i]
            kept = {name: values[i][mask].tolist() for name, values in found.items() if values is not None}
            rows.append(row | {"sampler_logprobs": row["old_logprobs"]} | kept | {"step": step})
        write_rollouts(folder / f"step-{step:06d}.parquet", rows)

    def diverged(self, words: str, *, up_to: int | None = None) -> DivergedError:
        """With the last checkpoint that was written after no more than `up_to` steps; None: the last one."""
        good = [path for path in list_checkpoints(self.out) if up_to is None or step_of(path) <= up_to]
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint from before"
        return DivergedError(f"{words}; {kept}; try a lower learning_rate")
