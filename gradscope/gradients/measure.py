"""Measure a batch into a token table, in memory or in a folder where an interrupted measurement resumes.

DIR/.partial holds a part per response or, within minutes, per prompt. Once all parts are there, tokens.parquet and
manifest.json are published together.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
import torch
from jaxtyping import Int
from pyarrow import parquet
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.gradients.budget.stopwatch import Stopwatch
from gradscope.gradients.columns import LOGITS, PARAMETERS
from gradscope.gradients.logged_logprobs import ContradictionWarning
from gradscope.gradients.resources import Resources
from gradscope.gradients.sample import SAMPLING_PROBABILITY
from gradscope.gradients.settings import BUDGET, MeasureKeywords, MeasureSettings
from gradscope.gradients.table import TableMeasurement, fill_table
from gradscope.gradients.timed import TimedMeasurement, prepare_measurement
from gradscope.intervals import EDGES
from gradscope.objective import LOGPROB, LossSettings, Quantity, make_quantity
from gradscope.policy import (
    AdamWState,
    Policy,
    PolicyLike,
    make_key,
    make_manifest,
    optimizer_hash,
    policy_hashes,
    read_adamw_state,
)
from gradscope.rollouts import BatchLike, read_logged, rollouts_hash
from gradscope.runs import RunFolder, counted, file_hash, write_parquet_parts

Number = int | float

TABLE = "tokens.parquet"
SUMMARIZED = (
    *("response", "group", "interval", "advantage", "weight", "log_one_minus_prob"),
    *(LOGITS, SAMPLING_PROBABILITY, PARAMETERS),
)
"""Columns that the manifest summarizes."""
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
    of: Quantity | str = LOGPROB,
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
        of: the quantity whose gradients are measured instead of log π's, such as "entropy" or a `Divergence`. The table
            then has its `value` (nats) and `clamped` (whether a clamp leaves the token no gradient), no advantages and
            weights, and norms of its gradient; `minutes`, `metric`, `loss` and `weighting` do not apply.
        settings: the fields of MeasureSettings, by name. `loss` defaults to the settings recorded in the log, if the
            batch is a path; `weighting` replaces its weighting.

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
    batch itself are in `batch.notes`.
    """
    watch, chosen = Stopwatch(), {name: settings.pop(name) for name in ("weighting",) if name in settings}
    asked = checked(MeasureSettings, "measure")(**settings)
    of = make_quantity(of)
    if of != LOGPROB and (unused := {"loss", "weighting"} & {*settings, *chosen}):
        raise InputError(f"{unused.pop()} weighs ∇ log π, and of names another quantity; give one of them")
    given, path = isinstance(policy, Policy), Path(batch) if isinstance(batch, str | Path) else None
    policy, batch, told = read_logged(policy, batch)
    if told and "loss" not in settings and of == LOGPROB:
        asked = replace(asked, loss=LossSettings.from_log(told))
    asked = replace(asked, loss=replace(asked.loss, **chosen))
    state = optimizer_state
    if isinstance(state, str | Path):
        state = read_adamw_state(policy, state)
    known = {"edges": edges, "tokens": tokens, "optimizer_state": state, "resources": resources, "watch": watch}
    measurement = prepare_measurement(policy, batch, asked, **known, of=of)
    if out is None:
        table = fill_table(measurement)
        _warn(measurement)
        return table
    if not policy.path:
        raise InputError("a run is identified by its policy's files, and this policy has none; leave out `out`")
    known = dict.fromkeys(READING) | batch.key() | key_of(of)
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


def key_of(of: Quantity) -> dict[str, Any]:
    """Return what tells a quantity from others, for the key of a run; nothing for log π.

    Raises InputError for a teacher without files.
    """
    if of == LOGPROB or of.teacher is None:
        return {} if of == LOGPROB else {"of": repr(of)}
    if not getattr(of.teacher, "path", None):
        raise InputError("a run is identified by its teacher's files, and this teacher has none; leave out `out`")
    return {"of": repr(of), "teacher": policy_hashes(of.teacher)}


def measure_folder(out: str | Path, policy: Policy, settings: MeasureSettings, known: Mapping[str, Any]) -> RunFolder:
    """Return a measurement's folder, keyed by everything that affects the results. known: rollouts and optimizer."""
    file, colon, _ = (settings.loss.weighting or "").rpartition(".py:")
    own = {"weighting_file": file_hash(Path(f"{file}.py"))} if colon else {}
    key = make_key(policy, {**known, "settings": asdict(settings), "blocks": policy.blocks_name} | own)
    return RunFolder(out, key, defaults={"settings": asdict(MeasureSettings())})


def read_table(folder: RunFolder) -> pd.DataFrame:
    """Read the token table of a finished run. Raises InputError if the file has changed."""
    folder.check(TABLE)
    return pd.read_parquet(folder.folder / TABLE)


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
    if isinstance(measurement, TimedMeasurement) and status == "unfinished":
        measurement.restore(folder)
    with measurement, ExitStack() as held:  # entered, so the self-check has passed, and nothing is written before
        with processes.together():
            if processes.is_main:
                held.enter_context(folder.writing())
                if folder.begin(overwrite=overwrite):
                    hooks.tell(f"resuming the unfinished run in {folder.folder}")
                _announce(measurement, asked, hooks.tell)
        told, parts = measurement.notes, measurement.fill(folder)
        if processes.is_main:
            for note in measurement.notes[len(told) :]:  # within minutes, logged columns are read last
                hooks.tell(f"note: {note}")
            write_parquet_parts(folder.staged / TABLE, parts)
            names = parquet.read_schema(folder.staged / TABLE).names
            table = pd.read_parquet(folder.staged / TABLE, columns=[name for name in SUMMARIZED if name in names])
            sample = _describe_sample(measurement, table, hooks)
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
    settings, tokens = measurement.settings, measurement.num_tokens
    if settings.fast:
        tell(describe_speedup(measurement.meter.speedup))
    chosen, each = asked.tokens_per_interval, settings.tokens_per_interval
    if chosen in ("auto", "enough") and each:
        why = f"tokens are more than {BUDGET:,}" if chosen == "auto" else "tokens come from few prompts"
        whole = "--tokens-per-interval none measures them all"
        tell(f"measuring a random sample of at most {each:,} tokens per interval: {tokens:,} {why} ({whole})")


def describe_speedup(speedup: float) -> str:
    """Describe the speed of the fast mode on this machine.

    >>> describe_speedup(0.5)
    'fast: rounded products are .5 times as fast as exact ones here; leave --fast out, exact norms take less time'
    """
    words = f"fast: rounded products are {speedup:.1f} times as fast as exact ones here".replace(" 0.", " .")
    return words if speedup > 1 else f"{words}; leave --fast out, exact norms take less time"


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
        "of": key_of(measurement.of).get("of"),
        "logged": list(measurement.notes),
        "prompts": {"looked_at": int(table["group"].nunique()), "of": measurement.all_prompts},
        "verdict_minutes": measurement.verdict_minutes,
        "tokens": len(table),
        "tokens_measured": int(table[PARAMETERS].notna().sum()),
    }
    return make_manifest(model, policy, key, facts | found)


def _describe_sample(measurement: TableMeasurement, table: pd.DataFrame, hooks: Hooks) -> dict[str, Any] | str:
    """Describe, for the manifest, which tokens were measured, why, and the sample's error."""
    sample = measurement.describe_sample()
    if isinstance(sample, str):
        return sample
    error = hooks.judge(table)
    return sample if error is None else sample | {"error": error}
