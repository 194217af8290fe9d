"""While TRL trains: whom its gradient serves, and who then moves the right way, every few steps."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import TrainerCallback

from gradscope.errors import InputError
from gradscope.integrations.trl_batch import Inputs, batch_from_trl, response_denominators, trl_settings
from gradscope.integrations.trl_measure import StepMeasurement, measure_step
from gradscope.intervals import EDGES, interval_labels
from gradscope.policy import lost_text
from gradscope.runs import write_parquet

Number = int | float


class GradScopeCallback(TrainerCallback):
    """Measure every `every`-th optimizer step, from the first one on, on the responses that it trains on.

        trainer.add_callback(GradScopeCallback(trainer, every=10))

    Logged beside TRL's own metrics, with the prefix gradscope/, and a row of `OUTPUT_DIR/gradscope/metrics.parquet`
    (with the column `step`). A probability bin of π_old is named by its edges in percent, p0-25; G_a is the part of the
    gradient of TRL's loss, with its denominators and before clipping, that the tokens of bin a have, over all weights
    that are trained: grad_norm/a, grad_norm/all: ‖G_a‖, ‖G‖ for G = Σ G_a, which is TRL's grad_norm unless Lopti splits
    the step in two; grad_share/a: ⟨G_a, G⟩/‖G‖², adds up to 1; with cosines=True grad_cosine/a/b, grad_cosine/a/all: of
    G_a with G_b, and with G; token_share/a: share of the tokens; right_direction_positive/a,
    right_direction_negative/a: of the tokens with such an advantage, the share whose probability the whole step (both
    of Lopti's) moved that way; num_tokens; seconds: what measuring cost. What is undefined (a bin without tokens) is
    left out of the log and NaN in the file.

    With a trainer that has a `reweight_alpha`, it is in the weights. A cost of every measured step: three forward
    passes and a backward pass per interval; memory: a vector as long as the weights per interval, one more with LoRA.
    Nothing about the training changes. How much time it took is printed at the end. A new run in the same folder starts
    the file anew, a resumed one goes on with it. Of several processes the main one measures its own responses; the
    others wait.

    edges: of the bins. micro_batch_size: most responses in one forward pass. Raises InputError for a trainer that
    is not GRPOTrainer, losses that `trl_settings` refuses, weights in shards (DeepSpeed, FSDP), and numbers below 1.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 10,
        edges: Sequence[Number] = EDGES,
        cosines: bool = False,
        micro_batch_size: int = 8,
    ) -> None:
        for name, number in (("every", every), ("micro_batch_size", micro_batch_size)):
            if number < 1:
                raise InputError(f"{name} is {number}; give 1 or more")
        if not hasattr(trainer, "_generate_and_score_completions"):
            raise InputError(f"the trainer is a {type(trainer).__name__}; give TRL's GRPOTrainer, or a subclass of it")
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise InputError("the weights lie in shards (DeepSpeed or FSDP), which cannot be measured; leave this out")
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        if (lost := lost_text(tokenizer)) is not None:
            seen = f"{type(tokenizer).__name__} makes {lost[1]!r} of {lost[0]!r}"
            warnings.warn(f"the trainer's {seen}, and that is what it trains on", stacklevel=2)
        interval_labels(edges)
        self.trainer, self.every, self.edges, self.micro_batch_size = trainer, every, list(edges), micro_batch_size
        self.cosines = cosines
        alpha = getattr(trainer, "reweight_alpha", None)
        self.settings = replace(trl_settings(trainer.args).loss, reweight_alpha=alpha)
        self.path = Path(trainer.args.output_dir) / "gradscope" / "metrics.parquet"
        self.rows: list[dict[str, Any]] = []
        """A dict per measured step, as in the file."""
        self.seconds = 0.0
        """Spent on measuring since training began."""
        self._started, self._spent = 0.0, 0.0
        self._due = False
        self._window: list[Inputs] = []
        self._step: StepMeasurement | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started, self.seconds, self.rows = time.perf_counter(), 0.0, []
        if state.global_step and self.path.is_file():
            rows = pd.read_parquet(self.path)
            self.rows = rows[rows["step"] <= state.global_step].to_dict("records")
        self._watch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._due = state.is_world_process_zero and state.global_step % self.every == 0
        self._step, self._window = None, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._window:  # not due, or the second of Lopti's steps
            return
        started, trainer, window = time.perf_counter(), self.trainer, self._window
        self._due, self._window = False, []
        batch = batch_from_trl(window, trainer.temperature)
        if batch.num_tokens:
            processes = trainer.accelerator.num_processes
            denominators = response_denominators(trainer.args, window, num_processes=processes)
            settings = {"edges": self.edges, "cosines": self.cosines, "micro_batch_size": self.micro_batch_size}
            self._step = measure_step(trainer.model, batch, self.settings, denominators, **settings)
        self._spent = time.perf_counter() - started
        self.seconds += self._spent

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (step := self._step) is None:
            return
        started, self._step = time.perf_counter(), None
        step.finish(self.trainer.model, micro_batch_size=self.micro_batch_size)
        spent = time.perf_counter() - started
        numbers = step.numbers | {"num_tokens": step.batch.num_tokens, "seconds": self._spent + spent}
        self.rows.append({"step": state.global_step} | numbers)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(self.path, pd.DataFrame(self.rows))
        for name, value in numbers.items():
            if math.isfinite(value):
                self.trainer._metrics["train"][f"gradscope/{name}"].append(float(value))
        self.seconds += time.perf_counter() - started

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._unwatch()
        if state.is_world_process_zero:
            total = time.perf_counter() - self._started
            print(
                f"gradscope: measuring took {self.seconds:.1f} s, {100 * self.seconds / total:.1f} % of the training's "
                f"{total:.1f} s; {len(self.rows)} measured steps are in {self.path}"
            )

    def _watch(self) -> None:
        """See the micro-batches of a step that is due, as they come to the trainer's compute_loss."""
        self._unwatch()
        compute_loss = self.trainer.compute_loss

        def watched(model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            # Lopti's second pass shows each once more.
            if self._due and model.training and len(self._window) < self.trainer.current_gradient_accumulation_steps:
                self._window.append(inputs)
            return compute_loss(model, inputs, *args, **keywords)

        self.trainer.compute_loss = watched

    def _unwatch(self) -> None:
        self.trainer.__dict__.pop("compute_loss", None)
