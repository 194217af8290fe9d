"""A folder of results that is written atomically, and whose unfinished run can be resumed.

status        what lies in DIR                        a run of this key …
nothing       neither parts nor a manifest            begins
unfinished    .partial with parts of this key         continues after its last part
finished      manifest.json with this key             leaves it alone, or adds files to it
(InputError)  a run of another key, or results of     is refused; with `overwrite` it begins, and its results
              an unknown one                          replace the others when it publishes them
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradscope import __version__
from gradscope.errors import InputError
from gradscope.runs.files import write_json, write_parquet
from gradscope.runs.foreign import read_json
from gradscope.runs.lock import locked

if TYPE_CHECKING:
    import pandas as pd

MANIFEST, KEY, PARTIAL = "manifest.json", "key.json", ".partial"
LOCKED = (errno.EACCES, errno.EPERM)
"""errno values for missing permissions."""
UNWRITABLE = (*LOCKED, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""errno values for which the user should choose another folder; others, such as a full disk, are not bad input."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values for a full disk."""
Changes = dict[str, tuple[Any, Any]]
"""Setting → its value in an earlier run and now; None: it has none."""
LIBRARIES = ("torch", "transformers", "numpy", "pandas", "matplotlib", "seaborn", "scipy", "accelerate", "peft", "vllm")


class RunFolder:
    """A results folder DIR, with unfinished work in DIR/.partial, keyed by all settings that affect results.

    The same key resumes an unfinished run and leaves a finished one alone; another key is refused.
    """

    def __init__(
        self,
        folder: str | Path,
        key: dict[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        results: Sequence[str] = ("tokens.parquet", "figures"),
    ) -> None:
        """defaults: of settings in the key, as for `changed_settings`. results: files and folders written by such a
        run; without a manifest, existing ones are not replaced."""
        self.folder, self.key = Path(folder), json.loads(json.dumps(key, default=str))
        self._defaults = {} if defaults is None else defaults
        self.results = tuple(results)
        self.partial = self.folder / PARTIAL
        self.staged = self.partial / "staged"
        """Results are collected here, under their final names, until all are complete."""

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The contents of manifest.json; None if there is none."""
        return read_json(self.folder / MANIFEST)

    def status(self, *, overwrite: bool = False) -> Literal["nothing", "unfinished", "finished"]:
        """Return how far the run with this key has come; writes nothing.

        Raises InputError if the folder holds a run with another key, or results of an unknown run; with `overwrite`,
        only if it is not a folder or its manifest is not of a run.
        """
        check_is_folder(self.partial)
        manifest, unfinished = self.manifest, read_json(self.partial / KEY) if self._has_parts() else None
        if manifest is not None and not _is_of_a_run(manifest):
            raise InputError(f"{self.folder / MANIFEST} is not from a gradscope run; give another --out")
        if overwrite:
            return "nothing"
        if manifest is not None and not self.changes(manifest):
            return "finished"
        if unfinished is not None and not self.changes(unfinished):
            return "unfinished"
        if manifest is not None:
            told = describe_changes(self.changes(manifest))
            raise InputError(f"{self.folder} holds a run {told}; give another --out, or --overwrite")
        if unfinished is not None:
            told = describe_changes(self.changes(unfinished))
            raise InputError(
                f"{self.folder} holds an unfinished run {told}; give its arguments to finish it, another --out, or "
                "--overwrite"
            )
        if found := next((name for name in self.results if (self.folder / name).exists()), None):
            raise InputError(f"{self.folder} holds {found} without a manifest; give another --out, or --overwrite")
        return "nothing"

    def begin(self, *, overwrite: bool = False) -> bool:
        """Prepare the folder for writing; return True if this resumes an unfinished run.

        With `overwrite`, unfinished work is deleted; finished results stay until `publish`. Raises InputError as
        `status` does, and if the folder is not writable.
        """
        resumed = self.status(overwrite=overwrite) == "unfinished"
        check_writable(self.folder / MANIFEST)
        if not resumed:
            shutil.rmtree(self.partial, ignore_errors=True)
        self.stage()
        write_json(self.partial / KEY, {"key": self.key})
        return resumed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder during a run. A run that ends without any part leaves nothing behind.

        Raises InputError if another live process holds the lock. Write errors are converted by `refusal`.
        """
        check_is_folder(self.partial)
        check_writable(self.folder / MANIFEST)
        with locked(self.folder):
            try:
                yield
            except OSError as error:
                if not Path(str(error.filename or os.sep)).is_relative_to(self.folder):
                    raise
                raise refusal(error, error.filename, "run the same command again to continue") from error
            finally:
                if not self._has_parts():
                    shutil.rmtree(self.partial, ignore_errors=True)

    def stage(self) -> None:
        """Recreate `staged`, empty; also used to add results to a finished run."""
        shutil.rmtree(self.staged, ignore_errors=True)
        self.staged.mkdir(parents=True)

    def part(self, index: int) -> Path:
        """Return the path of part `index`, until all parts are complete."""
        return self.partial / f"part-{index:06d}.parquet"

    def has_part(self, index: int) -> bool:
        return self.part(index).is_file()

    def write_part(self, index: int, frame: pd.DataFrame) -> None:
        write_parquet(self.part(index), frame)

    def read_part(self, index: int) -> pd.DataFrame:
        """Read part `index`. Raises InputError if it is damaged."""
        import pandas as pd

        try:
            return pd.read_parquet(self.part(index))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.part(index)} cannot be read; delete it, and the run will make it again") from error

    def publish(self, manifest: dict[str, Any]) -> None:
        """Replace an earlier run's results by the staged ones, the manifest last: a killed run stays unfinished."""
        files = [path.relative_to(self.staged) for path in sorted(self.staged.rglob("*")) if path.is_file()]
        names = list(dict.fromkeys([*manifest.get("files", []), *map(Path.as_posix, files)]))
        earlier = self.manifest or {"key": self.key}
        if self.changes(earlier):
            (self.folder / MANIFEST).unlink()
        for name in {*earlier.get("files", self.results)} - {*names}:
            if (self.folder / name).is_file():
                (self.folder / name).unlink()
        for file in files:
            (self.folder / file).parent.mkdir(exist_ok=True)
            os.replace(self.staged / file, self.folder / file)
        write_json(self.folder / MANIFEST, manifest | {"files": names, "key": self.key})
        shutil.rmtree(self.partial, ignore_errors=True)

    def check(self, name: str) -> None:
        """Raise InputError unless this result of the finished run exists."""
        if not (self.folder / name).is_file():
            raise InputError(f"{self.folder / name} is gone; give --overwrite to make it again")

    def _has_parts(self) -> bool:
        return any(self.partial.glob("part-*"))

    def changes(self, found: dict[str, Any]) -> Changes:
        """Return how the key in a manifest, or in that of an unfinished run, differs from this one."""
        return changed_settings(found.get("key"), self.key, self._defaults)


