"""Measure seconds, memory and forward passes of `gradscope measure` and `diagnose` by stage on policies of real size.

    python -m analyses.benchmarks.real_size make 0.5b work/0.5b --dtype bfloat16 --state
    python -m analyses.benchmarks.real_size run work/0.5b --limit 12 -- \
        measure MODEL ROLLOUTS --out OUT --no-figures --tokens-per-interval 2
    python -m analyses.benchmarks.real_size run work/0.5b --limit 12 -- \
        diagnose MODEL --rollouts ROLLOUTS --optimizer-state STATE --out OUT
    python -m analyses.benchmarks.real_size plan 7b --dtype bfloat16 --flops 2.7e13

`make` writes a policy with random weights (see real_size_policy), responses sampled from it and, with --state, an AdamW
state. `run` starts the command after `--`, with MODEL, ROLLOUTS, STATE and OUT replaced by these files and a fresh
folder, samples its memory ten times a second, and kills it above the limit. `plan` records the output of `gradscope
diagnose --plan` for a size that does not fit on this machine. Each replaces its own rows of the table: one per stage,
and "whole" for all together.

    seconds, cpu_seconds, forward_passes    of a stage without the stages within it
    anonymous_gib                           peak memory not backed by files, over all processes
    resident_gib                            the same plus mapped file pages, which the system can reclaim
    device_gib                              allocated on a GPU at most

Linux only: memory is read from /proc. `real_size_stages` is the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import psutil
import torch
import tyro

from analyses.benchmarks.real_size_policy import Size, interval_counts, write_checkpoint, write_rollouts, write_state
from analyses.benchmarks.real_size_stages import REST
from analyses.common.script import exit_with
from gradscope.errors import InputError

TABLE = Path("figures/cost/data/benchmark_real_size.csv")
WHOLE = "whole"
EVERY = 0.1
"""Seconds between samples of the memory."""
MADE = "made.json"
"""File in `make`'s folder that names the size."""
GIB = 2**30
DEFAULT = {"prompts": 4, "responses": 4, "prompt_length": 100, "response_length": 128}


@dataclass(frozen=True)
class Make:
    """Write a policy with random weights, responses sampled from it and, with --state, an optimizer state."""

    size: Annotated[Size, tyro.conf.Positional]
    folder: Annotated[Path, tyro.conf.Positional]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    state: bool = False
    """Also write an AdamW state."""
    prompts: int = DEFAULT["prompts"]
    responses: int = DEFAULT["responses"]
    """Responses per prompt."""
    prompt_length: int = DEFAULT["prompt_length"]
    response_length: int = DEFAULT["response_length"]
    device: str | None = None
    """Device that samples."""

    def run(self) -> None:
        _check_lengths(self)
        folder, policy = self.folder, self.folder / "policy"
        write_checkpoint(policy, self.size, getattr(torch, self.dtype))
        lengths = {name: getattr(self, name) for name in DEFAULT}
        write_rollouts(folder / "rollouts.jsonl", policy, self.size, device=self.device, **lengths)
        if self.state:
            write_state(folder / "optimizer.pt", self.size)
        counts = list(interval_counts(folder / "rollouts.jsonl", policy))
        made = {"size": self.size, "weights": self.dtype, "tokens_by_interval": counts, **lengths}
        (folder / MADE).write_text(json.dumps(made), encoding="utf-8")
        print(f"{folder}: {self.size} in {self.dtype}; tokens by interval of π: {counts}")


