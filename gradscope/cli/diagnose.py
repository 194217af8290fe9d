"""`gradscope diagnose`: diagnoses checkpoints on their rollouts, with an HTML page each."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from gradscope import __version__
from gradscope.cli.flags import Many, SamplingFlags, command_progress, pick
from gradscope.cli.follow import Following
from gradscope.cli.measuring import MeasuredRun, PlannedFlags
from gradscope.cli.pages import PAGE, in_words, make_facts, name_folders, trend_folder, write_trend
from gradscope.cli.run_folder import check_paths
from gradscope.cli.sample import Sample
from gradscope.diagnosis import (
    Case,
    DiagnosisChoices,
    DiagnosisSettings,
    asked_products,
    diagnose,
    follow,
    make_report,
    part_file,
    plan_products,
    settle_parts,
    write_report,
)
from gradscope.errors import InputError
from gradscope.gradients import (
    DEFAULT_MINUTES,
    TABLE,
    Afterwards,
    MeasureSettings,
    SumsPlan,
    describe_seconds,
    read_table,
)
from gradscope.policy import (
    ADAPTER_CONFIG,
    EMBEDDED,
    Policy,
    find_checkpoint,
    list_step_folders,
    model_of_step,
    shards_of,
    weights_hash,
)
from gradscope.rollouts import find_reader
from gradscope.runs import Processes, check_is_folder, file_hash, launched, plain_json, write_parquet
from gradscope.updates import SGD


@dataclass(frozen=True, kw_only=True)
class Diagnose(DiagnosisChoices, SamplingFlags, PlannedFlags):
    """Find out which tokens drive the updates of your checkpoints: one HTML page per checkpoint, with its data."""

    model: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ()
    """Checkpoint folders, or "embedded". Several get a page each, and a page for the trend over training steps."""
    out: Path | None = None
    """Folder for report.html, diagnosis.json, tokens.parquet, data/ and manifest.json, with a subfolder per checkpoint
    if there are several. An interrupted run resumes. Required unless --plan."""
    rollouts: Annotated[tuple[Path, ...], Many] = ()
    """Rollouts or a trainer's rollout log: one for all checkpoints, or one per checkpoint in the same order. Without
    any, rollouts are sampled from each checkpoint, with --task or --prompts."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(
            tokens_per_interval="enough", minutes=DEFAULT_MINUTES, module_groups=True
        )
    )
    compare: Annotated[bool | None, tyro.conf.arg(constructor=bool)] = None
    part: Annotated[tuple[str, ...], Many, tyro.conf.UseAppendAction] = ()
    """A question of your own: FILE.py:NAME, a file that is a part of the report (see the documentation of the report).
    Give the flag again for another."""
    follow: bool = False
    """Treat MODEL as a run's folder: diagnose each checkpoint as soon as it and its rollouts are complete, until the
    run has ended or nothing new has appeared for a day. --minutes applies to each checkpoint."""
    spike: Path | None = None
    """Instead: explain the step in this file, whose gradient norm was out of line (`RolloutWriter`'s or verl's kept
    step), at the checkpoint before it. Writes OUT/spike.html and every token's share of that gradient."""

    def run(self) -> None:
        if self.spike is not None:
            self._explain()
            return
        self.check()
        if self.plan:
            for model, rollouts in self._pairs():
                self._plan(model, rollouts)
            return
        if self.follow:
            self._follow()
            return
        folders = name_folders(self.model, self.out)
        if len(folders) > 1:
            trend_folder(self.out, [], overwrite=self.overwrite)  # before anything is measured
        done = [self._diagnose(*pair, folder) for pair, folder in zip(self._pairs(), folders, strict=True)]
        if len(done) > 1 and all(done):
            write_trend(self.model, folders, out=self.out, overwrite=self.overwrite)

    def _explain(self) -> None:
        """Explain a step in a file. Raises InputError for flags that say something else."""
        from gradscope.cli.spike import explain_step_file

        if len(self.model) != 1 or self.out is None:
            raise InputError(
                "--spike takes one checkpoint and --out; give the checkpoint before the step, and a folder"
            )
        own = {"--rollouts": self.rollouts, "--task": self.task, "--prompts": self.prompts, "--follow": self.follow}
        if given := [flag for flag, value in (own | {"--plan": self.plan}).items() if value]:
            raise InputError(f"{given[0]} cannot be combined with --spike, whose file has the step's responses")
        check_is_folder(self.out)
        explain_step_file(self.model[0], self.spike, self.out, self, self.settings)

    def check(self) -> None:
        """Raise InputError for contradictory flags, before anything is loaded."""
        if self.out is None and not self.plan:
            raise InputError("--out is missing; give a folder for the report")
        if self.out is not None:
            check_is_folder(self.out)
        if not self.model:
            raise InputError("no checkpoint is given; give a checkpoint folder, or 'embedded'")
        if self.follow:
            self._check_followed()
        else:
            check_paths(self.model, self.rollouts)
        if self.rollouts and len(self.rollouts) not in (1, len(self.model)):
            raise InputError(
                f"--rollouts names {len(self.rollouts)} files for {len(self.model)} checkpoints; give one for all, or "
                "one for each"
            )
        if self.rollouts and (self.task is not None or self.prompts is not None):
            raise InputError("--rollouts cannot be combined with --task or --prompts; leave one out")
        if not self.rollouts and (self.task is None) == (self.prompts is None):
            raise InputError("--rollouts is missing; give rollouts, or --task NAME or --prompts FILE to sample some")
        if self.plan and not self.rollouts:
            raise InputError("--plan needs rollouts; give --rollouts")
        if not self.rollouts and launched() > 1:
            raise InputError("several processes cannot sample here; sample first, and give the file with --rollouts")
        if not self.follow:
            self._check_files()
        super().check()
        self._diagnosis_settings(self.settings).check()

    def _check_followed(self) -> None:
        """Raise InputError for arguments that cannot be combined with --follow."""
        if len(self.model) > 1:
            raise InputError(f"--follow takes the folder of one run, but {len(self.model)} are given; give one")
        run = Path(self.model[0])
        is_alone = run.is_dir() and not list_step_folders(run) and model_of_step(run) is not None
        if is_alone or self.model[0] in EMBEDDED:
            raise InputError(f"{run} is a checkpoint, but --follow takes a run; give the run's folder")
        single = {"--plan": self.plan, "--step": self.step not in (None, "own")}
        single |= {"--optimizer-state": self.optimizer_state is not None}
        if given := [flag for flag, is_given in single.items() if is_given]:
            raise InputError(f"{given[0]} is for a single checkpoint, but --follow takes a run; leave one out")
        if self.format is not None:
            find_reader(self.format)
        if launched() > 1:
            raise InputError("--follow runs in a single process; run it without the launcher")

    def _follow(self) -> None:
        trend_folder(self.out, [], overwrite=self.overwrite)
        rollouts = self.rollouts[0] if self.rollouts else None
        asked = asdict(replace(self, model=(), rollouts=(), out=None, overwrite=False))
        paths = {"run": os.path.realpath(self.model[0]), "rollouts": rollouts and os.path.realpath(rollouts)}
        Following(
            Path(self.model[0]),
            rollouts,
            self.out,
            diagnose=lambda model, folder: self._diagnose(model, rollouts, folder),
            write=partial(write_trend, out=self.out, overwrite=self.overwrite),
            asked={"gradscope": __version__, **asked, **paths},
            defaults=plain_json(asdict(type(self)())),
            format=self.format,
            overwrite=self.overwrite,
        ).follow()

    def _check_files(self) -> None:
        """Raise InputError for missing files that would otherwise fail late."""
        for model in self.model:
            folder = Path(find_checkpoint(model))
            if not folder.is_dir():
                raise InputError(f"{model} is not a folder; give the folder of a checkpoint, or 'embedded'")
            own = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
            if not own and shards_of(folder) is None:
                raise InputError(f"{model} holds no config.json; give the folder of a checkpoint, or 'embedded'")
        of_rollouts = (self.format, self.step, self.reward_key)
        if not self.rollouts and any(value is not None for value in of_rollouts):
            raise InputError(
                "--format, --step and --reward-key apply to given rollouts; leave them out, or give --rollouts"
            )
        if self.optimizer_state is not None and len(self.model) != 1:
            raise InputError(
                f"--optimizer-state is for one checkpoint, but {len(self.model)} are given; leave it out: optimizer.pt "
                "in each checkpoint's folder is found automatically"
            )

    def _pairs(self) -> list[tuple[str, Path | None]]:
        """Pair each checkpoint with its rollouts; None: to be sampled."""
        given = self.rollouts or (None,)
        return list(zip(self.model, given * (len(self.model) // len(given)), strict=True))

    def _diagnose(self, model: str, rollouts: Path | None, folder: Path) -> bool:
        """Diagnose one checkpoint; return whether this process holds its page, which only the main one does."""
        asked = self
        if rollouts is None:
            rollouts = self._sample(model, folder)
            asked = replace(self, chat_template_kwargs=None)  # already applied to what was sampled
        measured = asked.measure(model, rollouts, folder)
        drawn = self._drawn(measured) if measured.is_main else None
        if not measured.holds("diagnosis", drawn, [PAGE]):
            self._write(model, measured, drawn)
        elif measured.is_main:
            print(f"already diagnosed with these arguments: {folder / PAGE}")
        return measured.is_main

    def _sample(self, model: str, folder: Path) -> Path:
        """Sample rollouts into the run's folder, under a name that identifies the sampling settings."""
        wanted = pick(self, SamplingFlags) | {"dtype": self.dtype, "device": self.device, "seed": self.settings.seed}
        wanted["temperature"] = 1.0 if self.settings.temperature is None else self.settings.temperature
        files = {"weights": weights_hash(find_checkpoint(model))}
        if self.prompts is not None and self.prompts.is_file():
            files["asked"] = file_hash(self.prompts)
        if self.chat_template_kwargs is not None:
            wanted["chat_template_kwargs"] = self.chat_template_kwargs
        told = json.dumps({**wanted, **files, "model": model}, default=str, sort_keys=True)
        path = folder / f"rollouts-{hashlib.sha256(told.encode()).hexdigest()[:8]}.jsonl"
        if not path.is_file():
            wanted |= {"base": self.base, "trust_remote_code": self.trust_remote_code}
            Sample(model=model, out=path, **wanted).sample()
        return path

    def _plan(self, model: str, rollouts: Path) -> None:
        """Print the cost of measuring and everything after it."""
        plan = self.make_plan(model, rollouts)
        print(plan)
        if plan.minutes is not None:
            print(f"Time limit {plan.minutes:g} min; steps and comparisons are made if time is left.")
            return
        made = {} if plan.sums is None else plan_products(*self._case(plan.policy, plan.sums))
        told = {stage: plan.pass_seconds * passes for stage, passes in made.items()}
        for part, seconds in told.items():
            print(f"    {part:<28}{describe_seconds(seconds)}")
        print(f"In all {describe_seconds(sum(plan.seconds.values()) + sum(told.values()))}, and loading.")

    def follow_table(self, policy: Policy, sums: SumsPlan, processes: Processes) -> Afterwards:
        return follow(*self._case(policy, sums), sums, processes.count)

    def _case(self, policy: Policy, sums: SumsPlan) -> tuple[Case, set[str]]:
        """Return what prices depend on, and the names of the products."""
        _, step, _ = self.read_step(policy)
        size, settings = sum(p.numel() for p in policy.model.parameters()), self._diagnosis_settings(self.settings)
        case = Case(settings, step or SGD, size, sums.forward_passes, metric=step is not None)
        return case, asked_products(settle_parts(settings.parts))

    def _diagnosis_settings(self, settings: MeasureSettings) -> DiagnosisSettings:
        """Return the settings, but for minutes and step. settings: of the measurement."""
        known = {"gradient_memory": self.gradient_memory, "parts": self.part, **pick(self, DiagnosisChoices)}
        return DiagnosisSettings(loss=settings.loss, seed=self.settings.seed, **known)

    def _drawn(self, measured: MeasuredRun) -> dict[str, Any]:
        """Return everything beside the table that affects the page, for the manifest."""
        settings = asdict(self._diagnosis_settings(measured.settings)) | {"minutes": measured.settings.minutes}
        drawn = {
            "settings": {name: value for name, value in settings.items() if name != "loss"},
            **self.of_steps(measured.policy),
            "optimizer_state_asked_for": self.optimizer_state is not None,  # otherwise it may be ignored
            "parts": {name: file_hash(part_file(name)) for name in self.part},
        }
        return plain_json(drawn)

    def _write(self, model: str, measured: MeasuredRun, drawn: dict[str, Any] | None) -> None:
        folder, policy, batch = measured.folder, measured.policy, measured.batch
        state, step, notes = self.read_step(policy)
        if state is None and measured.settings.metric is not None:
            raise InputError(f"the optimizer state of {model} has disappeared since it was measured; start again")
        if step is not None:
            step = replace(step, max_grad_norm=self.max_grad_norm)
        own = {"gradient_memory": measured.resources.vectors, "minutes": measured.minutes_left}
        table = read_table(measured.folder)
        found = diagnose(
            policy,
            batch,
            table,
            settings=replace(self._diagnosis_settings(measured.settings), step=step, **own),
            optimizer_state=state,
            processes=measured.resources.processes,
            progress=command_progress(),
            verdict_minutes=folder.manifest.get("verdict_minutes"),
        )
        if found is None:
            return
        facts = make_facts(model, measured, found, saved=state is not None)
        with command_progress().stage("writing the page"):
            report = make_report(found, policy, batch, title=f"gradscope diagnosis: {model}", facts=facts, notes=notes)
            with folder.writing():
                folder.stage()
                write_report(folder.staged, report)
                if not found.table.equals(table):  # it has every token's share now
                    write_parquet(folder.staged / TABLE, found.table)
                sums, scope = found.sums_plan and asdict(found.sums_plan), found.scope
                told = {"summed_gradients": sums, "summed_prompts": scope.summed}
                told |= {"supply": asdict(scope.supply), "own_responses": scope.own_responses}
                folder.publish(folder.manifest | {"diagnosis": drawn, **told})
        print(f"{in_words(found)}\n{folder.folder / PAGE}")
