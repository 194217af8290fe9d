"""Exact norms of every token's own gradient, at each layer's activations and over all parameters.

One sequence at a time, without padding, in two passes. The head acts on each position by itself, so one
vector-Jacobian product of the uncancelled e − π serves every token at once. The body mixes positions, so tokens go in
chunks: one forward over the chunk's prefix, one batched vector-Jacobian product that carries the tokens side by side,
and the rules that turn what flows back into norms. What no rule knows is measured by one autograd gradient a token.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradscope.capture.claims import Claims, check_prefixes, claim_parameters, parameter_slopes
from gradscope.capture.factors import Factors, join
from gradscope.capture.recording import Call, Recorder, find_joint
from gradscope.capture.rules import (
    diagonal_square_norms,
    embedding_square_norms,
    linear_square_norms,
    outer_square_norms,
    tied_cross_terms,
)
from gradscope.errors import InputError
from gradscope.logprobs import TokenStatistics, logit_gradient, token_statistics
from gradscope.models import Policy


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
    """‖g‖ of each module's own parameters; a table that the head shares counts under the embedding's name."""


@dataclass(frozen=True)
class _HeadPass:
    """What the pass over the head leaves for the body; rows are targets."""

    statistics: TokenStatistics
    size: Tensor
    """Largest entry of e − π, [m]: every other gradient here is divided by it, lest a sure token's square underflow."""
    logit_grad_norm: Tensor
    last_norm: Tensor
    """‖δ_L‖, [m]."""
    joint_deltas: list[Tensor]
    """Gradient at each joint, at the target's own position, [m, width]."""
    local: dict[str, tuple[Call, Tensor, Tensor]]
    """Module → (call, gradient at its output, its input), both at the target's own position, [m, width]."""


