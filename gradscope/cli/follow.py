"""`gradscope diagnose --follow`: diagnoses a run's checkpoints as they appear, and keeps the trend's page up to date.

OUT/follow.json    the run and the arguments; different ones are refused
OUT/follow.log     what was awaited and done, with times
OUT/NAME/          a checkpoint's page; once it exists, the checkpoint is done
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradscope.errors import InputError, SelfCheckError, first_line, is_out_of_memory, printable
from gradscope.policy import (
    checkpoint_name,
    checkpoint_step,
    is_last_checkpoint,
    list_step_folders,
    missing_part,
    model_of_step,
    named_step,
)
from gradscope.rollouts import LogSteps, list_files, list_steps
from gradscope.runs import (
    MANIFEST,
    changed_settings,
    check_is_folder,
    counted,
    describe_changes,
    locked,
    plain_json,
    read_json,
    write_json,
)

FOLLOWED, LOG = "follow.json", "follow.log"
EVERY = 10.0
"""Seconds between polls; more if a poll takes long."""
SHARE = 10
"""Polling takes at most this fraction (1/n) of the time."""
QUIET = 30.0
"""Seconds without a change after which files count as complete."""
TRIES = 3
"""Attempts at a checkpoint whose files, or whose log's, change while they are read."""
PATIENCE = 24 * 3600.0
"""Seconds without anything new after which a run counts as ended."""

Files = tuple[tuple[str, int, int], ...]
"""Names, sizes and modification times."""


class Watch:
    """Remembers how long the files of each place have been unchanged."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[Files, float]] = {}
        self.latest = time.monotonic()
        """When a change was last seen."""

    def is_still(self, place: Path, files: Iterable[Path]) -> bool:
        """Return whether a place's files have been unchanged for QUIET seconds."""
        now, found = time.monotonic(), state_of(files)
        before, since = self._seen.get(place, ((), now))
        if place not in self._seen or found != before:
            self._seen[place], since = (found, now), now
            self.latest = now
        return now - since >= QUIET


def state_of(files: Iterable[Path]) -> Files:
    """Return the files' names, sizes and times, skipping files that vanish meanwhile."""
    found = []
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found))


