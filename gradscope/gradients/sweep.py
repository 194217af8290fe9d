"""A network differentiated from its last block to its first, one block at a time, with no graph of the whole.

A forward pass leaves the input of every block; from there each block, what comes before the first one and what comes
after the last one can be run and differentiated alone, as gradient checkpointing does, for one more forward pass in
all. The gradients of a block's parameters are handed on before those of the next block exist. Tokens go through the
head in parts whose logits fit. So memory is linear in a response's length: every block's input, and one block's graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradscope.gradients.engine.recording import BlockCall, block_input, replace_input
from gradscope.gradients.graph_memory import graph_bytes, graph_room
from gradscope.gradients.hooks import first_tensor
from gradscope.gradients.vectors import Take
from gradscope.objective import Quantity, choosing_places, most_logits, numbers_of
from gradscope.policy import float_parameters
from gradscope.rollouts import TokenBatch

OUTER = -1
"""The segment of all that is in no block: embeddings and head."""
TRIAL, CONTEXT = 8, 64
"""Tokens on which the segments are compared with the whole, and most tokens before them."""


@dataclass
class Passed:
    """What one forward pass of a piece leaves: enough to run each segment again."""

    ids: Int[Tensor, "b n"]
    places: Int[Tensor, " K"]
    """Where the kept tokens' logits stand among all [b · n]."""
    token_ids: Int[Tensor, " K"]
    temperatures: Float[Tensor, " K"]
    hidden: list[Float[Tensor, "b n hidden"] | None] = field(default_factory=list)
    """The input of each block, and the output of the last; None where it is no longer needed."""
    calls: list[BlockCall | None] = field(default_factory=list)
    """What else each block was called with."""
    outputs: list[Any] = field(default_factory=list)
    """What each block returned beside the hidden states, which stand there as None."""

    def only(self, tokens: Int[Tensor, " k"]) -> Passed:
        """Return the same pass with only these of the kept tokens."""
        return replace(self, **{name: getattr(self, name)[tokens] for name in ("places", "token_ids", "temperatures")})


class _EmbeddedError(Exception):
    """Raised in the place of the first block: all before it is done."""


