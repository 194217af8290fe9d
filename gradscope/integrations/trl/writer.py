"""Write the batches of a TRL run to a lossless log, from a separate process."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from gradscope.errors import InputError
from gradscope.integrations.row_writer import RowWriter, Spikes, StepRows, remove_steps, step_file, to_array
from gradscope.integrations.trl.batch import Inputs
from gradscope.integrations.trl.losses import GRPOLoss, own_loss, settings_loss
from gradscope.integrations.trl.watch import watch
from gradscope.policy import plain_name
from gradscope.rollouts import LOSS_KEY, RUN_KEY
from gradscope.runs import counted

Number = int | float
COLUMNS = {
    **{"prompt_ids": "prompt_ids", "prompt_mask": "prompt_mask", "completion_ids": "response_ids"},
    **{"completion_mask": "response_seen", "tool_mask": "response_mask", "advantages": "advantage"},
    **{"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs"},
    **{"sampling_per_token_logps": "sampler_logprobs", "importance_sampling_ratio": "sampler_correction"},
}
"""TRL's tensor → name in rows; those from tool_mask on are optional."""
LOGPROBS = "_get_per_token_logps_and_entropies"
"""TRL's method that computes log π."""
REWARDS = "rewards"
"""Key in the inputs: rewards by reward function, [B, functions]."""


