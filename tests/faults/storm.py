"""Faults drawn by a seed, each done to a command of its own, and what became of its results."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tests.faults import work
from tests.faults.processes import Ended, Started
from tests.faults.shim import WRITES, Shim

Outcome = Literal["same", "refused", "left", "LOST"]
"""same: the bytes of an undisturbed run, by the same command started again. refused: that was one line, and what it
advises led to these bytes. left: of all files only the damaged one differs."""
MOMENTS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
"""Sent at any moment of the run."""
OPERATIONS = {
    "SIGKILL before a write": "kill before",
    "SIGKILL within a write": "kill within",
    "SIGKILL after a write": "kill after",
    "SIGTERM at a write": "terminate",
    "SIGINT at a write": "interrupt",
    "disk full": "full disk",
    "no rights": "no rights",
    "second run beside": "pause",
}
OUTCOMES = ("same", "refused", "left", "LOST")
DAMAGES = ("file cut", "bit flipped", "file emptied", "file gone")
KINDS = (*MOMENTS, *OPERATIONS, "file size limit", *DAMAGES)
STATUSES = {
    **dict.fromkeys(DAMAGES, (2,)),
    **dict.fromkeys(("SIGINT", "SIGINT at a write"), (130,)),
    **dict.fromkeys(("SIGTERM", "SIGTERM at a write"), (130, 143)),
    "second run beside": (2,),
    "no rights": (1, 2),
}
"""Exit statuses besides 0 after a kind of fault; 1 after the others, and after none."""
COMPLAINT = re.compile(r"^(gradscope|error|tiny/\S+): ", re.MULTILINE)
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, modulo 1, lie nowhere far from each other."""
SNAPSHOTS = 5
"""States of each unfinished run in which files are damaged."""


@dataclass(frozen=True)
class Fault:
    """One fault of one command."""

    command: str
    kind: str
    share: float
    """Where it strikes, from 0 to 1: in the run's time, operations, files or bytes."""
    more: float
    """A second such number, for faults that need one."""


@dataclass(frozen=True)
class Trial:
    """A fault, and what became of it."""

    fault: Fault
    where: str
    outcome: Outcome
    why: str = ""


