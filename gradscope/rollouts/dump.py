"""The contents of a trainer's log: the batch with its notes, and the loss's settings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.errors import InputError, show
from gradscope.policy import Policy
from gradscope.rollouts.batch import Note, Response, TokenBatch, collate
from gradscope.rollouts.caveats import find_caveats
from gradscope.rollouts.formats.base import (
    EMPTY,
    FROM_REWARDS,
    MADE_AGAIN,
    MASKED_OUT,
    NO_SPECIAL_TOKENS,
    NO_TEMPERATURE,
    ON_POLICY,
    RESIZED,
    RETOKENISED,
    UNKNOWN,
    Format,
    ReadingOptions,
    Row,
)
from gradscope.rollouts.formats.text import doubts_of, opening_of, others_in, special_words
from gradscope.rollouts.formats.values import (
    Unfit,
    check_sizes,
    encode_row,
    parse_ids,
    parse_mask,
    parse_response,
    parse_reward,
)
from gradscope.rollouts.group_rewards import group_moments
from gradscope.rollouts.restarts import Passes, Visit, note_twice
from gradscope.rollouts.text_agreement import Agreement
from gradscope.runs import counted

ALL_OR_NONE = (
    *("group", "temperature", "step", "group_reward_mean", "group_reward_std"),
    *("loss_scale", "process", "micro_batch", "pair", "chosen", "z0"),
)
"""Columns that every row needs if any row has them, since missing values have no substitute."""

WITHOUT = {
    "old_logprobs": "assumed on-policy there (ratio 1)",
    "ref_logprobs": "no KL part there",
    "sampler_logprobs": "corrections based on them have the factor 1 there",
    "teacher_logprobs": "no distillation there",
}
"""Consequence of an unknown log-probability, by column."""


@dataclass(frozen=True)
class Dump:
    """Rollouts as logged by a trainer; every tensor [B, S] is aligned like the batch."""

    batch: TokenBatch
    """The batch. `old_logprobs` is the denominator of the ratio used in training: prime-rl's inference_logprobs,
    NeMo-RL's prev_logprobs, slime's log_probs (or else rollout_log_probs), open-instruct's logprobs."""
    format: str
    """Name of the format."""
    first_step: int = 1
    """Number in the log of the step sampled by checkpoint 0."""
    loss: Mapping[str, Any] | None = None
    """Settings of the training loss, by their names in `LossSettings`, if logged."""

    @property
    def steps(self) -> Int[Tensor, " B"] | None:
        """Training step of each response, as numbered in the log; None if not logged."""
        return self.batch.steps

    @property
    def notes(self) -> tuple[Note, ...]:
        """The batch's notes: what was assumed, left out or mixed when reading."""
        return self.batch.notes

    @property
    def remarks(self) -> tuple[Note, ...]:
        """The notes, without the one on the native format's default temperature of 1."""
        return tuple(note for note in self.notes if self.format != "native" or note.kind != "temperature")

    def with_note(self, text: str, kind: str = "dump") -> Dump:
        """Return the rollouts with an additional note."""
        return replace(self, batch=replace(self.batch, notes=(*self.notes, Note(text, kind))))


def note_step(dump: Dump, checkpoint: int | None) -> Dump:
    """Note whether a checkpoint that has taken this many steps sampled the responses: those of the step after its own.

    Nothing is noted if it did, or if the log's steps are unknown.
    """
    known = [] if dump.steps is None else dump.steps.unique().tolist()
    wanted = None if checkpoint is None else checkpoint + dump.first_step
    if len(known) > 1:
        told = f"{_span(known)}; which of them this checkpoint sampled is unknown, so all are taken"
        return dump.with_note(told, "step")
    if not known or wanted in (None, known[0]):
        return dump
    used = f"step {known[0]} is used, though a different checkpoint sampled it"
    return dump.with_note(f"{used}: this one's would be step {wanted}", "other-step")


