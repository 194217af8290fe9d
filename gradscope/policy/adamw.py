"""AdamW's state beside a checkpoint: found, read without running it, and the metric in which it sees a gradient."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.policy.checkpoint import checkpoint_homes
from gradscope.policy.parameters import PART, flat_slices, float_parameters
from gradscope.policy.policy import Policy
from gradscope.policy.sharded.layouts import find_moments, moments_at
from gradscope.policy.sharded.reading import has_moments, read_moments
from gradscope.runs import file_hash, load_tensors

Number = int | float


@dataclass(frozen=True)
class AdamWState:
    """AdamW's second moments, which define the metric in which its update sees a gradient.

    One step, with all of G clipped to max_grad_norm by the factor k = min(1, max_grad_norm / (‖G‖ + 1e-6)), moves by

        Δ = −lr · m̂ ⊘ (√v̂ + eps),    v̂ = [β₂·v + (1 − β₂)·(k·G)²] / (1 − β₂^(step + 1)).

    G's own part of Δ is lr·(1 − β₁)/(1 − β₁^(step + 1)) times k·G ⊘ (√v̂ + eps), which is linear in G once v̂ is frozen
    at the whole step's. So each G_a is measured as k·G_a ⊘ (√v̂ + eps), one v̂ for all; these add up as the G_a do.
    Momentum of earlier steps and weight decay belong to no token and are left out.
    Give a state that has taken many steps: with v = 0 the step is sign(G), and an entry where the G_a happen to cancel
    counts for each of them as G_a / |G|, without bound.
    """

    exp_avg_sq: dict[str, Tensor]
    """v before the step, by parameter name. A parameter without an entry is not updated: its part of Δ is 0."""
    step: dict[str, int]
    """Steps taken so far, by parameter name."""
    beta2: float
    eps: float
    max_grad_norm: Number | None = None
    """Clipping threshold of the gradient's norm before the step; None: no clipping."""

    @classmethod
    def from_state_dict(
        cls,
        model: nn.Module,
        state_dict: dict[str, Any],
        *,
        names: Sequence[str] | None = None,
        max_grad_norm: Number | None = None,
    ) -> AdamWState:
        """Return the state saved by `optimizer.state_dict()`: views of its tensors, which may be mapped from a file.

        names: of the parameters in the order in which the optimizer was given them; None: what `optimizer_names` finds.
        Raises InputError for parameter groups that differ in lr, betas or eps (they may in weight decay, which is none
        of the metric's), for amsgrad, and for moments that do not fit the parameters.
        """
        check_structure(state_dict)
        groups, parameters = state_dict["param_groups"], dict(float_parameters(model))
        if len({(*map(float, (g["lr"], *g["betas"], g["eps"])), bool(g.get("amsgrad", False))) for g in groups}) != 1:
            raise InputError(
                "parameter groups differ in lr, betas or eps; one metric needs one of each; measure them apart"
            )
        if groups[0].get("amsgrad") or not groups[0].get("decoupled_weight_decay", True):
            raise InputError(
                "the state is not plain AdamW's (amsgrad, or decay inside the gradient); give one of AdamW"
            )
        indices = [i for group in groups for i in group["params"]]
        names = list(names or optimizer_names(model, state_dict))
        if len(names) != len(indices) or not all(name in parameters for name in names):
            raise InputError(
                f"the optimizer state is of {len(indices)} parameters; {len(names)} names are given, or one is not the "
                "model's; give the names in the order in which the optimizer got them"
            )
        moments, steps = {}, {}
        for name, index in zip(names, indices, strict=True):
            state = state_dict["state"].get(index, {})
            unknown = parameters[name].new_zeros(()).expand(parameters[name].shape)
            moments[name] = state.get("exp_avg_sq", unknown).detach()
            steps[name] = int(state.get("step", 0))
            if moments[name].shape != parameters[name].shape:
                raise InputError(
                    f"exp_avg_sq of {name} has shape {tuple(moments[name].shape)}, the parameter "
                    f"{tuple(parameters[name].shape)}; give the names in the order in which the optimizer got them"
                )
        for name, (lowest, highest) in value_ranges(moments).items():
            if not 0 <= lowest <= highest < math.inf or steps[name] < 0:
                raise InputError(
                    f"exp_avg_sq of {name} is negative or NaN, infinite, or of a negative step; give the state of a "
                    "run that is sound"
                )
        return cls(moments, steps, float(groups[0]["betas"][1]), float(groups[0]["eps"]), max_grad_norm)

    def scale(self, model: nn.Module, gradient: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Return k ⊘ (√v̂ + eps) for the whole step's gradient G [P], flat in the order of `float_parameters`."""
        return self.turn_into_scale(model, gradient.clone())

    def turn_into_scale(self, model: nn.Module, gradient: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Overwrite the gradient [P] with its `scale`; the largest temporary is as long as one parameter."""
        slices = flat_slices(model)
        clip = self.clip_factor(square_norm(*(gradient[slices[name]] for name in self.exp_avg_sq)))
        for name, part in slices.items():
            gradient[part] = self.scale_part(name, gradient[part], clip)
        return gradient

    def clip_factor(self, square_norm: float) -> float:
        """Return the clipping factor k, from ‖G‖² over all parameters in this state."""
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (square_norm**0.5 + 1e-6))

    def scale_part(
        self, name: str, gradient: Float[Tensor, " p"], clip: float, rows: slice | None = None
    ) -> Float[Tensor, " p"]:
        """Return k ⊘ (√v̂ + eps) for a part of one parameter; zeros for a parameter without state.

        gradient: those entries of the whole step's G. clip: k, of `clip_factor`. rows: which entries they are of the
        parameter laid flat; None: all.
        """
        scale = torch.zeros_like(gradient)
        if name not in self.exp_avg_sq:
            return scale
        moment = self.exp_avg_sq[name].flatten()
        parts = (t.split(PART) for t in (scale, gradient, moment if rows is None else moment[rows]))
        for out, own, old in zip(*parts, strict=True):
            new = self.beta2 * old.to(own) + (1 - self.beta2) * (clip * own).square()
            corrected = new / (1 - self.beta2 ** (self.step[name] + 1))
            out.copy_(clip / (corrected.sqrt() + self.eps))
        return scale


def square_norm(*vectors: Float[Tensor, " _"]) -> float:
    """Return Σ ‖vector‖² in float64, processed in parts of `PART` entries."""
    return sum_of_squares(part for vector in vectors for part in vector.split(PART))


def sum_of_squares(parts: Iterable[Tensor]) -> float:
    """Return Σ ‖part‖² in float64 over the parts in turn; 0 if there are none. Synchronises with a device once."""
    squares = [part.double().square().sum() for part in parts]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().item() if squares else 0.0


def value_ranges(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest entry of each vector, without a temporary.

    Both are NaN if a vector holds a NaN, and (0, 0) if it is empty. Synchronises with a device once.
    """
    found = [torch.stack(tensor.aminmax()) if tensor.numel() else torch.zeros(2) for tensor in tensors.values()]
    rows = torch.stack([pair.double().to(found[0].device) for pair in found]).tolist() if found else []
    return {name: (lowest, highest) for name, (lowest, highest) in zip(tensors, rows, strict=True)}


def optimizer_names(model: nn.Module, state_dict: dict[str, Any]) -> list[str]:
    """Return the measured parameters' names in the order in which the saved AdamW received them.

    The names saved with the state are used if there are any. Otherwise one group is taken in the model's order; of two
    groups, the first holds the parameters that transformers' Trainer decays and the second the others. Prefixes that a
    trainer or a wrapper adds are stripped. Raises InputError if the groups' sizes do not match.
    """
    groups, parameters = state_dict["param_groups"], [name for name, _ in float_parameters(model)]
    if saved := [name for group in groups for name in group.get("param_names", ())]:
        return [plain_name(name, set(parameters)) for name in saved]
    if len(groups) == 1:
        return parameters
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    split = [[n for n in parameters if n in decayed], [n for n in parameters if n not in decayed]]
    given, wanted = [len(group["params"]) for group in groups], [len(names) for names in split]
    if given != wanted:
        raise InputError(
            f"the optimizer state has groups of {' and '.join(map(str, given))} parameters, this policy {wanted[0]} "
            f"with decay and {wanted[1]} without; give the state of the run that trained these parameters"
        )
    return split[0] + split[1]


def plain_name(name: str, known: set[str]) -> str:
    for prefix in ("module.", "_orig_mod.", "base_model.model."):
        if name not in known:
            name = name.removeprefix(prefix)
    return name


def check_structure(state_dict: Any) -> None:
    """Raise InputError unless this is built as AdamW's `state_dict()` is."""
    try:
        for group in state_dict["param_groups"]:
            _ = [float(value) for value in (group["lr"], group["eps"], *group["betas"])], dict.fromkeys(group["params"])
            _ = [float(group.get(name, 0.0)) for name in ("weight_decay", "initial_lr")]
            _ = [bool(group.get(name, False)) for name in ("amsgrad", "decoupled_weight_decay")]
            _ = [name.removeprefix("") for name in group.get("param_names", ())]
            _ = dict(enumerate(group["betas"]))[1]
        for moments in state_dict["state"].values():
            _ = int(moments["step"]), moments["exp_avg"].shape, moments["exp_avg_sq"].shape
        if not state_dict["param_groups"]:
            raise LookupError("param_groups is empty")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(
            f"the optimizer state is not AdamW's ({type(error).__name__}: {error}); give what its state_dict() returned"
        ) from error


OPTIMIZER = "optimizer.pt"
"""The name of a saved optimizer beside the weights: transformers' Trainer, TRL and gradscope's trainer agree on it."""
KNOWN = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
"""Tensors that AdamW keeps per parameter; an optimizer that keeps others is not AdamW."""


@checked
def read_adamw_state(
    policy: Policy, path: str | Path | None = None, *, max_grad_norm: int | float | None = None
) -> AdamWState | None:
    """Read AdamW's second moments of the measured parameters, by name; None if none were saved.

    path: the file, or the folder that holds optimizer.pt or the state in shards; None: the folder of the policy. Then
    None is also returned for an adapter that was merged, whose state is of parameters that the merged model has not.
    max_grad_norm: the run's clipping of the gradient, which no state tells; None: off.

    Raises InputError for a path that is not there, a file that cannot be read or is another optimizer's, and a state
    that does not fit the policy.
    """
    file = find_policy_state(policy) if path is None else find_optimizer_file(path)
    if file is None:
        if path is not None:
            raise InputError(f"{path} is no file and holds no {OPTIMIZER}, nor one in shards; give AdamW's state_dict")
        return None
    state = read_optimizer_file(file)
    if path is None and policy.params == "all" and _is_of_an_adapter(state):
        return None
    try:
        return AdamWState.from_state_dict(policy.model, state, max_grad_norm=max_grad_norm)
    except InputError as error:
        raise InputError(error.reason, path=file) from error


def find_optimizer_file(path: str | Path) -> Path | None:
    """Return the optimizer file of a checkpoint: the path itself, optimizer.pt in the folder (above an `adapter`
    folder), or else the folder that holds the state in shards (torch.distributed.checkpoint's, verl's, DeepSpeed's).
    """
    path = Path(path)
    if os.path.isfile(path):  # of a name that is too long, Path raises
        return path
    homes = checkpoint_homes(path)
    whole = (home / OPTIMIZER for home in homes if os.path.isfile(home / OPTIMIZER))
    shards = (found.folder for home in homes for found in find_moments(home) if has_moments(found))
    return next(whole, None) or next(shards, None)


def find_policy_state(policy: Policy) -> Path | None:
    """Return the optimizer file saved with a policy; None for a merged adapter, whose parameters no longer exist."""
    merged = policy.base is not None and policy.params == "all"
    return None if merged or not policy.path else find_optimizer_file(policy.path)


def read_state(given: Path | str) -> dict[str, Any]:
    """Read the AdamW state_dict from a file or a checkpoint's folder. Raises InputError if there is none."""
    if (file := find_optimizer_file(given)) is None:
        raise InputError(f"{given} is no file and holds no {OPTIMIZER}, nor one in shards; give AdamW's state_dict")
    return read_optimizer_file(file)


def read_optimizer_file(path: Path) -> dict[str, Any]:
    """Read the AdamW state_dict written by `torch.save`, or from shards; nothing in the files is executed.

    path: the file, the folder of the shards, or that of a checkpoint which holds either.
    The tensors stay in the file, mapped: memory holds of them what is being read. Only torch's old format, which cannot
    be mapped, is read as a whole. Writing into them changes a private copy, never the file.
    """
    path = find_optimizer_file(path) or path
    shards = moments_at(path)
    state = load_tensors(path, mapped=True) if shards is None else read_moments(shards)
    try:
        check_structure(state)
    except InputError as error:
        raise InputError(error.reason, path=path) from error
    if extra := sorted({name for moments in state["state"].values() for name in moments} - KNOWN):
        raise InputError(f"the state holds {extra[0]}, which AdamW does not keep; give one of AdamW's", path=path)
    return state


def optimizer_hash(path: Path) -> str:
    """Return the SHA-256 of the optimizer's file, or of the names and hashes of all its shards."""
    path = find_optimizer_file(path) or path
    if (shards := moments_at(path)) is None:
        return file_hash(path)
    told = "".join(f"{file.name} {file_hash(file)}\n" for file in shards.files if file.is_file())
    return hashlib.sha256(told.encode()).hexdigest()


def _is_of_an_adapter(state: dict[str, Any]) -> bool:
    names = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    return any(".lora_" in name for name in names)
