"""Logged log-probabilities that contradict the policy: missing, shifted, read otherwise, or for no known reason.

A log records log π of every token under the policy that sampled it. On-policy this equals the policy's own log π, up to
the rounding of two engines. If it does not, the full distributions at a few tokens show which reading of the column
fits:

    shifted       log π(o_t±1)                    refused, since every ratio would be another token's
    raw           log π at another temperature    vLLM's `raw_logprobs` are at T = 1, whatever the run's
    truncated     log π − log S                   its `processed_logprobs` are over the top-k, top-p set of mass S
    of base b     log π / log b                   logarithms of base 2 or 10
    clamped       max(log π, c)                   a floor below which the logger cuts

Where none fits, it is said how far the column is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.engine.head import logits_at
from gradscope.gradients.frozen import measuring
from gradscope.objective import widen
from gradscope.policy import Policy
from gradscope.rollouts import Note, TokenBatch
from gradscope.runs import digits

LIKELY = 0.9
"""Tokens above this probability may have a log π that rounds to 0."""
MOST = 0.9
"""Share of zeros among less likely tokens above which the log counts as empty."""
FEWEST = 20
"""Fewest tokens for any conclusion."""
APART = 0.5
"""Mean distance in nats above which a shift is tested."""
NEARER, NEARER_OTHERS = 4.0, 2.0
"""How many times closer the log has to be to the neighbours' log π than to the tokens' own: that of a sampler, and that
of another policy, whose log-probabilities differ from these anyway."""
SAMPLERS, OTHERS = ("old_logprob", "sampler_logprob"), ("ref_logprob", "teacher_logprob")
"""Columns of the policy that sampled the tokens, and those of other policies."""

OFF = 0.01
"""Mean distance in nats up to which the stated reading is accepted; bfloat16 engines differ by this much."""
BETTER = 2.0
"""How many times closer another reading has to be; NEARER times at a temperature that is not stated anywhere."""
ERRORS = 3.0
"""Standard errors that the improvement has to exceed."""
UNEXPLAINED = 0.1
"""Mean distance in nats from which a column that no reading fits is reported: more than a few updates of one batch."""
ALIKE, EXACT = 1.1, 1e-4
"""Readings count as equally good if their distances differ by at most this factor or this many nats."""
RESPONSES, EACH = 32, 8
"""Responses to examine, and tokens of each."""
BASES = (2, 10)
TEMPERATURES = tuple(np.round(np.arange(0.1, 2.001, 0.05), 2).tolist())
TOP_K = (5, 10, 20, 30, 40, 50, 64, 100, 200, 512, 1024)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)


class ContradictionWarning(UserWarning):
    """Logged log-probabilities contradict the policy: see `Contradiction`."""


@dataclass(frozen=True)
class Reading:
    """One reading of a column of log-probabilities: its temperature, and whether it is renormalised over a kept set."""

    temperature: float | None = None
    """None: the stated one."""
    top_k: int | None = None
    top_p: float | None = None
    base: int | None = None
    """Base of the logarithm; None: e."""
    floor: float | None = None
    """Number below which the logger cuts; None: it does not."""

    @property
    def truncates(self) -> bool:
        return self.top_k is not None or self.top_p is not None

    def __str__(self) -> str:
        parts = {"T": self.temperature, "top-k": self.top_k, "top-p": self.top_p}
        parts |= {"base": self.base, "cut below": self.floor}
        return ", ".join(f"{name} = {value:g}" for name, value in parts.items() if value is not None)


@dataclass(frozen=True)
class Contradiction:
    """A column of logged log-probabilities that contradicts its stated reading."""

    column: str
    reading: Reading
    """The reading that fits."""
    distance: float
    """Mean |Δ log π| under that reading, over the examined tokens, in nats."""
    stated_distance: float
    """The same under the stated reading."""
    stated_temperature: float
    kept_mass: float
    """Mean probability of the kept set; 1 without truncation."""
    num_tokens: int

    @property
    def note(self) -> Note:
        far, near = digits(self.stated_distance), digits(self.distance)
        apart = (
            f"on {self.num_tokens} tokens it differs on average by {far} nats from this policy's log π at T = "
            f"{self.stated_temperature:g}, and by {near} at {self.reading}"
        )
        if self.reading.base is not None or self.reading.floor is not None:
            cause = "log natural logarithms" if self.reading.floor is None else "log them uncut"
            return Note(f"{self.column} holds other numbers than log π: {apart}: {cause}", "logged-logprobs")
        found = f"{self.column} contradicts the stated temperature: {apart}"
        if self.reading.truncates:
            return Note(
                f"{found}, renormalised over the kept tokens, whose mean mass is {self.kept_mass:.3g}: ratios "
                "to it are too small by that mass, and truncated sampling is outside the theory; log raw "
                "log-probabilities, or sample without truncation",
                "logged-logprobs",
            )
        return Note(
            f"{found}. If the tokens were sampled at T = {self.reading.temperature:g}, give that temperature; if not, "
            "the log holds the sampler's raw log-probabilities, and ratios to them mean nothing: drop the column, or "
            "log processed ones",
            "logged-logprobs",
        )


def refuse_foreign_logprobs(
    own: Sequence[Float[Tensor, " _"]], logged: Sequence[Float[Tensor, " _"]], name: str
) -> None:
    """Raise InputError if logged log π are 0.0 at most unlikely tokens, or belong to the neighbouring token."""
    mine, told = (torch.cat(list(values)).double().numpy() for values in (own, logged))
    instead = " (tokens then count as on-policy)" if name in SAMPLERS else ""
    unlikely = ~np.isnan(told) & (mine < np.log(LIKELY))
    zero = int((told[unlikely] == 0).sum())
    if unlikely.sum() >= FEWEST and zero > MOST * unlikely.sum():
        raise InputError(
            f"{name} is 0.0, a probability of 1, at {zero} of the {int(unlikely.sum())} tokens that the policy gives "
            f"less than {LIKELY}: the log holds none; drop the column{instead}, or log them"
        )
    apart = _distance(own, logged, 0)
    if not apart > APART:
        return
    for shift, words in ((1, "next"), (-1, "previous")):
        if (NEARER if name in SAMPLERS else NEARER_OTHERS) * (other := _distance(own, logged, shift)) < apart:
            raise InputError(
                f"{name} is that of the {words} token: on average {other:.2f} nats from its log π, and {apart:.2f} "
                "from the token's own; shift the column by one"
            )


def _distance(own: Sequence[Tensor], logged: Sequence[Tensor], shift: int) -> float:
    """Return the mean distance of the logged log π from the policy's log π `shift` tokens on; NaN for few tokens."""
    parts = []
    for mine, told in zip(own, logged, strict=True):
        first, second = (mine[shift:], told[: len(told) - shift]) if shift >= 0 else (mine[:shift], told[-shift:])
        parts.append((first - second).abs())
    distances = torch.cat(parts).double()
    distances = distances[distances.isfinite()]
    return float(distances.mean()) if len(distances) >= FEWEST else float("nan")


