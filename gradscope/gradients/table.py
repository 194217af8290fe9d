"""From a policy and what it sampled to the token table: one row per response token, measured for unit weight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import pairwise
from math import inf
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from gradscope.errors import InputError
from gradscope.gradients.checked_tokens import lighten_check
from gradscope.gradients.columns import (
    describe_tokens,
    identify_tokens,
    known_advantages,
    refuse_endless_weights,
    to_column,
)
from gradscope.gradients.engine.chunks import POSITION_COST
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.results import SelfCheck, TokenGradients
from gradscope.gradients.engine.self_check import check_engine
from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.gradients.estimate_plan import EstimatePlan, check_estimates, plan_estimate
from gradscope.gradients.estimates import estimate_response
from gradscope.gradients.hooks import measuring
from gradscope.gradients.rounds import Stopwatch, join_rounds, measure_rounds
from gradscope.gradients.sample import COLUMN, TokenSample, token_sizes
from gradscope.gradients.settings import (
    CHECKED_EACH,
    MeasureSettings,
    check_batch,
    check_chunks,
    check_settings,
    fast_precision,
    no_fast_mode,
    settle_sample,
)
from gradscope.intervals import EDGES, assign_intervals
from gradscope.objective import TokenStatistics, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes, deal_by_cost

Number = int | float


BACKWARD = ("act_grad_norm.", "param_grad_norm.")
"""Beside param_grad_norm, how the names of columns begin that take a backward pass."""


class TableMeasurement:
    """A measurement that is going on: enter it, ask for the responses group by group, leave it.

    Entering freezes the model, finds the rules for its modules, runs the self-check and draws the subset; leaving puts
    everything back. `measure` does all of it in one call; this class is for those who store results as they come.

    processes: of several, each holds the policy and the whole batch, all enter together, and each may ask for the
    groups that it likes: a response's rows do not depend on who measures it.
    """

    def __init__(
        self,
        policy: Policy,
        batch: TokenBatch,
        settings: MeasureSettings,
        *,
        edges: Sequence[Number] = EDGES,
        tokens: Int[Tensor, " k"] | None = None,
        chunk_rows: int | None = None,
        chunk_memory: int = 1 << 30,
        processes: Processes = ALONE,
    ) -> None:
        check_settings(settings)
        check_chunks(chunk_rows, chunk_memory)
        if tokens is not None and settings.minutes is not None:
            raise InputError("tokens are given and minutes too, and each says what to measure; give one")
        self.policy, self.edges, self.processes = policy, [float(e) for e in edges], processes
        self.settings = settle_sample(settings, batch.num_tokens, intervals=len(self.edges) - 1)
        """Those that are measured with: a number or None where "auto" was given."""
        if settings.temperature is not None:
            batch = batch.at_temperature(settings.temperature)
        check_batch(policy, batch)
        _check_tokens(tokens, batch.num_tokens)
        if batch.advantages is None and batch.rewards is not None:
            batch = replace(batch, advantages=resolve_advantages(batch, eps=settings.advantage_eps))
        self.batch = batch
        """At the temperatures and with the advantages that are measured with."""
        self.num_tokens = batch.num_tokens
        self._tokens, self._chunks = tokens, {"rows": chunk_rows, "memory": chunk_memory}
        self.check: SelfCheck | None = None
        """What the self-check found; None before entering, and where it was switched off."""
        self.estimate_plan = self._plan_estimate() if settings.norms == "estimate" else None
        """What is estimated, and why; None for exact norms."""
        self.pass_seconds: float | None = None
        """That a forward pass over the batch took in one process; None before entering."""
        self.groups: list[list[int]] = []
        """Rows of the batch that are measured together; none before entering."""
        self.sample: TokenSample | None = None
        """What is drawn from where not all tokens are measured, once entered."""

    def __enter__(self) -> TableMeasurement:
        with ExitStack() as stack:  # everything comes back if the model or the self-check refuses
            stack.enter_context(torch.inference_mode(False))  # gradients flow, whatever the caller switched off
            stack.enter_context(measuring(self.policy.model))
            longest = int(self.batch.attention_mask.sum(1).argmax())
            kind = self.policy.dtype, self.policy.device.type
            precision = fast_precision(*kind) if self.settings.fast else "exact"
            probe, _ = self._sequence(longest)
            self.meter = TokenGradientMeter(self.policy, probe, precision=precision, **self._chunks)
            if self.settings.fast and self.meter.precision is None:
                raise no_fast_mode(self.policy)
            self._bounds = np.cumsum([0, *self.batch.response_mask.sum(1).tolist()])
            self._prefixes = np.concatenate([self.batch.sequence(row)[1].numpy() for row in range(len(self.batch))])
            start = perf_counter()
            self._known = self._all_known()
            seconds = self.processes.count * (perf_counter() - start)
            self.pass_seconds = self.processes.gather([seconds])[0]
            prob = torch.cat([statistics.logprob.float().exp() for statistics, _ in self._known])
            self._intervals = assign_intervals(prob.numpy(), self.edges).astype(np.int16)
            generator = np.random.default_rng(self.settings.seed)
            self._draw_measured(generator)
            if self.settings.self_check:
                self.check = self._self_check(generator)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def share(self, rows: Sequence[int]) -> list[list[int]]:
        """The groups with any of these rows that this process measures: shares are everyone's.

        They cost about the same, as far as whole groups allow. Inside the context alone. A response is taken to cost
        what its measured tokens have before them, in tokens.
        """
        wanted = set(rows)
        indices = [index for index, group in enumerate(self.groups) if wanted & set(group)]
        costs = [float(sum(self._prefixes[self._places(row)].sum() for row in self.groups[index])) for index in indices]
        mine = deal_by_cost(indices, costs, self.processes.count)[self.processes.rank]
        return [self.groups[index] for index in mine]

    def measure_responses(self, group: Sequence[int]) -> list[pd.DataFrame]:
        """The table's rows of each response of one of the groups; none of one whose response_mask keeps nothing.

        Of other rows together the numbers are the same but for rounding.
        """
        if not any(len(self._known[row][1]) for row in group):
            return [pd.DataFrame() for _ in group]
        if not any(self._is_measured(row) for row in group):
            return [self._frame(row, self._unmeasured(row)) for row in group]
        gradients = self.meter.measure_together([self._tokens_of(row) for row in group])
        return [self._frame(row, found) for row, found in zip(group, gradients, strict=True)]

    def measure_more(self, previous: int, each: int, *, progress: bool = False) -> pd.DataFrame:
        """Norms of the tokens that a sample of `each` per interval holds beside one of `previous`: this process's part.

        A row per token, whose index is its place in the table; the columns that take a backward pass.
        """
        self._settle(self.sample.take(each) & ~self.sample.take(previous))
        parts, rows = [], [row for row in range(len(self.batch)) if self._is_measured(row)]
        for group in tqdm(self.share(rows), f"{each} of each interval", disable=not progress or None):
            for row, frame in zip(group, self.measure_responses(group), strict=True):
                places = self._places(row)
                part = frame[_backward_columns(frame)].iloc[places - self._bounds[row]]
                parts.append(part.set_index(places))
        return pd.concat(parts) if parts else pd.DataFrame()

    def cost_of_more(self, previous: int, each: int) -> float:
        """What the tokens of `measure_more` cost, in all processes: positions × tokens that a backward pass carries."""
        measured = self.sample.take(each) & ~self.sample.take(previous)
        rows = np.unique(np.repeat(np.arange(len(self.batch)), np.diff(self._bounds))[measured])
        reaches = self._prefixes[self._bounds[rows + 1] - 1].sum()
        return float(self._prefixes[measured].sum() + POSITION_COST * reaches)

    def tabulate(self, norms: pd.DataFrame, each: int) -> pd.DataFrame:
        """The whole table of a sample of `each` per interval; norms: what `measure_more` gave, of all processes."""
        self._settle(np.zeros(self.num_tokens, dtype=bool))
        self._find_probabilities(each)
        table = join_responses([self.measure_responses([row])[0] for row in range(len(self.batch))])
        table.loc[norms.index, norms.columns] = norms
        return table

    def _tokens_of(self, row: int) -> SequenceTokens:
        ids, targets = self._sequence(row)
        measured = torch.from_numpy(self._measured[slice(*self._bounds[row : row + 2])].nonzero()[0])
        return SequenceTokens(ids, targets, measured.to(ids.device), float(self.batch.temperature[row]))

    def _settle(self, measured: np.ndarray) -> None:
        """These of the kept tokens, in the table's order, get a backward pass from now on."""
        self._measured = measured
        filled = [row for row in range(len(self.batch)) if len(self._known[row][1])]
        groups = self.meter.group([self._tokens_of(row) for row in filled])
        empty = [[row] for row in range(len(self.batch)) if row not in set(filled)]
        self.groups = sorted([*empty, *([filled[i] for i in group] for group in groups)], key=min)

    def _places(self, row: int) -> np.ndarray:
        """Places, among all tokens, of one response's tokens that get a backward pass."""
        start, end = self._bounds[row : row + 2]
        return start + self._measured[start:end].nonzero()[0]

    def _is_measured(self, row: int) -> bool:
        """Whether any token of this response gets a backward pass."""
        return bool(self._measured[slice(*self._bounds[row : row + 2])].any())

    def _unmeasured(self, row: int) -> TokenGradients:
        """What takes no backward pass in a response, NaN for the rest."""
        statistics, norms = self._known[row]
        unknown = torch.full_like(norms, float("nan"))
        act = unknown[:, None].expand(-1, len(self.policy.blocks) + 1).clone()
        return TokenGradients(statistics, norms, act, unknown, {})

    def _frame(self, row: int, gradients: TokenGradients) -> pd.DataFrame:
        mine, one = slice(*self._bounds[row : row + 2]), self.batch.select([row])
        frame = identify_tokens(self.policy, one, row)
        statistics, logit_grad_norm = self._known[row]
        frame |= describe_tokens(one, statistics, self.settings.loss, num_tokens=self.num_tokens)
        frame["interval"] = self._intervals[mine]
        if self._probabilities is not None:
            frame[COLUMN] = self._probabilities[mine].astype(np.float32)
        frame |= {"logit_grad_norm": logit_grad_norm}
        frame |= {f"act_grad_norm.{layer}": norms for layer, norms in enumerate(gradients.act_grad_norm.T)}
        frame["param_grad_norm"] = gradients.param_grad_norm
        if self.estimate_plan is not None:
            frame |= self._estimate(row, frame["weight"])
        if self.settings.per_module:
            unused = torch.where(gradients.param_grad_norm.isnan(), gradients.param_grad_norm, 0.0)
            norms = gradients.module_grad_norm
            frame |= {f"param_grad_norm.{name}": norms.get(name, unused) for name in self._module_names()}
        return pd.DataFrame({name: to_column(values) for name, values in frame.items()})

    def _plan_estimate(self) -> EstimatePlan:
        if self._tokens is not None:
            raise InputError("tokens are given and norms are estimates, which serve every token at once; give one")
        return plan_estimate(
            self.policy.model,
            self.batch,
            passes=self.settings.passes,
            draws=self.settings.draws,
            intervals=len(self.edges) - 1,
            weighted=not bool(known_advantages(self.batch)[self.batch.response_mask].isnan().all()),
        )

    def _estimate(self, row: int, weights: Tensor) -> dict[str, Tensor]:
        """The columns that are estimates; a response's random numbers depend on the seed and on its row alone."""
        return estimate_response(
            self.policy.model,
            self.batch.select([row]),
            torch.from_numpy(self._intervals[slice(*self._bounds[row : row + 2])]).long(),
            weights,
            self.estimate_plan.counts,
            seed=(self.settings.seed, row),
            memory=self._chunks["memory"],
        )

    def _module_names(self) -> list[str]:
        """Modules that own parameters; of two that share a table, the embedding."""
        claims = self.meter.claims
        return sorted({*claims.rules, *claims.general.values()} - set(claims.tied[1:] if claims.tied else ()))

    def _sequence(self, row: int) -> tuple[Tensor, Tensor]:
        ids, targets = self.batch.sequence(row)
        return ids.to(self.policy.device), targets.to(self.policy.device)

    def _all_known(self) -> list[tuple[TokenStatistics, Tensor]]:
        """`_find_known` of every response, each found by one of the processes."""
        with self.processes.together():
            mine = range(self.processes.rank, len(self.batch), self.processes.count)
            found = [(row, self._find_known(row)) for row in mine]
        return [known for _, known in sorted(self.processes.gather(found), key=lambda pair: pair[0])]

    def _find_known(self, row: int) -> tuple[TokenStatistics, Tensor]:
        """What of one response's tokens takes no backward pass, on the CPU: its statistics and ‖e − π‖.

        From a pass of its own: whatever is measured beside it, π has the same digits in every column.
        """
        ids, targets = self._sequence(row)
        if not len(targets):
            return TokenStatistics(*torch.zeros(3, 0)), torch.zeros(0)
        statistics, norms = self.meter.measure_cheaply(ids, targets, temperature=float(self.batch.temperature[row]))
        if not statistics.entropy.isfinite().all():
            raise InputError(
                f"the policy's logits are NaN on response {row}; load a sound checkpoint, or another --dtype"
            )
        if impossible := (statistics.logprob == -inf).nonzero().flatten().tolist():
            position = int(self.batch.positions()[row][self.batch.response_mask[row]][impossible[0]])
            raise InputError(
                f"response {row} has a token at position {position} that the policy cannot produce (π is exactly 0); "
                "was it sampled by another policy? Drop the token by response_mask, or the response"
            )
        statistics = TokenStatistics(*(getattr(statistics, f.name).cpu() for f in fields(statistics)))
        one = self.batch.select([row])
        described = describe_tokens(one, statistics, self.settings.loss, num_tokens=self.num_tokens)
        positions = one.positions()[0][one.response_mask[0]]
        refuse_endless_weights(described | {"response": torch.full_like(positions, row), "position": positions})
        return statistics, norms.cpu()

    def _draw_measured(self, generator: np.random.Generator) -> None:
        """Settle which tokens get a backward pass: none yet where time decides."""
        self._probabilities = None
        each = self.settings.tokens_per_interval
        if self._tokens is not None:
            self._settle(np.isin(np.arange(self.num_tokens), self._tokens.cpu().numpy()))
        elif each is None and self.settings.minutes is None:
            self._settle(np.full(self.num_tokens, self.estimate_plan is None))
        else:
            norms = torch.cat([norms for _, norms in self._known]).numpy()
            sizes = token_sizes(self.settings.sample, self._intervals, norms, self._all_weights())
            self.sample = TokenSample(self._intervals, len(self.edges) - 1, sizes, generator)
            self._settle(self.sample.take(each or 0))
            if each is not None:
                self._find_probabilities(each)

    def _find_probabilities(self, each: int) -> None:
        """Those of a sample of `each` per interval; none where it holds every token."""
        self._probabilities = self.sample.probabilities(each) if each < self.sample.largest else None

    def _all_weights(self) -> np.ndarray:
        """w_t of every token, NaN where unknown."""
        weights = [
            describe_tokens(self.batch.select([row]), statistics, self.settings.loss, num_tokens=self.num_tokens)
            for row, (statistics, _) in enumerate(self._known)
        ]
        return torch.cat([columns["weight"] for columns in weights]).numpy()

    def _self_check(self, generator: np.random.Generator, each: int = CHECKED_EACH) -> SelfCheck:
        """Compare some tokens of every interval that has any."""
        chosen = _draw_stratified(self._intervals, each, len(self.edges) - 1, generator)
        rows = np.repeat(np.arange(len(self.batch)), np.diff(self._bounds))
        if self.estimate_plan is not None:
            picks = [(int(rows[i]), int(i - self._bounds[rows[i]])) for i in chosen.nonzero()[0]]
            return check_estimates(
                self.policy.model, self.batch, picks, self.estimate_plan.counts, seed=self.settings.seed
            )
        prefixes = np.concatenate([self.batch.sequence(row)[1].cpu().numpy() for row in range(len(self.batch))])
        size = sum(p.numel() for p in self.policy.model.parameters())
        chosen = lighten_check(chosen, self._intervals, rows, prefixes, parameters=size)
        sequences = []
        for row, mine in enumerate(pairwise(self._bounds)):
            picks = torch.from_numpy(chosen[slice(*mine)].nonzero()[0])
            if len(picks):
                temperature = float(self.batch.temperature[row])
                sequences.append(SequenceTokens(*self._sequence(row), picks.to(self.policy.device), temperature))
        return check_engine(self.meter, sequences)


