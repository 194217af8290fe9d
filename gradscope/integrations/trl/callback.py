"""Measure every few steps of a TRL run which intervals make up its gradient, and which tokens move the right way."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn
from tqdm import tqdm

from gradscope.errors import InputError
from gradscope.gradients import Resources
from gradscope.integrations.trl.batch import batch_from_trl, join_columns
from gradscope.integrations.trl.internals import log_numbers
from gradscope.integrations.trl.losses import other_loss, refuse_scaled, settings_loss, settings_slopes
from gradscope.integrations.trl.measure import StepMeasurement, agree, measure_step, name_intervals
from gradscope.integrations.trl.recorder import SpikeRecorder
from gradscope.integrations.trl.sample import StepSample, affordable
from gradscope.integrations.trl.texts import watch_steps
from gradscope.integrations.trl.watch import SeenBatch, Watching, temperature_of, wrap
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import ORDERS
from gradscope.policy import find_lossy_text, refuse_unreadable, trained_only, whole_weights
from gradscope.runs import SILENT, Progress, Reporter, counted, settle_progress, write_parquet

Number = int | float
TOLERANCE = 0.01
"""Relative difference between the measured and the trainer's gradient norm that triggers a warning."""
HELD = 1 << 62
"""Bytes for the intervals' vectors: unlimited, so that they stay in memory and never go to a file."""


