"""AdamW's saved state: finding it, reading it without executing it, and the metric that it defines on gradients."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradscope.errors import InputError, checked
from gradscope.policy.checkpoint import checkpoint_homes
from gradscope.policy.packed import is_packed, storage_name
from gradscope.policy.parameters import PART, flat_slices, float_parameters
from gradscope.policy.policy import Policy
from gradscope.policy.sharded.joining import VARIANTS
from gradscope.policy.sharded.layouts import find_moments, moments_at
from gradscope.policy.sharded.reading import has_moments, read_moments
from gradscope.runs import file_hash, load_tensors

Number = int | float
RATE = 1e-3
"""Learning rate of a step if none is known, that of the paper's Fig. 1."""


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of a parameter group."""

    learning_rate: Number = RATE
    weight_decay: Number = 0.0
    """Decoupled weight decay: subtracts learning rate × this × weight."""
    betas: tuple[Number, Number] = (0.9, 0.999)
    eps: Number = 1e-8


@dataclass(frozen=True)
class AdamWState:
    """AdamW's second moments, which define the metric of its update.

    A step on G, clipped to max_grad_norm by the factor k = min(1, max_grad_norm / (‖G‖ + 1e-6)), changes θ by

        Δ = −lr · m̂ ⊘ (√v̂ + eps),    v̂ = [β₂·v + (1 − β₂)·(k·G)²] / (1 − β₂^(step + 1)).

    G's contribution to Δ is lr·(1 − β₁)/(1 − β₁^(step + 1)) times k·G ⊘ (√v̂ + eps), which is linear in G if v̂ is fixed
    at the whole step's. So each G_a is measured as k·G_a ⊘ (√v̂ + eps), with one v̂ for all, and these add up like the
    G_a. Where parameters differ in lr·(1 − β₁), each is multiplied by its own over the largest. Momentum from earlier
    steps and weight decay belong to no token and are left out. Use a state that has taken many steps: with v = 0 the
    step is sign(G), and an entry where the G_a cancel contributes G_a / |G| for each of them, without bound.
    """

    exp_avg_sq: dict[str, Tensor]
    """v before the step, by parameter name. Parameters without an entry are not updated: their part of Δ is 0."""
    step: dict[str, int]
    """Steps taken so far, by parameter name."""
    settings: dict[str, AdamWSettings]
    """Those of each parameter's group, by parameter name."""
    max_grad_norm: Number | None = None
    """Clipping threshold of the gradient's norm before the step; None: no clipping."""

    @classmethod
    def from_state_dict(
        cls, model: nn.Module, state_dict: dict[str, Any], *, max_grad_norm: Number | None = None
    ) -> AdamWState:
        """Build the state from `optimizer.state_dict()`, with views of its tensors, which may be memory-mapped.

        The parameters are those of `optimizer_names`. Raises InputError for a variant of AdamW (see `group_settings`),
        and for moments that do not fit the parameters.
        """
        check_structure(state_dict)
        parameters, settings = dict(float_parameters(model)), group_settings(state_dict)
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        names = optimizer_names(model, state_dict)
        if len(names) != len(indices) or not all(name in parameters for name in names):
            raise InputError(
                f"the optimizer state has {len(indices)} parameters, this policy {len(parameters)}, or they have other "
                "names; give the state of the run that trained these parameters"
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
                    f"{tuple(parameters[name].shape)}; give the state of the run that trained these parameters"
                )
        for name, (lowest, highest) in value_ranges(moments).items():
            if not 0 <= lowest <= highest < math.inf or steps[name] < 0:
                raise InputError(
                    f"exp_avg_sq of {name} is negative, NaN or infinite, or its step is negative; give the state of a "
                    "sound run"
                )
        own = {name: settings[index] for name, index in zip(names, indices, strict=True)}
        return cls(moments, steps, own, max_grad_norm)

    def scale(self, model: nn.Module, gradient: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Return the metric's factors for the whole step's gradient G [P], flat in the order of `float_parameters`."""
        return self.turn_into_scale(model, gradient.clone())

    def turn_into_scale(self, model: nn.Module, gradient: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Overwrite the gradient [P] with its `scale`; the largest temporary is as long as one parameter."""
        slices = flat_slices(model)
        clip = self.clip_factor(square_norm(*(gradient[slices[name]] for name in self.exp_avg_sq)))
        reach = {name: own.learning_rate * (1 - own.betas[0]) for name, own in self.settings.items()}
        longest = max((reach[name] for name in self.exp_avg_sq), default=1.0)
        for name, part in slices.items():
            gradient[part] = self.scale_part(name, gradient[part], clip)
            if reach.get(name, longest) != longest:
                gradient[part] *= reach[name] / longest
        return gradient

    def clip_factor(self, square_norm: float) -> float:
        """Return the clipping factor k, from ‖G‖² over all parameters in this state."""
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (square_norm**0.5 + 1e-6))

    def scale_part(
        self, name: str, gradient: Float[Tensor, " p"], clip: float, rows: slice | None = None
    ) -> Float[Tensor, " p"]:
        """Return k ⊘ (√v̂ + eps) for a part of one parameter; zeros for a parameter without state.

        gradient: these entries of the whole step's G. clip: k, from `clip_factor`. rows: which entries these are of the
        flattened parameter; None: all.
        """
        scale = torch.zeros_like(gradient)
        if name not in self.exp_avg_sq:
            return scale
        moment = self.exp_avg_sq[name].flatten()
        parts = (t.split(PART) for t in (scale, gradient, moment if rows is None else moment[rows]))
        beta, eps = self.settings[name].betas[1], self.settings[name].eps
        for out, own, old in zip(*parts, strict=True):
            new = beta * old.to(own) + (1 - beta) * (clip * own).square()
            corrected = new / (1 - beta ** (self.step[name] + 1))
            out.copy_(clip / (corrected.sqrt() + eps))
        return scale


