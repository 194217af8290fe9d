"""Half-precision weights with float32 arithmetic: weights are upcast on use.

During a module's forward, its parameters are replaced by exact float32 copies. Wherever autograd would save a copy for
the backward pass, the half-precision weight is saved instead and upcast again when needed, so only the running modules'
copies exist, usually one. Gradients of parameters and activations are float32 (`Tensor.grad_dtype`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import make_dual
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscope.errors import InputError, first_line
from gradscope.policy.forwards import made_again

UPCAST = "upcast"
"""The value of `dtype` that selects this."""
HALF = (torch.bfloat16, torch.float16)
_MARK = "_gradscope_upcasts"
"""Attribute that marks a model and its modules as upcasting."""
_TANGENT = "_gradscope_tangent"
"""Attribute with the tangent of a parameter inside `moving`."""


def upcast_on_use(model: nn.Module) -> None:
    """Make the model compute in float32 with its half-precision weights, and verify it by a forward pass.

    A model without any is unchanged. Raises InputError for architectures that would still round to half precision
    somewhere, or fail when mixing both precisions.
    """
    if not any(p.dtype in HALF for p in model.parameters()):
        return
    if not hasattr(Tensor, "grad_dtype"):  # otherwise gradients would silently be rounded
        raise _refusal(model, f"torch {torch.__version__} gives half-precision weights no float32 gradients")
    for module in model.modules():
        _widen_buffers(model, module)
    setattr(model, _MARK, True)
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dtype in HALF]
        for parameter in own:
            parameter.grad_dtype = torch.float32
        if own:
            setattr(module, _MARK, True)
            module.forward = _Upcast(weakref.ref(module), vars(module).get("forward"))
    try:
        with torch.no_grad(), _NoHalfPrecision():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    except _RoundedError as error:
        raise _refusal(model, f"{error} is in {_name(error.dtype)}") from error
    except (RuntimeError, TypeError) as error:
        raise _refusal(model, first_line(error)) from error


def is_upcast(model: nn.Module) -> bool:
    """Return whether the model's half-precision weights are upcast on use."""
    return hasattr(model, _MARK)


