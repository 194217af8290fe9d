"""Summed gradients of groups of tokens under the loss that is trained: norms, shares, cosines, signal against noise.

With ONE denominator, the count of all response tokens of the batch, and tokens sorted into intervals a,

    G_a = ∇ policy_loss restricted to the tokens of interval a,    G = Σ_a G_a,    g_{p,a}: prompt p's part of G_a.

The loss is a sum over tokens, so one forward pass serves every interval, and each interval costs one backward pass over
the batch. It is made prompt by prompt, which costs the same and gives the g_{p,a}: the noise, and any split by prompts.
Every number of the table is an inner product of those sums over all parameters (a tied one counts once).

Memory besides the model and its activations: 3 × intervals vectors as long as the parameters (the sums of two halves
of the batch, and one prompt's), in float32 at least: 48 bytes per parameter for four intervals. An optimizer state adds
intervals + 1 more and a copy of its moments, 24 bytes per parameter. All lie on the policy's device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from gradscope.adamw_state import AdamWState
from gradscope.batch import TokenBatch
from gradscope.batch_loss import PAPER, LossSettings, batch_loss, own_where_unknown, resolve_advantages
from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.logprobs import sequence_logprobs
from gradscope.models import Policy
from gradscope.weighted_gradients import add_gradients, differentiable, zero_vectors

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
        titles = ("summed gradients", "their cosines", "in the metric of the AdamW update", "their cosines there")
        frames = (self.table, self.cosines, self.adamw_table, self.adamw_cosines)
        for title, frame in zip(titles, frames, strict=True):
            if frame is not None:
                yield f"<p>{title}</p>" if render is pd.DataFrame.to_html else f"{title}:"
                yield render(frame, index="label" not in frame, float_format="{:.3g}".format, na_rep="–")


def interval_gradients(
    policy: Policy,
    batch: TokenBatch,
    *,
    settings: LossSettings = PAPER,
    intervals: Int[Tensor, "B S"] | None = None,
    edges: Sequence[Number] = EDGES,
    micro_batch_size: int = 8,
    generator: torch.Generator | None = None,
    optimizer_state: AdamWState | None = None,
    progress: bool = False,
) -> IntervalGradients:
    """Measure the summed gradient of each interval's tokens, and of all, over all parameters, frozen ones too.

    intervals: index of each token's interval, of `len(edges) - 1`; read on kept tokens only. None: by the probability
    π_old of the token or, where old_logprobs are unknown, by the policy's own (on-policy, ratio 1).
    micro_batch_size: most responses in one forward pass; responses to different prompts never share one.
    generator: splits the prompts into two halves of equal count (to one); None: seeded with 0.
    optimizer_state: adds the same in the metric of the AdamW update.

    The model measures in eval mode; flags, modes and `.grad` are left as they were. Raises InputError for a batch
    without response tokens, without advantages and rewards, or with a NaN advantage.
    """
    edges = [float(edge) for edge in edges]
    _check(batch, intervals, edges, micro_batch_size)
    batch = replace(batch, advantages=resolve_advantages(batch))
    generator = generator or torch.Generator().manual_seed(0)
    sums = _Sums(policy.model, len(edges) - 1, squares=optimizer_state is not None)
    with differentiable(policy.model):
        prompts = batch.group_ids.unique()
        halves = torch.randperm(len(prompts), generator=generator) * 2 // len(prompts)
        pairs = zip(prompts.tolist(), halves.tolist(), strict=True)
        for prompt, half in tqdm(pairs, "prompts", len(prompts), disable=not progress):
            for rows in (batch.group_ids == prompt).nonzero()[:, 0].split(micro_batch_size):
                chunk, columns = batch.select(rows).left_aligned()
                given = None if intervals is None else intervals[rows].gather(1, columns).to(policy.device)
                _add_gradients(policy.model, chunk.to(policy.device), given, settings, edges, batch.num_tokens, sums)
            sums.close_prompt(half)
    table, cosines = _statistics(gram(sums.halves.flatten(0, 1)), sums.square_norms, sums, edges)
    result = IntervalGradients(table, cosines, len(prompts), settings)
    if optimizer_state is None:
        return result
    scale = optimizer_state.scale(policy.model, sums.halves.sum((0, 1)))
    table, cosines = _statistics(gram(sums.halves.mul_(scale).flatten(0, 1)), sums.square_norms_in(scale), sums, edges)
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
    results = [interval_gradients(policy, batch, generator=generator, **keywords) for batch in batches]
    if not results:
        raise InputError("no batch to measure; give at least one")
    means = {}
    for name in ("table", "cosines", "adamw_table", "adamw_cosines"):
        if getattr(results[0], name) is not None:
            mean = _mean_table if "table" in name else _mean_matrix
            means[name] = mean([getattr(result, name) for result in results])
    return replace(results[0], num_prompts=sum(result.num_prompts for result in results), **means)


class _Sums:
    """What adds up over the batch; vectors are flat over the parameters, in the order of named_parameters()."""

    def __init__(self, model: nn.Module, num_intervals: int, *, squares: bool) -> None:
        # [2, A, P]: G_a of each half of the prompts; [A, P]: g_{p,a} of the prompt at hand.
        self.halves = zero_vectors(model, 2, num_intervals)
        self.prompt = zero_vectors(model, num_intervals)
        # [A + 1], all tokens last: Σ_p ‖g_{p,a}‖², and [A + 1, P]: the same before the sum over parameters, which is
        # the noise in a metric that is known only at the end.
        self.square_norms = torch.zeros(num_intervals + 1, dtype=torch.float64)
        self.squares = zero_vectors(model, num_intervals + 1) if squares else None
        self.num_tokens = torch.zeros(num_intervals, dtype=torch.long)
        self.num_prompts = 0

    def close_prompt(self, half: int) -> None:
        """Add the prompt's gradients to its half and to the squares, and start the next one."""
        self.halves[half] += self.prompt
        for row, gradient in enumerate((*self.prompt, self.prompt.sum(0))):
            self.square_norms[row] += gram(gradient[None])[0, 0]
            if self.squares is not None:
                self.squares[row] += gradient.square()
        self.prompt.zero_()
        self.num_prompts += 1

    def square_norms_in(self, scale: Float[Tensor, " P"]) -> Float[Tensor, " A1"]:
        """Σ_p ‖scale ∘ g_{p,a}‖² in float64."""
        parts = zip(self.squares.split(1 << 20, dim=1), scale.split(1 << 20), strict=True)
        return sum(squares.double() @ factor.double().square() for squares, factor in parts).cpu()