def square_norm(*vectors: Float[Tensor, " _"]) -> float:
    """Return Σ ‖vector‖² in float64, processed in parts of `PART` entries."""
    return sum_of_squares(part for vector in vectors for part in vector.split(PART))


def sum_of_squares(parts: Iterable[Tensor]) -> float:
    """Return Σ ‖part‖² in float64; 0 without parts. Synchronises with a device once."""
    squares = [part.double().square().sum() for part in parts]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().item() if squares else 0.0


def value_ranges(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest entry of each vector, without a temporary.

    Both are NaN if a vector holds a NaN, and (0, 0) if it is empty. Synchronises with a device once.
    """
    found = [torch.stack(tensor.aminmax()) if tensor.numel() else torch.zeros(2) for tensor in tensors.values()]
    rows = torch.stack([pair.double().to(found[0].device) for pair in found]).tolist() if found else []
    return {name: (lowest, highest) for name, (lowest, highest) in zip(tensors, rows, strict=True)}


def group_settings(state_dict: dict[str, Any]) -> dict[Any, AdamWSettings]:
    """Return the settings of each parameter's group, by its number in AdamW's `state_dict()`.

    If a schedule has ended, with a rate of 0 in every group, these are the rates that it began with or, if unknown,
    `RATE`. Raises InputError for a variant whose steps are not AdamW's.
    """
    groups = state_dict["param_groups"]
    for group in groups:
        odd = [made for flag, (made, plain) in VARIANTS.items() if bool(group.get(flag, plain)) != plain]
        if not group.get("decoupled_weight_decay", True) and float(group.get("weight_decay", 0.0)):
            odd.append("decay inside the gradient")
        if "decoupled_weight_decay" in group and "amsgrad" not in group:
            odd.append("RAdam's or NAdam's steps")
        if odd:
            raise InputError(f"the state is not plain AdamW's ({odd[0]}); give a state of plain AdamW")
    rates = [float(group["lr"]) for group in groups]
    if not any(rates):
        began = [float(group.get("initial_lr", 0.0)) for group in groups]
        rates = [rate if 0 < rate < math.inf else RATE for rate in began]
    found = {}
    for group, rate in zip(groups, rates, strict=True):
        decay, betas = float(group.get("weight_decay", 0.0)), tuple(map(float, group["betas"]))
        found |= dict.fromkeys(group["params"], AdamWSettings(rate, decay, betas, float(group["eps"])))
    return found


def optimizer_names(model: nn.Module, state_dict: dict[str, Any]) -> list[str]:
    """Return the measured parameters' names in the order in which the saved AdamW received them.

    Names saved with the state are used if there are any. Otherwise a single group is in the model's order, and of two
    groups, the first holds the parameters that transformers' Trainer decays. Prefixes added by trainers or wrappers are
    stripped. Raises InputError if the groups' sizes do not match.
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
    """Raise InputError unless this has the structure of AdamW's `state_dict()`."""
    try:
        for group in state_dict["param_groups"]:
            _ = [float(value) for value in (group["lr"], group["eps"], *group["betas"])], dict.fromkeys(group["params"])
            _ = [float(group.get(name, 0.0)) for name in ("weight_decay", "initial_lr")]
            _ = [bool(group.get(name, False)) for name in (*VARIANTS, "decoupled_weight_decay")]
            _ = [name.removeprefix("") for name in group.get("param_names", ())]
            _ = dict(enumerate(group["betas"]))[1]
        for moments in state_dict["state"].values():
            _ = int(moments["step"]), moments["exp_avg"].shape, moments["exp_avg_sq"].shape
            if packed := [name for name in ("exp_avg", "exp_avg_sq") if is_packed(moments[name])]:
                raise TypeError(f"{packed[0]} is packed in few bits, {storage_name(moments[packed[0]])}")
        if not state_dict["param_groups"]:
            raise LookupError("param_groups is empty")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(
            f"the optimizer state is not AdamW's ({type(error).__name__}: {error}); give the state_dict() of an AdamW"
        ) from error


OPTIMIZER = "optimizer.pt"
"""File name of a saved optimizer for transformers' Trainer, TRL and gradscope's trainer."""
KNOWN = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
"""AdamW's tensors per parameter; an optimizer with others is not AdamW."""


@checked
def read_adamw_state(
    policy: Policy, path: str | Path | None = None, *, max_grad_norm: int | float | None = None
) -> AdamWState | None:
    """Read AdamW's second moments of the measured parameters; None if none were saved.

    path: the file, or the folder with optimizer.pt or the state in shards; None: the policy's folder, which also gives
    None for a merged adapter, whose parameters no longer exist. max_grad_norm: the run's gradient clipping threshold,
    which the state does not record; None: no clipping.

    Raises InputError for a missing path, an unreadable file, another optimizer, or a state that does not fit the
    policy.
    """
    file = find_policy_state(policy) if path is None else find_optimizer_file(path)
    if file is None:
        if path is not None:
            raise _no_state(path)
        return None
    state = read_state(file)
    names = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    if path is None and policy.params == "all" and any(".lora_" in name for name in names):  # a merged adapter's
        return None
    try:
        return AdamWState.from_state_dict(policy.model, state, max_grad_norm=max_grad_norm)
    except InputError as error:
        raise InputError(error.reason, path=file) from error


def find_optimizer_file(path: str | Path) -> Path | None:
    """Return a checkpoint's optimizer: the path, optimizer.pt in it (or above `adapter`), or a folder of shards."""
    path = Path(path)
    if os.path.isfile(path):  # Path raises for names that are too long
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
    """Read AdamW's state_dict from a file of `torch.save` or from shards, without executing anything in it.

    given: the file, the folder of the shards, or a checkpoint's folder with either.
    Tensors are memory-mapped; only torch's old format, which does not support this, is read as a whole. Writing into
    the tensors changes a private copy, never the file. Raises InputError if there is none, or for another optimizer's.
    """
    if (path := find_optimizer_file(given)) is None:
        raise _no_state(given)
    shards = moments_at(path)
    state = load_tensors(path, mapped=True) if shards is None else read_moments(shards)
    try:
        check_structure(state)
    except InputError as error:
        raise InputError(error.reason, path=path) from error
    if extra := sorted({name for moments in state["state"].values() for name in moments} - KNOWN):
        raise InputError(f"the state holds {extra[0]}, which AdamW does not have; give a state of AdamW", path=path)
    return state


def _no_state(path: Path | str) -> InputError:
    return InputError(f"{path} is not a file and holds no {OPTIMIZER} or shards; give AdamW's state_dict")


def optimizer_hash(path: Path) -> str:
    """Return the SHA-256 of the optimizer's file, or of the names and hashes of all its shards."""
    path = find_optimizer_file(path) or path
    if (shards := moments_at(path)) is None:
        return file_hash(path)
    told = "".join(f"{file.name} {file_hash(file)}\n" for file in shards.files if file.is_file())
    return hashlib.sha256(told.encode()).hexdigest()
