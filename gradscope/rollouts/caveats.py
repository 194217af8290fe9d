"""Doubts raised by a batch's own numbers, before anything is measured: advantages, groups, certain tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.rollouts.batch import Note, TokenBatch
from gradscope.rollouts.group_rewards import group_moments
from gradscope.runs import counted

ROUNDED = 1e-2
"""Relative margin by which a logged advantage may exceed its bound, since logs are rounded."""
OTHERWISE = "the trainer does not normalise advantages within groups"
CHANCE = 0.01
"""Runs of certain tokens are reported if chance would produce one this long in at most this fraction of batches."""
NEARLY = 1e-3
"""Nats from 0 within which a log-probability counts as certain."""
SHORTEST = 3
"""Shortest run of certain tokens that counts."""


def find_caveats(
    batch: TokenBatch,
    *,
    left_out: Mapping[int | None, int] | None = None,
    stop_ids: Collection[int] = (),
    pad_ids: Collection[int] = (),
    is_dump: bool = False,
) -> tuple[Note, ...]:
    """Return a note for each suspicious feature of the batch's numbers.

    Args:
        left_out: number of responses of each step that are not in the batch, by which groups may have been larger;
            None: unknown, which skips the checks that depend on it.
        stop_ids, pad_ids: ids that end a response, and ids used only for padding.
        is_dump: whether a trainer wrote the batch's advantages and groups, so that the advantage of a response alone in
            its group is meaningful, and several prompts in a group are the trainer's rule.
    """
    found = [*_describe_groups(batch), *_describe_advantages(batch, left_out, is_dump=is_dump)]
    found += [] if is_dump else _describe_prompts(batch)
    return (*found, *_describe_certain(batch, stop_ids), *_describe_padding(batch, stop_ids, pad_ids))


def own_responses(batch: TokenBatch) -> Bool[Tensor, " B"] | None:
    """Return which responses the checkpoint itself sampled, as far as reading them told; None: unknown.

    Earlier steps may have been added to its own, which is then the last (`read_checkpoint_dump`).
    """
    kinds = {note.kind for note in batch.notes}
    if "other-step" in kinds:
        return torch.zeros(len(batch), dtype=torch.bool)
    return batch.steps == batch.steps.max() if "pooled" in kinds and batch.steps is not None else None


def own_first(batch: TokenBatch, prompts: Int[Tensor, " p"]) -> Int[Tensor, " p"]:
    """Move the prompts whose responses the checkpoint itself sampled to the front; otherwise the order stays."""
    own = own_responses(batch)
    if own is None:
        return prompts
    return prompts[torch.isin(prompts, batch.group_ids[own], invert=True).sort(stable=True).indices]


def served_prompts(batch: TokenBatch) -> Int[Tensor, " p"]:
    """Return the prompts with a nonzero advantage; all of them if advantages are unknown."""
    _, group = batch.group_ids.unique(return_inverse=True)
    if batch.advantages is not None:
        has = ((batch.advantages != 0) & batch.response_mask).any(1)
    elif batch.rewards is None:
        has = torch.ones(len(batch), dtype=torch.bool)
    else:
        has = ~_is_flat(batch, group)
    return batch.group_ids[has & batch.response_mask.any(1)].unique()


def _is_flat(batch: TokenBatch, group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return whether all rewards of each response's group are equal. group: index of its group."""
    if batch.group_reward_stds is not None:
        return batch.group_reward_stds == 0
    return group_moments(batch.rewards, group)[1] == 0


def _describe_groups(batch: TokenBatch) -> list[Note]:
    """Report groups of one response, and zero advantages, for advantages computed from rewards."""
    if batch.advantages is not None or batch.rewards is None:
        return []
    _, group, sizes = batch.group_ids.unique(return_inverse=True, return_counts=True)
    if batch.group_reward_stds is None:
        alone, flat = (sizes == 1)[group], _is_flat(batch, group)
        raw = torch.zeros_like(alone)
    else:
        # A group of one with mean 0 and standard deviation 1: its trainer keeps the reward.
        raw = (sizes == 1)[group] & (batch.group_reward_means == 0) & (batch.group_reward_stds == 1)
        flat = _is_flat(batch, group) | (raw & (batch.rewards == 0))
        alone = raw | ((sizes == 1)[group] & flat)
    notes, prompts, count = [], len(sizes), int(alone.sum())
    if flat.all():
        causes = [f"{counted(count, 'group')} of one response"] if count else []
        if not count or (flat & ~alone).any():
            others = f"the {prompts - count} other groups" if count else "each group"
            causes.append(f"equal rewards in {others}")
        words = f"all advantages are 0 ({', '.join(causes)}): the loss has no gradient"
        notes.append(Note(words, "zero-advantages"))
    if count:
        rule = "its advantage is its raw reward, as in this trainer" if raw.any() else "its advantage is 0"
        notes.append(Note(f"{count} of {prompts} groups hold one response: {rule}", "groups-of-one"))
    return notes


