"""Summed gradients of each prompt's tokens, in as much memory as there is.

What is asked of them are inner products over all parameters, and these add up over parts of the parameters. So the
vectors come part by part (`PromptGradients.parts`), and what uses them reduces each part before the next is made.

- **whole**: all parameters at once, by one forward pass and a backward pass per vector.
- **slices**: a few parameters at a time, exactly as well. The network is differentiated one block after the other
  (`sweep`), so that any number of slices costs one more forward pass; where a slice is less than a block, that block's
  own passes are made again. What each block starts from lies in memory meanwhile.
- **sketches**: one part of `sketch_size` random projections of the gradients (`sketches`), made as the backward pass
  goes, block after block too where that can be: inner products are unbiased, with a known error, whatever the number
  of prompts.

The way is chosen by `plan_sums`, from one budget of memory and from what each way costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients.reverse_mode import Take, add_gradients, differentiable, stream_gradients
from gradscope.gradients.sketches import Sketcher
from gradscope.gradients.summed.ways import Index, Piece, Sizes, Way, cut_prompts, cut_slices, own_rows, plan_sums
from gradscope.gradients.summed.weighted import vectors_within
from gradscope.gradients.sweep import OUTER, Passed, Sweep
from gradscope.gradients.vectors import vector_bytes, zero_vectors
from gradscope.objective import kept_logprobs
from gradscope.policy import Policy, flat_slices, free_memory
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes, Progress, deal_by_cost, settle_progress, track

Cotangents = Callable[[Index, TokenBatch, Float[Tensor, " K"]], Float[Tensor, "R K"]]
"""∂loss/∂log π of a piece's kept tokens, a row for each vector, from where they stand in the batch and their log π."""
Sums = Sequence[Tensor | None]
"""What each of the R vectors is added to, over the prompts; None: nothing."""

SEED = 5929
"""Seed of the random projections: the same in every run, as nothing else decides which they are."""


def fixed_cotangents(rows: Float[Tensor, "R B S"]) -> Cotangents:
    """Those that do not depend on log π, of every column of the batch."""
    return lambda index, _piece, logprobs: rows[:, index[0], index[1]].to(logprobs)


@dataclass(frozen=True)
class Part:
    """Some entries of vectors that are flat over the parameters, or a sketch of all."""

    ranges: tuple[tuple[str, int, int], ...]
    """(parameter, first, one past the last entry of its own), one after the other; empty for a sketch."""
    size: int

    def take(self, vector: Float[Tensor, " P"], slices: dict[str, slice]) -> Float[Tensor, " size"]:
        """These entries of a vector that is flat over all parameters."""
        return torch.cat([vector[slices[n].start + first : slices[n].start + last] for n, first, last in self.ranges])

    def add(self, values: Float[Tensor, " size"], vector: Float[Tensor, " P"], slices: dict[str, slice]) -> None:
        """Add to these entries of a vector that is flat over all parameters."""
        for (name, first, last), found in zip(
            self.ranges, values.split([b - a for _, a, b in self.ranges]), strict=True
        ):
            start = slices[name].start
            vector[start + first : start + last] += found.to(vector)


