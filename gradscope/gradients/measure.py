"""Measure a batch into a token table, in memory or in a folder where an interrupted measurement resumes.

DIR/.partial holds a part per response or, under a time limit, the choice of prompts and a part per round. Once all
parts are there, tokens.parquet and manifest.json are published together.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import pandas as pd
import torch
from jaxtyping import Int
from pyarrow import parquet
from torch import Tensor

from gradscope.errors import InputError, checked, make_settings
from gradscope.gradients.budget.timed_rounds import Round, Stopwatch, join_rounds, measure_rounds
from gradscope.gradients.columns import LOGITS, PARAMETERS
from gradscope.gradients.logged_logprobs import ContradictionWarning
from gradscope.gradients.resources import Resources
from gradscope.gradients.sample import SAMPLING_PROBABILITY
from gradscope.gradients.settings import BUDGET, DEFAULT_MINUTES, EACH_PROMPT, MeasureKeywords, MeasureSettings
from gradscope.gradients.table import TableMeasurement, join_responses
from gradscope.intervals import EDGES
from gradscope.objective import LossSettings
from gradscope.policy import AdamWState, Policy, PolicyLike, make_key, make_manifest, optimizer_hash, read_adamw_state
from gradscope.resampling import FEWEST
from gradscope.rollouts import BatchLike, TokenBatch, read_logged, rollouts_hash
from gradscope.runs import RunFolder, counted, write_parquet_parts

Number = int | float

TABLE = "tokens.parquet"
SUMMARIZED = (
    *("response", "group", "interval", "advantage", "weight", "log_one_minus_prob"),
    *(LOGITS, SAMPLING_PROBABILITY, PARAMETERS),
)
"""Columns that the manifest summarizes."""
CHOICE = 0
"""Number of the part that records, under a time limit, how many prompts are used and the seconds spent so far."""
READING = ("format", "step", "reward_key", "chat_template_kwargs")
"""Settings for reading rollouts that are part of a run's key."""


@checked
def measure(
    policy: PolicyLike,
    batch: BatchLike,
    *,
    out: str | Path | None = None,
    tokens: Int[Tensor, " k"] | None = None,
    edges: Sequence[Number] = EDGES,
    optimizer_state: AdamWState | str | Path | None = None,
    resources: Resources = Resources(),  # noqa: B008  (frozen)
    **settings: Unpack[MeasureKeywords],
) -> pd.DataFrame:
    """Measure every response token's own gradient, and return the token table.

    Args:
        policy, batch: or paths, as for `load_policy` and `read_rollouts`.
        out: a folder for the table (tokens.parquet) and its manifest. An interrupted measurement with the same
            arguments resumes there, and a finished one is read, including one made by the command if policy and batch
            are given as paths. None: nothing is written.
        tokens: indices of the kept tokens, in table order, that get a backward pass; None: see `settings`.
        edges: of the intervals of π.
        optimizer_state: AdamW's state, or the file of its state_dict; for metric="adamw".
        resources: `activations`, the bytes that one batched backward pass may carry, affects only speed, memory and
            rounding. Several processes share the responses, and all get the table.
        settings: the fields of MeasureSettings, by name. `loss` defaults to the settings recorded in the log, if the
            batch is a path.

    Returns:
        A row per token that response_mask keeps (with `minutes`, only for the prompts used):
        `response` (row of the batch), `group` (its prompt's), `position` (0-based within the response, counting dropped
        tokens), `token_id`, `token`, `logprob`, `prob`, `log_one_minus_prob`, `entropy` (nats, at the sampling
        temperature), `old_logprob`, `ref_logprob`, `advantage` (NaN if unknown), `sampler_logprob` and
        `loss_scale` (if the batch has them), `policy_weight`, `kl_weight`, `weight` (Eq. 2's w_t, NaN without an
        advantage), `clipped`, `interval`, `sampling_probability` (if a sample was drawn: see `sample`), and the
        unweighted L2 norms of the gradient of the token's log π: `logit_grad_norm` (with respect to logits / T),
        `act_grad_norm.0` … `act_grad_norm.L`, `param_grad_norm`; with metric="adamw" `param_grad_norm_adamw`. The
        token's contribution to the update has norm |weight| · norm.

    Raises:
        InputError: the batch does not fit the policy, or the folder holds another run.
        SelfCheckError: the engine disagrees with plain autograd on this policy.

    Warns if logged log-probabilities fit another temperature or a truncated distribution better. Doubts raised by the
    batch itself are in `batch.notes` (kinds `rollouts.CAVEATS`).
    """
    watch, asked = Stopwatch(), make_settings(MeasureSettings, "measure", settings)
    given, path = isinstance(policy, Policy), None if isinstance(batch, TokenBatch) else Path(batch)
    policy, batch, told = read_logged(policy, batch)
    if told and "loss" not in settings:
        asked = replace(asked, loss=LossSettings.from_log(told))
    state = optimizer_state
    if isinstance(state, str | Path):
        state = read_adamw_state(policy, state)
    measurement = TableMeasurement(
        policy, batch, asked, edges=edges, tokens=tokens, optimizer_state=state, resources=resources
    )
    measurement.watch = watch
    if out is None:
        with measurement:
            _warn(measurement)
            return fill_table(measurement)
    if not policy.path:
        raise InputError("a run is identified by its policy's files, and this policy has none; leave out `out`")
    known = dict.fromkeys(READING) | batch.key()
    if given:  # its weights may have changed since it was loaded
        known["weights"] = _weights_hash(policy)
    if asked.metric is not None:
        known["optimizer_state"] = _state_hash(optimizer_state)
        known["max_grad_norm"] = None if state is None else state.max_grad_norm
    if list(edges) != list(EDGES):
        known["edges"] = list(edges)
    if tokens is not None:
        known["tokens"] = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()
    folder = measure_folder(out, policy, measurement.settings, known)
    log = {"path": path and str(path), "sha256": None if path is None else rollouts_hash(path)}
    facts = {"model": policy.path, "rollouts": log | {"notes": list(batch.notes)}}
    measure_into(measurement, folder, facts=facts)
    _warn(measurement)
    return read_table(folder)


