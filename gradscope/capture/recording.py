"""What one forward pass leaves for the engine: inputs of the claimed modules, and where outputs stand in the graph.

The model is seen in two parts. The **head** is all that acts on each position by itself: from the logits back through
the last block's feed-forward network to the output projection of its attention, whose input (with the block's own
input, which the residual carries past it) is the **joint**. The **body** is the rest, which mixes positions.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.capture.claims import Claims
from gradscope.capture.hooks import first_tensor, forward_hooks
from gradscope.errors import InputError
from gradscope.parameters import is_subset


@dataclass(frozen=True)
class Call:
    """One call of a module that a rule claims."""

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge | None
    """Of the module's output, as it was returned; None if no gradient flows there."""
    width: int
    """Numbers in the output."""

    @property
    def input_key(self) -> tuple[Any, ...]:
        """The same for modules that share one input, so that its factor is made once."""
        return self.inputs.data_ptr(), self.inputs.shape, self.inputs.stride(), self.inputs._version

    def by_position(self, length: int) -> bool:
        """Whether row s of the input is position s of a sequence of this length, and nothing else could be."""
        return self.inputs.ndim >= 3 and self.inputs.shape[:2] == (1, length)


class Recorder:
    """A context in which forward passes of the model are recorded.

    part="head": the graph is cut open at the joint, so that a backward pass ends there.
    part="body": the graph starts at the embeddings, and the joint's tensors are kept to start a backward pass from.
    joint: name of the module whose input is the joint; None: the joint is the last block's output.
    """

    def __init__(
        self, model: nn.Module, blocks: nn.ModuleList, claims: Claims, joint: str | None, part: Literal["head", "body"]
    ) -> None:
        self.model, self.blocks, self.claims, self.joint, self.part = model, blocks, claims, joint, part
        self.calls: list[Call] = []
        self.joints: list[Tensor] = []
        """Head: the leaves that it was cut at. Body: what they stand for. [the last block's input, the joint's input]
        or [the last block's output]."""
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
            if self.joint is not None:
                joint = self.model.get_submodule(self.joint)
                stack.callback(joint.register_forward_pre_hook(self._enter_joint).remove)
            stack.enter_context(forward_hooks(self.model, [*self.claims.rules, *self._blocks], self._leave))
            stack.enter_context(torch.enable_grad())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter_first(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.part == "body":
            hidden = block_input(args, kwargs)
            if not hidden.requires_grad:  # No embedding is claimed: the graph starts here.
                hidden.requires_grad_(True)
            self.block_edges.append(get_gradient_edge(hidden))

    def _enter_last(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.joint is None:
            return None
        hidden = block_input(args, kwargs)
        if self.part == "body":
            self.joints.append(hidden)
            return None
        leaf = hidden.detach().requires_grad_(True)
        self.joints.append(leaf)
        return ((leaf, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf})

    def _enter_joint(self, _module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self.part == "body":
            self.joints.append(args[0])
            return None
        leaf = args[0].detach().requires_grad_(True)
        self.joints.append(leaf)
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
        if edge is not None or self.part == "head":
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
        if self.part == "head" and self.joint is None:
            hidden = hidden.detach().requires_grad_(True)
            replaced = hidden if isinstance(output, Tensor) else (hidden, *output[1:])
        if self.joint is None:
            self.joints.append(hidden)
        if self.part == "head":
            self.block_edges.append(get_gradient_edge(hidden))
        return replaced


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a block is called with; InputError where they come under an unknown name."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise InputError(
            f"a block is called with {', '.join(kwargs) or 'nothing'} and no hidden_states: this residual stream is "
            "not known; name another ModuleList with --blocks"
        )
    return hidden


def find_joint(model: nn.Module, blocks: nn.ModuleList, claims: Claims, input_ids: Tensor) -> str | None:
    """The first linear module of the last block whose input, cut off, leaves a head that acts position by position.

    Each candidate is tried on input_ids [n]: a gradient that starts at one position must come back at that position
    alone, exactly, at every cut and every claimed module. None if there is no such module.
    """
    names = {id(m): name for name, m in model.named_modules()}
    inside = names[id(blocks[-1])] + "."
    if not is_subset(model):
        with Recorder(model, blocks, claims, None, "body") as recorder:
            model(input_ids=input_ids[None], use_cache=False)
        called = dict.fromkeys(c.name for c in recorder.calls if c.name.startswith(inside))
        candidates = [name for name in called if claims.rules[name] in ("linear", "conv1d")]
    else:
        candidates = _called_layers(model, inside, input_ids)
    return next((name for name in candidates if _cuts_head(model, blocks, claims, input_ids, name)), None)


def _called_layers(model: nn.Module, inside: str, input_ids: Tensor) -> list[str]:
    """Linear layers in a block, frozen ones too, as they are called; one with an adapter counts as a whole."""
    layers = {name: m for name, m in model.named_modules() if name.startswith(inside) and _is_layer(m)}
    outer = [name for name in layers if not any(name.startswith(f"{other}.") for other in layers)]
    called: dict[str, bool] = {}

    def record(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        called[name] = called.get(name, True) and len(args) == 1 and isinstance(args[0], Tensor) and not kwargs

    with torch.no_grad(), forward_hooks(model, outer, record):
        model(input_ids=input_ids[None], use_cache=False)
    return [name for name, simple in called.items() if simple]


def _is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D" or hasattr(module, "base_layer")


def _cuts_head(model: nn.Module, blocks: nn.ModuleList, claims: Claims, input_ids: Tensor, joint: str) -> bool:
    length = len(input_ids)
    with Recorder(model, blocks, claims, joint, "head") as recorder:
        logits = model(input_ids=input_ids[None], use_cache=False).logits
    calls = [call for call in recorder.calls if call.edge is not None]
    if len(recorder.joints) != 2 or recorder.joints[1].ndim < 3 or recorder.joints[1].shape[:2] != (1, length):
        return False
    edges = [*(get_gradient_edge(leaf) for leaf in recorder.joints), *(call.edge for call in calls)]
    for position in {length // 2, length - 1}:
        seed = torch.zeros_like(logits)
        # Any direction but a constant one, which a norm could send to zero.
        seed[0, position] = torch.linspace(-1, 1, logits.shape[-1]).to(logits)
        deltas = torch.autograd.grad([logits], edges, [seed], retain_graph=True, allow_unused=True)
        if deltas[0] is None or deltas[1] is None:
            return False
        for call, delta in zip([None, None, *calls], deltas, strict=True):
            if delta is None:
                continue
            if call is not None and not call.by_position(length):
                return False
            rows = delta.reshape(length, -1)
            if rows[:position].any() or rows[position + 1 :].any():
                return False
    names = [call.name for call, delta in zip(calls, deltas[2:], strict=True) if delta is not None]
    return len(names) == len(set(names)) and _cuts_all(model, blocks, claims, input_ids, joint, set(names))


def _cuts_all(
    model: nn.Module, blocks: nn.ModuleList, claims: Claims, input_ids: Tensor, joint: str | None, local: set[str]
) -> bool:
    """Whether all that flows back to the body passes the cut: the same from the logits as from the cut's two sides."""
    with Recorder(model, blocks, claims, joint, "head") as head:
        logits = model(input_ids=input_ids[None], use_cache=False).logits
    seed = torch.zeros_like(logits)
    seed[0, -1] = torch.linspace(-1, 1, logits.shape[-1]).to(logits)
    seeds = torch.autograd.grad([logits], head.joints, [seed])
    with Recorder(model, blocks, claims, joint, "body") as body:
        logits = model(input_ids=input_ids[None], use_cache=False).logits
    edges = [*body.block_edges, *(call.edge for call in body.calls if call.name not in local)]
    whole = torch.autograd.grad([logits], edges, [seed], retain_graph=True, allow_unused=True)
    parts = torch.autograd.grad(body.joints, edges, seeds, allow_unused=True)
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1
    for a, b in zip(whole, parts, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and (a - b).norm() > tolerance * a.norm():
            return False
    return True
