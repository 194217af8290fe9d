"""Measure a sample of an optimizer step's prompts: as many as a time budget allows, with estimates for the whole step.

The trainer's own gradient G = Σ_p Σ_a u_{p,a} is known. So the contribution ⟨u_{p,a}, G⟩ of prompt p's tokens in
interval a requires no other prompt, only the derivative of each of its tokens' log π along G. Every logged share is a
ratio of two sums of such numbers over prompts, and a simple random sample of prompts estimates each sum without bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients import BACKWARD, FORWARD_MODE, Resources, TokenJacobian, Vectors, refuse_narrow_arithmetic
from gradscope.integrations.trl.measure import (
    add_over_processes,
    count_processes,
    interval_masks,
    name_intervals,
    relative_rounding,
    rounding_sizes,
)
from gradscope.objective import TokenStatistics
from gradscope.policy import float_parameters
from gradscope.resampling import ANY, FEWEST_DRAWN, SHARE, Scale, ratio_of_sample
from gradscope.rollouts import TokenBatch
from gradscope.updates import SIGNS, log_odds_change

Number = int | float
KINDS = ("tokens", "product", "left", "whole", "right_positive", "moved_positive", "right_negative", "moved_negative")
"""Sums by prompt and interval: kept tokens; ⟨u, G⟩/‖G‖; `rounding_sizes`; for each sign of the advantage, the tokens
that moved in its direction and those that moved at all."""


def affordable(share: Number, elapsed: float, spent: float, price: float) -> int:
    """Return how many prompts may be measured now.

    share: largest share of the wall time since training began (measuring included) to spend on measuring. elapsed,
    spent: seconds so far, in total and on measuring. price: seconds per prompt.

    >>> affordable(0.2, elapsed=100.0, spent=10.0, price=2.5)  # 12.5 s more would make it 22.5 of 112.5 s
    5
    """
    return int(max(0.0, (share * elapsed - spent) / (1 - share)) / price)


class StepSample:
    """Random sample of one optimizer step's prompts, without replacement, measured some at a time.

    A prompt here has a kept token in a process, and comprises all its responses there. All processes take part in one
    common draw. The model runs in eval mode; flags, modes and `.grad` are restored.

    Args:
        model: Its `.grad` is the step's gradient G, up to a factor.
        batch: This process's responses.
        slopes: ∂loss/∂ log π; those of dropped tokens are ignored.
        seed: Seed of the draw.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: TokenBatch,
        slopes: Float[Tensor, "B S"],
        *,
        edges: Sequence[Number],
        resources: Resources,
        seed: Sequence[int],
    ) -> None:
        self._model, self._batch, self._slopes = model, batch, torch.where(batch.response_mask, slopes, 0.0)
        self._edges, self._device = edges, next(model.parameters()).device
        self._narrow = _is_narrow(model)
        self._derivative = 1 + BACKWARD * (len(edges) - 1) if self._narrow else FORWARD_MODE
        self._jacobian = TokenJacobian(model, batch, resources) if batch.num_tokens else None
        own = [] if self._jacobian is None else self._jacobian.prompts.tolist()
        self._rows = [(batch.group_ids == prompt).nonzero()[:, 0] for prompt in own]
        rank = torch.distributed.get_rank() if count_processes() > 1 else 0
        counts = torch.zeros(2, count_processes(), dtype=torch.float64)
        counts[:, rank] = torch.tensor([len(own), batch.num_tokens])
        counts = add_over_processes(counts, self._device).long()
        self.num_prompts, self.num_tokens = counts.sum(1).tolist()
        """Numbers of prompts and tokens of the step, over all processes."""
        self._numbers = range(first := int(counts[0, :rank].sum()), first + len(own))
        """Indices of this process's prompts among all."""
        costs = torch.zeros(2, self.num_prompts, dtype=torch.float64)
        for number, rows in zip(self._numbers, self._rows, strict=True):
            costs[:, number] = batch.attention_mask[rows].sum()
            costs[0, number] *= 1 + self._derivative if self._slopes[rows].any() else 1
        self._costs = add_over_processes(costs, self._device)
        """Approximate number of positions in each prompt's forward passes: before and after the step."""
        self._order = torch.from_numpy(np.random.default_rng(list(seed)).permutation(self.num_prompts))
        self.measured_prompts = 0
        self._sums = torch.zeros(self.num_prompts, len(KINDS), len(edges) - 1, dtype=torch.float64)
        self._parts: list[tuple[TokenJacobian, TokenStatistics, Int[Tensor, " b"]]] = []
        """Measured responses, with their tokens before the step and the index of each one's prompt."""

    @property
    def fewest(self) -> int:
        """Number of measured prompts from which the step's numbers are estimated: those that bounds need, or all."""
        return min(FEWEST_DRAWN, self.num_prompts)

    @property
    def mean_cost(self) -> float:
        """Average cost of a prompt; one whose slopes are 0 has no gradient and is cheap."""
        return float(self._costs.sum(0).mean())

    @property
    def measured_cost(self) -> float:
        return float(self._costs[:, self._drawn].sum())

    @property
    def owed(self) -> float:
        """Cost of measuring after the step, relative to that before it."""
        before, after = self._costs[:, self._drawn].sum(1).tolist()
        return after / before

    @property
    def _drawn(self) -> Int[Tensor, " n"]:
        return self._order[: self.measured_prompts]

    def measure(self, count: int) -> None:
        """Measure this many more prompts, except for what needs the step to be taken."""
        drawn = self._order[self.measured_prompts :][:count].tolist()
        self.measured_prompts += len(drawn)
        mine = [number for number in drawn if number in self._numbers]
        if not mine:
            return
        own = [self._rows[self._numbers.index(number)] for number in mine]
        rows, prompts = torch.cat(own), torch.tensor(mine).repeat_interleave(torch.tensor([len(r) for r in own]))
        part = self._jacobian.select(rows)
        masks = interval_masks(part.batch, part.statistics, self._edges)
        cotangents = torch.where(masks, self._slopes[rows], 0.0)
        self._add("tokens", prompts, masks)
        left, whole = rounding_sizes(cotangents, masks, self._batch.num_tokens, part.statistics)
        self._add("left", prompts, left)
        self._add("whole", prompts, whole)
        self._add_products(part, prompts, cotangents)
        self._parts.append((part, part.statistics, prompts))

    def finish(self) -> None:
        """Measure the step's effect on the tokens, once the model has taken it."""
        for part, before, prompts in self._parts:
            change = log_odds_change(before, part.moved().statistics)
            masks = interval_masks(part.batch, before, self._edges)
            for sign, name in zip((1, -1), SIGNS, strict=True):
                asked = masks & (sign * part.batch.advantages > 0)
                self._add(f"right_{name}", prompts, asked & (sign * change > 0))
                self._add(f"moved_{name}", prompts, asked & (change != 0))

    def estimate(self, trained_norm: float, tolerance: float) -> dict[str, float]:
        """Estimate the whole step's numbers, each with 95 % confidence bounds; NaN below `fewest` measured prompts.

        trained_norm: ‖G‖. tolerance: relative rounding error of ‖G‖ above which nothing is compared with it.
        """
        sums = add_over_processes(self._sums, self._device)[self._drawn].numpy()
        of, one = {kind: sums[:, place] for place, kind in enumerate(KINDS)}, np.ones((len(sums), 1))
        names, numbers = name_intervals(self._edges), {}

        def add(name: str, labels: Sequence[str], parts: np.ndarray, wholes: np.ndarray, scale: Scale) -> None:
            found = ratio_of_sample(parts, wholes, self.num_prompts, scale=scale)
            found = found if self.measured_prompts >= self.fewest else np.full_like(found, np.nan)
            for end, values in zip(("", "_lower", "_upper"), found, strict=True):
                numbers.update({f"{name}{end}{label}": float(v) for label, v in zip(labels, values, strict=True)})

        labels = [f"/{a}" for a in names]
        add("token_share", labels, of["tokens"], of["tokens"].sum(1, keepdims=True), SHARE)
        seen = np.where(of["tokens"].sum(0) > 0, 1.0, np.nan)  # unknown for an interval without tokens
        add("grad_share", labels, of["product"] * seen, of["product"].sum(1, keepdims=True), ANY)
        for sign in SIGNS:
            add(f"right_direction_{sign}", labels, of[f"right_{sign}"], of[f"moved_{sign}"], SHARE)
        known = relative_rounding(of["left"].sum(), of["whole"].sum()) < tolerance
        scale = count_processes() * trained_norm if known and 0 < trained_norm < math.inf else np.nan
        along = self.num_prompts / scale * of["product"].sum(1, keepdims=True)
        add("grad_projection", [""], along, one, ANY)
        counts = {"measured_prompts": self.measured_prompts, "num_prompts": self.num_prompts}
        return numbers | counts | {"measured_tokens": int(of["tokens"].sum()), "num_tokens": self.num_tokens}

    def _add(self, kind: str, prompts: Int[Tensor, " b"], values: Float[Tensor, "R b S"]) -> None:
        self._sums[:, KINDS.index(kind)].index_add_(0, prompts, values.double().sum(2).T)

    def _add_products(self, part: TokenJacobian, prompts: Int[Tensor, " b"], amounts: Float[Tensor, "R b S"]) -> None:
        """Add ⟨Σ_t amounts[a, t]·∇ log π_t, G⟩/‖G‖ for each prompt."""
        live = amounts.ne(0).any(2).any(0).nonzero()[:, 0]
        if not len(live):
            return
        part, prompts, amounts = part.select(live), prompts[live], amounts[:, live]
        direction = unit_gradient(self._model)
        if not self._narrow:
            self._add("product", prompts, amounts * part.spread(part.jvp(direction).logprob[0]))
            return
        for number in prompts.unique():  # below float32, a backward pass is more exact than forward derivatives
            own = (prompts == number).nonzero()[:, 0]
            piece = part.select(own)
            products = piece.vjp(piece.kept(amounts[:, own])).rows @ direction.rows[0]
            self._sums[number, KINDS.index("product")] += products.cpu().double()


def unit_gradient(model: nn.Module) -> Vectors:
    """Return G/‖G‖ from the parameters' `.grad`; 0 if ‖G‖ is 0 or not finite."""
    direction = Vectors.zeros(model, 1)
    for name, parameter in float_parameters(model):
        if parameter.grad is not None:
            direction.rows[0, direction.slices[name]] = parameter.grad.flatten().to(direction.rows)
    norm = float(direction.products().sqrt())
    if 0 < norm < math.inf:
        direction.rows.div_(norm)
    else:
        direction.rows.zero_()
    return direction


def _is_narrow(model: nn.Module) -> bool:
    try:
        refuse_narrow_arithmetic(model)
    except InputError:
        return True
    return False
