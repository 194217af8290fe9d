"""Summed gradients of groups of tokens under the loss that is trained: norms, shares, cosines, signal against noise.

With ONE denominator, the count of all response tokens of the batch, and tokens sorted into intervals a,

    G_a = ∇ policy_loss restricted to the tokens of interval a,    G = Σ_a G_a,    g_{p,a}: prompt p's part of G_a.

The loss is a sum over tokens, so one forward pass serves every interval, and each interval costs one backward pass over
the batch. It is made prompt by prompt, which costs the same and gives the g_{p,a}: the noise, and any split by prompts.
Every number of the table is an inner product of those sums over all parameters (a tied one counts once).

Memory besides the model and its activations: 3 × intervals vectors (the sums of two halves of the batch, and one
prompt's), in float32 at least, as long as the parameters or, where that is over the budget, as a slice of them or as
their sketches: see `prompts`. An optimizer state adds a vector as long as the parameters and a second pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.gradients.summed.plan import Index, SumsPlan, Way
from gradscope.gradients.summed.prompts import PromptGradients
from gradscope.gradients.summed.weighted import zero_vectors
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import PAPER, LossSettings, batch_loss, own_where_unknown, resolve_advantages
from gradscope.policy import PART, AdamWState, Policy, PolicyLike, gradient_budget, square_norm
from gradscope.resampling import jackknife_error
from gradscope.rollouts import BatchLike, TokenBatch, read_inputs
from gradscope.runs import ALONE, Processes, Progress

Number = int | float


@dataclass(frozen=True, repr=False, eq=False)
class IntervalGradients:
    """What the tokens of each interval add to the gradient (Fig. 1 (d)), and how much of it is signal."""

    table: pd.DataFrame
    """A row per interval (0, 1, …) and one for "all" tokens; NaN where undefined, all of a row without tokens.

    interval, label; num_tokens: kept response tokens; norm: ‖G_a‖; share: ⟨G_a, G⟩/‖G‖², sums to 1, may be negative;
    cosine_with_all: between G_a and G; half_cosine: between the G_a of two random halves of the prompts.
    signal and noise take n·g_{p,a} of the n prompts for draws of one distribution: signal is the unbiased estimate of
    the squared norm of their mean (it can be negative), noise that of their variance summed over parameters, so that
    norm² = signal + noise / n holds exactly. signal_to_noise = signal / noise is that of ONE prompt; its inverse is the
    number of prompts at which both are equal. These three and half_cosine are NaN for one prompt.
    """
    cosines: pd.DataFrame
    """Cosine between G_a (row) and G_b (column)."""
    num_prompts: int
    settings: LossSettings
    plan: SumsPlan | None = None
    """How the gradients were made; of sketches each number of `table` has its standard error, NAME_error."""
    adamw_table: pd.DataFrame | None = None
    """The same columns in the metric of the AdamW update (see AdamWState); None without an optimizer state."""
    adamw_cosines: pd.DataFrame | None = None

    def __repr__(self) -> str:
        return "\n".join([f"IntervalGradients of {self.num_prompts} prompts", *self._parts(pd.DataFrame.to_string)])

    def _repr_html_(self) -> str:
        return f"<p><b>Interval gradients</b>, {self.num_prompts} prompts</p>" + "".join(
            self._parts(pd.DataFrame.to_html)
        )

    def _parts(self, render: Any) -> Iterator[str]:
        titles = ("summed gradients", "their cosines", "summed gradients, AdamW-preconditioned", "their cosines")
        frames = (self.table, self.cosines, self.adamw_table, self.adamw_cosines)
        for title, frame in zip(titles, frames, strict=True):
            if frame is not None:
                yield f"<p>{title}</p>" if render is pd.DataFrame.to_html else f"{title}:"
                yield render(frame, index="label" not in frame, float_format="{:.3g}".format, na_rep="–")


@checked
def interval_gradients(
    policy: PolicyLike,
    batch: BatchLike,
    *,
    loss: LossSettings = PAPER,
    intervals: Int[Tensor, "B S"] | None = None,
    edges: Sequence[Number] = EDGES,
    micro_batch_size: int = 8,
    generator: torch.Generator | None = None,
    optimizer_state: AdamWState | None = None,
    memory: int | None = None,
    way: Way | None = None,
    processes: Processes = ALONE,
    progress: bool | Progress = False,
) -> IntervalGradients:
    """Measure the summed gradient of each interval's tokens, and of all, over all parameters, frozen ones too.

    intervals: index of each token's interval, of `len(edges) - 1`; read on kept tokens only. None: by the probability
    π_old of the token or, where old_logprobs are unknown, by the policy's own (on-policy, ratio 1).
    micro_batch_size: most responses in one forward pass; responses to different prompts never share one.
    generator: splits the prompts into two halves of equal count (to one); None: seeded with 0.
    optimizer_state: adds the same in the metric of the AdamW update.
    memory: bytes for gradients, which decides whether they are made whole, in slices or as sketches
    (`prompts`); None: a sixth of what is free. way: one of these, whatever it costs.
    processes: share the prompts; the result is everybody's.

    The model measures in eval mode; flags, modes and `.grad` are left as they were. Raises InputError for a batch
    without response tokens, without advantages and rewards, or with a NaN advantage.
    """
    policy, batch = read_inputs(policy, batch)
    edges = [float(edge) for edge in edges]
    _check(batch, intervals, edges, micro_batch_size)
    batch = replace(batch, advantages=resolve_advantages(batch))
    generator = generator or torch.Generator().manual_seed(0)
    size, counts = len(edges) - 1, {}
    memory = gradient_budget(policy.device, processes) if memory is None else memory

    def cotangents(index: Index, piece: TokenBatch, logprobs: Float[Tensor, " K"]) -> Float[Tensor, "A K"]:
        slopes, cells = _slopes(index, piece, logprobs, batch.num_tokens, loss, intervals, edges)
        inside = cells == torch.arange(size, device=cells.device)[:, None]
        counts[tuple(index[0].unique().tolist())] = inside.sum(1)
        return (slopes * inside).to(logprobs.device, non_blocking=True)

    passes = {"micro_batch_size": micro_batch_size, "processes": processes, "progress": progress}
    passes |= {"memory": memory, "way": way, "metric": optimizer_state is not None}
    source = PromptGradients(policy, batch, cotangents, rows=size, held=2 * size, **passes)
    halves = torch.randperm(source.num_prompts, generator=generator) * 2 // source.num_prompts
    totals = None if optimizer_state is None else source.new_totals()
    raw = _Products.of(source, halves, totals=totals)
    num_tokens = processes.sum(sum(counts.values(), torch.zeros(size, dtype=torch.long)))
    table, cosines = raw.tabulate(num_tokens, edges)
    result = IntervalGradients(table, cosines, source.num_prompts, loss, plan=source.plan)
    if optimizer_state is None:
        return result
    scale = optimizer_state.turn_into_scale(policy.model, totals[0])
    table, cosines = _Products.of(source, halves, scale=scale).tabulate(num_tokens, edges)
    return replace(result, adamw_table=table, adamw_cosines=cosines)


def interval_gradients_over(policy: Policy, batches: Iterable[TokenBatch], **keywords: Any) -> IntervalGradients:
    """`interval_gradients` of several batches: means, and columns `norm_sd`, … with the standard deviation (n − 1).

    keywords: those of `interval_gradients`, without `intervals`; each batch meets the same optimizer state.
    Means and deviations run over the batches where the number is defined; `batches` counts those that have tokens in
    the interval, num_tokens adds up, and signal_to_noise is mean signal over mean noise.
    """
    if keywords.get("intervals") is not None:
        raise InputError("intervals are of one batch and several are given; leave them out, or measure batch by batch")
    generator = keywords.pop("generator", None) or torch.Generator().manual_seed(0)
    batches = list(batches)
    results = [interval_gradients(policy, batch, generator=generator, **keywords) for batch in batches]
    if len({result.plan.sketch_size is None for result in results}) == 2:  # all with errors, or none
        keywords["way"] = "sketches"
        results = [interval_gradients(policy, batch, generator=generator, **keywords) for batch in batches]
    if not results:
        raise InputError("no batch to measure; give at least one")
    means = {}
    for name in ("table", "cosines", "adamw_table", "adamw_cosines"):
        if getattr(results[0], name) is not None:
            mean = _mean_table if "table" in name else _mean_matrix
            means[name] = mean([getattr(result, name) for result in results])
    return replace(results[0], num_prompts=sum(result.num_prompts for result in results), **means)


def _slopes(
    index: Index,
    piece: TokenBatch,
    logprobs: Float[Tensor, " K"],
    num_tokens: int,
    settings: LossSettings,
    intervals: Int[Tensor, "B S"] | None,
    edges: Sequence[float],
) -> tuple[Float[Tensor, " K"], Int[Tensor, " K"]]:
    """∂loss/∂log π of a piece's kept tokens, and the interval of each, on the CPU, where the piece lies."""
    logprobs, mask = logprobs.cpu(), piece.response_mask
    spread = logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs).requires_grad_(True)
    with torch.enable_grad():
        loss = batch_loss(spread, piece, settings, num_tokens=num_tokens)
    # All weights of an interval may be 0: equal rewards in the group, every token clipped.
    (slopes,) = torch.autograd.grad(loss, spread)
    if intervals is not None:
        return slopes[mask], intervals[index]
    # A log-probability that a sampler rounded to just above 0 is a probability of 1.
    prob = own_where_unknown(piece.old_logprobs, spread.detach())[mask].double().exp().clamp(max=1.0)
    return slopes[mask], torch.from_numpy(assign_intervals(prob.numpy(), edges))


