"""The folder of a run that goes on step by step: whether it may be gone on with, and a line of JSON for each step.

DIR/config.json      the run's settings
DIR/manifest.json    with what, and where, it runs
DIR/metrics.jsonl    a line per step
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.runs.files import plain_json, write_json, write_text
from gradscope.runs.folder import check_is_folder, refusal
from gradscope.runs.foreign import read_json

CONFIG, MANIFEST, METRICS = "config.json", "manifest.json", "metrics.jsonl"


@dataclass(frozen=True)
class Journal:
    """The folder of one run; only one process writes to it."""

    out: Path
    settings: Mapping[str, Any]
    """As config.json has them."""
    folders: tuple[str, ...] = ()
    """What a run writes beside its three files."""

    @property
    def written(self) -> tuple[str, ...]:
        """Names of all that a run writes; config.json, by which it is known as one, comes last."""
        return METRICS, MANIFEST, *self.folders, CONFIG

    def has_run(self, *, overwrite: bool, changeable: Sequence[str] = (), dropped: Sequence[str] = ()) -> bool:
        """Whether the folder holds a run of these settings, to be gone on with.

        Args:
            overwrite: An earlier run of any settings will be replaced.
            changeable: Settings that may differ, because they change no number of a step.
            dropped: Names that a config.json of before may also have.

        Raises:
            InputError: The folder holds a run of other settings, or files that no run wrote.
        """
        check_is_folder(self.out)
        earlier, wanted = read_json(self.out / CONFIG), json.loads(json.dumps(self.settings))
        if earlier is None:
            if found := next((name for name in self.written if _is_something(self.out / name)), None):
                raise InputError(f"{self.out} holds {found}, and no {CONFIG} of a run beside it; give another --out")
            return False
        if earlier.keys() - set(dropped) != wanted.keys():
            raise InputError(f"{self.out / CONFIG} is not of a run of this gradscope; give another --out")
        changed = [name for name in wanted if wanted[name] != earlier[name] and name not in changeable]
        if changed and not overwrite:
            values = ", ".join(f"{name} {earlier[name]}, not {wanted[name]}" for name in changed[:3])
            raise InputError(
                f"{self.out} holds a run with other settings ({values}); give another --out, or --overwrite"
            )
        return not overwrite

    def begin(self, manifest: Mapping[str, Any], done: int, *, fixed: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Write config.json and manifest.json, and cut metrics.jsonl after step `done`.

        Returns:
            The earlier manifest of a run that goes on; None: it begins.

        Raises:
            InputError: One of the entries `fixed` of the manifest has changed, or a line is missing.
        """
        earlier = read_json(self.out / MANIFEST) if done else None
        if changed := [name for name in fixed if earlier is not None and earlier.get(name) != manifest[name]]:
            raise InputError(
                f"the {changed[0]} of the run in {self.out} changed since it began, by its {MANIFEST}; give another "
                "--out"
            )
        kept = self.lines_up_to(done)
        with writing(self.out):
            write_json(self.out / CONFIG, dict(self.settings))
            write_json(self.out / MANIFEST, dict(manifest))
            write_text(self.out / METRICS, kept)
        return earlier

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a step's record; NaN and infinity become null, which every JSON reader takes."""
        with writing(self.out / METRICS), (self.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(record), allow_nan=False) + "\n")

    def lines_up_to(self, step: int) -> str:
        """The records of steps 1 to `step`, without those of later steps and whatever follows a line that is no record.

        Raises InputError where a record is missing then.
        """
        path, kept, missing = self.out / METRICS, [], set(range(1, step + 1))
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            try:
                text = line.decode("utf-8")
                if (number := json.loads(text)["step"]) <= step:
                    kept.append(text + "\n")
                    missing.discard(number)
            except (ValueError, TypeError, LookupError):
                break
        if missing:
            raise InputError(
                f"{path} has no sound record of step {min(missing)}, and there is a checkpoint of step {step}; mend "
                f'the file (a line {{"step": {min(missing)}}} will do), or delete the checkpoints after step '
                f"{min(missing) - 1}"
            )
        return "".join(kept)

    def remove(self) -> bool:
        """Drop what a run wrote, and nothing else. Returns whether there was a run."""
        there = (self.out / CONFIG).is_file()
        for path in (self.out / name for name in self.written):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return there


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker draws of a record: numbers as they are, lists by their mean.

    >>> scalars({"step": 3, "loss": [1.0, 2.0], "passes": ["low"], "kl": math.nan})
    {'step': 3.0, 'loss': 1.5}
    """
    out = {}
    for name, value in record.items():
        values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]
        if values and all(map(math.isfinite, values)):
            out[name] = sum(values) / len(values)
    return out


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what is written in an OSError: the system's own words may be no more than "No space left on device"."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path, "go on with --resume") from error


def _is_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))
