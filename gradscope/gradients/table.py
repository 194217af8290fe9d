"""Building the token table: one row per response token, with unweighted norms.

Settings are resolved; statistics that need no backward pass are computed for every token, and decide which tokens get
one; J measures the norms of their rows, one group of responses at a time; the results become columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.budget.pilot import glance, run_pilot
from gradscope.gradients.budget.shared_minutes import AFTER, Prices, Shares, share_seconds
from gradscope.gradients.budget.timed_rounds import Stopwatch
from gradscope.gradients.checked_tokens import choose_checked
from gradscope.gradients.columns import (
    ADAMW,
    LOGITS,
    PARAMETERS,
    backward_columns,
    gradient_columns,
    identify_tokens,
    to_frame,
)
from gradscope.gradients.engine.results import SelfCheck, TokenGradients
from gradscope.gradients.engine.self_check import check_engine
from gradscope.gradients.logged_logprobs import note_logged
from gradscope.gradients.operator.forward_mode import BACKWARD
from gradscope.gradients.operator.gram import SumsPlan
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.gradients.sample import SAMPLING_PROBABILITY, TokenSample, token_sizes
from gradscope.gradients.settings import (
    MeasureSettings,
    check_settings,
    fast_precision,
    no_fast_mode,
    settle_batch,
    settle_minutes,
    settle_sample,
)
from gradscope.gradients.statistics import BatchStatistics, find_statistics
from gradscope.intervals import EDGES
from gradscope.policy import AdamWState, Policy, module_groups, square_norm
from gradscope.resampling import FEWEST
from gradscope.rollouts import Note, TokenBatch, own_first, served_prompts
from gradscope.runs import track

Number = int | float
MARGIN = 1.2
"""Factor on the time that a verdict is estimated to take."""
GRADIENT_RESPONSES = 4
"""Responses per forward pass for the whole batch's gradient."""


