"""The training loop: sample, score, advantages, optimizer steps, log, checkpoint; one run is one folder.

    OUT/config.json, manifest.json      settings, versions and machine
    OUT/metrics.jsonl                   a line per step
    OUT/checkpoints/step-000020/        a folder that transformers loads, with optimizer and random states
    OUT/rollouts/step-000001.parquet    with save_rollouts: the responses, in the native format
    OUT/trackers/                       TensorBoard logs
    OUT/.lock                           held while it runs

All randomness is a function of the seed, the step and the process's rank, so a run resumed with equally many processes
gives the same results.

Differences from GRPO (DeepSeekMath, arXiv:2402.03300):

- The loss is the mean over all response tokens of a mini-batch (as in DAPO and verl), not 1/G·Σ 1/|o_i|·Σ. Tokens that
  are masked, or belong to Lopti's other step, still count in the denominator.
- No inner iterations over a batch (μ = 1): its mini-batches are consecutive responses, unshuffled, each used once (with
  Lopti, once per token group). The reference is the initial policy and is never refreshed.
- Responses cut off at max_new_tokens are trained on like any other.
- Clip-higher (ε_low 0.2, ε_high 0.24) and the dual clip (c = 10) are on by default.
- A mismatch between sampler and trainer is checked, but only corrected by a suitable `method`, such as tis or icepop.
- warmup_steps counts batches, not optimizer steps.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradscope import __version__
from gradscope.errors import DivergedError, InputError, NanLogitsError, SyncError, checked
from gradscope.objective import StepResult, TokenStatistics
from gradscope.policy import Policy, find_checkpoint, weights_hash
from gradscope.rollouts import TokenBatch
from gradscope.runs import (
    SILENT,
    Journal,
    Processes,
    Progress,
    library_versions,
    locked,
    scalars,
    settle_progress,
    writing,
)
from gradscope.sampling import Sampler, make_sampler
from gradscope.tasks import get_task
from gradscope.trainer.checkpoints import (
    CHECKPOINTS,
    drop_old,
    find_start,
    list_checkpoints,
    restore_checkpoint,
    save_checkpoint,
    step_of,
)
from gradscope.trainer.config import TrainConfig
from gradscope.trainer.learner import (
    TRACKERS,
    Learner,
    build_learner,
    ending_trackers,
    init_trackers,
    make_accelerator,
)
from gradscope.trainer.presets import get_preset
from gradscope.trainer.rollout import ROLLOUTS, Questions, make_generator, rollout_metrics, sample_rollout, write_step
from gradscope.trainer.step import compute_advantages, plan_update, takes_one_step, token_metrics, update_metrics

MOST_NONFINITE = 3
"""Consecutive optimizer steps without a finite gradient after which a run ends."""
SYNC_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest mean |log π_sampler − log π_trainer| (nats) tolerated before assuming their weights differ.

In bfloat16 this catches another model's weights or another temperature, but not weights that are one small step old."""


@dataclass
class Step:
    """State passed to `on_step`: before `yield` the update has not happened; after it, it has."""

    number: int
    """The step's number, from 1."""
    policy: Policy
    batch: TokenBatch
    """The batch with the training's advantages, old_logprobs, sampler_logprobs and, with a reference, ref_logprobs."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics to log; the callback may add entries."""


OnStep = Callable[[Step], AbstractContextManager]
"""Makes the context manager around each update: a generator with one `yield` under `contextlib.contextmanager`."""


