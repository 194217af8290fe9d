"""Losses that a trainer may have computed: ways of averaging, each also with common errors, alone or in pairs.

The gradient is −Σ_t c_t·(w_t·∇ log π_t + e·∇H_t), with w_t of Eq. 2 and e the coefficient of an entropy bonus. An
aggregation specifies c_t, and a fault changes the terms or what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradscope.errors import InputError
from gradscope.gradients import TokenJacobian
from gradscope.objective import LossSettings
from gradscope.rollouts import TokenBatch
from gradscope.updates.auditing.encoding import CLOSINGS, THINK, Row, align, encode_again, find_thinking
from gradscope.updates.auditing.faults import (
    COLUMNS,
    FAULTS,
    PASSES,
    REWRITTEN,
    TERMS,
    Columns,
    Terms,
    bounded,
    inner_orders,
    orders,
)
from gradscope.updates.auditing.undetached import undetached

AGGREGATIONS = {
    "logged": "the loss as recorded in the log",
    "token-mean": "the mean over all tokens of the batch",
    "sequence-mean": "the mean over responses of the mean over their tokens",
    "micro-batches": "the mean over micro-batches of the mean over their tokens",
    "processes": "the mean over processes of the mean over their tokens",
    "prompts": "the mean over prompts of the mean over their tokens",
    "parts": "the mean over {value:.0f} parts of consecutive responses of the mean over their tokens",
    "strides": "the mean over {value:.0f} parts of responses dealt in turn of the mean over their tokens",
}
GUESSED = ("prompts", "parts", "strides")
"""Aggregations that are tried if no other fits, as the log does not tell micro-batches or processes."""
CHUNK = 4
"""Fewest tokens of a chunk of a head's; the others tried have powers of 2 times as many."""
SLICES = (2, 4, 8, 16)
"""Into how many slices rows may be cut, for as many ranks."""
ALIGNED = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")
"""A batch's numbers by token that readings are made of."""
Weights = Float[Tensor, "2 K"]
"""c_t·w_t and c_t·e of each token, in float64."""


@dataclass(frozen=True)
class TrainedLoss(LossSettings):
    """The loss that a trainer means to compute."""

    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus."""
    advantage_eps: float | None = None
    """Added to a group's standard deviation where advantages are made of rewards; None: 1e-6 or 1e-4, whichever given
    advantages show, else 1e-6."""

    @classmethod
    def of(cls, loss: LossSettings) -> TrainedLoss:
        """Return the loss, without a bonus unless it has one."""
        return loss if isinstance(loss, TrainedLoss) else cls(**asdict(loss))


@dataclass(frozen=True)
class Reading:
    """A loss whose gradient a trainer may have computed."""

    aggregation: str
    """One of AGGREGATIONS."""
    faults: tuple[str, ...] = ()
    """What it does wrong, of FAULTS."""
    part: int | None = None
    """Index of the missing response, micro-batch or process, of the first missing response, or of the micro-batch or
    process whose rows are in another order; None: none is."""
    value: float | None = None
    """The number of an aggregation's or a fault's words: a coefficient, a bound, a count; None: there is none."""

    @property
    def fault(self) -> str | None:
        """The faults, joined by "+"; None: none."""
        return "+".join(self.faults) or None

    @property
    def name(self) -> str:
        """The aggregation or the faults; both if the faults are of another aggregation than the mean over tokens."""
        if not self.faults:
            return self.aggregation
        return self.fault if self.aggregation == "token-mean" else f"{self.fault} ({self.aggregation})"

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do about each fault, but for π/π_old = 1 on other rows, which follows."""
        follows = {"old-recomputed"} if self.faults and self.faults[0] in (*PASSES, *REWRITTEN) else ()
        return tuple(dict.fromkeys(FAULTS[name].remedy for name in self.faults if name not in follows))

    @property
    def wrong(self) -> str:
        """The faults in words; empty: none."""
        return ", ".join(FAULTS[name].words for name in self.faults).format(part=self.part, value=self.value)

    def __str__(self) -> str:
        average = AGGREGATIONS[self.aggregation].format(value=self.value)
        return f"{average}, {self.wrong}" if self.faults else average