def changed_settings(found: Any, wanted: dict[str, Any], defaults: Mapping[str, Any]) -> Changes:
    """Return the settings that differ between two keys of JSON values, with their values.

    found: a run's key, if readable; wanted: the current one. defaults: of settings, nested as in the keys; a run from
    before such a setting existed counts as having had its default. None is the same as no setting.

    >>> changed_settings({"loss": {"kl": 0.1}}, {"loss": {"kl": 0.2, "estimator": "k3"}}, {"loss": {"estimator": "k3"}})
    {'loss.kl': (0.1, 0.2)}
    """
    found, wanted = _flatten(found if isinstance(found, dict) else {}), _flatten(wanted)
    found = {name: value for name, value in _flatten(defaults).items() if name in wanted} | found
    pairs = ((name, (found.get(name), wanted.get(name))) for name in {**found, **wanted})
    return {name: (earlier, now) for name, (earlier, now) in pairs if earlier != now}


def describe_changes(changed: Changes) -> str:
    """Describe settings that have changed, by their last names."""
    told = [f"{name.rpartition('.')[2]} {_short(old)}, not {_short(new)}" for name, (old, new) in changed.items()]
    return f"with other arguments ({', '.join(told[:3])}{', …' if len(told) > 3 else ''})"


def refusal(error: OSError, path: str | Path, go_on: str) -> OSError | InputError:
    """Return an error for a failed write, with advice; an InputError if another folder would help."""
    why = error.strerror or error
    if error.errno in UNWRITABLE:
        mend = f"give it back its rights and {go_on}, or " if error.errno in LOCKED else ""
        return InputError(f"{path} cannot be written ({why}); {mend}give another --out")
    mend = "make room there and " if error.errno in FULL else ""
    return OSError(f"{path} could not be written ({why}); {mend}{go_on}")


def check_is_folder(path: Path) -> None:
    """Raise InputError if a file is in the way of this folder."""
    try:
        blocked = next((p for p in (path, *path.parents) if not p.is_dir() and os.path.lexists(p)), None)
    except OSError as error:  # the name is too long
        raise refusal(error, path, "start again") from error
    if blocked is not None:
        raise InputError(f"{blocked} is not a folder; give another one for the results")


def check_writable(path: Path) -> None:
    """Raise InputError if this file cannot be written, creating folders as needed; leaves nothing behind."""
    beside = path.absolute().with_name(f".{path.name}.partial")
    try:
        beside.exists()  # raises if the name is too long
        with tempfile.TemporaryFile(dir=next(folder for folder in beside.parents if folder.is_dir())):
            pass
    except OSError as error:
        raise refusal(error, path, "start again") from error


def _is_of_a_run(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest has a run's key and lists files inside its folder, which may be replaced."""
    files = manifest.get("files", [])
    named = isinstance(files, list) and all(isinstance(f, str) and not {"/", ".."} & {*Path(f).parts} for f in files)
    return isinstance(manifest.get("key"), dict) and named


def provenance() -> dict[str, Any]:
    """Return the versions behind a result: gradscope, Python, and libraries that may affect it."""
    return {"gradscope": __version__, "versions": library_versions()}


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of installed libraries that may affect results."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _flatten(key: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings, with names such as settings.loss.kl_coef."""
    flat = {}
    for name, value in key.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _short(value: Any) -> str:
    """Format a value on one line, hashes by their first digits."""
    text = str(value)
    return text if len(text) <= 24 else f"{text[:8]}…"