def measure(
    policy: Policy,
    batch: TokenBatch,
    *,
    tokens: Int[Tensor, " k"] | None = None,
    edges: Sequence[Number] = EDGES,
    chunk_rows: int | None = None,
    chunk_memory: int = 1 << 30,
    progress: bool = False,
    **settings: object,
) -> pd.DataFrame:
    """Measure every response token's own gradient: the token table, a row per token that response_mask keeps.

    settings: the fields of MeasureSettings (`temperature`, `tokens_per_interval`, `minutes`, `sample`, `loss`,
    `advantage_eps`, `seed`, `per_module`, `fast`, `self_check`, `norms`, `passes`, `draws`). tokens: indices into the
    kept tokens in the table's order; only these get a backward pass.
    edges: of the intervals of π. chunk_rows (positions × tokens; None: as suits the policy) and chunk_memory (bytes):
    how much one batched backward carries; they change speed, memory and rounding only.

    Columns: `response` (row of the batch), `group` (its prompt's), `position` (0-based within the response, dropped
    tokens counted), `token_id`, `token`, `logprob`, `prob`, `log_one_minus_prob`, `entropy` (nats, at the sampling
    temperature), `old_logprob`, `ref_logprob`, `advantage` (NaN if unknown), `policy_weight`, `kl_weight`, `weight`
    (Eq. 2's w_t, NaN without an advantage), `clipped`, `interval`, `sampling_probability` (of being measured, where a
    sample was drawn: see `token_sample`), and the L2 norms of the token gradient of log π for unit weight:
    `logit_grad_norm` (with respect to logits / T), `act_grad_norm.0` … `act_grad_norm.L`, `param_grad_norm`. What the
    token really contributes is `weight · norm`.

    With norms="estimate" `param_grad_norm` is an unbiased estimate, `act_grad_norm.*` is NaN, and
    `norm_estimates.estimate_response` says what the further columns are; `norm_estimates.interval_norms` sums them up.

    Raises InputError for a batch that does not fit the policy, SelfCheckError if the engine cannot be trusted on it.
    """
    watch = Stopwatch()
    measurement = TableMeasurement(
        policy,
        batch,
        MeasureSettings(**settings),
        edges=edges,
        tokens=tokens,
        chunk_rows=chunk_rows,
        chunk_memory=chunk_memory,
    )
    if measurement.settings.minutes is not None:
        with measurement:
            return join_rounds(measurement, list(measure_rounds(measurement, watch, progress=progress)))
    with measurement, tqdm(total=batch.num_tokens, desc="measuring", unit="token", disable=not progress or None) as bar:
        frames: dict[int, pd.DataFrame] = {}
        for group in measurement.groups:
            frames |= zip(group, measurement.measure_responses(group), strict=True)
            bar.update(sum(len(frames[row]) for row in group))
    return join_responses([frames[row] for row in range(len(batch))])


def join_responses(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The token table from its responses' parts, in their order."""
    return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)


def _backward_columns(frame: pd.DataFrame) -> list[str]:
    """Those that take a backward pass."""
    return [name for name in frame if name == "param_grad_norm" or name.startswith(BACKWARD)]


def _check_tokens(tokens: Tensor | None, count: int) -> None:
    if tokens is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < count:
        raise InputError(
            f"tokens holds indices from {int(tokens.min())} to {int(tokens.max())}; the response tokens that "
            f"response_mask keeps are 0 to {count - 1}"
        )


def _draw_stratified(intervals: np.ndarray, wanted: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """True for `wanted` random entries of each interval, or for all of one that has fewer."""
    chosen = np.zeros(len(intervals), dtype=bool)
    for interval in range(count):
        members = (intervals == interval).nonzero()[0]
        chosen[generator.choice(members, min(wanted, len(members)), replace=False)] = True
    return chosen
