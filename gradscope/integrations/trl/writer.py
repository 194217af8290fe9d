"""Write the batches of a TRL run to a lossless log, from a separate process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradscope.errors import InputError
from gradscope.integrations.row_writer import RowWriter, Spikes, StepRows, remove_steps, step_file, to_array
from gradscope.integrations.trl.batch import Inputs, kept_tokens, response_denominators
from gradscope.integrations.trl.internals import GENERATE, SCORE
from gradscope.integrations.trl.losses import other_loss, refuse_scaled, settings_loss
from gradscope.integrations.trl.measure import add_over_processes
from gradscope.integrations.trl.texts import is_on_text, text_denominators, text_loss, watch_steps
from gradscope.integrations.trl.watch import SeenBatch, Watching, temperature_of
from gradscope.objective import LossSettings
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
OF_TEXTS = {"pair": "pair", "groups": "group", "chosen": "chosen", "z0": "z0"}
"""The same of given texts; pairs and groups are numbered within their micro-batch."""
UNCLIPPED = LossSettings(clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=None, kl_coef=0.0)
"""Eq. 1 without clips and KL, whose w_t is the ratio times Â."""
REWARDS = "rewards"
"""Key in the inputs: rewards by reward function, [B, functions]."""


class RolloutWriter(Watching):
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
    loss leaves out. A warning counts the responses with holes.

    Any loss is written. Of one that is not Eq. 1's with the settings of a GRPOConfig (your own `_compute_loss` or
    `compute_loss`, RLOO's, "cispo", ratios of responses, masks by entropy, a `weighting`), the advantages are such that
    the tokens' weights w_t under the file's settings, Eq. 1 without clips and KL, are those of the trainer's own
    backward pass: −N·∂loss/∂ log π, over the ratio if there is one. The metadata names what makes the loss another, a
    note says so where the file is read, and TRL's advantages are `trainer_advantages`. What a loss has a gradient
    through beside the kept tokens' log π, such as an entropy bonus, is left out, with a warning and in the note. A step
    whose loss does not use TRL's log π is not written, with one warning.

    Rows of given text (SFT, DPO, KTO) have no rewards and no advantages: the loss's settings name its `weighting` (sft,
    dft, dpo, ipo, kto with TRL's β), and preferences have `pair` (KTO: `z0`, the micro-batch's KL estimate), `chosen`
    and `ref_logprobs`. An SFT example and a pair are a group of their own.

    Training stays bit-identical, and weights are not read, so it works under DDP, FSDP and DeepSpeed. A step's tensors
    are copied to the CPU; a separate process does the rest. If that process dies or falls a minute behind, there is one
    warning and training continues without it. A new run in the same folder removes existing files; a resumed run
    removes those of later steps.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer or KTOTrainer, or any subclass of the first two.
        every: None: only the steps of `spike`.
        text: Also write the text of prompt and response. Even without text, anyone with the tokenizer can decode the
            ids.
        spike: Also write a step whose gradient norm is not finite, or above this many times the median of the previous
            ones, of which there must be five.
        spikes: Largest number of such steps.

    Raises:
        InputError: if the trainer is not supported, it has a `lopti_eta`, DeepSpeed trains a loss that is not
            Eq. 1's in fp16, a number is out of range, or a loss of given text is none of those weightings (another
            loss type or several, ld_alpha, use_weighting, another f-divergence, precompute_ref_log_probs, …).
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
        if getattr(trainer, "lopti_eta", None) is not None:
            raise InputError("the trainer has a lopti_eta, whose two steps rows cannot express; leave one of them out")
        super().__init__(trainer, watch_steps(trainer))
        self.on_text = is_on_text(trainer)
        self.every, self.text, self.spike, self.spikes = every, text, spike, spikes
        self._settle_loss()
        self.folder = Path(trainer.args.output_dir) / "gradscope" / "rollouts"
        self.steps: list[int] = []
        """Steps handed to the writer since training began."""
        self.process_seconds = math.nan
        """CPU time of the writing thread and process, once training has ended."""
        self._due = False
        self._rewards: torch.Tensor | None = None
        """Rewards of the newest generation, by reward function."""
        self._spikes: Spikes | None = None
        self._process: RowWriter | None = None
        self._run: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.seconds, self.cpu_seconds = [], 0.0, 0.0
        self._spikes = None if self.spike is None else spikes_of(self.trainer, self.spike, self.spikes)
        self._settle_loss()  # again, since the trainer may have got another
        if state.is_world_process_zero:
            remove_steps(self.folder, state.global_step + 1)
        self._watcher.start({} if self.on_text else {SCORE: self._watch_rewards, GENERATE: self._add_rewards})
        if state.is_world_process_zero:
            steps = "of steps of unusual gradient norm" if self.every is None else f"every {self.every} steps"
            print(f"gradscope: writing rollouts {'every step' if self.every == 1 else steps} to {self.folder}")
            if self.other_loss is not None:
                print(f"gradscope: rows have the weights of the trainer's own backward pass ({self.other_loss})")

    def _settle_loss(self) -> None:
        self.other_loss = None if self.on_text else other_loss(self.trainer)
        """What makes the loss another than Eq. 1's with the trainer's settings; None: nothing."""
        make = text_loss if self.on_text else settings_loss
        self.loss = make(self.trainer) if self.other_loss is None else UNCLIPPED
        """The settings under which the rows have the trainer's weights."""
        if self.other_loss is not None:
            refuse_scaled(self.trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._due = self.every is not None and state.global_step % self.every == 0
        self._watcher.begin_step(watched=self._due or self.spike is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._counted():
            if parts := self._watcher.parts:
                # Before deciding whether to write: all processes must take part; their norms may differ by rounding.
                count, norm = sum(int(kept_tokens(part.inputs).sum()) for part in parts), self._watcher.norm
                num_tokens = int(add_over_processes(torch.tensor(count), self.trainer.accelerator.device))
                spiked = self._spikes is not None and norm is not None and self._spikes.tell(float(norm))
                if (spiked or self._due) and num_tokens:
                    self._hand_over(parts, num_tokens, state.global_step)
            self._watcher.begin_step(watched=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._counted():
            self._watcher.stop()
            if self._process is not None:
                self.process_seconds = self._process.close()
                self._process = None
        if state.is_world_process_zero:
            print(f"gradscope: rollouts of {counted(len(self.steps), 'step')} are in {self.folder}")

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
        """Return the fields of `TrainedRun` that stay: the precision of the passes, and what is not trained."""
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

    def _rows(self, parts: Sequence[SeenBatch], num_tokens: float) -> list[dict[str, Any]]:
        """Return the columns of each micro-batch's rows. num_tokens: N of the whole step, per process."""
        window = [part.inputs for part in parts]
        scales = torch.ones(sum(len(each["completion_ids"]) for each in window))
        if self.other_loss is None:
            scales = num_tokens / self._denominators(window)
        found = []
        for number, part in enumerate(parts):
            arrays = {
                name: to_array(part.inputs[own]) for own, name in COLUMNS.items() if part.inputs.get(own) is not None
            }
            if self.other_loss is not None:
                arrays["trainer_advantages"] = arrays["advantage"].reshape(len(arrays["advantage"]), -1)
                weights = torch.where(part.slope == 0, 0.0, -num_tokens * part.slope / (part.logprob - part.old).exp())
                arrays["advantage"] = to_array(weights.masked_fill(~weights.isfinite(), math.nan))
                arrays.pop("sampler_correction", None)  # it is in the weights
            if self.on_text:
                del arrays["advantage"]  # its weights
                arrays |= self._text_columns(part.inputs, sum(len(each["prompt_ids"]) for each in window[:number]))
            if "old_logprobs" not in arrays and part.logprob is not None:
                arrays["trainer_logprobs"] = to_array(part.logprob)
            scale, scales = scales.split([size := len(arrays["prompt_ids"]), len(scales) - size])
            arrays |= {"micro_batch": np.full(size, number), "loss_scale": to_array(scale)}
            found.append(arrays | self._reward_columns(part.inputs))
        return found

    def _denominators(self, window: Sequence[Inputs]) -> torch.Tensor:
        if self.on_text:
            return text_denominators(self.trainer, window)
        return response_denominators(self.trainer.args, window, num_processes=self.trainer.accelerator.num_processes)

    def _text_columns(self, laid: Inputs, first: int) -> dict[str, Any]:
        """Return the columns of given texts. first: the number of texts in the step's earlier micro-batches."""
        known, processes = (
            {to: to_array(laid[name]) for name, to in OF_TEXTS.items() if name in laid},
            self.trainer.accelerator,
        )
        for name in {"pair", "group"} & known.keys():  # numbered over the step's processes
            known[name] = (first + known[name]) * processes.num_processes + processes.process_index
        return known

    def _warn_of_holes(self, parts: Sequence[SeenBatch]) -> None:
        """Warn if the completion mask leaves out tokens inside responses."""
        masks = [part.inputs["completion_mask"] > 0 for part in parts]
        holes = [(seen.flip(1).cumsum(1).flip(1) > 0) & ~seen for seen in masks]
        if rows := sum(int(hole.any(1).sum()) for hole in holes):
            self._warn_once(
                "holes",
                f"completion_mask leaves out tokens inside {rows} of {sum(map(len, masks))} responses; they are "
                "written with response_mask false. TRL's own passes do not attend to them, so its log π differs",
            )

    def _hand_over(self, parts: Sequence[SeenBatch], num_tokens: int, step: int) -> None:
        """Copy the step's tensors and queue them for writing."""
        if any("pixel_values" in part.inputs for part in parts):
            return self._warn_once("images", "rollouts are not written: they contain images, rows only tokens")
        if (self.on_text or self.other_loss is not None) and len(self._watcher.seen()) < len(parts):
            return self._warn_once("unseen", "steps are not written: the loss does not use TRL's log π")
        if any("pair" in part.inputs and not bool(part.kept.any(1).all()) for part in parts):
            return self._warn_once("one-sided", "steps are not written whose pairs have a side without a kept token")
        self._warn_of_holes(parts)
        if self._process is None:
            self._process, self._run = RowWriter(self._tokenizer if self.text else None), self._describe_run()
        rank = self.trainer.accelerator.process_index
        rows = self._rows(parts, num_tokens / self.trainer.accelerator.num_processes)
        shared = {"step": step, "process": rank, "temperature": temperature_of(self.trainer)}
        shared["grad_norm"] = None if self._watcher.norm is None else float(self._watcher.norm)
        run = self._run | {"other_loss": self.other_loss, "left_out": self._watcher.left_out}
        loss = {"weighting": self.loss.weighting} if self.on_text else asdict(self.loss)
        told = {LOSS_KEY: json.dumps(loss), RUN_KEY: json.dumps(run)}
        path = step_file(self.folder, step, f"-rank_{rank}" if rank else "")
        self._process.put(StepRows(str(path), rows, shared, told))
        self.steps.append(step)
        return None


def spikes_of(trainer: Any, times: Number, most: int) -> Spikes:
    """Return a detector of the trainer's unusual norms."""
    return Spikes(times, most, scaled=getattr(trainer.accelerator, "scaler", None) is not None)
