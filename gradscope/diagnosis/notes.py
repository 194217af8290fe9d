"""Limits of a diagnosis in sentences, and checks that a table belongs to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gradscope.diagnosis.findings import WARNINGS
from gradscope.diagnosis.format import as_sentence
from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.diagnosis.update import count_informative_prompts, has_gradient
from gradscope.errors import InputError
from gradscope.gradients import (
    LAYER,
    LOGITS,
    PARAMETERS,
    describe_reread,
    refuse_infinite_weights,
    refuse_other_loss,
)
from gradscope.intervals import assign_intervals
from gradscope.resampling import FEWEST
from gradscope.rollouts import Note, TokenBatch, own_responses
from gradscope.runs import digits

CAVEATS = (
    *WARNINGS,
    *("unknown-advantages", "no-gradient", "one-prompt", "few-prompts", "impossible-advantages", "mixed-groups"),
    *("padding", "unknown-values", "left-out", "groups-of-one", "idle-prompts", "fewer-sums", "inexact"),
    *("sampled-norms", "influence-sample", "minutes", "impossible", "large", "late", "empty-interval", "dump"),
    *("on-policy", "no-kl", "second-moments", "no-optimizer", "step", "loss"),
)
"""Kinds of notes, those first that may change most of the page; other kinds come last."""
IMPROBABLE = 0.2
"""Nats per token by which −log π must exceed the entropy on average to show that another policy sampled the tokens."""
EACH_STEP = 4
"""Number of training steps up to which each one's distance is listed; beyond, the latest, nearest and farthest."""


def by_weight(notes: Sequence[Note]) -> list[Note]:
    """Sort notes by how much they may change; a sentence without a kind counts as a note of the log.

    >>> from gradscope.rollouts import Note
    >>> by_weight([Note("b", "no-optimizer"), "a", Note("c", "few-prompts")])
    ['c', 'a', 'b']
    """
    places = {kind: place for place, kind in enumerate(CAVEATS)}
    return sorted(notes, key=lambda note: places.get(getattr(note, "kind", "dump"), len(places)))


def note_limits(
    table: pd.DataFrame, labels: Sequence[str], *, second_moments: bool, whole_state: bool, is_sampled: bool = True
) -> list[Note]:
    """Return notes on what is missing, sampled or approximate: tokens, prompts, norms, the optimizer's state."""
    size, unknown = len(table), int(table["weight"].isna().sum())
    prompts, informative = table["group"].nunique(), count_informative_prompts(table)
    measured = int(table[PARAMETERS].notna().sum())
    of = "Numbers about gradients have" if informative < prompts else "Numbers have"
    improbable = describe_improbable(table) if is_sampled else ""
    told = [
        (bool(improbable), "improbable", improbable),
        (unknown, "unknown-advantages", f"Advantages are unknown at {unknown:,} of {size:,} tokens, so "
         "no weighted statistics are computed: no gradient shares, no index, no steps."),
        (not unknown and not has_gradient(table), "no-gradient",
         "Every weight of the loss is 0 (equal rewards in each group, or all clipped), so there is no gradient."),
        (prompts == 1, "one-prompt",
         "All responses are to one prompt, so there are no bounds and no signal fraction."),
        (prompts > 1 and informative < FEWEST, "few-prompts",
         f"{of} no bounds: {informative} of {prompts} prompts have a gradient, {FEWEST} are "
         "needed."),
        (informative < prompts, "idle-prompts",
         f"{prompts - informative} of {prompts} prompts have advantage 0 throughout (equal rewards): their tokens are "
         "counted, but have no gradient except the KL penalty's."),
        *((not (table["interval"] == place).any(), "empty-interval",
           f"No token has π in {label}, so its statistics are NaN.") for place, label in enumerate(labels)),
        (measured < size, "sampled-norms", f"The norms of {measured:,} of {size:,} tokens were measured. Sums over an "
         "interval are estimated from these in proportion to (w·‖e − π‖)², which is known for every token."),
        (not second_moments, "no-optimizer",
         "There is no optimizer state: nothing is AdamW-preconditioned, and steps start without momentum."),
        (second_moments and not whole_state, "second-moments",
         "Only the optimizer's second moments are given, so steps are not the run's own."),
    ]  # fmt: skip
    return [Note(text, kind) for holds, kind, text in told if holds]


