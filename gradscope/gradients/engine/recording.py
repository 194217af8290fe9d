"""Recording a forward pass for the engine: inputs of the claimed modules, and their outputs' edges in the graph.

The model is divided into two parts. The **head** is everything that acts on each position separately: from the logits
back through the last block's feed-forward network to the output projection of its attention. The input of that
projection, together with the block's input (which the residual carries past it), is the **split point**. The **body**
is the rest, which mixes positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.errors import InputError
from gradscope.gradients.hooks import first_tensor, forward_hooks
from gradscope.policy import is_subset, takes

if TYPE_CHECKING:
    from gradscope.gradients.engine.ownership import Ownership


@dataclass(frozen=True)
class Call:
    """A call of a module that a rule claims."""

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge | None
    """Graph edge of the module's output as returned; None if no gradient flows there."""
    width: int
    """Width of the output."""

    @property
    def input_key(self) -> tuple[Any, ...]:
        """A key shared by modules with the same input, so that its factor is computed once."""
        return self.inputs.data_ptr(), self.inputs.shape, self.inputs.stride(), self.inputs._version

    def by_position(self, length: int) -> bool:
        """Return whether the input's rows must be the positions of a sequence of this length."""
        return self.inputs.ndim >= 3 and self.inputs.shape[:2] == (1, length)


@dataclass(frozen=True)
class BlockCall:
    """The arguments of a block's call other than the hidden states: enough to run it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return cls(*replace_input(args, kwargs, None))

    def again(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on these hidden states; return its output hidden states."""
        args, kwargs = replace_input(self.args, self.kwargs, hidden)
        return first_tensor(block(*args, **kwargs))


class Recorder:
    """A context that records forward passes of the model.

    part="head": the graph is cut at the split point, so that backward passes end there.
    part="body": the graph starts at the embeddings; the split point's tensors are kept as starts of backward passes.
    split_point: name of the module whose input is the split point; None: the last block's output.
    keep_all: in the head's pass, also keep the calls before the split point, with their inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: nn.ModuleList,
        ownership: Ownership,
        split_point: str | None,
        part: Literal["head", "body"],
        *,
        keep_all: bool = True,
    ) -> None:
        self.model, self.blocks, self.ownership, self.split_point = model, blocks, ownership, split_point
        self.part, self.keep_all = part, keep_all
        self.calls: list[Call] = []
        self.splits: list[Tensor] = []
        """Head: the leaves at the cut. Body: the tensors that they replace. Either [the last block's input, the split
        point's input] or [the last block's output]."""
        self.block_edges: list[GradientEdge] = []
        """Body: the first block's input and the outputs of all blocks but the last. Head: the last block's output."""
        self._done = False

    def __enter__(self) -> Recorder:
        names = {id(m): name for name, m in self.model.named_modules()}
        self._blocks = {names[id(b)]: i for i, b in enumerate(self.blocks)}
        self._last = len(self.blocks) - 1
        with ExitStack() as stack:  # removes all hooks if one cannot be set
            for block, hook in ((self.blocks[0], self._enter_first), (self.blocks[-1], self._enter_last)):
                stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if self.split_point is not None:
                split_point = self.model.get_submodule(self.split_point)
                stack.callback(split_point.register_forward_pre_hook(self._enter_split_point).remove)
            stack.enter_context(forward_hooks(self.model, [*self.ownership.rules, *self._blocks], self._leave))
            stack.enter_context(torch.enable_grad())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter_first(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            raise InputError(
                f"{type(self.model).__name__} runs its blocks without an autograd graph (like reversible networks, or "
                "networks that repeat their blocks and differentiate only the last repetition), so token gradients "
                "are not available; use a model of another architecture"
            )
        if self.part == "body":
            hidden = block_input(args, kwargs)
            if not hidden.requires_grad:  # No embedding is measured: the graph starts here.
                hidden.requires_grad_(True)
            self.block_edges.append(get_gradient_edge(hidden))

    def _enter_last(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.split_point is None:
            return None
        hidden = block_input(args, kwargs)
        if self.part == "body":
            self.splits.append(hidden)
            return None
        leaf = hidden.detach().requires_grad_(True)
        self.splits.append(leaf)
        return replace_input(args, kwargs, leaf)

    def _enter_split_point(self, _module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self.part == "body":
            self.splits.append(args[0])
            return None
        leaf = args[0].detach().requires_grad_(True)
        self.splits.append(leaf)
        return (leaf, *args[1:])

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> Any:
        if name in self._blocks:
            return self._leave_block(self._blocks[name], output)
        if self._done and self.part == "body":
            return None
        replaced = None
        if self.part == "body" and torch.is_grad_enabled() and not output.requires_grad:
            # The first module with gradients. A copy, since it may be modified in place.
            output = output.detach().requires_grad_(True)
            replaced = output.clone()
        edge = get_gradient_edge(output) if output.requires_grad else None
        if edge is not None or (self.part == "head" and self.keep_all):
            # With several devices, a module may be called with an input on another device.
            self.calls.append(Call(name, module, args[0].detach().to(output.device), edge, output.numel()))
        return replaced

    def _leave_block(self, index: int, output: Any) -> Any:
        hidden = first_tensor(output)
        if index < self._last:
            if self.part == "body":
                self.block_edges.append(get_gradient_edge(hidden))
            return None
        self._done = True
        replaced = None
        if self.part == "head" and self.split_point is None:
            hidden = hidden.detach().requires_grad_(True)
            leaving = hidden.clone()  # may be modified in place
            replaced = leaving if isinstance(output, Tensor) else (leaving, *output[1:])
        if self.split_point is None:
            self.splits.append(hidden)
        if self.part == "head":
            self.block_edges.append(get_gradient_edge(hidden))
        return replaced


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a block's input hidden states. Raises InputError if they are passed under an unknown name."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise InputError(
            f"a block is called with {', '.join(kwargs) or 'nothing'} but no hidden_states, so its residual stream is "
            "unknown; name another ModuleList with --blocks"
        )
    return hidden


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def streams_last(hidden: Tensor, length: int, *, axis: int = 0) -> Tensor:
    """View hidden states as [1, n, …], also for blocks with several streams, [streams, 1, n, d].

    >>> streams_last(torch.zeros(4, 1, 7, 32), 7).shape
    torch.Size([1, 7, 4, 32])
    """
    shape = hidden.shape[axis : axis + 3]
    return hidden.movedim(axis, axis + 2) if shape[1:] == (1, length) and shape[:2] != (1, length) else hidden


@dataclass(frozen=True)
class Cut:
    """The point at which a model divides into head and body."""

    split_point: str | None
    """Name of the module whose input is the split point; None: the last block's output."""
    body: Recorder | None
    """The body's pass over the test sequence, with its graph; None if the model has no such division, or was not
    tried."""


