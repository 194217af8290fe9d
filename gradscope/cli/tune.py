"""The command `gradscope tune`: which settings are worth a run, judged by one step on a few batches."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import tyro

from gradscope.cli.flags import Dtype, Many, PolicyFlags, ReadingFlags, command_progress, load_quietly, print_notes
from gradscope.cli.manifest import make_key, make_manifest, own_weightings, refuse_reread
from gradscope.cli.optimizer import told_rate
from gradscope.errors import InputError
from gradscope.gradients import note_logged, refuse_narrow_weights
from gradscope.objective import (
    PAPER,
    LossSettings,
    check_weighting,
    describe_off_policyness,
    off_policy_columns,
    resolve_advantages,
)
from gradscope.policy import (
    Policy,
    checkpoint_step,
    find_optimizer_file,
    find_policy_state,
    hash_ahead,
    optimizer_hash,
    read_optimizer_file,
)
from gradscope.rollouts import Dump, TokenBatch
from gradscope.runs import RunFolder, worker_context, write_text
from gradscope.updates import (
    MIN_TOKENS,
    SGD,
    Screening,
    StepSettings,
    count_tokens,
    is_held_out,
    make_grid,
    report,
    screen,
    state_step,
    tune_batch,
)

SETTINGS, BY_INTERVAL, SUMMARY, FIGURE = "settings.csv", "by_interval.csv", "summary.txt", "figures/tuning.png"
ALPHAS, ETAS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0), (None, 0.1, 0.3, 0.5, 0.7, 0.9)
Optimizer = Literal["sgd", "adamw"]
FRESH = "fresh: its first step is a sign step, of which the prediction says little"


@dataclass(frozen=True, kw_only=True)
class Tune(ReadingFlags, PolicyFlags):
    """Screen α (Advantage Reweighting), η (Lopti) and other weightings by what one step does to a few batches' tokens.

    Every setting's step is predicted to first order and, on half of the batches, taken and rewound: OUT gets a row per
    setting with its right-direction shares against the plain loss's, and a verdict with an interval.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder of transformers, or "embedded"; best a policy in training."""
    rollouts: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ROLLOUTS")]
    """JSONL or parquet, a row per response, or a trainer's rollout log; of several files, each is a batch."""
    out: Path
    """Folder for settings.csv, by_interval.csv, summary.txt, manifest.json and figures/. A run that was interrupted is
    taken up again."""
    alphas: Annotated[tuple[float, ...], Many] = ()
    """α of the grid; 0: no Reweight. Default: 0 .1 .2 .3 .5 1; with --methods, only 0."""
    etas: Annotated[tuple[float | None, ...], Many] = ()
    """η of the grid; none: no Lopti. Default: none .1 .3 .5 .7 .9; with --methods, only none."""
    methods: Annotated[tuple[str, ...], Many] = ()
    """Further weightings, NAME[:key=value,…] or FILE.py:NAME[:key=value,…] as `gradscope compare` takes them; several
    values of a key have slashes between them: top-entropy:q=.1/.2/.4."""
    batches: int = 6
    """Batches that a single file is split into, by prompts; every second one is held out, and a verdict takes 3."""
    optimizer: Optimizer | None = None
    """What takes the step; none: adamw where --optimizer-state is given or optimizer.pt lies in MODEL's folder, else
    sgd."""
    learning_rate: float | None = None
    """none: 1e-3 for sgd, as the paper's Fig. 1; for adamw that of its state, or 1e-6 without one."""
    weight_decay: float | None = None
    """none: that of the optimizer's state, else 0."""
    optimizer_state: Path | None = None
    """adamw: its state_dict, or the folder of its shards; none: the one in MODEL's folder, if any, else fresh."""
    max_grad_norm: float | None = 1.0
    """Each step's gradient is clipped to this norm; none: not clipped."""
    kl_coef: float = PAPER.kl_coef
    """β of the KL penalty; without ref_logprobs in the rollouts there is none."""
    clip_ratio_low: float = PAPER.clip_ratio_low
    """ε_low of the ratio's clip."""
    clip_ratio_high: float = PAPER.clip_ratio_high
    """ε_high of the ratio's clip."""
    clip_ratio_c: float | None = PAPER.clip_ratio_c
    """Dual clip of negative advantages; none: off."""
    actual: bool = True
    """Also take the steps, on the held-out batches; without them nothing confirms the prediction."""
    min_tokens: int = MIN_TOKENS
    """Tokens that an interval × sign of Â must move in every batch to count in the score."""
    temperature: float | None = None
    """Sampling temperature; none: each response's own, from the rollouts."""
    micro_batch_size: int = 8
    """Responses in one forward pass; changes speed, memory and rounding only."""
    gradient_memory: int | None = None
    """Bytes for vectors as long as the parameters; beyond it they lie in scratch files (TMPDIR) and take more passes.
    none: as many as it takes."""
    jobs: int = 1
    """On a CPU: batches counted side by side, each by a process of its own with one thread."""
    seed: int = 0
    """Splits a single file, and redraws prompts for the intervals."""
    dtype: Dtype = "float32"
    """Precision of the weights and of all that is computed; below float32 an update vanishes by rounding."""
    overwrite: bool = False
    """Replace a run with other arguments in the same folder."""

    def run(self) -> None:
        default = ((0.0,), (None,)) if self.methods else (ALPHAS, ETAS)
        grid = make_grid(self.alphas or default[0], self.etas or default[1], self.methods)
        self._check()
        hash_ahead(self.model)
        policy = load_quietly(self.model, **self.loading)
        refuse_narrow_weights(policy.model)
        dumps = self._read_dumps(policy)
        batches = self._make_batches(dumps)
        check_batches(batches, self.min_tokens)
        print_notes(list(dict.fromkeys(note for dump in dumps for note in dump.remarks)))
        for weighting in filter(None, (setting.weighting for setting in grid)):
            check_weighting(weighting, sampler_logprobs=all(b.sampler_logprobs is not None for b in batches))
        optimizer, state = self._find_optimizer(policy)
        how = {"grid": grid} | self._settings(optimizer, None if state is None else read_optimizer_file(state))
        key = self._key(policy, dumps, how, state)
        folder = RunFolder(self.out, key, results=(SETTINGS, BY_INTERVAL, SUMMARY, "figures"))
        if not self.overwrite:
            refuse_reread(folder, dumps)
        if folder.status(overwrite=self.overwrite) == "finished":
            for name in (SETTINGS, BY_INTERVAL, SUMMARY):
                folder.check(name)
            print(f"already tuned with these arguments: {self.out / SETTINGS}")
        else:
            with folder.writing():
                self._write(policy, batches, self._count(policy, batches, how, folder), how, folder)
        print(f"\n{self._read_summary()}")

    def _read_summary(self) -> str:
        try:
            return (self.out / SUMMARY).read_text(encoding="utf-8").rstrip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.out / SUMMARY} cannot be read; tune again with --overwrite") from error

    def _check(self) -> None:
        """Numbers that no library function looks at."""
        if self.batches < 2 and len(self.rollouts) == 1:
            raise InputError(f"--batches is {self.batches}; one has to select and another to confirm; give 2 or more")
        if not self.rollouts:
            raise InputError("no rollouts; give one file, which is split, or several, each a batch")
        if self.jobs < 1:
            raise InputError(f"--jobs is {self.jobs}; give 1 or more")
        if self.gradient_memory is not None and self.gradient_memory < 1:
            raise InputError(f"--gradient-memory is {self.gradient_memory}; give a number of bytes, 1 or more")
        if self.min_tokens < 1 or self.seed < 0:
            raise InputError(f"--min-tokens is {self.min_tokens} and --seed {self.seed}; give 1 or more, and 0 or more")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise InputError(f"--learning-rate is {self.learning_rate}; no token moves without one; give more than 0")
        if self.temperature is not None and not self.temperature > 0:
            raise InputError(f"--temperature is {self.temperature}; give a number above 0")

    def _read_dumps(self, policy: Policy) -> list[Dump]:
        from gradscope.rollouts import keep_own_step, read_dump

        how, step = {"temperature": self.temperature, **self.reading}, checkpoint_step(self.model)
        return [keep_own_step(read_dump(path, policy, **how), step) for path in self.rollouts]

    def _make_batches(self, dumps: Sequence[Dump]) -> list[TokenBatch]:
        batches = [dump.batch for dump in dumps]
        return batches if len(batches) > 1 else split_prompts(batches[0], self.batches, seed=self.seed)

    def _find_optimizer(self, policy: Policy) -> tuple[Optimizer, Path | None]:
        """What takes the step, and the file of its state, if it has one."""
        if self.optimizer == "sgd":
            if self.optimizer_state is not None:
                raise InputError("--optimizer-state is of AdamW; leave out --optimizer sgd")
            return "sgd", None
        state = find_policy_state(policy) if self.optimizer_state is None else find_optimizer_file(self.optimizer_state)
        if state is None and self.optimizer_state is not None:
            raise InputError(f"{self.optimizer_state} is not there; give the file of an AdamW state_dict")
        return self.optimizer or ("sgd" if state is None else "adamw"), state

    def _settings(self, optimizer: Optimizer, state: dict[str, Any] | None) -> dict[str, Any]:
        """Keywords of `tune_batch`: the loss, the step, and the optimizer state that it continues from."""
        loss = LossSettings(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c, self.kl_coef)
        loss.check()
        fresh = StepSettings(optimizer, 1e-6 if optimizer == "adamw" else SGD.learning_rate)
        given = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        given = {name: float(value) for name, value in given.items() if value is not None}
        step = replace(fresh if state is None else state_step(state), max_grad_norm=self.max_grad_norm, **given)
        step = replace(step, micro_batch_size=self.micro_batch_size)
        step.check()
        if state is not None and self.learning_rate is None:
            print_notes(told_rate(state, step.learning_rate))
        return {"loss": loss, "step": step, "optimizer_state": state, "memory": self.gradient_memory}

    def _key(self, policy: Policy, dumps: Sequence[Dump], how: dict[str, Any], state: Path | None) -> dict[str, Any]:
        from gradscope.rollouts import rollouts_hash

        step = {name: value for name, value in asdict(how["step"]).items() if name != "micro_batch_size"}
        return make_key(
            policy,
            rollouts=[rollouts_hash(path) for path in self.rollouts],
            reading=self.reading,
            read=[dump.batch.digest() for dump in dumps],
            batches=self.batches if len(self.rollouts) == 1 else len(self.rollouts),
            grid=[setting.name for setting in how["grid"]],
            files=own_weightings(self.methods),
            loss=asdict(how["loss"]),
            step=step,
            optimizer_state=None if state is None else optimizer_hash(state),
            actual=self.actual,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )

    def _count(
        self, policy: Policy, batches: Sequence[TokenBatch], how: dict[str, Any], folder: RunFolder
    ) -> list[pd.DataFrame]:
        """A part per batch, those of an interrupted run among them. how: the keywords of `tune_batch`."""
        if folder.begin(overwrite=self.overwrite):
            print(f"taking up the unfinished run in {folder.folder}")
        left = [index for index in range(len(batches)) if not folder.has_part(index)]
        told = command_progress()
        done = len(batches) - len(left)
        if self.jobs == 1:
            with told.stage("screening", len(batches), "batches", done=done) as advance:
                for index in left:
                    part = tune_batch(policy, batches[index], actual=self._takes(index), progress=told, **how)
                    folder.write_part(index, part)
                    advance(1)
            return list(folder.read_parts(len(batches)))
        with ProcessPoolExecutor(self.jobs, worker_context(), _use_one_thread) as pool:
            jobs = {}
            try:
                for index in left:
                    # As bytes: a tensor would be fetched by the process, from a thread here that may fail.
                    sent = pickle.dumps((batches[index], how))
                    jobs[pool.submit(_count_apart, self, sent, self._takes(index))] = index
                with told.stage("screening", len(batches), "batches", done=done) as advance:
                    for job in as_completed(jobs):
                        folder.write_part(jobs[job], job.result())
                        advance(1)
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    "a process that counted a batch was killed, maybe for want of memory; start the same command "
                    "again, which goes on, with fewer --jobs"
                ) from error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return list(folder.read_parts(len(batches)))

    def _takes(self, index: int) -> bool:
        """Whether the steps on this batch are also taken."""
        return self.actual and is_held_out(index)

    def _write(
        self,
        policy: Policy,
        batches: Sequence[TokenBatch],
        parts: Sequence[pd.DataFrame],
        how: dict[str, Any],
        folder: RunFolder,
    ) -> None:
        from gradscope.plots import plot_tuning, save_figure

        found = screen(parts, how["grid"], seed=np.random.default_rng(self.seed), min_tokens=self.min_tokens)
        write_text(folder.staged / SETTINGS, found.settings.to_csv(index=False))
        write_text(folder.staged / BY_INTERVAL, found.by_interval.to_csv(index=False))
        size = {"micro_batch_size": self.micro_batch_size, "device": policy.device}
        columns = [off_policy_columns(policy.model, batch, **size) for batch in batches]
        told = [note_logged(policy, batch, known) for batch, known in zip(batches, columns, strict=True)]
        joined = {name: np.concatenate([known[name] for known in columns]) for name in columns[0]}
        words = [report(found, step=describe_step(how)), describe_off_policyness(joined, how["loss"])]
        words += dict.fromkeys(chain.from_iterable(told))
        write_text(folder.staged / SUMMARY, "\n\n".join(words) + "\n")
        save_figure(plot_tuning(found.settings), folder.staged / FIGURE)
        folder.publish(self._manifest(policy, found, folder.key, parts))
        print(f"settings: {self.out / SETTINGS}; figure: {self.out / FIGURE}")

    def _manifest(
        self, policy: Policy, found: Screening, key: dict[str, Any], parts: Sequence[pd.DataFrame]
    ) -> dict[str, Any]:
        best = found.candidate
        rollouts = zip(self.rollouts, key["rollouts"], strict=True)
        return make_manifest(
            self.model,
            policy,
            key,
            rollouts=[{"path": str(path), "sha256": digest} for path, digest in rollouts],
            settings=asdict(self) | {"optimizer": key["step"]["optimizer"], "step": key["step"]},
            seed=self.seed,
            method=sorted({method for part in parts for method in part["method"]}),
            prompts=found.prompts,
            candidate={name: best[name] for name in ("setting", "difference", "lower", "upper", "verdict")},
            worth_a_run=found.worth_a_run,
            eta_judged=found.eta_judged,
            spearman={name: asdict(ranking) for name, ranking in found.rankings.items()},
        )