def fill_table(measurement: TableMeasurement) -> pd.DataFrame:
    """Run an entered measurement; return the table of all processes."""
    parts = Memory()
    if rounds := _fill(measurement, parts):
        return join_responses(join_rounds(measurement, rounds))
    frames = dict(measurement.processes.gather([*parts.items()]))
    return join_responses(frames[row] for row in range(len(measurement.batch)))


def _warn(measurement: TableMeasurement) -> None:
    for note in measurement.notes:
        warnings.warn(note, ContradictionWarning, stacklevel=4)


def _weights_hash(policy: Policy) -> str:
    """Return the SHA-256 of all parameters' names and bytes, as they are in memory."""
    found = hashlib.sha256()
    for name, parameter in policy.model.named_parameters():
        found.update(name.encode())
        if not parameter.is_meta:  # offloaded: it is as its file, which is in the key
            found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _state_hash(state: AdamWState | str | Path | None) -> str | None:
    """Hash an optimizer state: its file, or all its numbers."""
    if state is None or not isinstance(state, AdamWState):
        return None if state is None else optimizer_hash(Path(state))
    found = hashlib.sha256(
        repr((sorted(state.step.items()), sorted(state.settings.items(), key=lambda own: own[0]))).encode()
    )
    for name, value in sorted(state.exp_avg_sq.items()):
        found.update(name.encode() + value.detach().cpu().float().numpy().tobytes())
    return found.hexdigest()


def measure_folder(out: str | Path, policy: Policy, settings: MeasureSettings, known: Mapping[str, Any]) -> RunFolder:
    """Return a measurement's folder, keyed by everything that affects the results. known: rollouts and optimizer."""
    key = make_key(policy, {**known, "settings": asdict(settings), "blocks": policy.blocks_name})
    return RunFolder(out, key, defaults={"settings": asdict(MeasureSettings())})


def read_table(folder: RunFolder) -> pd.DataFrame:
    """Read the token table of a finished run. Raises InputError if the file has changed."""
    folder.check(TABLE)
    return pd.read_parquet(folder.folder / TABLE)


@runtime_checkable
class Parts(Protocol):
    """A store for the parts of a table, such as a `RunFolder`."""

    def has_part(self, index: int) -> bool: ...

    def write_part(self, index: int, frame: pd.DataFrame) -> None: ...

    def read_part(self, index: int) -> pd.DataFrame: ...


