"""What a real update does to every token: the trainer's own optimizer steps, then the policy rewound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.gradients import (
    BACKWARD,
    measuring,
    refuse_narrow_arithmetic,
    refuse_narrow_weights,
    vectors_within,
)
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import (
    PAPER,
    LossSettings,
    StepResult,
    TokenStatistics,
    Updater,
    batch_statistics,
    batch_weights,
    fitting_size,
    own_where_unknown,
    resolve_advantages,
)
from gradscope.policy import (
    PART,
    Policy,
    PolicyLike,
    flat_slices,
    float_parameters,
    model_bytes,
    read_state,
    rewound,
    sum_of_squares,
)
from gradscope.rollouts import BatchLike, TokenBatch, check_batch, read_inputs
from gradscope.runs import Progress, track
from gradscope.updates.directions import log_odds_change
from gradscope.updates.step import SGD, StepSettings, make_optimizer, read_moments
from gradscope.updates.variants import Variant, make_variant, old_intervals

Number = int | float


@dataclass(frozen=True, repr=False, eq=False)
class Movement:
    """What one variant of an update did to every response token."""

    name: str
    """The variant's."""
    batch: TokenBatch
    """With the advantages that were trained on and with π_old."""
    before: TokenStatistics
    """Statistics of the kept tokens, [B, S], before the first step."""
    after: TokenStatistics
    """The same after the last step."""
    results: list[StepResult]
    """One per pass; "empty" and "nonfinite" ones took no step."""
    update_norm: float
    """L2 norm of θ_after − θ_before over all parameters."""
    settings: LossSettings = PAPER
    """Settings of the loss, before the variant changed it."""
    edges: Sequence[Number] = EDGES
    """Edges of the intervals of π_old."""
    displacement: Float[Tensor, " P"] | None = None
    """θ_after − θ_before, flat in the order of `parameters.float_parameters`, where it was asked for."""

    def __repr__(self) -> str:
        steps = ", ".join(f"{r.name}: {r.outcome}, {r.num_tokens} tokens" for r in self.results)
        return f"Movement({self.name}, ‖Δθ‖ = {self.update_norm:.3g}; {steps})"


@checked
def apply_update(
    policy: PolicyLike,
    batch: BatchLike,
    variant: str | Variant = "all",
    *,
    loss: LossSettings = PAPER,
    step: StepSettings = SGD,
    optimizer_state: dict[str, Any] | str | Path | None = None,
    before: TokenStatistics | None = None,
    edges: Sequence[Number] = EDGES,
    memory: int | None = None,
    displacement: bool = False,
    **choices: Any,
) -> Movement:
    """Take a variant's optimizer steps with the trainer's own code, look at every token, and rewind the policy.

    variant: a name of VARIANTS, made with `loss`, `edges` and `choices`, which are the other keywords of
    `make_variant`; or a Variant. Unknown old_logprobs are the policy's own, advantages those of `resolve_advantages`.
    optimizer_state: what AdamW's `state_dict()` saved: its moments and step counts are gone on from, with the numbers
    of `step` (its betas and eps must be the state's), and only its parameters are trained; None: a fresh optimizer over
    all float parameters. before: statistics of this batch under this policy, if known. displacement: keep it, too, in
    a scratch file where it is over `memory`.

    The model works in eval mode, with its own attention. Afterwards weights, buffers, `.grad`, flags, modes and random
    states are as they were, bit for bit, also if the call raises. Memory: one more copy of the weights, beside
    gradients and moments. Where these are over `memory` bytes (None: any amount is there), the copy lies in scratch
    files and the moments stay where they were saved, so that only the gradient is left. Raises InputError for weights
    below float32, for advantages that are unknown, for an optimizer state that does not fit, where `memory` is too
    little for a gradient, and where the scratch files find no room.
    """
    policy, batch = read_inputs(policy, batch)
    optimizer_state = read_state(optimizer_state) if isinstance(optimizer_state, str | Path) else optimizer_state
    step.check()
    interval_labels(edges)  # refuses what is no edges
    refuse_narrow_weights(policy.model)
    moments = read_moments(policy.model, step, optimizer_state)
    fits = _fits(policy.model, step, memory)
    step = replace(step, micro_batch_size=fitting_size(policy.model, batch, step.micro_batch_size, copies=2))
    # Gradients flow, whatever the caller switched off.
    with torch.inference_mode(False), torch.enable_grad(), rewound(policy.model, memory=None if fits else 0) as start:
        policy.model.eval()
        if before is None:
            before = _statistics(policy, batch, step)
        batch = _resolve(batch, before)
        if isinstance(variant, str):
            keywords = {"loss": loss, "entropy": before.entropy, "edges": edges}
            variant = make_variant(variant, batch, **keywords, **choices)
        sliced_for = None if fits else len(variant.passes)
        optimizer = make_optimizer(policy.model, step, moments, sliced_for=sliced_for)
        updater = Updater(policy.model, optimizer, policy.device, step.micro_batch_size, step.max_grad_norm)
        results = [updater.step(part, variant.settings, weighting=variant.weighting) for part in variant.passes]
        after = _statistics(policy, batch, step)
        square = sum_of_squares(_moved_parts(policy.model, start))
        moved = vectors_within(policy.model, 1, memory)[0] if displacement else None
        for name, part in flat_slices(policy.model).items() if displacement else ():
            moved[part] = policy.model.get_parameter(name).detach().flatten()
            moved[part] -= start[name].flatten().to(moved)
    return Movement(variant.name, batch, before, after, results, math.sqrt(square), loss, edges, moved)