@dataclass(frozen=True)
class Run:
    """Run the command after -- on these files and watch it."""

    folder: Annotated[Path, tyro.conf.Positional]
    """`make`'s folder."""
    limit: float = 12.0
    """GiB of anonymous memory above which the command is killed."""
    name: str | None = None
    """Name of the run in the table; none: the command with the arguments that are not paths."""
    threads: int = 1
    """torch threads."""
    out: Path = TABLE
    arguments: tyro.conf.Suppress[tuple[str, ...]] = ()
    """The command after --."""

    def run(self) -> None:
        if not self.arguments:
            raise InputError("nothing stands after --; give the command and its arguments, as in this file's head")
        try:
            made = json.loads((self.folder / MADE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.folder} holds nothing that `make` wrote ({error}); run it first") from error
        output, events = self.folder / "out", self.folder / "events.jsonl"
        shutil.rmtree(output, ignore_errors=True)
        events.unlink(missing_ok=True)
        places = {"MODEL": self.folder / "policy", "ROLLOUTS": self.folder / "rollouts.jsonl"}
        places |= {"STATE": self.folder / "optimizer.pt", "OUT": output}
        told = [str(places.get(argument, argument)) for argument in self.arguments]
        command = [sys.executable, "-m", "analyses.benchmarks.real_size_stages", str(events), *told]
        watched = watch(command, self.folder / "log.txt", limit=int(self.limit * GIB), threads=self.threads)
        rows = stage_rows(watched, events)
        about = {"size": made["size"], "weights": made["weights"], "kind": "measured"}
        about |= {"run": self.name or " ".join(a for a in self.arguments if a not in places and a != "--out")}
        about |= {"machine": processor(), "threads": self.threads, "torch": torch.__version__}
        append_rows(self.out, [about | row for row in rows])
        print(pd.DataFrame(rows).to_string(index=False))
        if watched.status:
            log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise InputError(f"the command ended with {watched.ending}; its last line: {(log or ['none'])[-1]}")


@dataclass(frozen=True)
class Plan:
    """Record the output of `gradscope diagnose --plan` for a size, without weights."""

    size: Annotated[Size, tyro.conf.Positional]
    dtype: Literal["float32", "bfloat16", "float16", "upcast"] = "bfloat16"
    flops: float = 2.7e13
    """FLOP/s of the machine: an H200 reached .40 to .62 of its 6.7e13 in float32."""
    memory: int = 20 << 30
    """Bytes for summed gradients."""
    tokens_per_interval: int | None = None
    """Measured tokens per interval of π; none: every token."""
    prompts: int = DEFAULT["prompts"]
    responses: int = DEFAULT["responses"]
    prompt_length: int = DEFAULT["prompt_length"]
    response_length: int = DEFAULT["response_length"]
    out: Path = TABLE

    def run(self) -> None:
        import tempfile

        from analyses.benchmarks.real_size_policy import make_config
        from gradscope.gradients import MeasureSettings, plan_batch, plan_sums
        from gradscope.policy import outline_policy
        from gradscope.rollouts import read_rollouts

        _check_lengths(self)
        lengths = {name: getattr(self, name) for name in DEFAULT}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            make_config(self.size, torch.bfloat16).save_pretrained(folder)
            write_rollouts(folder / "rollouts.jsonl", None, self.size, **lengths)
            policy = outline_policy(str(folder), dtype=self.dtype)
            batch = read_rollouts(folder / "rollouts.jsonl", policy)
            settings = MeasureSettings(tokens_per_interval=self.tokens_per_interval)
            sums = plan_sums(policy, batch, self.memory)
            plan = plan_batch(policy, batch, settings, speed=self.flops, sums=sums)
        print(str(plan).replace(str(folder), self.size))
        rows = [{"stage": name, "seconds": seconds} for name, seconds in plan.seconds.items()]
        rows.append(
            {"stage": WHOLE, "seconds": sum(plan.seconds.values()), "planned_gib": sum(plan.memory.values()) / GIB}
        )
        sums = {"stage": f"summed gradients ({plan.sums.way})", "seconds": plan.sums_seconds}
        rows.append(sums | {"planned_gib": plan.sums.memory / GIB})
        tokens = "every token" if self.tokens_per_interval is None else f"{len(plan.responses.prefixes)} tokens"
        about = {"size": self.size, "weights": self.dtype, "kind": "plan", "run": f"diagnose, {tokens}"}
        append_rows(self.out, [about | {"machine": plan.speed.machine} | row for row in rows])


@dataclass
class Watched:
    """Measurements of a command from outside."""

    status: int
    """The shell's exit status; negative for a signal."""
    killed: bool
    """Whether the watch killed it above the limit."""
    started: float
    """On the monotonic clock, like the samples."""
    seconds: float
    cpu_seconds: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, anonymous bytes, resident bytes) of the command and its descendants."""

    @property
    def ending(self) -> str:
        return "the limit of its memory" if self.killed else f"status {self.status}"


def watch(command: Sequence[str], log: Path, *, limit: int, threads: int = 1) -> Watched:
    """Run a command until it ends, or until its processes hold more anonymous bytes than the limit."""
    if not Path("/proc/self/status").is_file():
        raise InputError("memory is read from /proc, which this system lacks; run it on Linux")
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "Agg"}
    started, samples, killed, ended = time.monotonic(), [], threading.Event(), threading.Event()
    with log.open("wb") as out:
        # In a session of its own, so that all its processes can be killed together.
        settings = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True, "env": {**os.environ, **own}}
        process = subprocess.Popen(command, **settings)

        def look() -> None:
            while not ended.wait(EVERY):
                anonymous, resident = _memory(process.pid)
                samples.append((time.monotonic(), anonymous, resident))
                if anonymous > limit:
                    killed.set()
                    os.killpg(process.pid, signal.SIGKILL)
                    return

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            ended.set()
            watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu, seconds = usage.ru_utime + usage.ru_stime, time.monotonic() - started
    return Watched(process.returncode, killed.is_set(), started, seconds, cpu, samples)


def _memory(process: int) -> tuple[int, int]:
    """Return (anonymous, resident) bytes of a process and its descendants."""
    try:
        family = [process, *(child.pid for child in psutil.Process(process).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0, 0
    found = [_status(member) for member in family]
    return sum(s.get("RssAnon", 0) for s in found), sum(s.get("VmRSS", 0) for s in found)


def _status(process: int) -> dict[str, int]:
    """Return the sizes in /proc/PID/status in bytes; {} if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def stage_rows(watched: Watched, events: Path) -> list[dict[str, Any]]:
    """Return a row per stage, in the order in which they began, and one for all."""
    lines = events.read_text(encoding="utf-8").splitlines() if events.is_file() else []
    marks = [json.loads(line) for line in lines if line.endswith("}")]
    end = watched.started + watched.seconds
    start = {"stage": REST, "time": watched.started, "cpu": 0.0, "passes": 0, "device_bytes": 0}
    last = (marks[-1] if marks else start) | {"time": end, "cpu": watched.cpu_seconds, "device_bytes": 0}
    rows: dict[str, dict[str, Any]] = {}
    for mark, following in zip([start, *marks], [*marks, last], strict=True):
        row = rows.setdefault(mark["stage"], {"stage": mark["stage"], "seconds": 0.0, "cpu_seconds": 0.0})
        row["seconds"] += following["time"] - mark["time"]
        row["cpu_seconds"] += following["cpu"] - mark["cpu"]
        row["forward_passes"] = row.get("forward_passes", 0) + following["passes"] - mark["passes"]
        seen = [s for s in watched.samples if mark["time"] <= s[0] < following["time"]]
        row |= _peaks(row, seen, following["device_bytes"])
    whole = {"stage": WHOLE, "seconds": watched.seconds, "cpu_seconds": watched.cpu_seconds}
    whole |= {"forward_passes": sum(row["forward_passes"] for row in rows.values())}
    whole |= _peaks(whole, watched.samples, max((mark["device_bytes"] for mark in marks), default=0))
    return [*rows.values(), whole | {"ended": watched.ending}]