def _describe_advantages(batch: TokenBatch, left_out: Mapping[int | None, int] | None, *, is_dump: bool) -> list[Note]:
    """Report given advantages that are all 0, or impossible for a group of their size."""
    if batch.advantages is None:
        return []
    kept, advantages = batch.response_mask, batch.advantages
    if bool((advantages[kept] == 0).all()):
        return [Note("all advantages in the log are 0, so the loss has no gradient", "zero-advantages")]
    if left_out is None or batch.run.other_loss is not None:
        return []
    _, group, sizes = batch.group_ids.unique(return_inverse=True, return_counts=True)
    steps = [None] * len(batch) if batch.steps is None else batch.steps.tolist()
    sizes = sizes[group] + torch.tensor([left_out.get(step, 0) for step in steps])
    highest = advantages.masked_fill(~kept, -math.inf).amax(1)
    lowest = advantages.masked_fill(~kept, math.inf).amin(1)
    each = torch.where(highest == lowest, highest, math.nan).abs()  # one number per response, if constant
    # n numbers with mean 0 and mean square 1 are at most √(n − 1); with the sample deviation (n − 1), less.
    beyond = int(((sizes > 1) & (each > (sizes - 1).sqrt() * (1 + ROUNDED))).sum())
    alone, notes = int(((sizes == 1) & (each > 0)).sum()) if is_dump else 0, []
    if alone:
        words = f"{alone} of {int(group.max()) + 1} groups hold a single response with a nonzero advantage"
        notes.append(Note(f"{words}: either the trainer used other groups, or {OTHERWISE}", "groups-of-one"))
    if beyond:
        words = f"advantages of {beyond} of {len(batch)} responses exceed √(n − 1), the bound for normalisation within"
        words = f"{words} a group of n: either the trainer used other groups, or {OTHERWISE}"
        notes.append(Note(words, "impossible-advantages"))
    return notes


def _describe_prompts(batch: TokenBatch) -> list[Note]:
    """Report groups that mix several prompts, for advantages computed from rewards."""
    if batch.advantages is not None or batch.rewards is None:
        return []
    first, start = batch.attention_mask.int().argmax(1).tolist(), batch.response_start.tolist()
    prompts: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for row, group in enumerate(batch.group_ids.tolist()):
        prompts[group].add(tuple(batch.input_ids[row, first[row] : start[row]].tolist()))
    mixed = sum(len(own) > 1 for own in prompts.values())
    words = f"{mixed} of {len(prompts)} groups hold responses to different prompts, whose rewards are compared"
    return [Note(words, "mixed-groups")] if mixed else []


def _describe_padding(batch: TokenBatch, stop_ids: Collection[int], pad_ids: Collection[int]) -> list[Note]:
    """Report padding that counts as sampled, tokens after a response's end, and prompts that begin with padding."""
    ids, kept = batch.input_ids, batch.response_mask
    stops, pads = (torch.isin(ids, torch.tensor(sorted(some), dtype=torch.long)) for some in (stop_ids, pad_ids))
    ended = kept & stops
    # Ends so far, minus those before this contiguous run of kept tokens, since each turn starts anew.
    before = ended.cumsum(1) - ended.int()
    behind = kept & ((pads & kept) | (before > torch.where(kept, 0, before + ended.int()).cummax(1).values))
    notes = []
    if int(behind.sum()) >= SHORTEST:
        notes.append(
            f"{int(behind.sum())} tokens of {counted(int(behind.any(1).sum()), 'response')} follow a token that ends a "
            "response, or are padding: they count as sampled unless a mask drops them"
        )
    first = batch.attention_mask.int().argmax(1, keepdim=True)
    second = (first + 1).clamp(max=ids.shape[1] - 1)
    padded = pads.gather(1, first) | (stops.gather(1, first) & (ids.gather(1, first) == ids.gather(1, second)))
    padded = padded[:, 0] & (batch.response_start > first[:, 0] + 1)
    if padded.any():
        notes.append(
            f"{int(padded.sum())} of {len(batch)} prompts begin with padding, which counts as context: leave it out"
        )
    return [Note(words, "padding") for words in notes]


def _describe_certain(batch: TokenBatch, stop_ids: Collection[int]) -> list[Note]:
    """Report log-probabilities of exactly 0 on long runs of tokens and on tokens that end responses."""
    values = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
    if values is None:
        return []
    kept = batch.response_mask
    certain = kept & (values == 0)
    if not certain.any() or bool(certain[kept].all()):
        return []  # a log with only zeros is refused when compared with the policy
    lengths = _run_lengths(certain)
    last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
    alone = certain & ~last & (lengths < SHORTEST)
    others = int((kept & ~certain).sum() + alone.sum())
    share = math.sqrt(int(alone.sum()) / others) if others else 0.0  # certain tokens cluster more than by chance
    least = SHORTEST if share < 1 else math.inf
    if 0 < share < 1:
        least = max(SHORTEST, math.ceil(math.log(CHANCE / int(kept.sum())) / math.log(share)))
    runs, notes = certain & (lengths >= least), []
    if runs.any():
        notes.append(
            f"a log-probability is exactly 0 at {counted(int(runs.sum()), 'token')} of "
            f"{counted(int(runs.any(1).sum()), 'response')}, {least} or more in a row: "
            "tool output, or other text that was not sampled, counts as sampled unless a mask drops it"
        )
    ending = last & torch.isin(batch.input_ids, torch.tensor(sorted(stop_ids), dtype=torch.long))
    ends = ending & certain & ~runs
    # If a policy is merely sure of its ends, some log-probabilities are nearly but not exactly 0.
    sure = ending & (values < 0) & (values > -NEARLY)
    if int(ends.sum()) > 3 * share * int(last.sum()) and not sure.any():
        notes.append(
            f"the final token of {int(ends.sum())} of {len(batch)} responses has a log-probability of exactly 0: it "
            "may have been added rather than sampled"
        )
    return [Note(words, "certain-tokens") for words in notes]


def _run_lengths(mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """Return the length of the run that each True belongs to; 0 elsewhere."""
    columns = torch.arange(mask.shape[1])
    before = torch.where(mask, -1, columns).cummax(1).values  # the last False up to here
    after = torch.where(mask, mask.shape[1], columns).flip(1).cummin(1).values.flip(1)
    return torch.where(mask, after - before - 1, 0)
