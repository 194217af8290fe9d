"""`gradscope measure`: a token table, figures and a summary, in one folder.

One file: the flags, and one run's way through its folder, which `diagnose` and `compare` begin with.
"""

from __future__ import annotations

import json
import os
import shlex
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import torch
import tyro
from pyarrow import parquet

from gradscope.cli.flags import (
    MeasuredPolicyFlags,
    MemoryFlag,
    ReadingFlags,
    check_no_plan,
    command_progress,
    load_quietly,
    print_notes,
    quiet_transformers,
)
from gradscope.cli.manifest import describe_dump, make_key, make_manifest, refuse_reread
from gradscope.cli.measured import TABLE, Measured
from gradscope.cli.optimizer import read_step
from gradscope.diagnosis import sampling_error
from gradscope.errors import InputError
from gradscope.gradients import (
    ADAMW,
    BUDGET,
    EACH_PROMPT,
    PARAMETERS,
    PILOT,
    SAMPLING_PROBABILITY,
    MeasureSettings,
    Plan,
    Resources,
    Round,
    Stopwatch,
    SumsPlan,
    TableMeasurement,
    describe_seconds,
    join_rounds,
    measure_rounds,
    plan_batch_sums,
    settle_minutes,
)
from gradscope.intervals import interval_labels
from gradscope.policy import (
    AdamWState,
    Policy,
    checkpoint_step,
    find_device,
    find_policy_state,
    gradient_budget,
    hash_ahead,
    join_launch,
    optimizer_hash,
    read_adamw_state,
)
from gradscope.rollouts import Dump, TokenBatch, select_checkpoint_step
from gradscope.runs import RunFolder, write_parquet_parts

SUMMARY, THEORY = "figures/summary.txt", "figures/theory.txt"
"""Where in its folder a run keeps the summary that it prints, and what --theory adds."""
SUMMARIZED = ("response", "group", "interval", "weight", "log_one_minus_prob", SAMPLING_PROBABILITY, PARAMETERS)
"""Columns on which the manifest rests."""