@checked
def train(
    config: TrainConfig | str,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = True,
) -> Path:
    """Train a policy; under `accelerate launch`, several processes share the work.

    Args:
        config: Settings, or the name of a preset.
        out: Folder of the run.
        resume: Resume from the newest checkpoint in `out`, or start from scratch if there is none.
        overwrite: Replace a run in `out`, which is deleted once the new settings and sampler are accepted. Without
            `resume` or `overwrite`, a folder that holds a run is refused.
        on_step: Called around each update, in the first process.

    Returns:
        The folder of the last checkpoint.

    Raises:
        InputError: The settings, data, files or policy do not allow training.
        DivergedError: Three consecutive optimizer steps had no finite gradient, or weights or logits became NaN or
            infinite.
        SyncError: The sampler's weights are not the trainer's, or its log-probabilities are not finite. Checkpoints are
            kept in all cases.
    """
    config, out = get_preset(config) if isinstance(config, str) else config, Path(out)
    questions = Questions(get_task(config.task), config)
    accelerator = make_accelerator(config, out)
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    journal = Journal(out, asdict(config), (CHECKPOINTS, ROLLOUTS, TRACKERS))
    with ExitStack() as stack:
        with processes.together():
            if processes.is_main:
                stack.enter_context(locked(out))
        start = find_start(journal, questions.steps, resume=resume, overwrite=overwrite, tell=processes.is_main)
        done = 0 if start is None else step_of(start)
        if done == questions.steps:
            with processes.together():
                if processes.is_main:
                    drop_old(out, config.keep_checkpoints)  # in case the run was killed at its very end
            accelerator.end_training()
            return start
        learner = build_learner(config, accelerator, start)
        stack.enter_context(ending_trackers(accelerator, out))
        # Entered after the trackers, so closed before them: they end the process group, which vLLM needs.
        sampler = stack.enter_context(closing(_make_sampler(config, learner)))
        nonfinite = _begin(journal, config, questions, learner, start, overwrite)
        stack.enter_context(_forgetting(journal, processes))
        init_trackers(accelerator, config, out, done, processes)
        reporter = settle_progress(progress) if processes.is_main else SILENT
        for note in learner.policy.length_notes(config.max_new_tokens) if reporter is not SILENT else ():
            print(f"note: {note}", file=sys.stderr)

        # With a single optimizer step per batch, π_old = π_θ, so skip the separate scoring pass; Reweight's factor too
        # is then of the policy's own log π, detached. A callback sees π_old before the update, so it needs that pass.
        single_on_policy_step = on_step is None and takes_one_step(config)
        advance = stack.enter_context(reporter.stage("training", questions.steps, "steps", done=done))
        # `index`, from 0, is the number of steps done and keys the random streams; `number`, from 1, names the step in
        # files, logs and messages.
        for index in range(done, questions.steps):
            number, started = index + 1, _now(learner)

            # Sample and grade group_size responses per question with the current weights.
            with _rescuing(index, learner, out, config, nonfinite), learner.computing():
                sampler.sync(learner.weights())
                rollout = sample_rollout(learner.policy, sampler, questions.of_step(index), config, index, processes)
            sampled = _now(learner)

            # Compute π_ref, π_old and the advantages.
            batch = rollout.batch
            if config.kl_coef > 0:
                batch = replace(batch, ref_logprobs=learner.reference_logprobs(batch))
            if not single_on_policy_step:
                statistics = learner.statistics(batch)
                _check_scores(batch, statistics, index, config, out, processes)
                own = config.old_logprobs == "trainer"
                batch = replace(batch, old_logprobs=statistics.logprob if own else batch.sampler_logprobs)
            batch = replace(batch, advantages=compute_advantages(batch, config))

            # Plain GRPO takes one optimizer step per mini-batch; Lopti (Alg. 1 of arXiv:2505.12929) one each for its
            # low- and high-probability tokens.
            update = plan_update(batch, config, make_generator(config, index))
            batch = update.batch  # with the advantages used in training
            learner.set_learning_rate(config.learning_rate * min(1.0, number / max(1, config.warmup_steps)))
            results: list[StepResult] = []
            added: dict[str, Any] = {}
            with ExitStack() as watching:
                if on_step is not None and processes.is_main:
                    watching.enter_context(on_step(Step(number, learner.policy, batch, added)))
                update_started = _now(learner)
                with learner.computing():
                    for part in update.steps:
                        how = {"match": update.match, "weighting": update.weighting, "score": single_on_policy_step}
                        results.append(result := learner.updater.step(part, update.settings, **how))
                        if result.outcome != "empty":
                            nonfinite = nonfinite + 1 if result.outcome == "nonfinite" else 0
                        if nonfinite >= MOST_NONFINITE:
                            break
                trained = _now(learner)
                if not learner.is_finite():
                    raise _diverged(out, f"the weights are not finite after step {number}")
            if single_on_policy_step:
                statistics = results[0].statistics
                _check_scores(batch, statistics, index, config, out, processes)
                batch = replace(batch, old_logprobs=statistics.logprob)

            # Log, and save.
            if config.save_rollouts:
                write_step(out, number, rollout.rows, batch, processes)
            record = {"step": number, **rollout_metrics(rollout)}
            record |= token_metrics(batch, statistics) | added | update_metrics(results)
            total, parts = _now(learner) - started, (sampled - started, trained - update_started)
            record |= {"seconds_sampling": parts[0], "seconds_training": parts[1], "seconds_other": total - sum(parts)}
            record["tokens_per_second"] = record["num_tokens"] / total
            with processes.together():
                if processes.is_main:
                    journal.log(record)
                with writing(out / TRACKERS):
                    accelerator.log(scalars(record), step=number)
            advance(1, _show(record, questions.steps, printed=reporter is not SILENT and not sys.stderr.isatty()))
            if nonfinite >= MOST_NONFINITE:
                words = f"{nonfinite} consecutive optimizer steps had no finite gradient, up to step {number}"
                raise _diverged(out, words)
            if number % config.save_every == 0 or number == questions.steps:
                how = {"keep": config.keep_checkpoints, "max_steps": questions.steps}
                save_checkpoint(out, number, learner, nonfinite_in_a_row=nonfinite, **how)
    return list_checkpoints(out)[-1]


def _make_sampler(config: TrainConfig, learner: Learner) -> Sampler:
    with learner.processes.together():
        return make_sampler(
            config.engine,
            learner.policy,
            batch_size=config.sampling_batch_size,
            dtype=config.precision,
            memory=config.vllm_memory,
            progress=False,
        )


