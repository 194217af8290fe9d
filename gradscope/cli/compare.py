"""`gradscope compare`: what each token weighting would do with your batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from gradscope.cli.flags import Many, MeasuredPolicyFlags, MemoryFlag, ReadingFlags
from gradscope.cli.measuring import MeasuredRun, MeasureOwn
from gradscope.cli.optimizer import read_step
from gradscope.diagnosis import supply_of
from gradscope.errors import InputError
from gradscope.gradients import DEFAULT_MINUTES, Afterwards, MeasureSettings, Resources, SumsPlan, plan_sums, read_table
from gradscope.objective import COMPARED, make_weighting, spell_out
from gradscope.policy import Policy, find_optimizer_file, find_policy_state, optimizer_hash
from gradscope.rollouts import TokenBatch, own_first
from gradscope.runs import file_hash, plain_json, write_parquet, write_text
from gradscope.updates import SGD, ComparisonSettings, compare, compare_cost, describe, distinct_rows

TABLE, BY_INTERVAL, WEIGHTS, SUMMARY = "compare.csv", "by_interval.csv", "weights.parquet", "summary.txt"
FIGURE = "figures/compare.png"


@dataclass(frozen=True)
class MeasureCompared(MeasureOwn):
    """Measure the batch on which weightings are then compared."""

    figures: bool = False
    rows: int = 0
    """Approximate number of rows of weights."""
    take_steps: bool = False

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int) -> SumsPlan | None:
        return plan_sums(policy, batch, memory)

    def following(self, policy: Policy, batch: TokenBatch, resources: Resources) -> Afterwards:
        passes = compare_cost(self.rows, metric=self.has_metric(policy), take_steps=self.take_steps)
        return replace(super().following(policy, batch, resources), passes=(passes,), least=2)


@dataclass(frozen=True, kw_only=True)
class Compare(ReadingFlags, MeasuredPolicyFlags):
    """Compare token weightings with plain GRPO on your batch: which tokens each favours, norm and direction of its
    update, and how much of its gradient is signal, with confidence intervals over prompts."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder (transformers or LoRA adapter), or "embedded"; preferably a policy in training."""
    rollouts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet with a row per response, or a trainer's rollout log: a file or a folder."""
    out: Path
    """Folder for compare.csv, by_interval.csv, weights.parquet, summary.txt, figures/, tokens.parquet and
    manifest.json. An interrupted run resumes."""
    weightings: Annotated[tuple[str, ...], Many, tyro.conf.arg(aliases=["--methods"])] = ()
    """NAME[:key=value,…] or FILE.py:NAME[:key=value,…]. Slashes separate several values of a key:
    reweight:alpha=.1/.3/.5. none: seventeen of them, as far as the rollouts have the columns."""
    take_steps: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also take each weighting's real optimizer step and undo it; with the saved optimizer, or else SGD."""
    aggregation: Literal["token-mean", "sequence"] = "token-mean"
    """How losses are averaged: over all tokens, or over responses after averaging each response's tokens."""
    settings: Annotated[MeasureSettings, tyro.conf.arg(name="")] = field(
        default_factory=lambda: MeasureSettings(tokens_per_interval="enough", minutes=DEFAULT_MINUTES)
    )
    optimizer_state: Path | None = None
    """AdamW's state_dict, or the folder of its shards; none: the one in MODEL's folder, if it fits."""
    max_grad_norm: float | None = 1.0
    """The run's gradient clipping threshold; none: no clipping."""
    gradient_memory: MemoryFlag = None
    """Bytes for vectors as long as the parameters. Determines how many weightings are processed at a time, and whether
    their gradients are exact or sketched."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""

    def run(self) -> None:
        for name in self.weightings:
            [*map(make_weighting, spell_out(name))]  # refused before anything is loaded
        if self.take_steps and self.aggregation != "token-mean":
            raise InputError("--take-steps uses the mean over tokens; leave out --aggregation")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(f"--max-grad-norm is {self.max_grad_norm}; give a number above 0, or none")
        if self.optimizer_state is not None and find_optimizer_file(self.optimizer_state) is None:
            raise InputError(f"{self.optimizer_state} does not exist; give the file of an AdamW state_dict")
        read = self.reading | {"optimizer_state": self.optimizer_state, "max_grad_norm": self.max_grad_norm}
        read |= {"overwrite": self.overwrite, "gradient_memory": self.gradient_memory, "rows": self._rows}
        read |= {"take_steps": self.take_steps, "loss_flags": self.loss_flags}
        measured = MeasureCompared(self.model, self.rollouts, self.out, self.settings, **read | self.loading)
        self._compare(measured.measure())

    @property
    def _rows(self) -> int:
        """Estimate the rows of weights before measuring; on-policy, half of the default weightings coincide."""
        return sum(len(spell_out(name)) for name in self.weightings) or len(COMPARED) // 2 + 1

    def _comparison_settings(self, measured: MeasuredRun) -> ComparisonSettings:
        """Return the settings, without the step."""
        own = {"aggregation": self.aggregation, "take_steps": self.take_steps, "seed": self.settings.seed}
        return ComparisonSettings(loss=measured.settings.loss, **own)

    def _compare(self, measured: MeasuredRun) -> None:
        processes, asked = measured.resources.processes, self._asked(measured)
        found = processes.is_main and measured.folder.manifest.get("comparison") == asked
        found = found and all((self.out / name).is_file() for name in (TABLE, BY_INTERVAL, WEIGHTS, SUMMARY))
        if not processes.gather([found])[0]:
            self._write(measured, asked)
        elif processes.is_main:
            print(f"already compared with these arguments: {self.out / TABLE}")
        if processes.is_main:
            print(f"\n{(self.out / SUMMARY).read_text(encoding='utf-8').rstrip()}")

    def _asked(self, measured: MeasuredRun) -> dict[str, Any]:
        """Return everything beside the table that affects the comparison, for the manifest."""
        state = self._find_state(measured)
        asked = {
            "weightings": self.weightings,
            "files": [
                file_hash(Path(f"{file}.py")) for name in self.weightings if (file := name.rpartition(".py:")[0])
            ],
            "take_steps": self.take_steps,
            "aggregation": self.aggregation,
            "loss": asdict(measured.settings.loss),
            "optimizer_state": None if state is None else optimizer_hash(state),
            "max_grad_norm": self.max_grad_norm,
            "gradient_memory": self.gradient_memory,
        }
        return plain_json(asked)

    def _find_state(self, measured: MeasuredRun) -> Path | None:
        return self.optimizer_state or find_policy_state(measured.policy)

    def _fitting_prompts(self, measured: MeasuredRun) -> list[int]:
        """Return the prompts to compare on: all measured ones, or as many as the remaining time allows."""
        table = read_table(measured.folder)
        prompts = table["group"].unique()
        if measured.left is None:
            return prompts.tolist()
        known = {"metric": measured.settings.metric is not None, "take_steps": self.take_steps}
        rows = distinct_rows(table, self.weightings or None, settings=self._comparison_settings(measured))
        each = compare_cost(rows, **known) * measured.folder.manifest["pass_seconds"] / len(prompts)
        (fits,) = measured.resources.processes.gather([max(2, int(measured.left / each))])[:1]
        drawn = torch.from_numpy(np.random.default_rng(self.settings.seed).permutation(prompts))
        return own_first(measured.batch, drawn)[:fits].tolist()

    def _write(self, measured: MeasuredRun, asked: dict[str, Any]) -> None:
        from gradscope.plots import plot_comparison, save_figure

        folder, policy = measured.folder, measured.policy
        table, chosen = read_table(folder), self._fitting_prompts(measured)
        state, step, notes = read_step(policy, self._find_state(measured), asked=self.optimizer_state is not None)
        deadline = None if measured.left is None else monotonic() + measured.left
        found = compare(
            policy,
            measured.batch.of_prompts(chosen),
            self.weightings or None,
            table=table[table["group"].isin(chosen)].reset_index(drop=True),
            optimizer_state=state,
            settings=replace(
                self._comparison_settings(measured), step=replace(step or SGD, max_grad_norm=self.max_grad_norm)
            ),
            resources=replace(measured.resources, micro_batch=4, deadline=deadline),
        )
        if not measured.resources.processes.is_main:
            return
        chosen_rows = table[table["group"].isin(chosen)]
        found = replace(found, supply=supply_of(chosen_rows, measured.batch, folder.manifest.get("verdict_minutes")))
        if len(chosen) < folder.manifest["prompts"]["of"]:
            told = f"Compared on {len(chosen):,} of {folder.manifest['prompts']['of']:,} prompts, drawn at random"
            notes = [*notes, f"{told}: as many as the minutes allow."]
        with folder.writing():
            folder.stage()
            write_text(folder.staged / TABLE, found.statistics().to_csv(index=False))
            write_text(folder.staged / BY_INTERVAL, found.by_interval.to_csv(index=False))
            write_parquet(folder.staged / WEIGHTS, found.weights)
            write_text(folder.staged / SUMMARY, "\n\n".join([describe(found), *notes]) + "\n")
            save_figure(plot_comparison(found.table, found.by_interval, found.labels), folder.staged / FIGURE)
            folder.publish(folder.manifest | {"comparison": asked})
        print(f"weightings: {self.out / TABLE}; figure: {self.out / FIGURE}")
