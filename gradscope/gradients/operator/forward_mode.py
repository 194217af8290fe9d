"""J·v by forward-mode differentiation: the first-order change of each token's log π along a direction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call

from gradscope.errors import InputError, first_line
from gradscope.gradients.frozen import measuring
from gradscope.gradients.operator.vectors import Vectors, vector_bytes
from gradscope.objective import LOGPROB, Quantity, kept_numbers, make_quantity, most_logits
from gradscope.policy import is_upcast, moving
from gradscope.rollouts import TokenBatch

Tangents = dict[str, Tensor]
"""A tensor of each parameter's shape, by its name in _KeptNumbers."""
Derivative = Literal["forward mode", "central differences"]
Pieces = Callable[[int, int], Iterator[tuple[Int[Tensor, " k"], TokenBatch]]]
"""(most responses, copies of the logits) → micro-batches, each with the indices of its tokens among all K."""

REACH = 1e-2
"""Root mean square change of log π, in nats, at which central differences are taken: where the errors from rounding (in
float32) and from curvature are about equal."""
BACKWARD, FORWARD_MODE = 2.0, 3.0
"""Cost in forward passes; 1.8 and 3.1 were measured at 32 M parameters on one core."""
TOGETHER = 8
"""Most directions differentiated at once (on half as many responses), so that they share one forward pass."""
TANGENTS = 1 << 28
"""Bytes of tangents above which directions are taken one by one: the copies would cost too much memory."""
ATTEMPTS = 8
"""Most step sizes tried to reach that change within a factor of 2."""


@dataclass(frozen=True, eq=False)
class Changes:
    """First-order changes of every kept token when the parameters move along each vector; in nats, on the CPU."""

    how: Derivative
    of: tuple[Quantity, ...]
    values: Float[Tensor, "R K Q"]

    def __getitem__(self, of: Quantity | str) -> Float[Tensor, "R K"]:
        """Return the changes of a quantity that was asked for."""
        return self.values[..., self.of.index(make_quantity(of))]

    @property
    def logprob(self) -> Float[Tensor, "R K"] | None:
        """Changes of log π; None if not asked for."""
        return self["logprob"] if LOGPROB in self.of else None

    @property
    def entropy(self) -> Float[Tensor, "R K"] | None:
        """Changes of the entropy; None if not asked for."""
        return self["entropy"] if make_quantity("entropy") in self.of else None


def changes_along(
    kept: KeptNumbers, vectors: Vectors, batch: TokenBatch, micro_batch: int, pieces: Pieces, *, exact: bool = False
) -> tuple[Float[Tensor, "R K Q"], Derivative]:
    """Differentiate the kept tokens' quantities along each vector; return the derivatives (on the CPU) and their kind.

    Raises:
        InputError: the model does not support forward mode, and its weights are upcast on use or `exact` is set.
    """
    model, arguments = kept.model, (kept, vectors, batch.num_tokens, micro_batch, pieces)
    with torch.inference_mode(False), torch.no_grad(), measuring(model, batch.width), _still_padding(model):
        _load_rules()
        try:
            if _fits_together(model, vectors, batch):
                with suppress(NotImplementedError, RuntimeError):  # unsupported by vmap; or out of memory, retried
                    return _changes_together(*arguments), "forward mode"
            return _changes(_forward_mode, *arguments), "forward mode"
        except torch.OutOfMemoryError:
            raise
        # Operations without forward mode raise either error; a model that does not run at all will raise again.
        except (NotImplementedError, RuntimeError) as error:
            reason = first_line(error)
            if exact:
                raise InputError(
                    f"the model does not support forward mode ({reason}), and central differences are too coarse here; "
                    "load it with operations that have forward derivatives"
                ) from error
            if is_upcast(model):  # perturbed weights would be whole float32 copies
                raise InputError(
                    f"the model does not support forward mode ({reason}), and central differences need float32 "
                    "weights; load the policy in float32"
                ) from error
            warnings.warn(f"no forward mode ({reason}); using central differences instead", stacklevel=3)
            return _changes(_central_differences, *arguments), "central differences"


@cache
def _load_rules() -> None:
    """Have torch load its rules of forward mode, which it scripts itself, and deprecates."""
    with warnings.catch_warnings(), dual_level():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is ")
        make_dual(torch.zeros(1), torch.zeros(1))