@dataclass(frozen=True)
class TokenRows:
    """Where a batch's kept tokens are, in order."""

    response: Int[Tensor, " K"]
    parts: Mapping[str, Int[Tensor, " B"]]
    """Each response's micro-batch (numbered across processes) and process, as far as known."""

    @classmethod
    def of(cls, batch: TokenBatch, micro_batch: int | None, processes: int | None) -> TokenRows:
        """Find them; see `audit` for the arguments."""
        if processes is not None and not (processes > 0 and len(batch) % processes == 0):
            raise InputError(
                f"{len(batch)} responses do not divide among {processes} processes; give the actual number"
            )
        rows, found = torch.arange(len(batch)), {}
        if processes is not None:
            found["processes"] = rows // (len(batch) // processes)
        elif batch.process_ids is not None:
            found["processes"] = batch.process_ids.long()
        if micro_batch is not None:
            found["micro-batches"] = rows // micro_batch
        elif batch.micro_batch_ids is not None:
            own = batch.micro_batch_ids.long()
            found["micro-batches"] = own + (own.max() + 1) * found.get("processes", torch.zeros_like(own))
        return cls(batch.response_mask.nonzero()[:, 0], found)

    def divided(self) -> dict[str, Int[Tensor, " K"]]:
        """Return each token's part of the batch, within which an aggregation averages."""
        found = {"token-mean": torch.zeros_like(self.response), "sequence-mean": self.response}
        of_tokens = {name: own[self.response] for name, own in self.parts.items()}
        return found | {name: own for name, own in of_tokens.items() if len(own.unique()) > 1}