def _begin(
    journal: Journal, config: TrainConfig, questions: Questions, learner: Learner, start: Path | None, overwrite: bool
) -> int:
    """Restore `start` and prepare the folder, deleting an overwritten run.

    Returns the number of consecutive latest optimizer steps without a finite gradient. Raises InputError if a resumed
    run began with another policy or other questions; warns if it had another number of processes, since each has its
    own random numbers.
    """
    parameters, out, count = list(learner.policy.model.parameters()), journal.out, learner.processes.count
    manifest = {
        "gradscope": __version__,
        "versions": library_versions(),
        "model": {
            "path": config.model,
            "class": type(learner.policy.model).__name__,
            "sha256": weights_hash(find_checkpoint(config.model)),
        },
        "questions": questions.hash,
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "device": str(learner.updater.device),
        "processes": count,
        "threads": torch.get_num_threads(),
    }
    with learner.processes.together():
        nonfinite = 0 if start is None else restore_checkpoint(start, learner)
        if learner.processes.is_main:
            if overwrite and journal.remove():
                print(f"the run in {out} is deleted (overwrite)", file=sys.stderr)
            drop_old(out, None)
            earlier = journal.begin(manifest, 0 if start is None else step_of(start), fixed=("model", "questions"))
            if earlier is not None and (before := earlier.get("processes")) != count:
                warnings.warn(
                    f"begun with {before} processes and resumed with {count}: from here on, the sampled responses "
                    "differ from those of an uninterrupted run",
                    stacklevel=3,
                )
    return nonfinite


@contextmanager
def _forgetting(journal: Journal, processes: Processes) -> Iterator[None]:
    """Delete a run rejected with InputError before its first checkpoint, so a retry is not blocked."""
    try:
        yield
    except InputError:
        if processes.is_main and not list_checkpoints(journal.out):
            with suppress(OSError):
                journal.remove()
        raise


@contextmanager
def _rescuing(done: int, learner: Learner, out: Path, config: TrainConfig, nonfinite: int) -> Iterator[None]:
    """Save the weights of the last finished step if the next one cannot be sampled.

    Saving is collective, and after Ctrl-C ranks may be at different points, so only single-process runs save. NaN
    logits after the first step become DivergedError.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt) as error:
        if done and isinstance(error, NanLogitsError):
            raise _diverged_logits(out, done) from error
        can_save = learner.processes.count == 1 or isinstance(error, InputError)
        if can_save and done and done not in map(step_of, list_checkpoints(out)):
            save_checkpoint(out, done, learner, nonfinite_in_a_row=nonfinite, keep=config.keep_checkpoints)
        raise


def _check_scores(
    batch: TokenBatch, statistics: TokenStatistics, done: int, config: TrainConfig, out: Path, processes: Processes
) -> None:
    """Raise unless all log π are finite and the sampler uses the trained weights.

    If the trainer's are not finite: DivergedError, or NanLogitsError before the first step. If the sampler's are not
    finite, or too far from the trainer's on four responses per process: SyncError.
    """
    keep = batch.response_mask
    if not statistics.logprob[keep].isfinite().all():
        if done:
            raise _diverged_logits(out, done)
        raise NanLogitsError("the policy's logits are NaN or infinite before any step; give another model or precision")
    if not batch.sampler_logprobs[keep].isfinite().all():
        raise SyncError("the sampler's log-probabilities are NaN or infinite, but the trainer's are not")
    for rank in range(processes.count):
        rows = (batch.group_ids % processes.count == rank).nonzero()[:4, 0]
        drift = float((batch.sampler_logprobs[rows] - statistics.logprob[rows])[keep[rows]].abs().mean())
        if keep[rows].any() and not drift <= SYNC_TOLERANCE[config.precision]:
            raise SyncError(
                f"the sampler's log-probabilities differ from the trainer's by {drift:.3g} nats on average; it "
                "does not sample with the trained weights, or uses another temperature"
            )


def _diverged_logits(out: Path, done: int) -> DivergedError:
    return _diverged(out, f"the policy's logits are NaN or infinite after step {done}", up_to=done - 1)


def _diverged(out: Path, words: str, *, up_to: int | None = None) -> DivergedError:
    """Make the error, naming the last checkpoint up to step `up_to` (None: any)."""
    good = [path for path in list_checkpoints(out) if up_to is None or step_of(path) <= up_to]
    kept = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
    return DivergedError(f"{words}; {kept}; try a lower learning_rate")


def _now(learner: Learner) -> float:
    """Synchronise with the device and return the time in seconds."""
    if learner.updater.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _show(record: dict[str, Any], total: int, *, printed: bool) -> str:
    """Describe the step for the progress bar; printed: also print it as a line."""
    shown = {name: f"{record[name]:.3g}" for name in ("reward_mean", "accuracy", "response_length", "kl")}
    words = ", ".join(f"{name} {value}" for name, value in shown.items())
    if printed:
        seconds = sum(record[f"seconds_{part}"] for part in ("sampling", "training", "other"))
        print(f"step {record['step']} of {total}: {words}, {seconds:.1f} s", file=sys.stderr, flush=True)
    return words
