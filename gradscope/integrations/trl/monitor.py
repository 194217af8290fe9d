"""Log at every step of a TRL run which tokens hold its gradient, from what the trainer computes anyway."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from gradscope.diagnosis import (
    Diagnosis,
    Finding,
    PromptSums,
    Rows,
    Scope,
    Verdict,
    judge_dominance,
    make_live_report,
    token_shares,
)
from gradscope.errors import InputError
from gradscope.integrations.trl.batch import trl_settings
from gradscope.integrations.trl.internals import MASKS, log_numbers
from gradscope.integrations.trl.losses import clipped_tokens, own_loss, settings_slopes
from gradscope.integrations.trl.measure import add_over_processes, name_intervals
from gradscope.integrations.trl.texts import is_on_text, watch_steps
from gradscope.integrations.trl.tokens import BINS, TokenColumns, collect_columns, numbers_of
from gradscope.integrations.trl.trackers import send_alert, send_histograms, send_page
from gradscope.integrations.trl.watch import SeenBatch, Watching
from gradscope.intervals import EDGES, interval_labels
from gradscope.resampling import Supply
from gradscope.runs import counted

Number = int | float
BEFORE = 12
"""Number of preceding tokens written with each token."""
SHOWN = 30
"""Most tokens on a page."""
ENERGY = "gradient at the logits, Σ|w|·‖e − π‖"


class TokenMonitor(Watching):
    """Log at every optimizer step which probability intervals hold its gradient, for under 1 % of the run's time.

        trainer.add_callback(TokenMonitor(trainer))

    Nothing is computed twice. log π, entropy and Σπ² of each token come from the trainer's own forward pass (Σπ² is one
    more output of TRL's head), and its weight w = ∂loss/∂ log π from the trainer's own backward pass. Every loss is
    therefore covered, including your own, with its clips, masks, KL and denominators. Parameters are not read, so
    sharded ones make no difference. Training stays bit-identical. Alerts and pages take time on top.

    Logged with TRL's metrics, to whatever `report_to` names, as gradscope/live/NAME/INTERVAL; an interval of π_old is
    named by its edges in percent, such as p0-25:

    - token_share: share of the response tokens;
    - logit_grad_share: share of Σ|w|·‖e − π‖, e − π the gradient of the token's log π at the logits;
    - clipped_share: share of the interval's tokens whose ratio, or whose response's, is clipped ("cispo": capped);
    - masked_share: share that the loss leaves out by entropy, as off-policy, or as sampled too differently;
    - mismatch: mean |log π_old − log π_sampler|, where the trainer knows the sampler's;
    - entropy: mean, nats.

    TensorBoard, Weights & Biases and trackio also get histograms over π_old, as often as TRL logs: of the tokens and of
    |w|·‖e − π‖, gradscope/live/tokens_by_prob and logit_grad_by_prob.

    Undefined numbers (an interval without tokens, a loss without clips) are omitted. Several processes are summed. Each
    step's numbers are also written as a line of `OUTPUT_DIR/gradscope/live.jsonl`, with the tokens of largest
    |w|·‖e − π‖ as text (from the main process's responses). A new run in the same folder overwrites the file; a resumed
    run appends to it.

    What a loss has a gradient through beside the kept tokens' log π, such as an entropy bonus, is left out, with one
    warning.

    Of trainers on given text (SFT, DPO, KTO, whatever their loss type) intervals are those of π, nothing is clipped,
    masked or mismatched, and the verdict's prompts are SFT's examples and DPO's pairs.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer or KTOTrainer, or any subclass, with a loss of
            its own, too.
        edges: edges of the intervals.
        largest: number of tokens per step to write as text; 0 for none.
        window: number of steps per verdict.
        alert: every `window` steps, judge whether low-probability tokens dominate Σ|w|·‖e − π‖ over those steps, by the
            criterion that `gradscope diagnose` applies to gradient energy. This uses the main process's prompts and
            needs ten with a gradient. If the verdict changes, print it and send a W&B or trackio alert.
        page_every: number of steps between writes of `OUTPUT_DIR/gradscope/live.html`, which is also written at the
            end: all steps, the verdict, the largest tokens. W&B, trackio and MLflow get it as an artifact, including
            the text of these tokens. None: no page.
        forward_every: if the loss computes log π itself (in a fused kernel, say), run one forward pass without
            gradients every `forward_every` steps, starting with the first. Weights are then those of the loss in the
            trainer's settings. None: such steps are skipped, with one warning.

    Raises:
        InputError: if the trainer or the TRL version is not supported (its head gives no Σπ²), SFT's texts share rows
            (padding_free, packing) or its loss is of whole logits (label_smoothing_factor, compute_loss_func), a number
            is out of range, or `forward_every` meets a loss that `trl_settings` refuses.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        edges: Sequence[Number] = EDGES,
        largest: int = 10,
        window: int = 20,
        alert: bool = False,
        page_every: int | None = None,
        forward_every: int | None = None,
    ) -> None:
        on_text = is_on_text(trainer)
        if largest < 0:
            raise InputError(f"largest is {largest}; give 0 or more")
        for name, number in (("window", window), ("page_every", page_every), ("forward_every", forward_every)):
            if number is not None and number < 1:
                raise InputError(f"{name} is {number}; give 1 or more")
        self.labels = interval_labels(edges)
        super().__init__(trainer, watch_steps(trainer, with_squares=True, on_unseen=self._look))
        self.edges, self.largest, self.window = list(edges), largest, window
        self.alert, self.page_every, self.forward_every = alert, page_every, forward_every
        if forward_every is not None and (on_text or not hasattr(trainer.args, "loss_type")):
            raise InputError("forward_every needs GRPOTrainer's settings of the loss; leave it out")
        self._loss = None if forward_every is None else trl_settings(trainer.args).loss
        self.path = Path(trainer.args.output_dir) / "gradscope" / "live.jsonl"
        self.rows: list[dict[str, Any]] = []
        """The numbers of each step since training began."""
        self._clips = False
        """Whether the loss has TRL's own clips."""
        self.verdict: Verdict | None = None
        """The last decided verdict, with `alert`."""
        self._started = 0.0
        self._histograms = np.zeros((2, len(BINS) - 1))
        """Histograms since the last log."""
        self._prompts: deque[np.ndarray] = deque(maxlen=window)
        """Sums by prompt, for each of the last steps."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=window * max(largest, 1))
        """The largest tokens of the last steps."""
        self._looked: list[SeenBatch] = []
        """Micro-batches of the step seen by passes of their own."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started, self.seconds, self.cpu_seconds, self.rows = time.perf_counter(), 0.0, 0.0, []
        self.verdict = None
        plain = own_loss(self.trainer) is None and getattr(self.trainer, "weighting", None) is None
        self._clips = plain and not is_on_text(self.trainer)
        self._histograms = np.zeros_like(self._histograms)
        self._prompts.clear()
        self._recent.clear()
        with self._counted():
            if state.is_world_process_zero:
                self._begin_file(state.global_step)
            self._watcher.start({name: self._watch_mask for name in MASKS if hasattr(self.trainer, name)})
        if state.is_world_process_zero:
            page = "" if self.page_every is None else f", a page to {self.path.with_suffix('.html')}"
            print(f"gradscope: numbers of every step go to {self.path}{page}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watcher.begin_step()
        self._looked = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._counted():
            seen, looked, self._looked = self._watcher.seen(), self._looked, []
            self._weigh(looked)
            clipped = [clipped_tokens(self.trainer, part) if self._clips else None for part in seen]
            seen, clipped = seen + looked, clipped + [clipped_tokens(self.trainer, part) for part in looked]
            tokens = collect_columns(seen, clipped) if any(bool(part.kept.any()) for part in seen) else None
            device = self.trainer.accelerator.device
            size = len(self.labels)
            sums = add_over_processes(torch.from_numpy(self._sums(tokens)), device).numpy()
            numbers = numbers_of(sums[: -self._histograms.size].reshape(-1, size), name_intervals(self.edges))
            self._histograms += sums[-self._histograms.size :].reshape(2, -1)
            self.rows.append({"step": state.global_step} | numbers)
            log_numbers(self.trainer, "gradscope/live", numbers)
            if state.is_world_process_zero:
                self._keep(seen, tokens)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._counted():
            if state.is_world_process_zero and self._histograms.any():
                names = ("gradscope/live/tokens_by_prob", "gradscope/live/logit_grad_by_prob")
                send_histograms(self.trainer, dict(zip(names, self._histograms, strict=True)), BINS, state.global_step)
            self._histograms = np.zeros_like(self._histograms)

    def _keep(self, seen: Sequence[SeenBatch], tokens: TokenColumns | None) -> None:
        """Record the newest step; when due, judge the last steps and write the page."""
        row = self.rows[-1]
        largest = [] if tokens is None else self._describe_largest(seen, tokens)
        with self.path.open("a") as file:
            file.write(json.dumps({n: v for n, v in row.items() if math.isfinite(v)} | {"largest": largest}) + "\n")
        self._recent.extend({"step": row["step"]} | told for told in largest)
        if tokens is not None:
            self._prompts.append(tokens.by_prompt(self.edges))
        if self.alert and len(self.rows) % self.window == 0:
            self._tell(self._judge())
        if self.page_every is not None and row["step"] % self.page_every == 0:
            self._write_page()

    def _judge(self) -> Finding | None:
        """Judge the last steps; None if they have no gradient."""
        if not self._prompts:
            return None
        tokens, amounts = np.concatenate(self._prompts, axis=1)
        if not amounts.sum() > 0:
            return None
        rows = token_shares(PromptSums(tokens, tokens, amounts, amounts), self.labels)
        known = int((amounts.sum(1) > 0).sum())
        scope = Scope(tuple(self.labels), Supply(known, len(tokens)))
        return judge_dominance(Diagnosis({"dominance": Rows(rows)}, scope), "raw", ENERGY)

    def _tell(self, found: Finding | None) -> None:
        """Print and send a verdict that differs from the last; an undecided one is ignored."""
        if found is None or found.verdict in (self.verdict, Verdict.UNDECIDED, Verdict.UNKNOWN):
            return
        self.verdict = found.verdict
        step = self.rows[-1]["step"]
        tqdm.write(f"gradscope: steps {max(step - self.window, 0) + 1} to {step}: {found.statement}")
        send_alert(self.trainer, f"gradscope, step {step}", found.statement, warn=found.verdict is Verdict.DOMINATES)

    def _write_page(self) -> None:
        kinds = list(dict.fromkeys(name.split("/")[0] for name in self.rows[0] if name != "step"))
        named = list(zip(name_intervals(self.edges), self.labels, strict=True))
        rows = [
            {"step": row["step"], "interval": label} | {kind: row[f"{kind}/{name}"] for kind in kinds}
            for row in self.rows
            for name, label in named
        ]
        largest = pd.DataFrame(sorted(self._recent, key=lambda told: -told["share"])[:SHOWN])
        facts = {"trainer": type(self.trainer).__name__, "left out": ", ".join(self._watcher.left_out) or "nothing"}
        report = make_live_report(pd.DataFrame(rows), largest, self._judge(), facts=facts)
        send_page(self.trainer, report.to_html(self.path.with_suffix(".html")))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watcher.stop()
        if state.is_world_process_zero:
            with self._counted():
                if self.page_every is not None and self.rows and self.rows[-1]["step"] % self.page_every:
                    self._write_page()
            total = time.perf_counter() - self._started
            print(
                f"gradscope: looking at the tokens of {counted(len(self.rows), 'step')} took {self.seconds:.2f} s, "
                f"{100 * self.seconds / total:.2f} % of the training's {total:.1f} s; numbers are in {self.path}"
            )

    def _begin_file(self, step: int) -> None:
        """Keep a resumed run's lines up to this step; drop those of any other run."""
        lines = self.path.read_text().splitlines() if step and self.path.is_file() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))

    def _look(self, model: Any, part: SeenBatch) -> None:
        """Run an extra pass on a micro-batch whose log π was not seen, if one is due."""
        if self.forward_every is None:
            mend = "" if is_on_text(self.trainer) else "; give forward_every"
            return self._warn_once("unseen", f"steps are skipped: the loss does not use TRL's log π{mend}")
        if "pixel_values" in part.inputs:
            return self._warn_once("unseen", "steps are skipped: the loss makes log π itself, and prompts hold images")
        if self.trainer.state.global_step % self.forward_every:
            return None
        with self._counted():
            if not self._watcher.score(model, part):
                return self._warn_once("unseen", "steps are skipped: the head does not give Σπ²")
            self._looked.append(part)
        return None

    def _weigh(self, looked: Sequence[SeenBatch]) -> None:
        """Set ∂loss/∂ log π of a step's extra passes, from the loss in the trainer's settings."""
        if not looked:
            return
        slopes = settings_slopes(self.trainer, looked, self._loss)
        first = max(part.inputs["prompt_ids"].shape[1] for part in looked)
        rows = slopes[:, first:].split([len(part.logprob) for part in looked])
        for part, own in zip(looked, rows, strict=True):
            part.slope = torch.where(part.kept, own[:, : part.logprob.shape[1]].to(part.logprob), 0.0)

    def _watch_mask(self, make_mask: Callable[..., Any]) -> Callable[..., Any]:
        def masked(*args: Any, **keywords: Any) -> Any:
            mask = make_mask(*args, **keywords)
            if (part := self._watcher.current) is not None:
                part.kept_by_masks.append(mask)
            return mask

        return masked

    def _sums(self, tokens: TokenColumns | None) -> np.ndarray:
        """Return the numbers that processes sum, in one row."""
        tokens = tokens or TokenColumns(*[np.empty(0)] * 11)
        return np.concatenate([tokens.sums(self.edges).ravel(), tokens.histograms().ravel()])

    def _describe_largest(self, seen: Sequence[SeenBatch], tokens: TokenColumns) -> list[dict[str, Any]]:
        """Return the tokens of largest amount, each with the text before it."""
        tokenizer, whole, found = self._tokenizer, tokens.amount.sum(), []
        count = min(self.largest, len(tokens.amount)) if whole > 0 else 0
        for t in np.argpartition(-tokens.amount, count - 1)[:count] if count else ():
            part, row, place = seen[tokens.part[t]], int(tokens.row[t]), int(tokens.place[t])
            ids = part.inputs["completion_ids"][row, max(0, place - BEFORE) : place + 1].tolist()
            told = {"share": tokens.amount[t] / whole, "prob": math.exp(tokens.logprob[t])}
            told |= {"slope": float(part.slope[row, place]), "position": place, "token_id": ids[-1]}
            found.append(told | {"token": tokenizer.decode(ids[-1:]), "before": tokenizer.decode(ids[:-1])})
        return sorted(found, key=lambda each: -each["share"])
