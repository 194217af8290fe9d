"""Hooks that record activations and their gradients on any torch module, and are always removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from gradscope.errors import InputError, checked

ForwardHook = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
"""(name, module, args, kwargs, output) → None, or a replacement for the output."""


@runtime_checkable
class HasModel(Protocol):
    """Anything with a `model`, such as a Policy: the hooks go on the model."""

    @property
    def model(self) -> nn.Module: ...


@contextmanager
def forward_hooks(module: nn.Module | HasModel, names: Iterable[str], hook: ForwardHook) -> Iterator[None]:
    """Call `hook` after the forward pass of each named submodule ("" is the module itself); always removed."""
    if isinstance(names, str):
        raise InputError(f"names is the string {names!r}; give a list of names, [{names!r}]")
    names, module = list(dict.fromkeys(names)), module if isinstance(module, nn.Module) else module.model
    modules = dict(module.named_modules(remove_duplicate=False))  # a get_submodule for each takes far longer
    if unknown := [name for name in names if name not in modules]:
        raise InputError(f"{type(module).__name__} has no submodule {unknown[0]!r}; see dict(module.named_modules())")
    handles = []
    try:
        for name in names:
            handles.append(
                modules[name].register_forward_hook(
                    lambda m, args, kwargs, output, name=name: hook(name, m, args, kwargs, output), with_kwargs=True
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], make: Callable[[int, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the forward of each module, given with its index, by `make`'s; always restored."""
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for index, (module, _) in enumerate(before):
            module.forward = make(index, module)
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output tensor, or the first floating one in its output tuple or mapping."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


@checked
@contextmanager
def capture_activations(module: nn.Module | HasModel, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of the named submodules during forward passes.

    Yields a dict, filled as the forwards run: name → output (detached, same shape). A module that is called again
    while the context is open is kept as "name#1", "name#2", …; one that returns a tuple is kept by its first tensor.

    >>> import torch
    >>> layer = nn.Linear(2, 3)
    >>> with capture_activations(layer, [""]) as seen:
    ...     out = layer(torch.ones(4, 2))
    >>> torch.equal(seen[""], out.detach())
    True
    """
    activations: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if (tensor := first_tensor(output)) is not None:
            activations[_fresh_key(name, activations)] = tensor.detach()

    with forward_hooks(module, names, record):
        yield activations


@checked
@contextmanager
def capture_gradients(module: nn.Module | HasModel, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record the gradients of whatever you backpropagate, with respect to the outputs of the named submodules.

    Yields a dict, filled as backward runs: name → gradient, of the output's shape. With a summed loss these are
    **position gradients** (attention mixes the tokens); they are a token gradient only if the loss is one token's.
    Backward passes accumulate, as in `.grad`; repeated calls are kept as "name#1", "name#2", …, in the order of
    the forward. Gradients belong to the values as the module returned them, even if they are changed in place later.

    >>> import torch
    >>> layer = nn.Linear(2, 3)
    >>> with capture_gradients(layer, [""]) as grads:
    ...     (layer(torch.ones(4, 2)) * 2).sum().backward()
    >>> grads[""].unique().tolist()
    [2.0]
    """
    gradients: dict[str, Tensor] = {}
    calls: dict[str, None] = {}
    handles = []

    def record(name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is None or not tensor.requires_grad:
            return None
        replaced = None
        if tensor._is_view() and isinstance(output, (Tensor, tuple)):
            # An in-place change rewrites a view's history and loses the hook, so return a copy.
            whole, tensor = tensor, tensor.clone()
            replaced = tensor if output is whole else tuple(tensor if part is whole else part for part in output)
        key = _fresh_key(name, calls)
        calls[key] = None

        def add(gradient: Tensor) -> None:
            gradients[key] = gradients[key] + gradient.detach() if key in gradients else gradient.detach().clone()

        # A tensor hook: module backward hooks break before in-place activations.
        handles.append(tensor.register_hook(add))
        return replaced

    try:
        with forward_hooks(module, names, record):
            yield gradients
    finally:
        for handle in handles:
            handle.remove()


def _fresh_key(name: str, taken: dict[str, Any]) -> str:
    repeats = sum(1 for key in taken if key.split("#")[0] == name)
    return f"{name}#{repeats}" if repeats else name
