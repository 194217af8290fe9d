"""Backward passes that run one block at a time, from the last to the first, without a graph of the whole network.

A forward pass stores the input of every block. Each segment (a block, what comes before the first, what comes after the
last) is then run again and differentiated alone, as in gradient checkpointing, at the cost of one more forward pass.
The gradients of a block are consumed before those of the next exist, and tokens go through the head in parts whose
logits fit. Memory is therefore linear in the response's length: every block's input, and the graph of one block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradscope.gradients.budget.graph_memory import graph_bytes, graph_room
from gradscope.gradients.engine.recording import BlockCall, block_input, replace_input
from gradscope.gradients.hooks import first_tensor, replaced_forwards
from gradscope.gradients.operator.vectors import Take
from gradscope.objective import LOGPROB, Given, Outputs, Quantity, choosing_places, given_for, make_ready, most_logits
from gradscope.policy import float_parameters
from gradscope.rollouts import TokenBatch

OUTER = -1
"""The segment outside the blocks: embeddings and head."""
TRIAL, CONTEXT = 8, 64
"""Tokens on which the segments are compared with the whole network, and most tokens of context before them."""


@dataclass
class Passed:
    """The record of one forward pass over a piece: enough to run each segment again."""

    ids: Int[Tensor, "b n"]
    places: Int[Tensor, " K"]
    """Indices of the kept tokens' logits among all [b · n]."""
    token_ids: Int[Tensor, " K"]
    temperatures: Float[Tensor, " K"]
    given: Given = ()
    """What the quantity is given of each kept token, as `given_for` returns it."""
    hidden: list[Float[Tensor, "b n hidden"] | None] = field(default_factory=list)
    """The input of each block, and the output of the last; None once it is no longer needed."""
    calls: list[BlockCall | None] = field(default_factory=list)
    """The other arguments of each block's call."""
    outputs: list[Any] = field(default_factory=list)
    """What each block returned, with None in place of the hidden states."""

    def only(self, tokens: Int[Tensor, " k"]) -> Passed:
        """Return the same pass for some of the kept tokens."""
        chosen = {name: getattr(self, name)[tokens] for name in ("places", "token_ids", "temperatures")}
        return replace(self, **chosen, given=tuple(values[tokens.to(values.device)] for values in self.given))


class _EmbeddedError(Exception):
    """Raised in place of the first block, to stop a forward pass there."""


class Sweep:
    """The segments of one model; use it inside `differentiable(model)`."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self.model, self.blocks = model, blocks
        self._held: bool | None = None

    def segments(self) -> dict[int, list[str]] | None:
        """Return the measured parameters' names by block, others under OUTER; None if a block shares a parameter."""
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

    def pass_back(self, piece: TokenBatch, weights: Float[Tensor, "R K"], take: Take, of: Quantity = LOGPROB) -> None:
        """Pass Σ_t weights[r, t]·∇ log π_t of a piece's kept tokens to `take`, one block's parameters at a time.

        of: the quantity to differentiate.
        """
        passed, segments, deltas = self.record(piece), self.segments(), {}
        passed.given = given_for(of, piece)
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
        """Yield (row, hidden states, quantity, weights) for some of a row's own tokens; the head runs on these only."""
        for row, own in enumerate(weights):
            for kept in own.nonzero()[:, 0].split(most_logits(self.model, of.copies)):
                if len(kept):
                    leaf, numbers = self.run_tail(passed.only(kept.to(self._device)), of)
                    yield row, leaf, numbers, own[kept]

    def _differentiate(
        self, out: Tensor, deltas: dict[int, Tensor], to: list[Tensor], names: list[str], take: Take
    ) -> dict[int, list[Tensor]]:
        """Pass the gradients of the named parameters to `take`; return those of the tensors `to`, by row."""
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
            # A copy, since a block may modify its input in place.
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
        """Return (leaf, output): the hidden states before and after a block, connected by a graph."""
        leaf = passed.hidden[index].detach().requires_grad_(True)
        return leaf, passed.calls[index].again(self.blocks[index], leaf.clone())

    def run_tail(self, passed: Passed, of: Quantity = LOGPROB) -> tuple[Tensor, Float[Tensor, " K"]]:
        """Return (leaf, values): the hidden states after the last block, and the quantity of each kept token."""
        leaf = passed.hidden[-1].detach().requires_grad_(True)

        def stand_in(index: int, _block: nn.Module) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: _put_first(passed.outputs[index], leaf.clone())

        with replaced_forwards(self.blocks, stand_in):
            return leaf, self._numbers(passed, of)

    def run_embedding(self, passed: Passed) -> Float[Tensor, "b n hidden"]:
        """Return the first block's input, with its graph."""
        found = []

        def stop(*args: Any, **kwargs: Any) -> None:
            found.append(block_input(args, kwargs))
            raise _EmbeddedError

        with replaced_forwards(self.blocks[:1], lambda _index, _block: stop), suppress(_EmbeddedError):
            self.model(input_ids=passed.ids, attention_mask=torch.ones_like(passed.ids), use_cache=False)
        return found[0]

    def most_responses(self, length: int, most: int) -> int:
        """Return how many responses of this length, from 1 to `most`, have a graph that fits into GRAPH bytes."""
        return max(1, min(most, graph_room(self.model) // graph_bytes(self.model, self.blocks, 1, length)))

    def is_needed(self, piece: TokenBatch) -> bool:
        """Return whether the whole graph would exceed GRAPH bytes, so that segments are needed."""
        if graph_bytes(self.model, self.blocks, *piece.input_ids.shape) <= graph_room(self.model):
            return False
        if self._held is None:
            self._held = self.holds(piece)
        return self._held

    def holds(self, piece: TokenBatch) -> bool:
        """Return whether the chained segments reproduce autograd's gradients on a few tokens.

        Compares at every boundary between blocks, with random token weights. False for models whose blocks share
        parameters, or pass information other than from one block to the next.
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

    def _numbers(self, passed: Passed, of: Quantity = LOGPROB) -> Float[Tensor, " K"]:
        everything = torch.ones_like(passed.ids)
        with choosing_places(self.model, passed.places):
            logits = self.model(input_ids=passed.ids, attention_mask=everything, use_cache=False).logits.flatten(0, 1)
        given = make_ready(of, passed.given, logits)
        return of.numbers(Outputs(logits, passed.token_ids, passed.temperatures, given))


def _put_first(output: Any, hidden: Tensor | None) -> Any:
    """Replace the hidden states in a block's output."""
    if not isinstance(output, (tuple, list)):
        return hidden
    return (hidden, *output[1:])


def _shorten(piece: TokenBatch) -> TokenBatch:
    """Cut a piece to a few tokens of its first response, after the end of its prompt."""
    first = piece.select([0])
    start = int(first.response_mask[0].nonzero()[0])
    short = first.narrow(min(first.input_ids.shape[1], start + TRIAL))
    shown = torch.arange(short.input_ids.shape[1], device=short.input_ids.device) >= start - CONTEXT
    return replace(short, attention_mask=short.attention_mask & shown).left_aligned()[0]
