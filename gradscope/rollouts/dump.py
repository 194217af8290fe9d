"""What was read of a trainer's log: the batch, what only trainers' logs have, whether ids and texts agree, notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.batch import Note, Response, TokenBatch, collate
from gradscope.rollouts.formats.base import EMPTY, EXTRAS, FROM_REWARDS, NO_TEMPERATURE, ON_POLICY, Row
from gradscope.rollouts.formats.values import (
    check_sizes,
    parse_ids,
    parse_logprobs,
    parse_mask,
    parse_per_token,
    parse_response,
)

LOOKED_AT = 8
"""Rows whose text is compared: another tokenizer shows in the first one."""


@dataclass
class Agreement:
    """The first rows that hold both the ids and the text of their response, each compared as it comes."""

    policy: Policy | None
    """Without one, or without its tokenizer, nothing is compared."""
    compared: int = 0
    differing: int = 0
    first: str = ""
    """What the first row that differs says."""

    def take(self, row: Row, response_ids: list[int]) -> None:
        """Compare the row, if it holds both and is among the first."""
        text = row.columns.get("response") if "response_ids" in row.columns else None
        tokenizer = None if self.policy is None else self.policy.tokenizer
        if tokenizer is None or self.compared == LOOKED_AT or not isinstance(text, str):
            return
        decoded, special = tokenizer.decode(response_ids), tokenizer.all_special_tokens
        given, found = (_strip(words, special) for words in (text, decoded))
        if not given or not found:
            return  # nothing, or special tokens alone: that says nothing of the others
        self.compared += 1
        if given in found or found in given:  # one may be cut, as by a stop word
            return
        self.differing += 1
        self.first = self.first or (
            f"{row.place}: `{row.label('response_ids')}` are {show(decoded)} to this checkpoint's tokenizer, "
            f"`{row.label('response')}` is {show(text)}"
        )

    def check(self) -> None:
        """InputError if most of the rows differ. Of few, the ids are what counts: text can be tidied up."""
        if 2 * self.differing > self.compared:
            raise InputError(
                f"{self.first}, and so in {self.differing} of the first {self.compared} rows with both; give the "
                "checkpoint that sampled them, or leave the text out"
            )


def _strip(text: str, special: list[str]) -> str:
    """The text without special tokens, without broken characters, and without blanks, which decoders tidy up."""
    for token in sorted(special, key=len, reverse=True):
        text = text.replace(token, "")
    return "".join(text.replace("\ufffd", "").split())


ALL_OR_NONE = (
    "advantage",
    "reward",
    "group",
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
    "temperature",
    *EXTRAS,
)
"""Columns that every row must have as soon as one has it: a hole would silently change what is measured."""


@dataclass(frozen=True)
class Dump:
    """Rollouts as their trainer wrote them; every tensor of [B, S] is aligned as in the batch."""

    batch: TokenBatch
    """`old_logprobs` is the denominator of the ratio that was trained: prime-rl's inference_logprobs, NeMo-RL's
    prev_logprobs, slime's log_probs (rollout_log_probs where the log has these alone), open-instruct's logprobs."""
    format: str
    """Name of the format."""
    steps: Int[Tensor, " B"] | None = None
    """Training step of each response; None: the log does not say."""
    entropy: Float[Tensor, "B S"] | None = None
    """The trainer's entropy of the distribution at each response token, nats; NaN where unknown."""
    logprobs: Float[Tensor, "B S"] | None = None
    """The trainer's own log π, nats, where the log has the sampler's too: prime-rl's trainer_logprobs, NeMo-RL's
    prev_logprobs, slime's log_probs."""
    clipped: Bool[Tensor, "B S"] | None = None
    """True on tokens whose policy term the trainer itself left out of its loss (prime-rl's is_masked)."""

    @property
    def sampler_logprobs(self) -> Float[Tensor, "B S"] | None:
        """The batch's: against `logprobs` it shows the mismatch of the two engines."""
        return self.batch.sampler_logprobs

    @property
    def notes(self) -> tuple[Note, ...]:
        """The batch's: what was assumed, left out or mixed in reading it."""
        return self.batch.notes

    @property
    def remarks(self) -> tuple[Note, ...]:
        """The notes but the one that is a rule of the native format: without a temperature it is 1."""
        return tuple(note for note in self.notes if self.format != "native" or note.kind != "temperature")

    def with_note(self, text: str, kind: str = "dump") -> Dump:
        """The same rollouts with one more note."""
        return replace(self, batch=replace(self.batch, notes=(*self.notes, Note(text, kind))))


