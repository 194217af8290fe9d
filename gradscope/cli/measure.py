"""`gradscope measure`: makes a folder with a token table, figures and a summary."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from gradscope.cli.flags import Model, Rollouts
from gradscope.cli.measuring import PlannedFlags
from gradscope.diagnosis import SUMMARY, THEORY, add_summary
from gradscope.errors import InputError
from gradscope.gradients import TABLE, MeasureSettings, SumsPlan, read_table
from gradscope.objective import LossSettings, make_quantity
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Measure(PlannedFlags):
    """Measure every response token's own gradient, into a folder with a token table, figures and a summary."""

    model: Model
    """Checkpoint folder (any decoder-only causal LM of transformers, or a LoRA adapter), the name of a model in the
    local Hugging Face cache, or "embedded"."""
    rollouts: Rollouts
    """JSONL or parquet with a row per response, or a trainer's rollout log: a file or a folder."""
    out: Path | None = None
    """Folder for tokens.parquet, manifest.json and figures/. An interrupted run resumes. Required unless --plan."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="auto")
    )
    chunk_memory: int | None = None
    """Memory limit, in bytes, for one batched backward pass and for the activations of responses measured together.
    Affects speed and memory, not results. None: 1 GiB, on a GPU 4."""
    figures: bool = True
    """Also draw figures/ and write summary.txt; this computes the intervals' summed gradients."""
    of: str | None = None
    """Measure another quantity's gradients: entropy, reverse-kl, forward-kl or jsd[:beta=.5], from --teacher or from
    the candidates in the log; of the teacher's k likeliest tokens with :top=k, beside which rest=tail or renormalise.
    There are then no weights, summary and figures. none: log π."""
    theory: bool = False
    """Also print figures/theory.txt: how well Prop. 4.2 and powers of 1−π describe these tokens."""

    own: ClassVar[bool] = False

    def run(self) -> None:
        self.check()
        if self.plan:
            print(self.make_plan(self.model, self.rollouts))
            return
        measured = self.measure(self.model, self.rollouts, self.out)
        if self.of:
            print(f"norms are of the gradient of {self.of}: no weights, summary and figures, which are of log π")
        if not self._is_drawn:
            return
        known, table = (measured.folder, measured.policy, measured.batch), read_table(measured.folder)
        asked = {"resources": measured.resources, "gradient_memory": self.gradient_memory}
        add_summary(*known, table, measured.settings, **asked, minutes=measured.minutes_left)
        if not measured.resources.processes.is_main:
            return
        texts = [SUMMARY, *([THEORY] if self.theory and (self.out / THEORY).is_file() else [])]
        print(*((self.out / name).read_text(encoding="utf-8") for name in texts), sep="\n")
        print(f"{self.out / TABLE}, figures in {self.out / 'figures'}")
        asked = {"temperature": self.settings.temperature, **self.reading, "base": self.base}
        asked |= {"reference": self.reference, "weighting": self.settings.loss.weighting}
        asked = {name.replace("_", "-"): value for name, value in asked.items() if value is not None}
        words = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in asked.items()}
        flags = "".join(f" --{name} {shlex.quote(word)}" for name, word in words.items())
        print(f"next: gradscope diagnose {self.model} --rollouts {self.rollouts}{flags} --out DIR")

    def check(self) -> None:
        super().check()
        if self.out is None and not self.plan:
            raise InputError("--out is missing; give a folder for the run")
        if self.chunk_memory is not None and not 1 <= self.chunk_memory < 2**63:
            raise InputError(f"--chunk-memory is {self.chunk_memory}; give bytes, 1 or more, and less than 2⁶³")
        if self.of is not None:
            self._check_of()
        if self.theory and not self.figures:
            raise InputError("--theory needs figures; leave out --no-figures, or --theory")

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int, loss: LossSettings) -> SumsPlan | None:
        return super().plan_sums(policy, batch, memory, loss) if self._is_drawn else None

    @property
    def _is_drawn(self) -> bool:
        """Whether there are figures and a summary."""
        return self.figures and self.of is None

    def _check_of(self) -> None:
        """Raise InputError for a quantity that is not known, and for flags that do not apply to another than log π."""
        make_quantity(self.of)
        given = {"theory": self.theory, "plan": self.plan}
        given |= {"minutes": self.settings.minutes, "metric": self.settings.metric}
        if unfit := [*self.loss_flags, *(name for name, value in given.items() if value)]:
            flag = unfit[0].replace("_", "-")
            raise InputError(f"--{flag} is about ∇ log π, and --of {self.of} another quantity's; leave one of them out")
