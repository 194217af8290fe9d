"""Exact norms of every token's own gradient, at each layer's activations and over all parameters.

One sequence at a time, without padding, in two passes. The head acts on each position by itself, so one
vector-Jacobian product of the uncancelled e − π serves every token at once. The body mixes positions, so tokens go in
chunks over their common prefix: by the backward rules of a common decoder, or along the model's own graph. What no
rule knows is measured by one autograd gradient a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.capture.chunks import neighbours
from gradscope.capture.claims import Claims, check_prefixes, claim_parameters
from gradscope.capture.decoder_body import DecoderBody, DecoderSequence
from gradscope.capture.factors import Factors
from gradscope.capture.graph_body import GraphBody, GraphSequence
from gradscope.capture.head import Head, HeadPass, unit_errors
from gradscope.capture.products import PRODUCTS, Precision
from gradscope.capture.recording import find_joint
from gradscope.capture.rules import outer_square_norms
from gradscope.logprobs import TokenStatistics
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


class TokenGradientMeter:
    """Measures token gradients of one policy; make and use it inside `measuring(policy.model)`.

    probe_ids: a sequence to learn the model's structure from; the longest there is.
    rows: most positions × tokens that one chunk carries (the rows of its matrix products).
    memory: bytes that what flows back may take; a chunk is made smaller where it would take more.
    rules: whether a common decoder may go by backward rules; False sends every model along its graph.
    precision: of the rules' matrix products; the graph's are always exact.
    """

    def __init__(
        self,
        policy: Policy,
        probe_ids: Int[Tensor, " n"],
        *,
        rows: int = 1536,
        memory: int = 1 << 30,
        rules: bool = True,
        precision: Precision = "exact",
    ) -> None:
        self.model, self.blocks, self.vocab_size = policy.model, policy.blocks, policy.vocab_size
        self.rows, self.memory, self._precision = rows, memory, precision
        check_prefixes(policy, probe_ids)
        self.claims: Claims = claim_parameters(self.model, self.blocks, probe_ids)
        short = probe_ids[:16]
        self.joint = find_joint(self.model, self.blocks, self.claims, short) if len(short) > 2 else None
        self.head = Head(policy, self.claims, self.joint, memory)
        self.graph = GraphBody(policy, self.claims, self.joint, short)
        """For what goes along the model's own graph."""
        self.decoder = DecoderBody.find(policy, self.claims, self.joint, memory) if rules else None
        """For a common decoder, by backward rules; None: this is none."""
        if self.decoder is not None and not self._rules_hold(short):
            self.decoder = None
        if self.decoder is not None:
            self.decoder.multiply = PRODUCTS[precision]

    @property
    def precision(self) -> Precision | None:
        """Of the backward rules; None: the model goes along its graph."""
        return self._precision if self.decoder is not None else None

    def measure(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], measured: Int[Tensor, " k"], *, temperature: float
    ) -> TokenGradients:
        """Token gradients of one unpadded sequence.

        ids: the sequence. targets: indices in it of the response tokens, ascending, none 0. measured: which of the
        targets (indices into `targets`, ascending) get the norms that need a backward pass; the rest get NaN there.
        """
        if not len(measured):
            return self._measure_cheaply(ids, targets, temperature)
        head, sequence = self._start(ids[: targets[-1] + 1], targets, temperature)
        act = head.last_norm.new_full((len(targets), len(self.blocks) + 1), float("nan"))
        act[measured, -1] = head.last_norm[measured]
        # A module that a prefix does not call has no gradient there; a token that is not measured has no number.
        nothing = torch.full_like(head.last_norm, float("nan"))
        nothing[measured] = 0.0
        square: dict[str, Tensor] = defaultdict(nothing.clone)
        for picks in self._chunks(sequence.body, targets, measured):
            layers, by_module = sequence.measure(picks, targets[picks] - 1)
            act[picks, :-1] = layers
            by_module |= self._measure_general(ids, targets, picks, temperature)
            for name, values in by_module.items():
                square[name][picks] = values.to(act)
        self._add_head(square, head, measured)
        if not square:  # of an adapter that these tokens do not pass
            square[""] = nothing
        norms = {name: head.size * values.clamp(min=0).sqrt() for name, values in square.items()}
        total = head.size * torch.stack(list(square.values())).sum(0).clamp(min=0).sqrt()
        return TokenGradients(head.statistics, head.logit_grad_norm, head.size[:, None] * act, total, norms)

    def statistics(self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], *, temperature: float) -> TokenStatistics:
        """log π, log(1−π) and entropy of the targets, without any gradient."""
        return self.head.statistics(ids, targets, temperature=temperature)

    def _measure_cheaply(self, ids: Tensor, targets: Tensor, temperature: float) -> TokenGradients:
        """What needs no backward pass, NaN for the rest."""
        statistics, norms = self.head.measure_cheaply(ids, targets, temperature=temperature)
        unknown = torch.full_like(norms, float("nan"))
        act = unknown[:, None].expand(-1, len(self.blocks) + 1).clone()
        return TokenGradients(statistics, norms, act, unknown, {})

    def _start(
        self, ids: Tensor, targets: Tensor, temperature: float, *, rules: bool = True
    ) -> tuple[HeadPass, DecoderSequence | GraphSequence]:
        """The head's pass, and what the body is to measure with it."""
        decoder = self.decoder if rules else None
        with nullcontext() if decoder is None else decoder.recording() as seen:
            head = self.head.measure(ids, targets, temperature=temperature)
        sequence = None if decoder is None else decoder.follow(ids, head, seen)
        if sequence is not None:
            return head, sequence
        factors = Factors(len(ids) - 1)
        factors.remember(head.calls)
        return head, GraphSequence(self.graph, ids, head, factors)

    def _add_head(self, square: dict[str, Tensor], head: HeadPass, measured: Tensor) -> None:
        """Squared gradient norms of the modules that the head alone calls, and the head's part of a shared table."""
        table, tied_head = self.claims.tied or (None, None)
        for name, (call, delta, inputs) in head.local.items():
            if name == tied_head:  # The table counts under the embedding's name, the head's bias under its own.
                square[table][measured] += outer_square_norms(delta, inputs, bias=False)[measured]
                if call.module.bias is not None:
                    square[name][measured] = delta.square().sum(1)[measured]
            elif name not in square:
                square[name][measured] = self.head.square_norms(head, name)[measured]

    def _chunks(self, body: DecoderBody | GraphBody, targets: Tensor, measured: Tensor) -> Iterator[Tensor]:
        """Neighbouring tokens, as many as fill the rows and fit the memory over their common prefix."""
        rows = min(self.rows, max(1, self.memory // body.bytes_per_row))
        for part in neighbours(targets[measured].tolist(), rows=rows, spare=body.spare_rows):
            yield measured[part]

    # What no rule claims: one autograd gradient a token.

    def _measure_general(self, ids: Tensor, targets: Tensor, picks: Tensor, temperature: float) -> dict[str, Tensor]:
        """Squared gradient norms [K] by module, of parameters that no rule claims."""
        if not self.claims.general:
            return {}
        parameters = [self.model.get_parameter(name) for name in self.claims.general]
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                logits = self.head.logits(ids[: targets[picks[-1]]], targets[picks] - 1)
                each = logits.unbind()
            seeds = unit_errors(logits, ids[targets[picks]], temperature)[0] / temperature
            square: dict[str, Tensor] = defaultdict(lambda: seeds.new_zeros(len(picks)))
            for k in range(len(picks) if logits.requires_grad else 0):  # This prefix may not use them at all.
                gradients = torch.autograd.grad(
                    each[k], parameters, seeds[k].to(logits.dtype), retain_graph=k + 1 < len(picks), allow_unused=True
                )
                for module, gradient in zip(self.claims.general.values(), gradients, strict=True):
                    if gradient is not None:
                        square[module][k] += gradient.to(seeds.dtype).square().sum().to(seeds.device)
            return square
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def _rules_hold(self, ids: Int[Tensor, " n"]) -> bool:
        """Whether the rules give what the graph gives for some tokens of a short sequence."""
        targets = torch.arange(len(ids) // 2, len(ids), device=ids.device)
        everything = torch.arange(len(targets), device=ids.device)
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 0.15
        found = []
        for rules in (True, False):
            head, sequence = self._start(ids, targets, 1.0, rules=rules)
            if rules and not isinstance(sequence, DecoderSequence):
                return False
            layers, by_module = sequence.measure(everything, targets - 1)
            square: dict[str, Tensor] = defaultdict(lambda n=head.last_norm: torch.zeros_like(n))
            square |= by_module
            self._add_head(square, head, everything)
            found.append((layers, {name: values.clamp(min=0).sqrt() for name, values in square.items()}))
        (layers, norms), (expected_layers, expected) = found
        # A module whose own norm is nearly nothing is rounding.
        slack = torch.stack(list(expected.values())).norm(dim=0) / 100
        same = (layers - expected_layers).abs() <= tolerance * expected_layers
        return (
            norms.keys() == expected.keys()
            and bool(same.all())
            and all(
                bool(((norms[name] - norm).abs() <= tolerance * (norm + slack)).all())
                for name, norm in expected.items()
            )
        )
