"""A measurement in a folder, with its flags: what `measure` does, and how `diagnose` and `compare` begin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
import tyro

from gradscope.cli.flags import (
    MemoryFlag,
    ReadingFlags,
    command_progress,
    load_quietly,
    print_notes,
    quiet_transformers,
)
from gradscope.cli.run_folder import check_paths
from gradscope.diagnosis import judge_sample
from gradscope.errors import InputError
from gradscope.gradients import (
    ADAMW,
    AFTER,
    DEFAULT_MINUTES,
    TABLE,
    Afterwards,
    Hooks,
    MeasureSettings,
    Plan,
    Resources,
    Stopwatch,
    SumsPlan,
    check_settings,
    describe_reread,
    key_of,
    measure_folder,
    measure_into,
    plan_batch,
    plan_sums,
    prepare_measurement,
    settle_batch,
    settle_minutes,
    with_logprobs_of,
)
from gradscope.objective import LOGPROB, LossSettings, Quantity, make_quantity, settle_loss
from gradscope.policy import (
    AdamWState,
    Policy,
    checkpoint_step,
    find_device,
    find_optimizer_file,
    find_policy_state,
    find_whole,
    hash_ahead,
    join_launch,
    optimizer_hash,
    outline_policy,
    policy_hashes,
    read_adamw_state,
    read_state,
)
from gradscope.resampling import FEWEST
from gradscope.rollouts import READER, Dump, TokenBatch, read_checkpoint_dump, rollouts_hash
from gradscope.runs import ALONE, Processes, RunFolder, launched
from gradscope.updates import StepSettings, read_moments, state_step

OTHERS = {"reference": "ref_logprobs", "teacher": "teacher_logprobs"}
"""Flag that names another policy → the column of its log π."""
OF_STEPS = ("step", "other-step", "pooled")
"""Kinds of notes on which of a log's steps were taken."""


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
    def is_main(self) -> bool:
        return self.resources.processes.is_main

    def holds(self, entry: str, asked: Any, files: Iterable[str]) -> bool:
        """Return, in all processes, whether the folder has these files, made with what its manifest's entry says."""
        found = self.is_main and self.folder.manifest.get(entry) == asked
        found = found and all((self.folder.folder / name).is_file() for name in files)
        return self.resources.processes.gather([found])[0]

    @property
    def left(self) -> float | None:
        """Seconds left; None without a time limit."""
        return None if self.settings.minutes is None else max(1.0, 60 * self.settings.minutes - self.watch.seconds())

    @property
    def minutes_left(self) -> float | None:
        """Minutes left for everything before the page is written; None without a time limit."""
        return None if self.left is None else max(1.0, self.left - AFTER * self.watch.slowness()) / 60


