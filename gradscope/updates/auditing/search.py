"""The exact gradients of readings beside the trainer's: first of those without a fault, then of faults.

The trainer's gradient T is cut into spans T_m. ⟨g_t, T_m⟩ of every token, from one jvp, gives −Σ_t c_t·w_t⟨g_t, T_m⟩ of
any reading without a backward pass, and of the right one this is ‖T_m‖². Only the nearest get a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from operator import itemgetter

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import TokenJacobian, Vectors
from gradscope.policy import arithmetic_dtype, flat_slices
from gradscope.updates.auditing.beyond import find_beyond
from gradscope.updates.auditing.faults import PASSES, RETOKENISED, REWRITTEN, THINKING
from gradscope.updates.auditing.packing import PackedJacobian, packings
from gradscope.updates.auditing.passes import backward_passes, forward_passes, takes_positions
from gradscope.updates.auditing.products import TIGHT, products_of, summarize
from gradscope.updates.auditing.readings import GUESSED, Reading, Readings, Weights, near
from gradscope.updates.auditing.rounded import ROUNDED, RoundedJacobian

RESCORED = frozenset({"no-temperature", *PASSES, *REWRITTEN, *ROUNDED})
"""Faults by which log π itself is another."""
AT_ONCE = 8
"""Readings whose gradients are held at a time."""
SPANS = 8
"""Parts of the trainer's gradient."""
NEAREST = 8
"""Readings of those screened at a time that get a backward pass."""
SCREENED = 64
"""Readings whose weights are held at a time."""
SEEN = 20_000
"""Most tokens of rows with all that they see, if they were packed."""
ALIKE = 0.9
"""Least cosine with a reading without a fault for which rounding of logits is tried."""
OFF = 0.05
"""Largest relative error of ‖T_m‖², in half of the spans, of a reading that gets one."""


