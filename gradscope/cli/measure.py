"""`gradscope measure`: a token table, figures and a summary, in one folder.

One file: the flags, and one run's way through its folder, which `diagnose` and `compare` begin with.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, ClassVar

import torch
import tyro

from gradscope.cli.flags import (
    MeasuredPolicyFlags,
    MemoryFlag,
    ReadingFlags,
    check_no_plan,
    command_progress,
    load_quietly,
    print_notes,
)
from gradscope.cli.manifest import describe_dump, refuse_reread
from gradscope.cli.optimizer import read_step
from gradscope.diagnosis import SUMMARY, THEORY, VERDICT_PROMPTS, add_summary, judge_sample
from gradscope.errors import InputError
from gradscope.gradients import (
    ADAMW,
    AFTER,
    TABLE,
    Hooks,
    MeasureSettings,
    Plan,
    Resources,
    Stopwatch,
    SumsPlan,
    TableMeasurement,
    measure_into,
    measure_key,
    plan_batch,
    plan_sums,
    read_table,
    settle_minutes,
)
from gradscope.policy import (
    AdamWState,
    Policy,
    checkpoint_step,
    find_device,
    find_policy_state,
    hash_ahead,
    join_launch,
    optimizer_hash,
    read_adamw_state,
)
from gradscope.rollouts import Dump, TokenBatch, rollouts_hash
from gradscope.runs import RunFolder


@dataclass(frozen=True)
class Measured:
    """A finished measurement, and the folder that holds its table."""

    policy: Policy
    batch: TokenBatch
    """At the temperatures and with the advantages that were measured with."""
    settings: MeasureSettings
    """Those that were measured with."""
    folder: RunFolder
    resources: Resources
    """Those of what follows, the same in all processes."""
    watch: Stopwatch
    """Seconds since this measurement began, with those that earlier runs of it took."""

    @property
    def left(self) -> float | None:
        """Seconds left of the minutes; None if no minutes are set."""
        return None if self.settings.minutes is None else max(1.0, 60 * self.settings.minutes - self.watch.seconds())


@dataclass(frozen=True)
class Measure(ReadingFlags, MeasuredPolicyFlags):
    """Measure every response token's own gradient: a token table, figures and a summary, in one folder."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers (any decoder-only causal LM) or of a LoRA adapter, the name of a model in the
    local Hugging Face cache, or "embedded"."""
    rollouts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet, a row per response, or a trainer's rollout log: a file, or a folder of them."""
    out: Path | None = None
    """Folder for tokens.parquet, manifest.json and figures/; needed unless --plan. An interrupted run goes on."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="auto")
    )
    chunk_memory: int | None = None
    """Memory limit, in bytes, for one batched backward pass and for the activations of responses measured together.
    Affects speed and memory, not results. None: 1 GiB, on a GPU 4."""
    gradient_memory: MemoryFlag = None
    """Bytes for summed gradients (of intervals, of prompts): they decide whether these are made exactly
    or as sketches, whose error is said."""
    constants: int = 0
    """For the summary, compute the constants of Eq. 3 at the contexts of this many measured tokens, the shortest ones:
    certified by an exact SVD up to 1,024 activations in a context, estimated by Lanczos beyond."""
    figures: bool = True
    """Also draw figures/ and write summary.txt, which asks the network for the intervals' summed gradients."""
    theory: bool = False
    """Also print figures/theory.txt: how well Prop. 4.2 and powers of 1−π describe these tokens."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""
    plan: bool = False
    """Only print what this would take: FLOPs, seconds, memory; a few tokens are measured, nothing is written."""
    flops: float | None = None
    """With --plan: FLOP/s of a machine that is not here; no weights are loaded, no token is measured."""
    optimizer_state: Path | None = None
    """For --metric adamw: its state_dict, or the folder of its shards; none: the one in MODEL's folder, if any."""
    max_grad_norm: float | None = 1.0
    """For --metric adamw: the run's clipping of the gradient's norm; none: it was not clipped."""

    keeps_prompts: ClassVar[bool] = False
    """Whether the summed gradients are kept of each prompt, or of two halves of them."""
    prompts: ClassVar[int] = 0
    """Prompts with an advantage for which earlier steps are read with the checkpoint's own."""

    def run(self) -> None:
        if self.plan:
            print(self.make_plan())
            return
        check_no_plan(self.flops)
        self._check_constants()
        measured = self.measure()
        if self.figures:
            asked = {"contexts": self.constants, "gradient_memory": self.gradient_memory}
            found, table = (measured.folder, measured.policy, measured.batch), read_table(measured.folder)
            deadline = None if measured.left is None else monotonic() + measured.left - AFTER
            resources = replace(measured.resources, deadline=deadline)
            add_summary(*found, table, measured.settings, resources=resources, **asked)
        if self.figures and measured.resources.processes.is_main:
            texts = [SUMMARY, *([THEORY] if self.theory and (self.out / THEORY).is_file() else [])]
            print(*((self.out / name).read_text(encoding="utf-8") for name in texts), sep="\n")
            print(f"{self.out / TABLE}, figures in {self.out / 'figures'}")
            asked = {"temperature": self.settings.temperature, **self.reading, "base": self.base}
            asked = {name.replace("_", "-"): value for name, value in asked.items() if value is not None}
            words = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in asked.items()}
            flags = "".join(f" --{name} {shlex.quote(word)}" for name, word in words.items())
            print(f"next: gradscope diagnose {self.model} --rollouts {self.rollouts}{flags} --out DIR")

    def measure(self) -> Measured:
        """Fill the folder's table, unless that was done before."""
        if self.out is None:
            raise InputError("--out is missing; give the folder of the run")
        if self.device_map is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("--device-map spreads one process's policy, and several were launched; leave it out")
        if self.chunk_memory is not None and not 1 <= self.chunk_memory < 2**63:
            raise InputError(f"--chunk-memory is {self.chunk_memory}; give bytes, 1 or more, and less than 2⁶³")
        watch, (processes, device) = Stopwatch(), join_launch(self.device)
        resources = Resources(self.gradient_memory, self.chunk_memory, processes=processes, progress=command_progress())
        with processes.together():
            hash_ahead(self.model)
            policy = load_quietly(self.model, self.loading | {"device": device})
            with command_progress().stage("reading the rollouts"):
                dump = self.read(policy)
            settings = self.settle(policy, policy.device.type)
            settings = replace(settings, loss=self.own_loss(settings.loss, dump))
            state = self._read_state(policy, settings)
            measurement = TableMeasurement(policy, dump.batch, settings, optimizer_state=state, resources=resources)
        # What is free differs by process and by moment; all later looks are at this number.
        resources = resources.settle(policy.device)
        with processes.together():
            sums = self.plan_sums(policy, measurement.batch, resources.vectors)
            log, key = rollouts_hash(self.rollouts), self._key(policy, dump, measurement.settings)
            folder = RunFolder(self.out, key)
            if processes.is_main:
                if not self.overwrite:
                    refuse_reread(folder, dump, log, table=TABLE)
                folder.status(overwrite=self.overwrite)
                print_notes(dump.remarks)
                if dump.loss is not None and self.loss_flags:
                    print_notes([f"flags, not the log, give the loss's {', '.join(self.loss_flags)}"])
        facts = {"model": self.model, "rollouts": describe_dump(self.rollouts, dump, log)}
        facts["device_map"] = getattr(policy.model, "hf_device_map", None) if self.device_map is not None else None
        measurement.watch, measurement.follows, measurement.passes = watch, sums, self.passes_after()
        hooks = Hooks(print, partial(judge_sample, measurement))
        measure_into(measurement, folder, facts=facts, asked=self.settings, overwrite=self.overwrite, hooks=hooks)
        if measurement.statistics is None and measurement.settings.minutes is not None:  # finished before
            watch.earlier = sum(folder.manifest["sample"]["seconds"].values())
        return Measured(policy, measurement.whole, measurement.settings, folder, resources, watch)

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """Return the settings for this policy on a device of this type."""
        return self.settings

    def _read_state(self, policy: Policy, settings: MeasureSettings) -> AdamWState | None:
        """Read AdamW's second moments if norms in its metric are requested."""
        if settings.metric is None:
            return None
        state = read_adamw_state(policy, self.optimizer_state, max_grad_norm=self.max_grad_norm)
        if state is None:
            print_notes([f"no optimizer state beside {self.model}: {ADAMW} is NaN; give --optimizer-state"])
        return state

    def read(self, policy: Policy) -> Dump:
        """Read the rollouts to measure."""
        from gradscope.rollouts import read_checkpoint_dump

        how = {"temperature": self.settings.temperature, **self.reading}
        return read_checkpoint_dump(
            self.rollouts, policy, checkpoint_step(self.model), prompts=self.prompts, **how
        )

    def has_metric(self, policy: Policy) -> bool:
        """Return whether summed gradients are also computed in AdamW's metric."""
        return False

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int) -> SumsPlan | None:
        """Plan the summed gradients; None if there are none. Raises InputError if they do not fit."""
        own = {"keeps_prompts": self.keeps_prompts, "metric": self.has_metric(policy)}
        return plan_sums(policy, batch, memory, **own) if self.figures else None

    def passes_after(self) -> float | None:
        """Return the forward passes of everything that follows the table; None: summed gradients alone."""
        return None

    def _check_constants(self) -> None:
        if self.theory and not self.figures:
            raise InputError("--theory is made with the figures; leave out --no-figures, or --theory")
        if self.constants < 0:
            raise InputError(f"--constants is {self.constants}; give 0 or more contexts")

    def make_plan(self) -> Plan:
        """Predict the cost here or, without loading weights, on a machine of a stated speed."""
        if self.params == "adapter":
            raise InputError("a plan is of all parameters; leave out --params adapter, or --plan")
        if self.flops is None:
            policy = load_quietly(self.model, self.loading)
            device = policy.device
        else:
            policy, device = self.outline(self.model), torch.device(find_device(self.device))
        dump = self.read(policy)
        print_notes([note for note in dump.notes if note.kind in ("step", "other-step", "pooled")])
        settings, batch = self.settle(policy, device.type if self.flops is None else "cuda"), dump.batch
        settings = replace(settings, loss=self.own_loss(settings.loss, dump))
        resources = Resources(self.gradient_memory, self.chunk_memory).settle(device)
        known = {"sums": self.plan_sums(policy, batch, resources.vectors), "chunk_memory": resources.activations}
        with command_progress().stage("trying how fast this machine is"):
            return plan_batch(policy, batch, settings, speed=self.flops, **known)

    def _key(self, policy: Policy, dump: Dump, settings: MeasureSettings) -> dict[str, Any]:
        # Not the log's hash: it may have grown by steps that are not this checkpoint's.
        read = {**self.reading, "rollouts": dump.batch.digest()}
        if settings.metric is not None:
            state = self.optimizer_state or find_policy_state(policy)
            read |= {"optimizer_state": state and optimizer_hash(state), "max_grad_norm": self.max_grad_norm}
        return measure_key(policy, settings, read)


@dataclass(frozen=True)
class MeasureOwn(Measure):
    """Measure a checkpoint on its own rollouts: the step that it sampled, where a log holds several, with earlier ones
    where that has too few prompts."""

    keeps_prompts: ClassVar[bool] = True
    prompts: ClassVar[int] = VERDICT_PROMPTS

    def has_metric(self, policy: Policy) -> bool:
        return (self.optimizer_state or find_policy_state(policy)) is not None

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """Add AdamW's metric if its state is there and fits."""
        settings = settle_minutes(self.settings, policy, device)
        known = self.optimizer_state or find_policy_state(policy)
        state, _, _ = read_step(policy, known, asked=self.optimizer_state is not None)
        return replace(settings, metric="adamw") if state is not None else settings

    def read(self, policy: Policy) -> Dump:
        read_step(policy, self.optimizer_state, asked=True)  # refused here, not when all is measured
        return super().read(policy)