@dataclass(frozen=True)
class Readings:
    """The weights of every reading of a batch's loss, on the tokens of a Jacobian."""

    J: TokenJacobian
    """Of the batch's kept tokens, or of all real ones (see `on_all_tokens`)."""
    loss: TrainedLoss
    rows: TokenRows
    """Of J's batch."""
    kept: Bool[Tensor, "B S"]
    """Tokens that the log's mask keeps."""
    positions: Int[Tensor, "B S"]
    """Each token's position in its response; negative on the prompt."""
    logged: TokenBatch
    """The batch as it was logged, also where the mask drops tokens."""
    faults: tuple[str, ...] = ()
    """What every reading does wrong."""

    def unscaled(self) -> Readings:
        """Return the readings with log π at temperature 1."""
        J = TokenJacobian(self.J.policy, self.J.batch.at_temperature(1.0), self.J.resources)
        return replace(self, J=J, faults=("no-temperature",))

    def on_all_tokens(self) -> Readings:
        """Return the readings on every real token with one before it.

        What the mask drops has a response's mean advantage, and otherwise no numbers.
        """
        batch = self.J.batch
        real, rows = batch.attention_mask.clone(), torch.arange(len(batch))
        first = real.int().argmax(1)
        real[rows, first] = False
        columns = {"response_mask": real, "response_start": first + 1}
        for name in ("old_logprobs", "ref_logprobs"):
            if (values := getattr(batch, name)) is not None:
                columns[name] = values.masked_fill(~self.kept, torch.nan)
        if batch.advantages is not None:
            columns["advantages"] = torch.where(self.kept, batch.advantages, self._of_response[:, None])
        J = TokenJacobian(self.J.policy, replace(batch, **columns), self.J.resources)
        return replace(self, J=J, rows=replace(self.rows, response=real.nonzero()[:, 0]))

    def padded(self, part: Int[Tensor, " B"]) -> Readings:
        """Return those on all tokens of rows that see the padding before their prompts, to the longest prompt of their
        part. Positions count it."""
        policy = self.J.policy
        prompts = (self.J.batch.attention_mask & (self.positions < 0)).sum(1)
        longest = torch.stack([prompts[part == own].max() for own in part])
        pad = getattr(policy.model.config, "pad_token_id", None)
        if policy.tokenizer is not None and policy.tokenizer.pad_token_id is not None:
            pad = policy.tokenizer.pad_token_id
        pad = min(policy.stop_ids, default=0) if pad is None else pad
        rows = []
        for ids, real, count in zip(
            self.J.batch.input_ids, self.J.batch.attention_mask, (longest - prompts).tolist(), strict=True
        ):
            own, seen = real.nonzero()[:, 0], torch.full((count,), pad)
            source = torch.cat([torch.full_like(seen, -1), own])
            rows.append(Row(torch.cat([seen, ids[own]]), source, torch.ones_like(source, dtype=torch.bool)))
        return self._on(rows, "pads-seen")

    def encoded_again(self, fault: str) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each row, and those that a fault of RETOKENISED makes of them."""
        batch, found = self.J.batch, []
        for ids, real, place in zip(batch.input_ids, batch.attention_mask, self.positions, strict=True):
            own, start = ids[real].tolist(), 0 if fault == "retokenised-whole" else int((place[real] < 0).sum())
            found.append((own, own[:start] + encode_again(self.J.policy, own[start:], stripped="stripped" in fault)))
        return found

    def retokenised(self, pairs: Sequence[tuple[list[int], list[int]]], fault: str) -> Readings:
        """Return those on all tokens of rows in place of others: pairs of `encoded_again`."""
        rows = []
        for (old, new), real in zip(pairs, self.J.batch.attention_mask, strict=True):
            source, same = map(torch.tensor, align(old, new, self.J.policy.decode))
            rows.append(Row(torch.tensor(new), real.nonzero()[:, 0][source], same))
        return self._on(rows, fault)

    def without_thinking(self, fault: str) -> tuple[Readings, int] | None:
        """Return those on all tokens of rows from which a fault of THINKING takes some, and how many rows these are;
        None: none."""
        batch, tokenizer, rows, count = self.J.batch, self.J.policy.tokenizer, [], 0
        closings = {THINK, *CLOSINGS.findall(str(getattr(tokenizer, "chat_template", None)))}
        texts = {one: self.J.policy.decode([one]) for one in batch.input_ids.unique().tolist()} if tokenizer else {}
        for ids, real, kept, place in zip(
            batch.input_ids, batch.attention_mask, self.kept, self.positions, strict=True
        ):
            own = real.nonzero()[:, 0]
            told = [texts.get(one, "") for one in ids[own].tolist()]
            gone = torch.zeros_like(own, dtype=torch.bool)
            gone[[*find_thinking(told, kept[own].tolist(), closings, blanks="blanks" in fault)]] = True
            gone &= (place[own] >= 0) | ("prompts" in fault)
            rows.append(Row(ids[own[~gone]], own[~gone], torch.ones_like(own[~gone], dtype=torch.bool)))
            count += bool(gone.any())
        return (self._on(rows, fault), count) if count else None

    def _on(self, rows: Sequence[Row], fault: str) -> Readings:
        """Return those on all tokens of other rows. A token that the batch's row has not has the mask of the one in
        whose place it is, the response's mean advantage, and otherwise no numbers."""
        batch = self.J.batch
        ids, source, same = (
            pad_sequence([*own], batch_first=True, padding_value=fill)
            for own, fill in zip(zip(*rows, strict=True), (0, -1, False), strict=True)
        )
        lengths, columns = torch.tensor([len(row.ids) for row in rows]), torch.arange(ids.shape[1])
        known, first = source >= 0, (source >= 0).int().argmax(1)

        def move(values: Tensor) -> Tensor:
            moved = values.gather(1, source.clamp(min=0))
            return torch.where(known, moved, torch.zeros((), dtype=values.dtype))

        told = {"input_ids": ids, "attention_mask": columns < lengths[:, None], "response_start": first + 1}
        told["response_mask"] = move(batch.response_mask) & (columns > 0)
        for name in ALIGNED:
            if (values := getattr(batch, name)) is not None:
                other = self._of_response[:, None] if name == "advantages" else torch.tensor(torch.nan)
                told[name] = torch.where(same | ~known, move(values), other.to(values))
        places = move(self.positions)
        start = torch.where((places >= 0) & known, columns, ids.shape[1]).amin(1, keepdim=True)
        J = TokenJacobian(self.J.policy, replace(batch, **told), self.J.resources)
        where = {"kept": move(self.kept) & (columns > 0), "positions": columns - start}
        of = replace(self.rows, response=told["response_mask"].nonzero()[:, 0])
        return replace(self, J=J, rows=of, faults=(fault,), **where)

    @property
    def _of_response(self) -> Float[Tensor, " B"]:
        """Each response's mean advantage."""
        return torch.where(self.kept, self.J.batch.advantages, 0.0).sum(1) / self.kept.sum(1).clamp(min=1)

    @cached_property
    def columns(self) -> Columns:
        batch = replace(self.J.batch, loss_scales=None)
        return Columns(batch, self.loss, self.J.statistics.logprob, self.kept, self.loss.advantage_eps or 0.0)

    @cached_property
    def terms(self) -> Terms:
        """The loss's, without a fault."""
        return self.weigh(self.columns)

    def weigh(self, columns: Columns) -> Terms:
        """Return the terms that these columns make."""
        J, batch = self.J, columns.batch
        found = columns.weigh(J.statistics.entropy)
        bonus = torch.full_like(found.kl, self.loss.entropy_coef)
        parts = torch.stack([J.kept(own).double() for own in (found.policy, columns.pull(found.kl), bonus)])
        kept = J.kept(self.kept)
        mask = kept.double().expand(parts.shape)
        inside = J.kept(self.positions) >= 0
        advantages = J.kept(found.policy if batch.advantages is None else batch.advantages).double()
        return Terms(parts, mask, mask, advantages, self.rows.response, kept, inside, self.end)

    @cached_property
    def end(self) -> Bool[Tensor, " K"]:
        """Kept tokens that are the end token: of those known, the one that is there most often."""
        ids, kept = self.J.kept(self.J.batch.input_ids), self.J.kept(self.kept)
        stops = ids[kept & torch.isin(ids, torch.tensor([*self.J.policy.stop_ids], dtype=ids.dtype))]
        return kept & (ids == stops.mode().values) if len(stops) else torch.zeros_like(kept)

    def aggregate(self, terms: Terms, divided: Mapping[str, Int[Tensor, " K"]] | None = None) -> dict[str, Weights]:
        """Return c_t·w_t and c_t·e by aggregation. divided: each token's part; None: of the known aggregations."""
        counted = self._counted if divided is None else self._count(divided)
        values, found, scales = terms.parts * terms.mask, {}, self.J.batch.loss_scales
        if scales is not None and divided is None:
            found["logged"] = values * (scales.double()[self.rows.response] / int(self.kept.sum()))
        for name, (part, size, count) in counted.items():
            sums = terms.counted.new_zeros(3, size).index_add_(1, part, terms.counted)
            divisors = count * sums[:, part]  # 0 where advantages that are a mask cancel: no trainer's gradient
            found[name] = torch.where((values == 0) | (divisors == 0), 0.0, values / divisors)
        return {name: torch.stack([own[0] + own[1], own[2]]) for name, own in found.items()}

    @cached_property
    def _ours(self) -> dict[str, Weights]:
        return self.aggregate(self.terms)

    @cached_property
    def _counted(self) -> dict[str, tuple[Int[Tensor, " K"], int, int]]:
        return self._count(self.rows.divided())

    def _count(self, divided: Mapping[str, Int[Tensor, " K"]]) -> dict[str, tuple[Int[Tensor, " K"], int, int]]:
        """Return each token's part, the number of parts, and of those that have kept tokens."""
        kept = self.J.kept(self.kept)
        return {name: (own, int(own.max()) + 1, len(own[kept].unique())) for name, own in divided.items()}

    def plain(self) -> dict[Reading, Weights]:
        """Return those without a further fault."""
        return {Reading(name, self.faults): own for name, own in self._ours.items()}

    def recomputed(self) -> dict[Reading, Weights]:
        """Return those with π/π_old = 1, where that is another: of rows on which π_old is computed, too."""
        if not self.tells("old-recomputed"):
            return {}
        own = self.aggregate(self._with(("old-recomputed",)))
        return {Reading(name, (*self.faults, "old-recomputed")): weights for name, weights in own.items()}

    def faulty(self, most: int) -> Iterator[tuple[Reading, Weights]]:
        """Yield readings with so many faults, at most one of them a missing part."""
        for faults, terms in self._combine(most):
            yield from ((Reading(name, faults), own) for name, own in self.aggregate(terms).items())
        for faults, terms in self._combine(most - 1):
            yield from self._missing(terms, faults)

    def fitted(self, most: int) -> Iterator[tuple[Reading, Weights, Weights]]:
        """Yield readings with so many faults, the last a factor on part of the loss: the rest of it, and the part."""
        for faults, terms in self._combine(most - 1):
            bonus = replace(terms, parts=torch.zeros_like(terms.parts))
            bonus.parts[2] = 1.0
            for name, rest, part in (
                ("entropy", terms.scale(1, 1, 0), bonus),
                ("kl-scaled", terms.scale(1, 0, 1), terms.scale(0, 1, 0)),
            ):
                rests, parts = self.aggregate(rest), self.aggregate(part)
                for aggregation, own in parts.items():
                    if own.any():
                        yield Reading(aggregation, (*faults, name)), rests[aggregation], own

    def guesses(self) -> Iterator[tuple[Reading, Weights]]:
        """Yield readings of parts that the log does not tell: averages over them, and some that are missing."""
        count, rows = len(self.J.batch), torch.arange(len(self.J.batch))
        found = {Reading("prompts"): self.J.batch.group_ids.unique(return_inverse=True)[1]}
        sizes = [size for size in range(2, count) if count % size == 0]
        found |= {Reading("parts", value=count // size): rows // size for size in sizes}
        found |= {Reading("strides", value=count // size): rows % (count // size) for size in sizes}
        for reading, part in found.items():
            yield reading, self.aggregate(self.terms, {"": part[self.rows.response]})[""]
        for by in range(1, count) if self.J.batch.advantages is not None else ():
            moved = self.weigh(self.columns.with_advantages(self._of_response.roll(by)))
            yield from ((Reading(n, ("advantages-rolled",), value=by), own) for n, own in self.aggregate(moved).items())
        yield from self._reordered()
        for policy in undetached(self.columns, self.J.statistics.entropy):
            terms = replace(self.terms, parts=torch.cat([self.J.kept(policy)[None], self.terms.parts[1:]]))
            yield from ((Reading(name, ("not-detached",)), own) for name, own in self.aggregate(terms).items())
        for fault, terms in chain(self._move_mask(), self._unmask()):
            yield from ((Reading(name, (fault,)), own) for name, own in self.aggregate(terms).items())
        for fault, slices, terms in self._slice():
            yield from ((Reading(name, (fault,), value=slices), own) for name, own in self.aggregate(terms).items())
        yield from self._average_chunks()
        for fault, terms in self._count_padding():
            yield from ((Reading(name, (fault,)), own) for name, own in self.aggregate(terms).items())
        for part, rest, alone in (("kl", (1, 0, 1), (0, 1, 0)), ("entropy", (1, 1, 0), (0, 0, 1))):
            others, parts = (self.aggregate(self.terms.scale(*factors)) for factors in (rest, alone))
            for (name, own), (other, its) in product(others.items(), parts.items()):
                if "logged" not in (name, other) and name != other and its.any():
                    yield Reading(name, (f"{part}-{other}",)), own + its
        for size in sizes:
            for start in range(0, count, size):
                terms = self.terms.without((self.rows.response >= start) & (self.rows.response < start + size))
                for name, weights in self.aggregate(terms).items():
                    yield Reading(name, ("responses-missing",), start, size), weights

    def _move_mask(self) -> Iterator[tuple[str, Terms]]:
        """Yield the terms under a mask that alone is shifted: along responses or whole rows, dropped tokens without
        π_old and π_ref or with those in the log."""
        for own in (self.terms, self._with_dropped):
            for among in (own.inside, torch.ones_like(own.inside)):
                for fault, by in (("mask-alone-late", 1), ("mask-alone-early", -1)):
                    if (moved := own.move_mask(by, among)) is not None:
                        yield fault, moved

    def _slice(self) -> Iterator[tuple[str, int, Terms]]:
        """Yield the terms without the first tokens of slices of rows that are padded on the right, to the longest of
        their micro-batch or of all."""
        real, whole = self.J.batch.attention_mask, torch.zeros(len(self.J.batch), dtype=torch.long)
        place, lengths = self.J.kept(real.cumsum(1) - 1), real.sum(1)
        for part in (self.rows.parts.get("micro-batches", whole), whole):
            longest = torch.stack([lengths[part == own].max() for own in part])[self.rows.response]
            for slices in SLICES:
                size = -(-longest // slices)
                cut = (place > 0) & (place % size == 0)
                for counted, end in ((True, ""), (False, "-uncounted")):
                    kept = self.terms.kept & ~cut
                    yield f"slice-starts{end}", slices, self.terms.over(kept, counted=not counted)

    def _average_chunks(self) -> Iterator[tuple[Reading, Weights]]:
        """Yield the mean over chunks of consecutive kept tokens of each micro-batch; all count alike, or by tokens."""
        kept, whole = self.terms.kept, torch.zeros(len(self.J.batch), dtype=torch.long)
        part = self.rows.parts.get("micro-batches", whole)[self.rows.response].unique(return_inverse=True)[1]
        values, counts = self.terms.parts * self.terms.mask, part[kept].bincount().double()
        most = int(counts.max())
        place = torch.zeros_like(part)
        for own in part.unique():
            place[kept & (part == own)] = torch.arange(int((kept & (part == own)).sum()))
        size = CHUNK
        while size < most:
            chunk = (part * most + place // size).unique(return_inverse=True)[1]
            tokens = chunk[kept].bincount(minlength=int(chunk.max()) + 1)
            own = values / ((counts / size).ceil()[part] * tokens[chunk].clamp(min=1))
            for name, share in (("micro-batches", 1 / len(counts)), ("token-mean", (counts / counts.sum())[part])):
                weights = own * share
                yield Reading(name, ("chunk-means",), value=size), torch.stack([weights[:2].sum(0), weights[2]])
            size *= 2

    def _count_padding(self) -> Iterator[tuple[str, Terms]]:
        """Yield the terms with denominators of padded responses, or rows, of each micro-batch."""
        real, part = self.J.batch.attention_mask, self.rows.parts.get("micro-batches")
        if part is None:
            return
        for fault, lengths in (("pads-counted", (real & (self.positions >= 0)).sum(1)), ("rows-counted", real.sum(1))):
            longest = torch.stack([lengths[part == own].max() for own in part])
            times = (longest / self.kept.sum(1).clamp(min=1))[self.rows.response]
            yield fault, replace(self.terms, counted=self.terms.counted * times)

    @cached_property
    def _with_dropped(self) -> Terms:
        """The terms of tokens that the mask drops made of what the log has of them."""
        told = {name: getattr(self.logged, name) for name in ("old_logprobs", "ref_logprobs")}
        return self.weigh(replace(self.columns, batch=replace(self.columns.batch, **told)))

    def _unmask(self) -> Iterator[tuple[str, Terms]]:
        """Yield the terms with KL, or the entropy, of all tokens of responses; as their denominator counts, or not."""
        for row, fault in ((1, "kl-unmasked"), (2, "entropy-unmasked")):
            own = self._with_dropped
            mask, counted = own.mask.clone(), own.counted.clone()
            mask[row] = counted[row] = own.inside.double()
            if (own.parts[row] * (mask - own.mask)[row]).any():
                yield from ((fault, replace(own, mask=mask, counted=n)) for n in (own.counted, counted))

    def _reordered(self) -> Iterator[tuple[Reading, Weights]]:
        """Yield readings of a column in another order of rows: of the whole batch, within all of its parts, or one."""
        batch, plain = self.logged, self._ours
        given = batch.attention_mask.sum(1), (batch.attention_mask & (self.positions >= 0)).sum(1), batch.group_ids
        for name, by, order in orders(*given):
            for column, columns in self._reorder(order):
                weighed = self.aggregate(self.weigh(columns))
                yield from ((Reading(n, (f"{column}-{name}",), value=by), own) for n, own in weighed.items())
        rows, seen = torch.arange(len(batch)), {tuple(order.tolist()) for *_, order in orders(*given)}
        kinds = {"micro-batches": "micro-batch", "processes": "process", "prompts": None}
        for kind, part in (self.rows.parts | {"prompts": batch.group_ids}).items():
            for name, by, order in inner_orders(part, *given):
                if torch.equal(order, rows) or tuple(order.tolist()) in seen:
                    continue
                seen.add(tuple(order.tolist()))
                moved = part[order != rows].unique().tolist()
                alone = moved if kinds[kind] and len(moved) > 1 else []
                for column, columns in self._reorder(order):
                    for n, own in self.aggregate(self.weigh(columns)).items():
                        yield Reading(n, (f"{column}-{name}-in-{kind}",), value=by), own
                        for one in alone:  # other columns leave the denominators as they are
                            told = Reading(n, (f"{column}-{name}-in-{kinds[kind]}",), one, by)
                            yield told, torch.where(part[self.rows.response] == one, own, plain[n])

    def _reorder(self, order: Int[Tensor, " B"]) -> Iterator[tuple[str, Columns]]:
        """Yield the columns with one of them in another order of rows, by its name."""
        own, batch = self.columns, self.logged
        inside = batch.attention_mask & (self.positions >= 0)
        if batch.advantages is not None:
            yield "advantages", own.with_advantages(self._of_response[order])
        # As where padded tensors are permuted: the other row's numbers, and 0 beyond its end.
        places = batch.response_start[order, None] + self.positions.clamp(min=0)
        known = inside & (self.positions < inside.sum(1)[order, None])
        for column in ("old", "ref"):
            if column == "ref" and self.compares:
                yield column, self.with_references(order)
            elif (values := getattr(batch, f"{column}_logprobs")) is not None:
                moved = values[order].gather(1, places.clamp(max=values.shape[1] - 1))
                moved = torch.where(known, moved, 0.0).masked_fill(~self.kept, torch.nan)
                yield column, replace(own, batch=replace(own.batch, **{f"{column}_logprobs": moved}))

    @property
    def compares(self) -> bool:
        """Whether the loss is one of its own that compares responses with a reference."""
        return self.loss.is_whole and "ref_logprobs" in self.loss.weighed.OTHERS

    def with_references(self, order: Int[Tensor, " B"]) -> Columns:
        """Return the columns with the sum, or mean, of log π_ref over another row, as such a loss has it."""
        own = self.columns
        counts, ref = self.kept.sum(1), torch.where(self.kept, own.batch.ref_logprobs.double(), 0.0)
        other = ref.sum(1)[order] / (counts[order] if getattr(own.loss.weighed, "MEAN", False) else counts)
        other = torch.where(self.kept, other[:, None], torch.nan).to(own.batch.ref_logprobs)
        return replace(own, batch=replace(own.batch, ref_logprobs=other))

    def bounds(self) -> Iterator[tuple[str, Float[Tensor, " K"]]]:
        """Yield the columns beyond a bound of which tokens may have no gradient."""
        return bounded(self.columns, self.terms, self.J.batch.response_mask)

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Faults of COLUMNS and TERMS that change nothing on this batch; on its kept tokens alone, those of the mask
        are not known."""
        return tuple(name for name in (*COLUMNS, *TERMS) if not self.tells(name))

    def tells(self, fault: str) -> bool:
        """Return whether a fault of COLUMNS or TERMS changes the weights."""
        terms = self._with((fault,)) if fault in COLUMNS else TERMS[fault](self.terms)
        return terms is not None and not near(self.aggregate(terms)["token-mean"], self._ours["token-mean"])

    @property
    def scales(self) -> bool:
        """Whether there is a temperature."""
        return bool((self.J.batch.temperature[self.kept.any(1)] != 1).any())

    def _combine(self, most: int) -> Iterator[tuple[tuple[str, ...], Terms]]:
        """Yield the terms with so many faults that tell, those of COLUMNS first."""
        most -= len(self.faults)
        if most <= 0:
            yield from [(self.faults, self.terms)] if most == 0 else []
            return
        for some in combinations([name for name in (*COLUMNS, *TERMS) if name not in self.unseen], most):
            if (terms := self._with(tuple(name for name in some if name in COLUMNS))) is None:
                continue
            for name in some:
                if name in TERMS:
                    terms = terms and TERMS[name](terms)
            if terms is not None:
                yield (*self.faults, *some), terms

    def _with(self, changes: tuple[str, ...]) -> Terms | None:
        """Return the terms with faults of COLUMNS; None: one does not apply."""
        if changes not in self._made:
            columns = self.columns
            for name in changes:
                columns = columns and COLUMNS[name](columns)
            self._made[changes] = columns and self.weigh(columns)
        return self._made[changes] if len(changes) < 2 else self._made.pop(changes)

    @cached_property
    def _made(self) -> dict[tuple[str, ...], Terms | None]:
        return {(): self.terms}

    def _missing(self, terms: Terms, faults: Sequence[str]) -> Iterator[tuple[Reading, Weights]]:
        """Yield the readings without a part; beside another fault, only micro-batches and processes may be missing."""
        names = {"micro-batches": "micro-batch-missing", "processes": "process-missing"}
        parts = {} if faults else {"response-missing": self.rows.response}
        parts |= {names[name]: own[self.rows.response] for name, own in self.rows.parts.items()}
        whole = self.aggregate(terms)
        for fault, part in parts.items():
            for index in part[terms.kept].unique().tolist():
                yield from (
                    (Reading(name, (*faults, fault), index), weights * (part != index))
                    for name, weights in whole.items()
                )


def near(a: Weights, b: Weights) -> bool:
    """Return whether two readings have the same weights, to rounding."""
    return bool((a - b).norm() <= 1e-5 * b.norm())