def _count_apart(tune: Tune, sent: bytes, actual: bool) -> pd.DataFrame:
    """In a process of its own, with a policy of its own: a sent one would share its weights, which the steps change.

    sent: the pickle of a batch and the keywords of `tune_batch`.
    """
    batch, how = pickle.loads(sent)
    policy = load_quietly(tune.model, **tune.loading)
    return tune_batch(policy, batch, actual=actual, **how)


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def split_prompts(batch: TokenBatch, count: int, *, seed: int) -> list[TokenBatch]:
    """Batches of whole prompts, drawn at random, whose numbers of prompts differ by one at most.

    Advantages are made of the rewards before, responses keep their order. InputError for fewer prompts than batches.
    """
    batch = replace(batch, advantages=resolve_advantages(batch))
    groups = batch.group_ids.unique()
    if len(groups) < count:
        raise InputError(
            f"the rollouts have {len(groups)} prompts for {count} batches of whole prompts; give more rollouts, or a "
            "smaller --batches"
        )
    return batch.deal(groups, count, torch.Generator().manual_seed(seed))


def check_batches(batches: Sequence[TokenBatch], min_tokens: int) -> None:
    """InputError, before hours of work, where advantages are missing or no cell can have enough tokens."""
    counts = []
    for number, batch in enumerate(batches):
        unknown = int(resolve_advantages(batch)[batch.response_mask].isnan().sum())
        if unknown:
            raise InputError(f"batch {number} has no advantage on {unknown} tokens; give a reward or an advantage each")
        if batch.old_logprobs is not None and not batch.old_logprobs[batch.response_mask].isnan().any():
            counts.append(count_tokens(batch))
    if counts and np.min(counts, axis=0).max() < min_tokens:
        raise InputError(
            f"no interval and sign of the advantage has {min_tokens} tokens in every batch (at most "
            f"{np.min(counts, axis=0).max()}; equal rewards to a prompt give no advantage); give more rollouts, fewer "
            "--batches or a smaller --min-tokens"
        )


def describe_step(keywords: dict[str, Any]) -> str:
    """The optimizer step in words."""
    step, state = keywords["step"], keywords["optimizer_state"]
    words = ["SGD" if step.optimizer == "sgd" else "AdamW", f"learning rate {step.learning_rate:g}"]
    if step.weight_decay:
        words.append(f"weight decay {step.weight_decay:g}")
    if step.optimizer == "adamw":
        words.append("on from the state of its earlier steps" if state is not None else FRESH)
    return ", ".join(words)