class TokenGradientMeter:
    """Measures token gradients of one policy; make and use it inside `measuring(policy.model)`.

    probe_ids: a sequence to learn the model's structure from; the longest there is.
    rows: how many positions × tokens one batched backward carries (the rows of its matrix products).
    memory: bytes that what flows back may take; a chunk is made smaller where it would take more.
    """

    def __init__(
        self, policy: Policy, probe_ids: Int[Tensor, " n"], *, rows: int = 1536, memory: int = 1 << 30
    ) -> None:
        self.model, self.blocks, self.vocab_size = policy.model, policy.blocks, policy.vocab_size
        self.rows, self.memory = rows, memory
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        check_prefixes(policy, probe_ids)
        self.claims: Claims = claim_parameters(self.model, self.blocks, probe_ids)
        short = probe_ids[:16]
        self.joint = find_joint(self.model, self.blocks, self.claims, short) if len(short) > 2 else None
        self.batched, self._flow = self._probe_body(short)
        # Tokens whose logits, with the copies that their gradient needs, fit the memory.
        self._head_rows = max(1, memory // (8 * 4 * self.vocab_size))

    def measure(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], measured: Int[Tensor, " k"], *, temperature: float
    ) -> TokenGradients:
        """Token gradients of one unpadded sequence.

        ids: the sequence. targets: indices in it of the response tokens, ascending, none 0. measured: which of the
        targets (indices into `targets`, ascending) get the norms that need a backward pass; the rest get NaN there.
        """
        if not len(measured):
            return self._measure_cheaply(ids, targets, temperature)
        factors = Factors(int(targets[-1]))
        head = self._measure_head(ids, targets, temperature, factors)
        act = head.last_norm.new_full((len(targets), len(self.blocks) + 1), float("nan"))
        act[measured, -1] = head.last_norm[measured]
        # A module that a prefix does not call has no gradient there; a token that is not measured has no number.
        nothing = torch.full_like(head.last_norm, float("nan"))
        nothing[measured] = 0.0
        square: dict[str, Tensor] = defaultdict(nothing.clone)
        for picks in self._chunks(targets, measured):
            for name, values in self._measure_body(ids, targets, picks, head, factors, act).items():
                square[name][picks] = values
            for name, values in self._measure_general(ids, targets, picks, temperature).items():
                square[name][picks] = values.to(act.dtype)
        tied = self.claims.tied or (None, None)
        for name, (call, delta, inputs) in head.local.items():
            if name == tied[1]:  # The table counts under the embedding's name, the head's bias under its own.
                square[tied[0]][measured] += outer_square_norms(delta, inputs, bias=False)[measured]
                if call.module.bias is not None:
                    square[name][measured] = delta.square().sum(1)[measured]
            elif name not in square:
                square[name][measured] = self._local_square_norms(call, delta, inputs)[measured]
        norms = {name: values.clamp(min=0).sqrt() for name, values in square.items()}
        norms = {name: head.size * norm for name, norm in norms.items()}
        total = head.size * torch.stack(list(square.values())).sum(0).clamp(min=0).sqrt()
        return TokenGradients(head.statistics, head.logit_grad_norm, head.size[:, None] * act, total, norms)

    @torch.no_grad()
    def statistics(self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], *, temperature: float) -> TokenStatistics:
        """log π, log(1−π) and entropy of the targets, without any gradient."""
        prefix = ids[: targets[-1]]
        parts = [
            token_statistics(self._logits(prefix, part - 1), ids[part], temperature=temperature)
            for part in targets.split(self._head_rows)
        ]
        return _join_statistics(parts)

    @torch.no_grad()
    def _measure_cheaply(self, ids: Tensor, targets: Tensor, temperature: float) -> TokenGradients:
        """What needs no backward pass, NaN for the rest."""
        statistics, norms = [], []
        for part in targets.split(self._head_rows):
            logits = self._logits(ids[: targets[-1]], part - 1)
            statistics.append(token_statistics(logits, ids[part], temperature=temperature))
            norms.append(logit_gradient(logits, ids[part], temperature=temperature).norm(dim=1))
        unknown = torch.full_like(torch.cat(norms), float("nan"))
        act = unknown[:, None].expand(-1, len(self.blocks) + 1).clone()
        return TokenGradients(_join_statistics(statistics), torch.cat(norms), act, unknown, {})

    # The head: position by position, so every token at once.

    def _measure_head(self, ids: Tensor, targets: Tensor, temperature: float, factors: Factors) -> _HeadPass:
        """One pass for all targets, or several where their logits would not fit the memory."""
        prefix, split = ids[: targets[-1]], targets.split(self._head_rows)
        parts = [self._head_slice(prefix, ids[part], part - 1, temperature, factors) for part in split]
        if len(parts) == 1:
            return parts[0]
        return _HeadPass(
            _join_statistics([p.statistics for p in parts]),
            torch.cat([p.size for p in parts]),
            torch.cat([p.logit_grad_norm for p in parts]),
            torch.cat([p.last_norm for p in parts]),
            [torch.cat(rows) for rows in zip(*(p.joint_deltas for p in parts), strict=True)],
            {
                name: (call, torch.cat([p.local[name][1] for p in parts]), torch.cat([p.local[name][2] for p in parts]))
                for name, (call, _, _) in parts[0].local.items()
            },
        )

    def _head_slice(
        self, ids: Tensor, token_ids: Tensor, positions: Tensor, temperature: float, factors: Factors
    ) -> _HeadPass:
        """ids: the prefix of the last target; positions: where each token's logits stand, one before the token."""
        with Recorder(self.model, self.blocks, self.claims, self.joint, "head") as recorder:
            logits = self._logits(ids, positions)
        factors.remember(recorder.calls)
        statistics = token_statistics(logits, token_ids, temperature=temperature)
        seeds, size = _unit_errors(logits, token_ids, temperature)
        calls = [call for call in recorder.calls if call.edge is not None]
        edges = [*recorder.joints, recorder.block_edges[0], *(call.edge for call in calls)]
        deltas = torch.autograd.grad([logits], edges, [(seeds / temperature).to(logits.dtype)], allow_unused=True)
        rows = [None if d is None else _rows_at(d, positions).to(seeds.dtype) for d in deltas]
        joints = len(recorder.joints)
        local = {
            call.name: (call, row, self._local_inputs(call, positions).to(seeds.dtype))
            for call, row in zip(calls, rows[joints + 1 :], strict=True)
            if row is not None
        }
        return _HeadPass(statistics, size, size * seeds.norm(dim=1), rows[joints].norm(dim=1), rows[:joints], local)

    def _local_inputs(self, call: Call, positions: Tensor) -> Tensor:
        """Of a module of the head: its inputs [m, width]; for a diagonal one its slopes [m, parameters, width]."""
        if self.claims.rules[call.name] != "diagonal":
            return _rows_at(call.inputs, positions)
        return torch.stack([_rows_at(s, positions) for s in parameter_slopes(call.module, call.inputs)], 1)

    def _local_square_norms(self, call: Call, delta: Tensor, inputs: Tensor) -> Tensor:
        """Squared gradient norm [m] of a module of the head, which sees one position of each token."""
        if self.claims.rules[call.name] == "diagonal":
            width = call.inputs.shape[-1]
            slopes = (slope.reshape(len(delta), -1, width) for slope in inputs.unbind(1))
            return sum(diagonal_square_norms(delta.reshape(s.shape), s) for s in slopes)
        return outer_square_norms(delta, inputs, bias=call.module.bias is not None)

    # The body: a chunk of tokens over their common prefix.

    def _measure_body(
        self, ids: Tensor, targets: Tensor, picks: Tensor, head: _HeadPass, factors: Factors, act: Tensor
    ) -> dict[str, Tensor]:
        """Squared gradient norms [K] by module; the picked rows of `act` are filled in."""
        recorder = self._record_body(ids[: targets[picks[-1]]])
        token, position = torch.arange(len(picks), device=targets.device), targets[picks] - 1
        seeds = [tensor.new_zeros(len(picks), *tensor.shape) for tensor in recorder.joints]
        for seed, rows in zip(seeds, head.joint_deltas, strict=True):
            seed[token, 0, position] = rows[picks].reshape(len(picks), *seed.shape[3:]).to(seed.dtype)
        edges = [*recorder.block_edges, *(call.edge for call in recorder.calls)]
        deltas = _vjp(recorder.joints, edges, seeds, batched=self.batched)
        depth = len(recorder.block_edges)
        for layer, delta in enumerate(deltas[:depth]):
            act[picks, layer] = delta.flatten(1).to(act.dtype).norm(dim=1)
        by_module: dict[str, list[tuple[Call, Tensor]]] = defaultdict(list)
        for call, delta in zip(recorder.calls, deltas[depth:], strict=True):
            if delta is not None:
                delta = delta.to(act.dtype)
                if call.name in head.local:  # A module of both parts: its gradient in the head lies at one position.
                    rows = head.local[call.name][1][picks]
                    delta[token, 0, position] += rows.reshape(len(picks), *delta.shape[3:])
                by_module[call.name].append((call, delta))
        return {name: self._square_norms(name, flow, head, picks, factors) for name, flow in by_module.items()}

    def _square_norms(
        self, name: str, flow: list[tuple[Call, Tensor]], head: _HeadPass, picks: Tensor, factors: Factors
    ) -> Tensor:
        """Squared gradient norm [K] of one module, from all of its calls."""
        rule = self.claims.rules[name]
        if rule in ("linear", "conv1d"):
            deltas = join([delta.flatten(1, -2) for _, delta in flow], 1)
            return linear_square_norms(deltas, factors.factor(flow))
        if rule == "diagonal":
            slopes = zip(*(factors.slopes(call) for call, _ in flow), strict=True)
            return sum(_diagonal_over_calls(flow, parameter) for parameter in slopes)
        call, delta = flow[0]
        ids = call.inputs.flatten()
        delta = delta.flatten(1, -2) * self.claims.embedding_scale[name]
        if call.module.padding_idx is not None:
            delta = delta * (ids != call.module.padding_idx)[:, None]
        square = embedding_square_norms(delta, ids)
        if self.claims.tied and name == self.claims.tied[0]:
            _, head_delta, head_input = head.local[self.claims.tied[1]]
            square = square + tied_cross_terms(delta, ids, head_delta[picks], head_input[picks])
        return square

    def _record_body(self, ids: Tensor) -> Recorder:
        with Recorder(self.model, self.blocks, self.claims, self.joint, "body") as recorder:
            self.model.base_model(input_ids=ids[None], use_cache=False)
        return recorder

    # The general path: one gradient at a time, only for parameters that no rule claims.

    def _measure_general(self, ids: Tensor, targets: Tensor, picks: Tensor, temperature: float) -> dict[str, Tensor]:
        """Squared gradient norms [K] by module, of parameters that no rule claims."""
        if not self.claims.general:
            return {}
        parameters = [self.model.get_parameter(name) for name in self.claims.general]
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                logits = self._logits(ids[: targets[picks[-1]]], targets[picks] - 1)
                each = logits.unbind()
            seeds = _unit_errors(logits, ids[targets[picks]], temperature)[0] / temperature
            square: dict[str, Tensor] = defaultdict(lambda: seeds.new_zeros(len(picks)))
            for k in range(len(picks) if logits.requires_grad else 0):  # This prefix may not use them at all.
                gradients = torch.autograd.grad(
                    each[k], parameters, seeds[k].to(logits.dtype), retain_graph=k + 1 < len(picks), allow_unused=True
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
            fit = min(self.rows // length, self.memory // (self._flow * length))
            picks = measured[start : start + max(1, fit)]
            # Without a wide gap: the first token would carry a prefix much longer than its own.
            picks = picks[targets[picks] <= max(length + 16, length * 5 // 4)]
            yield picks
            start += len(picks)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [m, vocab] at these positions of one sequence."""
        if self._keeps_logits:
            return self.model(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[0]
        return self.model(input_ids=ids[None], use_cache=False).logits[0, positions]

    def _probe_body(self, ids: Tensor) -> tuple[bool, int]:
        """(whether gradients can be batched on this model, bytes that flow back for a token and a position)."""
        recorder = self._record_body(ids)
        joints = 1 if self.joint is None else 2
        once = len(recorder.block_edges) == len(self.blocks) and len(recorder.joints) == joints
        if not once or len({id(block) for block in self.blocks}) != len(self.blocks):
            raise InputError(
                f"{type(self.model).__name__} calls a block of its ModuleList more than once or not at all: a layer's "
                "gradient is not defined there; name the list whose blocks run once each with --blocks"
            )
        edges = [*recorder.block_edges, *(call.edge for call in recorder.calls)]
        seeds = [torch.stack([torch.ones_like(tensor)] * 2) for tensor in recorder.joints]
        numbers = sum(call.width for call in recorder.calls) + recorder.joints[0].numel() * len(recorder.block_edges)
        flow = 2 * numbers * max(4, recorder.joints[0].element_size()) // len(ids)
        try:
            _vjp(recorder.joints, edges, seeds, batched=True)
        except RuntimeError:  # An operation that vmap does not know: one gradient after the other gives the same.
            return False, flow
        return True, flow


def _join_statistics(parts: list[TokenStatistics]) -> TokenStatistics:
    return TokenStatistics(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(TokenStatistics)))


def _diagonal_over_calls(flow: list[tuple[Call, Tensor]], slopes: tuple[Tensor, ...]) -> Tensor:
    """Squared norm of one parameter's gradient, which adds up over the module's calls."""
    deltas = join([delta.flatten(1, -2) for _, delta in flow], 1)
    return diagonal_square_norms(deltas, join([s.flatten(0, -2) for s in slopes], 0).to(deltas.dtype))


def _vjp(
    outputs: list[Tensor], edges: list[GradientEdge], seeds: list[Float[Tensor, "K *shape"]], *, batched: bool
) -> list[Tensor | None]:
    """Vector-Jacobian products of K seeds: [K, *shape] per edge, None where nothing flows."""
    if batched:
        return list(torch.autograd.grad(outputs, edges, seeds, is_grads_batched=True, allow_unused=True))
    each = [
        torch.autograd.grad(outputs, edges, list(seed), retain_graph=True, allow_unused=True)
        for seed in zip(*seeds, strict=True)
    ]
    return [None if rows[0] is None else torch.stack(rows) for rows in zip(*each, strict=True)]


def _unit_errors(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(e − π divided by its largest entry [m, vocab], that entry [m])."""
    errors = logit_gradient(logits, token_ids, temperature=temperature)
    size = errors.abs().amax(1)
    return errors / size.clamp(min=torch.finfo(size.dtype).tiny)[:, None], size


def _rows_at(values: Tensor, positions: Tensor) -> Tensor:
    """Rows [m, width] of [1, n, …] at the positions; [1, m, …] holds only them already."""
    rows = values.flatten(2)[0] if values.ndim > 2 else values
    return rows if len(rows) == len(positions) else rows[positions]
