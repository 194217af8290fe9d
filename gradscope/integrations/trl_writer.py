"""While TRL trains: what it trains on goes into a log that loses nothing, written by a process beside it."""

from __future__ import annotations

import atexit
import json
import math
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gradscope.errors import InputError
from gradscope.integrations.trl_batch import Inputs
from gradscope.integrations.trl_losses import GRPOLoss, step_loss
from gradscope.integrations.trl_rows import TAKEN, TrainedStep
from gradscope.integrations.trl_watch import watch
from gradscope.rollouts import LOSS_KEY

Number = int | float
WAITING = 4
"""Steps that may wait to be written before training waits for the writer."""
PATIENCE, AT_THE_END = 60.0, 600.0
"""Seconds that training waits for the writer before it goes on without, and in the end before it ends without."""
FEW = 5
"""Norms that a median is made of before a norm can be told from it."""
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from gradscope.integrations.trl_rows import main; main()"


class RolloutWriter(TrainerCallback):
    """Write the responses of every `every`-th optimizer step, from the first one on, as native rollouts.

        trainer.add_callback(RolloutWriter(trainer))

    A file per step, `OUTPUT_DIR/gradscope/rollouts/step_000012.parquet` (`step_000012-rank_1.parquet` and so on of
    further processes), with a row per response of what the trainer trained on: ids of prompt and response, the mask of
    tools, reward, advantages, old, reference and sampler log-probabilities as far as TRL keeps them, the factors that
    correct for the sampler, step, temperature, the trainer's own gradient norm before clipping, and by how much the
    loss scales the response's terms; the loss's settings are in the file's metadata. `gradscope diagnose CHECKPOINT
    --rollouts OUTPUT_DIR/gradscope/rollouts` needs no more. Identical prompts of a step are a group.

    Nothing about the training changes, bit for bit, and no weight is looked at, so it works under DDP, FSDP and
    DeepSpeed. A step's tensors are copied to the CPU; all else is done by a process of its own. Where that process
    dies, or is a minute behind, one warning says so and training goes on without. A new run in the same folder removes
    the files that are there, a resumed one those of later steps.

    Args:
        trainer: GRPOTrainer, or a subclass that keeps its loss.
        every: None: no step but those of `spike`.
        text: also write the text of prompt and response. Ids alone can be decoded by who has the tokenizer: whoever
            gets the files gets the prompts.
        spike: also write a step whose gradient norm is not finite, or above this many times the median of those before
            it, of which there must be five.
        spikes: how many such steps at most.

    Raises:
        InputError: for another trainer, one with a loss of its own, and for losses that rows cannot say: those that
            `trl_settings` refuses, RLOO's, weightings and Lopti; for numbers out of range.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int | None = 1,
        text: bool = False,
        spike: Number | None = None,
        spikes: int = 10,
    ) -> None:
        if every is not None and every < 1:
            raise InputError(f"every is {every}; give 1 or more, or None for spikes alone")
        if spike is not None and not 1 < spike < math.inf:
            raise InputError(f"spike is {spike}; give how many times the median a norm must be, such as 3")
        if every is None and spike is None:
            raise InputError("every is None and so is spike, so no step would be written; give one of the two")
        if spikes < 1:
            raise InputError(f"spikes is {spikes}; give 1 or more")
        loss = step_loss(trainer)
        if not isinstance(loss, GRPOLoss):
            raise InputError("RLOO's ratio is one of a whole response, which rows cannot say; write GRPOTrainer's")
        for name in ("weighting", "lopti_eta"):
            if getattr(trainer, name, None) is not None:
                raise InputError(f"the trainer has a {name}, which rows cannot say; leave one of the two out")
        self.trainer, self.every, self.text, self.spike, self.spikes = trainer, every, text, spike, spikes
        self.loss = loss
        self.folder = Path(trainer.args.output_dir) / "gradscope" / "rollouts"
        self.steps: list[int] = []
        """Steps handed to the writer since training began."""
        self.seconds = self.cpu_seconds = 0.0
        """Spent inside the calls of this callback since training began, wall time and this thread's CPU time."""
        self.process_seconds = math.nan
        """CPU time of the thread and the process that write, once training has ended."""
        self._due, self._window = False, []
        self._norm: Any = None
        """The step's, where the trainer tells it: a number, or a tensor of it."""
        self._rewards: torch.Tensor | None = None
        """Of the newest generation, by reward function."""
        self._norms: list[float] = []
        self._spikes = 0
        self._process: _Process | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.seconds, self.cpu_seconds, self._norms, self._spikes = [], 0.0, 0.0, [], 0
        if state.is_world_process_zero:
            for path in self.folder.glob("step_*.parquet"):
                number = re.match(r"step_(\d+)", path.name)
                if number is not None and int(number[1]) > state.global_step:
                    path.unlink()
        looked_at = {"compute_loss": self._watch_loss, "_get_grad_norm": self._watch_norm}
        looked_at |= {"_calculate_rewards": self._watch_rewards, "_generate_and_score_completions": self._add_rewards}
        watch(self.trainer, self, looked_at)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._window, self._norm = [], None
        self._due = self.every is not None and state.global_step % self.every == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        window, self._window = self._window, []
        if window:
            # Before it is known whether the step is written: processes add up together, and norms may differ by a bit.
            num_tokens = self._count_tokens(window)
            if (self._is_spike() or self._due) and num_tokens:
                self._hand_over(window, num_tokens, state.global_step)
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.thread_time() - cpu

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        watch(self.trainer, self)
        if self._process is not None:
            self.process_seconds = self._process.close()
            self._complain()
            self._process = None
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.thread_time() - cpu
        if state.is_world_process_zero:
            print(f"gradscope: rollouts of {len(self.steps)} steps are in {self.folder}")

    def _watch_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def watched(model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            if (self._due or self.spike is not None) and model.training:
                self._window.append(inputs)
            return compute_loss(model, inputs, *args, **keywords)

        return watched

    def _watch_norm(self, own_norm: Callable[..., Any]) -> Callable[..., Any]:
        def normed(*args: Any, **keywords: Any) -> Any:
            self._norm = norm = own_norm(*args, **keywords)
            return norm

        return normed

    def _watch_rewards(self, rewards: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **keywords: Any) -> Any:
            self._rewards = found = rewards(*args, **keywords)
            return found

        return watched

    def _add_rewards(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Put each response's reward beside what is trained on, where it goes through TRL's shuffle with it."""

        def generated(*args: Any, **keywords: Any) -> Any:
            self._rewards = None
            found = generate(*args, **keywords)
            if self._rewards is not None:  # of all processes, [B, functions]
                count, rank = len(found["completion_ids"]), self.trainer.accelerator.process_index
                own = self._rewards[rank * count : (rank + 1) * count].detach()
                weighted = (own * self.trainer.reward_weights.to(own.device)).nansum(1)
                found = {**found, "rewards": weighted.masked_fill(own.isnan().all(1), math.nan)}
            return found

        return generated

    def _is_spike(self) -> bool:
        """Compare the step's norm with those before it, if that is asked for, and remember it."""
        if self.spike is None or self._norm is None:
            return False
        norm, known = float(self._norm), self._norms
        outside = not norm <= self.spike * known[len(known) // 2] if len(known) >= FEW else False
        if math.isfinite(norm):
            insort(known, norm)
        if not outside or self._spikes == self.spikes:
            return False
        self._spikes += 1
        return True

    def _count_tokens(self, window: list[Inputs]) -> int:
        """Count the tokens that the step trains on, in all processes."""
        masks = (p["completion_mask"] * p["tool_mask"] if "tool_mask" in p else p["completion_mask"] for p in window)
        count = sum(int(mask.sum()) for mask in masks)
        if self.trainer.accelerator.num_processes == 1:
            return count
        device = self.trainer.accelerator.device
        return int(self.trainer.accelerator.gather(torch.tensor([count], device=device)).sum())

    def _hand_over(self, window: list[Inputs], num_tokens: int, step: int) -> None:
        """Copy the step's tensors, and let them be written."""
        if any("pixel_values" in part for part in window):
            warnings.warn("gradscope: rollouts are not written: they hold images, and rows hold tokens", stacklevel=2)
            self.every = self.spike = None
            return
        if self._process is None:
            tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
            told = {"metadata": {LOSS_KEY: json.dumps(asdict(self.loss.settings))}}
            told["tokenizer"] = tokenizer if self.text else None
            self._process = _Process(told)
        processes, rank = self.trainer.accelerator.num_processes, self.trainer.accelerator.process_index
        scales = num_tokens / (processes * self.loss.denominators(window))
        parts = []
        for part, scale in zip(window, scales.split([len(p["completion_ids"]) for p in window]), strict=True):
            arrays = {name: _copy(part[name]) for name in TAKEN if part.get(name) is not None}
            parts.append(arrays | {"loss_scale": _copy(scale)})
        shared = {"step": step, "temperature": float(self.trainer.temperature)}
        shared["grad_norm"] = None if self._norm is None else float(self._norm)
        name = f"step_{step:06d}" + (f"-rank_{rank}" if rank else "")
        self._process.put(TrainedStep(str(self.folder / f"{name}.parquet"), parts, shared))
        self.steps.append(step)
        self._complain()

    def _complain(self) -> None:
        """Warn once of a writer that died."""
        if (broken := self._process.broken) and not self._process.complained:
            self._process.complained = True
            warnings.warn(f"gradscope: rollouts are no longer written ({broken}); training goes on", stacklevel=2)


def _copy(tensor: torch.Tensor) -> Any:
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True).numpy()


class _Process:
    """The process that writes, and the thread that feeds it, so that a full pipe is not training's to wait for."""

    def __init__(self, told: dict[str, Any]) -> None:
        """told: what holds for all steps."""
        self.broken, self.complained = "", False
        """Why nothing is written any more; whether that was said."""
        self._seconds, self._steps = 0.0, queue.Queue(WAITING)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        root = str(Path(__file__).parents[2])
        # No multiprocessing: it would run a training script that has no __main__ guard once more.
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # an interrupt is the trainer's, and what it has handed over is still written
        )
        self._thread = threading.Thread(target=self._feed, args=(told,), daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, step: TrainedStep) -> None:
        """Hand a step over; wait where too many are before it, but not for ever."""
        if self.broken:
            return
        try:
            self._steps.put(step, timeout=PATIENCE)
        except queue.Full:
            self.broken = f"the writer is over {PATIENCE:g} s behind"

    def close(self) -> float:
        """Let it write what it has, and end; return the CPU time of thread and process."""
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
        with self._process.stdout as out, self._errors:
            return self._seconds + float(out.read() or "nan")

    def _feed(self, told: Any) -> None:
        """Write `told` and then the steps to the process, until there is None."""
        try:
            with self._process.stdin as sink:
                while told is not None:
                    pickle.dump(told, sink, protocol=5)
                    sink.flush()
                    told = self._steps.get()
        except OSError:  # the process has gone
            self._process.wait()
            self._explain()
            while self._steps.get() is not None:
                pass
        self._seconds = time.thread_time()

    def _explain(self) -> None:
        """Say what the process died of."""
        if self._process.poll() and not self.broken:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.broken = f"exit status {self._process.returncode}" + (f": {lines[-1]}" if lines else "")