def find_cut(model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor) -> Cut:
    """Find the first linear module of the last block whose input is a valid cut: the head acts position by position.

    Each candidate is tried on input_ids [n]: a gradient that starts at one position must arrive at exactly that
    position, at every cut and every claimed module. Without such a module, the last block's output must be a valid cut.
    """
    for split_point in (*_find_candidates(model, blocks, ownership, input_ids), None):
        if (body := _cut_at(model, blocks, ownership, input_ids, split_point)) is not None:
            return Cut(split_point, body)
    return Cut(None, None)


def _find_candidates(model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor) -> list[str]:
    """Return the last block's linear modules after which nothing mixes positions, in calling order: a gradient that
    starts at one position arrives at the module's input at that position only.

    One forward pass over the sequence tests all of them.
    """
    names = {id(m): name for name, m in model.named_modules()}
    inside = names[id(blocks[-1])] + "."
    if is_subset(model):  # including frozen ones; a module with an adapter counts as a whole
        layers = [name for name, m in model.named_modules() if name.startswith(inside) and _is_layer(m)]
        layers = [name for name in layers if not any(name.startswith(f"{other}.") for other in layers)]
    else:
        layers = [
            name for name, rule in ownership.rules.items() if rule in ("linear", "conv1d") and name.startswith(inside)
        ]
    stopped, start, called = None, [], {}

    def enter_block(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start.append(leaf := block_input(args, kwargs).detach().requires_grad_(True))
        return ((leaf, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf})

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or not isinstance(args[0], Tensor) or kwargs:
            called[name] = None
            return None
        values = args[0].clone()  # separate, since several modules may share an input
        if not values.requires_grad:
            return None

        def stop(gradient: Tensor) -> Tensor | None:
            if stopped != name:
                return None
            called[name] = gradient
            return torch.zeros_like(gradient)

        values.register_hook(stop)
        called.setdefault(name, values)
        return (values,), kwargs

    with ExitStack() as stack:
        stack.callback(blocks[-1].register_forward_pre_hook(enter_block, with_kwargs=True).remove)
        for name in layers:
            hook = lambda _module, args, kwargs, name=name: enter(name, args, kwargs)  # noqa: E731
            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        position = len(input_ids) // 2
        alone = {"logits_to_keep": input_ids.new_tensor([position])} if takes(model, "logits_to_keep") else {}
        with torch.enable_grad():
            logits = model(input_ids=input_ids[None], use_cache=False, **alone).logits
    if len(start) != 1 or not logits.requires_grad:  # each block is called once, and used
        return []
    found, seed = [], _slanted(logits, position if logits.shape[1] == len(input_ids) else 0)
    for name in [name for name, values in called.items() if values is not None]:
        stopped, called[name] = name, None
        (back,) = torch.autograd.grad([logits], start, [seed], retain_graph=True, allow_unused=True)
        if called[name] is not None and all(_is_local(g, position) for g in (called[name], back) if g is not None):
            found.append(name)
    return found


def _is_local(gradient: Tensor, position: int) -> bool:
    """Return whether the gradient is zero at all other positions, along its second axis."""
    if gradient.ndim < 3:
        return False
    rows = gradient[0].flatten(1)
    return not (rows[:position].any() | rows[position + 1 :].any())


def _slanted(logits: Tensor, position: int) -> Tensor:
    """Return a gradient at one position, not constant, since a norm could map constants to zero."""
    seed = torch.zeros_like(logits)
    seed[0, position] = torch.linspace(-1, 1, logits.shape[-1]).to(logits)
    return seed


def _is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D" or hasattr(module, "base_layer")


def _cut_at(
    model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor, split_point: str | None
) -> Recorder | None:
    """Return the body's pass if the head acts position by position after this point and all gradients cross it."""
    length = len(input_ids)
    with Recorder(model, blocks, ownership, split_point, "head") as recorder:
        logits = model(input_ids=input_ids[None], use_cache=False).logits
    calls, cuts = [call for call in recorder.calls if call.edge is not None], 1 if split_point is None else 2
    if len(recorder.splits) != cuts or not logits.requires_grad:
        return None
    if any(split.ndim < 3 or streams_last(split, length).shape[:2] != (1, length) for split in recorder.splits):
        return None
    edges = [*(get_gradient_edge(leaf) for leaf in recorder.splits), *(call.edge for call in calls)]
    for position in (length // 2, length - 1):
        seed = _slanted(logits, position)
        deltas = torch.autograd.grad([logits], edges, [seed], retain_graph=True, allow_unused=True)
        if any(delta is None for delta in deltas[:cuts]):
            return None
        elsewhere: list[Tensor] = []
        for call, delta in zip([None] * cuts + calls, deltas, strict=True):
            if delta is None:
                continue
            if call is not None and not call.by_position(length):
                return None
            rows = streams_last(delta, length).reshape(length, -1)
            elsewhere += [rows[:position].any(), rows[position + 1 :].any()]
        if torch.stack([one.to(elsewhere[0].device) for one in elsewhere]).any():
            return None
    names = [call.name for call, delta in zip(calls, deltas[cuts:], strict=True) if delta is not None]
    if len(names) != len(set(names)):
        return None
    return _follow_cut(model, blocks, ownership, input_ids, split_point, set(names), seed, deltas[:cuts])


def _follow_cut(
    model: nn.Module,
    blocks: nn.ModuleList,
    ownership: Ownership,
    input_ids: Tensor,
    split_point: str | None,
    local: set[str],
    seed: Tensor,
    at_cut: Sequence[Tensor],
) -> Recorder | None:
    """Return the body's pass if the logits' `seed` gives the same gradients as those on both sides of the cut."""
    with Recorder(model, blocks, ownership, split_point, "body") as body:
        logits = model(input_ids=input_ids[None], use_cache=False).logits
    edges = [*body.block_edges, *(call.edge for call in body.calls if call.name not in local)]
    whole = torch.autograd.grad([logits], edges, [seed], retain_graph=True, allow_unused=True)
    parts = torch.autograd.grad(body.splits, edges, at_cut, retain_graph=True, allow_unused=True)
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1
    pairs = list(zip(whole, parts, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return None
    far = [(a - b).norm() > tolerance * a.norm() for a, b in pairs if a is not None]
    return None if far and torch.stack([one.to(far[0].device) for one in far]).any() else body
