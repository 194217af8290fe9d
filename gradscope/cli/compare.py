"""`gradscope compare`: what each token weighting would do with your batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from gradscope.cli.flags import Many, Model, Rollouts, pick
from gradscope.cli.measuring import MeasuredRun, MeasuringFlags
from gradscope.diagnosis import supply_of
from gradscope.errors import InputError
from gradscope.gradients import Afterwards, MeasureSettings, SumsPlan, plan_sums, read_table
from gradscope.objective import COMPARED, LossSettings, make_weighting, spell_out
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, own_first
from gradscope.runs import Processes, file_hash, plain_json, write_parquet, write_text
from gradscope.updates import SGD, ComparisonChoices, ComparisonSettings, compare, compare_cost, describe, distinct_rows

TABLE, BY_INTERVAL, WEIGHTS, SUMMARY = "compare.csv", "by_interval.csv", "weights.parquet", "summary.txt"
FIGURE = "figures/compare.png"


@dataclass(frozen=True, kw_only=True)
class Compare(ComparisonChoices, MeasuringFlags):
    """Compare token weightings with plain GRPO on your batch: which tokens each favours, norm and direction of its
    update, and how much of its gradient is signal, with confidence intervals over prompts."""

    model: Model
    """Checkpoint folder (transformers or LoRA adapter), or "embedded"; preferably a policy in training."""
    rollouts: Rollouts
    """JSONL or parquet with a row per response, or a trainer's rollout log: a file or a folder."""
    out: Path
    """Folder for compare.csv, by_interval.csv, weights.parquet, summary.txt, figures/, tokens.parquet and
    manifest.json. An interrupted run resumes."""
    weightings: Annotated[tuple[str, ...], Many, tyro.conf.arg(aliases=["--methods"])] = ()
    """NAME[:key=value,…] or FILE.py:NAME[:key=value,…]. Slashes separate several values of a key:
    reweight:alpha=.1/.3/.5. none: seventeen of them, as far as the rollouts have the columns."""
    take_steps: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def run(self) -> None:
        for name in self.weightings:
            [*map(make_weighting, spell_out(name))]  # refused before anything is loaded
        if self.take_steps and self.aggregation != "token-mean":
            raise InputError("--take-steps uses the mean over tokens; leave out --aggregation")
        self.check()
        self._comparison_settings(self.settings).check()
        self._compare(self.measure(self.model, self.rollouts, self.out))

    def plan_sums(self, policy: Policy, batch: TokenBatch, memory: int, loss: LossSettings) -> SumsPlan | None:
        return plan_sums(policy, batch, memory, loss=loss)

    def follow_table(self, policy: Policy, sums: SumsPlan, processes: Processes) -> Afterwards:
        passes = compare_cost(self._rows, metric=self.find_state(policy) is not None, take_steps=self.take_steps)
        return Afterwards((passes,), prompts=sums.groups, least=2)

    @property
    def _rows(self) -> int:
        """Estimate the rows of weights before measuring; on-policy, half of the default weightings coincide."""
        return sum(len(spell_out(name)) for name in self.weightings) or len(COMPARED) // 2 + 1

    def _comparison_settings(self, settings: MeasureSettings) -> ComparisonSettings:
        """Return the settings, without the step. settings: of the measurement."""
        return ComparisonSettings(loss=settings.loss, seed=settings.seed, **pick(self, ComparisonChoices))

    def _compare(self, measured: MeasuredRun) -> None:
        asked = self._asked(measured)
        if not measured.holds("comparison", asked, (TABLE, BY_INTERVAL, WEIGHTS, SUMMARY)):
            self._write(measured, asked)
        elif measured.is_main:
            print(f"already compared with these arguments: {self.out / TABLE}")
        if measured.is_main:
            print(f"\n{(self.out / SUMMARY).read_text(encoding='utf-8').rstrip()}")

    def _asked(self, measured: MeasuredRun) -> dict[str, Any]:
        """Return everything beside the table that affects the comparison, for the manifest."""
        files = [name.rpartition(".py:")[0] for name in self.weightings]
        asked = {
            "weightings": self.weightings,
            "files": [file_hash(Path(f"{file}.py")) for file in files if file],
            **pick(self, ComparisonChoices),
            "loss": asdict(measured.settings.loss),
            **self.of_steps(measured.policy),
            "gradient_memory": self.gradient_memory,
        }
        return plain_json(asked)

    def _fitting_prompts(self, measured: MeasuredRun) -> list[int]:
        """Return the prompts to compare on: all measured ones, or as many as the remaining time allows."""
        table = read_table(measured.folder)
        prompts = table["group"].unique()
        if measured.left is None:
            return prompts.tolist()
        known = {"metric": measured.settings.metric is not None, "take_steps": self.take_steps}
        rows = distinct_rows(table, self.weightings or None, settings=self._comparison_settings(measured.settings))
        each = compare_cost(rows, **known) * measured.folder.manifest["pass_seconds"] / len(prompts)
        (fits,) = measured.resources.processes.gather([max(2, int(measured.left / each))])[:1]
        drawn = torch.from_numpy(np.random.default_rng(self.settings.seed).permutation(prompts))
        return own_first(measured.batch, drawn)[:fits].tolist()

    def _write(self, measured: MeasuredRun, asked: dict[str, Any]) -> None:
        from gradscope.plots import plot_comparison, save_figure

        folder, policy = measured.folder, measured.policy
        table, chosen = read_table(folder), self._fitting_prompts(measured)
        state, step, notes = self.read_step(policy)
        deadline = None if measured.left is None else monotonic() + measured.left
        step = replace(step or SGD, max_grad_norm=self.max_grad_norm)
        found = compare(
            policy,
            measured.batch.of_prompts(chosen),
            self.weightings or None,
            table=table[table["group"].isin(chosen)].reset_index(drop=True),
            optimizer_state=state,
            settings=replace(self._comparison_settings(measured.settings), step=step),
            resources=replace(measured.resources, micro_batch=4, deadline=deadline),
        )
        if not measured.is_main:
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