def keep_own_step(dump: Dump, checkpoint: int | None) -> Dump:
    """The part of a log that a checkpoint sampled: the responses of the training step after its own.

    checkpoint: how many steps it had taken. Where the log lacks that step, the nearest one; a note says which was
    taken. The whole log, where it holds one step or none is known; a note says if that step is another's.
    """
    known = [] if dump.steps is None else dump.steps.unique().tolist()
    if not known or (len(known) == 1 and checkpoint in (None, known[0] - 1)):
        return dump
    if len(known) == 1:
        taken = f"step {known[0]} is taken, sampled by a different checkpoint"
        return dump.with_note(f"{taken}: this one's would be step {checkpoint + 1}", "other-step")
    span = f"the log holds {len(known)} training steps, {known[0]} to {known[-1]}"
    if checkpoint is None:
        return dump.with_note(f"{span}; which of them this checkpoint sampled is unknown, so all are taken", "step")
    own = min(known, key=lambda step: (abs(step - checkpoint - 1), step))
    taken, kind = f"step {own} is taken, the one after this checkpoint's", "step"
    if own != checkpoint + 1:
        taken = (
            f"step {own} is taken, sampled by a different checkpoint: step {checkpoint + 1}, this one's, is not there"
        )
        kind = "other-step"
    rows = (dump.steps == own).nonzero()[:, 0]
    tensors = ("steps", "entropy", "logprobs", "clipped")
    kept = {name: value[rows] for name in tensors if (value := getattr(dump, name)) is not None}
    return replace(dump, batch=dump.batch.select(rows), **kept).with_note(f"{span}; {taken}", kind)


def make_dump(
    rows: Iterable[Row],
    policy: Policy | None,
    *,
    format: str,
    path: object,
    notes: Sequence[str] = (),
    step: int | None = None,
    is_dump: bool = True,
) -> Dump:
    """The rows as a `Dump`, right-padded, each checked.

    step: keeps the rows of one training step. is_dump: a trainer wrote them, so rows without a response are left out,
    and what is unknown has a note; False: a user did, such rows are refused, and of what is unknown only the
    temperature is told. Without a group, identical prompts
    share one; groups are of one step.
    """
    reading = _Reading(policy, step, is_dump)
    for row in rows:
        reading.take(row)
    reading.check(path)
    batch = collate(reading.responses)
    extras = {name: _spread(batch, values) for name in EXTRAS if any(values := reading.extras[name])}
    if "clipped" in extras:
        extras["clipped"] = extras["clipped"] == 1
    steps = None if None in reading.steps else torch.tensor(reading.steps)
    unknown = _name_unknown(batch, reading)
    unknown = unknown if is_dump else [note for note in unknown if note is NO_TEMPERATURE]
    said = (*notes, *unknown, *reading.unknown_notes(), *reading.left_out_notes())
    told = tuple(note if isinstance(note, Note) else Note(note) for note in said)
    return Dump(replace(batch, notes=told), format, steps, **extras)