def describe_speedup(speedup: float) -> str:
    """The speed of the fast mode on this machine, in words.

    >>> describe_speedup(0.5)
    'fast: rounded products are .5 times as fast as exact ones here; leave --fast out, exact norms take less time'
    """
    words = f"fast: rounded products are {speedup:.1f} times as fast as exact ones here".replace(" 0.", " .")
    return words if speedup > 1 else f"{words}; leave --fast out, exact norms take less time"


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
    chunk_rows: int | None = None
    """Positions × tokens of one batched backward, by default 1,536 or, for a small policy and on a GPU, more, as far as
    --chunk-memory goes; changes speed, memory and rounding only."""
    chunk_memory: int = 1 << 30
    """Bytes that one batched backward may take, or what responses measured together leave; changes speed and memory
    only."""
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

    def run(self) -> None:
        if self.plan:
            print(self.make_plan())
            return
        check_no_plan(flops=self.flops)
        self._check_constants()
        measured = self.measure()
        if self.figures:
            self._draw(measured)
        if self.figures and measured.processes.is_main:
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
        watch, (processes, device) = Stopwatch(), join_launch(self.device)
        with processes.together():
            hash_ahead(self.model)
            policy = load_quietly(self.model, **(self.loading | {"device": device}))
            with command_progress().stage("reading the rollouts"):
                dump = self.read(policy)
            settings = self.settle(policy, policy.device.type)
            cut = {"chunk_rows": self.chunk_rows, "chunk_memory": self.chunk_memory}
            cut |= {"optimizer_state": self._read_state(policy, settings), "processes": processes}
            cut["progress"] = command_progress()
            measurement = TableMeasurement(policy, dump.batch, settings, **cut)
        # What is free differs by process and by moment; all later looks are at this number.
        memory = gradient_budget(policy.device, processes) if self.gradient_memory is None else self.gradient_memory
        with processes.together():
            sums = self.plan_sums(policy, measurement.batch, memory)
            folder = RunFolder(self.out, self._key(policy, dump, measurement.settings))
            if processes.is_main and not self.overwrite:
                refuse_reread(folder, [dump], table=TABLE)
            found = folder.status(overwrite=self.overwrite) if processes.is_main else None
        measured = Measured(policy, dump, measurement, folder, memory, sums)
        if processes.is_main:
            print_notes(dump.remarks)
        if processes.gather([found])[0] != "finished":
            self._measure(measured, watch)
            processes.gather([None])  # the table is there
            return measured
        with processes.together():
            folder.check(TABLE)
        if processes.is_main:
            print(f"already measured with these arguments: {self.out / TABLE}")
        return measured

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """The settings for this policy on a device of this type."""
        return self.settings

    def _read_state(self, policy: Policy, settings: MeasureSettings) -> AdamWState | None:
        """AdamW's second moments, where norms in its metric are asked for."""
        if settings.metric is None:
            return None
        state = read_adamw_state(policy, self.optimizer_state, max_grad_norm=self.max_grad_norm)
        if state is None:
            print_notes([f"no optimizer state beside {self.model}: {ADAMW} is NaN; give --optimizer-state"])
        return state

    def read(self, policy: Policy) -> Dump:
        """The rollouts that are measured."""
        from gradscope.rollouts import read_dump

        dump = read_dump(self.rollouts, policy, temperature=self.settings.temperature, **self.reading)
        return select_checkpoint_step(dump, checkpoint_step(self.model))

    def has_metric(self, policy: Policy) -> bool:
        """Whether summed gradients are also made in AdamW's metric."""
        return False

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int) -> SumsPlan | None:
        """How the summed gradients will be made; None if there are none. InputError where they do not fit."""
        if not self.figures or (batch.advantages is None and batch.rewards is None):
            return None
        kept = {"keeps_prompts": self.keeps_prompts, "metric": self.has_metric(policy)}
        return plan_batch_sums(policy, batch, memory=memory, **kept)

    def reserve(self, measured: Measured) -> float:
        """Seconds of the minutes that what follows the table takes."""
        if measured.sums_seconds is None:
            return 0.0
        return measured.sums_limit if self.keeps_prompts else min(measured.sums_limit, measured.sums_seconds)

    def _check_constants(self) -> None:
        if self.theory and not self.figures:
            raise InputError("--theory is made with the figures; leave out --no-figures, or --theory")
        if self.constants < 0:
            raise InputError(f"--constants is {self.constants}; give 0 or more contexts")

    def make_plan(self) -> Plan:
        """What measuring takes here or, without the policy's weights, on a machine of a stated speed."""
        from gradscope.gradients import plan_batch
        from gradscope.policy import find_whole, outline_policy

        if self.params == "adapter":
            raise InputError("a plan is of all parameters; leave out --params adapter, or --plan")
        if self.flops is None:
            policy = load_quietly(self.model, **self.loading)
            device = policy.device
        else:
            quiet_transformers()
            names = ("dtype", "blocks", "trust_remote_code")
            policy = outline_policy(find_whole(self.model, self.base), **{name: getattr(self, name) for name in names})
            device = torch.device(find_device(self.device))
        batch = self.read(policy).batch
        settings = self.settle(policy, device.type if self.flops is None else "cuda")
        memory = gradient_budget(device) if self.gradient_memory is None else self.gradient_memory
        sums = self.plan_sums(policy, batch, memory)
        known = {"sums": sums, "keeps_prompts": self.keeps_prompts, "chunk_memory": self.chunk_memory}
        with command_progress().stage("trying how fast this machine is"):
            return plan_batch(policy, batch, settings, speed=self.flops, **known)

    def _key(self, policy: Policy, dump: Dump, settings: MeasureSettings) -> dict[str, Any]:
        from gradscope.rollouts import rollouts_hash

        read = {"rollouts": rollouts_hash(self.rollouts), **self.reading, "read": dump.batch.digest()}
        if settings.metric is not None:
            state = self.optimizer_state or find_policy_state(policy)
            read |= {"optimizer_state": state and optimizer_hash(state), "max_grad_norm": self.max_grad_norm}
        return make_key(policy, **read, settings=asdict(settings), blocks=policy.blocks_name)

    def _measure(self, measured: Measured, watch: Stopwatch) -> None:
        measurement, folder = measured.measurement, measured.folder
        processes, count = measurement.processes, len(measurement.batch)
        with measurement, ExitStack() as held:  # checks itself, before anything is written
            with processes.together():
                if processes.is_main:
                    held.enter_context(folder.writing())
                    self._announce(measurement, resumed=folder.begin(overwrite=self.overwrite))
            rounds = []
            if measurement.settings.minutes is not None:
                rounds = self._measure_rounds(measured, watch)
            else:
                left = [row for row in range(count) if not folder.has_part(row)] if processes.is_main else []
                with processes.together():
                    self._measure_share(measurement, folder, processes.gather(left))
            if not processes.is_main:
                return
            parts = join_rounds(measurement, rounds) if rounds else folder.read_parts(count)
            write_parquet_parts(folder.staged / TABLE, parts)
            known = parquet.read_schema(folder.staged / TABLE).names
            table = pd.read_parquet(folder.staged / TABLE, columns=[name for name in SUMMARIZED if name in known])
            sample = self._describe_sample(measurement, table, rounds, watch)
            folder.publish(self._manifest(measured, table) | {"sample": sample})
        print(f"{len(table):,} tokens of {count} responses: {folder.folder / TABLE}")
        if not isinstance(sample, str) and "error" in sample:
            print(sample["error"])

    def _announce(self, measurement: TableMeasurement, *, resumed: bool) -> None:
        if resumed:
            print(f"taking up the unfinished run in {self.out}")
        print_notes(measurement.notes)
        if (minutes := measurement.settings.minutes) is not None:
            print(
                f"measuring as large a sample of the {measurement.num_tokens:,} tokens as {minutes:g} minutes allow, "
                "loading and preparation among them"
                + (" (--tokens-per-interval none measures them all)" if self.settings.minutes is None else "")
            )
        if self.settings.fast:
            print(describe_speedup(measurement.meter.speedup))
        chosen, each = self.settings.tokens_per_interval, measurement.settings.tokens_per_interval
        if chosen in ("auto", "enough") and each:
            why = f"tokens are more than {BUDGET:,}" if chosen == "auto" else "tokens are of few prompts"
            print(
                f"measuring a random sample, {each:,} tokens of each interval at most: {measurement.num_tokens:,} "
                f"{why} (--tokens-per-interval none measures them all)"
            )

    def _measure_share(self, measurement: TableMeasurement, folder: RunFolder, left: list[int]) -> None:
        """Write the parts that are left and this process's; of several, the main one shows its own share."""
        counts = measurement.batch.response_mask.sum(1).tolist()
        mine, processes, missing = measurement.share(left), measurement.processes, set(left)
        ours = sum(counts[row] for group in mine for row in group if row in missing)
        total = sum(counts) if processes.count == 1 else ours
        with command_progress().stage("measuring", total, "tokens", done=total - ours) as advance:
            for group in mine:
                # All of an unfinished group, as before it was interrupted: its numbers are the same then.
                for row, frame in zip(group, measurement.measure_responses(group), strict=True):
                    if row in missing:
                        folder.write_part(row, frame)
                        advance(counts[row])

    def _measure_rounds(self, measured: Measured, watch: Stopwatch) -> list[Round]:
        """All rounds, those of an interrupted run among them; each is written when it has ended."""
        measurement, folder = measured.measurement, measured.folder
        finished, processes = [], measurement.processes
        while processes.is_main and folder.has_part(len(finished)):
            finished.append(Round.of_part(folder.read_part(len(finished))))
        rounds = processes.gather(finished)
        if not rounds and processes.is_main and watch.seconds() > 60 * measurement.settings.minutes:
            print(
                f"preparation alone took {describe_seconds(watch.seconds())}: {PILOT} tokens of each interval are "
                "measured all the same; give more minutes for more"
            )
        reserve = self.reserve(measured)
        for done in measure_rounds(measurement, watch, tuple(rounds), reserve=reserve, progress=command_progress()):
            if processes.is_main:
                folder.write_part(len(rounds), done.to_part())
            rounds.append(done)
        return rounds

    def _draw(self, measured: Measured) -> None:
        """Add figures and summary to a finished run, unless they are there: the table is safe by then.

        Of several processes all sum gradients, and the main one goes on.
        """
        from gradscope.diagnosis import summarize_measurement, write_figures

        folder, policy, measurement = measured.folder, measured.policy, measured.measurement
        processes, progress = measured.processes, command_progress()
        drawn = {"constants": self.constants, "gradient_memory": self.gradient_memory}
        known = processes.is_main and (folder.manifest or {}).get("figures") == drawn
        found = known and (self.out / SUMMARY).is_file()
        if processes.gather([found])[0]:
            return
        with ExitStack() as held:
            with processes.together():
                if processes.is_main:
                    held.enter_context(folder.writing())
                    folder.stage()
            table = measured.read_table()
            summary = summarize_measurement(
                policy,
                measurement.batch,
                table,
                measurement.settings,
                contexts=self.constants if processes.is_main else 0,
                resources=Resources(measured.gradient_memory, processes=processes, progress=progress),
            )
            if not processes.is_main:
                return
            write_figures(folder.staged / "figures", policy, table, summary, progress=progress)
            told = {} if summary.gradients is None else {"summed_gradients": asdict(summary.gradients.plan)}
            folder.publish(folder.manifest | {"figures": drawn, **told})

    def _manifest(self, measured: Measured, table: pd.DataFrame) -> dict[str, Any]:
        policy, measurement, key = measured.policy, measured.measurement, measured.folder.key
        meter, check = measurement.meter, measurement.check
        return make_manifest(
            self.model,
            policy,
            key,
            rollouts=describe_dump(self.rollouts, measured.dump, key["rollouts"]),
            settings=asdict(measurement.settings),
            seed=self.settings.seed,
            device_map=getattr(policy.model, "hf_device_map", None) if self.device_map is not None else None,
            processes=measurement.processes.count,
            threads=torch.get_num_threads(),
            pass_seconds=measured.pass_seconds,
            self_check="off" if check is None else asdict(check),
            engine={
                "blocks": policy.blocks_name,
                "rules": "the model's graph" if meter.precision is None else "decoder",
                "precision": meter.precision or "exact",
                "joint": meter.split_point,
                "batched": meter.graph.batched,
                "modules_by_rule": len(meter.ownership.rules),
                "parameters_on_the_general_path": list(meter.ownership.general),
            },
            logged=list(measurement.notes),
            tokens=len(table),
            tokens_measured=int(table[PARAMETERS].notna().sum()),
        )

    def _describe_sample(
        self, measurement: TableMeasurement, table: pd.DataFrame, rounds: list[Round], watch: Stopwatch
    ) -> dict[str, Any] | str:
        """Which tokens have norms, who said so, and what other tokens would change."""
        settings, times = measurement.settings, None
        if (each := settings.tokens_per_interval) is None and not rounds:
            return "every token"
        if not rounds:
            reasons = {"auto": f"the default above {BUDGET:,} tokens", "enough": f"{EACH_PROMPT} for each prompt"}
            why = reasons.get(self.settings.tokens_per_interval, "asked for")
        else:
            each, measuring = rounds[-1].each, sum(done.seconds for done in rounds)
            times = {"preparing": watch.seconds() - measuring, "measuring": measuring}
            why = "minutes" if self.settings.minutes is not None else "minutes, the default of a large policy"
        sample = {"tokens_per_interval": each, "why": why, "drawn": settings.sample}
        if times is not None:
            told = [{"tokens_per_interval": done.each, "seconds": done.seconds} for done in rounds]
            sample |= {"seconds": times, "rounds": told}

        def seconds(more: float) -> float:
            """Seconds of a run that measures so many times the tokens."""
            size = round(min(measurement.sample.largest, more * each))
            costs = [measurement.cost_of_more(0, end) for end in (size, each)]
            return times["preparing"] + times["measuring"] * costs[0] / costs[1]

        rng = np.random.default_rng(settings.seed)
        error = sampling_error(table, interval_labels(measurement.edges), seed=rng)
        if error is not None:
            sample["error"] = error.in_words(None if times is None else seconds)
        return sample


@dataclass(frozen=True)
class MeasureOwn(Measure):
    """Measure a checkpoint on its own rollouts: the step that it sampled, where a log holds several."""

    keeps_prompts: ClassVar[bool] = True

    def has_metric(self, policy: Policy) -> bool:
        return (self.optimizer_state or find_policy_state(policy)) is not None

    def settle(self, policy: Policy, device: str) -> MeasureSettings:
        """In AdamW's metric, too, where its state is there and fits."""
        settings = settle_minutes(self.settings, policy, device)
        known = self.optimizer_state or find_policy_state(policy)
        state, _, _ = read_step(policy, known, asked=self.optimizer_state is not None)
        return replace(settings, metric="adamw") if state is not None else settings

    def read(self, policy: Policy) -> Dump:
        read_step(policy, self.optimizer_state, asked=True)  # refused here, not when all is measured
        return super().read(policy)
