"""The folder of a step-by-step run: whether it can be resumed, and a JSON line per step.

DIR/config.json      the run's settings
DIR/manifest.json    versions, files and machine
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
from gradscope.runs.folder import changed_settings, check_is_folder, describe_changes, refusal
from gradscope.runs.foreign import read_json

CONFIG, MANIFEST, METRICS = "config.json", "manifest.json", "metrics.jsonl"


@dataclass(frozen=True)
class Journal:
    """The folder of a run; only one process writes to it."""

    out: Path
    settings: Mapping[str, Any]
    """The contents of config.json."""
    folders: tuple[str, ...] = ()
    """Further folders that a run writes."""

    @property
    def written(self) -> tuple[str, ...]:
        """Names of everything that a run writes; config.json, which identifies it, comes last."""
        return METRICS, MANIFEST, *self.folders, CONFIG

    def has_run(self, *, overwrite: bool, changeable: Sequence[str] = (), dropped: Sequence[str] = ()) -> bool:
        """Return whether the folder holds a run with these settings, to be resumed.

        Args:
            overwrite: An earlier run with any settings will be replaced.
            changeable: Settings that may differ, because they do not affect results.
            dropped: Obsolete names that an older config.json may have.

        Raises:
            InputError: The folder holds a run with other settings, or foreign files.
        """
        check_is_folder(self.out)
        earlier, wanted = read_json(self.out / CONFIG), json.loads(json.dumps(self.settings))
        if earlier is None:
            if found := next((name for name in self.written if _is_something(self.out / name)), None):
                raise InputError(f"{self.out} holds {found} without a run's {CONFIG}; give another --out")
            return False
        if earlier.keys() - set(dropped) != wanted.keys():
            raise InputError(f"{self.out / CONFIG} is not from a run of this version of gradscope; give another --out")
        changed = changed_settings({name: earlier[name] for name in wanted}, wanted, {})
        changed = {name: values for name, values in changed.items() if name not in changeable}
        if changed and not overwrite:
            raise InputError(f"{self.out} holds a run {describe_changes(changed)}; give another --out, or --overwrite")
        return not overwrite

    def begin(self, manifest: Mapping[str, Any], done: int, *, fixed: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Write config.json and manifest.json, and truncate metrics.jsonl after step `done`.

        Returns:
            The earlier manifest if the run is resumed, else None.

        Raises:
            InputError: One of the manifest's entries in `fixed` has changed, or a line is missing.
        """
        earlier = read_json(self.out / MANIFEST) if done else None
        if changed := [name for name in fixed if earlier is not None and earlier.get(name) != manifest[name]]:
            raise InputError(
                f"the {changed[0]} of the run in {self.out} changed since it began (see {MANIFEST}); give another "
                "--out"
            )
        kept = self.lines_up_to(done)
        with writing(self.out):
            write_json(self.out / CONFIG, dict(self.settings))
            write_json(self.out / MANIFEST, dict(manifest))
            write_text(self.out / METRICS, kept)
        return earlier

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a step's record as JSON, with null for NaN and infinity."""
        with writing(self.out / METRICS), (self.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(record), allow_nan=False) + "\n")

    def lines_up_to(self, step: int) -> str:
        """Return the records of steps 1 to `step` before any invalid line. Raises InputError if one is missing."""
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
                f"{path} has no valid record of step {min(missing)}, but there is a checkpoint of step {step}; fix "
                f'the file (a line {{"step": {min(missing)}}} will do), or delete the checkpoints after step '
                f"{min(missing) - 1}"
            )
        return "".join(kept)

    def remove(self) -> bool:
        """Delete what a run wrote, and nothing else. Returns whether there was a run."""
        there = (self.out / CONFIG).is_file()
        for path in (self.out / name for name in self.written):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return there


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Reduce a record to scalars for a tracker: numbers unchanged, lists by their mean.

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
    """Add the file's name to an OSError, which may say no more than "No space left on device"."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path, "go on with --resume") from error


def _is_something(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))