def update_cost(num_passes: int = 1) -> float:
    """Forward passes over the batch that take as long as `apply_update` with so many steps, each on all its tokens."""
    return 2 + (1 + BACKWARD) * num_passes


@checked
def apply_updates(
    policy: PolicyLike,
    batch: BatchLike,
    variants: Sequence[str | Variant],
    *,
    progress: bool | Progress = False,
    **keywords: Any,
) -> list[Movement]:
    """`apply_update` for each variant, all from the same weights and the same statistics before.

    keywords: those of `apply_update`.
    """
    policy, batch = read_inputs(policy, batch)
    movements: list[Movement] = []
    before = keywords.pop("before", None)
    for variant in track(variants, "taking steps", progress, unit="updates"):
        movements.append(apply_update(policy, batch, variant, before=before, **keywords))
        before = movements[0].before
    return movements


def _fits(model: nn.Module, step: StepSettings, memory: int | None) -> bool:
    """Whether a copy of the model, the gradient and AdamW's two moments do; InputError where the gradient does not."""
    if memory is None:
        return True
    gradient = sum(p.numel() * p.element_size() for _, p in float_parameters(model))
    if gradient > memory:
        raise InputError(
            f"the gradient of a real step takes {gradient / 1e9:.3g} GB, and {memory / 1e9:.3g} GB are given; give "
            "more (--gradient-memory), or take no real step (diagnose --no-actual-step)"
        )
    return model_bytes(model) + gradient * (3 if step.optimizer == "adamw" else 1) <= memory


def _moved_parts(model: nn.Module, start: Mapping[str, Tensor]) -> Iterator[Float[Tensor, " _"]]:
    """How far the parameters are from where they started, in parts: none as large as a parameter may be."""
    for name, parameter in float_parameters(model):
        pairs = zip(parameter.detach().flatten().split(PART), start[name].flatten().split(PART), strict=True)
        yield from (new - old.to(new) for new, old in pairs)