def choose_step(known: Sequence[int], wanted: int) -> tuple[int, Note]:
    """Return the wanted step of a log, or the nearest one, and a note that says which; known: ascending.

    >>> choose_step([10, 20], 16)[0], choose_step([10, 20], 15)[0]
    (20, 10)
    """
    own = min(known, key=lambda step: (abs(step - wanted), step))
    if own == wanted:
        return own, Note(f"{_span(known)}; step {own} is taken, the one after this checkpoint's", "step")
    told = f"step {own}, sampled by a different checkpoint, is used: the log lacks this one's step {wanted}"
    if wanted > known[-1]:
        told += " (a run that goes one step beyond its last checkpoint logs it)"
    return own, Note(f"{_span(known)}; {told}", "other-step")


def _span(known: Sequence[int]) -> str:
    return f"the log holds {len(known)} training steps, {known[0]} to {known[-1]}"


def make_dump(
    rows: Iterable[Row],
    policy: Policy | None,
    form: Format,
    *,
    path: object,
    options: ReadingOptions,
    notes: Sequence[str] = (),
    others: Mapping[Path, int] | None = None,
) -> Dump:
    """Check the rows and batch them, right-padded, as a `Dump`.

    Rows without a response or a kept token, or with an unknown advantage (unknown reward, if there are no advantages),
    are left out and counted in a note, and so are a few that cannot be measured, and what a restarted run made again.
    Of a trainer's rows, notes report everything unknown; of native ones, only the temperature. Without group ids,
    identical prompts form a group; a group belongs to a single step. others: steps of files whose rows are not given.
    """
    is_dump, is_sampled = form.name != "native", form.loss is None
    reading = _Reading(policy, options, form, Passes(others))
    for row in rows:
        reading.take(row)
    reading.finish(path)
    batch, holes = _count_unknown(replace(collate(reading.responses), **reading.group_moments()))
    assumed = {
        FROM_REWARDS: is_dump and batch.advantages is None and batch.rewards is not None,
        ON_POLICY: is_dump and is_sampled and batch.old_logprobs is None,
        NO_TEMPERATURE: is_sampled and not reading.has("temperature"),
    }
    said = [note for note in notes if not reading.is_ids or note not in (RETOKENISED, NO_SPECIAL_TOKENS)]
    said += [*(note for note, holds in assumed.items() if holds), *holes, *reading.notes()]
    known: dict[str, Any] = {} if policy is None else {"stop_ids": policy.stop_ids, "pad_ids": policy.pad_ids}
    found = find_caveats(batch, left_out=reading.left_out_by_step, is_dump=is_dump, **known)
    told = tuple(note if isinstance(note, Note) else Note(note) for note in said)
    batch = replace(batch, notes=told + found)
    if options.temperature is not None:
        batch = batch.at_temperature(options.temperature)
    return Dump(batch, form.name, form.first_step, reading.losses[0] if reading.losses else None)


@dataclass(frozen=True)
class _Entry:
    """A row that was read."""

    response: Response
    row: Row
    """Without values, which only the response keeps."""
    names: frozenset[str]
    """Names of its columns."""
    visit: Visit