class PromptGradients:
    """The vectors Σ_t cotangents[r, t]·∇ log π_t of each prompt, over all measured parameters, part by part.

    cotangents: R rows for the kept tokens. metric: one of `new_totals` is asked for. processes: of several, each makes
    those of its share of the prompts, and all go through the parts together; what is made of them is for the reader to
    add up.
    The model measures in eval mode; flags, modes and `.grad` stay as they were.
    """

    def __init__(
        self,
        policy: Policy,
        batch: TokenBatch,
        cotangents: Cotangents,
        *,
        rows: int,
        held: int,
        memory: int,
        metric: bool = False,
        way: Way | None = None,
        micro_batch_size: int = 8,
        sketch_seed: int = SEED,
        processes: Processes = ALONE,
        progress: bool | Progress = False,
    ) -> None:
        self.model, self.rows, self._cotangents = policy.model, rows, cotangents
        self._progress = settle_progress(progress)
        self.processes, self._sketch_seed = processes, sketch_seed
        self._pieces = cut_prompts(policy, batch, own_rows(batch), micro_batch_size)
        self.num_prompts = len(self._pieces)
        costs = [float(sum(piece.input_ids.numel() for _, piece in pieces)) for pieces in self._pieces]
        self.prompts = deal_by_cost(range(self.num_prompts), costs, processes.count)[processes.rank]
        """Numbers of the prompts whose vectors this process makes."""
        self._sweep = Sweep(policy.model, policy.blocks)
        self._slices = flat_slices(policy.model)
        sizes = Sizes.of(policy, batch, micro_batch_size=micro_batch_size)
        self.plan = plan_sums(sizes, rows=rows, held=held, memory=memory, metric=metric, way=way)
        """How they are made."""
        self._swept = False
        if self.plan.way != "whole":
            with differentiable(self.model):
                self._swept = all(processes.gather([self._sweep.holds(self._pieces[0][0][1])]))
            if self.plan.way == "slices" and not self._swept:
                if way is not None:
                    raise InputError(
                        f"{type(self.model).__name__} cannot be differentiated block by block; give more memory"
                    )
                self.plan = plan_sums(sizes, rows=rows, held=held, memory=memory, metric=metric, way="sketches")

    def new_totals(self, count: int = 1) -> Float[Tensor, "count P"]:
        """Zeros for sums of vectors; of vectors that are not whole in a scratch file, or on a GPU with room."""
        device = next(self.model.parameters()).device
        roomy = device.type == "cuda" and (count + 3) * vector_bytes(self.model) <= free_memory(device)
        return vectors_within(self.model, count, None if roomy or self.plan.way == "whole" else 0)

    def parts(
        self,
        scale: Float[Tensor, " P"] | None = None,
        totals: Float[Tensor, "T P"] | None = None,
        into: Sequence[int | None] | None = None,
    ) -> Iterator[tuple[Part, Iterator[tuple[int, Float[Tensor, "R size"]]]]]:
        """(part, its vectors): for each part, the prompts' numbers and vectors, to be read once.

        scale: what each entry is multiplied by. totals: get sums over the prompts, before they are scaled. into: which
        of them each of the R vectors is added to, None: none; all to the first, unless it says so. What is said of one
        part has to be read to its end before the next, and a prompt's vectors are overwritten by the next one's.
        """
        make = {"whole": self._whole, "slices": self._in_slices, "sketches": self._sketched}
        sums: list[Tensor | None] = [None] * self.rows
        if totals is not None:
            places = [0] * self.rows if into is None else into
            sums = [None if place is None else totals[place] for place in places]
        with differentiable(self.model):
            yield from make[self.plan.way](scale, sums)
        if totals is not None:
            self.processes.sum(totals)

    def _whole(self, scale: Tensor | None, sums: Sums) -> Iterator:
        part = Part(tuple((n, 0, s.stop - s.start) for n, s in self._slices.items()), sum(self._sizes().values()))

        def vectors() -> Iterator[tuple[int, Tensor]]:
            found = zero_vectors(self.model, self.rows)
            for prompt, pieces in self._counted():
                found.zero_()
                for index, piece in pieces:
                    logprobs = kept_logprobs(self.model, piece)
                    add_gradients(self.model, logprobs, self._cotangents(index, piece, logprobs.detach()), found)
                for total, vector in zip(sums, found, strict=True):
                    if total is not None:
                        total.add_(vector.to(total))
                yield prompt, found if scale is None else found.mul_(scale.to(found))

        yield part, vectors()

    def _sketched(self, scale: Tensor | None, sums: Sums) -> Iterator:
        sketcher = Sketcher(self.plan.slice_width, seed=self._sketch_seed)
        numbers = {name: number for number, name in enumerate(self._slices)}

        def take(row: int, name: str, gradient: Tensor) -> None:
            gradient, part = gradient.flatten().to(found), self._slices[name]
            if sums[row] is not None:
                sums[row][part] += gradient.to(sums[row])
            if scale is not None:
                gradient = gradient * scale[part].to(gradient)
            sketcher.add(gradient, numbers[name], found[row])

        found = zero_vectors(self.model, 0).new_zeros(self.rows, sketcher.size)

        def vectors() -> Iterator[tuple[int, Tensor]]:
            for prompt, pieces in self._counted():
                found.zero_()
                for index, piece in pieces:
                    if self._swept:
                        self._sweep_through(index, piece, take)
                    else:
                        with torch.no_grad():
                            logprobs = kept_logprobs(self.model, piece)
                        stream_gradients(self.model, piece, self._cotangents(index, piece, logprobs), take)
                yield prompt, found

        yield Part((), sketcher.size), vectors()

    def _sweep_through(self, index: Index, piece: TokenBatch, take: Take) -> None:
        """All gradients of a piece, a block's at a time."""
        state, segments = self._start(index, piece), self._sweep.segments()
        while state.block > OUTER:
            self._pass_block(state, segments[state.block], take, stay=False)
        self._pass_outer(state, segments[OUTER], take)

    def _in_slices(self, scale: Tensor | None, sums: Sums) -> Iterator:
        segments, sizes = self._sweep.segments(), self._sizes()
        inside = sorted((index for index in segments if index != OUTER), reverse=True)
        home = {name: index for index, names in segments.items() for name in names}
        parts = cut_slices([(n, sizes[n]) for i in (*inside, OUTER) for n in segments[i]], self.plan.slice_width)
        states = {prompt: [self._start(*piece) for piece in pieces] for prompt, pieces in self._counted()}
        room = zero_vectors(self.model, 0).new_zeros(self.rows, self.plan.slice_width)
        pairs = zip(parts, [*parts[1:], None], strict=True)
        for ranges, following in track(pairs, "gradients", self._progress, total=len(parts), unit="slices"):
            part = Part(tuple(ranges), sum(last - first for _, first, last in ranges))
            # The segment that the next part begins in, which this part must not go past.
            end = OUTER if following is None else home[following[0][0]]
            yield part, self._slice_vectors(part, home, end, states, scale, sums, room[:, : part.size])

    def _slice_vectors(
        self,
        part: Part,
        home: dict[str, int],
        end: int,
        states: dict[int, list[_State]],
        scale: Tensor | None,
        sums: Sums,
        found: Tensor,
    ) -> Iterator[tuple[int, Tensor]]:
        """One part's vectors of each prompt, in the memory of `found`; its states go on to the segment `end`."""
        wanted: dict[int, list[str]] = defaultdict(list)
        places, at = {}, 0
        for name, first, last in part.ranges:
            wanted[home[name]].append(name)
            places[name] = (first, last, at)
            at += last - first

        def take(row: int, name: str, gradient: Tensor) -> None:
            first, last, at = places[name]
            found[row, at : at + last - first] += gradient.flatten()[first:last].to(found)

        for prompt, own in states.items():
            found.zero_()
            for state in own:
                while state.block > end:
                    self._pass_block(state, wanted[state.block], take, stay=False)
                if end == OUTER:
                    self._pass_outer(state, wanted[OUTER], take)
                elif wanted[end]:
                    self._pass_block(state, wanted[end], take, stay=True)
            for total, vector in zip(sums, found, strict=True):
                if total is not None:
                    part.add(vector, total, self._slices)
            yield prompt, found if scale is None else found.mul_(part.take(scale, self._slices).to(found))

    def _start(self, index: Index, piece: TokenBatch) -> _State:
        """After one forward pass, and from the logits back to the last block's output."""
        passed, logprobs = self._sweep.record(piece)
        cotangents, deltas = self._cotangents(index, piece, logprobs), {}
        for row, leaf, (logprobs, cotangent) in self._tails(passed, cotangents):
            (deltas[row],) = torch.autograd.grad(logprobs, leaf, cotangent)
        return _State(passed, cotangents, deltas, len(passed.calls) - 1)

    def _tails(
        self, passed: Passed, cotangents: Float[Tensor, "R K"]
    ) -> Iterator[tuple[int, Tensor, tuple[Float[Tensor, " k"], Float[Tensor, " k"]]]]:
        """(row, hidden states before the head, log π of its own tokens with cotangents), of rows that have any.

        The head sees each row's tokens alone: rows that share none cost no more than one of all.
        """
        for row, cotangent in enumerate(cotangents):
            kept = cotangent.nonzero()[:, 0]
            if len(kept):
                names = ("places", "token_ids", "temperatures")
                own = replace(passed, **{name: getattr(passed, name)[kept] for name in names})
                leaf, logprobs = self._sweep.run_tail(own)
                yield row, leaf, (logprobs, cotangent[kept])

    def _pass_block(self, state: _State, wanted: list[str], take: Take, *, stay: bool) -> None:
        """From the output of the state's block to the gradients that are wanted and, unless it stays, to its input."""
        if state.deltas:
            leaf, out = self._sweep.run_block(state.passed, state.block)
            to = [] if stay else [leaf]
            deltas = self._differentiate(out, state.deltas, to, wanted, take)
            state.deltas = state.deltas if stay else {row: delta for row, (delta,) in deltas.items()}
        if not stay:
            state.passed.hidden[state.block] = state.passed.calls[state.block] = None
            state.block -= 1

    def _pass_outer(self, state: _State, wanted: list[str], take: Take) -> None:
        """What is in no block: before the first one, and after the last."""
        if not (wanted and state.deltas):
            return
        for row, _, (logprobs, cotangent) in self._tails(state.passed, state.cotangents):
            self._differentiate(logprobs, {row: cotangent}, [], wanted, take)
        hidden = self._sweep.run_embedding(state.passed)
        if hidden.requires_grad:
            self._differentiate(hidden, state.deltas, [], wanted, take)

    def _differentiate(
        self, out: Tensor, cotangents: dict[int, Tensor], to: list[Tensor], names: list[str], take: Take
    ) -> dict[int, list[Tensor]]:
        """Hand on the gradients of the named parameters; those with respect to the tensors of `to`, by row."""
        inputs, gradients = [*to, *(self.model.get_parameter(name) for name in names)], {}
        for row, cotangent in cotangents.items() if inputs else ():
            last = row == next(reversed(cotangents))
            made = torch.autograd.grad(out, inputs, cotangent, retain_graph=not last, allow_unused=True)
            for name, gradient in zip(names, made[len(to) :], strict=True):
                if gradient is not None:
                    take(row, name, gradient)
            gradients[row] = list(made[: len(to)])
        return gradients

    def _counted(self) -> Iterator[tuple[int, list[Piece]]]:
        """This process's prompts, with their pieces."""
        for prompt in track(self.prompts, "gradients", self._progress, unit="prompts"):
            yield prompt, self._pieces[prompt]

    def _sizes(self) -> dict[str, int]:
        return {name: part.stop - part.start for name, part in self._slices.items()}


@dataclass
class _State:
    """How far a piece has gone backward."""

    passed: Passed
    cotangents: Float[Tensor, "R K"]
    deltas: dict[int, Float[Tensor, "b n hidden"]]
    """Each vector's gradient at the output of `block`, where it has a cotangent; behind them all, at their input."""
    block: int
