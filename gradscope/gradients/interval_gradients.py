"""Summed gradients of groups of tokens under the training loss: norms, shares, cosines, signal and noise.

With a common denominator, the number of response tokens in the batch, and tokens sorted into intervals a,

    G_a = ∇ policy_loss restricted to the tokens of interval a,    G = Σ_a G_a,    g_{p,a}: prompt p's part of G_a.

The loss is a sum over tokens, so all intervals share one forward pass, and each costs one backward pass over the batch.
Working prompt by prompt costs the same and yields the g_{p,a}, hence the noise and any split by prompts. Every number
in the table is an inner product of these sums over all parameters (tied ones count once).

Memory beside the model and its activations: 4 × intervals vectors as long as the parameters (the sums of two halves of
the batch, and one prompt's) or, beyond the budget, a sketch per prompt: see `TokenJacobian.gram`. An optimizer state
adds a vector and a second pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.gradients.operator.gram import Gram, SumsPlan
from gradscope.gradients.operator.jacobian import TokenJacobian
from gradscope.gradients.resources import Resources
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import PAPER, LossSettings, batch_loss, fill_unknown, resolve_advantages, settle_loss
from gradscope.policy import AdamWState, PolicyLike
from gradscope.rollouts import BatchLike, TokenBatch, read_inputs
from gradscope.runs import counted

Number = int | float


@dataclass(frozen=True, repr=False, eq=False)
class IntervalGradients:
    """Each interval's contribution to the gradient (Fig. 1 (d)), and how much of it is signal."""

    table: pd.DataFrame
    """A row per interval (0, 1, …) and one for "all" tokens; NaN where undefined.

    interval, label; num_tokens: kept response tokens; norm: ‖G_a‖; share: ⟨G_a, G⟩/‖G‖², sums to 1, may be negative;
    cosine_with_all: between G_a and G; half_cosine: between the G_a of two random halves of the prompts.
    signal and noise treat n·g_{p,a} for the n prompts as draws from one distribution: signal is the unbiased estimate
    of the squared norm of its mean (it can be negative), noise that of its variance summed over parameters, so that
    norm² = signal + noise / n holds exactly. signal_to_noise = signal / noise is that of ONE prompt; its inverse is the
    number of prompts at which both are equal. These three and half_cosine are NaN for a single prompt.
    """
    cosines: pd.DataFrame
    """Cosine between G_a (row) and G_b (column)."""
    num_prompts: int
    settings: LossSettings
    plan: SumsPlan | None = None
    """How the gradients were computed; with sketches, `table` has standard errors in columns NAME_error."""
    adamw_table: pd.DataFrame | None = None
    """The same columns in the metric of the AdamW update (see AdamWState); None without an optimizer state."""
    adamw_cosines: pd.DataFrame | None = None

    def __repr__(self) -> str:
        title = f"IntervalGradients of {counted(self.num_prompts, 'prompt')}"
        return "\n".join([title, *self._parts(pd.DataFrame.to_string)])

    def _repr_html_(self) -> str:
        return f"<p><b>Interval gradients</b>, {counted(self.num_prompts, 'prompt')}</p>" + "".join(
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
    generator: torch.Generator | None = None,
    optimizer_state: AdamWState | None = None,
    resources: Resources | None = None,
) -> IntervalGradients:
    """Measure the summed gradient of each interval's tokens and of all tokens, over all parameters, frozen or not.

    Args:
        intervals: interval index of each token, below `len(edges) - 1`; read on kept tokens only. None: by the
            token's probability π_old or, where old_logprobs are unknown, by the policy's own π (on-policy, ratio 1).
        generator: splits the prompts into two halves of equal size (up to one prompt); None: seeded with 0.
        optimizer_state: adds the same statistics in the metric of the AdamW update.
        resources: `vectors` decides whether gradients are kept whole or as sketches; processes share the prompts.

    Raises:
        InputError: the batch has no response tokens, no advantages and rewards, or a NaN advantage.
    """
    policy, batch = read_inputs(policy, batch)
    batch = settle_loss(batch, loss)
    J = TokenJacobian(
        policy, batch if loss.is_whole else replace(batch, advantages=resolve_advantages(batch)), resources
    )
    edges = [float(edge) for edge in edges]
    _check(J.batch, intervals, edges)
    size, batch = len(edges) - 1, J.batch
    slopes, cells = _slopes(J, loss, intervals, edges)
    generator, prompts = generator or torch.Generator().manual_seed(0), J.prompts
    halves = torch.randperm(len(prompts), generator=generator) * 2 // len(prompts)
    number = torch.searchsorted(prompts, batch.group_ids).clamp(max=len(prompts) - 1)  # arbitrary without tokens
    own = J.kept(halves[number][:, None].expand_as(batch.input_ids))
    inside = (own == torch.arange(2)[:, None, None]) & (cells == torch.arange(size)[:, None])
    gram = J.gram((slopes * inside).flatten(0, 1), pairs="within", metric=optimizer_state)
    summed = J.kept(torch.isin(batch.group_ids, torch.tensor(gram.groups))[:, None].expand_as(batch.input_ids))
    counts = (cells[summed] == torch.arange(size)[:, None]).sum(1).numpy()
    table, cosines = _tabulate(gram, counts, edges)
    result = IntervalGradients(table, cosines, len(gram.groups), loss, plan=gram.plan)
    if gram.scaled is None:
        return result
    table, cosines = _tabulate(gram.scaled, counts, edges)
    return replace(result, adamw_table=table, adamw_cosines=cosines)