def draw(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[Fault]:
    """Every command and kind of fault in turn, in an order that the seed decides.

    only: these commands, or these kinds. The faults of one kind are spread evenly over a command's time and operations.
    """
    rng = random.Random(seed)
    commands, kinds = ([name for name in all_ if name in only] or all_ for all_ in (work.COMMANDS, KINDS))
    cells = [(command, kind) for command in commands for kind in kinds]
    rng.shuffle(cells)
    begun = {cell: rng.random() for cell in cells}
    for number in range(count):
        cell = cells[number % len(cells)]
        yield Fault(*cell, (begun[cell] + number // len(cells) * GOLDEN) % 1, rng.random())


class Ground:
    """An undisturbed run of one command, and how it looks at several moments."""

    def __init__(self, command: str, inputs: Path, folder: Path) -> None:
        self.command, self.inputs, self.folder = command, inputs, folder
        self.place, log, modules = folder / "trial", folder / "operations", folder / "modules"
        """Where all runs are made: a manifest has the path of its results."""
        folder.mkdir()
        for name, how in (("first", {"modules": modules}), ("whole", {"shim": Shim(self.place, log=log)})):
            ended = self.start(**how).wait()
            if ended.status:
                raise RuntimeError(f"{command} does not run undisturbed: {ended.stderr}")
            self.keep(name)
            work.import_all(modules.read_text().split())
        self.out, self.seconds = folder / "whole" / "out", ended.seconds
        self.operations = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
        self.whole = work.contents(self.out)
        if ".partial" in self.whole:
            raise RuntimeError(f"{command} leaves .partial behind")
        if differing := differences(self.whole, work.contents(folder / "first" / "out")):
            raise RuntimeError(f"two undisturbed runs of {command} differ in {differing}")

    def start(self, *changes: str, **how: Any) -> Started:
        return Started(self.command, self.inputs, self.place, *changes, **how)

    def keep(self, name: str) -> Path:
        """What was made there, elsewhere."""
        return self.place.rename(self.folder / name) / "out"

    @cached_property
    def states(self) -> list[Path]:
        """Folders of runs that were killed on the way, and of the finished one."""
        found = []
        for number in range(SNAPSHOTS):
            at = len(self.operations) * (number + 1) // (SNAPSHOTS + 1)
            self.start(shim=Shim(self.place, "kill before", at)).wait()
            found.append(self.keep(f"state{number}"))
        return [*found, self.out]

    @cached_property
    def forms(self) -> dict[str, list[Any]]:
        """What each file may hold under its final name, at any time."""
        seen = [self.whole, *map(work.contents, self.states)]
        if self.command == "train":
            self.start("---keep-checkpoints=2").wait()
            seen.append(work.contents(self.keep("all")))
        return {name: [c[name] for c in seen if name in c] for name in {name for c in seen for name in c}}


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is missing, left over or different; who is killed after the manifest may leave `.partial`."""
    missing = object()
    names = [name for name in sorted({*wanted, *found}) if not name.startswith(".partial")]
    return [name for name in names if wanted.get(name, missing) != found.get(name, missing)]


@dataclass
class Storm:
    """Faults done to runs in one folder, whose `inputs` `make_inputs` has made."""

    folder: Path
    grounds: dict[str, Ground] = field(default_factory=dict)

    def ground(self, command: str) -> Ground:
        if command not in self.grounds:
            self.grounds[command] = Ground(command, self.folder / "inputs", self.folder / command)
        return self.grounds[command]

    def suffer(self, fault: Fault) -> Trial:
        """Do this to a run, start it again, and compare."""
        ground = self.ground(fault.command)
        _ = ground.forms  # made where the trial will be
        try:
            return (self._damage if fault.kind in DAMAGES else self._disturb)(ground, fault, ground.place)
        finally:
            shutil.rmtree(ground.place)

    def _disturb(self, ground: Ground, fault: Fault, place: Path) -> Trial:
        where, ended = self._strike(ground, fault, place)
        try:
            for run in ended:
                _check_end(run, fault.kind, place)
            _check_forms(ground, place / "out")
            again = ground.start().wait()
            if again.status:
                return Trial(fault, where, "LOST", f"started again: status {again.status}, {again.stderr}")
            _check_end(again, "", place)
            if differing := differences(ground.whole, work.contents(place / "out")):
                return Trial(fault, where, "LOST", f"other than undisturbed: {differing}")
        except Bad as error:
            return Trial(fault, where, "LOST", str(error))
        return Trial(fault, where, "same")

    def _strike(self, ground: Ground, fault: Fault, place: Path) -> tuple[str, list[Ended]]:
        """Where the fault struck, and how each process ended."""
        if fault.kind in MOMENTS:
            started = ground.start()
            wait = fault.share * ground.seconds
            while time.monotonic() < started.begun + wait:
                time.sleep(0.002)
            started.send(MOMENTS[fault.kind])
            return f"after {wait:.2f} s", [started.wait()]
        if fault.kind == "file size limit":
            sizes = [path.stat().st_size for path in ground.out.rglob("*") if path.is_file()]
            limit = int(fault.share * max(sizes)) if fault.more < 0.5 else int(fault.share * min(4096, max(sizes)))
            return f"{limit} bytes", [ground.start(size_limit=limit).wait()]
        way = OPERATIONS[fault.kind]
        numbers = [n for n, (name, _) in enumerate(ground.operations) if way != "kill within" or name in WRITES]
        at = numbers[int(fault.share * len(numbers))]
        where = f"{at}: {' '.join(ground.operations[at])}"
        started = ground.start(shim=Shim(place, way, at))
        if way != "pause":
            return where, [started.wait()]
        ended = []
        if started.has_paused():
            ended.append(ground.start().wait())
            started.send(signal.SIGCONT, workers=True)
        return where, [*ended, started.wait()]

    def _damage(self, ground: Ground, fault: Fault, place: Path) -> Trial:
        """Of a file of an unfinished or a finished run."""
        out = place / "out"
        found = [(s, p.relative_to(s)) for s in ground.states for p in sorted(s.rglob("*")) if _is_read(p)]
        state, name = found[int(fault.share * len(found))]
        shutil.copytree(state, out, symlinks=True)
        where = f"{state.parent.name}/{name}"
        damage(out / name, fault.kind, fault.more)
        again = ground.start().wait()
        try:
            _check_end(again, fault.kind, place)
            if again.status == 0:
                differing = differences(ground.whole, work.contents(out))
                if not differing:
                    return Trial(fault, where, "same")
                if differing == [name.as_posix()]:
                    return Trial(fault, where, "left")
                return Trial(fault, where, "LOST", f"other than undisturbed: {differing}")
            _check_forms(ground, out, but=name.as_posix())
            self._follow_advice(ground, out, name)
        except Bad as error:
            return Trial(fault, where, "LOST", str(error))
        return Trial(fault, where, "refused", again.stderr.strip())

    def _follow_advice(self, ground: Ground, out: Path, name: Path) -> None:
        """Delete the damaged checkpoint if it is the newest one, overwrite, or take another folder."""
        changes = []
        newest = max(out.rglob("checkpoints/step-*"), default=None)
        if newest is not None and newest in (out / name).parents:
            shutil.rmtree(newest)
        elif ground.command == "reproduce":
            shutil.rmtree(out / "runs")
        elif name.name in ("manifest.json", "config.json"):
            shutil.rmtree(out)
        else:
            changes = ["---resume", "+--overwrite"] if ground.command == "train" else ["+--overwrite"]
        ended = ground.start(*changes).wait()
        if ended.status:
            raise Bad(f"its advice did not help: status {ended.status}, {ended.stderr}")
        if differing := differences(ground.whole, work.contents(out)):
            raise Bad(f"its advice led to other results: {differing}")


class Bad(Exception):
    """What must not be."""


def _is_read(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and "trackers" not in path.parts


def damage(file: Path, kind: str, share: float) -> None:
    """What crashes, full disks and other programs make of a file."""
    data = file.read_bytes()
    at = int(share * len(data))
    if kind == "file gone":
        file.unlink()
        return
    flipped = bytes([data[at] ^ 1 << int(share * 8 * len(data)) % 8])
    left = {"file cut": data[:at], "file emptied": b"", "bit flipped": data[:at] + flipped + data[at + 1 :]}
    file.write_bytes(left[kind])


def _check_end(ended: Ended, kind: str, place: Path) -> None:
    """Raise Bad for a process that ended otherwise than it may after this kind of fault."""
    complaints = [line for line in ended.stderr.splitlines() if COMPLAINT.match(line)]
    if "Traceback" in ended.stderr:
        raise Bad(f"a traceback: {ended.stderr}")
    if ended.status < 0 and not kind.startswith(("SIGKILL", "SIGTERM")):
        raise Bad(f"died of signal {-ended.status}: {ended.stderr}")
    if ended.status > 0:
        if len(complaints) != 1:
            raise Bad(f"status {ended.status} with {len(complaints)} lines: {ended.stderr}")
        if not kind.startswith("SIG") and str(place) not in complaints[0] and "tiny/" not in complaints[0]:
            raise Bad(f"names no file: {complaints[0]}")
        if place.parent.name != "reproduce" and ended.status not in STATUSES.get(kind, (1,)):
            raise Bad(f"status {ended.status}: {complaints[0]}")


def _check_forms(ground: Ground, out: Path, but: str | None = None) -> None:
    """Raise Bad where a file is half or wrong under its final name, or something is left but `.partial` and locks."""
    for name, content in work.contents(out).items():
        parts = Path(name).parts
        if name == but or any(p == ".partial" or re.fullmatch(r"\..+\.partial|\.lock|\.parts", p) for p in parts):
            continue
        if name not in ground.forms:
            raise Bad(f"left behind: {name}")
        if parts[-1] == "manifest.json" and isinstance(content, dict):
            content = content.get("key")
            if content not in [form.get("key") for form in ground.forms[name]]:
                raise Bad(f"of another run: {name}")
        elif parts[-1] == "metrics.jsonl":
            _check_metrics(content, ground.forms[name])
        elif content not in ground.forms[name]:
            raise Bad(f"half or wrong: {name}")


def _check_metrics(content: Any, forms: list[Any]) -> None:
    """Lines of the undisturbed run; the last one may be half."""
    lines = content if isinstance(content, list) else [json.loads(line) for line in content.splitlines()[:-1]]
    longest = max((form for form in forms if isinstance(form, list)), key=len)
    if work._untimed(lines) != longest[: len(lines)]:
        raise Bad("half or wrong: metrics.jsonl")