class TableMeasurement:
    """A context manager that measures a token table, one group of responses at a time; `measure` does it in one call.

    Entering freezes the model, finds the rules for its modules, computes the statistics, draws the tokens to measure
    and runs the self-check; leaving restores the model.

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
    ) -> None:
        check_settings(settings)
        self.policy, self.edges, self.processes = policy, [float(e) for e in edges], resources.processes
        limited = settle_minutes(settings, policy, policy.device.type)
        self.settings = settle_sample(
            limited, batch.num_tokens, num_prompts=len(batch.group_ids.unique()), intervals=len(self.edges) - 1
        )
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
        self.check: SelfCheck | None = None
        """Result of the self-check; None before entering, or if it is off."""
        self.pass_seconds: float | None = None
        """Seconds of a forward pass over the batch in one process; None before entering."""
        self.notes: tuple[Note, ...] = ()
        """Logged columns that contradict the policy; set on entering, in the main process only."""
        self._optimizer_state = optimizer_state if settings.metric == "adamw" else None
        self.sample: TokenSample | None = None
        """The order in which tokens are drawn, if not all are measured; set on entering."""
        self.watch = Stopwatch()
        """Measures the time against `minutes`."""
        self.follows: SumsPlan | None = None
        """How gradients will be summed after the table, within the same minutes."""
        self.passes: float | None = None
        """Forward passes of everything that follows the table; None: only the sums."""
        self.all_prompts = len(self.J.prompts)
        """Number of prompts in the batch."""
        self.statistics: BatchStatistics | None = None
        """Statistics of the tokens in use; None before entering."""
        self.num_prompts: int | None = None
        """Number of prompts in use, as many as the minutes allow; None before entering."""
        self.when_chosen: Callable[[], None] = lambda: None
        """Called on entering, once the prompts in use are known."""
        self.reserve = 0.0
        """Seconds reserved for everything after the table; set on entering."""
        self.at_once = False
        """Whether all tokens fit into the minutes, and are measured in one round; set on entering."""
        self.verdict_minutes: float | None = None
        """Time limit that would give a verdict, if less is given; set on entering. None: it suffices, or none would."""
        self.when_short: Callable[[float, int], None] = lambda minutes, prompts: None
        """Called early on entering if the minutes are too few, with the number that would do, and for how many prompts:
        those of a verdict, or the least if the batch has none."""

    @property
    def num_tokens(self) -> int:
        """Number of kept response tokens."""
        return self.batch.num_tokens

    def __enter__(self) -> TableMeasurement:
        with ExitStack() as stack:  # restores the model if it is refused or the self-check fails
            stack.enter_context(self.J.frozen())
            self._probabilities: np.ndarray | None = None
            self._scale: Float[Tensor, " P"] | None = None
            self.meter = self.J.meter
            if self.settings.fast and self.meter.precision is None:
                raise no_fast_mode(self.policy)
            if self.settings.minutes is not None:
                self._look_at_prompts()
            start = perf_counter()
            self.statistics = find_statistics(
                self.meter,
                self.batch,
                self.settings.loss,
                edges=self.edges,
                processes=self.processes,
                progress=self.progress,
            )
            seconds = self.processes.count * (perf_counter() - start)
            if self.processes.is_main:
                self.notes = note_logged(self.policy, self.batch, self.statistics.columns)
            self.pass_seconds = self.processes.gather([seconds])[0]
            generator = np.random.default_rng(self.settings.seed)
            measured, self._scale = self._draw(generator), self._find_scale()
            self._select(measured)
            if self.settings.self_check and self.check is None:
                self.check = self._self_check(self.J, self.statistics, generator)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _look_at_prompts(self) -> None:
        """Keep a random subset of the prompts that fits into the minutes, with time left for what follows the table."""
        order = torch.from_numpy(np.random.default_rng([self.settings.seed, 1]).permutation(self.J.prompts.numpy()))
        order = own_first(self.batch, order)
        with self.processes.together(), self.progress.stage("timing a few responses"):
            mine = [self._share_minutes(order)] if self.processes.is_main else []
        shares, self.reserve, self.at_once, self.verdict_minutes, self.check = self.processes.gather(mine)[0]
        if self.num_prompts is None:
            self.num_prompts = shares.scored
        if self.num_prompts < len(order):
            self.J = self.J.of_prompts(order[: self.num_prompts])
            self.batch = self.J.batch
        self.when_chosen()

    def _share_minutes(self, order: Int[Tensor, " n"]) -> tuple[Shares, float, bool, float | None, SelfCheck | None]:
        """Return what fits, the seconds kept for later, whether that is everything, the minutes of a verdict if fewer
        are given, and a self-check.
        """
        total, check = 60 * self.settings.minutes, None
        follows = self.follows if self._is_weighted() else None
        after = AFTER if self.follows is not None else 0.0  # for the page
        asked = (self.settings.loss, self.edges, follows)
        rough, wanted = glance(self.J.alone(), self.edges, follows, passes=self.passes), self._wanted(order)
        metric = 1 + BACKWARD if self._optimizer_state is not None else 0.0  # v̂ includes this gradient
        rough = replace(rough, scoring=rough.scoring * (1 + metric))
        summable = self.follows is None or self.follows.groups >= len(order)
        left = total - self.watch.seconds() - after
        if summable and MARGIN * rough.of_all(len(order)) <= left * self.processes.count:  # not worth a pilot
            reserve = after + rough.summing * len(order) / self.processes.count
            return Shares(len(order), self.num_tokens, len(order)), reserve, True, None, None
        fewest = 1 if self.passes is None else min(2, len(order))  # a comparison needs the variation between prompts
        if (needed := rough.of_verdict(wanted or fewest) / self.processes.count) > left:
            self.when_short(MARGIN * (needed + total - left) / 60, wanted or fewest)
        pilot = run_pilot(self.J.alone(), order, *asked, passes=self.passes)
        if self.settings.self_check and self._optimizer_state is None:  # AdamW's metric is not known yet
            check = self._self_check(pilot.J, pilot.statistics, np.random.default_rng(self.settings.seed))
        spent, each = self.watch.seconds(), self.processes.count
        prices = Prices(*(seconds / each for seconds in vars(pilot.prices).values()))
        prices = replace(prices, scoring=prices.scoring + pilot.prices.scoring * metric)  # each makes all of it
        most = {"tokens": self.num_tokens, "summable": None if self.follows is None else self.follows.groups}
        left = total - spent - after
        if summable and prices.of_all(len(order)) <= left:
            shares = Shares(len(order), self.num_tokens, len(order))
            return shares, after + prices.summing * len(order), True, None, check
        least = {"least": fewest} if wanted is None else {"least": fewest, "fewest": wanted}
        shares = share_seconds(left, prices, prompts=len(order), **most, **least)
        needed = None if wanted is None else prices.of_verdict(wanted)
        verdict = None if needed is None or needed <= left else MARGIN * (needed + total - left) / 60
        return shares, after + prices.summing * shares.summed, False, verdict, check

    def _wanted(self, order: Int[Tensor, " n"]) -> int | None:
        """Return how many prompts, in this order, include as many with a gradient as a verdict needs; None: not even
        all."""
        served = torch.isin(order, served_prompts(self.whole)).cumsum(0)
        return int((served < FEWEST).sum()) + 1 if len(served) and served[-1] >= FEWEST else None

    def _is_weighted(self) -> bool:
        """Return whether any token can have a weight, by advantage or KL; otherwise there is nothing to sum."""
        advantages, loss = self.whole.advantages, self.settings.loss
        pulled = loss.kl_coef > 0 and self.whole.ref_logprobs is not None
        return pulled or (advantages is not None and bool(advantages[self.whole.response_mask].any()))

    def measure_responses(self, group: Sequence[int]) -> list[pd.DataFrame]:
        """Measure one group. Return a DataFrame per response, empty if it keeps no token."""
        found = self.row_norms.measure(group)
        return [self._frame(row, gradients) for row, gradients in zip(group, found, strict=True)]

    def measure_more(self, previous: int, each: int) -> pd.DataFrame:
        """Measure the tokens added when the sample grows from `previous` to `each` per interval (this process's share).

        Returns the columns that need a backward pass, with a row per token indexed by its row in the table.
        """
        measured = self.sample.take(each) & ~self.sample.take(previous)
        self._select(measured)
        rows = np.unique(self.statistics.responses[measured]).tolist()
        parts, name = [], f"measuring {each} tokens of each interval"
        for group in track(self.row_norms.share(rows), name, self.progress, unit="passes"):
            for row, frame in zip(group, self.measure_responses(group), strict=True):
                own = measured[self.statistics.span(row)].nonzero()[0]
                parts.append(frame[backward_columns(frame)].iloc[own].set_index(self.statistics.bounds[row] + own))
        return pd.concat(parts) if parts else pd.DataFrame()

    def cost_of_more(self, previous: int, each: int) -> float:
        """Return the cost of `measure_more` over all processes, in positions × tokens carried by backward passes."""
        return self.statistics.backward_cost(self.sample.take(each) & ~self.sample.take(previous))

    def tabulate(self, norms: pd.DataFrame, each: int) -> Iterator[pd.DataFrame]:
        """Yield the table of a sample of `each` per interval by response; norms: `measure_more` of all its tokens."""
        self._select(np.zeros(self.num_tokens, dtype=bool))
        self._probabilities = self._sampling_probabilities(each)
        norms = norms.sort_index()
        for row in range(len(self.batch)):
            (frame,), mine = self.measure_responses([row]), self.statistics.span(row)
            own = norms.loc[mine.start : mine.stop - 1]
            if len(own):
                frame.loc[own.index - mine.start, own.columns] = own.to_numpy()
            yield frame

    def _find_scale(self) -> Float[Tensor, " P"] | None:
        """Return AdamW's 1 ⊘ (√v̂ + ε), v̂ after the step on the whole batch; None if not requested or unknown."""
        weights = self.statistics.columns["weight"]
        if self._optimizer_state is None or weights.isnan().any():
            return None
        state, gradients = self._optimizer_state, self.J.alone().vjp(-weights[None] / self.num_tokens)
        gradient = gradients.rows[0]
        clip = state.clip_factor(square_norm(*(gradient[gradients.slices[name]] for name in state.exp_avg_sq)))
        return state.turn_into_scale(self.policy.model, gradient).div_(clip)

    def _draw(self, generator: np.random.Generator) -> Bool[np.ndarray, " n"]:
        """Return the mask [n] of the tokens to measure; all False if minutes decide."""
        each = self.settings.tokens_per_interval
        if self._tokens is not None:
            return np.isin(np.arange(self.num_tokens), self._tokens.cpu().numpy())
        if each is None and self.settings.minutes is None:
            return np.ones(self.num_tokens, dtype=bool)
        norms, weights = (self.statistics.columns[name].numpy() for name in ("logit_grad_norm", "weight"))
        sizes = token_sizes(self.settings.sample, self.statistics.intervals, norms, weights)
        self.sample = TokenSample(self.statistics.intervals, len(self.edges) - 1, sizes, generator)
        if each is not None:
            self._probabilities = self._sampling_probabilities(each)
        return self.sample.take(each or 0)

    def _sampling_probabilities(self, each: int) -> np.ndarray | None:
        """Return the sampling probabilities for `each` per interval; None if every token is measured."""
        return self.sample.probabilities(each) if each < self.sample.largest else None

    def _select(self, measured: Bool[np.ndarray, " n"]) -> None:
        """Select the kept tokens to measure from now on."""
        self.row_norms = self.J.row_norms(torch.from_numpy(measured), scale=self._scale)

    def _self_check(self, J: TokenJacobian, known: BatchStatistics, generator: np.random.Generator) -> SelfCheck:
        """Compare some tokens of every non-empty interval with plain autograd. Raises SelfCheckError."""
        size = sum(p.numel() for p in J.model.parameters())
        with self.progress.stage("self-check"):
            chosen = choose_checked(known.intervals, known.responses, known.prefixes, generator, parameters=size)
            rows = J.row_norms(torch.from_numpy(chosen), scale=self._scale)
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
        mine, known = self.statistics.span(row), self.statistics.of(row)
        if mine.start == mine.stop:
            return pd.DataFrame()
        logit_grad_norm = known.pop(LOGITS)
        columns = identify_tokens(self.policy, self.batch.select([row]), row) | known
        columns["interval"] = self.statistics.intervals[mine]
        if self._probabilities is not None:
            columns[SAMPLING_PROBABILITY] = self._probabilities[mine].astype(np.float32)
        columns |= {LOGITS: logit_grad_norm} | gradient_columns(gradients, self._modules)
        if self.settings.metric is not None and ADAMW not in columns:
            columns[ADAMW] = torch.full_like(columns[PARAMETERS], float("nan"))
        return to_frame(columns)


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