@checked
def movement_table(movements: Sequence[Movement], *, edges: Sequence[Number] | None = None) -> pd.DataFrame:
    """A row per response token that response_mask keeps, by response and position: the keys of the token table.

    Columns: `response`, `position`, `token_id`, `group`, `advantage`; `prob`, `log_one_minus_prob`, `entropy` of the
    policy before the update, `old_prob`; `interval` of π_old (edges; None: those that the variants were made with);
    `weight`, the policy part of Eq. 2's w_t under the settings before a variant changed them, which is that of "all".
    For each movement NAME, after minus before: `delta_prob.NAME`, `delta_logprob.NAME` (nats) and
    `delta_log_odds.NAME` (of log π − log(1−π), nats), which moves even where π rounds to 1. No change is computed by
    subtracting probabilities. Raises InputError for movements of different batches or policies, or of the same name.
    """
    _check_movements(movements)
    first = movements[0]
    batch, keep, before = first.batch, first.batch.response_mask, first.before
    weights = batch_weights(before.logprob, batch, first.settings, num_tokens=batch.num_tokens)
    columns = {
        "response": keep.nonzero()[:, 0].int(),
        "position": batch.positions()[keep].int(),
        "token_id": batch.input_ids[keep].int(),
        "group": batch.group_ids[keep.nonzero()[:, 0]],
        "advantage": batch.advantages[keep],
        "prob": before.logprob[keep].exp(),
        "old_prob": batch.old_logprobs[keep].exp().clamp(max=1.0),
        "log_one_minus_prob": before.log_one_minus_prob[keep],
        "entropy": before.entropy[keep],
        "interval": old_intervals(batch, first.edges if edges is None else edges)[keep].short(),
        "weight": weights.policy[keep],
    }
    for movement in movements:
        columns |= {f"{name}.{movement.name}": values[keep] for name, values in _changes(movement).items()}
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def _changes(movement: Movement) -> dict[str, Float[Tensor, "B S"]]:
    """Changes of π, log π and the log odds, after minus before, without the difference of two probabilities near 1."""
    before, after = movement.before, movement.after
    rise = torch.where(after.logprob == before.logprob, 0.0, after.logprob - before.logprob)  # −∞ − (−∞) = 0
    # log π keeps its digits near 0, and so does π·(e^rise − 1), unlike π' − π.
    change = before.logprob.exp() * torch.expm1(rise)
    # 0 · ∞: an impossible token became possible.
    change = torch.where(change.isnan(), after.logprob.exp() - before.logprob.exp(), change)
    return {"delta_prob": change, "delta_logprob": rise, "delta_log_odds": log_odds_change(before, after).to(rise)}


def measure_start(policy: Policy, batch: TokenBatch, step: StepSettings) -> tuple[TokenBatch, TokenStatistics]:
    """What a prediction of a step begins with: the batch with advantages and π_old, and its statistics [B, S].

    They are of plain attention, as forward mode has it. Raises InputError for arithmetic below float32 and for a batch
    that does not fit the policy or has no advantages.
    """
    refuse_narrow_arithmetic(policy.model)
    check_batch(policy, batch)
    with measuring(policy.model):
        before = _statistics(policy, batch, step)
    return _resolve(batch, before), before


def _statistics(policy: Policy, batch: TokenBatch, step: StepSettings) -> TokenStatistics:
    size = fitting_size(policy.model, batch, step.micro_batch_size, copies=2)
    return batch_statistics(policy.model, batch, micro_batch_size=size, device=policy.device)


def _resolve(batch: TokenBatch, before: TokenStatistics) -> TokenBatch:
    """The batch with advantages and, where they are unknown, the policy's own log-probabilities as π_old."""
    if before.logprob.shape != batch.input_ids.shape:
        raise InputError(
            f"`before` is of {tuple(before.logprob.shape)} tokens, the batch of {tuple(batch.input_ids.shape)}; give "
            "the statistics of this batch, or leave them out"
        )
    old = own_where_unknown(batch.old_logprobs, before.logprob)
    return replace(batch, advantages=resolve_advantages(batch), old_logprobs=old)


def _check_movements(movements: Sequence[Movement]) -> None:
    """InputError unless they can stand side by side."""
    if not movements:
        raise InputError("no movement to tabulate; give at least one")
    names = [movement.name for movement in movements]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two movements are called {twice[0]}; their columns would be one; name their Variants apart")
    first = movements[0]
    for other in movements[1:]:
        pairs = [(m.batch.input_ids, m.batch.response_mask, m.before.logprob) for m in (first, other)]
        same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        if not same or (first.settings, tuple(first.edges)) != (other.settings, tuple(other.edges)):
            raise InputError(
                f"{first.name} and {other.name} differ in batch, policy, settings or edges; a table compares updates "
                "of the same tokens from the same weights"
            )
