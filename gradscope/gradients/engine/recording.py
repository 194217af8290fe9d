"""What one forward pass leaves for the engine: inputs of the claimed modules, and where outputs stand in the graph.

The model is seen in two parts. The **head** is all that acts on each position by itself: from the logits back through
the last block's feed-forward network to the output projection of its attention, whose input (with the block's own
input, which the residual carries past it) is the **split point**. The **body** is the rest, which mixes positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.errors import InputError
from gradscope.gradients.engine.ownership import Ownership
from gradscope.gradients.hooks import first_tensor, forward_hooks
from gradscope.policy import is_subset, takes


@dataclass(frozen=True)
class Call:
    """One call of a module that a rule claims."""

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge | None
    """Graph edge of the module's output, as it was returned; None if no gradient flows there."""
    width: int
    """Numbers in the output."""

    @property
    def input_key(self) -> tuple[Any, ...]:
        """The same for modules that share one input, so that its factor is made once."""
        return self.inputs.data_ptr(), self.inputs.shape, self.inputs.stride(), self.inputs._version

    def by_position(self, length: int) -> bool:
        """Return whether row s of the input is position s of a sequence of this length, and nothing else could be."""
        return self.inputs.ndim >= 3 and self.inputs.shape[:2] == (1, length)


@dataclass(frozen=True)
class BlockCall:
    """How a block was called, beside its hidden states: enough to run it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return cls(*replace_input(args, kwargs, None))

    def again(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on these hidden states; return those that it leaves."""
        args, kwargs = replace_input(self.args, self.kwargs, hidden)
        return first_tensor(block(*args, **kwargs))


class Recorder:
    """A context in which forward passes of the model are recorded.

    part="head": the graph is cut open at the split point, so that a backward pass ends there.
    part="body": the graph starts at the embeddings; the split point's tensors are kept to start a backward pass from.
    split_point: name of the module whose input is the split point; None: the split point is the last block's output.
    keep_all: keep, of the head's pass, also the calls before the split point, whose inputs lie in memory.
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
        """Head: the leaves that it was cut at. Body: what they stand for. [the last block's input, the split point's
        input] or [the last block's output]."""
        self.block_edges: list[GradientEdge] = []
        """Body: input of the first block and outputs of all but the last. Head: output of the last block."""
        self._done = False

    def __enter__(self) -> Recorder:
        names = {id(m): name for name, m in self.model.named_modules()}
        self._blocks = {names[id(b)]: i for i, b in enumerate(self.blocks)}
        self._last = len(self.blocks) - 1
        with ExitStack() as stack:  # taken down at once if a hook cannot be set
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
                f"{type(self.model).__name__} runs its blocks without a graph (as a reversible network, or one that "
                "repeats its blocks and learns from the last time), so no token's gradient can be followed through "
                "them; give a model of another architecture"
            )
        if self.part == "body":
            hidden = block_input(args, kwargs)
            if not hidden.requires_grad:  # No embedding is claimed: the graph starts here.
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
            # Nothing before it carries a gradient, but its own parameters do. A copy: it may be changed in place.
            output = output.detach().requires_grad_(True)
            replaced = output.clone()
        edge = get_gradient_edge(output) if output.requires_grad else None
        if edge is not None or (self.part == "head" and self.keep_all):
            # Of a policy over several devices, a module is called with what the one before it left on its own.
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
            leaving = hidden.clone()  # it may be changed in place
            replaced = leaving if isinstance(output, Tensor) else (leaving, *output[1:])
        if self.split_point is None:
            self.splits.append(hidden)
        if self.part == "head":
            self.block_edges.append(get_gradient_edge(hidden))
        return replaced


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a block is called with; raises InputError where they come under an unknown name."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise InputError(
            f"a block is called with {', '.join(kwargs) or 'nothing'} and no hidden_states: this residual stream is "
            "not known; name another ModuleList with --blocks"
        )
    return hidden


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's call with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def streams_last(hidden: Tensor, length: int, *, axis: int = 0) -> Tensor:
    """View hidden states with positions second, [1, n, …], also for blocks with several streams, [streams, 1, n, d].

    >>> streams_last(torch.zeros(4, 1, 7, 32), 7).shape
    torch.Size([1, 7, 4, 32])
    """
    shape = hidden.shape[axis : axis + 3]
    return hidden.movedim(axis, axis + 2) if shape[1:] == (1, length) and shape[:2] != (1, length) else hidden


@dataclass(frozen=True)
class Cut:
    """Where a model divides into head and body."""

    split_point: str | None
    """Name of the module whose input is the split point; None: the split point is the last block's output."""
    body: Recorder | None
    """The body's pass over the sequence that it was tried on, with its graph; None where the model falls into no head
    and body, or was not tried."""


def find_cut(model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor) -> Cut:
    """Return the first linear module of the last block whose input, cut off, leaves a head that acts position by
    position.

    Each candidate is tried on input_ids [n]: a gradient that starts at one position must come back at that position
    alone, exactly, at every cut and every claimed module. No split point if there is no such module: then what the last
    block leaves must be such a cut.
    """
    for split_point in (*_find_candidates(model, blocks, ownership, input_ids), None):
        if (body := _cut_at(model, blocks, ownership, input_ids, split_point)) is not None:
            return Cut(split_point, body)
    return Cut(None, None)


def _find_candidates(model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor) -> list[str]:
    """Linear modules of the last block, as they are called, with nothing behind them that mixes positions: a gradient
    that starts at one position, and is stopped at the module's input, comes back at that position alone.

    One forward pass over the sequence tells of all.
    """
    names = {id(m): name for name, m in model.named_modules()}
    inside = names[id(blocks[-1])] + "."
    if is_subset(model):  # frozen ones too; one with an adapter counts as a whole
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
        values = args[0].clone()  # its own: others may have the same input
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
    if len(start) != 1 or not logits.requires_grad:  # no block is called more than once, or for nothing
        return []
    found, seed = [], _slanted(logits, position if logits.shape[1] == len(input_ids) else 0)
    for name in [name for name, values in called.items() if values is not None]:
        stopped, called[name] = name, None
        (back,) = torch.autograd.grad([logits], start, [seed], retain_graph=True, allow_unused=True)
        if called[name] is not None and all(_is_local(g, position) for g in (called[name], back) if g is not None):
            found.append(name)
    return found


def _is_local(gradient: Tensor, position: int) -> bool:
    """Return whether it is zero at every other position of its second axis."""
    if gradient.ndim < 3:
        return False
    rows = gradient[0].flatten(1)
    return not (rows[:position].any() | rows[position + 1 :].any())


def _slanted(logits: Tensor, position: int) -> Tensor:
    """Return a gradient at one position; not constant, since a norm could map constants to zero."""
    seed = torch.zeros_like(logits)
    seed[0, position] = torch.linspace(-1, 1, logits.shape[-1]).to(logits)
    return seed


def _is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D" or hasattr(module, "base_layer")


def _cut_at(
    model: nn.Module, blocks: nn.ModuleList, ownership: Ownership, input_ids: Tensor, split_point: str | None
) -> Recorder | None:
    """Return the body's pass, if the head behind this split point acts position by position and all gradients pass the
    cut; else None.
    """
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
    """Return the body's pass, if the gradients at the body are the same from the logits as from both sides of the cut.

    local: claimed modules of the head. seed: a gradient of the logits; at_cut: what it comes to at both sides.
    """
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