class _Reading:
    """The state of reading a log's rows."""

    def __init__(self, policy: Policy | None, options: ReadingOptions, form: Format, passes: Passes) -> None:
        self._policy, self._options, self._form, self._passes = policy, options, form, passes
        self.left_out_by_step: Counter[int | None] = Counter()
        self.is_ids = True
        """Whether all responses were logged as ids."""
        self.losses: list[Mapping[str, Any] | None] = []
        """The distinct loss settings of the rows."""
        self._entries: list[_Entry] = []
        self._groups: dict[tuple[int | None, object], int] = {}
        self._pairs: dict[tuple[int | None, float], int] = {}
        self._others: defaultdict[tuple[int | None, object], list[tuple[Visit, float]]] = defaultdict(list)
        """Rewards of left-out responses by group."""
        self._seen: Counter[int | None] = Counter()
        self._left_out: Counter[str] = Counter()
        self._unknown = self._templated = self._keyed = 0
        self._temperatures: Counter[float] = Counter()
        """Logged temperatures other than the given one."""
        self._said: list[Note] = []
        self._unfit: dict[str, Unfit] = {}
        """The first error of each reason for which rows cannot be measured."""
        self._agreement = Agreement(policy)
        tokenizer = None if policy is None else policy.tokenizer
        self._marks = opening_of(policy), getattr(tokenizer, "all_special_tokens", ())
        self._words = special_words(tokenizer)

    @property
    def responses(self) -> list[Response]:
        return [entry.response for entry in self._entries]

    def take(self, row: Row) -> None:
        self._seen[row.step] += 1
        visit = self._passes.take(row)
        if self._options.step is not None and row.step not in self._options.step:
            return
        self._keyed += isinstance(row.columns.get("reward"), dict)
        if row.left_out is not None:
            self._leave_out(row, row.left_out, visit)
            return
        loss = self._form.loss if row.loss is None else row.loss
        if loss not in self.losses:
            self.losses.append(loss)
        try:
            self._parse(row, visit)
        except Unfit as error:
            self._unfit.setdefault(error.reason, error)
            ids = row.columns.get("prompt_ids")
            self._leave_out(row, error.reason, visit, ids if isinstance(ids, list) else ())

    def _parse(self, row: Row, visit: Visit) -> None:
        """Add the row's response."""
        if row.encode is not None:
            row = encode_row(row, self._policy, self._options)
            self._templated += isinstance(row.columns.get("prompt"), list)
        prompt_ids, response_ids, remarks = parse_ids(row, self._policy, self._options)
        texts = [None if f"{part}_ids" in row.columns else row.columns[part] for part in ("prompt", "response")]
        self._templated += isinstance(texts[0], list)
        kept = parse_mask(row, len(response_ids))
        if not kept.any():
            self._leave_out(row, MASKED_OUT if response_ids else EMPTY, visit, prompt_ids)
            return
        check_sizes(row, prompt_ids, response_ids, self._policy)
        self._agreement.take(row, response_ids)
        if texts[0] is not None and self._policy.has_unknown(texts[0], prompt_ids):
            self._unknown += 1
            if 2 * prompt_ids.count(self._policy.tokenizer.unk_token_id) > len(prompt_ids):
                raise InputError(
                    f"{row.place}: the tokenizer has no tokens for most of the prompt {show(row.columns['prompt'])}; "
                    "give the checkpoint that sampled it, or the ids"
                )
        self.is_ids &= texts[1] is None
        key = self._group(row, prompt_ids)
        number = self._groups.get(key, len(self._groups))
        response = parse_response(row, prompt_ids, response_ids, number, kept, self._options, self._policy)
        self._groups[key] = number
        if response.pair is not None:  # like a group, a pair belongs to a single step
            pair = self._pairs.setdefault((row.step, response.pair), len(self._pairs))
            response = replace(response, pair=float(pair))
        given, logged = self._options.temperature, row.columns.get("temperature")
        if given is not None and isinstance(logged, int | float) and math.isfinite(logged) and logged != given:
            self._temperatures[float(logged)] += 1
        if texts != [None, None]:
            remarks += (*doubts_of(texts, (prompt_ids, response_ids), self._policy, self._words),)
        if texts[1] is not None and "response_mask" not in row.columns:
            remarks += others_in(texts[1], *self._marks)
        if row.length not in (None, len(response_ids)):
            remarks += (RESIZED,)
        names = frozenset(row.columns) | ({"step"} if row.step is not None else set())
        bare = replace(row, columns={}, remarks=(*row.remarks, *remarks))
        self._entries.append(_Entry(response, bare, names, visit))

    def _leave_out(self, row: Row, reason: str, visit: Visit, prompt_ids: Sequence[int] = ()) -> None:
        """Count the row, and keep its reward for the group's mean."""
        self._left_out[reason] += 1
        self.left_out_by_step[row.step] += 1
        if not row.is_counted or "reward" not in row.columns or not ("group" in row.columns or prompt_ids):
            return
        reward = parse_reward(row, self._options, needed=False)
        if reward is not None:
            self._others[self._group(row, prompt_ids)].append((visit, reward))

    def _group(self, row: Row, prompt_ids: Sequence[int]) -> tuple[int | None, object]:
        """Return the key of the row's group."""
        group = row.columns.get("group", row.columns.get("pair", tuple(prompt_ids)))
        try:
            if isinstance(group, float) and not math.isfinite(group):
                raise TypeError("NaN is not even itself")
            hash(group)
        except TypeError as error:
            raise InputError(
                f"{row.place}: `{row.label('group')}` is {show(group)}; give a number or a string"
            ) from error
        return row.step, group

    def finish(self, path: object) -> None:
        """Leave out responses without weights. Raises InputError if none are left, if text and ids disagree, if only
        some rows have a column, or for an option without effect."""
        if not self._seen:
            raise InputError(f"{path} has no rows; give at least one response")
        for step in self._options.step or ():
            if step not in self._seen:
                raise InputError(f"{path} has no step {step}; {_name_steps(self._seen)}")
        if self._options.chat_template_kwargs and self._entries and not self._templated:
            raise InputError(
                f"chat_template_kwargs are given, but no prompt in {path} is a chat with a template; leave them out"
            )
        if self._options.reward_key is not None and not self._keyed:
            raise InputError(
                f"the reward key {self._options.reward_key!r} is given, and no reward of {path} is a dictionary; leave "
                "it out"
            )
        self._drop(lambda entry: self._passes.is_stale(entry.visit), MADE_AGAIN)
        self._said += self._passes.notes({entry.visit for entry in self._entries}) + note_twice(self.responses)
        for name in ALL_OR_NONE:
            having = [name in entry.names for entry in self._entries]
            if any(having) and not all(having) and getattr(self._options, name, None) is None:
                row = self._entries[having.index(False)].row
                raise InputError(
                    f"{row.place}: no {row.label(name)!r}, which {sum(having)} of the {len(having)} rows have; give it "
                    "in every row, or in none"
                )
        if len(self.losses) > 1:
            raise InputError(
                f"{path} holds responses trained with different losses ({show(self.losses)}); give one of its steps"
            )
        self._agreement.check()
        for reason, error in self._unfit.items():
            if self._left_out[reason] >= len(self._entries):
                raise error  # not a few odd rows: another checkpoint's log, another sampler's
        self._drop_unweighted()
        if not self._entries:
            reasons = "; ".join(self._left_out_notes())
            raise InputError(f"{path} leaves no response to measure ({reasons}); give a log with responses")

    def _drop(self, goes: Callable[[_Entry], bool], reason: str) -> None:
        """Leave out responses that were read."""
        gone = [goes(entry) for entry in self._entries]
        self._left_out[reason] += sum(gone)
        self.left_out_by_step.update(e.row.step for e, leaves in zip(self._entries, gone, strict=True) if leaves)
        self._entries = [entry for entry, leaves in zip(self._entries, gone, strict=True) if not leaves]

    def _drop_unweighted(self) -> None:
        """Drop responses without an advantage if others have one; without any advantages, those without a reward."""
        for name in ("advantage", "reward"):
            unknown = [getattr(response, name) is None for response in self.responses]
            if not all(unknown):
                self._drop(lambda entry, name=name: getattr(entry.response, name) is None, UNKNOWN.format(name))
                return
            if self.has(name):
                words = f"{len(unknown)} of {len(unknown)} responses: {UNKNOWN.format(name)}"
                self._said.append(Note(words, "unknown-values"))

    def group_moments(self) -> dict[str, Float[Tensor, " B"]]:
        """Return the batch's group means and standard deviations, if its responses do not determine them."""
        if any(r.advantage is not None or r.group_reward_mean is not None for r in self.responses):
            return {}
        rewards: dict[int, list[float]] = {number: [] for number in self._groups.values()}
        here = Counter(response.group for response in self.responses)
        for entry in self._entries:
            if entry.response.reward is not None and entry.row.is_counted:
                rewards[entry.response.group].append(entry.response.reward)
        for key, others in self._others.items():
            if key in self._groups:
                own = [reward for visit, reward in others if not self._passes.is_stale(visit)]
                rewards[self._groups[key]] += own
        rule = self._form.keeps_single_rewards
        if not any(here[g] and (len(own) != here[g] or (rule and len(own) == 1)) for g, own in rewards.items()):
            return {}
        counted_in = torch.tensor([group for group, own in rewards.items() for _ in own], dtype=torch.long)
        values = torch.tensor([reward for own in rewards.values() for reward in own], dtype=torch.float32)
        moments = torch.full((2, len(rewards)), math.nan, dtype=torch.float64)
        moments[:, counted_in] = torch.stack(group_moments(values, counted_in))
        if rule:  # the trainer keeps a group's single reward as it is
            alone = [group for group, own in rewards.items() if len(own) == 1]
            moments[:, alone] = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        means, stds = moments[:, [response.group for response in self.responses]]
        return {} if means.isnan().all() else {"group_reward_means": means, "group_reward_stds": stds}

    def has(self, name: str) -> bool:
        """Return whether any row has this column."""
        return any(name in entry.names for entry in self._entries)

    def notes(self) -> list[Note]:
        """Return notes on replaced values, single responses and rows left out."""
        of_rows, total = Counter(words for entry in self._entries for words in entry.row.remarks), len(self._entries)
        told = [Note(f"{n} of {total} responses: {words}") for words, n in of_rows.items()]
        told += self._said
        for logged, n in self._temperatures.items():
            words = f"{n} of {total} responses: the log's temperature is {logged:g}, not the given "
            told.append(Note(f"{words}{self._options.temperature:g}, which is used", "other-temperature"))
        if self.losses and self.losses[0] is not None:
            words = ", ".join(f"{name} {show(value)}" for name, value in self.losses[0].items())
            told.append(Note(f"{self._form.whose_loss(self.losses[0])}: {words}", "loss"))
        told += [Note(words, "left-out") for words in self._left_out_notes()]
        if not self._unknown:
            return told
        token = self._policy.tokenizer.unk_token
        instead = "they are left out" if token is None else f"they become {token!r}"
        return [Note(f"the tokenizer cannot encode parts of {self._unknown} of {total} prompts: {instead}"), *told]

    def _left_out_notes(self) -> list[str]:
        total = len(self._entries) + self._left_out.total()
        told = {reason: self._unfit.get(reason) for reason, n in self._left_out.items() if n}
        named = {reason: f"{reason} (first: {error})" if error else reason for reason, error in told.items()}
        return [f"{self._left_out[reason]} of {total} rows left out: {words}" for reason, words in named.items()]