def _slopes(
    J: TokenJacobian, settings: LossSettings, intervals: Int[Tensor, "B S"] | None, edges: Sequence[float]
) -> tuple[Float[Tensor, " K"], Int[Tensor, " K"]]:
    """Return ∂loss/∂log π of each kept token, and its interval."""
    batch, logprobs = J.batch, J.statistics.logprob.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        loss = batch_loss(logprobs, batch, settings, num_tokens=batch.num_tokens)
    # All weights of an interval may be 0: equal rewards in a group, or every token clipped.
    (slopes,) = torch.autograd.grad(loss, logprobs)
    if intervals is not None:
        return J.kept(slopes), J.kept(intervals)
    # A sampler may round a log-probability to just above 0; the probability is 1.
    prob = J.kept(fill_unknown(batch.old_logprobs, logprobs.detach())).double().exp().clamp(max=1.0)
    return J.kept(slopes), torch.from_numpy(assign_intervals(prob.numpy(), edges))


def _tabulate(
    gram: Gram, num_tokens: Int[np.ndarray, " A"], edges: Sequence[float]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Make the table and the cosines; with sketches, add standard errors as columns NAME_error."""
    size, n = len(edges) - 1, len(gram.groups)

    def statistics(within: Float[np.ndarray, "n R R"], total: Float[np.ndarray, "R R"]) -> tuple[pd.DataFrame, ...]:
        each = np.append(np.einsum("paa->a", within.reshape(n, 2, size, 2, size).sum((1, 3))), within.sum())
        return _statistics(total.reshape(2, size, 2, size), each, n, num_tokens, edges)

    table, cosines = statistics(gram.products, gram.total)
    if gram.plan.sketch_size is not None:
        numbers = table.columns.drop(["interval", "label", "num_tokens"])
        error = gram.error(lambda within, total: statistics(within, total)[0][numbers].to_numpy())
        table = table.assign(**{f"{name}_error": error[:, i] for i, name in enumerate(numbers)})
    return table, cosines


def _statistics(
    halves: Float[np.ndarray, "2 A 2 A"],
    square_norms: Float[np.ndarray, " A1"],
    n: int,
    num_tokens: Int[np.ndarray, " A"],
    edges: Sequence[float],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the table and the cosines from the inner products of both halves' G_a and from Σ_p ‖g_{p,a}‖²."""
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


def _check(batch: TokenBatch, intervals: Int[Tensor, "B S"] | None, edges: Sequence[float]) -> None:
    """Raise InputError for invalid edges, and for interval indices out of range."""
    num_intervals, wanted = len(interval_labels(edges)), tuple(batch.input_ids.shape)
    if intervals is None:
        return
    if (shape := tuple(intervals.shape)) != wanted:
        raise InputError(f"intervals have shape {shape}, the batch {wanted}; give one index per column of input_ids")
    lowest, highest = (int(bound) for bound in intervals[batch.response_mask].aminmax())
    if lowest < 0 or highest >= num_intervals:
        wanted = f"the edges make 0 to {num_intervals - 1}; give those, or the edges they were made with"
        raise InputError(f"intervals run from {lowest} to {highest} on response tokens; {wanted}")
