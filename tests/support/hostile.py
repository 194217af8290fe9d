"""A judge of what a reader makes of a file as an enemy, a full disk or a bug would leave it.

A case spoils one file of a sound log. It is WRONG unless the reader gives what the file says or refuses it with an
InputError of one line, within SECONDS and BYTES, and runs nothing of it.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed as seeded, settings, strategies as st

from gradscope.errors import InputError

SECONDS, BYTES = 20, 3 << 30
"""What a case may take: of the processor's time, and of address space beyond what the process has before it."""
WAITING = 300
"""Seconds on the clock after which a reader counts as waiting for what never comes; a busy machine is slow."""
LONGEST_LINE = 1500
"""Characters of a refusal besides the path: it is to be read on a terminal."""


@dataclass(frozen=True)
class Case:
    """A spoiled file."""

    kind: str
    content: bytes
    truth: Any = None
    """SOUND: what the sound file says; REFUSED: nothing may be read; Says: exactly that; a function: complains of what
    was read, if it is; None: it is only checked that what was read can be."""
    file: str = ""
    """Which file is spoiled, by its place below the log's folder."""

    def __repr__(self) -> str:
        return f"Case({self.kind}, {self.file}: {self.content[:3000]!r})"


SOUND, REFUSED = "sound", "refused"


@dataclass(frozen=True)
class Says:
    """What a spoiled file says, and a reader must give."""

    value: Any


@dataclass(frozen=True)
class Reader:
    """A reader of files, and how its files are spoiled."""

    name: str
    write: Callable[[Path], Path]
    """Writes a sound log below a folder, and returns what is to be read."""
    read: Callable[[Path], Any]
    """What the reader makes of it, as plain values."""
    spoil: Callable[[dict[str, bytes], Path], st.SearchStrategy[Case]]
    """Cases from the contents of the sound files; what is run of one shall make a file of that name."""
    check: Callable[[Any], None] = lambda found: None
    """Raises AssertionError for what no reader may give."""
    cut: bool = True
    """Whether its files may be cut off at every place in turn: not for readers that load a model, and those that read
    what is broken as if it were not there."""
    names: str = ""
    """What every refusal names."""
    share: float = 1.0
    """How many cases it gets, of those that are asked for: readers that load a model are dear."""


class Hung(BaseException):
    """A reader that does not end."""


@contextmanager
def bounded(seconds: float = SECONDS, size: int = BYTES) -> Iterator[None]:
    """Ends what takes longer or more, and the process where it cannot be ended."""

    def stop(number: int, *_: object) -> None:
        raise Hung("it waits" if number == signal.SIGALRM else f"more than {seconds} s")

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + size, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    faulthandler.dump_traceback_later(4 * WAITING, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(read: Callable[[Path], Any], path: Path) -> tuple[str, Any]:
    """("parsed", what was read) or ("refused", the line); AssertionError for anything else."""
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "parsed", read(path)
    except InputError as error:
        line = str(error)
        assert "\n" not in line and line.isprintable(), f"not one line: {line!r:.500}"
        assert len(line.replace(str(path), "")) <= LONGEST_LINE + 2 * len(str(path)), f"{len(line)} characters"
        return "refused", line
    except (Hung, Exception) as error:
        raise AssertionError(f"WRONG: {type(error).__name__}: {str(error)[:300]}") from error


class Bench:
    """One reader's sound log, in which one file at a time is spoiled."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        self.path, self.witness = reader.write(folder / "log"), folder / "witness"
        self.sound = reader.read(self.path)
        self.files = {
            str(file.relative_to(folder / "log")): file.read_bytes()
            for file in sorted((folder / "log").rglob("*"))
            if file.is_file()
        }
        self.tally: Counter[str] = Counter()

    def judge(self, case: Case) -> str:
        """How the case ended; AssertionError for a wrong end."""
        file = self.folder / "log" / case.file
        file.write_bytes(case.content)
        try:
            ended, found = attempt(self.reader.read, self.path)
        finally:
            file.write_bytes(self.files[case.file])
        assert not self.witness.exists(), "what the file brought along was run"
        if ended == "refused":
            sound = case.truth == SOUND or isinstance(case.truth, Says)
            assert not sound, f"WRONG: refused what is sound: {found}"
            assert self.reader.names in found, f"WRONG: blames something else: {found}"
        else:
            assert case.truth != REFUSED, f"WRONG: read what is broken: {found!r:.500}"
            assert case.truth != SOUND or found == self.sound, f"WRONG: {found!r:.500} for {self.sound!r:.500}"
            if isinstance(case.truth, Says):
                assert found == case.truth.value, f"WRONG: {found!r:.500} for {case.truth.value!r:.500}"
            self.reader.check(found)
            if callable(case.truth):
                case.truth(found, self.sound)
        self.tally[ended] += 1
        return ended

    def run(self, cases: int, seed: int, *, on_wrong: Callable[[Case, str], None] | None = None) -> Counter[str]:
        """Judge so many cases; of a wrong one hypothesis shows the smallest, or `on_wrong` is told of each."""

        @seeded(seed)
        @settings(max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=self.reader.spoil(self.files, self.witness))
        def check(case: Case) -> None:
            self.count(case, on_wrong=on_wrong)

        check()
        return self.tally

    def count(self, case: Case, *, on_wrong: Callable[[Case, str], None] | None = None) -> None:
        try:
            self.judge(case)
        except AssertionError as error:
            self.tally["wrong"] += 1
            if on_wrong is None:
                raise
            on_wrong(case, str(error))
