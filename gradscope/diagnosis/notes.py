"""What a diagnosis cannot say of a batch, in sentences, and tables that are not of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gradscope.diagnosis.result import VERDICT_PROMPTS, DiagnosisSettings
from gradscope.errors import InputError
from gradscope.gradients import LAYER, LOGITS, PARAMETERS, SUMS, refuse_endless_weights, sampling_probabilities
from gradscope.intervals import assign_intervals
from gradscope.rollouts import TokenBatch

FEW_PROMPTS = 8
"""Below so many, an interval over prompts is a rough guess, and a note says so."""


def has_gradient(table: pd.DataFrame) -> bool:
    """Whether every weight is known and one is not 0."""
    return bool(table["weight"].notna().all()) and bool((table["weight"] != 0).any())


def count_informative_prompts(table: pd.DataFrame) -> int:
    """How many prompts the numbers rest on: those with an advantage other than 0, or all where nothing is weighted."""
    own = table[table["advantage"] != 0] if has_gradient(table) else table
    return own["group"].nunique()


def note_limits(table: pd.DataFrame, labels: Sequence[str], *, second_moments: bool, whole_state: bool) -> list[str]:
    """What of the numbers is missing, sampled or rough: of the tokens, and of the optimizer's state that was given."""
    notes: list[str] = []
    weighted, counts = has_gradient(table), np.bincount(table["interval"], minlength=len(labels))
    weights, size = table["weight"], len(table)
    if unknown := int(weights.isna().sum()):
        notes.append(
            f"Advantages are unknown at {unknown:,} of {size:,} tokens, so nothing weighted is computed: no shares "
            "of gradients, no index, no steps."
        )
    elif not weighted:
        notes.append("Every weight of the loss is 0 (equal rewards in each group, or all clipped): no gradient.")
    prompts, telling = table["group"].nunique(), count_informative_prompts(table)
    if prompts == 1:
        notes.append("All responses are to one prompt: no interval over prompts, no signal against noise.")
    elif telling < FEW_PROMPTS:
        end = "they are rough." if telling >= VERDICT_PROMPTS else "they are too rough for verdicts."
        notes.append(f"Intervals rest on {telling} prompt{'s' if telling != 1 else ''}: {end}")
    if idle := prompts - telling:
        notes.append(
            f"Advantage 0 throughout (equal rewards): {idle} of {prompts} prompts; their tokens count, but have no "
            "gradient, that of KL apart."
        )
    for label, count in zip(labels, counts, strict=True):
        if not count:
            notes.append(f"No token has π in {label}: its numbers are NaN.")
    probabilities = sampling_probabilities(table)
    if (measured := int(table[PARAMETERS].notna().sum())) < size:
        notes.append(
            f"The norms of {measured:,} of {size:,} tokens are known: sums over an interval are its count times "
            + ("the mean of those." if probabilities is None else "a mean in which each counts for 1 / its chance.")
        )
    if SUMS[1] in table:
        notes.append("Norms are estimates by random numbers, not exact.")
    if not second_moments:
        notes.append("No optimizer state: nothing is measured in the metric of the AdamW update.")
    elif not whole_state:
        notes.append("Of the optimizer, second moments alone are given: steps are not the run's own.")
    return notes


def check_table(table: pd.DataFrame, batch: TokenBatch, settings: DiagnosisSettings) -> None:
    """InputError for a table that is not of this batch or has other intervals."""
    needed = ["response", "group", "position", "token_id", "prob", "interval", "advantage", "weight"]
    needed += [LOGITS, PARAMETERS, f"{LAYER}0"]
    if missing := [name for name in needed if name not in table]:
        raise InputError(f"the table has no column {', '.join(missing)}; give the token table of `measure`")
    ids = batch.input_ids[batch.response_mask].numpy()
    if len(table) != len(ids) or not (table["token_id"].to_numpy() == ids).all():
        raise InputError(
            f"the table's {len(table):,} tokens are not the batch's {len(ids):,}, in its order; give the table that "
            "was measured on these rollouts"
        )
    own = assign_intervals(table["prob"], settings.edges)
    if wrong := int((own != table["interval"].to_numpy()).sum()):
        raise InputError(
            f"{wrong:,} of the table's {len(table):,} tokens are not in the interval that the edges give their π; give "
            "the edges that the table was measured with"
        )
    refuse_endless_weights(table)
