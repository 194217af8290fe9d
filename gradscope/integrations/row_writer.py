"""Native rows of a trainer's batches, and the separate process that writes them.

The process reads from its standard input: the tokenizer or None, then a `StepRows` at a time. It uses no device, and if
the trainer dies it writes what it has received and exits. It imports nothing else of the package, since loading torch
would take longer than writing hundreds of steps.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from bisect import insort
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Part = Mapping[str, Any]
"""Responses under the names of native columns: `prompt_ids` with `prompt_mask`, `response_ids` with `response_seen`
(which positions count; those up to the last one hold a token), `response_mask`, `loss_scale` [B], `advantage` [B] or
per token unless the loss has none, and those of OPTIONAL, PER_TOKEN and PER_CANDIDATE that the trainer has; all arrays.
`reward_parts`, if known: {name: [B]}."""

OPTIONAL = ("reward", "group", "process", "micro_batch", "pair", "chosen", "z0")
"""Columns with a value per response, [B]."""
PER_TOKEN = (
    *("old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs", "sampler_correction"),
    *("trainer_logprobs", "trainer_advantages"),
)
"""Columns per token, [B, C], or [B, 1] for whole responses."""
PER_CANDIDATE = ("teacher_top_ids", "teacher_top_logprobs")
"""Columns with c numbers per token, [B, C, c]."""
WAITING = 4
"""Number of queued steps beyond which training waits for the writer."""
PATIENCE, AT_THE_END = 60.0, 600.0
"""Seconds that training waits for the writer before giving up on it: during training, and at its end."""
FEW = 5
"""Norms required before a spike can be detected against their median."""
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from gradscope.integrations.row_writer import main; main()"


@dataclass(frozen=True)
class StepRows:
    """Data of one training step: its responses, and the values that all rows share."""

    path: str
    """File to write."""
    parts: list[Part]
    shared: dict[str, Any]
    """Further columns, one value each: step, temperature, grad_norm (None: unknown)."""
    metadata: Mapping[bytes, str]
    """Of the file: the loss's settings, and what else is known of the run."""


def step_file(folder: Path, step: int, ending: str = "") -> Path:
    """Return the file of a training step."""
    return folder / f"step_{step:06d}{ending}.parquet"


def remove_steps(folder: Path, first: int) -> None:
    """Remove the files of this and later training steps, left by an earlier run."""
    for path in folder.glob("step_*.parquet"):
        number = re.match(r"step_(\d+)", path.name)
        if number is not None and int(number[1]) >= first:
            path.unlink()


def to_array(tensor: Any) -> np.ndarray:
    """Copy a tensor to the CPU, converting floating-point numbers to float32."""
    copy = tensor.detach().to("cpu", copy=True)
    return (copy.float() if copy.is_floating_point() else copy).numpy()