def find_contradictions(
    policy: Policy, batch: TokenBatch, columns: Mapping[str, np.ndarray | Tensor]
) -> list[Contradiction]:
    """Find columns of logged log-probabilities that another reading fits better than the stated one.

    columns: `logprob` and, if logged, `old_logprob` and `sampler_logprob`, in table order. Free if these agree to OFF
    nats; else costs a forward pass over at most RESPONSES responses.
    """
    logged = {name: np.asarray(columns[name], dtype=np.float64) for name in SAMPLERS if name in columns}
    own, found = np.asarray(columns["logprob"], dtype=np.float64), []
    for name, told in logged.items():
        known = np.isfinite(told)
        if known.sum() < FEWEST or np.abs(told - own)[known].mean() <= OFF:
            continue
        if found and found[-1].column == "old_logprob" and np.array_equal(told, logged["old_logprob"], equal_nan=True):
            continue  # prime-rl logs one column twice
        contradiction = _read_column(policy, batch, name, told, np.random.default_rng(0))
        if contradiction is not None:
            found.append(contradiction)
    return found


def note_logged(policy: Policy, batch: TokenBatch, columns: Mapping[str, np.ndarray | Tensor]) -> tuple[Note, ...]:
    """Describe contradictions in notes of kind logged-logprobs, also those that no reading explains."""
    found = find_contradictions(policy, batch, columns)
    explained, told = {contradiction.column for contradiction in found}, []
    own = np.asarray(columns["logprob"], dtype=np.float64)
    for name in SAMPLERS:
        apart = np.abs(np.asarray(columns.get(name, np.nan), dtype=np.float64) - own)
        apart = apart[np.isfinite(apart)]
        if name not in explained and len(apart) >= FEWEST and apart.mean() > UNEXPLAINED:
            told.append(
                f"{name} is not this policy's: on {len(apart)} tokens it differs on average by "
                f"{digits(apart.mean())} nats from this policy's log π, and no known reading (temperature, truncation, "
                "base, floor) explains it. Another checkpoint or precision, a repetition penalty, a logit bias or a "
                "trainer's fault may; if the log is wrong, so are ratios, clipped tokens and all that depends on them"
            )
    return *(contradiction.note for contradiction in found), *(Note(words, "logged-logprobs") for words in told)