class Memory(dict[int, pd.DataFrame]):
    """Parts of a table in memory."""

    has_part, write_part, read_part = dict.__contains__, dict.__setitem__, dict.__getitem__


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a measurement into a folder; the default is silent."""

    tell: Callable[[str], None] = lambda text: None
    """Receives a line of output, in the main process."""
    judge: Callable[[pd.DataFrame], str | None] = lambda table: None
    """Describes a sample's error, given the table's SUMMARIZED columns."""


def measure_into(
    measurement: TableMeasurement,
    folder: RunFolder,
    *,
    facts: dict[str, Any],
    asked: MeasureSettings | None = None,
    overwrite: bool = False,
    hooks: Hooks = Hooks(),
) -> None:
    """Measure into a run's folder, unless it is finished; all processes call it together.

    Args:
        facts: `model`, the policy's name, and further entries for the manifest.
        asked: the settings as given by the user; None: the measurement's.
        overwrite: whether to replace a run with another key.

    Raises:
        InputError: the folder holds another run.
    """
    processes, asked = measurement.processes, measurement.asked if asked is None else asked
    with processes.together():
        found = folder.status(overwrite=overwrite) if processes.is_main else None
    status = processes.gather([found])[0]
    if status == "finished":
        with processes.together():
            folder.check(TABLE)
        if processes.is_main:
            hooks.tell(f"already measured with these arguments: {folder.folder / TABLE}")
        return
    timed = measurement.settings.minutes is not None
    rounds = _take_up(measurement, folder) if timed and status == "unfinished" else []
    with ExitStack() as held:

        def begin() -> None:
            with processes.together():
                if processes.is_main:
                    held.enter_context(folder.writing())
                    if folder.begin(overwrite=overwrite):
                        hooks.tell(f"resuming the unfinished run in {folder.folder}")
                    if timed:
                        choice = {"prompts": [measurement.num_prompts], "spent": [measurement.watch.seconds()]}
                        folder.write_part(CHOICE, pd.DataFrame(choice))

        measurement.when_chosen, measurement.when_short = begin, partial(_warn_of_minutes, measurement, hooks.tell)
        try:
            held.enter_context(measurement)
        except Exception:  # a refused measurement leaves nothing behind
            if timed and not rounds and processes.is_main:
                folder.part(CHOICE).unlink(missing_ok=True)
            raise
        if not timed:  # entered, so the self-check has passed
            begin()
        if processes.is_main:
            _announce(measurement, asked, hooks.tell)
        rounds = _fill(measurement, folder, rounds)
        if processes.is_main:
            parts = join_rounds(measurement, rounds) if rounds else folder.read_parts(len(measurement.batch))
            write_parquet_parts(folder.staged / TABLE, parts)
            names = parquet.read_schema(folder.staged / TABLE).names
            table = pd.read_parquet(folder.staged / TABLE, columns=[name for name in SUMMARIZED if name in names])
            sample = _describe_sample(measurement, asked, table, rounds, hooks)
            folder.publish(_manifest(measurement, folder.key, table, **facts) | {"sample": sample})
            responses = table["response"].nunique()
            hooks.tell(f"{counted(len(table), 'token')} of {counted(responses, 'response')}: {folder.folder / TABLE}")
            if not isinstance(sample, str) and "error" in sample:
                hooks.tell(sample["error"])
    processes.gather([None])  # the table is there


def _announce(measurement: TableMeasurement, asked: MeasureSettings, tell: Callable[[str], None]) -> None:
    """Announce what will be measured."""
    for note in measurement.notes:
        tell(f"note: {note}")
    settings, tokens, whole = (
        measurement.settings,
        measurement.num_tokens,
        "--tokens-per-interval none measures them all",
    )
    if settings.minutes is not None:
        limit = " (--minutes none: no limit)" if asked.minutes == DEFAULT_MINUTES else ""
        part = (
            f"all {tokens:,} of their tokens within"
            if measurement.at_once
            else f"as many of their {tokens:,} tokens as"
        )
        allow = "minutes" if measurement.at_once else "minutes allow"
        tell(
            f"using {measurement.num_prompts:,} of {measurement.all_prompts:,} prompts, and {part} "
            f"{settings.minutes:g} {allow}, loading included{limit}"
        )
    if settings.fast:
        tell(describe_speedup(measurement.meter.speedup))
    chosen, each = asked.tokens_per_interval, settings.tokens_per_interval
    if chosen in ("auto", "enough") and each:
        why = f"tokens are more than {BUDGET:,}" if chosen == "auto" else "tokens come from few prompts"
        tell(f"measuring a random sample of at most {each:,} tokens per interval: {tokens:,} {why} ({whole})")


def describe_speedup(speedup: float) -> str:
    """Describe the speed of the fast mode on this machine.

    >>> describe_speedup(0.5)
    'fast: rounded products are .5 times as fast as exact ones here; leave --fast out, exact norms take less time'
    """
    words = f"fast: rounded products are {speedup:.1f} times as fast as exact ones here".replace(" 0.", " .")
    return words if speedup > 1 else f"{words}; leave --fast out, exact norms take less time"


def _warn_of_minutes(measurement: TableMeasurement, tell: Callable[[str], None], minutes: float, prompts: int) -> None:
    """Say before anything slow that the time limit is too short, and which one would do."""
    few = f"{measurement.settings.minutes:g} minutes are too few"
    if prompts < FEWEST:
        tell(f"{few} even for {counted(prompts, 'prompt')}, so this will take longer: about {ceil(minutes)}")
    else:
        tell(f"{few} for a verdict, for which {prompts} prompts must be looked at: give about {ceil(minutes)}")


def _take_up(measurement: TableMeasurement, parts: RunFolder) -> list[Round]:
    """Return the rounds of an interrupted timed run, and restore its prompts and elapsed seconds."""
    processes, mine = measurement.processes, []
    with processes.together():
        if processes.is_main:
            (prompts, spent), rounds = parts.read_part(CHOICE)[["prompts", "spent"]].iloc[0], []
            while parts.has_part(1 + len(rounds)):
                rounds.append(Round.of_part(parts.read_part(1 + len(rounds))))
            mine = [(int(prompts), rounds[-1].spent if rounds else spent, rounds)]
    measurement.num_prompts, measurement.watch.earlier, rounds = processes.gather(mine)[0]
    return rounds


def _fill(measurement: TableMeasurement, parts: Parts, rounds: Sequence[Round] = ()) -> list[Round]:
    """Measure the missing parts; under a time limit, return all rounds, including those of an interrupted run."""
    processes, missing = measurement.processes, []
    if measurement.settings.minutes is not None:
        return _fill_rounds(measurement, parts, list(rounds))
    if processes.is_main:
        missing = [row for row in range(len(measurement.batch)) if not parts.has_part(row)]
    with processes.together():
        _fill_share(measurement, parts, processes.gather(missing))
    return []


def _fill_share(measurement: TableMeasurement, parts: Parts, left: list[int]) -> None:
    """Measure this process's share of the remaining parts; progress shows the main process's share."""
    counts = [len(sequence.measured) for sequence in measurement.row_norms.sequences]
    mine, missing = measurement.row_norms.share(left), set(left)
    ours = sum(counts[row] for group in mine for row in group if row in missing)
    total = sum(counts) if measurement.processes.count == 1 else ours
    with measurement.progress.stage("measuring", total, "tokens", done=total - ours) as advance:
        for group in mine:
            # Measure the whole group even if only some parts are missing: results depend on the grouping by rounding.
            for row, frame in zip(group, measurement.measure_responses(group), strict=True):
                if row in missing:
                    parts.write_part(row, frame)
                    advance(counts[row])


def _fill_rounds(measurement: TableMeasurement, parts: Parts, rounds: list[Round]) -> list[Round]:
    """Measure the remaining rounds, write each as it ends, and return all."""
    processes = measurement.processes
    for done in measure_rounds(measurement, measurement.watch, tuple(rounds)):
        if processes.is_main:
            parts.write_part(1 + len(rounds), done.to_part())
        rounds.append(done)
    return rounds


def _manifest(
    measurement: TableMeasurement, key: dict[str, Any], table: pd.DataFrame, *, model: str, **facts: Any
) -> dict[str, Any]:
    policy, meter, check = measurement.policy, measurement.meter, measurement.check
    found = {
        "settings": asdict(measurement.settings),
        "seed": measurement.settings.seed,
        "processes": measurement.processes.count,
        "threads": torch.get_num_threads(),
        "pass_seconds": measurement.pass_seconds,
        "self_check": "off" if check is None else asdict(check),
        "engine": {
            "blocks": policy.blocks_name,
            "rules": "the model's graph" if meter.precision is None else "decoder",
            "precision": meter.precision or "exact",
            "joint": meter.split_point,
            "batched": meter.graph.batched,
            "modules_by_rule": len(meter.ownership.rules),
            "parameters_on_the_general_path": list(meter.ownership.general),
        },
        "logged": list(measurement.notes),
        "prompts": {"looked_at": int(table["group"].nunique()), "of": measurement.all_prompts},
        "verdict_minutes": measurement.verdict_minutes,
        "tokens": len(table),
        "tokens_measured": int(table[PARAMETERS].notna().sum()),
    }
    return make_manifest(model, policy, key, facts | found)


def _describe_sample(
    measurement: TableMeasurement,
    asked: MeasureSettings,
    table: pd.DataFrame,
    rounds: list[Round],
    hooks: Hooks,
) -> dict[str, Any] | str:
    """Describe, for the manifest, which tokens were measured, why, and the sample's error."""
    settings, times = measurement.settings, None
    if (each := settings.tokens_per_interval) is None and not rounds:
        return "every token"
    if not rounds:
        reasons = {"auto": f"the default above {BUDGET:,} tokens", "enough": f"{EACH_PROMPT} per prompt"}
        why = reasons.get(asked.tokens_per_interval, "requested")
    else:
        each, measuring = rounds[-1].each, sum(done.seconds for done in rounds)
        times = {"preparing": measurement.watch.seconds() - measuring, "measuring": measuring}
        why = "minutes, the default of a large policy" if asked.minutes == DEFAULT_MINUTES else "minutes"
    sample = {"tokens_per_interval": each, "why": why, "drawn": settings.sample}
    if times is not None:
        told = [{"tokens_per_interval": done.each, "seconds": done.seconds} for done in rounds]
        sample |= {"seconds": times, "rounds": told}
    error = hooks.judge(table)
    return sample if error is None else sample | {"error": error}
