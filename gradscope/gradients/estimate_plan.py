"""Which estimates of norms a measurement makes, by what they cost, and that they are of the right gradients.

Costs are in forward passes over the batch, every position once:

    exact           .7 · Σ_t (length of t's prefix) / positions     a backward pass over each token's prefix
    random signs    1 + 2 · passes · sums                           one forward, a backward pass per sum
    forward mode    7 · draws                                       drawing v; values and tangents of all tokens at once

The prices are rounded from CPU time of one thread of a Xeon (analyses/benchmarks/estimates.py): exact norms took .56 to
.84 of Σ_t / positions by backward rules, a pass 1.5 to 2.3, a draw 5.9 to 9.4. Along a model's graph, exact
norms took 1.2 to 1.4, about twice what is said here. Of a GPU nothing is measured.

A sum is one interval's Σ‖g_t‖² or, where weights are known, its Σ‖w_t g_t‖². The rule, where neither passes nor draws
are given: always 4 passes for the sums, whose variance lacks the Σ‖g_t‖⁴ that draws have; 32 draws besides, for every
token's own norm (12.5 % off), if both cost less than exact norms would, and the model has forward mode in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients.engine.results import FLOOR, TOLERANCES, SelfCheck
from gradscope.gradients.estimates import EstimateCounts, relative_norm_error, signed_square_norms, squared_changes
from gradscope.gradients.summed.weighted import differentiable, predict_changes, zero_vectors
from gradscope.objective import logit_gradient
from gradscope.policy import arithmetic_dtype, float_parameters
from gradscope.rollouts import TokenBatch

Number = int | float

PASSES, DRAWS = 4, 32
"""What the rule takes."""
EXACT_COST = 0.7
"""Cost of exact norms by the analytic backward pass, in forward passes over as many positions as all prefixes have."""
DRAW_COST = 7
"""Cost of a draw, in forward passes."""
MOST = 100_000
"""Passes or draws that may be asked for: so many draws are .2 % off, and exact norms cost far less."""


@dataclass(frozen=True)
class EstimatePlan:
    """What is estimated, by how many samples, at which cost, and why."""

    counts: EstimateCounts
    sums: int
    """Backward passes of a pass of random signs."""
    passes_cost: Number
    """In forward passes over the batch, as the other two; 0 without passes."""
    draws_cost: Number
    exact_cost: Number
    """What exact norms of every token, which are not made, would cost."""
    reason: str
    """Why these numbers of passes and draws."""

    def __str__(self) -> str:
        passes, draws, parts = self.counts.passes, self.counts.draws, []
        if passes is not None:
            parts.append(f"{passes} pass{'es' * (passes > 1)} of random signs for the intervals")
        if draws is not None:
            error = relative_norm_error(draws)
            parts.append(f"{draws} draw{'s' * (draws > 1)} of forward mode, ±{error:.1%} for each token")
        ours = self.passes_cost + self.draws_cost
        words = f"norms are estimates: {', '.join(parts)} ({self.reason}); "
        words += f"cost {ours:,.0f} forward passes over the batch, exact norms {self.exact_cost:,.0f}"
        return words + ("; exact norms cost less: leave out --norms estimate" if self.exact_cost <= ours else "")


def plan_estimate(
    model: nn.Module,
    batch: TokenBatch,
    *,
    passes: int | None = None,
    draws: int | None = None,
    intervals: int,
    weighted: bool,
) -> EstimatePlan:
    """Settle what is estimated; with neither passes nor draws by the rule above, else exactly what is given.

    intervals: how many the tokens are sorted into; weighted: whether any weight is known. Raises InputError for counts
    below 1 or beyond MOST, and for draws where weights are below float32 or the model has no forward mode.
    """
    for name, count in (("passes", passes), ("draws", draws)):
        if count is not None and not 1 <= count <= MOST:
            raise InputError(f"{name} is {count}; give 1 to {MOST:,}, or leave it out")
    positions, prefixes = _lengths(batch)
    sums, exact = intervals * (2 if weighted else 1), EXACT_COST * prefixes / positions
    by_rule = passes is None and draws is None
    if by_rule:
        passes, draws = PASSES, DRAWS
    signs, tokens = 0 if passes is None else 1 + 2 * passes * sums, DRAW_COST * (draws or 0)
    reason = "less than exact norms cost" if by_rule else "as asked"
    if by_rule and signs + tokens >= exact:
        draws, reason = None, f"no single tokens: {draws} draws would bring the cost to {signs + tokens}"
    elif draws is not None and (refusal := _refusal(model, batch)) is not None:
        if not by_rule:
            raise refusal
        draws, reason = None, f"no single tokens: {_obstacle(model)}"
    return EstimatePlan(EstimateCounts(passes, draws), sums, signs, 0 if draws is None else tokens, exact, reason)


def _refusal(model: nn.Module, batch: TokenBatch) -> InputError | None:
    """What one draw on the shortest response says, where this model cannot have any."""
    kept = batch.response_mask.any(1).nonzero()[:, 0]
    shortest = kept[batch.attention_mask.sum(1)[kept].argmin()]
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of central differences, which are not used
            squared_changes(model, batch.select([int(shortest)]), 1, generator)
    except InputError as error:
        return error
    return None


def _obstacle(model: nn.Module) -> str:
    """The same in short, without advice: nobody asked for draws."""
    dtypes = [parameter.dtype for _, parameter in float_parameters(model)]
    narrow = next((dtype for dtype in dtypes if torch.finfo(dtype).bits < 32), None)
    if narrow is None:
        return "the model has no forward mode"
    return f"its weights are {str(narrow).removeprefix('torch.')}, in which changes are mostly rounding"


def _lengths(batch: TokenBatch) -> tuple[int, int]:
    """(positions up to each response's last kept token, prefix lengths of all kept tokens), summed."""
    targets = [batch.sequence(row)[1] for row in range(len(batch))]
    kept = [t for t in targets if len(t)]
    return sum(int(t[-1]) for t in kept), sum(int(t.sum()) for t in kept)


def check_estimates(
    model: nn.Module, batch: TokenBatch, picks: Sequence[tuple[int, int]], counts: EstimateCounts, *, seed: int
) -> SelfCheck:
    """Before any is drawn: are they of the right gradients? Some tokens by one plain backward pass each.

    picks: (row of the batch, which of its kept tokens). For each, with its plain gradient g: one pass of random signs
    over it alone must be ‖g‖², whatever the sign; one Jacobian-vector product along a random v must be ⟨g, v⟩ to a
    fraction of ‖g‖. Both are exact but for rounding, so a wrong token or temperature fails here, where a comparison of
    the estimates with norms would have to allow for their spread. Raises SelfCheckError.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    tolerance = TOLERANCES[arithmetic_dtype(model)]
    largest = 0.0
    for row, pick in picks:
        response = batch.select([row])
        ids, targets = response.sequence(0)
        gradient, size = _plain_gradient(model, ids, int(targets[pick]), float(response.temperature[0]))
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
        alone = torch.nn.functional.one_hot(torch.tensor([pick]), len(targets)).double() / size
        found = {}
        if counts.passes is not None:
            square = signed_square_norms(model, response, alone, 1, generator).item()
            found["random signs"] = abs(square**0.5 - norm) / max(norm, FLOOR)
        if counts.draws is not None:
            direction = torch.empty_like(gradient).normal_(generator=generator)
            changes, _ = predict_changes(model, response, direction[None], micro_batch_size=1)
            change = changes[0][response.response_mask][pick].item() / size
            found["forward mode"] = abs(change - (gradient.double() @ direction.double()).item()) / max(norm, FLOOR)
        worst = max(found, key=lambda name: float("inf") if found[name] != found[name] else found[name])
        if not found[worst] <= tolerance:
            raise SelfCheckError(
                f"self-check failed at token {int(targets[pick])} of response {row}: {worst} differs from plain "
                f"autograd by {found[worst]:.1e} of the gradient's norm (tolerance {tolerance:.0e}); nothing was "
                "estimated. Please report the architecture"
            )
        largest = max(largest, found[worst])
    return SelfCheck(len(picks), largest, tolerance)


def _plain_gradient(
    model: nn.Module, ids: Int[Tensor, " n"], target: int, temperature: float
) -> tuple[Float[Tensor, " P"], float]:
    """∇ log π of one token over all parameters, flat, by one backward pass from the uncancelled e − π.

    Returned divided by the largest entry of e − π, and that: half precision has no digits for a nearly certain token's.
    """
    parameters = [p for _, p in float_parameters(model)]
    ids = ids.to(parameters[0].device)
    with differentiable(model):
        logits = model(input_ids=ids[None, :target], use_cache=False).logits[0, -1]
        seed = logit_gradient(logits, ids[target], temperature=temperature) / temperature
        size = seed.abs().max().item() or 1.0
        gradients = torch.autograd.grad(logits, parameters, (seed / size).to(logits.dtype), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([g.flatten() for g in flat]).to(zero_vectors(model, 0)), size