@contextmanager
def _still_padding(model: nn.Module) -> Iterator[None]:
    """Keep the embedding of the padding id fixed in every direction, since no gradient flows there."""
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
    """Raise InputError for weights below float32, measured or not, since activations have the same precision."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < 32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise InputError(f"{name} is {dtype}, where changes would be mostly rounding; load the policy in float32")


def refuse_narrow_arithmetic(model: nn.Module) -> None:
    """Raise InputError for arithmetic below float32; weights that are upcast on use count as float32."""
    if not is_upcast(model):
        refuse_narrow_weights(model)


class KeptNumbers(nn.Module):
    """A module that returns Q quantities of each kept token, for `functional_call`."""

    def __init__(self, model: nn.Module, quantities: Sequence[Quantity]) -> None:
        super().__init__()
        self.model, self.quantities = model, tuple(quantities)

    @property
    def copies(self) -> int:
        """Tensors of the size of the logits that exist at once."""
        return max(6, *(quantity.copies for quantity in self.quantities))

    def forward(self, piece: TokenBatch) -> Float[Tensor, "K Q"]:
        return kept_numbers(self.model, piece, self.quantities)


def _changes(
    differentiate: Callable[[Callable[[Tangents], Tensor], Tangents, Tangents], Tensor],
    module: KeptNumbers,
    vectors: Vectors,
    num_tokens: int,
    micro_batch: int,
    pieces: Pieces,
) -> Float[Tensor, "R K Q"]:
    """Differentiate along each vector, piece by piece."""
    parameters = {f"model.{name}": module.model.get_parameter(name) for name in vectors.slices}
    changes = torch.zeros(len(vectors), num_tokens, len(module.quantities), dtype=vectors.rows.dtype)
    for r, vector in enumerate(vectors.rows):
        if not vector.any():
            continue
        # A tangent at an offset in its storage would be copied, so each gets its own.
        parts = {f"model.{name}": _alone(vector[part]) for name, part in vectors.slices.items()}
        kinds = {name: torch.promote_types(p.dtype, torch.float32) for name, p in parameters.items()}
        tangents = {name: parts[name].view(p.shape).to(p.device, kinds[name]) for name, p in parameters.items()}
        for places, piece in pieces(micro_batch, module.copies):
            numbers = partial(_numbers_at, module, piece)
            changes[r, places] = differentiate(numbers, parameters, tangents).to(changes)
    return changes


def _fits_together(model: nn.Module, vectors: Vectors, batch: TokenBatch) -> bool:
    count = min(TOGETHER, int(vectors.rows.any(1).sum()))
    if int(batch.response_mask.sum(1).max()) > most_logits(model, 6):  # one long response is enough at a time
        return False
    return count > 1 and not is_upcast(model) and count * vector_bytes(model) <= TANGENTS


def _changes_together(
    module: KeptNumbers, vectors: Vectors, num_tokens: int, micro_batch: int, pieces: Pieces
) -> Float[Tensor, "R K Q"]:
    """Do `_changes` in forward mode along several vectors at once."""
    parameters = {f"model.{name}": module.model.get_parameter(name) for name in vectors.slices}
    changes = torch.zeros(len(vectors), num_tokens, len(module.quantities), dtype=vectors.rows.dtype)
    active = vectors.rows.any(1).nonzero()[:, 0].cpu()
    for chosen in active.split(TOGETHER):
        rows = vectors.rows[chosen]
        tangents = {
            name: rows[:, part].view(len(rows), *parameters[name].shape).to(parameters[name])
            for name, part in ((f"model.{name}", part) for name, part in vectors.slices.items())
        }
        for places, piece in pieces(max(1, micro_batch // 2), module.copies * len(chosen)):
            along = partial(_along, partial(_numbers_at, module, piece), parameters)
            changes[chosen[:, None], places] = torch.func.vmap(along)(tangents).to(changes)
    return changes


def _along(numbers: Callable[[Tangents], Tensor], parameters: Tangents, tangents: Tangents) -> Float[Tensor, "K Q"]:
    return torch.func.jvp(numbers, (parameters,), (tangents,))[1]


def _alone(part: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """Return the same values in their own storage, without a copy if possible."""
    part = part.detach()
    return torch.from_dlpack(part) if part.device.type in ("cpu", "cuda") else part.clone()


def _numbers_at(module: KeptNumbers, piece: TokenBatch, parameters: Tangents) -> Float[Tensor, "K Q"]:
    return functional_call(module, parameters, (piece,))


def _forward_mode(
    numbers: Callable[[Tangents], Tensor], parameters: Tangents, tangents: Tangents
) -> Float[Tensor, "K Q"]:
    upcast = {name: p for name, p in parameters.items() if p.dtype != tangents[name].dtype}
    # Dual numbers, not torch.func, which refuses the hooks by which inputs require gradients under checkpointing.
    with dual_level(), moving((p, tangents[name]) for name, p in upcast.items()):
        duals = {name: make_dual(p, tangents[name]) for name, p in parameters.items() if name not in upcast}
        return unpack_dual(numbers(duals)).tangent


def _central_differences(
    numbers: Callable[[Tangents], Tensor], parameters: Tangents, tangents: Tangents
) -> Float[Tensor, "K Q"]:
    """Compute [log π(θ + h·d) − log π(θ − h·d)] / 2h, with h such that log π changes by about REACH."""
    norms = [nn.utils.get_total_norm(list(vectors.values())).item() for vectors in (parameters, tangents)]
    h = 1e-3 * norms[0] / norms[1]
    for _ in range(ATTEMPTS):
        ahead, behind = (
            numbers({name: p.add(tangents[name], alpha=sign * h) for name, p in parameters.items()}) for sign in (1, -1)
        )
        slopes = (ahead - behind) / (2 * h)
        reach = h * slopes.square().mean().sqrt().item()
        if reach == 0 or REACH / 2 <= reach <= REACH * 2:
            break
        h *= REACH / reach
    else:
        warnings.warn(
            f"central differences change log π by {reach:.1g}, not {REACH:g}, and may be inaccurate", stacklevel=2
        )
    return slopes