@dataclass(frozen=True)
class _Products:
    """Inner products over the parameters, in float64; of sketches a part for each block of their coordinates."""

    halves: Float[np.ndarray, "M 2 A 2 A"]
    """Inner products between the G_a of both halves of the prompts."""
    squares: Float[np.ndarray, "M A1"]
    """Σ_p ‖g_{p,a}‖² and, last, Σ_p ‖Σ_a g_{p,a}‖²."""
    num_prompts: int

    @classmethod
    def of(cls, source: PromptGradients, halves: Int[Tensor, " n"], **scaled: Tensor | None) -> _Products:
        """Both from vectors that come part by part."""
        size, blocks, together = source.rows, source.plan.blocks, source.processes
        products, squares, sums = np.zeros((blocks, 2 * size, 2 * size)), np.zeros((blocks, size + 1)), None
        for part, vectors in source.parts(**scaled):
            del sums  # before the next part's
            sums = zero_vectors(source.model, 0).new_zeros(2, size, part.size)
            for prompt, found in vectors:
                sums[halves[prompt]] += found
                for row, vector in enumerate((*found, found.sum(0))):
                    squares[:, row] += [square_norm(block) for block in vector.chunk(blocks)]
            together.sum(sums)
            products += np.stack([gram(block).numpy() for block in sums.flatten(0, 1).chunk(blocks, dim=1)])
        together.sum(torch.from_numpy(squares))
        return cls(products.reshape(blocks, 2, size, 2, size), squares, len(halves))

    def tabulate(self, num_tokens: Int[Tensor, " A"], edges: Sequence[float]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The table and the cosines; of sketches, with a standard error of each number as a column NAME_error."""
        shapes = self.halves.shape[1:], self.squares.shape[1:]
        cut = int(np.prod(shapes[0]))

        def statistics(products: Float[np.ndarray, " N"]) -> tuple[pd.DataFrame, pd.DataFrame]:
            halves, squares = products[:cut].reshape(shapes[0]), products[cut:].reshape(shapes[1])
            return _statistics(halves, squares, self.num_prompts, num_tokens.numpy(), edges)

        flat = np.hstack([self.halves.reshape(len(self.halves), -1), self.squares])
        table, cosines = statistics(flat.sum(0))
        if len(flat) > 1:
            numbers = table.columns.drop(["interval", "label", "num_tokens"])
            error = jackknife_error(lambda products: statistics(products)[0][numbers].to_numpy(), list(flat))
            table = table.assign(**{f"{name}_error": error[:, i] for i, name in enumerate(numbers)})
        return table, cosines


def _statistics(
    halves: Float[np.ndarray, "2 A 2 A"],
    square_norms: Float[np.ndarray, " A1"],
    n: int,
    num_tokens: Int[np.ndarray, " A"],
    edges: Sequence[float],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table and the cosines from the inner products of both halves' G_a and from Σ_p ‖g_{p,a}‖²."""
    size = len(edges) - 1
    per_freedom = n / (n - 1) if n > 1 else np.nan
    add_all = np.vstack([np.eye(size), np.ones(size)])  # the last row sums over the intervals
    blocks = {(h, k): add_all @ halves[h, :, k] @ add_all.T for h in (0, 1) for k in (0, 1)}
    products, squares = sum(blocks.values()), np.diag(sum(blocks.values()))
    counts = np.append(num_tokens, num_tokens.sum())
    with np.errstate(invalid="ignore", divide="ignore"):  # 0/0 where a gradient is zero
        cosines = products / np.sqrt(np.outer(squares, squares))
        columns = {
            "norm": np.sqrt(squares),
            "share": products[:, -1] / squares[-1],
            "cosine_with_all": cosines[:, -1],
            "half_cosine": np.diag(blocks[0, 1]) / np.sqrt(np.diag(blocks[0, 0]) * np.diag(blocks[1, 1])),
            "signal": per_freedom * (squares - square_norms),
            "noise": per_freedom * (n * square_norms - squares),
        }
        columns["signal_to_noise"] = columns["signal"] / columns["noise"]
    columns = {name: np.where(counts > 0, values, np.nan) for name, values in columns.items()}
    names = {"interval": [*range(size), "all"], "label": [*interval_labels(edges), "all"], "num_tokens": counts}
    return pd.DataFrame(names | columns), pd.DataFrame(cosines[:-1, :-1])


def _mean_table(tables: list[pd.DataFrame]) -> pd.DataFrame:
    names = tables[0][["interval", "label"]]
    numbers = {c: pd.concat([t[c] for t in tables], axis=1) for c in tables[0].columns.drop(["interval", "label"])}
    out = names.assign(batches=numbers["norm"].count(axis=1), num_tokens=numbers.pop("num_tokens").sum(axis=1))
    del numbers["signal_to_noise"]
    for column, values in numbers.items():
        out[column], out[f"{column}_sd"] = values.mean(axis=1), values.std(axis=1)
    return out.assign(signal_to_noise=out["signal"] / out["noise"])


def _mean_matrix(matrices: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.DataFrame(np.ma.masked_invalid(np.stack(matrices)).mean(0).filled(np.nan))


def gram(vectors: Float[Tensor, "K P"]) -> Float[Tensor, "K K"]:
    """Inner products in float64, a slice of the parameters at a time."""
    return sum(part @ part.T for part in (p.double() for p in vectors.split(max(1, PART // len(vectors)), dim=1))).cpu()


def _check(
    batch: TokenBatch, intervals: Int[Tensor, "B S"] | None, edges: Sequence[float], micro_batch_size: int
) -> None:
    """InputError for what cannot be measured."""
    if micro_batch_size < 1:
        raise InputError(f"micro_batch_size is {micro_batch_size}; a forward pass needs a response; give at least 1")
    if batch.num_tokens == 0:
        raise InputError("response_mask keeps no token, so there is no gradient; give responses with sampled tokens")
    num_intervals, wanted = len(interval_labels(edges)), tuple(batch.input_ids.shape)
    if intervals is None:
        return
    if (shape := tuple(intervals.shape)) != wanted:
        raise InputError(f"intervals have shape {shape}, the batch {wanted}; give one index per column of input_ids")
    lowest, highest = (int(bound) for bound in intervals[batch.response_mask].aminmax())
    if lowest < 0 or highest >= num_intervals:
        wanted = f"the edges make 0 to {num_intervals - 1}; give those, or the edges they were made with"
        raise InputError(f"intervals run from {lowest} to {highest} on response tokens; {wanted}")
