"""A measurement in a folder, with its flags: what `measure` does, and how `diagnose` and `compare` begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import tyro

from gradscope.cli.flags import (
    MeasuredPolicyFlags,
    MemoryFlag,
    ReadingFlags,
    command_progress,
    load_quietly,
    print_notes,
)
from gradscope.cli.manifest import describe_dump, refuse_reread
from gradscope.cli.optimizer import read_step
from gradscope.cli.run_folder import check_paths
from gradscope.diagnosis import judge_sample
from gradscope.errors import InputError
from gradscope.gradients import (
    ADAMW,
    AFTER,
    TABLE,
    Afterwards,
    Hooks,
    MeasureSettings,
    Plan,
    Resources,
    Stopwatch,
    SumsPlan,
    measure_folder,
    measure_into,
    plan_batch,
    plan_sums,
    prepare_measurement,
    settle_batch,
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
from gradscope.resampling import FEWEST
from gradscope.rollouts import Dump, TokenBatch, rollouts_hash
from gradscope.runs import Processes, RunFolder, launched


@dataclass(frozen=True)
class MeasuredRun:
    """A finished measurement, and the folder that holds its table."""

    policy: Policy
    batch: TokenBatch
    """The batch, with the temperatures and advantages used."""
    settings: MeasureSettings
    """The settings used."""
    folder: RunFolder
    resources: Resources
    """Resources for everything after the table, equal in all processes."""
    watch: Stopwatch
    """Seconds since the measurement began, including earlier runs."""

    @property
    def left(self) -> float | None:
        """Seconds left; None without a time limit."""
        return None if self.settings.minutes is None else max(1.0, 60 * self.settings.minutes - self.watch.seconds())

    @property
    def minutes_left(self) -> float | None:
        """Minutes left for everything before the page is written; None without a time limit."""
        return None if self.left is None else max(1.0, self.left - AFTER) / 60


@dataclass(frozen=True)
class Measuring(ReadingFlags, MeasuredPolicyFlags):
    """The flags of a measurement."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder (any decoder-only causal LM of transformers, or a LoRA adapter), the name of a model in the
    local Hugging Face cache, or "embedded"."""
    rollouts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet with a row per response, or a trainer's rollout log: a file or a folder."""
    out: Path | None = None
    """Folder for tokens.parquet, manifest.json and figures/. An interrupted run resumes. Required unless --plan."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="auto")
    )
    chunk_memory: int | None = None
    """Memory limit, in bytes, for one batched backward pass and for the activations of responses measured together.
    Affects speed and memory, not results. None: 1 GiB, on a GPU 4."""
    gradient_memory: MemoryFlag = None
    """Bytes for summed gradients (by interval and prompt). Beyond these, they are sketched, with a stated error."""
    figures: bool = True
    """Also draw figures/ and write summary.txt; this computes the intervals' summed gradients."""
    theory: bool = False
    """Also print figures/theory.txt: how well Prop. 4.2 and powers of 1−π describe these tokens."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""
    plan: bool = False
    """Only print the estimated cost: FLOPs, seconds, memory. Measures a few tokens and writes nothing."""
    flops: float | None = None
    """With --plan: plan for another machine with this many FLOP/s, without loading weights or measuring."""
    optimizer_state: Path | None = None
    """For --metric adamw: AdamW's state_dict, or the folder of its shards; none: the one in MODEL's folder, if any."""
    max_grad_norm: float | None = 1.0
    """For --metric adamw: the run's gradient clipping threshold; none: no clipping."""

    prompts: ClassVar[int] = 0
    """Least number of prompts with an advantage; below it, earlier steps are added to the checkpoint's."""

    def measure(self) -> MeasuredRun:
        """Measure into the folder, unless it is finished."""
        if self.out is None:
            raise InputError("--out is missing; give a folder for the run")
        if self.device_map is not None and launched() > 1:
            raise InputError("--device-map needs a single process, but several were launched; leave it out")
        if self.chunk_memory is not None and not 1 <= self.chunk_memory < 2**63:
            raise InputError(f"--chunk-memory is {self.chunk_memory}; give bytes, 1 or more, and less than 2⁶³")
        check_paths([self.model], [self.rollouts])
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
        # Free memory differs by process and moment: fix it once for all.
        resources = resources.settle(policy.device)
        with processes.together():
            following = self.following(policy, settle_batch(settings, dump.batch), resources)
            known = {"optimizer_state": state, "resources": resources, "watch": watch, "following": following}
            measurement = prepare_measurement(policy, dump.batch, settings, **known, tell=print)
            log, folder = rollouts_hash(self.rollouts), self._folder(policy, dump, measurement.settings)
            if processes.is_main:
                if not self.overwrite:
                    refuse_reread(folder, dump, log, table=TABLE)
                folder.status(overwrite=self.overwrite)
                print_notes(dump.remarks)
                if dump.loss is not None and self.loss_flags:
                    print_notes([f"flags override the log's loss settings: {', '.join(self.loss_flags)}"])
        facts = {"model": self.model, "rollouts": describe_dump(self.rollouts, dump, log)}
        facts["device_map"] = getattr(policy.model, "hf_device_map", None) if self.device_map is not None else None
        hooks = Hooks(print, partial(judge_sample, measurement))
        measure_into(measurement, folder, facts=facts, asked=self.settings, overwrite=self.overwrite, hooks=hooks)
        if measurement.pass_seconds is None and measurement.settings.minutes is not None:  # already finished
            watch.earlier = sum(folder.manifest["sample"]["seconds"].values())
        return MeasuredRun(policy, measurement.whole, measurement.settings, folder, resources, watch)

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """Return the settings for this policy on a device of this type."""
        return self.settings

    def _read_state(self, policy: Policy, settings: MeasureSettings) -> AdamWState | None:
        """Read AdamW's second moments if norms in its metric are requested."""
        if settings.metric is None:
            return None
        state = read_adamw_state(policy, self.optimizer_state, max_grad_norm=self.max_grad_norm)
        if state is None:
            print_notes([f"no optimizer state in {self.model}, so {ADAMW} is NaN; give --optimizer-state"])
        return state

    def read(self, policy: Policy) -> Dump:
        """Read the rollouts to measure."""
        from gradscope.rollouts import read_checkpoint_dump

        how = {"temperature": self.settings.temperature, **self.reading}
        return read_checkpoint_dump(self.rollouts, policy, checkpoint_step(self.model), prompts=self.prompts, **how)

    def has_metric(self, policy: Policy) -> bool:
        """Return whether summed gradients are also computed in AdamW's metric."""
        return False

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int) -> SumsPlan | None:
        """Plan the summed gradients; None if there are none. Raises InputError if they do not fit."""
        return plan_sums(policy, batch, memory, metric=self.has_metric(policy)) if self.figures else None

    def following(self, policy: Policy, batch: TokenBatch, resources: Resources) -> Afterwards:
        """Return what follows the table within the same minutes."""
        sums = self.plan_sums(policy, batch, resources.vectors)
        return Afterwards() if sums is None else self.price(policy, sums, resources.processes)

    def price(self, policy: Policy, sums: SumsPlan, processes: Processes) -> Afterwards:
        """Return what follows the table, if these sums are a part of it."""
        return Afterwards((sums.forward_passes / processes.count,), prompts=sums.groups)

    def make_plan(self) -> Plan:
        """Predict the cost here or, without loading weights, on a machine of a stated speed."""
        if self.params == "adapter":
            raise InputError("--plan covers all parameters; leave out --params adapter, or --plan")
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
        with command_progress().stage("timing this machine"):
            return plan_batch(policy, batch, settings, speed=self.flops, **known)

    def _folder(self, policy: Policy, dump: Dump, settings: MeasureSettings) -> RunFolder:
        # Not the log's hash, since the log may have grown by later steps.
        read = {**self.reading, **dump.batch.key()}
        if settings.metric is not None:
            state = self.optimizer_state or find_policy_state(policy)
            read |= {"optimizer_state": state and optimizer_hash(state), "max_grad_norm": self.max_grad_norm}
        return measure_folder(self.out, policy, settings, read)


@dataclass(frozen=True)
class MeasureOwn(Measuring):
    """Measure a checkpoint on its own rollouts: those of the step it sampled, plus earlier ones if prompts are few."""

    prompts: ClassVar[int] = FEWEST
    later: Callable[[Policy, SumsPlan, Processes], Afterwards] | None = None
    """What follows the table; None: only sums."""

    def price(self, policy: Policy, sums: SumsPlan, processes: Processes) -> Afterwards:
        return (self.later or super().price)(policy, sums, processes)

    def has_metric(self, policy: Policy) -> bool:
        return (self.optimizer_state or find_policy_state(policy)) is not None

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """Add AdamW's metric if its state is there and fits."""
        settings = settle_minutes(self.settings, policy, device)
        known = self.optimizer_state or find_policy_state(policy)
        state, _, _ = read_step(policy, known, asked=self.optimizer_state is not None)
        return replace(settings, metric="adamw") if state is not None else settings

    def read(self, policy: Policy) -> Dump:
        read_step(policy, self.optimizer_state, asked=True)  # refuse it now, not after measuring
        return super().read(policy)
