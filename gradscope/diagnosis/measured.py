"""What parts look at: the policy, the batch, the token table, the update, the clock, and the products made so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch

from gradscope.diagnosis.settings import DiagnosisSettings
from gradscope.diagnosis.update import has_gradient, supply_of
from gradscope.errors import InputError, first_line
from gradscope.gradients import Stopwatch, TokenJacobian, describe_seconds
from gradscope.intervals import interval_labels
from gradscope.policy import AdamWState, Policy, return_freed_memory
from gradscope.resampling import Supply
from gradscope.rollouts import Note, TokenBatch
from gradscope.runs import Processes
from gradscope.updates import StepSettings

Made = TypeVar("Made")
REWARD_PART = "reward."
"""Prefix of the columns with a part of the rewards."""


@dataclass(frozen=True)
class Clock:
    """The time limit of a diagnosis, and what a forward pass over the batch takes."""

    limit: int | float | None = None
    """Minutes; None: no limit."""
    pass_seconds: float = 1.0
    """Seconds of a forward pass over the batch; without a limit it is the unit of every price."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Started when the diagnosis began."""

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return inf if self.limit is None else max(0.0, 60 * self.limit - self.watch.seconds())

    @property
    def deadline(self) -> float | None:
        """End of the time on the clock of `time.monotonic`; None without a limit."""
        return None if self.limit is None else monotonic() + 60 * self.limit - self.watch.seconds()


@dataclass(frozen=True)
class Case:
    """What prices depend on, known before anything is measured."""

    settings: DiagnosisSettings
    step: StepSettings
    size: int
    """Parameters of the policy."""
    sums: float
    """Forward passes of the summed gradients, once."""
    metric: bool
    """Whether AdamW's metric is known."""


@dataclass(frozen=True)
class Measured:
    """The resolved inputs of a diagnosis; only products, notes and elapsed time change."""

    jacobian: TokenJacobian
    table: pd.DataFrame
    settings: DiagnosisSettings
    step: StepSettings
    whole: TokenBatch
    """The batch with all prompts."""
    saved: dict[str, Any] | None = None
    """The full optimizer state that steps start from."""
    metric: AdamWState | None = None
    """The second moments of AdamW's metric."""
    clock: Clock = field(default_factory=Clock)
    verdict_minutes: float | None = None
    """Time limit that would give a verdict, if a shorter one left prompts or tokens out; None: unknown."""
    notes: list[Note] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Products and parts that were asked for but are missing, and why."""
    made: dict[str, Any] = field(default_factory=dict)
    """The products by name."""

    @property
    def policy(self) -> Policy:
        return self.jacobian.policy

    @property
    def batch(self) -> TokenBatch:
        return self.jacobian.batch

    @property
    def processes(self) -> Processes:
        return self.jacobian.resources.processes

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(interval_labels(self.settings.edges))

    @cached_property
    def rewards(self) -> pd.DataFrame:
        """The reward of each response of the batch, if known, and its parts: REWARD_PART and their name."""
        batch = self.batch
        known = {} if batch.rewards is None else {"reward": batch.rewards}
        known |= {f"{REWARD_PART}{name}": part for name, part in (batch.reward_parts or {}).items()}
        return pd.DataFrame({name: own.numpy() for name, own in known.items()}, index=range(len(batch)))

    @cached_property
    def weighted(self) -> bool:
        """Whether there is an update: all weights are known, and some are nonzero."""
        return has_gradient(self.table)

    @cached_property
    def supply(self) -> Supply:
        return supply_of(self.table, self.whole, self.verdict_minutes)

    @cached_property
    def case(self) -> Case:
        size = sum(parameter.numel() for parameter in self.policy.model.parameters())
        plan = self.jacobian.plan_gram(len(self.labels), metric=self.metric is not None, way=self.settings.gradient_way)
        return Case(self.settings, self.step, size, plan.forward_passes, self.metric is not None)

    def seconds(self, forward_passes: float) -> float:
        """Return the time of this many forward passes over the batch."""
        return self.clock.pass_seconds * forward_passes

    def note(self, kind: str, text: str) -> None:
        self.notes.append(Note(text, kind))

    def leave_out(self, name: str, title: str, kind: str, why: str) -> None:
        """Record that a product or part is left out, with a note of this kind."""
        self.left_out[name] = why
        self.note(kind, f"Left out: {title} ({why}).")

    def fits(self, name: str, title: str, seconds: float) -> bool:
        """Return whether a product fits into the time that is left; if not, leave it out. The main process decides."""
        left = self.clock.left
        fits = self.processes.gather([seconds <= left])[0]
        if not fits:
            why = f"it would take {describe_seconds(seconds)}, and {describe_seconds(left)} of the minutes are left"
            self.leave_out(name, title, "minutes", why)
        return fits

    def attempt(self, name: str, title: str, make: Callable[[], Made]) -> Made | None:
        """Make a product or a part; on InputError or lack of memory leave it out, and return None."""
        try:
            return make()
        except (InputError, torch.OutOfMemoryError) as error:
            self.leave_out(name, title, "impossible", first_line(error))
            return None
        finally:
            return_freed_memory()

    def draws(self, name: str) -> dict[str, Any]:
        """Return a statistic's own random numbers, so that no other statistic changes them."""
        rng = np.random.default_rng([self.settings.seed, *name.encode()])
        return {"seed": rng, "resamples": self.settings.resamples}

    def step_keywords(self) -> Mapping[str, Any]:
        return {"loss": self.settings.loss, "step": self.step, "optimizer_state": self.saved}
