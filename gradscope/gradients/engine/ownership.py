"""Assignment of every parameter to exactly one rule, or to the general path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from gradscope.errors import InputError
from gradscope.gradients.hooks import first_tensor, forward_hooks
from gradscope.policy import Policy, arithmetic_dtype, float_parameters, replaced_forward, takes

SEEN = 64
"""Positions at which the probe keeps a norm's values, and at which prefix and whole sequence are compared."""

Rule = Literal["linear", "conv1d", "diagonal", "embedding"]


@dataclass(frozen=True)
class Ownership:
    """The assignment of a model's parameters to ways of measuring them."""

    rules: dict[str, Rule]
    """Module name → the rule that measures its parameters."""
    tied: tuple[str, str] | None
    """(embedding, head) with a tied table, if rules cover both; their cross term counts too."""
    embedding_scale: dict[str, float]
    """Embedding's name → factor on its rows (1 for a plain nn.Embedding)."""
    general: dict[str, str]
    """Parameter name → module name, for parameters without a rule, which take one autograd gradient per token."""


@dataclass
class _Visits:
    """The probe's record of a module that owns parameters."""

    calls: int = 0
    in_head: set[bool] = field(default_factory=set)
    late: bool = False
    """Whether it was called in the last block or after it."""
    simple: bool = True
    """Whether it was called with a single tensor only."""
    by_row: bool = True
    """Whether it was always called on rows of vectors, never on a single vector."""
    untouched: bool = True
    """Whether its inputs and outputs were never modified in place afterwards."""
    inputs: Tensor | None = None
    """Input of the first call of an embedding or norm; for a norm, only the first positions."""
    output: Tensor | None = None
    """Output of such a module's last call, at the same positions."""
    pending: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors not yet checked for in-place changes, with their versions."""

    def check_untouched(self) -> None:
        """Record whether the pending tensors were modified in place, and free them."""
        self.untouched &= all(tensor._version == version for tensor, version in self.pending)
        self.pending.clear()


@dataclass(frozen=True)
class Probe:
    """Record of one forward pass over a sequence [n]."""

    visits: dict[str, _Visits]
    """Name of a module that owns parameters → its record."""
    hidden: Tensor | None
    """Hidden states [n, d] at the head's input; None if the model has no separate body."""