def native_rows(step: StepRows, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield a row per response, with the prompt tokens that its mask keeps and the response up to the last token that
    is seen. A token before it that is not seen is a hole of the mask: it stays, with response_mask false.

    tokenizer: used to add text to the ids; None: no text.
    """
    masked = any("response_mask" in part or _holes(part["response_seen"] > 0).any() for part in step.parts)
    for part in step.parts:
        for row, kept in enumerate(part["response_seen"] > 0):
            seen = kept | _holes(kept)
            prompt, response = part["prompt_ids"][row][part["prompt_mask"][row] > 0], part["response_ids"][row][seen]
            told = {"prompt_ids": prompt, "response_ids": response}
            if "advantage" in part:
                advantage = part["advantage"][row]
                told["advantage"] = advantage[seen] if advantage.ndim else float(advantage)
            told |= {name: part[name][row].item() for name in OPTIONAL if name in part}
            if "reward_parts" in part:
                told["reward_parts"] = {name: own[row].item() for name, own in part["reward_parts"].items()}
            if "response_mask" in part:
                kept = kept & (part["response_mask"][row] > 0)
            if masked:
                told["response_mask"] = kept[seen]
            for name in PER_TOKEN:
                if name in part:
                    told[name] = np.broadcast_to(part[name][row], seen.shape)[seen]
            told |= {name: [*part[name][row][seen]] for name in PER_CANDIDATE if name in part}
            if tokenizer is not None:
                told |= {"prompt": tokenizer.decode(prompt), "response": tokenizer.decode(response)}
            yield told | {"loss_scale": float(part["loss_scale"][row])} | step.shared


def _holes(seen: np.ndarray) -> np.ndarray:
    """Return where [..., C] a token is not seen though a later one is."""
    return (np.flip(np.cumsum(np.flip(seen, -1), -1), -1) > 0) & ~seen


def write_step(path: Path, rows: list[dict[str, Any]], metadata: Mapping[bytes, str]) -> None:
    """Write rows as `write_rollouts` does, with the columns of the first row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    table = pa.table({name: [row.get(name) for row in rows] for name in rows[0]})
    pq.write_table(table.replace_schema_metadata(metadata), partial)
    os.replace(partial, path)


def write_steps(source: BinaryIO) -> None:
    """Write a file per step until the source ends, possibly truncated."""
    try:
        tokenizer = pickle.load(source)
        while True:
            step = pickle.load(source)
            write_step(Path(step.path), list(native_rows(step, tokenizer)), step.metadata)
    except (EOFError, pickle.UnpicklingError):  # the trainer has ended, perhaps in the middle of a step
        return


def main() -> None:
    """Write steps at low priority, and print the CPU seconds used."""
    if hasattr(os, "nice"):
        os.nice(10)
    write_steps(sys.stdin.buffer)
    print(time.process_time())


class Spikes:
    """Detector of steps whose gradient norm is far above those before them."""

    def __init__(self, times: float, most: int, *, scaled: bool = False) -> None:
        """times: threshold, in medians of the previous norms; most: largest number of steps to report. scaled: the loss
        is scaled for fp16, so that norms are not finite until a scale is found, which is no spike."""
        self.times, self.left, self.scaled = times, most, scaled
        self._norms: list[float] = []

    @property
    def typical(self) -> float | None:
        """Median of the norms so far; None: too few."""
        return self._norms[len(self._norms) // 2] if len(self._norms) >= FEW else None

    def tell(self, norm: float) -> bool:
        """Record the next step's norm; return whether it is not finite or above the threshold."""
        typical, is_finite = self.typical, math.isfinite(norm)
        if is_finite:
            outside = typical is not None and norm > self.times * typical
        else:
            outside = typical is not None or not self.scaled
        outside = outside and self.left > 0
        if is_finite:
            insort(self._norms, norm)
        self.left -= outside
        return outside


class RowWriter:
    """Writing process, with a thread that feeds it so that training does not block on a full pipe."""

    def __init__(self, tokenizer: Any = None) -> None:
        """tokenizer: as in `native_rows`."""
        self.broken, self._complained = "", False
        """Why nothing is written any more; whether a warning was given."""
        self._seconds, self._steps = 0.0, queue.Queue(WAITING)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        root = str(Path(__file__).parents[2])
        # Not multiprocessing: it would run a training script without a __main__ guard a second time.
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # on an interrupt of the trainer, queued steps are still written
        )
        self._thread = threading.Thread(target=self._feed, args=(tokenizer,), daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, step: StepRows) -> None:
        """Queue a step; wait for up to PATIENCE seconds if the queue is full. Warn once if the process has died."""
        if not self.broken:
            try:
                self._steps.put(step, timeout=PATIENCE)
            except queue.Full:
                self.broken = f"the writer is over {PATIENCE:g} s behind"
        self._complain()

    def close(self) -> float:
        """Wait until everything is written, and end the process; return the CPU time of thread and process."""
        atexit.unregister(self.close)
        with suppress(queue.Full, subprocess.TimeoutExpired):
            self._steps.put(None, timeout=AT_THE_END)
            self._thread.join(AT_THE_END)
            self._process.wait(AT_THE_END)
        if self._process.poll() is None:
            self.broken = f"the writer did not end within {AT_THE_END:g} s"
            self._process.kill()
            self._process.wait()
        self._explain()
        self._complain()
        with self._process.stdout as out, self._errors:
            return self._seconds + float(out.read() or "nan")

    def _feed(self, tokenizer: Any) -> None:
        """Send the tokenizer and then the queued steps to the process, until None."""
        try:
            with self._process.stdin as sink:
                pickle.dump(tokenizer, sink, protocol=5)
                while (step := self._steps.get()) is not None:
                    pickle.dump(step, sink, protocol=5)
                    sink.flush()
        except OSError:  # the process has gone
            self._process.wait()
            self._explain()
            while self._steps.get() is not None:
                pass
        self._seconds = time.thread_time()

    def _explain(self) -> None:
        """Record why the process died."""
        if self._process.poll() and not self.broken:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.broken = f"exit status {self._process.returncode}" + (f": {lines[-1]}" if lines else "")

    def _complain(self) -> None:
        if self.broken and not self._complained:
            self._complained = True
            warnings.warn(f"gradscope: rollouts are no longer written ({self.broken}); training goes on", stacklevel=4)