@contextmanager
def moving(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Attach tangents to upcast parameters' float32 copies; forward mode would require half-precision ones."""
    pairs = list(pairs)
    try:
        for parameter, tangent in pairs:
            setattr(parameter, _TANGENT, tangent)
        yield
    finally:
        for parameter, _ in pairs:
            delattr(parameter, _TANGENT)


def arithmetic_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's arithmetic: its weights' dtype, or float32 if they are upcast."""
    if is_upcast(module):
        return torch.float32
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def precision_in_words(model: nn.Module) -> str:
    """Describe the dtype of the model's arithmetic and, if different, of its weights.

    >>> precision_in_words(nn.Linear(1, 1))
    'float32'
    """
    if not is_upcast(model):
        return _name(arithmetic_dtype(model))
    return f"{_name(next(p.dtype for p in model.parameters() if p.dtype in HALF))} upcast to float32"


def replaced_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that replaces the module's forward, ignoring upcasting; None if there is none."""
    forward = vars(module).get("forward")
    return forward.replaced if isinstance(forward, _Upcast) else forward


@dataclass(frozen=True)
class _Upcast:
    """A module's forward with float32 copies in place of its half-precision parameters."""

    owner: weakref.ref[nn.Module]
    """The module, by weak reference to avoid a cycle."""
    replaced: Callable[..., Any] | None
    """The module's forward, if it had already been replaced."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Upcast:
        return _Upcast(weakref.ref(memo[id(self.owner())]), copy.deepcopy(self.replaced, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.owner()
        own, forward = module._parameters, self.replaced or partial(type(module).forward, module)
        halves = {name: p for name, p in own.items() if p is not None and p.dtype in HALF}
        if type(module) is nn.Embedding and halves and module.max_norm is None and self.replaced is None:
            return _look_up(module, halves["weight"], *args)
        copies: dict[int, Callable[[Tensor], Callable[[], Tensor]]] = {}  # by the data pointer of a copy
        try:
            for name, source in halves.items():
                own[name] = wide = _to_float32(source)
                if torch.is_grad_enabled() and wide.stride() == source.stride():
                    copies[wide.untyped_storage().data_ptr()] = partial(_again, source.detach())
            with made_again(copies) if copies else nullcontext():
                return forward(*args, **kwargs)
        finally:
            own.update(halves)
            copies.clear()  # what autograd saves holds the source, not the copy


def _again(source: Tensor, saved: Tensor) -> Callable[[], Tensor]:
    """Return what upcasts again the part of a parameter that a part of its copy stands for."""
    if saved.dtype != torch.float32:  # other numbers in the same memory
        return lambda: saved
    part = source.as_strided(saved.shape, saved.stride(), source.storage_offset() + saved.storage_offset())
    return lambda: part.to(torch.float32)


def _to_float32(source: Tensor) -> Tensor:
    if (tangent := getattr(source, _TANGENT, None)) is not None:
        return make_dual(source.to(torch.float32), tangent)
    needs_gradient = source.requires_grad and torch.is_grad_enabled()
    return _Copy.apply(source) if needs_gradient else source.to(torch.float32)


class _Copy(torch.autograd.Function):
    """A float32 copy whose gradient stays float32; `.to` would round it."""

    @staticmethod
    def forward(source: Tensor) -> Tensor:
        return source.to(torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _look_up(module: nn.Embedding, weight: Tensor, ids: Tensor) -> Tensor:
    """Look up float32 rows of an embedding table, copying only these rows."""
    if (tangent := getattr(weight, _TANGENT, None)) is not None:
        return make_dual(F.embedding(ids, weight).to(torch.float32), F.embedding(ids, tangent))
    if weight.requires_grad and torch.is_grad_enabled():
        return _LookUp.apply(weight, ids, -1 if module.padding_idx is None else module.padding_idx)
    return F.embedding(ids, weight, module.padding_idx).to(torch.float32)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, ids: Tensor, padding: int) -> Tensor:
        return F.embedding(ids, weight).to(torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        weight, ids, ctx.padding = inputs
        ctx.rows = len(weight)
        ctx.save_for_backward(ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, ctx.padding, False), None, None


def _widen_buffers(model: nn.Module, module: nn.Module) -> None:
    """Upcast buffers. Those of a checkpoint are exact, but one that the code computes (Gemma's √hidden) was rounded to
    half precision, and is recomputed by a copy of the module without weights."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dtype not in HALF:
            continue
        wide = buffer.to(torch.float32)
        if name in module._non_persistent_buffers_set:
            stand_in = copy.copy(module)
            stand_in._parameters = {n: p if p is None else p.to("meta") for n, p in module._parameters.items()}
            stand_in._buffers = dict(module._buffers) | {name: torch.full_like(wide, torch.nan)}
            with torch.no_grad():
                getattr(model, "_init_weights", lambda _: None)(stand_in)
            wide = stand_in._buffers[name]
            if not wide.isfinite().all():
                raise _refusal(model, f"{type(module).__name__}.{name} is rounded to {_name(buffer.dtype)}")
        module._buffers[name] = wide


class _RoundedError(Exception):
    def __init__(self, operation: str, dtype: torch.dtype) -> None:
        super().__init__(operation)
        self.dtype = dtype


class _NoHalfPrecision(TorchDispatchMode):
    """A context in which operations that return new half-precision values raise an error.

    Views of weights and embedding lookups (which copy weights) are allowed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            return result
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.dtype in HALF and made.untyped_storage().data_ptr() not in known:
                raise _RoundedError(str(func), made.dtype)
        return result


def _refusal(model: nn.Module, reason: str) -> InputError:
    return InputError(
        f"{type(model).__name__} does not compute in float32 with half-precision weights ({reason}); give --dtype "
        "float32, or the weights' dtype"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
