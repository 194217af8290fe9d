"""A folder of results that is written whole or not at all, and whose unfinished run can be taken up again.

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
from collections.abc import Iterator, Sequence
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
"""errno values where rights are missing."""
UNWRITABLE = (*LOCKED, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""errno values after which the user has to name another folder; others (a full disk, …) are not the user's fault."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values where there is no room."""
LIBRARIES = ("torch", "transformers", "numpy", "pandas", "matplotlib", "seaborn", "scipy", "accelerate", "peft", "vllm")


class RunFolder:
    """DIR, with what is not finished in DIR/.partial, keyed by all settings that change a number.

    The same key takes an unfinished run up again and leaves a finished one alone; another key is refused.
    """

    def __init__(
        self, folder: str | Path, key: dict[str, Any], *, results: Sequence[str] = ("tokens.parquet", "figures")
    ) -> None:
        """results: files and folders that such a run writes; found without a manifest, they are not replaced."""
        self.folder, self.key = Path(folder), json.loads(json.dumps(key, default=str))
        self.results = tuple(results)
        self.partial = self.folder / PARTIAL
        self.staged = self.partial / "staged"
        """Results wait here, under the names that they will have in DIR, until all are there."""

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The content of the folder's manifest.json; None if there is none."""
        return read_json(self.folder / MANIFEST)

    def status(self, *, overwrite: bool = False) -> Literal["nothing", "unfinished", "finished"]:
        """How far the run of this key has come; nothing is written.

        Raises InputError if the folder holds a run with another key, or results of an unknown one; with `overwrite`
        only if it is no folder, or has a manifest that is not a run's.
        """
        check_is_folder(self.partial)
        manifest, unfinished = self.manifest, read_json(self.partial / KEY) if self._has_parts() else None
        if manifest is not None and not _is_of_a_run(manifest):
            raise InputError(f"{self.folder / MANIFEST} is not of a run of gradscope; give another --out")
        if overwrite:
            return "nothing"
        if manifest is not None and manifest["key"] == self.key:
            return "finished"
        if unfinished is not None and unfinished.get("key") == self.key:
            return "unfinished"
        if manifest is not None:
            raise InputError(
                f"{self.folder} holds a run {self._difference(manifest)}; give another --out, or --overwrite"
            )
        if unfinished is not None:
            raise InputError(
                f"{self.folder} holds an unfinished run {self._difference(unfinished)}; give its arguments to finish "
                "it, another --out, or --overwrite"
            )
        if found := next((name for name in self.results if (self.folder / name).exists()), None):
            raise InputError(f"{self.folder} holds {found} without a manifest; give another --out, or --overwrite")
        return "nothing"

    def begin(self, *, overwrite: bool = False) -> bool:
        """Prepare the folder to be written; True if an unfinished run of the same key is taken up again.

        With `overwrite`, what is unfinished goes; finished results stay until `publish` has others. Raises what
        `status` raises, and InputError where nothing can be written.
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
        """For the time of a run: nobody else writes here. A run that ends without any part leaves nothing behind.

        Raises InputError if another process is in this block; a killed one is not. What the system refuses to write
        here is told as `refusal` does.
        """
        check_is_folder(self.partial)
        check_writable(self.folder / MANIFEST)
        with locked(self.folder):
            try:
                yield
            except OSError as error:
                if not Path(str(error.filename or os.sep)).is_relative_to(self.folder):
                    raise
                raise refusal(error, error.filename, "start the same command again, which goes on") from error
            finally:
                if not self._has_parts():
                    shutil.rmtree(self.partial, ignore_errors=True)

    def stage(self) -> None:
        """Make `staged` anew and empty: by itself, to add something to a finished run."""
        shutil.rmtree(self.staged, ignore_errors=True)
        self.staged.mkdir(parents=True)

    def part(self, index: int) -> Path:
        """Where part `index` of the run lies until all are there."""
        return self.partial / f"part-{index:06d}.parquet"

    def has_part(self, index: int) -> bool:
        return self.part(index).is_file()

    def write_part(self, index: int, frame: pd.DataFrame) -> None:
        write_parquet(self.part(index), frame)

    def read_part(self, index: int) -> pd.DataFrame:
        """What was written as part `index`; InputError where that cannot be read any more."""
        import pandas as pd

        try:
            return pd.read_parquet(self.part(index))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.part(index)} cannot be read; remove it, and the run makes it again") from error

    def read_parts(self, count: int) -> Iterator[pd.DataFrame]:
        return map(self.read_part, range(count))

    def publish(self, manifest: dict[str, Any]) -> None:
        """Put what is staged in the place of what an earlier run wrote, the manifest last; drop `.partial`.

        The manifest gets the files' names. Killed on the way, the run is unfinished.
        """
        files = [path.relative_to(self.staged) for path in sorted(self.staged.rglob("*")) if path.is_file()]
        names = list(dict.fromkeys([*manifest.get("files", []), *map(Path.as_posix, files)]))
        earlier = self.manifest or {"key": self.key}
        if earlier["key"] != self.key:
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
        """InputError unless this result of the finished run is there."""
        if not (self.folder / name).is_file():
            raise InputError(f"{self.folder / name} is gone; --overwrite makes it anew")

    def _has_parts(self) -> bool:
        return any(self.partial.glob("part-*"))

    def _difference(self, found: dict[str, Any]) -> str:
        return describe_difference(found.get("key"), self.key)


def describe_difference(found: Any, wanted: dict[str, Any]) -> str:
    """Say what a run was made with that is not asked for now; found: its key, if that can be read."""
    found, wanted = _flatten(found if isinstance(found, dict) else {}), _flatten(wanted)
    changed = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    values = ", ".join(f"{name} {_short(found.get(name))}, not {_short(wanted.get(name))}" for name in changed[:3])
    return f"with other arguments ({values}{', …' if len(changed) > 3 else ''})"


def refusal(error: OSError, path: str | Path, go_on: str) -> OSError | InputError:
    """What the system refuses to write, with what to do; as an InputError where another folder would do."""
    why = error.strerror or error
    if error.errno in UNWRITABLE:
        mend = f"give it back its rights and {go_on}, or " if error.errno in LOCKED else ""
        return InputError(f"{path} cannot be written ({why}); {mend}give another --out")
    mend = "make room there and " if error.errno in FULL else ""
    return OSError(f"{path} could not be written ({why}); {mend}{go_on}")


def check_is_folder(path: Path) -> None:
    """InputError if something else stands where this folder is or would be made."""
    try:
        blocked = next((p for p in (path, *path.parents) if not p.is_dir() and os.path.lexists(p)), None)
    except OSError as error:  # the name is too long
        raise refusal(error, path, "start again") from error
    if blocked is not None:
        raise InputError(f"{blocked} is no folder; give another for the results")


def check_writable(path: Path) -> None:
    """InputError if this file could not be written, in folders that are made for it; nothing is left behind."""
    beside = path.absolute().with_name(f".{path.name}.partial")
    try:
        beside.exists()  # raises where the name is too long
        with tempfile.TemporaryFile(dir=next(folder for folder in beside.parents if folder.is_dir())):
            pass
    except OSError as error:
        raise refusal(error, path, "start again") from error


def _is_of_a_run(manifest: dict[str, Any]) -> bool:
    """Whether it has the key of a run, and the names of files in its folder, which another run may replace."""
    files = manifest.get("files", [])
    named = isinstance(files, list) and all(isinstance(f, str) and not {"/", ".."} & {*Path(f).parts} for f in files)
    return isinstance(manifest.get("key"), dict) and named


def provenance() -> dict[str, Any]:
    """The versions that made a result: gradscope's, Python's and those of the libraries it may depend on."""
    return {"gradscope": __version__, "versions": library_versions()}


def library_versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that a result may depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _flatten(key: dict[str, Any]) -> dict[str, Any]:
    """Settings within settings by their own names."""
    flat = {}
    for name, value in key.items():
        flat |= _flatten(value) if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    """A value on one line; of a hash, the first digits."""
    text = str(value)
    return text if len(text) <= 24 else f"{text[:8]}…"
