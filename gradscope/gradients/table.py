"""Building the token table: one row per response token, with unweighted norms.

Settings are resolved; statistics that need no backward pass are computed for every token, and decide which tokens get
one; J measures the norms of their rows, one group of responses at a time; the results become columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.budget.stopwatch import Stopwatch
from gradscope.gradients.checked_tokens import choose_checked
from gradscope.gradients.columns import (
    ADAMW,
    LOGITS,
    PARAMETERS,
    gradient_columns,
    identify_tokens,
    to_frame,
)
from gradscope.gradients.engine.results import SelfCheck, TokenGradients
from gradscope.gradients.engine.self_check import check_engine
from gradscope.gradients.logged_logprobs import note_logged
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.gradients.sample import SAMPLING_PROBABILITY, TokenSample, token_sizes
from gradscope.gradients.settings import (
    BUDGET,
    EACH_PROMPT,
    MeasureSettings,
    fast_precision,
    no_fast_mode,
    settle,
    settle_batch,
)
from gradscope.gradients.statistics import BatchStatistics, find_statistics
from gradscope.intervals import EDGES
from gradscope.objective import LOGPROB, Quantity
from gradscope.policy import AdamWState, Policy, module_groups, square_norm
from gradscope.rollouts import Note, TokenBatch

if TYPE_CHECKING:
    from gradscope.gradients.engine.meter import TokenGradientMeter

Number = int | float
GRADIENT_RESPONSES = 4
"""Responses per forward pass for the whole batch's gradient."""


@runtime_checkable
class Parts(Protocol):
    """A store for the parts of a table, such as a `RunFolder`."""

    def has_part(self, index: int) -> bool: ...

    def write_part(self, index: int, frame: pd.DataFrame) -> None: ...

    def read_part(self, index: int) -> pd.DataFrame: ...


class Memory(dict[int, pd.DataFrame]):
    """Parts of a table in memory."""

    has_part, write_part, read_part = dict.__contains__, dict.__setitem__, dict.__getitem__


class Known(TypedDict, total=False):
    """The keywords of `TableMeasurement`."""

    edges: Sequence[Number]
    tokens: Int[Tensor, " k"] | None
    optimizer_state: AdamWState | None
    resources: Resources
    watch: Stopwatch | None