def describe_improbable(table: pd.DataFrame) -> str:
    """Describe tokens that the policy would hardly sample; "" if there are none.

    For tokens that a policy sampled itself, the mean of −log π is the entropy. Reports an excess above IMPROBABLE nats,
    if it exceeds three standard errors over prompts, or if a tenth of the responses (at least two, of at least ten
    tokens) exceeds it by 1 nat per token: text that was tokenized again is far off in some responses.
    """
    excess = -table["logprob"].astype(float) - table["entropy"].astype(float)
    mean, prompts = excess.mean(), table["group"].nunique()
    away = (excess - mean).groupby(table["group"]).sum()
    error = math.sqrt(float((away**2).sum()) * prompts / max(1, prompts - 1)) / len(table)
    own = excess.groupby(table["response"]).agg(["mean", "size"])
    far = int(((own["mean"] > 1) & (own["size"] >= 10)).sum())
    sure = (prompts > 1 and mean > 3 * error) or far >= max(2, 0.1 * len(own))
    if not (mean > IMPROBABLE and sure):
        return ""
    far_mean = int((own["mean"] > 1).sum())
    return (
        f"These tokens are improbable under this checkpoint: −log π exceeds the entropy by {digits(mean)} nats per "
        f"token on average, in {far_mean} of {len(own)} responses by more than 1; for tokens that it sampled itself, "
        "both are equal on average. Was text tokenized again, or were they sampled by another checkpoint or at another "
        "temperature? Then the results below do not describe this policy's own rollouts."
    )


def tell_pooled(batch: TokenBatch, table: pd.DataFrame) -> TokenBatch:
    """If a log's several training steps were taken, add a note on whose the responses are and how far from this policy.

    Only the responses in use count: under a time limit they may all be the checkpoint's own, or none.
    """
    taken = [] if batch.steps is None else batch.steps.unique().tolist()
    if len(taken) < 2:
        return batch
    used, own = batch.response_mask.any(1), own_responses(batch)
    count, here = int(used.sum()), None if own is None else int((own & used).sum())
    if here == count:
        return batch.without_notes("pooled")
    whose = "Some of them were sampled by other checkpoints"
    if here is not None:
        whose = f"{here:,} of the {count:,} responses here were sampled by this checkpoint, the others by earlier ones"
    if here == 0:
        whose = f"All {count:,} responses here were sampled by other checkpoints"
    first = next((note for note in batch.notes if note.kind == "pooled"), f"responses of {len(taken)} training steps")
    gap = (table["logprob"] - table["old_logprob"]).abs().groupby(batch.steps.numpy()[table["response"]]).mean()
    gap = gap.dropna().sort_index(ascending=False)
    if len(gap) > EACH_STEP:
        gap = gap.loc[[gap.index[0], gap.idxmin(), gap.idxmax()]].pipe(lambda own: own[~own.index.duplicated()])
    told = ", ".join(f"{digits(value)} at step {step}" for step, value in gap.items())
    told = f"mean |Δ log π| to it, in nats, is {told}" if told else "the log does not say how far they are from it"
    words = f"{as_sentence(first)} {whose}: {told}."
    others = batch.without_notes("pooled")
    return replace(others, notes=(Note(words, "pooled"), *others.notes))


def check_table(table: pd.DataFrame, batch: TokenBatch, settings: DiagnosisSettings) -> None:
    """Raise InputError for a table of another batch, with other intervals, or of another loss."""
    needed = ["response", "group", "position", "token_id", "prob", "interval", "advantage", "weight"]
    needed += [LOGITS, PARAMETERS, f"{LAYER}0"]
    if missing := [name for name in needed if name not in table]:
        raise InputError(f"the table has no column {', '.join(missing)}; give the token table of `measure`")
    ids = batch.input_ids[batch.response_mask].numpy()
    if len(table) != len(ids) or not (table["token_id"].to_numpy() == ids).all():
        raise InputError(
            f"the table's {len(table):,} tokens are not the batch's {len(ids):,} in order; give the table that "
            "was measured on these rollouts"
        )
    if told := describe_reread(table, batch):
        raise InputError(f"the given table {told}: measure these rollouts again")
    own = assign_intervals(table["prob"], settings.edges)
    if wrong := int((own != table["interval"].to_numpy()).sum()):
        raise InputError(
            f"{wrong:,} of the table's {len(table):,} tokens are not in the interval of their π; give the edges that "
            "the table was measured with"
        )
    refuse_infinite_weights(table)
    refuse_other_loss(table, batch, settings.loss)
