"""Weighted sums of token gradients, and how much a step along a direction changes each token's log π, to first order.

Both are products with one Jacobian J [tokens, P], of log π of a batch's kept tokens with respect to all P parameters,
flat in the order of `parameters.float_parameters`, which is never formed: cotangents·J by backward passes, J·direction
by forward mode (`torch.func.jvp`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, reduce
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call

from gradscope.errors import InputError, first_line
from gradscope.gradients.hooks import measuring
from gradscope.objective import fitting_size, kept_logprobs, micro_batches
from gradscope.policy import flat_slices, float_parameters, is_upcast, moving
from gradscope.rollouts import TokenBatch
from gradscope.runs import Progress, scratch_zeros, track

Vectors = dict[str, Tensor]
"""A tensor of each parameter's shape, by its name in _KeptLogprobs."""
Derivative = Literal["forward mode", "central differences"]

REACH = 1e-2
"""Root mean square change of log π, in nats, at which a central difference is taken: there, in float32, rounding and
curvature cost about the same."""
BACKWARD, FORWARD_MODE = 2.0, 3.0
"""Time of a backward pass, and of a derivative in forward mode, in forward passes: per product with a weight, two more
products. Measured at 32 M parameters on one core: 1.8 and 3.1."""
TOGETHER = 8
"""Most directions along which derivatives are taken at once, on fewer responses: one forward pass serves them all."""
TANGENTS = 1 << 28
"""Bytes of tangents up to which that is done: of larger ones a copy would cost more memory than the pass is worth."""
ATTEMPTS = 8
"""Most step sizes tried until that change is met within a factor of 2."""


def weighted_gradients(
    model: nn.Module,
    batch: TokenBatch,
    cotangents: Float[Tensor, "C B S"],
    *,
    micro_batch_size: int,
    progress: bool | Progress = False,
    out: Float[Tensor, "C P"] | None = None,
) -> Float[Tensor, "C P"]:
    """Row c is Σ_t cotangents[c, t] · ∇ log π_t over all parameters, frozen ones too; only kept tokens are read.

    With cotangents −w_t / num_tokens (Eq. 2) it is the gradient of the loss. log π is at each response's temperature,
    in nats. micro_batch_size: most responses in one forward pass, which serves every row; each row costs a backward
    pass, where it has a cotangent in the piece. Of a large vocabulary, fewer responses go together (see
    `fitting_size`). The model measures in eval mode; flags, modes and `.grad` stay as they were.

    Memory besides the model and its activations: C + 1 vectors as long as the parameters, in float32 at least, on the
    model's device. out: zeros to add to, of `vectors_within`; then no other vector is needed, for each parameter's
    gradient goes there as soon as it is made. The numbers are the same. Raises InputError for cotangents that do not
    fit the batch, and for a batch without kept tokens.
    """
    _check(batch, micro_batch_size)
    if tuple(cotangents.shape[1:]) != (wanted := tuple(batch.input_ids.shape)):
        raise InputError(
            f"cotangents have shape {tuple(cotangents.shape)}, the batch {wanted}; give rows with one number per column"
        )
    slices = flat_slices(model)
    with differentiable(model):
        if out is not None:
            for piece, (row, column) in _pieces(model, batch, micro_batch_size, progress, copies=4):

                def add(c: int, name: str, gradient: Float[Tensor, " p"]) -> None:
                    out[c, slices[name]] += gradient.to(out)

                stream_gradients(model, piece, lambda logprobs, own=cotangents[:, row, column]: own.to(logprobs), add)
            return out
        sums = zero_vectors(model, len(cotangents))
        for piece, (row, column) in _pieces(model, batch, micro_batch_size, progress, copies=4):
            logprobs = kept_logprobs(model, piece)
            add_gradients(model, logprobs, cotangents[:, row, column].to(logprobs), sums)
    return sums