@dataclass
class Following:
    """A run that is followed into a folder."""

    run: Path
    rollouts: Path | None
    """The run's rollout log; None: rollouts are sampled from each checkpoint."""
    out: Path
    diagnose: Callable[[str, Path], object]
    """Makes a checkpoint's page in a folder."""
    write: Callable[[list[str], list[Path], list[str]], object]
    """Makes the trend's page from the checkpoints, the folders of their pages, and notes."""
    asked: dict[str, Any]
    """All arguments that affect results."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of those that have one."""
    format: str | None = None
    overwrite: bool = False
    done: dict[int, Path] = field(default_factory=dict)
    """Step → the folder of its page."""
    failed: dict[int, str] = field(default_factory=dict)
    """Step → checkpoint and reason, for failures."""

    def __post_init__(self) -> None:
        self._watch = Watch()
        self._log: tuple[Files, LogSteps | None] = ((), None)
        self._waiting: dict[int, str] = {}
        self._deleted: set[int] = set()
        self._told: set[str] = set()
        self._tries: Counter[int] = Counter()

    def follow(self) -> None:
        """Diagnose present and future checkpoints until the run has ended; SystemExit(1) if one failed."""
        check_is_folder(self.out)
        with locked(self.out / ".following"):
            self._remember()
            self._say(f"following {self.run}; this log: {self.out / LOG}")
            self._write()  # an earlier process may have been killed before writing it
            try:
                ended = self._loop()
                self._write()
                self._say(f"{ended}: {self._count()}")
            except KeyboardInterrupt:
                self._say(f"stopped: {self._count()}")
                raise
        if self.failed.keys() - self._deleted:
            raise SystemExit(1)

    def _remember(self) -> None:
        """Find finished diagnoses. Raises InputError if they are of another run or used other arguments."""
        key = json.loads(json.dumps(plain_json(self.asked), default=str))
        earlier = read_json(self.out / FOLLOWED)
        if earlier is not None and not self.overwrite:
            if changed := changed_settings(earlier, key, self.defaults):
                raise InputError(
                    f"{self.out} follows a run {describe_changes(changed)}; give another --out, or --overwrite"
                )
            for folder in (path.parent for path in self.out.glob(f"*/{MANIFEST}")):
                manifest = read_json(folder / MANIFEST)
                if "diagnosis" in manifest and all((folder / name).is_file() for name in manifest["files"]):
                    step = checkpoint_step(manifest["model"]["path"])
                    self.done |= {} if step is None else {step: folder}
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / FOLLOWED, key)

    def _loop(self) -> str:
        """Diagnose checkpoints in order, oldest first; return why there will be no more."""
        while True:
            started, found = time.monotonic(), self._find()
            self._count_deleted(found)
            for step in self._deleted & found.keys():  # written again by a resumed run
                self._deleted.remove(step)
                del self.failed[step]
            over = self._is_over(found)
            self._waiting = {step: checkpoint_name(found[step]) for step in sorted(found) if self._is_open(step)}
            ready = next((step for step in self._waiting if self._is_ready(step, found[step], over=over)), None)
            if ready is not None:
                self._diagnose(ready, found[ready])
                continue
            if not any(map(self._is_open, found)):
                newest = max((*found, *self.done), default=None)
                if newest in found and is_last_checkpoint(found[newest]):
                    return f"the run has ended with step {newest}"
                words = "the first checkpoint" if newest is None else f"a checkpoint after step {newest}"
                there = "" if self.run.is_dir() else ", which is not there yet"
                self._tell(f"waiting for {words} in {self.run}{there}")
            if time.monotonic() - self._watch.latest >= PATIENCE:
                return f"nothing new came for {PATIENCE / 3600:.0f} h"
            time.sleep(max(EVERY, SHARE * (time.monotonic() - started)))

    def _find(self) -> dict[int, Path]:
        """Map steps to checkpoint folders; of several for a step, prefer one with a model, then the shortest name."""
        found: dict[int, list[Path]] = {}
        for folder in list_step_folders(self.run):
            if not folder.name.startswith("tmp"):  # older transformers wrote there, then renamed
                found.setdefault(named_step(folder), []).append(folder)
        best = {step: min(folders, key=_likeness) for step, folders in found.items() if len(folders) > 1}
        return {step: folders[0] for step, folders in found.items()} | best

    def _is_open(self, step: int) -> bool:
        return step not in self.done and step not in self.failed

    def _count_deleted(self, found: dict[int, Path]) -> None:
        """Report checkpoints that were deleted before their turn, as by trainers that keep only the newest."""
        for step, name in self._waiting.items():
            if self._is_open(step) and step not in found:
                self._deleted.add(step)
                self._fail(step, name, "it was deleted before it could be diagnosed")

    def _is_over(self, found: dict[int, Path]) -> bool:
        """Return whether the run is over: its last checkpoint exists, and nothing changes any more."""
        still = self.rollouts is None or self._watch.is_still(self.rollouts, self._log_files())
        newest = max(found, default=None)
        return still and newest is not None and is_last_checkpoint(found[newest]) and self._is_still(found[newest])

    def _is_still(self, folder: Path) -> bool:
        return self._watch.is_still(folder, _files_in(folder))

    def _files_of(self, folder: Path) -> Files:
        """Return the state of all files that a diagnosis reads."""
        return state_of([*_files_in(folder), *self._log_files()])

    def _is_ready(self, step: int, folder: Path, *, over: bool) -> bool:
        """Return whether a checkpoint and its rollouts are complete; if not, report what is missing."""
        name = self._waiting[step]
        if not self._is_still(folder):
            return self._tell(f"{name}: waiting until its files have not changed for {QUIET:.0f} s")
        try:
            part = missing_part(folder)
        except OSError:  # it is being deleted
            return False
        if part is not None and over:
            return self._fail(step, name, f"it is not whole: it lacks {part}")
        if part is not None:
            return self._tell(f"{name}: waiting for {part}")
        rollouts = None if self.rollouts is None or over else self._missing_rollouts(step)
        return rollouts is None or self._tell(f"{name}: waiting for {rollouts}")

    def _missing_rollouts(self, step: int) -> str | None:
        """Return what the log lacks for a checkpoint; None if it has its step or a later one."""
        files = self._log_files()
        if not files:
            return f"rollouts: {self.rollouts} is not there yet, or empty"
        still, state = self._watch.is_still(self.rollouts, files), state_of(files)
        try:
            if self._log[0] != state or self._log[1].unfinished:
                self._log = state, list_steps(self.rollouts, format=self.format)
        except (InputError, OSError) as error:  # half a file
            return f"rollouts that can be read ({first_line(error)})"
        steps = self._log[1]
        wanted, last = steps.of_checkpoint(step), max(steps.known, default=None)
        if last is not None and last < wanted:
            return f"the rollouts of step {wanted} in {self.rollouts}, which ends with step {last}"
        if wanted not in steps.known and steps.unfinished:
            return f"the rollouts of step {wanted} in {self.rollouts}, which are being written"
        if still or (last is not None and last > wanted):
            return None
        return f"the rollouts in {self.rollouts} to stay unchanged for {QUIET:.0f} s"

    def _log_files(self) -> list[Path]:
        try:
            return [] if self.rollouts is None else list_files(self.rollouts)
        except (InputError, OSError):
            return []

    def _diagnose(self, step: int, folder: Path) -> None:
        """Make a checkpoint's page and the trend's; failures are recorded."""
        name, started, files = self._waiting[step], time.monotonic(), self._files_of(folder)
        self._say(f"{name}: diagnosing")
        try:
            self.diagnose(str(model_of_step(folder) or folder), self.out / name)
        except Exception as error:
            if not isinstance(error, InputError | SelfCheckError | OSError) and not is_out_of_memory(error):
                raise
            self._tries[step] += 1
            if self._files_of(folder) != files and self._tries[step] < TRIES:
                self._say(f"{name}: will be tried again: its files changed while they were read ({first_line(error)})")
            else:
                self._fail(step, name, first_line(error))
        else:
            self.done[step] = self.out / name
            self._say(f"{name}: diagnosed in {(time.monotonic() - started) / 60:.1f} min")
        self._watch.latest = time.monotonic()
        self._write()

    def _write(self) -> None:
        """Make the trend's page, with failures among its notes."""
        if self.done:
            folders = [self.done[step] for step in sorted(self.done)]
            models = [read_json(folder / MANIFEST)["model"]["path"] for folder in folders]
            self.write(models, folders, list(self.failed.values()))

    def _fail(self, step: int, name: str, why: str) -> bool:
        self.failed[step] = f"{name} was not diagnosed: {why}"
        self._say(self.failed[step])
        return False

    def _count(self) -> str:
        waiting = sum(map(self._is_open, self._waiting))
        words = f"{counted(len(self.done), 'checkpoint')} diagnosed"
        words += f", {len(self.failed)} not" if self.failed else ""
        return words + (f", {waiting} waiting" if waiting else "")

    def _tell(self, words: str) -> bool:
        """Report once what is awaited; return False."""
        if words not in self._told:
            self._told.add(words)
            self._say(words)
        return False

    def _say(self, words: str) -> None:
        line = printable(words)
        print(line, flush=True)
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def _files_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.rglob("*") if path.is_file()]
    except OSError:  # it is being deleted
        return []


def _likeness(folder: Path) -> tuple[bool, int, str]:
    """Return the sort key for folders of the same step: with a model first, then by length of name."""
    try:
        has_model = model_of_step(folder) is not None
    except (InputError, OSError):  # incomplete shards, or being deleted
        has_model = True
    return not has_model, len(folder.name), folder.name