def _read_column(
    policy: Policy, batch: TokenBatch, name: str, told: np.ndarray, generator: np.random.Generator
) -> Contradiction | None:
    """Return the contradiction found on a sample of tokens; None if the stated reading fits best."""
    bounds = np.cumsum([0, *batch.response_mask.sum(1).tolist()])
    known = [np.flatnonzero(np.isfinite(told[slice(*bounds[row : row + 2])])) for row in range(len(batch))]
    rows = [row for row in range(len(batch)) if len(known[row])]
    rows = sorted(generator.choice(rows, min(RESPONSES, len(rows)), replace=False).tolist())
    finite = told[np.isfinite(told)]
    floor = float(finite.min()) if 1 < (told == finite.min()).sum() < len(finite) else None
    distances: dict[Reading, list[np.ndarray]] = {}
    masses: dict[Reading, list[np.ndarray]] = {}
    with torch.no_grad(), measuring(policy.model, batch.width):
        for row in rows:
            picks = np.sort(generator.choice(known[row], min(EACH, len(known[row])), replace=False))
            logits, ids = _logits_of(policy.model, batch, row, picks)
            for reading, logprobs, mass in _readings(logits, ids, float(batch.temperature[row]), floor):
                distances.setdefault(reading, []).append(np.abs(logprobs - told[bounds[row] + picks]))
                masses.setdefault(reading, []).append(mass)
    apart = {reading: np.concatenate(parts) for reading, parts in distances.items()}
    stated = apart[Reading()]
    if len(stated) < FEWEST:
        return None
    # Among equally good readings the first is taken, which is the simplest.
    limit = ALIKE * min(values.mean() for values in apart.values()) + EXACT
    best = next(reading for reading, values in apart.items() if values.mean() <= limit)
    gain = stated - apart[best]
    is_usual = best.base is None and best.floor is None and (best.truncates or best.temperature == 1)
    wanted = BETTER if is_usual else NEARER
    is_sure = gain.mean() > ERRORS * gain.std(ddof=1) / np.sqrt(len(gain))
    if best == Reading() or not is_sure or wanted * apart[best].mean() > stated.mean():
        return None
    return Contradiction(
        name,
        best,
        float(apart[best].mean()),
        float(stated.mean()),
        float(batch.temperature[rows].mean()),
        float(np.concatenate(masses[best]).mean()),
        len(stated),
    )


def _logits_of(
    model: nn.Module, batch: TokenBatch, row: int, picks: np.ndarray
) -> tuple[Float[Tensor, "k vocab"], Int[Tensor, " k"]]:
    """Return the logits at some kept tokens of a response, given by index, and the tokens' ids."""
    ids, targets = batch.sequence(row)
    chosen = targets[torch.from_numpy(picks)]
    device = next(model.parameters()).device
    logits = logits_at(model, ids[: int(chosen[-1])].to(device), (chosen - 1).to(device))
    return widen(logits).cpu(), ids[chosen]


def _readings(
    logits: Float[Tensor, "k vocab"], ids: Int[Tensor, " k"], stated: float, floor: float | None
) -> Iterator[tuple[Reading, np.ndarray, np.ndarray]]:
    """Yield each reading, simplest first, with the tokens' log π in nats and the mass of the kept set, [k] each."""
    own, whole = ids[:, None], np.ones(len(ids))

    def read(temperature: float | None) -> tuple[Tensor, np.ndarray]:
        """Return all log π at a temperature, and the tokens'."""
        scaled = (logits / (stated if temperature is None else temperature)).log_softmax(-1)
        return scaled, scaled.gather(-1, own)[:, 0].double().numpy()

    for temperature in (None, 1.0, *(t for t in TEMPERATURES if t != 1)):
        yield Reading(temperature), read(temperature)[1], whole
    for temperature in (None, 1.0):
        _, logprobs = read(temperature)
        for base in BASES:
            yield Reading(temperature, base=base), logprobs / np.log(base), whole
        if floor is not None:
            yield Reading(temperature, floor=floor), np.maximum(logprobs, floor), whole
    for temperature in (None, 1.0):
        scaled, logprobs = read(temperature)
        top = scaled.topk(min(max(TOP_K), scaled.shape[-1])).values.double().exp().cumsum(-1).numpy()
        # The kept set always includes the token itself: an engine with other rounding may have kept it.
        rank = (scaled > scaled.gather(-1, own)).sum(-1).numpy()
        for top_k, top_p in product((None, *TOP_K), (None, *TOP_P)):
            if (top_k or top_p) and (top_k or 0) <= scaled.shape[-1]:
                mass = _kept_mass(top, rank, top_k, top_p)
                yield Reading(temperature, top_k, top_p), logprobs - np.log(mass), mass


def _kept_mass(top: np.ndarray, rank: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Return the mass kept by top-k, then top-p, given cumulative probabilities [k, n] and the token's rank."""
    kept = np.full(len(top), top.shape[1] - 1 if top_k is None else min(top_k, top.shape[1]) - 1)
    if top_p is not None:
        within = top[np.arange(len(top)), kept] if top_k is not None else np.ones(len(top))
        reached = top >= top_p * within[:, None]
        kept = np.where(reached.any(1), np.minimum(kept, reached.argmax(1)), kept)
    return top[np.arange(len(top)), np.minimum(np.maximum(kept, rank), top.shape[1] - 1)]