class Sweep:
    """The segments of one model; use it inside `differentiable(model)`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self.model, self.blocks = model, blocks
        self._first_input: Tensor | None = None
        self._held: bool | None = None

    def segments(self) -> dict[int, list[str]] | None:
        """Names of the measured parameters by block, those in no block under OUTER; None if a block shares one."""
        homes: dict[int, set[int]] = defaultdict(set)
        inside = set()
        for index, block in enumerate(self.blocks):
            for module in block.modules():
                inside.add(id(module))
                for parameter in module.parameters(recurse=False):
                    homes[id(parameter)].add(index)
        for module in self.model.modules():
            if id(module) not in inside:
                for parameter in module.parameters(recurse=False):
                    homes[id(parameter)].add(OUTER)
        found: dict[int, list[str]] = {index: [] for index in (OUTER, *range(len(self.blocks)))}
        for name, parameter in float_parameters(self.model):
            (home, *others) = homes[id(parameter)]
            if others:
                return None
            found[home].append(name)
        return found

    def pass_back(
        self, piece: TokenBatch, weights: Float[Tensor, "R K"], take: Take, of: Quantity = "logprob"
    ) -> None:
        """Hand on Σ_t weights[r, t]·∇ log π_t of a piece's kept tokens, a block's parameters at a time.

        of: what is differentiated of each token.
        """
        passed, segments, deltas = self.record(piece), self.segments(), {}
        for row, leaf, numbers, own in self._tails(passed, weights, of):
            (delta,) = self._differentiate(numbers, {row: own.to(numbers)}, [leaf], segments[OUTER], take)[row]
            deltas[row] = deltas[row].add_(delta) if row in deltas else delta
        for index in reversed(range(len(self.blocks))):
            if deltas:
                leaf, out = self.run_block(passed, index)
                found = self._differentiate(out, deltas, [leaf], segments[index], take)
                deltas = {row: delta for row, (delta,) in found.items()}
            passed.hidden[index] = passed.calls[index] = None
        if not (segments[OUTER] and deltas):
            return
        hidden = self.run_embedding(passed)
        if hidden.requires_grad:
            self._differentiate(hidden, deltas, [], segments[OUTER], take)

    def _tails(
        self, passed: Passed, weights: Float[Tensor, "R K"], of: Quantity
    ) -> Iterator[tuple[int, Tensor, Float[Tensor, " k"], Float[Tensor, " k"]]]:
        """Yield (row, hidden states before the head, number, weights) of some tokens at a time, for rows with weights.

        The head sees each row's tokens alone: rows that share none cost no more than one of all.
        """
        for row, own in enumerate(weights):
            for kept in own.nonzero()[:, 0].split(most_logits(self.model, 4 if of == "logprob" else 6)):
                if len(kept):
                    leaf, numbers = self.run_tail(passed.only(kept.to(self._device)), of)
                    yield row, leaf, numbers, own[kept]

    def _differentiate(
        self, out: Tensor, deltas: dict[int, Tensor], to: list[Tensor], names: list[str], take: Take
    ) -> dict[int, list[Tensor]]:
        """Hand on the gradients of the named parameters; those with respect to the tensors of `to`, by row."""
        inputs, gradients = [*to, *(self.model.get_parameter(name) for name in names)], {}
        for row, delta in deltas.items() if inputs else ():
            last = row == next(reversed(deltas))
            made = torch.autograd.grad(out, inputs, delta, retain_graph=not last, allow_unused=True)
            for name, gradient in zip(names, made[len(to) :], strict=True):
                if gradient is not None:
                    take(row, name, gradient.flatten())
            gradients[row] = list(made[: len(to)])
        return gradients

    @torch.no_grad()
    def record(self, piece: TokenBatch) -> Passed:
        """Run one forward pass without a graph and without logits."""
        row, column = piece.response_mask.nonzero().unbind(1)
        ids = piece.input_ids.to(self._device)
        kept = (piece.input_ids[row, column], piece.temperature[row])
        places = row * ids.shape[1] + column - 1
        passed = Passed(ids, *(values.to(self._device) for values in (places, *kept)))

        def enter(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A copy: a block may add to its input in place.
            passed.hidden.append(block_input(args, kwargs).detach().clone())
            passed.calls.append(BlockCall.of(args, kwargs))

        def leave(_block: nn.Module, _args: Any, output: Any) -> None:
            if len(passed.outputs) == len(self.blocks) - 1:
                passed.hidden.append(first_tensor(output).detach().clone())
            passed.outputs.append(_put_first(output, None))

        handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in self.blocks]
        handles += [block.register_forward_hook(leave) for block in self.blocks]
        try:
            self._numbers(passed.only(passed.places[:0]))
        finally:
            for handle in handles:
                handle.remove()
        return passed

    def run_block(self, passed: Passed, index: int) -> tuple[Tensor, Tensor]:
        """(leaf, output): hidden states before a block and after it, with a graph between them."""
        leaf = passed.hidden[index].detach().requires_grad_(True)
        return leaf, passed.calls[index].again(self.blocks[index], leaf.clone())

    def run_tail(self, passed: Passed, of: Quantity = "logprob") -> tuple[Tensor, Float[Tensor, " K"]]:
        """(leaf, a number of each kept token): hidden states after the last block, and what the head makes of them."""
        leaf = passed.hidden[-1].detach().requires_grad_(True)
        with self._standing_in(lambda index: _put_first(passed.outputs[index], leaf.clone())):
            return leaf, self._numbers(passed, of)

    def run_embedding(self, passed: Passed) -> Float[Tensor, "b n hidden"]:
        """What the first block is called with, with its graph."""

        def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._first_input = block_input(args, kwargs)
            raise _EmbeddedError

        with self._standing_in(None, stop):
            try:
                self.model(input_ids=passed.ids, attention_mask=torch.ones_like(passed.ids), use_cache=False)
            except _EmbeddedError:
                hidden, self._first_input = self._first_input, None
                return hidden
        raise RuntimeError("the first block was not reached")

    def most_responses(self, length: int, most: int) -> int:
        """Return how many responses of this many tokens have a graph that fits GRAPH: from one up to `most`."""
        return max(1, min(most, graph_room(self.model) // graph_bytes(self.model, self.blocks, 1, length)))

    def is_needed(self, piece: TokenBatch) -> bool:
        """Return whether the graph of the whole would not fit GRAPH, so that the segments must serve instead."""
        if graph_bytes(self.model, self.blocks, *piece.input_ids.shape) <= graph_room(self.model):
            return False
        if self._held is None:
            self._held = self.holds(piece)
        return self._held

    def holds(self, piece: TokenBatch) -> bool:
        """Whether the segments, one after the other, give the gradients that autograd gives: tried on a few tokens.

        At every boundary between blocks, for random weights of the tokens. False for a model whose blocks share
        parameters, or hear of each other by another way than from one to the next.
        """
        if self.segments() is None:
            return False
        piece = _shorten(piece)
        entered: list[Tensor] = []
        alone = True

        def enter(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal alone
            hidden = block_input(args, kwargs)
            others = [value for value in tree_leaves((args[1:], kwargs)) if value is not hidden]
            alone &= not any(isinstance(value, Tensor) and value.requires_grad for value in others)
            if not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_(True)
            entered.append(hidden)
            return replace_input(args, kwargs, hidden)

        passed = self.record(piece)
        if len(passed.hidden) != len(self.blocks) + 1:
            return False
        weights = torch.randn(len(passed.places), generator=torch.Generator().manual_seed(0)).to(self._device)
        handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in self.blocks]
        try:
            logprobs = self._numbers(passed)
            weights = weights.to(logprobs)
            expected = torch.autograd.grad(logprobs, entered, weights, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        if not alone:
            return False
        leaf, found = self.run_tail(passed)
        (delta,) = torch.autograd.grad(found, leaf, weights)
        tolerance = 1e-3 if delta.dtype in (torch.float32, torch.float64) else 0.1
        for index in reversed(range(len(self.blocks))):
            leaf, out = self.run_block(passed, index)
            (delta,) = torch.autograd.grad(out, leaf, delta)
            if expected[index] is None or not (delta - expected[index]).norm() <= tolerance * expected[index].norm():
                return False
        return True

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _numbers(self, passed: Passed, of: Quantity = "logprob") -> Float[Tensor, " K"]:
        everything = torch.ones_like(passed.ids)
        with choosing_places(self.model, passed.places):
            logits = self.model(input_ids=passed.ids, attention_mask=everything, use_cache=False).logits.flatten(0, 1)
        return numbers_of(logits, passed.token_ids, passed.temperatures, (of,))[:, 0]

    @contextmanager
    def _standing_in(self, returned: Any, first: Any = None) -> Iterator[None]:
        """While inside, no block computes: each returns what it is told."""
        before = [vars(block).get("forward") for block in self.blocks]
        try:
            for index, block in enumerate(self.blocks):
                stand_in = first if first is not None and index == 0 else None
                block.forward = _StandIn(stand_in, index, returned)
            yield
        finally:
            for block, forward in zip(self.blocks, before, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward


class _StandIn:
    def __init__(self, call: Any, index: int, returned: Any) -> None:
        self._call, self._index, self._returned = call, index, returned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(self._index) if self._call is None else self._call(args, kwargs)


def _put_first(output: Any, hidden: Tensor | None) -> Any:
    """A block's output with other hidden states; from None to them and back."""
    if not isinstance(output, (tuple, list)):
        return hidden
    return (hidden, *output[1:])


def _shorten(piece: TokenBatch) -> TokenBatch:
    """The first response of a piece: a few tokens, after the last ones of its prompt."""
    first = piece.select([0])
    start = int(first.response_mask[0].nonzero()[0])
    short = first.narrow(min(first.input_ids.shape[1], start + TRIAL))
    shown = torch.arange(short.input_ids.shape[1], device=short.input_ids.device) >= start - CONTEXT
    return replace(short, attention_mask=short.attention_mask & shown).left_aligned()[0]
