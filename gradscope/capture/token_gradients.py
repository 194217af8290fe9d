"""Exact norms of every token's own gradient, at each layer's activations and over all parameters.

For one sequence the work goes in two passes. The head (all that follows the last block) acts on each position by
itself, so one vector-Jacobian product of the uncancelled e − π serves every token at once. The body mixes positions,
so tokens go in chunks: one forward over the chunk's prefix, one batched vector-Jacobian product that carries the
tokens side by side, and the rules that turn what flows back into norms. No sequence sees another's padding.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradscope.capture.claims import Claims, claim_parameters, parameter_slopes
from gradscope.capture.hooks import first_tensor, forward_hooks
from gradscope.capture.rules import (
    diagonal_square_norms,
    embedding_square_norms,
    linear_square_norms,
    prefix_factor,
    tied_cross_terms,
)
from gradscope.errors import InputError
from gradscope.logprobs import TokenStatistics, logit_gradient, token_statistics
from gradscope.models import Policy
from gradscope.theory import logit_grad_norm


@dataclass(frozen=True)
class TokenGradients:
    """What the engine knows of m response tokens of one sequence; norms are L2, of log π for unit weight."""

    statistics: TokenStatistics
    """log π, log(1−π) and entropy at the temperature, [m] each."""
    logit_grad_norm: Float[Tensor, " m"]
    """‖∂ log π / ∂(logits / T)‖ = ‖e − π‖."""
    act_grad_norm: Float[Tensor, "m layers"]
    """‖δ_ℓ‖ over all positions, ℓ = 0 (input of the first block) … L (output of the last); NaN where not asked for."""
    param_grad_norm: Float[Tensor, " m"]
    """‖g‖ over all parameters, shared ones once; NaN where not asked for."""
    module_grad_norm: dict[str, Float[Tensor, " m"]]
    """‖g‖ of each module's own parameters; a table shared with the head counts under the embedding's name."""


class TokenGradientMeter:
    """Measures token gradients of one policy; make it inside `measuring(policy.model)`.

    rows: how many positions × tokens one batched backward carries (its matrix products' rows).
    memory: bytes that what flows back may take; a chunk is made smaller where it would take more.
    """

    def __init__(self, policy: Policy, probe_ids: Int[Tensor, " n"], *, rows: int = 1024, memory: int = 1 << 30) -> None:
        self.model, self.blocks = policy.model, policy.blocks
        self.rows, self.memory = rows, memory
        check_prefixes(policy, probe_ids)
        self.claims: Claims = claim_parameters(self.model, self.blocks, probe_ids)
        self.names = {m: name for name, m in self.model.named_modules()}
        self._hooked = [*self.claims.rules, *(self.names[b] for b in self.blocks)]
        self._bytes_per_position = self._measure_flow(probe_ids[:8])

    def measure(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], measured: Int[Tensor, " k"], *, temperature: float
    ) -> TokenGradients:
        """Token gradients of one unpadded sequence.

        ids: the sequence. targets: indices in it of the response tokens, ascending, none 0. measured: which of the
        targets (indices into `targets`, ascending) get the norms that need a backward pass; the rest get NaN there.
        """
        head = self._measure_head(ids, targets, temperature)
        depth = len(self.blocks)
        square: dict[str, Tensor] = {n: head.square[n].clone() for n in head.square}
        act = head.hidden_delta.new_full((len(targets), depth + 1), float("nan"))
        act[:, depth] = head.hidden_delta.norm(dim=1)
        for picks in self._chunks(targets, measured):
            for name, values in self._measure_body(ids, targets, picks, head, act).items():
                square.setdefault(name, torch.zeros_like(act[:, 0]))[picks] += values
            for name, values in self._measure_general(ids, targets, picks, temperature).items():
                square.setdefault(name, torch.zeros_like(act[:, 0]))[picks] += values
        missing = torch.ones(len(targets), dtype=torch.bool)
        missing[measured] = False
        act[missing, :] = float("nan")
        norms = {name: values.masked_fill(missing.to(values.device), float("nan")) for name, values in square.items()}
        total = torch.stack(list(norms.values())).sum(0)
        return TokenGradients(
            head.statistics, head.logit_grad_norm, act, total.sqrt(), {n: v.clamp(min=0).sqrt() for n, v in norms.items()}
        )

    # The head: everything after the last block, position by position.

    def _measure_head(self, ids: Tensor, targets: Tensor, temperature: float) -> _HeadPass:
        vocab = self.model.config.get_text_config().vocab_size
        step = max(1, self.memory // (8 * 4 * vocab))
        parts = [self._head_slice(ids, part, temperature) for part in targets.split(step)]
        first = parts[0]
        if len(parts) == 1:
            return first
        return _HeadPass(
            TokenStatistics(*(torch.cat([getattr(p.statistics, f) for p in parts]) for f in ("logprob", "log_one_minus_prob", "entropy"))),
            torch.cat([p.logit_grad_norm for p in parts]),
            torch.cat([p.hidden_delta for p in parts]),
            {name: torch.cat([p.square[name] for p in parts]) for name in first.square},
            first.tied_input if first.tied_input is None else torch.cat([p.tied_input for p in parts]),
            first.tied_delta if first.tied_delta is None else torch.cat([p.tied_delta for p in parts]),
            first.factors,
        )

    def _head_slice(self, ids: Tensor, targets: Tensor, temperature: float) -> _HeadPass:
        recorder = _Recorder(self, cut=True)
        with torch.enable_grad(), forward_hooks(self.model, self._hooked, recorder):
            logits = self._logits(ids[: targets[-1]], targets - 1)
        token_ids = ids[targets]
        statistics = token_statistics(logits, token_ids, temperature=temperature)
        seeds = logit_gradient(logits, token_ids, temperature=temperature)
        logprobs_all = (logits.detach().to(seeds.dtype) / temperature).log_softmax(-1)
        calls = [call for call in recorder.calls if call.in_head]
        edges = [recorder.hidden_edge, *(call.edge for call in calls)]
        deltas = torch.autograd.grad([logits], edges, [(seeds / temperature).to(logits.dtype)])
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = [_rows_at(d, targets - 1).to(wide) for d in deltas]
        square: dict[str, Tensor] = {}
        tied_input = tied_delta = None
        for call, delta in zip(calls, rows[1:], strict=True):
            inputs = _rows_at(call.inputs, targets - 1)
            square[call.name] = square.get(call.name, 0) + self._position_square_norm(call, delta, inputs.to(wide))
            if self.claims.tied and call.name == self.claims.tied[1]:
                tied_input, tied_delta = inputs.to(wide), delta
        if tied_delta is not None:
            square[self.claims.tied[0]] = square.pop(self.claims.tied[1])
        return _HeadPass(
            statistics, logit_grad_norm(logprobs_all, token_ids), rows[0], square, tied_input, tied_delta,
            _Factors(recorder, len(ids[: targets[-1]])),
        )  # fmt: skip

    def _position_square_norm(self, call: _Call, delta: Tensor, inputs: Tensor) -> Tensor:
        """Squared norm of a head module's gradient: one position each, so an outer product or a product of vectors."""
        if self.claims.rules[call.name] == "diagonal":
            slopes = parameter_slopes(call.module, _rows_of(call.inputs, inputs))
            return sum((delta * s.to(delta)).square().sum(1) for s in slopes)
        bias = call.module.bias is not None
        return delta.square().sum(1) * (inputs.square().sum(1) + bias)

    # The body: the blocks and what feeds them, a chunk of tokens over their common prefix.

    def _measure_body(self, ids: Tensor, targets: Tensor, picks: Tensor, head: _HeadPass, act: Tensor) -> dict[str, Tensor]:
        length, last = int(targets[picks[-1]]), len(self.blocks)
        recorder = _Recorder(self, cut=False)
        with torch.enable_grad(), forward_hooks(self.model, self._hooked, recorder), recorder.grow(self.blocks[0]):
            self.model.base_model(input_ids=ids[None, :length], use_cache=False)
        calls = [call for call in recorder.calls if not call.in_head]
        seeds = head.hidden_delta.new_zeros(len(picks), 1, length, head.hidden_delta.shape[1])
        seeds[torch.arange(len(picks)), 0, targets[picks] - 1] = head.hidden_delta[picks]
        edges = [*recorder.block_edges[:last], *(call.edge for call in calls)]
        deltas = _batched_vjp(recorder.hidden, edges, seeds.to(recorder.hidden.dtype))
        for layer, delta in enumerate(deltas[:last]):
            act[picks, layer] = delta.flatten(1).to(act.dtype).norm(dim=1)
        square: dict[str, Tensor] = defaultdict(lambda: act.new_zeros(len(picks)))
        groups = defaultdict(list)
        for call, delta in zip(calls, deltas[last:], strict=True):
            rule = self.claims.rules[call.name]
            delta = delta.to(act.dtype)
            if rule == "diagonal":
                for slope in head.factors.slopes(call, recorder):
                    square[call.name] += diagonal_square_norms(delta, slope.to(act.dtype))
            elif rule == "embedding":
                square[call.name] += self._embedding_square_norms(call, delta, head, picks)
            else:
                groups[call.name].append((call, delta.flatten(1, -2)))
        for name, pairs in groups.items():
            factor = head.factors.factor(pairs, recorder)
            delta = torch.cat([d for _, d in pairs], dim=1)
            square[name] += linear_square_norms(delta, factor[: delta.shape[1], : delta.shape[1]]).sum(1).to(act.dtype)
        return square

    def _embedding_square_norms(self, call: _Call, delta: Tensor, head: _HeadPass, picks: Tensor) -> Tensor:
        ids, delta = call.inputs.flatten(), delta.flatten(1, -2) * self.claims.embedding_scale[call.name]
        if call.module.padding_idx is not None:
            delta = delta * (ids != call.module.padding_idx)[:, None]
        square = embedding_square_norms(delta, ids)
        if self.claims.tied and call.name == self.claims.tied[0]:
            square = square + tied_cross_terms(delta, ids, head.tied_delta[picks], head.tied_input[picks])
        return square

    # The general path: one gradient at a time, only for parameters that no rule claims.

    def _measure_general(self, ids: Tensor, targets: Tensor, picks: Tensor, temperature: float) -> dict[str, Tensor]:
        if not self.claims.general:
            return {}
        parameters = [self.model.get_parameter(name) for name in self.claims.general]
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                logits = self._logits(ids[: targets[picks[-1]]], targets[picks] - 1)
            seeds = logit_gradient(logits, ids[targets[picks]], temperature=temperature) / temperature
            square: dict[str, Tensor] = defaultdict(lambda: seeds.new_zeros(len(picks)))
            for k in range(len(picks)):
                gradients = torch.autograd.grad(
                    logits[k], parameters, seeds[k].to(logits.dtype), retain_graph=k + 1 < len(picks), allow_unused=True
                )
                for module, gradient in zip(self.claims.general.values(), gradients, strict=True):
                    if gradient is not None:
                        square[module][k] += gradient.to(seeds.dtype).square().sum()
            return square
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def _chunks(self, targets: Tensor, measured: Tensor) -> Iterator[Tensor]:
        """Neighbouring tokens, as many as fill the rows and fit the memory over their common prefix."""
        start = 0
        while start < len(measured):
            length = int(targets[measured[start]])
            fit = min(self.rows // length, self.memory // (self._bytes_per_position * length))
            picks = measured[start : start + max(1, fit)]
            # A wide gap makes the first tokens carry a prefix much longer than theirs.
            picks = picks[targets[picks] <= max(length + 8, length * 5 // 4)]
            yield picks
            start += len(picks)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [m, vocab] at these positions of one sequence."""
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            return self.model(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[0]
        return self.model(input_ids=ids[None], use_cache=False).logits[0, positions]

    def _measure_flow(self, ids: Tensor) -> int:
        """Bytes of all that flows back to the recorded modules, for one token and one position of its prefix."""
        recorder = _Recorder(self, cut=False)
        with torch.enable_grad(), forward_hooks(self.model, self._hooked, recorder), recorder.grow(self.blocks[0]):
            self.model.base_model(input_ids=ids[None], use_cache=False)
        widths = sum(call.width for call in recorder.calls if not call.in_head)
        hidden = recorder.hidden
        return (widths // len(ids) + (len(self.blocks) + 1) * hidden.shape[-1]) * max(4, hidden.element_size()) * 2


def check_prefixes(policy: Policy, ids: Int[Tensor, " n"]) -> None:
    """InputError unless a prefix alone gives the hidden states that it gives within the whole sequence ids [n].

    That is what "decoder-only" means here, and what lets a token be measured on its prefix.
    """
    half = max(1, len(ids) // 2)
    with torch.no_grad():
        whole = policy.model.base_model(input_ids=ids[None], use_cache=False)[0][0, :half].double()
        alone = policy.model.base_model(input_ids=ids[None, :half], use_cache=False)[0][0].double()
    tolerance = 1e-3 if policy.dtype in (torch.float32, torch.float64) else 0.1
    if not (whole - alone).norm() <= tolerance * whole.norm():
        raise InputError(
            f"{type(policy.model).__name__} changes a position when later tokens are added (by "
            f"{((whole - alone).norm() / whole.norm()).item():.1e}): it is not decoder-only, or its rotary embedding "
            "depends on the length; give a causal model, or rollouts within its trained context"
        )


@dataclass(frozen=True)
class _HeadPass:
    """What one pass over the head leaves for the body, per target."""

    statistics: TokenStatistics
    logit_grad_norm: Tensor
    hidden_delta: Tensor
    """δ_L at each target's own position, [m, d]."""
    square: dict[str, Tensor]
    """Squared gradient norms of the head's modules, [m] each."""
    tied_input: Tensor | None
    tied_delta: Tensor | None
    factors: _Factors


@dataclass(frozen=True)
class _Call:
    """One call of a module that a rule claims."""

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge | None
    width: int
    in_head: bool

    @property
    def input_key(self) -> tuple[Any, ...]:
        """The same for modules that share one input, so that its factor is made once."""
        return self.inputs.data_ptr(), self.inputs.shape, self.inputs.stride(), self.inputs._version


class _Recorder:
    """A forward hook that keeps each claimed module's input and where its output stands in the graph.

    cut=True starts the graph at the last block's output, for the head; otherwise it starts at the embeddings.
    """

    def __init__(self, meter: TokenGradientMeter, *, cut: bool) -> None:
        self.rules, self.cut = meter.claims.rules, cut
        self.blocks = {meter.names[b]: i for i, b in enumerate(meter.blocks)}
        self.calls: list[_Call] = []
        self.block_edges: list[GradientEdge] = []
        self.hidden: Tensor | None = None
        self.hidden_edge: GradientEdge | None = None

    def __call__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        in_head = self.hidden is not None
        if name in self.blocks:
            return self._pass_block(self.blocks[name], output)
        if self.rules[name] == "embedding" and not self.cut and not output.requires_grad:
            output.requires_grad_(True)
        edge = get_gradient_edge(output) if output.requires_grad else None
        if edge is not None or not in_head:
            self.calls.append(_Call(name, module, args[0].detach(), edge, output.numel(), in_head))
        return None

    def _pass_block(self, index: int, output: Any) -> Any:
        hidden = first_tensor(output)
        if index < len(self.blocks) - 1:
            if hidden.requires_grad:
                self.block_edges.append(get_gradient_edge(hidden))
            return None
        if self.cut:
            cut = hidden.detach().requires_grad_(True)
            output = cut if isinstance(output, Tensor) else (cut, *output[1:])
            hidden = cut
        self.hidden, self.hidden_edge = hidden, get_gradient_edge(hidden)
        return output if self.cut else None

    def grow(self, first_block: nn.Module) -> Any:
        """Record the gradient edge of the first block's input, too: the graph's root if no embedding is claimed."""
        return _GrowFrom(self, first_block)


class _GrowFrom:
    def __init__(self, recorder: _Recorder, block: nn.Module) -> None:
        self.recorder, self.block = recorder, block

    def __enter__(self) -> None:
        def root(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if not hidden.requires_grad:
                hidden.requires_grad_(True)
            self.recorder.block_edges.append(get_gradient_edge(hidden))

        self.handle = self.block.register_forward_pre_hook(root, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


class _Factors:
    """The factors and slopes of one sequence's inputs, made when first needed and shared by all of its prefixes."""

    def __init__(self, recorder: _Recorder, length: int) -> None:
        self.length = length
        self.whole: dict[str, list[_Call]] = defaultdict(list)
        for call in recorder.calls:
            if not call.in_head:
                self.whole[call.name].append(call)
        self._made: dict[Any, Any] = {}

    def _aligned(self, name: str, recorder: _Recorder, length: int) -> _Call | None:
        """The whole sequence's call, if row s of its input is position s, so that a prefix is its first rows."""
        calls = self.whole.get(name, [])
        same = len(calls) == 1 and calls[0].inputs.ndim >= 3 and calls[0].inputs.shape[:2] == (1, self.length)
        return calls[0] if same else None

    def factor(self, pairs: list[tuple[_Call, Tensor]], recorder: _Recorder) -> Tensor:
        call = pairs[0][0]
        bias = call.module.bias is not None
        whole = self._aligned(call.name, recorder, self.length) if len(pairs) == 1 and call.inputs.ndim >= 3 else None
        if whole is None:
            return prefix_factor(torch.cat([c.inputs.flatten(0, -2) for c, _ in pairs]), bias=bias)
        key = (*whole.input_key, bias)
        if key not in self._made:
            self._made[key] = prefix_factor(whole.inputs.flatten(0, -2), bias=bias)
        return self._made[key]

    def slopes(self, call: _Call, recorder: _Recorder) -> list[Tensor]:
        whole = self._aligned(call.name, recorder, self.length) if call.inputs.ndim >= 3 else None
        if whole is None:
            return [s for s in parameter_slopes(call.module, call.inputs)]
        if call.name not in self._made:
            self._made[call.name] = list(parameter_slopes(call.module, whole.inputs))
        return [s[:, : call.inputs.shape[1]] for s in self._made[call.name]]


def _batched_vjp(output: Tensor, edges: list[GradientEdge], seeds: Float[Tensor, "K 1 n d"]) -> list[Tensor]:
    """Vector-Jacobian products of K seeds at once: [K, *shape] per edge."""
    return list(torch.autograd.grad([output], edges, [seeds], is_grads_batched=True))


def _rows_at(values: Tensor, positions: Tensor) -> Tensor:
    """Rows [m, d] of [1, n, d] at the positions, or of [1, m, d], which holds only them."""
    values = values.flatten(0, -2)
    return values if len(values) == len(positions) else values[positions]


def _rows_of(whole: Tensor, rows: Tensor) -> Tensor:
    return rows.to(whole.dtype)