def check_prefixes(policy: Policy, ids: Int[Tensor, " n"], whole: Float[Tensor, "n d"] | None = None) -> None:
    """Raise InputError unless a prefix of the sequence ids [n] has the same hidden states alone as within the whole.

    This is what "decoder-only" means here, and why a token can be measured on its prefix. The prefix is the first half
    or, for a long sequence, the first positions. whole: the hidden states of the sequence, if known.
    """
    half = max(1, min(len(ids) // 2, SEEN))
    with torch.no_grad():
        if whole is None:
            whole = policy.model.base_model(input_ids=ids[None], use_cache=False)[0][0]
        whole = whole[:half].double()
        alone = policy.model.base_model(input_ids=ids[None, :half], use_cache=False)[0][0].double()
    if not (whole.isfinite().all() and alone.isfinite().all()):
        raise InputError(
            f"the policy's hidden states are NaN or infinite on a sequence of {len(ids)} tokens; load a sound "
            "checkpoint, or another --dtype"
        )
    tolerance = 1e-3 if policy.dtype in (torch.float32, torch.float64) else 0.1
    change = ((whole - alone).norm() / whole.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
    if not change <= tolerance:
        raise InputError(
            f"{type(policy.model).__name__} changes hidden states when later tokens are added (by {change:.1e}): "
            "it is not decoder-only, or its rotary embedding depends on the length; give a causal model, or rollouts "
            "within the context it was trained on"
        )


def find_ownership(model: nn.Module, blocks: nn.ModuleList, probe: Probe) -> Ownership:
    """Find the rule for every module that owns parameters, by its type and by one forward pass.

    If only some parameters are measured (`measure_only`), only these are claimed.

    A module that is not exactly what the rule expects (a subclass, a parametrisation, an input modified in place after
    use, a table shared in an unknown way) loses its rule, and its parameters take the general path.
    """
    visits = probe.visits
    measured = {id(p): name for name, p in float_parameters(model)}
    modules = {name: m for name, m in model.named_modules() if any(id(p) in measured for p in m.parameters(False))}
    # A rule measures all of a module's own parameters by its calls, but a block's call is not recorded as such.
    apart = set(blocks)
    whole = {n: m for n, m in modules.items() if m not in apart and all(id(p) in measured for p in m.parameters(False))}
    rules = {name: rule for name, m in whole.items() if (rule := _find_rule(m, visits[name]))}
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    tied = None
    for sharing in (names for names in owners.values() if len(names) > 1):
        pair = _tie(sharing, modules, rules, visits)
        if pair and tied is None:
            tied = pair
        else:
            for name in sharing:
                rules.pop(name, None)
    # If one user of a shared table lost its rule, the table takes the general path.
    if tied and not all(name in rules for name in tied):
        for name in tied:
            rules.pop(name, None)
        tied = None
    general = {}
    for key, name in measured.items():
        if not any(owner in rules for owner in owners[key]):
            general[name] = name.rpartition(".")[0]
    scales = {n: _embedding_scale(modules[n], visits[n]) for n, rule in rules.items() if rule == "embedding"}
    ownership = Ownership(rules, tied, scales, general)
    check_ownership(model, ownership)
    return ownership


def check_ownership(model: nn.Module, ownership: Ownership) -> None:
    """Raise RuntimeError unless each measured parameter is claimed once (a tied table by embedding and head)."""
    counts: dict[int, int] = defaultdict(int)
    for name in ownership.rules:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            counts[id(parameter)] += 1
    for name in ownership.general:
        counts[id(model.get_parameter(name))] += 1
    if ownership.tied:
        counts[id(model.get_submodule(ownership.tied[1]).weight)] -= 1
    measured = {id(parameter) for _, parameter in float_parameters(model)}
    for name, parameter in model.named_parameters():
        wanted = 1 if id(parameter) in measured else 0
        if counts[id(parameter)] != wanted:
            raise RuntimeError(f"parameter {name} is claimed {counts[id(parameter)]} times, not {wanted}")


def probe_model(model: nn.Module, blocks: nn.ModuleList, input_ids: Int[Tensor, " n"]) -> Probe:
    """Run and record one forward pass, freeing each block's tensors once the next block is done."""
    visits: dict[str, _Visits] = defaultdict(_Visits)
    names = dict.fromkeys(name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False)))
    modules = dict(model.named_modules())
    looked_at = {name for name in names if _has_slopes(modules[name]) or isinstance(modules[name], nn.Embedding)}
    known = {id(m): name for name, m in modules.items()}
    in_order = {known[id(block)]: index for index, block in enumerate(blocks)}
    owners: list[list[str]] = [[] for _ in blocks]
    """Names of modules by the block in which they were called."""
    inside, past_blocks, hidden = -1, False, []

    def first(module: nn.Module, values: Tensor) -> Tensor:
        if not isinstance(module, nn.Embedding) and values.ndim > 1 and values.shape[:2] == (1, len(input_ids)):
            values = values[:, :SEEN]
        return values.clone()

    def enter(_module: nn.Module, _args: tuple[Any, ...], *, index: int) -> None:
        nonlocal inside
        inside = index

    def record(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal past_blocks
        seen = visits[name]
        if name in names:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            seen.calls += 1
            seen.in_head.add(past_blocks)
            seen.simple &= len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            seen.by_row &= not any(t.ndim < 2 and t.is_floating_point() for t in tensors)
            seen.late |= inside == len(blocks) - 1 or past_blocks
            returned = first_tensor(output)
            seen.pending += [(t, t._version) for t in (*tensors, *([] if returned is None else [returned]))]
            if name in looked_at and seen.inputs is None and tensors:
                seen.inputs = first(modules[name], tensors[0])
            if name in looked_at and returned is not None:
                seen.output = first(modules[name], returned)
            if inside >= 0 and not past_blocks:
                owners[inside].append(name)
        if name in in_order:
            # The next block may add to the residual stream in place.
            for owner in owners[in_order[name] - 1] if in_order[name] else ():
                visits[owner].check_untouched()
            past_blocks |= in_order[name] == len(blocks) - 1

    # The logits of a long sequence could fill the memory; two rows are enough to see the head.
    few = {"logits_to_keep": 2} if takes(model, "logits_to_keep") else {}
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(partial(enter, index=index)).remove)
        if (body := getattr(model, "base_model", model)) is not model:
            stack.callback(body.register_forward_hook(lambda _m, _args, out: hidden.append(first_tensor(out))).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(forward_hooks(model, [*names, *in_order], record))
        model(input_ids=input_ids[None], use_cache=False, **few)
    for seen in visits.values():
        seen.check_untouched()
    whole = [h[0] for h in hidden if h is not None and h.shape[:2] == (1, len(input_ids))]
    return Probe(visits, whole[0] if len(whole) == 1 else None)


def _has_slopes(module: nn.Module) -> bool:
    """Return whether all of a module's own parameters are vectors, like those of a norm."""
    return all(p.ndim == 1 for p in module.parameters(recurse=False))


def _find_rule(module: nn.Module, seen: _Visits) -> Rule | None:
    if hasattr(module, "parametrizations") or len(seen.in_head) > 1 or _is_rewired(module):
        return None
    # Modified in place after it was returned: its place in the graph may be lost.
    if not (seen.untouched and seen.by_row):
        return None
    # The head keeps one call of each module.
    if seen.calls > 1 and seen.late:
        return None
    if type(module) is nn.Linear:
        return "linear" if seen.simple and seen.calls and _is_bare(module) else None
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return "conv1d" if seen.simple and seen.calls and _is_bare(module) else None
    if isinstance(module, nn.Embedding):
        return "embedding" if not any(seen.in_head) and _embedding_scale(module, seen) is not None else None
    # A pre-hook would change the recorded input again when slopes are computed.
    alone = not module._forward_pre_hooks and not any(True for _ in module.children())
    if seen.simple and seen.calls and alone and _is_diagonal(module, seen):
        return "diagonal"
    return None


def _is_rewired(module: nn.Module) -> bool:
    """Return whether the module's forward was replaced, other than by upcasting or accelerate's wrapper."""
    if replaced_forward(module) is None:
        return False
    hook = getattr(module, "_hf_hook", None)
    return type(hook).__name__ != "AlignDevicesHook" or hook.offload


def _is_bare(module: nn.Module) -> bool:
    """Return whether the module has only weight and bias, and no hook or replacement changes its output."""
    names = {name for name, _ in module.named_parameters()}
    return names <= {"weight", "bias"} and "weight" in names and not module._forward_hooks


def parameter_slopes(module: nn.Module, inputs: Tensor) -> Iterator[Tensor]:
    """Return ∂output/∂parameter, f(1) − f(0), for each parameter in which a module is affine by channel."""
    for name, parameter in module.named_parameters(recurse=False):
        one, zero = torch.ones_like(parameter), torch.zeros_like(parameter)
        yield functional_call(module, {name: one}, (inputs,)) - functional_call(module, {name: zero}, (inputs,))


@torch.no_grad()
def _is_diagonal(module: nn.Module, seen: _Visits) -> bool:
    """Return whether every parameter is a vector of the output's width and the output is affine in it, channel by
    channel.

    Tested on the probe's input: f(v) − f(0) must equal v ∘ (f(1) − f(0)) for a random v.
    """
    inputs, output = seen.inputs, seen.output
    parameters = dict(module.named_parameters(recurse=False))
    if inputs is None or output is None or not inputs.is_floating_point():
        return False
    if any(p.ndim != 1 or p.shape[0] != output.shape[-1] for p in parameters.values()):
        return False
    generator = torch.Generator().manual_seed(0)
    for (name, p), slope in zip(parameters.items(), parameter_slopes(module, inputs), strict=True):
        v = torch.randn(p.shape, generator=generator).to(p)
        zero = functional_call(module, {name: torch.zeros_like(p)}, (inputs,))
        moved = functional_call(module, {name: v}, (inputs,)) - zero
        scale = (moved.abs().max() + zero.abs().max()).clamp(min=1.0)
        # Allow a few roundings of the module's arithmetic, which transformers does in float32 at best.
        tolerance = 64 * max(torch.finfo(arithmetic_dtype(module)).eps, torch.finfo(torch.float32).eps)
        if slope.shape != output.shape or (moved - v * slope).abs().max() > tolerance * scale:
            return False
    return True


def _embedding_scale(module: nn.Embedding, seen: _Visits) -> float | None:
    """Return c if the module returned c times the rows of its table, else None."""
    plain = not (module.scale_grad_by_freq or module.sparse or module.max_norm)
    alone = len(list(module.parameters())) == 1
    if not (plain and alone and seen.simple and seen.calls == 1) or seen.inputs.is_floating_point():
        return None
    rows = nn.functional.embedding(seen.inputs, module.weight.detach()).to(arithmetic_dtype(module))
    if seen.output is None or rows.shape != seen.output.shape:
        return None
    scale = ((rows.double() * seen.output.double()).sum() / rows.double().square().sum()).item()
    fits = torch.allclose(rows * scale, seen.output, rtol=8 * torch.finfo(rows.dtype).eps, atol=0)
    return scale if fits else None


def _tie(
    names: list[str], modules: dict[str, nn.Module], rules: dict[str, Rule], visits: dict[str, _Visits]
) -> tuple[str, str] | None:
    """Return (embedding, head) if exactly these two share a table and both have rules."""
    if len(names) != 2:
        return None
    embedding = next((n for n in names if rules.get(n) == "embedding"), None)
    head = next((n for n in names if rules.get(n) == "linear" and visits[n].in_head == {True}), None)
    if embedding and head and modules[embedding].weight is modules[head].weight:
        return embedding, head
    return None
