"""Named variants of an update: which tokens each optimizer step trains, and under which loss.

They are made of the trainer's own parts: the passes of `steps` and the masks of `objective`. Whatever a pass leaves
out, its loss is divided by all response tokens of the mini-batch, so that the parts of a split add up to the whole.
Probabilities are those of π_old. Equations and Alg. 1 are those of arXiv:2505.12929.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import PAPER, LossSettings, Method, Pass, Weighting, split_passes
from gradscope.rollouts import TokenBatch

Number = int | float
Mask = Bool[Tensor, "B S"]

VARIANTS = {
    "all": "all tokens, one pass",
    **{f"only-{a}": f"only tokens with π_old in {label}" for a, label in enumerate(interval_labels())},
    **{f"without-{a}": f"all but the tokens with π_old in {label}" for a, label in enumerate(interval_labels())},
    "reweight": "all tokens under Advantage Reweighting (Eq. 4)",
    "lopti": "tokens with π_old < η, then the others (Alg. 1)",
    "reweight-lopti": "Lopti's passes under Advantage Reweighting",
    "lopti-high-first": "Lopti's passes in the reverse order",
    "random-split": "two passes over a random split of the sizes of Lopti's",
    "high-entropy": "only the 20 % of tokens with the largest entropy (arXiv:2506.01939)",
    "positive": "only tokens with Â > 0",
}
"""Name → what it trains; `edges` of its own make other numbers of only- and without-."""

HIGH_ENTROPY = Fraction(1, 5)
"""Share of the tokens that "high-entropy" trains."""


@dataclass(frozen=True)
class Variant:
    """An update: its optimizer steps in order, and their loss."""

    name: str
    passes: list[Pass]
    settings: LossSettings
    weighting: Weighting | None = None
    """What stands in the place of Eq. 2's policy weights in every pass; None: nothing."""


def make_variant(
    name: str,
    batch: TokenBatch,
    *,
    loss: LossSettings = PAPER,
    entropy: Float[Tensor, "B S"] | None = None,
    alpha: Number = 0.3,
    eta: Number = 0.5,
    mini_batch_size: int | None = None,
    edges: Sequence[Number] = EDGES,
    generator: torch.Generator | None = None,
) -> Variant:
    """The variant of that name (see VARIANTS) on a batch whose advantages and old_logprobs are known for every token.

    loss: the reweighted variants set `reweight_alpha` to alpha, the others leave it as it is.
    entropy: of each token's distribution, nats; needed by "high-entropy", which takes the largest of the whole batch.
    eta: Lopti's η. mini_batch_size: responses per optimizer step; None: the whole batch. edges: of the intervals of
    π_old. generator: draws "random-split"; None: seeded with 0. Raises InputError for what cannot be used.
    """
    size = len(batch) if mini_batch_size is None else mini_batch_size
    _check(batch, size)
    if name in ("reweight", "reweight-lopti"):
        loss = replace(loss, reweight_alpha=alpha)
    loss.check()
    methods = {
        "all": {},
        "reweight": {},
        "lopti": {"lopti_eta": eta},
        "reweight-lopti": {"lopti_eta": eta},
        "lopti-high-first": {"lopti_eta": eta, "lopti_order": "high-first"},
        "random-split": {"lopti_eta": eta, "control": "random-split"},
    }
    if name in methods:
        generator = generator or torch.Generator().manual_seed(0)
        groups = Method(**methods[name]).drawn_groups(batch.old_logprobs, batch.response_mask, size, generator)
    elif name == "positive":
        groups = [(name, batch.response_mask & (batch.advantages > 0))]
    elif name == "high-entropy":
        groups = [(name, _largest(entropy, batch.response_mask))]
    else:
        groups = [(name, _interval_mask(name, batch, edges))]
    return Variant(name, split_passes(batch, size, groups), loss)


def weighting_variant(weighting: Weighting, batch: TokenBatch, *, loss: LossSettings = PAPER) -> Variant:
    """One optimizer step under any weighting that takes one, the whole batch at once; its name is the weighting's.

    The KL part is that of all tokens but those that a mask leaves out of training. Raises InputError as
    `make_variant` does, and when the step is taken for a weighting of several.
    """
    _check(batch, len(batch))
    loss.check()
    groups = weighting.passes.groups(batch.old_logprobs, batch.response_mask)
    return Variant(str(weighting), split_passes(batch, len(batch), groups), loss, weighting)


def old_intervals(batch: TokenBatch, edges: Sequence[Number] = EDGES) -> Int[Tensor, "B S"]:
    """Index of the interval of π_old of each token that response_mask keeps, −1 elsewhere."""
    # A log-probability that a sampler rounded to just above 0 is a probability of 1.
    prob = batch.old_logprobs[batch.response_mask].double().exp().clamp(max=1.0)
    indices = torch.from_numpy(assign_intervals(prob.numpy(), list(edges)))
    return torch.full(batch.input_ids.shape, -1).masked_scatter(batch.response_mask, indices)


def _interval_mask(name: str, batch: TokenBatch, edges: Sequence[Number]) -> Mask:
    """Mask of "only-A" or "without-A"."""
    found, count = re.fullmatch(r"(only|without)-(\d+)", name), len(interval_labels(edges))
    if found is None:
        raise InputError(f"no variant is called {name!r}; give one of {', '.join(VARIANTS)}")
    if int(found[2]) >= count:
        raise InputError(f"{name}: the edges make intervals 0 to {count - 1}; give one of them, or other edges")
    inside = old_intervals(batch, edges) == int(found[2])
    return batch.response_mask & (inside if found[1] == "only" else ~inside)


def _largest(entropy: Float[Tensor, "B S"] | None, mask: Mask) -> Mask:
    """The kept tokens of the largest entropy: HIGH_ENTROPY of all, rounded up, and those tied with the last of them."""
    if entropy is None or entropy[mask].isnan().any():
        raise InputError("high-entropy needs the entropy of every response token; give entropy=, [B, S]")
    count = math.ceil(HIGH_ENTROPY * int(mask.sum()))
    return mask & (entropy >= entropy[mask].topk(count).values[-1])


def _check(batch: TokenBatch, mini_batch_size: int) -> None:
    """InputError for a batch that no variant can be made of."""
    if mini_batch_size < 1:
        raise InputError(f"mini_batch_size is {mini_batch_size}; an optimizer step needs a response; give at least 1")
    if batch.num_tokens == 0:
        raise InputError("response_mask keeps no token, so there is nothing to train on; give responses with tokens")
    for name in ("advantages", "old_logprobs"):
        values = getattr(batch, name)
        unknown = batch.num_tokens if values is None else int(values[batch.response_mask].isnan().sum())
        if unknown:
            raise InputError(
                f"{name} are unknown at {unknown} of {batch.num_tokens} response tokens; give them, or drop the tokens "
                "by response_mask"
            )