def _add_gradients(
    model: nn.Module,
    chunk: TokenBatch,
    intervals: Int[Tensor, "b n"] | None,
    settings: LossSettings,
    edges: Sequence[float],
    num_tokens: int,
    sums: _Sums,
) -> None:
    """One forward pass of the chunk and a backward pass for each interval that has a gradient in it."""
    # Padding comes last, where causal attention hides it from every token. A mask would leave rows without any key
    # (sliding windows), and eager attention in float64 makes those NaN.
    everything = torch.ones_like(chunk.attention_mask)
    logprobs = sequence_logprobs(model, chunk.input_ids, everything, temperature=chunk.temperature)
    if intervals is None:
        old = own_where_unknown(chunk.old_logprobs, logprobs)
        # A log-probability that a sampler rounded to just above 0 is a probability of 1.
        prob = torch.where(chunk.response_mask, old, 0.0).double().exp().clamp(max=1.0)
        intervals = torch.from_numpy(assign_intervals(prob.cpu().numpy(), edges)).to(prob.device)
    masks = [chunk.response_mask & (intervals == a) for a in range(len(edges) - 1)]
    sums.num_tokens += torch.tensor([int(mask.sum()) for mask in masks])
    own = logprobs.detach().requires_grad_(True)
    (slopes,) = torch.autograd.grad(batch_loss(own, chunk, settings, num_tokens=num_tokens), own)
    # All weights of an interval may be 0: equal rewards in the group, every token clipped.
    add_gradients(model, logprobs, torch.stack([slopes * mask for mask in masks]), sums.prompt)


def _statistics(
    gram: Float[Tensor, "A2 A2"], square_norms: Float[Tensor, " A1"], sums: _Sums, edges: Sequence[float]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table and the cosines from the inner products of both halves' G_a and from Σ_p ‖g_{p,a}‖²."""
    n, size = sums.num_prompts, len(edges) - 1
    per_freedom = n / (n - 1) if n > 1 else np.nan
    add_all = np.vstack([np.eye(size), np.ones(size)])  # the last row sums over the intervals
    blocks = gram.numpy().reshape(2, size, 2, size)
    halves = {(h, k): add_all @ blocks[h, :, k] @ add_all.T for h in (0, 1) for k in (0, 1)}
    products, squares = sum(halves.values()), np.diag(sum(halves.values()))
    spread = square_norms.numpy()
    counts = np.append(sums.num_tokens.numpy(), sums.num_tokens.sum().item())
    with np.errstate(invalid="ignore", divide="ignore"):  # 0/0 where a gradient is zero
        cosines = products / np.sqrt(np.outer(squares, squares))
        columns = {
            "norm": np.sqrt(squares),
            "share": products[:, -1] / squares[-1],
            "cosine_with_all": cosines[:, -1],
            "half_cosine": np.diag(halves[0, 1]) / np.sqrt(np.diag(halves[0, 0]) * np.diag(halves[1, 1])),
            "signal": per_freedom * (squares - spread),
            "noise": per_freedom * (n * spread - squares),
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
    return sum(part @ part.T for part in (p.double() for p in vectors.split(1 << 20, dim=1))).cpu()


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