class Search:
    """Inner products, by parameter, of the trainer's gradient with the exact ones of the readings tried so far."""

    def __init__(
        self, readings: Readings, theirs: Mapping[str, Float[Tensor, " p"]] | None, trained: Callable[[str], bool]
    ) -> None:
        """theirs: flat, by parameter; None: unknown. trained: whether a parameter is, if theirs does not tell."""
        self.readings, self.theirs, self._trained = readings, theirs, trained
        self.found: dict[Reading, pd.DataFrame] = {}
        """By reading, see `products_of`."""
        self.weights: dict[Reading, Weights] = {}
        """By reading; once faults were tried, on all real tokens."""
        self._grams: list[tuple[Float[Tensor, " K"], list[int], Float[np.ndarray, "G G"]]] = []
        """Weights, with the responses that have some and the inner products of their gradients."""
        self._rescored: dict[tuple[str, float | None], Readings] = {}
        """By fault and number: readings by which log π itself is another, but for that without the temperature."""
        self.refused: list[str] = []
        """Faults of passes that the model does not take."""
        self._try(readings.plain(), readings.J)

    @property
    def screens(self) -> bool:
        """Whether there is a jvp, without which readings cannot be screened, nor what is left be explained."""
        return self.theirs is not None and arithmetic_dtype(self.readings.J.model).itemsize >= 4

    def distinct(self, first: str) -> list[str]:
        """Return the aggregations that differ on this batch, `first` in front; by another name than the log's."""
        plain, kept = [reading for reading in self.weights if not reading.faults], []
        named = sorted(plain, key=lambda reading: reading.aggregation == "logged")
        for reading in named:
            if not any(near(self.weights[other], self.weights[reading]) for other in kept):
                kept.append(reading)
        like = [near(self.weights[reading], self.weights[Reading(first)]) for reading in kept]
        order = sorted(range(len(kept)), key=lambda place: not like[place])
        return [kept[place].aggregation for place in order]

    def try_normed(self, aggregation: str) -> None:
        """Try the faults that a norm alone can tell; many others would fit by chance."""
        faulty = [pair for pair in self.readings.faulty(1) if pair[0].fault in ("mask-late", "mask-early")]
        self._try(dict(self._unknown(pair for pair in faulty if pair[0].aggregation == aggregation)), self.readings.J)
        if self.readings.scales:
            unscaled = self.readings.unscaled()
            self._try({r: own for r, own in unscaled.plain().items() if r.aggregation == aggregation}, unscaled.J)

    def try_faults(self, aggregations: Sequence[str]) -> None:
        """Try readings with one fault."""
        if self.screens:
            self._screen([readings.faulty(1) for readings in self._screened], aggregations)
            return
        for readings in self._screened:
            some = ((r, w) for r, w in readings.faulty(1) if r.aggregation in aggregations and r.part is None)
            self._try(dict(self._unknown(some)), readings.J)

    def try_numbers(self, aggregations: Sequence[str]) -> None:
        """Try readings with one fault of an unknown size, and of parts that the log does not tell."""
        everywhere = self.everywhere
        ways = [everywhere.guesses(), self._bound(everywhere), self._fit(everywhere, 1)]
        self._screen(ways, aggregations)
        sound = [summarize(own)["cosine"] for reading, own in self.found.items() if not reading.faults]
        for fault in ROUNDED if max(sound) >= ALIKE else ():
            J = RoundedJacobian(everywhere.J, fault)
            readings = self._rescored[fault, None] = replace(everywhere, J=J, faults=(fault,))
            own = {reading: w for reading, w in readings.plain().items() if reading.aggregation in aggregations}
            self._try(own, J)

    def try_pairs(self, aggregations: Sequence[str]) -> None:
        """Try readings with two faults."""
        ways = [way for own in self._screened for way in (own.faulty(2), self._fit(own, 2))]
        self._screen(ways, aggregations)

    def try_found(
        self,
        find: Callable[[Readings, Float[np.ndarray, " K"], float, Sequence[str]], Iterable[tuple[Reading, Weights]]],
        aggregations: Sequence[str],
    ) -> None:
        """Try readings that are found from −⟨∇ log π_t, T⟩ of all real tokens and ‖T‖², where T has all parameters."""
        if len(self.theirs) == len(flat_slices(self.readings.J.model)):
            along = self._seen[0][0][:, 0].sum(0)
            self._try(dict(find(self.everywhere, along, float(self._seen[1].sum()), aggregations)), self.everywhere.J)

    def try_retokenised(self, aggregations: Sequence[str]) -> None:
        """Try responses that are decoded to text and encoded again, or lose thinking, also with π/π_old = 1, as
        π_old is then of these ids."""
        exact, seen = self.everywhere, []
        for fault in RETOKENISED:
            rows = exact.encoded_again(fault)
            count = sum(old != new for old, new in rows)
            if not count or rows in seen or exact.J.policy.why_too_long(max(len(new) for _, new in rows)):
                continue
            seen.append(rows)
            self._try_rewritten(exact.retokenised(rows, fault), count, aggregations)
        for fault in THINKING:
            found = exact.without_thinking(fault)
            if found is not None and (rows := found[0].J.batch.input_ids.tolist()) not in seen:
                seen.append(rows)
                self._try_rewritten(*found, aggregations)

    def try_packed(self, aggregations: Sequence[str]) -> None:
        """Try rows that are packed without a mask between them, and see at most SEEN tokens, up to one that fits."""
        exact, parts = self.everywhere, self.readings.rows.parts
        lengths = exact.J.batch.attention_mask.sum(1)
        within = parts.get("micro-batches", parts.get("processes", torch.zeros_like(lengths)))
        policy = exact.J.policy
        ways = ("-restarting", "") if takes_positions(policy.model) else ("",)
        for name, value, part in packings(lengths, within):
            seen = [int(lengths[part == one].cumsum(0).sum()) for one in part.unique()]
            longest = max(int(lengths[part == one].sum()) for one in part.unique())
            for way in ways if sum(seen) <= SEEN else ():
                if way or not policy.why_too_long(longest):
                    J = PackedJacobian(exact.J, part, restarting=bool(way))
                    self._try_rewritten(replace(exact, J=J, faults=(f"{name}{way}",)), value, aggregations)
                if any(summarize(own)["typical"] <= TIGHT for own in self.found.values()):
                    return

    def try_padded(self, aggregations: Sequence[str]) -> None:
        """Try rows that see padding before their prompts: to the longest of their micro-batch, or of all rows."""
        exact, batch = self.everywhere, self.readings.J.batch
        whole = torch.zeros(len(batch), dtype=torch.long)
        for part in (exact.rows.parts.get("micro-batches", whole), whole):
            size = int(part.unique(return_counts=True)[1].max())
            if ("pads-seen", size) in self._rescored:
                continue
            readings = exact.padded(part)
            seen = readings.J.batch.attention_mask.sum(1)
            if torch.equal(seen, batch.attention_mask.sum(1)) or exact.J.policy.why_too_long(int(seen.max())):
                continue
            self._try_rewritten(readings, size, aggregations)

    def try_passes(self, aggregations: Sequence[str], *, forward: bool = True) -> None:
        """Try passes that are not the model's own, up to one that leaves nothing; forward: forward passes, too."""
        for passes in (backward_passes, forward_passes) if forward else (backward_passes,):
            for fault, value, J in passes(self.everywhere):
                if (fault, value) not in self._rescored:
                    try:
                        self._try_rewritten(replace(self.everywhere, J=J, faults=(fault,)), value, aggregations)
                    except torch.OutOfMemoryError:
                        raise
                    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                        self.refused.append(fault)  # by models that take no masks, or no positions
                if any(summarize(own)["distance"] <= TIGHT for own in self.found.values()):
                    return

    def _try_rewritten(self, readings: Readings, value: float | None, aggregations: Sequence[str]) -> None:
        """Try readings of other rows, also with π/π_old = 1."""
        try:
            weights = readings.plain() | readings.recomputed()
        except InputError:  # it needs numbers of every token, and the log has those of the sampled ids
            return
        self._rescored[readings.faults[0], value] = readings
        own = {replace(r, value=value): w for r, w in weights.items() if r.aggregation in aggregations}
        self._try(own, readings.J)

    @cached_property
    def everywhere(self) -> Readings:
        """The readings on all real tokens; the weights tried so far are then on these, too."""
        wide, kept = self.readings.on_all_tokens(), self.readings.kept
        for reading, own in self.weights.items():
            self.weights[reading] = own.new_zeros(2, wide.J.num_tokens)
            self.weights[reading][:, wide.J.kept(kept)] = own
        return wide

    @cached_property
    def _screened(self) -> list[Readings]:
        """The readings on all real tokens, also with log π without the temperature."""
        return [self.everywhere, self.everywhere.unscaled()] if self.readings.scales else [self.everywhere]

    @cached_property
    def _seen(self) -> tuple[list[Float[np.ndarray, "M 2 K"]], Float[np.ndarray, " M"]]:
        """−⟨∇ log π_t, T_m⟩ and −⟨∇H_t, T_m⟩ of the tokens of each of `_screened`, and ‖T_m‖².

        The spans T_m have about the same square each.
        """
        spans = Vectors.zeros(self.readings.J.model, SPANS, self.readings.J.resources.vectors)
        squares = {name: float(own.double().square().sum()) for name, own in self.theirs.items()}
        whole, before = sum(squares.values()), 0.0
        for name, own in self.theirs.items():
            reached = before + own.double().square().cumsum(0)
            which = (reached * (SPANS / whole)).long().clamp_(max=SPANS - 1).to(spans.rows.device)
            for m in which.unique().tolist():
                spans.rows[m, spans.slices[name]] = torch.where(which == m, own.to(spans.rows), 0.0)
            before += squares[name]
        changes = [readings.J.jvp(spans, of=("logprob", "entropy")) for readings in self._screened]
        along = [-torch.stack([own.logprob, own.entropy], 1).double().numpy() for own in changes]
        return along, np.array([float(row.double().square().sum()) for row in spans.rows])

    def _products(self, reading: Reading, weights: Weights) -> Float[np.ndarray, " M"]:
        """Return the reading's ⟨G, T_m⟩."""
        along = self._seen[0][bool(_scored(reading))]
        return along.reshape(len(along), -1) @ weights.flatten().numpy()

    def _error(self, products: Float[np.ndarray, "M ..."]) -> np.ndarray:
        """Return how far f·⟨G, T_m⟩ is off ‖T_m‖² in half of the spans, for the best f."""
        squares = self._seen[1].reshape(-1, *[1] * (products.ndim - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.median(squares / products, 0)
            error = np.median(np.abs(factor * products / squares - 1), 0)
        return np.where(np.isfinite(error), error, np.inf)

    def _screen(self, ways: Iterable[Iterable[tuple[Reading, Weights]]], aggregations: Sequence[str]) -> None:
        """Try the nearest readings, of these aggregations or a guessed one."""
        best: list[tuple[float, Reading, Weights]] = []
        wanted = (pair for way in ways for pair in way if pair[0].aggregation in (*aggregations, *GUESSED))
        while some := [*islice(wanted, SCREENED)]:
            errors = self._error(np.stack([self._products(*pair) for pair in some], 1)).tolist()
            near = [(error, *pair) for error, pair in zip(errors, some, strict=True) if error <= OFF]
            nearest: dict[Reading, tuple[float, Reading, Weights]] = {}
            for way in sorted([*best, *near], key=itemgetter(0)):  # a reading may be had in several ways
                nearest.setdefault(way[1], way)
            best = [*nearest.values()][:NEAREST]
        for place, readings in enumerate(self._screened):
            own = ((reading, weights) for _, reading, weights in best if bool(_scored(reading)) == bool(place))
            self._try(dict(self._unknown(own)), readings.J)

    def _fit(self, readings: Readings, most: int) -> Iterator[tuple[Reading, Weights]]:
        """Yield readings with the best factor on part of the loss."""
        for reading, rest, part in readings.fitted(most):
            columns = np.stack([self._products(reading, own) for own in (rest, part)], 1)
            whole, some = np.linalg.lstsq(columns, self._seen[1], rcond=None)[0]
            if whole > 0:
                factor = float(some / whole)
                yield replace(reading, value=factor), rest + factor * part

    def _bound(self, readings: Readings) -> Iterator[tuple[Reading, Weights]]:
        """Yield readings without the tokens beyond a bound of a column: of each column, the best."""
        along = self._seen[0][0]
        for plain, weights in readings.plain().items():
            terms, live = (along * weights.numpy()).sum(1), weights.any(0).numpy()
            for name, column in readings.bounds():
                values = column.numpy()
                order = np.argsort(values, kind="stable")
                order = order[live[order] & np.isfinite(values[order])]
                for side, ranks in (("below", order[::-1]), ("above", order)):  # those that stay come first
                    left = terms[:, ranks].cumsum(1) + terms[:, ~np.isfinite(values) & live].sum(1, keepdims=True)
                    error = self._error(left)
                    error[np.append(values[ranks][1:] == values[ranks][:-1], True)] = np.inf  # not between equals
                    if len(error) and np.isfinite(error).any():
                        last = int(error.argmin())
                        gone = torch.zeros(len(values), dtype=torch.bool)
                        gone[ranks[last + 1 :].copy()] = True
                        found = Reading(plain.aggregation, (f"{name}-{side}",), value=float(values[ranks[last]]))
                        yield found, weights * ~gone

    def find_beyond(self) -> float | None:
        """Return what no weights of all real tokens make of the trainer's gradient, which has all parameters."""
        J = self.everywhere.J
        whole = Vectors.zeros(J.model, 1, J.resources.vectors)
        for name, part in whole.slices.items():
            whole.rows[0, part] = self.theirs[name].to(whole.rows)
        return find_beyond(J, whole)

    def multiply_responses(self, weights: Float[Tensor, " K"]) -> tuple[list[int], Float[np.ndarray, "G G"]]:
        """Return the responses that have weights, and the inner products of their gradients; computed once for weights
        that are multiples of each other within every response, as those of all averages are."""
        of, count = self.everywhere.rows.response, len(self.readings.J.batch)
        for known, groups, products in self._grams:
            both, square = (torch.bincount(of, known * own, minlength=count) for own in (weights, known))
            times = torch.where(square > 0, both / square, 0.0)
            if (weights - times[of] * known).norm() <= 1e-9 * weights.norm():
                own = times[groups].numpy()
                return groups, own[:, None] * products * own
        gram = self.everywhere.J.gram(weights[None].float(), groups=torch.arange(count))
        self._grams.append((weights, [*gram.groups], gram.products[:, 0, :, 0]))
        return self._grams[-1][1:]

    def recall(self, reading: Reading, factor: float) -> Callable[[], dict[str, Tensor]]:
        """Return what computes the gradient of a reading that was tried, times a factor, by parameter."""
        weights = self.weights[reading]
        J = self.readings.J if weights.shape[1] == self.readings.J.num_tokens else self.everywhere.J
        if scored := _scored(reading):
            J = self._rescored[scored].J if scored in self._rescored else self._screened[1].J

        def compute() -> dict[str, Tensor]:
            vectors = loss_gradients(J, factor * weights[None])
            return {name: vectors.rows[0, part] for name, part in vectors.slices.items()}

        return compute

    def _unknown(self, pairs: Iterable[tuple[Reading, Weights]]) -> Iterator[tuple[Reading, Weights]]:
        """Yield the readings that are others than those without a fault."""
        plain = [own for reading, own in self.weights.items() if not reading.faults]
        for reading, weights in pairs:
            if weights.any() and (_scored(reading) or not any(near(weights, own) for own in plain)):
                yield reading, weights

    def _try(self, weights: Mapping[Reading, Weights], J: TokenJacobian) -> None:
        """Try readings; those with the weights of one that was tried have its products."""
        new: dict[Reading, Weights] = {}
        twins: dict[Reading, Reading] = {}
        for reading, own in weights.items():
            known = {r: w for r, w in (self.weights | new).items() if _scored(r) == _scored(reading)}
            if (twin := next((other for other, its in known.items() if near(own, its)), None)) is not None:
                twins[reading] = twin
            else:
                new[reading] = own
        self._multiply(new, J)
        self.found |= {reading: self.found[twin] for reading, twin in twins.items()}
        self.found |= {reading: self.found.pop(reading) for reading in weights}  # in the given order
        self.weights |= weights

    def _multiply(self, weights: Mapping[Reading, Weights], J: TokenJacobian) -> None:
        names, looked_at = [*weights], self._trained if self.theirs is None else self.theirs.__contains__
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            vectors = loss_gradients(J, torch.stack([weights[reading] for reading in some]))
            for row, reading in enumerate(some):
                ours = {name: vectors.rows[row, part] for name, part in vectors.slices.items() if looked_at(name)}
                self.found[reading] = products_of(ours, self.theirs)


def loss_gradients(J: TokenJacobian, weights: Float[Tensor, "R 2 K"]) -> Vectors:
    """Return −Σ_t (w_t·∇ log π_t + e_t·∇H_t) of each row."""
    vectors = J.vjp(-weights[:, 0].float())
    if weights[:, 1].any():
        vectors.rows.add_(J.vjp(-weights[:, 1].float(), of="entropy").rows)
    return vectors


def _scored(reading: Reading) -> tuple[str, float | None] | None:
    """Return the fault by which log π itself is another, and its number; None: it is the batch's."""
    found = next((fault for fault in reading.faults if fault in RESCORED), None)
    return found and (found, reading.value if found in (*PASSES, *REWRITTEN) else None)