def predict_changes(
    model: nn.Module,
    batch: TokenBatch,
    directions: Float[Tensor, "C P"],
    *,
    micro_batch_size: int,
    progress: bool | Progress = False,
) -> tuple[Float[Tensor, "C B S"], Derivative]:
    """⟨∇ log π_t, direction⟩ of every kept token for each direction, 0 elsewhere, in nats and on the CPU; and how.

    If the parameters move by a direction, each log π changes by that much to first order. A direction that is not zero
    costs about three forward passes in forward mode. Where an operation of the model has none, a UserWarning says so
    and all changes are central differences, which cost 2 to 16 forward passes and agree to about 2e-4 of the root mean
    square change, in float32, unless they send a token to other experts. The weights are never touched; flags, modes
    and `.grad` stay as they were.

    Memory besides the model, its activations and the directions: one vector as long as the parameters for central
    differences; in forward mode nothing, or a copy of several small directions that go together (TANGENTS). Raises
    InputError for directions that do not fit the model, for arithmetic below float32, in which a tangent keeps two or
    three digits, and for a batch without kept tokens.
    """
    _check(batch, micro_batch_size)
    refuse_narrow_arithmetic(model)
    if directions.shape[1] != (size := zero_vectors(model, 0).shape[1]):
        raise InputError(f"directions have {directions.shape[1]} entries, the model {size} parameters; give one each")
    arguments = (model, batch, directions, micro_batch_size, progress)
    with torch.inference_mode(False), torch.no_grad(), measuring(model), _still_padding(model):
        try:
            if _fits_together(model, directions):
                with suppress(NotImplementedError, RuntimeError):  # what vmap does not know; memory is tried again
                    return _changes_together(*arguments), "forward mode"
            return _changes(_forward_mode, *arguments), "forward mode"
        except torch.OutOfMemoryError:
            raise
        # What has no forward mode raises either; a model that does not run at all will raise again.
        except (NotImplementedError, RuntimeError) as error:
            reason = first_line(error)
            if is_upcast(model):  # its weights, a little moved, would be whole float32 copies
                raise InputError(
                    f"no forward mode ({reason}), and central differences are not of weights that are upcast; load the "
                    "policy in float32"
                ) from error
            warnings.warn(f"no forward mode ({reason}); changes are central differences instead", stacklevel=2)
            return _changes(_central_differences, *arguments), "central differences"