class TableMeasurement:
    """A context manager that measures a token table, one group of responses at a time; `measure` does it in one call.

    Entering freezes the model, finds the rules for its modules, computes the statistics, draws the tokens to measure
    and runs the self-check; leaving restores the model. With a time limit it is a `timed.TimedMeasurement`: see
    `timed.prepare_measurement`.

    With several processes, each holds the policy and the whole batch, and all enter together. Each may measure any
    group, since a response's rows do not depend on the process.
    """

    def __init__(
        self,
        policy: Policy,
        batch: TokenBatch,
        settings: MeasureSettings,
        *,
        edges: Sequence[Number] = EDGES,
        tokens: Int[Tensor, " k"] | None = None,
        optimizer_state: AdamWState | None = None,
        resources: Resources = Resources(),  # noqa: B008  (frozen)
        watch: Stopwatch | None = None,
    ) -> None:
        self.policy, self.edges, self.processes = policy, [float(e) for e in edges], resources.processes
        self.settings = settle(settings, policy, batch, intervals=len(self.edges) - 1)
        """The settings, with "auto", "enough" and "default" resolved."""
        self.asked = settings
        self.batch = settle_batch(settings, batch)
        """The batch of the prompts in use, with temperatures and advantages filled in."""
        self.whole = self.batch
        """The same with all prompts."""
        _check_tokens(tokens, settings, batch.num_tokens)
        precision = fast_precision(policy.dtype, policy.device.type) if settings.fast else "exact"
        resources = replace(resources, vectors=1 << 62, micro_batch=GRADIENT_RESPONSES)
        self.J = TokenJacobian(policy, self.batch, resources, precision=precision)
        self._tokens, self.progress = tokens, self.J.resources.progress
        self.of: Quantity = LOGPROB
        """The quantity whose gradients are measured; without weights unless it is log π."""
        self.check: SelfCheck | None = None
        """Result of the self-check; None before entering, or if it is off."""
        self.pass_seconds: float | None = None
        """Seconds of a forward pass over the batch in one process; None before it is known."""
        self.notes: tuple[Note, ...] = ()
        """Logged columns that contradict the policy; in the main process only."""
        self.all_prompts = len(self.J.prompts)
        """Number of prompts in the batch."""
        self._optimizer_state = optimizer_state if settings.metric == "adamw" else None
        self.watch = watch or Stopwatch()
        """Measures the time since the start, with that of earlier runs."""
        self.statistics: BatchStatistics | None = None
        """Statistics of the tokens in use; None before entering, and within minutes."""
        self.verdict_minutes: float | None = None
        """Time limit that would give a verdict, if less is given. None: it suffices, or none would."""
        self._probabilities: np.ndarray | None = None
        self._scale: Float[Tensor, " P"] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of kept response tokens."""
        return self.batch.num_tokens

    @property
    def meter(self) -> TokenGradientMeter:
        """The engine."""
        return self.J.meter

    def __enter__(self) -> TableMeasurement:
        with ExitStack() as stack:  # restores the model if it is refused or the self-check fails
            stack.enter_context(self.J.frozen())
            if self.settings.fast and self.meter.precision is None:
                raise no_fast_mode(self.policy)
            self._prepare()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _prepare(self) -> None:
        """Score all tokens, choose those to measure, and check the engine on some."""
        start, known = perf_counter(), {"processes": self.processes, "progress": self.progress}
        loss = self.settings.loss if self.of == LOGPROB else None
        with self.J.row_norms(of=self.of).engine() as meter:
            self.statistics = find_statistics(meter, self.batch, loss, edges=self.edges, **known)
        if loss is None:
            self.statistics.columns.update(zip(("value", "clamped"), self.J.evaluate(self.of), strict=True))
        seconds = self.processes.count * (perf_counter() - start)
        if self.processes.is_main:
            self.notes = note_logged(self.policy, self.batch, self.statistics.columns)
        self.pass_seconds = self.processes.gather([seconds])[0]
        generator = np.random.default_rng(self.settings.seed)
        weights = self.statistics.columns.get("weight", torch.full((self.num_tokens,), torch.nan))
        measured, self._scale = self._draw(generator, weights.numpy()), self._find_scale(weights)
        self._select(measured)
        if self.settings.self_check:
            self.check = self._self_check(self.J, self.statistics, generator)

    def fill(self, parts: Parts) -> Iterator[pd.DataFrame]:
        """Measure what `parts` lack; return the table, a DataFrame per response, which is read from it on iteration."""
        missing = []
        if self.processes.is_main:
            missing = [row for row in range(len(self.batch)) if not parts.has_part(row)]
        with self.processes.together():
            self._fill_share(parts, self.processes.gather(missing))
        return map(parts.read_part, range(len(self.batch)))

    def _fill_share(self, parts: Parts, left: list[int]) -> None:
        """Measure this process's share of the remaining parts; progress shows the main process's share."""
        counts = [len(sequence.measured) for sequence in self.row_norms.sequences]
        mine, missing = self.row_norms.share(left), set(left)
        ours = sum(counts[row] for group in mine for row in group if row in missing)
        total = sum(counts) if self.processes.count == 1 else ours
        with self.progress.stage("measuring", total, "tokens", done=total - ours) as advance:
            for group in mine:
                # Measure the whole group even if only some parts are missing: results depend on the grouping by
                # rounding.
                for row, frame in zip(group, self.measure_responses(group), strict=True):
                    if row in missing:
                        parts.write_part(row, frame)
                        advance(counts[row])

    def describe_sample(self) -> dict[str, Any] | str:
        """Say, for a manifest, which tokens were measured, and why."""
        if (each := self.settings.tokens_per_interval) is None:
            return "every token"
        reasons = {"auto": f"the default above {BUDGET:,} tokens", "enough": f"{EACH_PROMPT} per prompt"}
        why = reasons.get(self.asked.tokens_per_interval, "requested")
        return {"tokens_per_interval": each, "why": why, "drawn": self.settings.sample}

    def measure_responses(self, group: Sequence[int]) -> list[pd.DataFrame]:
        """Measure one group. Return a DataFrame per response, empty if it keeps no token."""
        found = self.row_norms.measure(group)
        return [self._frame(row, gradients) for row, gradients in zip(group, found, strict=True)]

    def _find_scale(self, weights: Float[Tensor, " K"]) -> Float[Tensor, " P"] | None:
        """Return AdamW's 1 ⊘ (√v̂ + ε), v̂ after the step on the whole batch; None if not requested or unknown."""
        if self._optimizer_state is None or weights.isnan().any():
            return None
        state, gradients = self._optimizer_state, self.J.alone().vjp(-weights[None] / self.num_tokens)
        gradient = gradients.rows[0]
        clip = state.clip_factor(square_norm(*(gradient[gradients.slices[name]] for name in state.exp_avg_sq)))
        return state.turn_into_scale(self.policy.model, gradient).div_(clip)

    def _draw(self, generator: np.random.Generator, weights: Float[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Return the mask [n] of the tokens to measure."""
        each = self.settings.tokens_per_interval
        if self._tokens is not None:
            return np.isin(np.arange(self.num_tokens), self._tokens.cpu().numpy())
        if each is None:
            return np.ones(self.num_tokens, dtype=bool)
        norms = self.statistics.columns[LOGITS].numpy()
        sizes = token_sizes(self.settings.sample, self.statistics.intervals, norms, weights)
        sample = TokenSample(self.statistics.intervals, len(self.edges) - 1, sizes, generator)
        if each < sample.largest:
            self._probabilities = sample.probabilities(each)
        return sample.take(each)

    def _select(self, measured: Bool[np.ndarray, " n"]) -> None:
        """Select the kept tokens to measure from now on."""
        self.row_norms = self.J.row_norms(torch.from_numpy(measured), scale=self._scale, of=self.of)

    def _self_check(self, J: TokenJacobian, known: BatchStatistics, generator: np.random.Generator) -> SelfCheck:
        """Compare some tokens of every non-empty interval with plain autograd. Raises SelfCheckError."""
        size = sum(p.numel() for p in J.model.parameters())
        with self.progress.stage("self-check"):
            chosen = choose_checked(known.intervals, known.responses, known.prefixes, generator, parameters=size)
            rows = J.row_norms(torch.from_numpy(chosen), scale=self._scale, of=self.of)
            with rows.engine() as meter:
                return check_engine(meter, [sequence for sequence in rows.sequences if sequence.lengths])

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        """Groups of modules that get columns: group → its modules."""
        groups: dict[str, list[str]] = {}
        if self.settings.per_module:
            groups = {name: [name] for name in self.meter.module_names}
        if self.settings.module_groups:
            for name, (_, group) in module_groups(self.policy).items():
                groups.setdefault(group, []).append(name.rpartition(".")[0])
        return {group: sorted({*modules}) for group, modules in groups.items()}

    def _frame(self, row: int, gradients: TokenGradients) -> pd.DataFrame:
        """Return one response's rows of the table."""
        if not len(gradients.logit_grad_norm):
            return pd.DataFrame()
        return to_frame(self._known(self.statistics, row, row) | self._norms(gradients))

    def _known(self, statistics: BatchStatistics, place: int, row: int) -> dict[str, object]:
        """Return the columns that need no backward pass. place: of a response in the statistics; row: in the batch."""
        mine, known = statistics.span(place), statistics.of(place)
        logit_grad_norm = known.pop(LOGITS)
        columns = identify_tokens(self.policy, self.batch.select([row]), row) | known
        columns["interval"] = statistics.intervals[mine]
        if self._probabilities is not None:
            columns[SAMPLING_PROBABILITY] = self._probabilities[mine].astype(np.float32)
        return columns | {LOGITS: logit_grad_norm}

    def _norms(self, gradients: TokenGradients) -> dict[str, Tensor]:
        """Return the columns that need a backward pass."""
        columns = gradient_columns(gradients, self._modules)
        if self.settings.metric is not None and ADAMW not in columns:
            columns[ADAMW] = torch.full_like(columns[PARAMETERS], float("nan"))
        return columns


def fill_table(measurement: TableMeasurement) -> pd.DataFrame:
    """Run a measurement; return the table of all processes."""
    parts = Memory()
    with measurement:
        frames = measurement.fill(parts)
        parts.update(dict(measurement.processes.gather([*parts.items()])))  # which `frames` reads only now
        return join_responses(frames)


def join_responses(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the responses' parts, in order, into the token table."""
    return pd.concat(filter(len, frames), ignore_index=True)


def _check_tokens(tokens: Tensor | None, settings: MeasureSettings, count: int) -> None:
    """Raise InputError for indices out of range, or if another setting chooses tokens as well."""
    if tokens is None:
        return
    if settings.minutes is not None:
        raise InputError("tokens and minutes are both given, but each sets what to measure; give one")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < count:
        raise InputError(
            f"tokens holds indices from {int(tokens.min())} to {int(tokens.max())}; the response tokens that "
            f"response_mask keeps are 0 to {count - 1}"
        )
