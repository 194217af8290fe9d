"""A callback of the trainer: the intervals' gradients before an update, and what the update did to their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradscope.errors import InputError
from gradscope.gradients import Resources, interval_gradients
from gradscope.trainer import OnStep, Step
from gradscope.updates.directions import batch_direction_shares


def measure_steps(every: int = 10) -> OnStep:
    """Make an `on_step` for `train` that measures steps 1, 1 + every, 1 + 2·every, …

    Logged are norm and share of each interval's gradient (`interval_norm_0`, `interval_share_0`, …) and right-direction
    shares (Fig. 3; `right_direction_positive_0`, …). Intervals are those of π_old, gradients those of the loss on the
    whole batch before the update, over all weights (frozen ones too); tokens that mask_probs leaves out are measured
    like all others, and control matched-norm's rescaling is not in them.
    """
    if every < 1:
        raise InputError(f"every is {every}; give 1 or more")

    @contextmanager
    def measure(step: Step) -> Iterator[None]:
        if (step.number - 1) % every:
            yield
            return
        resources = Resources(micro_batch=step.config.micro_batch_size)
        gradients = interval_gradients(step.policy, step.batch, loss=step.settings, resources=resources).table
        for row in gradients.itertuples():
            step.metrics[f"interval_norm_{row.interval}"] = float(row.norm)
            step.metrics[f"interval_share_{row.interval}"] = float(row.share)
        yield
        for row in batch_direction_shares(step.statistics, step.score(step.batch), step.batch).itertuples():
            step.metrics[f"right_direction_{row.sign}_{row.interval}"] = float(row.share)

    return measure