def _count_unknown(batch: TokenBatch) -> tuple[TokenBatch, list[Note]]:
    """Drop columns without known values and tokens without an advantage; return the batch and its notes."""
    notes, changes, kept = [], {}, batch.response_mask
    if batch.advantages is not None and (unknown := batch.advantages.isnan() & kept).any():
        words = f"{counted(int(unknown.sum()), 'token')} of {counted(int(unknown.any(1).sum()), 'response')} left out"
        notes.append(Note(f"{words}: {UNKNOWN.format('advantage')}", "left-out"))
        changes["response_mask"] = kept = kept & ~unknown
    for name, instead in WITHOUT.items():
        values = getattr(batch, name)
        if values is None or not (unknown := values.isnan() & kept).any():
            continue
        share = f"{int(unknown.sum())} of {int(kept.sum())} tokens"
        notes.append(Note(f"{name} are unknown (null, NaN or infinite) at {share}: {instead}", "unknown-values"))
        if unknown.sum() == kept.sum():
            changes[name] = None
    return replace(batch, **changes), notes


def _name_steps(seen: Counter[int | None]) -> str:
    steps = sorted(step for step in seen if step is not None)
    if not steps:
        return "its rows have no training step; leave `step` out"
    listed = ", ".join(map(str, steps)) if len(steps) <= 20 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"it has {listed}"