class RolloutWriter(TrainerCallback):
    """Write the responses of every `every`-th optimizer step, starting with the first, as native rollouts.

        trainer.add_callback(RolloutWriter(trainer))

    Each step gets a file `OUTPUT_DIR/gradscope/rollouts/step_000012.parquet` (`step_000012-rank_1.parquet` and so on
    for further processes), with a row per response: ids of prompt and response, response mask, reward (and each reward
    function's, if there are several), advantages, old, reference and sampler log-probabilities if TRL keeps them
    (without old ones, the step was on-policy; those of the trainer's own forward pass are then `trainer_logprobs`,
    which no ratio is made of, so that it is exactly 1), the correction factors for the sampler, step, process,
    micro-batch, temperature, the trainer's gradient norm before clipping, and the loss's scale of the response's terms.
    The loss's settings, the precision of the passes and the frozen parameters are in the file's metadata. `gradscope
    diagnose CHECKPOINT --rollouts OUTPUT_DIR/gradscope/rollouts` needs nothing else. Identical prompts of a step form a
    group.

    The response mask is false at tool tokens and at holes of TRL's completion mask: tokens inside a response that the
    loss leaves out. A warning counts the responses with holes. A subclass that computes a loss of its own is written
    with the settings and scales of its GRPOConfig, which a line at the start of training says; `gradscope audit` then
    holds its gradient against that loss.

    Training stays bit-identical, and weights are not read, so it works under DDP, FSDP and DeepSpeed. A step's tensors
    are copied to the CPU; a separate process does the rest. If that process dies or falls a minute behind, there is one
    warning and training continues without it. A new run in the same folder removes existing files; a resumed run
    removes those of later steps.

    Args:
        trainer: GRPOTrainer, or a subclass that keeps its loss.
        every: None: only the steps of `spike`.
        text: Also write the text of prompt and response. Even without text, anyone with the tokenizer can decode the
            ids.
        spike: Also write a step whose gradient norm is not finite, or above this many times the median of the previous
            ones, of which there must be five.
        spikes: Largest number of such steps.

    Raises:
        InputError: if the trainer is not supported, rows cannot express the loss of its settings (those that
            `trl_settings` refuses, RLOO's, weightings and Lopti), or a number is out of range.
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
            raise InputError(f"spike is {spike}; give a multiple of the median norm above 1, such as 3")
        if every is None and spike is None:
            raise InputError("every and spike are both None, so no step would be written; give one of the two")
        if spikes < 1:
            raise InputError(f"spikes is {spikes}; give 1 or more")
        loss = settings_loss(trainer)
        if not isinstance(loss, GRPOLoss):
            raise InputError("RLOO's ratio is of a whole response, which rows cannot express; write GRPOTrainer's")
        for name in ("weighting", "lopti_eta"):
            if getattr(trainer, name, None) is not None:
                raise InputError(f"the trainer has a {name}, which rows cannot express; leave out that or the writer")
        self.trainer, self.every, self.text, self.spike, self.spikes = trainer, every, text, spike, spikes
        self.loss = loss
        self.own_loss = own_loss(trainer)
        """The trainer's own method that computes its loss; None if that is TRL's."""
        self.folder = Path(trainer.args.output_dir) / "gradscope" / "rollouts"
        self.steps: list[int] = []
        """Steps handed to the writer since training began."""
        self.seconds = self.cpu_seconds = 0.0
        """Wall time and CPU time of the training thread spent in this callback since training began."""
        self.process_seconds = math.nan
        """CPU time of the writing thread and process, once training has ended."""
        self._due, self._window = False, []
        self._found: list[torch.Tensor | None] = []
        """log π of each micro-batch of the window, from the trainer's own pass."""
        self._norm: Any = None
        """The step's gradient norm, a number or a tensor, if the trainer provides it."""
        self._logprobs: torch.Tensor | None = None
        """log π of the micro-batch whose loss is being computed, if TRL's method computes it."""
        self._has_holes = False
        self._rewards: torch.Tensor | None = None
        """Rewards of the newest generation, by reward function."""
        self._spikes: Spikes | None = None
        self._process: RowWriter | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.seconds, self.cpu_seconds = [], 0.0, 0.0
        self._spikes = None if self.spike is None else Spikes(self.spike, self.spikes)
        if state.is_world_process_zero:
            remove_steps(self.folder, state.global_step + 1)
        looked_at = {"compute_loss": self._watch_loss, "_get_grad_norm": self._watch_norm}
        looked_at |= {"_calculate_rewards": self._watch_rewards, "_generate_and_score_completions": self._add_rewards}
        if hasattr(self.trainer, LOGPROBS):
            looked_at[LOGPROBS] = self._watch_logprobs
        watch(self.trainer, self, looked_at)
        if state.is_world_process_zero:
            steps = "of steps of unusual gradient norm" if self.every is None else f"every {self.every} steps"
            print(f"gradscope: writing rollouts {'every step' if self.every == 1 else steps} to {self.folder}")
            if self.own_loss is not None:
                print(f"gradscope: {self.own_loss} computes the loss; the rows' settings and scales are GRPOConfig's")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._window, self._found, self._norm = [], [], None
        self._due = self.every is not None and state.global_step % self.every == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        window, self._window = self._window, []
        if window:
            # Before deciding whether to write: processes must all take part, and their norms may differ by rounding.
            num_tokens = self._count_tokens(window)
            spiked = self._spikes is not None and self._norm is not None and self._spikes.tell(float(self._norm))
            if (spiked or self._due) and num_tokens:
                self._hand_over(window, num_tokens, state.global_step)
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.thread_time() - cpu

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        watch(self.trainer, self)
        if self._process is not None:
            self.process_seconds = self._process.close()
            self._process = None
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.thread_time() - cpu
        if state.is_world_process_zero:
            print(f"gradscope: rollouts of {counted(len(self.steps), 'step')} are in {self.folder}")

    def _watch_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def watched(model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            self._logprobs = None
            loss = compute_loss(model, inputs, *args, **keywords)
            if (self._due or self.spike is not None) and model.training:
                self._window.append(inputs)
                self._found.append(self._logprobs)
            return loss

        return watched

    def _watch_logprobs(self, log_probs: Callable[..., Any]) -> Callable[..., Any]:
        def scored(*args: Any, **keywords: Any) -> Any:
            found = log_probs(*args, **keywords)
            if torch.is_grad_enabled() and self._logprobs is None:  # the loss's own pass
                self._logprobs = found[0].detach()
            return found

        return scored

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
        """Add each response's reward to the inputs, so that TRL shuffles it with them."""

        def generated(*args: Any, **keywords: Any) -> Any:
            self._rewards = None
            found = generate(*args, **keywords)
            if self._rewards is not None:  # of all processes, [B, functions]
                count, rank = len(found["completion_ids"]), self.trainer.accelerator.process_index
                found = {**found, REWARDS: self._rewards[rank * count : (rank + 1) * count].detach()}
            return found

        return generated

    def _reward_columns(self, part: Inputs) -> dict[str, Any]:
        """Return the responses' rewards and, of several reward functions, each one's."""
        if REWARDS not in part:
            return {}
        own = part[REWARDS]
        weighted = (own * self.trainer.reward_weights.to(own.device)).nansum(1)
        columns = {"reward": to_array(weighted.masked_fill(own.isnan().all(1), math.nan))}
        if own.shape[1] > 1:
            columns["reward_parts"] = dict(zip(self.trainer.reward_func_names, to_array(own.T), strict=True))
        return columns

    def _describe_run(self) -> dict[str, Any]:
        """Return the fields of `TrainedRun`: the precision of the passes, and the parameters that are not trained."""
        args, model = self.trainer.args, self.trainer.accelerator.unwrap_model(self.trainer.model)
        named = [(plain_name(name, set()), p) for name, p in model.named_parameters()]
        dtypes = {p.dtype for _, p in named}
        halves = {"bfloat16": args.bf16 or torch.bfloat16 in dtypes, "float16": args.fp16 or torch.float16 in dtypes}
        names = {
            "trained": [name for name, p in named if p.requires_grad],
            "frozen": [name for name, p in named if not p.requires_grad],
        }
        shorter = min(names, key=lambda kind: len(names[kind]))
        return {"precision": next((name for name, used in halves.items() if used), "float32"), shorter: names[shorter]}

    def _count_tokens(self, window: list[Inputs]) -> int:
        """Count the tokens that the step trains on, over all processes."""
        masks = (p["completion_mask"] * p["tool_mask"] if "tool_mask" in p else p["completion_mask"] for p in window)
        count = sum(int(mask.sum()) for mask in masks)
        if self.trainer.accelerator.num_processes == 1:
            return count
        device = self.trainer.accelerator.device
        return int(self.trainer.accelerator.gather(torch.tensor([count], device=device)).sum())

    def _warn_of_holes(self, window: list[Inputs]) -> None:
        """Warn once if the completion mask leaves out tokens inside responses."""
        if self._has_holes:
            return
        masks = [part["completion_mask"] > 0 for part in window]
        holes = [(seen.flip(1).cumsum(1).flip(1) > 0) & ~seen for seen in masks]
        rows, of = sum(int(hole.any(1).sum()) for hole in holes), sum(map(len, masks))
        if rows:
            self._has_holes = True
            warnings.warn(
                f"gradscope: completion_mask leaves out tokens inside {rows} of {of} responses; they are written with "
                "response_mask false. TRL's own passes do not attend to them, so its log π differs",
                stacklevel=2,
            )

    def _hand_over(self, window: list[Inputs], num_tokens: int, step: int) -> None:
        """Copy the step's tensors and queue them for writing."""
        if any("pixel_values" in part for part in window):
            warnings.warn("gradscope: rollouts are not written: they contain images, rows only tokens", stacklevel=2)
            self.every = self.spike = None
            return
        self._warn_of_holes(window)
        if self._process is None:
            tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
            told = {LOSS_KEY: json.dumps(asdict(self.loss.settings)), RUN_KEY: json.dumps(self._describe_run())}
            self._process = RowWriter(told, tokenizer if self.text else None)
        processes, rank = self.trainer.accelerator.num_processes, self.trainer.accelerator.process_index
        scales = num_tokens / (processes * self.loss.denominators(window))
        parts, sizes = [], [len(part["completion_ids"]) for part in window]
        each = zip(window, self._found, scales.split(sizes), strict=True)
        for number, (part, logprobs, scale) in enumerate(each):
            arrays = {name: to_array(part[own]) for own, name in COLUMNS.items() if part.get(own) is not None}
            if "old_logprobs" not in arrays and logprobs is not None:
                arrays["trainer_logprobs"] = to_array(logprobs)
            arrays["micro_batch"] = np.full(len(scale), number)
            parts.append(arrays | self._reward_columns(part) | {"loss_scale": to_array(scale)})
        shared = {"step": step, "process": rank, "temperature": float(self.trainer.temperature)}
        shared["grad_norm"] = None if self._norm is None else float(self._norm)
        path = step_file(self.folder, step, f"-rank_{rank}" if rank else "")
        self._process.put(StepRows(str(path), parts, shared))
        self.steps.append(step)
