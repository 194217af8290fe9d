"""Updates by name: the tokens and the loss of each optimizer step.

They use the trainer's steps and masks from `objective`. A step's loss is always divided by all response tokens of the
mini-batch, so that the parts of a split add up to the whole. Probabilities are those of π_old. Equations and Alg. 1
refer to arXiv:2505.12929.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradscope.errors import InputError
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import PAPER, LossSettings, StepRule, Update, Weighting, make_weighting, split_steps
from gradscope.rollouts import TokenBatch

Number = int | float
Mask = Bool[Tensor, "B S"]

UPDATES = {
    "all": "all tokens, one step",
    **{f"only-{a}": f"only tokens with π_old in {label}" for a, label in enumerate(interval_labels())},
    **{f"without-{a}": f"all but the tokens with π_old in {label}" for a, label in enumerate(interval_labels())},
    "reweight": "all tokens under Advantage Reweighting (Eq. 4)",
    "lopti": "tokens with π_old < η, then the others (Alg. 1)",
    "reweight-lopti": "Lopti's steps under Advantage Reweighting",
    "lopti-high-first": "Lopti's steps in the reverse order",
    "random-split": "two steps over a random split of the sizes of Lopti's",
    "positive": "only tokens with Â > 0",
}
"""{name: description}; α and η may follow (`reweight-lopti:alpha=.3,eta=.5`). `edges` change only-N and without-N."""

_RULES = {
    "all": StepRule(),
    "reweight": StepRule(reweight_alpha=0.3),
    "lopti": StepRule(lopti_eta=0.5),
    "reweight-lopti": StepRule(reweight_alpha=0.3, lopti_eta=0.5),
    "lopti-high-first": StepRule(lopti_eta=0.5, lopti_order="high-first"),
    "random-split": StepRule(lopti_eta=0.5, control="random-split"),
}
_FIELDS = {"alpha": "reweight_alpha", "eta": "lopti_eta"}


def make_update(
    update: str | Weighting,
    batch: TokenBatch,
    *,
    loss: LossSettings = PAPER,
    mini_batch_size: int | None = None,
    edges: Sequence[Number] = EDGES,
    generator: torch.Generator | None = None,
) -> Update:
    """Make an update on a batch whose advantages and old_logprobs are known for every token.

    Args:
        update: a name of UPDATES, optionally with α and η; or a single-step weighting (or its name), which trains all
            tokens that its mask does not drop.
        loss: Reweight sets its `reweight_alpha`; other updates do not change it.
        mini_batch_size: responses per optimizer step; None: the whole batch.
        edges: of the intervals of π_old.
        generator: draws "random-split"; None: seeded with 0.

    Raises:
        InputError: the name is unknown, or the batch allows no such update.
    """
    name, old, mask = str(update), batch.old_logprobs, batch.response_mask
    size = len(batch) if mini_batch_size is None else mini_batch_size
    _check(batch, size)
    weighting = None if isinstance(update, str) else update
    if weighting is None and (rule := _find_rule(name)) is not None:
        if rule.reweight_alpha is not None:
            loss = replace(loss, reweight_alpha=rule.reweight_alpha)
        groups = rule.drawn_groups(old, mask, size, generator or torch.Generator().manual_seed(0))
    elif name == "positive":
        groups = [(name, mask & (batch.advantages > 0))]
    elif found := re.fullmatch(r"(only|without)-(\d+)", name):
        groups = [(name, mask & _inside(int(found[2]), batch, edges, without=found[1] == "without"))]
    else:
        try:
            weighting = make_weighting(name) if weighting is None else weighting
        except InputError as error:
            known = ", ".join(UPDATES)
            raise InputError(f"no update is called {name!r}: {error.reason}; or give one of {known}") from error
        groups = weighting.rule.groups(old, mask)
    loss.check()
    return Update(split_steps(batch, size, groups), batch, loss, weighting=weighting, name=name)


def _find_rule(name: str) -> StepRule | None:
    """Return the trainer's step rule of that name, if any."""
    kind, _, given = name.partition(":")
    if (rule := _RULES.get(kind)) is None:
        return None
    values = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        field = _FIELDS.get(key, "")
        if getattr(rule, field, None) is None:
            raise InputError(f"{kind} takes no {key!r}; give {' or '.join(_FIELDS)} to an update that has it")
        try:
            values[field] = float(value)
        except ValueError as error:
            raise InputError(f"{kind}: {key} is {value!r}; give a number") from error
    return replace(rule, **values)


def old_intervals(batch: TokenBatch, edges: Sequence[Number] = EDGES) -> Int[Tensor, "B S"]:
    """Return the interval of π_old of each kept token, −1 elsewhere."""
    # A sampler may round a log-probability to just above 0; the probability is 1.
    prob = batch.old_logprobs[batch.response_mask].double().exp().clamp(max=1.0)
    indices = torch.from_numpy(assign_intervals(prob.numpy(), list(edges)))
    return torch.full(batch.input_ids.shape, -1).masked_scatter(batch.response_mask, indices)


def _inside(interval: int, batch: TokenBatch, edges: Sequence[Number], *, without: bool) -> Mask:
    """Return the mask of tokens with π_old inside, or outside, the interval."""
    if interval >= (count := len(interval_labels(edges))):
        raise InputError(f"the edges make intervals 0 to {count - 1}, not {interval}; give one of them, or other edges")
    return (old_intervals(batch, edges) == interval) != without


def _check(batch: TokenBatch, mini_batch_size: int) -> None:
    """Raise InputError for a batch that allows no update."""
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