@dataclass(frozen=True, kw_only=True)
class MeasuringFlags(ReadingFlags):
    """A command that begins with a measurement in a folder: its flags, and how it measures."""

    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="enough", minutes=DEFAULT_MINUTES)
    )
    optimizer_state: Path | None = None
    """AdamW's state_dict, or the folder of its shards; none: the one in the checkpoint's folder, if it fits. measure
    uses it for --metric adamw."""
    max_grad_norm: float | None = 1.0
    """The run's gradient clipping threshold; none: no clipping. measure uses it for --metric adamw."""
    gradient_memory: MemoryFlag = None
    """Bytes for summed gradients (by interval and prompt, or by weighting). Beyond these, they are sketched, with a
    stated error, which the confidence intervals of diagnose include."""
    teacher: str | None = None
    """The teacher of a distillation: a checkpoint with the policy's tokenizer. It is run on the same tokens for their
    log ν, in place of the log's."""
    reference: str | None = None
    """The reference policy of a preference loss or KL penalty: a checkpoint with the policy's tokenizer. It is run on
    the same tokens for their log π_ref, in place of the log's."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""

    own: ClassVar[bool] = True
    """Whether it is about the checkpoint's update: earlier steps of the log are added if prompts are few, and AdamW's
    metric if its state is there."""
    chunk_memory: ClassVar[int | None] = None
    """Bytes of a batched backward pass; a flag of measure alone."""
    of: ClassVar[str | None] = None
    """Another quantity than log π; a flag of measure alone."""

    def check(self) -> None:
        """Raise InputError for settings out of range and missing files, before anything is loaded."""
        check_settings(self.settings)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"--max-grad-norm is {self.max_grad_norm}; give a number above 0, or none")
        if self.optimizer_state is not None and find_optimizer_file(self.optimizer_state) is None:
            raise InputError(f"{self.optimizer_state} does not exist; give the file of an AdamW state_dict")

    def measure(self, model: str, rollouts: Path, out: Path) -> MeasuredRun:
        """Measure into the folder, unless it is finished."""
        if self.device_map is not None and launched() > 1:
            raise InputError("--device-map needs a single process, but several were launched; leave it out")
        check_paths([model], [rollouts])
        watch, (processes, device) = Stopwatch(), join_launch(self.device)
        resources = Resources(self.gradient_memory, self.chunk_memory, processes=processes, progress=command_progress())
        with processes.together():
            hash_ahead(model)
            policy = load_quietly(model, self.loading | {"device": device})
            with command_progress().stage("reading the rollouts"):
                dump = self._read(model, rollouts, policy)
        dump, others, of = self._ask_others(policy, dump, device, processes)
        with processes.together():
            settings = self.settings if self.of else self._settle(policy, policy.device.type, dump)
            dump = replace(dump, batch=settle_loss(dump.batch, settings.loss))
            state = self._read_metric(model, policy, settings)
        # Free memory differs by process and moment: fix it once for all.
        resources = resources.settle(policy.device)
        with processes.together():
            sums = self.plan_sums(policy, settle_batch(settings, dump.batch), resources.vectors, settings.loss)
            following = Afterwards() if sums is None else self.follow_table(policy, sums, processes)
            known = {"optimizer_state": state, "resources": resources, "watch": watch, "following": following}
            measurement = prepare_measurement(policy, dump.batch, settings, **known, of=of, tell=print)
            others |= key_of(of)
            log, folder = rollouts_hash(rollouts), self._folder(out, policy, dump, measurement.settings, others)
            if processes.is_main:
                if not self.overwrite:
                    refuse_reread(folder, dump, log)
                folder.status(overwrite=self.overwrite)
                print_notes(dump.remarks)
                if dump.loss is not None and self.loss_flags:
                    print_notes([f"flags override the log's loss settings: {', '.join(self.loss_flags)}"])
        facts = {"model": model, "rollouts": describe_dump(rollouts, dump, log)}
        facts |= {name: getattr(self, name) for name in OTHERS if name in others}
        facts["device_map"] = getattr(policy.model, "hf_device_map", None) if self.device_map is not None else None
        hooks = Hooks(print) if self.of else Hooks(print, partial(judge_sample, measurement))
        measure_into(measurement, folder, facts=facts, asked=self.settings, overwrite=self.overwrite, hooks=hooks)
        if measurement.pass_seconds is None and measurement.settings.minutes is not None:  # already finished
            watch.earlier = sum(folder.manifest["sample"]["seconds"].values())
        return MeasuredRun(policy, measurement.whole, measurement.settings, folder, resources, watch)

    def find_state(self, policy: Policy) -> Path | None:
        """Return the file of the optimizer's state: the one given, or the checkpoint's own."""
        return self.optimizer_state or find_policy_state(policy)

    def read_step(self, policy: Policy) -> tuple[dict[str, Any] | None, StepSettings | None, list[str]]:
        """Return AdamW's state, the step that continues from it, and notes on both."""
        return read_step(policy, self.find_state(policy), asked=self.optimizer_state is not None)

    def of_steps(self, policy: Policy) -> dict[str, Any]:
        """Return what determines the optimizer's steps, for a manifest or key."""
        state = self.find_state(policy)
        return {"optimizer_state": state and optimizer_hash(state), "max_grad_norm": self.max_grad_norm}

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int, loss: LossSettings) -> SumsPlan | None:
        """Plan the summed gradients; None if there are none. Raises InputError if they do not fit."""
        return plan_sums(policy, batch, memory, loss=loss, metric=self.own and self.find_state(policy) is not None)

    def follow_table(self, policy: Policy, sums: SumsPlan, processes: Processes) -> Afterwards:
        """Return what follows the table within the same minutes, of which these sums are a part."""
        return Afterwards((sums.forward_passes / processes.count,), prompts=sums.groups)

    def _settle(self, policy: Policy, device: str, dump: Dump) -> MeasureSettings:
        """Return the settings for this policy on a device of this type, with the log's loss."""
        settings = replace(self.settings, loss=self.own_loss(self.settings.loss, dump))
        if not self.own:
            return settings
        settings = settle_minutes(settings, policy, device)
        return settings if self.read_step(policy)[0] is None else replace(settings, metric="adamw")

    def _read_metric(self, model: str, policy: Policy, settings: MeasureSettings) -> AdamWState | None:
        """Read AdamW's second moments if norms in its metric are requested."""
        if settings.metric is None:
            return None
        state = read_adamw_state(policy, self.optimizer_state, max_grad_norm=self.max_grad_norm)
        if state is None:
            print_notes([f"no optimizer state in {model}, so {ADAMW} is NaN; give --optimizer-state"])
        return state

    def _read(self, model: str, rollouts: Path, policy: Policy) -> Dump:
        """Read the rollouts to measure."""
        how = {"temperature": self.settings.temperature, "prompts": FEWEST if self.own else 0, **self.reading}
        return read_checkpoint_dump(rollouts, policy, checkpoint_step(model), **how)

    def _ask_others(
        self, policy: Policy, dump: Dump, device: str | None, processes: Processes
    ) -> tuple[Dump, dict[str, Any], Quantity]:
        """Return the rollouts with log π of the policies that flags name, what tells these from others, by flag, and
        the quantity to measure, which may have the teacher instead."""
        known, of = {}, make_quantity(self.of or LOGPROB)
        for name in (name for name in OTHERS if getattr(self, name) is not None):
            with processes.together():
                loading = {"device": device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
                other = load_quietly(getattr(self, name), loading)
                known[name] = policy_hashes(other)
                if name == "teacher" and known[name] == policy_hashes(policy):
                    raise InputError("the teacher is the policy itself, and teaches nothing; give another checkpoint")
            if name == "teacher" and of.asks_teacher:
                of = replace(of, teacher=other)
                continue
            with command_progress().stage(f"asking the {name}"):
                told = {"policy": policy, "processes": processes}
                dump = replace(dump, batch=with_logprobs_of(other, dump.batch, OTHERS[name], **told))
        return dump, known, of

    def _folder(
        self, out: Path, policy: Policy, dump: Dump, settings: MeasureSettings, others: dict[str, Any]
    ) -> RunFolder:
        # Not the log's hash, since the log may have grown by later steps.
        batch = replace(dump.batch, **{column: None for name, column in OTHERS.items() if name in others})
        known = self.reading | batch.key() | ({} if settings.metric is None else self.of_steps(policy))
        return measure_folder(out, policy, settings, known | others)


@dataclass(frozen=True, kw_only=True)
class PlannedFlags(MeasuringFlags):
    """A command that measures, or only predicts what that costs."""

    plan: bool = False
    """Only print the estimated cost: FLOPs, seconds, memory. Measures a few tokens and writes nothing."""
    flops: float | None = None
    """With --plan: plan for another machine with this many FLOP/s, without loading weights or measuring."""

    def check(self) -> None:
        super().check()
        if self.flops is not None and not self.plan:
            raise InputError(f"--flops is {self.flops}, but it needs --plan; add --plan, or leave it out")

    def make_plan(self, model: str, rollouts: Path) -> Plan:
        """Predict the cost here or, without loading weights, on a machine of a stated speed."""
        if self.params == "adapter":
            raise InputError("--plan covers all parameters; leave out --params adapter, or --plan")
        if self.flops is None:
            policy = load_quietly(model, self.loading)
            device = policy.device
        else:
            quiet_transformers()
            known = {"dtype": self.dtype, "blocks": self.blocks, "trust_remote_code": self.trust_remote_code}
            policy = outline_policy(find_whole(model, self.base), **known)
            device = torch.device(find_device(self.device))
        dump = self._read(model, rollouts, policy)
        if self.flops is None:
            dump, *_ = self._ask_others(policy, dump, self.device, ALONE)
        else:  # no weights are loaded, and no numbers needed
            empty = torch.zeros(dump.batch.input_ids.shape)
            named = {column: empty for name, column in OTHERS.items() if getattr(self, name) is not None}
            dump = replace(dump, batch=replace(dump.batch, **named))
        print_notes([note for note in dump.notes if note.kind in OF_STEPS])
        settings = self._settle(policy, device.type if self.flops is None else "cuda", dump)
        dump = replace(dump, batch=settle_loss(dump.batch, settings.loss))
        resources = Resources(self.gradient_memory, self.chunk_memory).settle(device)
        sums = self.plan_sums(policy, dump.batch, resources.vectors, settings.loss)
        known = {"speed": self.flops, "sums": sums, "chunk_memory": resources.activations}
        with command_progress().stage("timing this machine"):
            return plan_batch(policy, dump.batch, settings, **known)


def read_step(
    policy: Policy, path: Path | None, *, asked: bool
) -> tuple[dict[str, Any] | None, StepSettings | None, list[str]]:
    """Return AdamW's state from the file, the step that continues from it, and notes on both.

    asked: whether the user named the file. If it does not fit the policy, it raises InputError; a file that was found
    automatically is ignored instead.
    """
    if path is None:
        return None, None, []
    try:
        state = read_state(path)
        step = state_step(state)
        step.check()
        read_moments(policy.model, step, state)
    except InputError as error:
        if asked:
            raise InputError(error.reason, path=path) from error
        return None, None, [f"{path.name} beside the checkpoint is ignored: {error.reason}"]
    used = "the initial ones" if step.learning_rate is None else f"{step.learning_rate:g}"
    rate = f"the optimizer's learning rate is 0 (the end of its schedule); steps use {used} instead"
    return state, step, [] if any(float(group["lr"]) > 0 for group in state["param_groups"]) else [rate]


def describe_dump(path: Path, dump: Dump, sha256: str) -> dict[str, Any]:
    """Describe rollouts for a manifest: file, hash, format and notes."""
    step = "; ".join(note for note in dump.notes if note.kind in OF_STEPS) or None
    other = any(note.kind == "other-step" for note in dump.notes)
    told = {"path": str(path), "sha256": sha256, "format": dump.format, "reader": READER, "notes": list(dump.notes)}
    return told | {"step_note": step, "other_step": other, "loss": dump.loss}


def refuse_reread(folder: RunFolder, dump: Dump, sha256: str) -> None:
    """Raise InputError if the folder's run has files of this hash and the same settings, but was read differently."""
    manifest = folder.manifest or {}
    changed = folder.changes(manifest).keys()
    same = (manifest.get("rollouts") or {}).get("sha256") == sha256
    if not same or "rollouts" not in changed or changed - {"rollouts", "gradscope"}:
        return
    told, path = "", folder.folder / TABLE
    if path.is_file():
        told = describe_reread(pd.read_parquet(path, columns=["group"]), dump.batch)
    raise InputError(
        f"{folder.folder} was made from these rollouts by an earlier version, which {told or 'read them differently'}; "
        "its results may be wrong: give --overwrite to redo it, or another --out"
    )