@contextmanager
def _still_padding(model: nn.Module) -> Iterator[None]:
    """Embeddings return their padding id's row as it is, wherever a direction moves it: no gradient flows there."""
    handles = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                row = module(torch.tensor([module.padding_idx], device=module.weight.device))[0].clone()

                def keep(module: nn.Embedding, args: tuple[Tensor, ...], output: Tensor, row: Tensor = row) -> Tensor:
                    return torch.where((args[0] == module.padding_idx)[..., None], row, output)

                handles.append(module.register_forward_hook(keep))
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_narrow_weights(model: nn.Module) -> None:
    """Raise InputError for weights below float32, whether they are measured or not: all that flows is as narrow."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < 32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise InputError(f"{name} is {dtype}, in which changes are mostly rounding; load the policy in float32")


def refuse_narrow_arithmetic(model: nn.Module) -> None:
    """The same for what predicts a step and takes none: weights that are upcast are as good as float32."""
    if not is_upcast(model):
        refuse_narrow_weights(model)


def zero_vectors(model: nn.Module, *leading: int) -> Float[Tensor, "*leading P"]:
    """Zeros that are flat over the parameters, in their widest dtype and float32 at least, on the model's device."""
    parameters = [p for _, p in float_parameters(model)]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    return torch.zeros(*leading, sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """`measuring`, with gradients for every parameter; all comes back as it was."""
    with torch.inference_mode(False), torch.enable_grad(), measuring(model):
        for _, parameter in float_parameters(model):
            parameter.requires_grad_(True)
        yield


def vectors_within(model: nn.Module, count: int, memory: int | None) -> Float[Tensor, "count P"]:
    """`zero_vectors(model, count)`, in a scratch file on the host where they take more than `memory` bytes; None: any.

    Raises InputError where there is no room for the file.
    """
    if memory is None or count * vector_bytes(model) <= memory:
        return zero_vectors(model, count)
    one = zero_vectors(model, 0)
    return scratch_zeros(count, one.shape[1], dtype=one.dtype)


def vector_bytes(model: nn.Module) -> int:
    """Bytes of one vector as long as the parameters."""
    one = zero_vectors(model, 0)
    return one.shape[1] * one.element_size()


def add_gradients(
    model: nn.Module,
    logprobs: Float[Tensor, "*tokens"],
    cotangents: Float[Tensor, "C *tokens"],
    sums: Float[Tensor, "C P"],
) -> None:
    """Add Σ_t cotangents[c, t] · ∇ logprobs[t] to row c of the sums: a backward pass for each row that is not 0."""
    slices, parameters = flat_slices(model).values(), [p for _, p in float_parameters(model)]
    active = [c for c, any_there in enumerate(cotangents.any(1).tolist()) if any_there]
    for c in active:
        last = c == active[-1]
        gradients = torch.autograd.grad(logprobs, parameters, cotangents[c], retain_graph=not last, allow_unused=True)
        for part, gradient in zip(slices, gradients, strict=True):
            if gradient is not None:
                sums[c, part] += gradient.flatten().to(sums)


def stream_gradients(
    model: nn.Module,
    piece: TokenBatch,
    cotangents: Callable[[Float[Tensor, " K"]], Float[Tensor, "C K"]],
    take: Callable[[int, str, Float[Tensor, " p"]], None],
) -> None:
    """Σ_t cotangents[c, t] · ∇ log π_t of a piece, a parameter at a time, after one forward pass.

    cotangents: what makes them of the kept tokens' log π. take: called with c, a parameter's name and its flat
    gradient, as soon as the backward pass has made it: none waits until that is through.
    """
    # Leaves of our own on the same memory: no hook of another's runs, and no `.grad` of the model is touched.
    leaves = {f"model.{name}": p.detach().requires_grad_() for name, p in float_parameters(model)}
    row = 0

    def pass_on(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad.flatten(), None
        take(row, name, gradient)

    for name, leaf in leaves.items():
        if is_upcast(model):
            leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
        leaf.register_post_accumulate_grad_hook(partial(pass_on, name.removeprefix("model.")))
    logprobs = _logprobs_at(_KeptLogprobs(model), piece, leaves)
    wanted = cotangents(logprobs.detach())
    active = [c for c, any_there in enumerate(wanted.any(1).tolist()) if any_there]
    for row in active:  # which `pass_on` reads
        logprobs.backward(wanted[row], retain_graph=row != active[-1], inputs=list(leaves.values()))


class _KeptLogprobs(nn.Module):
    """log π of a piece's kept tokens [K], as a module whose parameters can be swapped for one call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, piece: TokenBatch) -> Float[Tensor, " K"]:
        return kept_logprobs(self.model, piece)


def _changes(
    differentiate: Callable[[Callable[[Vectors], Tensor], Vectors, Vectors], Tensor],
    model: nn.Module,
    batch: TokenBatch,
    directions: Float[Tensor, "C P"],
    micro_batch_size: int,
    progress: bool | Progress,
) -> Float[Tensor, "C B S"]:
    """The derivative along each direction, piece by piece."""
    module = _KeptLogprobs(model)
    parameters = {f"model.{name}": p for name, p in float_parameters(model)}
    slices = {f"model.{name}": part for name, part in flat_slices(model).items()}
    changes = torch.zeros(len(directions), *batch.input_ids.shape, dtype=directions.dtype)
    for c, direction in enumerate(directions):
        if not direction.any():
            continue
        # A tangent with an offset in its memory would be copied: each has to begin where its memory does.
        parts = {name: _alone(direction[part]) for name, part in slices.items()}
        tangents = {name: _tangent(p, parts[name]) for name, p in parameters.items()}
        for piece, (row, column) in _pieces(model, batch, micro_batch_size, progress, copies=6):
            logprobs = partial(_logprobs_at, module, piece)
            changes[c, row, column] = differentiate(logprobs, parameters, tangents).to(changes)
    return changes


def _fits_together(model: nn.Module, directions: Float[Tensor, "C P"]) -> bool:
    count = min(TOGETHER, int(directions.any(1).sum()))
    return count > 1 and not is_upcast(model) and count * vector_bytes(model) <= TANGENTS


def _changes_together(
    model: nn.Module,
    batch: TokenBatch,
    directions: Float[Tensor, "C P"],
    micro_batch_size: int,
    progress: bool | Progress,
) -> Float[Tensor, "C B S"]:
    """`_changes` in forward mode along several directions at once."""
    module, parameters = _KeptLogprobs(model), {f"model.{name}": p for name, p in float_parameters(model)}
    changes = torch.zeros(len(directions), *batch.input_ids.shape, dtype=directions.dtype)
    active = directions.any(1).nonzero()[:, 0].cpu()
    for chosen in active.split(TOGETHER):
        rows = directions[chosen]
        tangents = {
            f"model.{name}": rows[:, part]
            .view(len(rows), *model.get_parameter(name).shape)
            .to(model.get_parameter(name))
            for name, part in flat_slices(model).items()
        }
        size = max(1, micro_batch_size // len(chosen))
        for piece, (row, column) in _pieces(model, batch, size, progress, copies=6 * len(chosen)):
            along = partial(_along, partial(_logprobs_at, module, piece), parameters)
            changes[chosen[:, None], row, column] = torch.func.vmap(along)(tangents).to(changes)
    return changes


def _along(logprobs: Callable[[Vectors], Tensor], parameters: Vectors, tangents: Vectors) -> Float[Tensor, " K"]:
    return torch.func.jvp(logprobs, (parameters,), (tangents,))[1]


def _alone(part: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """The same numbers as the only ones of their memory, not copied where that can be."""
    part = part.detach()
    return torch.from_dlpack(part) if part.device.type in ("cpu", "cuda") else part.clone()


def _logprobs_at(module: _KeptLogprobs, piece: TokenBatch, parameters: Vectors) -> Float[Tensor, " K"]:
    return functional_call(module, parameters, (piece,))


def _tangent(parameter: Tensor, direction: Float[Tensor, " n"]) -> Tensor:
    return direction.view(parameter.shape).to(torch.promote_types(parameter.dtype, torch.float32))


def _forward_mode(logprobs: Callable[[Vectors], Tensor], parameters: Vectors, tangents: Vectors) -> Float[Tensor, " K"]:
    upcast = {name: p for name, p in parameters.items() if p.dtype != tangents[name].dtype}
    if not upcast:
        return _along(logprobs, parameters, tangents)
    with dual_level(), moving((p, tangents[name]) for name, p in upcast.items()):
        duals = {name: make_dual(p, tangents[name]) for name, p in parameters.items() if name not in upcast}
        return unpack_dual(logprobs(duals)).tangent


def _central_differences(
    logprobs: Callable[[Vectors], Tensor], parameters: Vectors, tangents: Vectors
) -> Float[Tensor, " K"]:
    """[log π(θ + h·d) − log π(θ − h·d)] / 2h, with h such that log π changes by about REACH."""
    norms = [nn.utils.get_total_norm(list(vectors.values())).item() for vectors in (parameters, tangents)]
    h = 1e-3 * norms[0] / norms[1]
    for _ in range(ATTEMPTS):
        ahead, behind = (
            logprobs({name: p.add(tangents[name], alpha=sign * h) for name, p in parameters.items()})
            for sign in (1, -1)
        )
        slopes = (ahead - behind) / (2 * h)
        reach = h * slopes.square().mean().sqrt().item()
        if reach == 0 or REACH / 2 <= reach <= REACH * 2:
            break
        h *= REACH / reach
    else:
        warnings.warn(
            f"central differences change log π by {reach:.1g}, not by about {REACH:g}: they are off", stacklevel=2
        )
    return slopes


def _pieces(
    model: nn.Module, batch: TokenBatch, micro_batch_size: int, progress: bool | Progress, *, copies: int
) -> Iterator[tuple[TokenBatch, tuple[Tensor, Tensor]]]:
    """Micro-batches, each with the rows and columns of its kept tokens in the batch.

    copies: of the logits, see `fitting_size`.
    """
    micro_batch_size = fitting_size(model, batch, micro_batch_size, copies=copies)
    start = batch.attention_mask.int().argmax(1)
    pieces = micro_batches(batch, micro_batch_size)
    for rows, piece in track(pieces, "gradients", progress, unit="micro-batches"):
        row, column = piece.response_mask.nonzero().unbind(1)
        yield piece, (rows[row], start[rows[row]] + column)


def _check(batch: TokenBatch, micro_batch_size: int) -> None:
    if micro_batch_size < 1:
        raise InputError(f"micro_batch_size is {micro_batch_size}; a forward pass needs a response; give at least 1")
    if batch.num_tokens == 0:
        raise InputError("response_mask keeps no token, so there is no gradient; give responses with sampled tokens")