class GradScopeCallback(Watching):
    """Measure every `every`-th optimizer step, starting with the first, on the responses that it trains on.

        trainer.add_callback(GradScopeCallback(trainer, every=10, budget=0.15))

    Results are logged with TRL's own metrics, with the prefix gradscope/, and as rows of
    `OUTPUT_DIR/gradscope/metrics.parquet` (with a column `step`). A probability interval of π_old is named by its edges
    in percent, such as p0-25. G_a is interval a's part of the gradient of TRL's loss, with TRL's denominators, before
    clipping, over all trained weights; G = Σ G_a. Metrics:

    - grad_norm/a, grad_norm/all: ‖G_a‖, ‖G‖;
    - grad_share/a: ⟨G_a, G⟩/‖G‖²; the shares sum to 1;
    - module_norm/MLP and so on: ‖G‖ over a module group's weights; the squares sum to ‖G‖²;
    - grad_cosine/a/b, grad_cosine/a/all, with cosines=True: cosines of G_a with G_b and with G;
    - token_share/a: share of the tokens;
    - right_direction_positive/a, right_direction_negative/a: among tokens with an advantage of that sign (of given
      text: a weight −∂loss/∂ log π), the share whose probability the whole step (both of Lopti's) moved in its
      direction;
    - num_tokens; seconds: time spent on measuring the step;
    - grad_norm_ratio: ‖G‖ over the trainer's own gradient norm before clipping, 1 if the measured loss is the trained
      one. A difference above 1 % gives a warning with both norms. NaN if tokens are so certain, or weights so small,
      that float32 rounds the trainer's norm by as much. With Lopti both norms are of its first pass, if η is an edge.

    Undefined numbers (an interval without tokens) are omitted from the log and NaN in the file.

    RLOOTrainer keeps π_old only for whole responses, so its intervals are those of the policy before the step. Each
    measured step costs three forward passes, a backward pass per interval, and the memory of one vector of the trained
    weights per interval. Training itself does not change, with a quantized base neither (QLoRA): its weights are
    dequantized one at a time, as they are used. The total time spent is printed at the end. A new run in the same
    folder overwrites the file; a resumed run appends to it. Several processes measure together, and numbers cover all
    their responses.

    Any loss is measured, your own, too: the tokens' weights, ∂loss/∂ log π, are those of the trainer's own backward
    pass (of Lopti, whose second step has another, Eq. 2's). What a loss has a gradient through beside the kept tokens'
    log π, such as an entropy bonus, is left out, with a warning, and shows in grad_norm_ratio.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer or KTOTrainer, or a subclass.
        budget: Largest share of the wall time since training began (measuring included) to spend on measuring. Each due
            step then measures as many prompts as the budget allows at the cost observed so far, drawn at random, each
            with all its responses in the step; if it allows fewer than four (and not all), too few for an estimate, the
            callback waits for the next step that can afford them. The first step always measures one prompt, to learn
            the cost; it is logged only if four are affordable at once. A prompt costs five forward passes (two, if all
            its slopes are 0) and one vector of memory; with weights below float32, both are as without a budget. Logged
            are the shares, estimated for the whole step, with 95 % confidence bounds (grad_share_lower/a,
            grad_share_upper/a, …), and measured_prompts of num_prompts, measured_tokens of num_tokens. grad_norm_ratio
            is replaced by grad_projection, with bounds: the length of the measured G along the trainer's gradient over
            the trainer's norm, 1 on average; it can give a warning only if all prompts were measured. Norms of
            intervals and cosines, which are not sums over prompts, are omitted.
        edges: Edges of the intervals.
        micro_batch_size: Largest number of responses in one forward pass.
        progress: Report progress on stderr, or to a `Progress`; only the main process does.
        spike: Also explain every step whose gradient norm is not finite, or above this many times the median of the
            previous ones, before it is taken (`SpikeRecorder`). With `every=None`, do only that.

    Raises:
        InputError: if the trainer is not supported, Lopti trains another loss than Eq. 1's, DeepSpeed trains in
            fp16, FSDP is of the first version, the base is quantized by a library other than bitsandbytes, torchao and
            HQQ, a number is below 1, or a budget is outside (0, 1) or combined with DeepSpeed, cosines or Lopti.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int | None = 10,
        budget: Number | None = None,
        edges: Sequence[Number] = EDGES,
        cosines: bool = False,
        micro_batch_size: int = 8,
        progress: bool | Progress = True,
        spike: Number | None = None,
    ) -> None:
        for name, number in (("every", every), ("micro_batch_size", micro_batch_size)):
            if number is not None and number < 1:
                raise InputError(f"{name} is {number}; give 1 or more")
        if every is None and spike is None:
            raise InputError("every and spike are both None, so no step would be measured; give one of the two")
        if budget is not None and not 0 < budget < 1:
            raise InputError(f"budget is {budget}; give a share of the run's time, such as 0.15, or None")
        if budget is not None and cosines:
            raise InputError("cosines need all prompts' gradients, and a budget may allow fewer; give one of the two")
        watcher = watch_steps(trainer)
        lopti = getattr(trainer, "lopti_eta", None) is not None
        if lopti and (other := other_loss(trainer)) is not None:
            raise InputError(f"Lopti steps twice, so its loss must be Eq. 1's, but {other}; leave one of the two out")
        self._formula = settings_loss(trainer) if lopti else None
        """Eq. 1's settings, where a backward pass gives the slopes of a part of the step's tokens alone."""
        if not lopti:
            refuse_scaled(trainer)
        elif budget is not None:
            raise InputError("Lopti steps with two gradients, but a budget needs a single one; give one of the two")
        _refuse_launch(trainer, budget)
        refuse_unreadable(trainer.model)
        super().__init__(trainer, watcher)
        if (lost := find_lossy_text(self._tokenizer)) is not None:
            seen = f"{type(self._tokenizer).__name__} turns {lost[0]!r} into {lost[1]!r}"
            warnings.warn(f"the trainer's {seen}, and training uses the result", stacklevel=2)
        interval_labels(edges)
        self.every, self.edges, self.micro_batch_size = every, list(edges), micro_batch_size
        self.cosines, self.budget = cosines, budget
        self.progress = Reporter(write=_say) if progress is True else settle_progress(progress)
        if not trainer.accelerator.is_main_process:
            self.progress = SILENT
        self.path = Path(trainer.args.output_dir) / "gradscope" / "metrics.parquet"
        self.rows: list[dict[str, Any]] = []
        """A dict per measured step, as in the file."""
        self._started, self._spent, self._cost, self._price = 0.0, 0.0, 0.0, 0.0
        self._due = self._waiting = False
        self._tolerated = TOLERANCE
        self._step: StepMeasurement | StepSample | None = None
        self.recorder = (
            None if spike is None else SpikeRecorder(trainer, times=spike, micro_batch_size=micro_batch_size)
        )
        """Explains steps whose norm is out of line."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started, self.seconds, self.rows = time.perf_counter(), 0.0, []
        self._cost = self._price = 0.0
        self._tolerated, self._waiting = TOLERANCE, False
        if state.global_step and self.path.is_file():
            rows = pd.read_parquet(self.path)
            self.rows = rows[rows["step"] <= state.global_step].to_dict("records")
        self._pass_on("on_train_begin", args, state, control)
        self._watcher.start()
        if (engine := self._engine) is not None:
            wrap(engine, self, {"step": self._measure_before})
        if state.is_world_process_zero and self.every is not None:
            limit = "" if self.budget is None else f", in {100 * self.budget:g} % of the time"
            steps = "every step" if self.every == 1 else f"every {self.every} steps"
            print(f"gradscope: measuring {steps}{limit}, into {self.path}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pass_on("on_step_begin", args, state, control)
        self._due = self._waiting or (self.every is not None and state.global_step % self.every == 0)
        self._watcher.begin_step(watched=self._due)
        self._step = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pass_on("on_pre_optimizer_step", args, state, control)
        if self._due:  # otherwise not due, the second of Lopti's steps, or measured before DeepSpeed stepped
            self._measure()
        if isinstance(self._step, StepMeasurement) and "grad_norm_ratio" not in self._step.numbers:
            self._compare(state.global_step + 1)

    def _pass_on(self, event: str, *given: Any) -> None:
        """Tell the recorder of a training's event."""
        if self.recorder is not None:
            getattr(self.recorder, event)(*given)

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, which steps at the end of accelerate's backward(), before any callback is called."""
        return self.trainer.accelerator.deepspeed_engine_wrapped.engine if self.trainer.is_deepspeed_enabled else None

    def _measure_before(self, take_step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **keywords: Any) -> Any:
            if self._due:
                self._measure()
            return take_step(*args, **keywords)

        return stepped

    def _measure(self) -> None:
        """Measure the step whose micro-batches were recorded, at the weights before it."""
        started, trainer = time.perf_counter(), self.trainer
        self._due = self._watcher.watched = False
        parts = self._watcher.parts[: trainer.current_gradient_accumulation_steps]  # Lopti's second pass repeats them
        if (slopes := self._slopes(parts)) is None:
            return self._warn_once("unseen", "steps are not measured: the loss does not use TRL's log π")
        batch = batch_from_trl([part.inputs for part in parts], temperature_of(trainer))
        number = trainer.state.global_step + 1
        resources = Resources(HELD, micro_batch=self.micro_batch_size, progress=self.progress)
        terms = trainer.model, batch, slopes
        if self.budget is None:
            if self.progress is not SILENT:
                own = " of this process" if trainer.accelerator.num_processes > 1 else ""
                _say(
                    f"gradscope: measuring step {number} ({counted(batch.num_tokens, 'token')} of "
                    f"{counted(len(batch), 'response')}{own}): three forward passes and a backward pass for each "
                    f"of {counted(len(self.edges) - 1, 'interval')}"
                )
            whole = whole_weights(trainer.model)
            with self.progress.stage(f"step {number}"), whole, trained_only(trainer.model):
                self._step = measure_step(*terms, edges=self.edges, cosines=self.cosines, resources=resources)
        else:
            whole, seed = whole_weights(trainer.model, gradients=True), (trainer.args.seed, number)
            with self.progress.stage(f"step {number}"), whole, trained_only(trainer.model):
                sample = StepSample(*terms, edges=self.edges, resources=resources, seed=seed)
                self._measure_some(sample, number, started)
            self._waiting = sample.measured_prompts < max(1, sample.fewest)
            self._step = sample if sample.measured_prompts else None
        self._spent = time.perf_counter() - started
        self.seconds += self._spent
        return None

    def _slopes(self, parts: Sequence[SeenBatch]) -> Tensor | None:
        """Return ∂loss/∂ log π of the step's tokens [B, S]; None if the loss does not use TRL's log π."""
        if any(part.logprob is None for part in parts):
            return None
        if self._formula is not None:
            return settings_slopes(self.trainer, parts, self._formula)
        if len(self._watcher.seen()) < len(parts):
            return None
        return join_columns([part.inputs for part in parts], [part.slope for part in parts]).nan_to_num(0.0)

    def _measure_some(self, sample: StepSample, number: int, started: float) -> None:
        """Measure as many prompts as the budget allows; a training's first prompt is always measured, for its cost."""
        if not (most := sample.num_prompts):
            return
        owed = 0.0
        if not self._price:
            sample.measure(1)
            most, owed = most - 1, sample.owed * (time.perf_counter() - started)
        now = time.perf_counter()
        spent = self.seconds + now - started + owed
        price = (self._price or spent / sample.measured_cost) * sample.mean_cost
        allowed = affordable(self.budget, now - self._started + owed, spent, price)
        count = agree(min(most, allowed), self.trainer.accelerator.device)
        too_few = sample.measured_prompts + count < sample.fewest  # whose time is better kept for a later step
        count = 0 if too_few else count
        if self.progress is not SILENT and (measured := sample.measured_prompts + count):
            why = f", only to learn the cost: shares need {sample.fewest}" if too_few else ""
            _say(f"gradscope: measuring step {number}: {measured} of {counted(sample.num_prompts, 'prompt')}{why}")
        sample.measure(count)

    def _compare(self, number: int) -> None:
        """Compare the measured norm with the trainer's own for that step."""
        intervals, theirs, ratio = self._intervals_of_first_pass(), self._norm, math.nan
        own = math.nan if intervals is None else self._step.norm_of(intervals)
        known = intervals is not None and self._step.rounding_of(intervals) < TOLERANCE
        if math.isfinite(theirs) and known:  # fp16 skips a step whose norm is infinite
            ratio = own / theirs if theirs else math.inf
        self._step.numbers["grad_norm_ratio"] = ratio
        self._warn(number, ratio, own, "grad_norm_ratio")

    @property
    def _norm(self) -> float:
        """The trainer's gradient norm; NaN if it computed none."""
        return math.nan if self._watcher.norm is None else float(self._watcher.norm)

    def _warn(self, number: int, ratio: float, own: float, name: str) -> None:
        """Warn that the measured gradient is not the trainer's: once, and again if the difference doubles."""
        if abs(ratio - 1) > self._tolerated and self.trainer.accelerator.is_main_process:
            self._tolerated = 2 * abs(ratio - 1)
            warnings.warn(
                f"gradscope: in step {number} the measured gradient has norm {own:.6g}, but the trainer's has "
                f"{self._norm:.6g}: {self._reason()} (see {name} for every measured step)",
                stacklevel=3,
            )

    def _intervals_of_first_pass(self) -> list[bool] | None:
        """Return intervals that the trainer's norm covers: all, or those of Lopti's first pass; None if cut by η."""
        rule = getattr(self.trainer, "rule", None)
        if rule is None or rule.lopti_eta is None:
            return [True] * (len(self.edges) - 1)
        if rule.lopti_eta not in self.edges:
            return None
        low = [edge < rule.lopti_eta for edge in self.edges[:-1]]
        filled = [self._step.numbers[f"token_share/{name}"] > 0 for name in name_intervals(self.edges)]
        for name in ORDERS[rule.lopti_order]:
            chosen = [is_low == (name == "low") for is_low in low]
            if any(c and f for c, f in zip(chosen, filled, strict=True)):
                return chosen
        return chosen

    def _reason(self) -> str:
        """Describe the cause of a difference, if known."""
        trainer = self.trainer
        if beside := self._watcher.left_out:
            return f"its loss also has a gradient through {' and '.join(beside)}, which is left out"
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in trainer.model.modules()):
            return "it trains with dropout, which is off while measuring"
        if trainer.args.fp16 or trainer.args.bf16:
            return "it computes in half precision, whose rounding is not measured"
        return "the measured loss is not the one it trains"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pass_on("on_step_end", args, state, control)
        if (step := self._step) is None:
            return
        started, self._step = time.perf_counter(), None
        with whole_weights(self.trainer.model):
            step.finish()
        if isinstance(step, StepSample):
            numbers = step.estimate(self._norm, TOLERANCE)
            if step.measured_prompts == step.num_prompts:
                ratio = numbers["grad_projection"]
                self._warn(state.global_step, ratio, ratio * self._norm, "grad_projection")
        else:
            numbers = step.numbers | {"num_tokens": step.num_tokens}
        numbers["seconds"] = self._spent + time.perf_counter() - started
        if not isinstance(step, StepSample) or step.measured_prompts >= step.fewest:  # else only its cost was wanted
            self._log(state, numbers)
        self.seconds += (spent := time.perf_counter() - started)
        if isinstance(step, StepSample):
            self._cost += step.measured_cost
            # The higher of the average and the latest cost: overspending from too low an estimate is not recovered.
            self._price = max(self.seconds / self._cost, (self._spent + spent) / step.measured_cost)

    def _log(self, state: Any, numbers: dict[str, float]) -> None:
        """Add a measured step to the file and to TRL's metrics."""
        self.rows.append({"step": state.global_step} | numbers)
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_parquet(self.path, pd.DataFrame(self.rows))
        log_numbers(self.trainer, "gradscope", numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pass_on("on_train_end", args, state, control)
        self._watcher.stop()
        if (engine := self._engine) is not None:
            wrap(engine, self)
        if state.is_world_process_zero and self.every is not None:
            total = time.perf_counter() - self._started
            off = sum(abs(_ratio_of_all(row) - 1) > TOLERANCE for row in self.rows)
            budget = "" if self.budget is None else f" (budget {100 * self.budget:g} %)"
            unlike = f"; in {off} of them the measured gradient's norm is over {100 * TOLERANCE:g} % off the trainer's"
            print(
                f"gradscope: measuring took {self.seconds:.1f} s, {100 * self.seconds / total:.1f} % of the training's "
                f"{total:.1f} s{budget}; {counted(len(self.rows), 'measured step')} in {self.path}"
                + (unlike if off else "")
            )


def _refuse_launch(trainer: Any, budget: Number | None) -> None:
    """Raise InputError if the weights' shards cannot be gathered, or a budget's gradient cannot be read."""
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise InputError("FSDP's first version keeps the weights in flat shards; launch with fsdp_version 2")
    if trainer.is_deepspeed_enabled and budget is not None:
        raise InputError("a budget needs the trainer's gradient, which DeepSpeed keeps for itself; leave it out")


def _ratio_of_all(row: dict[str, Any]) -> float:
    """Return the step's ratio to the trainer's gradient; NaN if not all of its prompts were measured."""
    if "grad_projection" in row and row["measured_prompts"] == row["num_prompts"]:
        return row["grad_projection"]
    return row.get("grad_norm_ratio", math.nan)


def _say(line: str) -> None:
    """Print a line to stderr, above the trainer's progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()
