"""Explain a step of a TRL run whose gradient norm is out of line, before the optimizer takes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from gradscope.diagnosis import describe_spike, make_spike_report
from gradscope.errors import InputError, first_line
from gradscope.gradients import Resources, TokenJacobian
from gradscope.integrations.row_writer import step_file
from gradscope.integrations.trl.batch import batch_from_trl, join_columns, response_denominators
from gradscope.integrations.trl.losses import SAMPLED, find_kind, other_loss
from gradscope.integrations.trl.measure import agree
from gradscope.integrations.trl.sample import unit_gradient
from gradscope.integrations.trl.trackers import send_alert, send_page
from gradscope.integrations.trl.watch import SeenBatch, StepWatcher, Watching
from gradscope.integrations.trl.writer import REWARDS, RolloutWriter, spikes_of
from gradscope.objective import TokenWeights
from gradscope.policy import trained_only, whole_weights
from gradscope.runs import Processes, write_parquet
from gradscope.updates import SpikedStep, explain_spike, tabulate_step

Number = int | float


class SpikeRecorder(Watching):
    """Explain every step whose gradient norm is not finite, or above `times` the median of the previous ones.

        trainer.add_callback(SpikeRecorder(trainer))

    Before the optimizer takes such a step, it finds every token's share of the trainer's own gradient, the tokens with
    the largest shares and terms, the fewest tokens without which the norm is in line, and the weightings that would
    have removed them (see `explain_spike`). It prints one line, writes `OUTPUT_DIR/gradscope/spikes/step_000812.html`
    and every token's share beside it (.parquet), sends an alert and the page to W&B, trackio and MLflow, and has the
    step's responses written by `RolloutWriter`. The step is then taken as it is: training stays bit-identical. Between
    spikes it costs the copy of each micro-batch's slopes.

    The tokens' weights are those of the trainer's own backward pass, whatever its loss; that the shares do not sum to 1
    tells of a gradient beside them. With weights below float32, shares are known only for the tokens with large terms.

    Args:
        trainer: TRL's GRPOTrainer or RLOOTrainer, or any subclass.
        times: threshold, in medians of the previous norms, of which there must be five.
        most: largest number of such steps.
        weights: also save the weights before the step, to `OUTPUT_DIR/gradscope/spikes/step_000812`.
        micro_batch_size: largest number of responses in one forward pass.

    Raises:
        InputError: if the trainer is not supported, it computes no gradient norm, it has a `lopti_eta`, DeepSpeed
            trains, FSDP is of the first version, or a number is out of range.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        times: Number = 3,
        most: int = 10,
        weights: bool = False,
        micro_batch_size: int = 8,
    ) -> None:
        find_kind(trainer, SAMPLED)
        if trainer.is_deepspeed_enabled:
            raise InputError(
                "DeepSpeed computes the norm while it takes the step; RolloutWriter(trainer, every=None, spike=3) "
                "keeps the step's responses, and gradscope diagnose --spike explains it"
            )
        if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
            raise InputError("FSDP's first version keeps the weights in flat shards; launch with fsdp_version 2")
        if not trainer.args.max_grad_norm > 0:
            raise InputError("max_grad_norm is 0, so the trainer computes no norm; give one, such as 1e9")
        super().__init__(trainer, StepWatcher(trainer))
        self.writer = RolloutWriter(trainer, every=None, spike=times, spikes=most)
        """Writes the responses of the same steps."""
        self.times, self.most, self.weights, self.micro_batch_size = times, most, weights, micro_batch_size
        self.folder = Path(trainer.args.output_dir) / "gradscope" / "spikes"
        self.steps: list[int] = []
        """Steps explained since training began."""
        self._spikes = spikes_of(trainer, times, most)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.seconds, self._spikes = [], 0.0, spikes_of(self.trainer, self.times, self.most)
        self._watcher.start()
        self.writer.on_train_begin(args, state, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watcher.begin_step()
        self.writer.on_step_begin(args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        norm, typical = self._watcher.norm, self._spikes.typical
        if norm is None:
            return
        norm = float(norm)
        if agree(int(self._spikes.tell(norm)), self.trainer.accelerator.device):
            with self._counted():
                try:
                    self._explain(state.global_step + 1, norm, typical)
                except (InputError, OSError, torch.OutOfMemoryError) as error:  # training goes on
                    words = f"step {state.global_step + 1} (gradient norm {norm:.4g}) is not explained"
                    self._warn_once("refused", f"{words}: {first_line(error)}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watcher.begin_step(watched=False)
        self.writer.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watcher.stop()
        self.writer.on_train_end(args, state, control)

    def _explain(self, number: int, norm: float, typical: float | None) -> None:
        trainer, parts = self.trainer, self._watcher.seen()
        seen, kept = len(parts) == len(self._watcher.parts), any(bool(part.kept.any()) for part in parts)
        lacks = "" if seen and kept else "a process trains no token" if seen else "the loss does not use TRL's log π"
        if missing := [*filter(None, self._processes.gather([lacks]))]:  # in all of them, for they work together
            raise InputError(missing[0])
        if self.weights:
            trainer.save_model(str(step_file(self.folder, number, "").with_suffix("")))
        line = math.inf if typical is None else self.times * typical
        batch = batch_from_trl([part.inputs for part in parts], trainer.temperature)
        with whole_weights(trainer.model, gradients=True), trained_only(trainer.model):
            resources = Resources(micro_batch=self.micro_batch_size)
            step = self._step(TokenJacobian(trainer.model, batch, resources), parts)
            direction = unit_gradient(trainer.model) if math.isfinite(norm) else None
            spike = explain_spike(step, norm, line=line, direction=direction)
        if not trainer.accelerator.is_main_process:
            return
        self.steps.append(number)
        path = step_file(self.folder, number).with_suffix(".html")
        title = f"gradscope: step {number}, gradient norm {norm:.4g}"
        report = make_spike_report(spike, title=title, typical=typical)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_parquet(path.with_suffix(".parquet"), step.table.assign(gradient_share=spike.shares))
        told = f"step {number}: {describe_spike(spike, typical)}"
        tqdm.write(f"gradscope: {told} {report.to_html(path)}")
        send_alert(trainer, f"gradscope, step {number}", told, warn=True)
        send_page(trainer, path, "gradscope-spike")

    @property
    def _processes(self) -> Processes:
        return Processes(self.trainer.accelerator.process_index, self.trainer.accelerator.num_processes)

    def _step(self, J: TokenJacobian, parts: Sequence[SeenBatch]) -> SpikedStep:
        """Return the step's tokens over all processes, with the weights of the trainer's own backward pass."""
        processes, window = self._processes, [part.inputs for part in parts]
        num_tokens = sum(processes.gather([J.num_tokens])) / processes.count

        def joined(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if any(each is None for each in values) else join_columns(window, values).double()

        weights, batch, rewards = -num_tokens * joined("slope"), J.batch, None
        if other_loss(self.trainer) is None:
            scales = num_tokens / response_denominators(self.trainer.args, window, num_processes=processes.count)
            batch = replace(batch, loss_scales=scales)
        if REWARDS in window[0]:
            rewards = torch.cat([part[REWARDS].nansum(1).cpu() for part in window])
        parts_of_weight = TokenWeights(weights, torch.zeros_like(weights), torch.zeros_like(batch.response_mask))
        own = tabulate_step(batch, parts_of_weight, joined("logprob"), joined("entropy"), rewards)
        tables = processes.gather([own])
        table = pd.concat(tables, ignore_index=True)
        rank = np.repeat(range(len(tables)), [len(each) for each in tables])
        for name in ("response", "group"):  # numbered over all processes
            table[name] = pd.factorize(pd.MultiIndex.from_arrays([rank, table[name]]))[0]
        return SpikedStep(J, table, self._tokenizer.decode, int((rank < processes.rank).sum()), processes)