class _Reading:
    """What was taken of the rows so far."""

    def __init__(self, policy: Policy | None, step: int | None, drops_empty: bool) -> None:
        self._policy, self._step, self._drops_empty = policy, step, drops_empty
        self.responses: list[Response] = []
        self.steps: list[int | None] = []
        self.extras: dict[str, list[list[float] | None]] = {name: [] for name in EXTRAS}
        self._rows: list[tuple[str, frozenset[str], Row]] = []
        self._groups: dict[object, int] = {}
        self._seen: Counter[int | None] = Counter()
        self._left_out: Counter[str] = Counter()
        self._unknown = 0
        self._agreement = Agreement(policy)

    def take(self, row: Row) -> None:
        self._seen[row.step] += 1
        if self._step is not None and row.step != self._step:
            return
        if row.left_out is not None:
            self._left_out[row.left_out] += 1
            return
        prompt_ids, response_ids = parse_ids(row, self._policy)
        if self._drops_empty and not response_ids:
            self._left_out[EMPTY] += 1
            return
        check_sizes(row, prompt_ids, response_ids, self._policy)
        self._agreement.take(row, response_ids)
        is_text = not {"prompt_ids", "response_ids"} <= set(row.columns)
        if is_text and self._policy.knows_not(row.columns["prompt"], prompt_ids):
            self._unknown += 1
            if 2 * prompt_ids.count(self._policy.tokenizer.unk_token_id) > len(prompt_ids):
                raise InputError(
                    f"{row.place}: the tokenizer has no tokens for most of the prompt {show(row.columns['prompt'])}; "
                    "give the checkpoint that sampled it, or the ids"
                )
        self.responses.append(parse_response(row, prompt_ids, response_ids, self._group(row, prompt_ids)))
        self.steps.append(row.step)
        kept = parse_mask(row, len(response_ids))
        for name in EXTRAS:
            self.extras[name].append(_extra(row, name, kept))
        bare = Row(row.place, {}, row.step, row.labels)  # the values are held by the response alone
        told = frozenset(row.columns) | ({"step"} if row.step is not None else set())
        self._rows.append((row.place, told, bare))

    def _group(self, row: Row, prompt_ids: list[int]) -> int:
        group = row.columns.get("group", tuple(prompt_ids))
        try:
            if isinstance(group, float) and not math.isfinite(group):
                raise TypeError("NaN is not even itself")
            return self._groups.setdefault((row.step, group), len(self._groups))
        except TypeError as error:
            raise InputError(
                f"{row.place}: `{row.label('group')}` is {show(group)}; give a number or a string"
            ) from error

    def check(self, path: object) -> None:
        """InputError where nothing is left, for text that is not the ids', and a column that only some rows have."""
        if not self._seen:
            raise InputError(f"{path} holds no rows; give at least one response")
        if self._step is not None and self._step not in self._seen:
            raise InputError(f"{path} has no step {self._step}; {_name_steps(self._seen)}")
        if not self.responses:
            reasons = "; ".join(self.left_out_notes())
            raise InputError(f"{path} leaves no response to measure ({reasons}); give a log with responses")
        self._agreement.check()
        for name in (*ALL_OR_NONE, "step"):
            having = [name in names for _, names, _ in self._rows]
            if any(having) and not all(having):
                place, _, row = self._rows[having.index(False)]
                raise InputError(
                    f"{place}: no {row.label(name)!r}, which {sum(having)} of the {len(having)} rows have; give it in "
                    "every row, or in none"
                )

    def has(self, name: str) -> bool:
        """Whether the rows have this column."""
        return any(name in names for _, names, _ in self._rows)

    def unknown_notes(self) -> tuple[str, ...]:
        if not self._unknown:
            return ()
        share = f"{self._unknown} of {len(self.responses)} prompts"
        token = self._policy.tokenizer.unk_token
        instead = "it is left out" if token is None else f"{token!r} is there"
        return (f"the tokenizer has no tokens for some of {share}: {instead}",)

    def left_out_notes(self) -> tuple[str, ...]:
        total = len(self.responses) + self._left_out.total()
        return tuple(f"{n} of {total} rows left out: {reason}" for reason, n in self._left_out.items())


def _name_unknown(batch: TokenBatch, reading: _Reading) -> list[Note | str]:
    """A sentence for each thing that had to be assumed."""
    assumed = {
        FROM_REWARDS: batch.advantages is None and batch.rewards is not None,
        ON_POLICY: batch.old_logprobs is None,
        NO_TEMPERATURE: not reading.has("temperature"),
    }
    return [note for note, holds in assumed.items() if holds]


def _extra(row: Row, name: str, kept: np.ndarray) -> list[float] | None:
    if name not in row.columns:
        return None
    if name in ("entropy", "clipped"):
        return parse_per_token(row, name, kept, holes=True)
    return parse_logprobs(row, name, kept)


def _spread(batch: TokenBatch, values: Iterable[list[float]]) -> Float[Tensor, "B S"]:
    """One list per response, placed at the response's columns; NaN elsewhere."""
    out = torch.full(batch.input_ids.shape, float("nan"))
    for row, (start, numbers) in enumerate(zip(batch.response_start.tolist(), values, strict=True)):
        out[row, start : start + len(numbers)] = torch.tensor(numbers)
    return out


def _name_steps(seen: Counter[int | None]) -> str:
    steps = sorted(step for step in seen if step is not None)
    if not steps:
        return "its rows name no training step; leave `step` out"
    listed = ", ".join(map(str, steps)) if len(steps) <= 20 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"it has {listed}"