def _peaks(before: dict[str, Any], samples: Sequence[tuple[float, int, int]], device: int) -> dict[str, float]:
    """Return the maxima over a row and these samples; NaN for a stage too short to be sampled."""
    found = {"anonymous_gib": [s[1] / GIB for s in samples], "resident_gib": [s[2] / GIB for s in samples]}
    found["device_gib"] = [device / GIB] if device else []
    return {name: max([*values, before.get(name, float("nan"))], key=_or_least) for name, values in found.items()}


def _or_least(value: float) -> float:
    return -1.0 if value != value else value


def append_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same run in the table."""
    keys = ["size", "weights", "kind", "run", "machine"]
    table = pd.DataFrame(rows)
    if file.is_file():
        known = pd.read_csv(file)
        same = known[keys].apply(tuple, axis=1).isin({tuple(row) for row in table[keys].itertuples(index=False)})
        table = pd.concat([known[~same], table], ignore_index=True) if (~same).any() else table
    file.parent.mkdir(parents=True, exist_ok=True)
    digits = dict.fromkeys(table.columns[table.columns.str.endswith(("seconds", "_gib"))], 2)
    table.round(digits).to_csv(file, index=False)


def processor() -> str:
    """Return the name of the GPU or, without one, of the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _check_lengths(given: Make | Plan) -> None:
    for name in DEFAULT:
        if getattr(given, name) < 1:
            raise InputError(f"{name} is {getattr(given, name)}; give 1 or more")


def main(arguments: Sequence[str]) -> None:
    own = list(arguments)
    place = own.index("--") if "--" in own else len(own)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    chosen = tyro.cli(Make | Run | Plan, args=own[:place], description=__doc__, config=config)
    (replace(chosen, arguments=tuple(own[place + 1 :])) if isinstance(chosen, Run) else chosen).run()


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
