"""Exact norms of every token's own gradient, at each layer's activations and over all parameters.

There are two passes. The head acts on each position separately, so one vector-Jacobian product with e − π (computed
without cancellation) serves all tokens. The body mixes positions, so tokens go through it in chunks over their longest
prefix: by analytic backward rules for common decoders, a few sequences together, or by autograd, one sequence at a
time. Parameters that no rule covers take one autograd gradient per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.budget.graph_memory import graph_fits, recomputing
from gradscope.gradients.engine.autograd import Factors, GraphBody, GraphSequence
from gradscope.gradients.engine.decoder.body import DecoderBody, DecoderStack
from gradscope.gradients.engine.grouping import Chunk, Limits, Span, group_sequences, neighbours, waves
from gradscope.gradients.engine.head import Head, HeadPass, logits_at, unit_errors
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import outer_square_norms
from gradscope.gradients.engine.ownership import Ownership, check_prefixes, find_ownership, probe_model
from gradscope.gradients.engine.plain import measure_plainly
from gradscope.gradients.engine.products import PRODUCTS, Precision, measure_speedup
from gradscope.gradients.engine.recording import Cut, Recorder, find_cut
from gradscope.gradients.engine.results import TokenGradients
from gradscope.gradients.engine.stack import SequenceTokens, Stack, targets_before
from gradscope.objective import LOGPROB, Given, Outputs, Quantity, TokenStatistics, given_at, make_ready
from gradscope.policy import Policy, arithmetic_dtype
from gradscope.runs import SILENT, Progress

TRIAL = 16
"""Longest sequence on which a model's structure is probed, in tokens."""


class TokenGradientMeter:
    """Measures token gradients of one policy; create and use it inside `measuring(policy.model)`.

    Args:
        probe_ids: a sequence to learn the model's structure from; take the longest.
        rows: most positions × tokens in one chunk (the rows of its matrix products); None: 1,536, or more if starting a
            chunk is expensive.
        memory: bytes for each of: gradients, logits, attention probabilities, and the activations of sequences that are
            measured together. Limits the size of chunks and groups.
        rules: whether analytic backward rules may be used; False: always use autograd.
        precision: of the rules' matrix products; autograd's are always exact.
    """

    def __init__(
        self,
        policy: Policy,
        probe_ids: Int[Tensor, " n"],
        *,
        rows: int | None = None,
        memory: int = 1 << 30,
        rules: bool = True,
        precision: Precision = "exact",
    ) -> None:
        self.model, self.blocks, self.device = policy.model, policy.blocks, policy.device
        self.rows, self.memory, self._precision = rows, memory, precision
        probe = probe_model(self.model, self.blocks, probe_ids)
        check_prefixes(policy, probe_ids, probe.hidden)
        self.ownership: Ownership = find_ownership(self.model, self.blocks, probe)
        del probe
        short = probe_ids[:TRIAL]
        cut = find_cut(self.model, self.blocks, self.ownership, short) if len(short) > 2 else Cut(None, None)
        self.split_point = cut.split_point
        self.head = Head(policy, self.ownership, self.split_point, memory)
        self.graph = GraphBody(policy, self.ownership, self.split_point, short, cut.body)
        """Measures the body by autograd."""
        if cut.body is None and len(short) > 2 and _is_finite(self.model, short):
            raise InputError(
                f"the logits of {type(self.model).__name__} at a position must depend on the last block's output "
                f"at that position and nothing else ({policy.blocks_name}); name the list that holds the last "
                "blocks of the residual stream with --blocks, if there is one"
            )
        self.decoder = DecoderBody.find(policy, self.ownership, self.split_point, memory) if rules else None
        """Measures the body by analytic rules; None if it is not a common decoder."""
        if self.decoder is not None and not self._rules_hold(short, cut.body):
            self.decoder = None
        if self.decoder is not None:
            self.decoder.multiply = PRODUCTS[precision]
        self.metric: Metric | None = None
        self.progress: Progress = SILENT
        """Reports progress within a long response."""
        keep_freed_memory()

    @property
    def of(self) -> Quantity:
        """The quantity whose gradients are measured."""
        return self.head.of

    def use(self, of: Quantity = LOGPROB, metric: Metric | None = None) -> None:
        """Measure this quantity's gradients from now on. metric: also their norms scaled entry by entry; None: not."""
        self.head.of = of
        self.metric = self.graph.metric = metric
        if self.decoder is not None:
            self.decoder.metric = metric

    @property
    def precision(self) -> Precision | None:
        """Precision of the analytic backward pass; None if autograd is used."""
        return self._precision if self.decoder is not None else None

    @property
    def module_names(self) -> list[str]:
        """Return the modules that own parameters; a tied table belongs to the embedding."""
        ownership = self.ownership
        return sorted(
            {*ownership.rules, *ownership.general.values()} - set(ownership.tied[1:] if ownership.tied else ())
        )

    @property
    def speedup(self) -> float:
        """Return the speedup of this precision's products over exact ones, for the first block's MLP."""
        return measure_speedup(self._precision, self.decoder.blocks[0].gate.module.weight)

    def measure(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], measured: Int[Tensor, " k"], *, temperature: float
    ) -> TokenGradients:
        """Measure the token gradients of one unpadded sequence.

        ids: the sequence. targets: indices of the response tokens in it, ascending, none 0. measured: indices into
        `targets`, ascending, of those to measure; the rest are NaN. `measure_cheaply` gives what needs no backward
        pass.
        """
        return self.measure_together([SequenceTokens(ids.cpu(), targets.cpu(), measured.cpu(), temperature)])[0]

    def measure_together(self, sequences: Sequence[SequenceTokens]) -> list[TokenGradients]:
        """Measure several sequences at once (see `group`), with the same results up to rounding."""
        asked = [i for i, s in enumerate(sequences) if len(s.measured)]
        order = sorted(asked, key=lambda i: -len(sequences[i].measured))
        groups = [order] if self._together else [[i] for i in order]
        found = {i: self._measure_nothing(s) for i, s in enumerate(sequences) if not len(s.measured)}
        for group in filter(None, groups):
            parts = self._measure_stack([sequences[i].asked for i in group])
            found |= {i: _scatter(part, sequences[i]) for i, part in zip(group, parts, strict=True)}
        return [found[i] for i in range(len(sequences))]

    def group(self, sequences: Sequence[SequenceTokens]) -> list[list[int]]:
        """Return groups of indices of sequences to measure together; those without measured tokens are alone."""
        if not self._together:
            return [[index] for index in range(len(sequences))]
        limits = self._limits(self.decoder)

        def most(length: int) -> int:
            return self.decoder.most_sequences(length, rows=limits.rows, logits=self.head.rows)

        # Nothing is computed after the last measured token.
        return group_sequences(
            [s.lengths for s in sequences], [max(s.lengths, default=0) for s in sequences], limits, most=most
        )

    def measure_cheaply(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], *, temperature: float, candidates: Given = ()
    ) -> tuple[TokenStatistics, Float[Tensor, " m"]]:
        """Compute what needs no backward pass: log π, log(1−π) and entropy of the targets, and ‖e − π‖."""
        return self.head.measure_cheaply(ids, targets, temperature=temperature, candidates=candidates)

    @property
    def _together(self) -> bool:
        """Return whether sequences may share passes."""
        return self.decoder is not None and not self.ownership.general

    def _measure_nothing(self, sequence: SequenceTokens) -> TokenGradients:
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        unknown = torch.full((len(sequence.targets),), float("nan"), dtype=dtype, device=self.device)
        act = unknown[:, None].expand(-1, len(self.blocks) + 1).clone()
        scaled = None if self.metric is None else unknown
        return TokenGradients(TokenStatistics(unknown, unknown, unknown), unknown, act, unknown, {}, scaled)

    def _measure_stack(self, sequences: Sequence[SequenceTokens]) -> list[TokenGradients]:
        """Measure sequences all of whose targets are measured, those with more of them first."""
        stack = Stack.of(sequences, torch.promote_types(self.model.dtype, torch.float32), self.device)
        head, body = self._start(stack)
        if body is None and len(sequences) == 1:
            return [self._measure_apart(sequences[0])]
        if body is None:
            del head
            return [self._measure_stack([sequence])[0] for sequence in sequences]
        starts = [0, *accumulate(len(s.targets) for s in sequences)]
        picks = [start + s.measured for start, s in zip(starts[:-1], sequences, strict=True)]
        positions = targets_before(sequences)
        act = head.last_norm.new_empty(len(stack.positions), len(self.blocks) + 1)
        act[:, -1] = head.last_norm
        # A module that was not called has no gradient.
        square: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(head.last_norm))
        scaled = None if self.metric is None else torch.zeros_like(head.last_norm)
        spans = neighbours([s.lengths for s in sequences], self._limits(body.body))
        with self.progress.stage("norms", len(stack.positions), "tokens") as advance:
            for wave in waves(spans, body.wave_rows):
                chunks = [Chunk.of(span, picks, positions, self.device) for span in wave]
                for chunk, measured in zip(chunks, body.measure(chunks), strict=True):
                    tokens = chunk.values(chunk.picks)
                    act[tokens, :-1] = chunk.values(measured.layers)
                    for name, values in measured.squares.items():
                        square[name][tokens] = chunk.values(values).to(act)
                    if measured.scaled is not None:
                        scaled[tokens] = chunk.values(measured.scaled).to(act)
                    for name, values in self._measure_general(sequences[0], tokens, scaled).items():
                        square[name][tokens] = values.to(act)
                    advance(len(tokens))
        called = set(square)
        self._add_head(square, head)
        if scaled is not None:
            scaled = head.size * (scaled + self._scaled_head(head, called)).clamp(min=0).sqrt()
        if not square:  # an adapter that these tokens do not pass through
            square[""] = torch.zeros_like(head.last_norm)
        norms = {name: head.size * values.clamp(min=0).sqrt() for name, values in square.items()}
        total = head.size * torch.stack(list(square.values())).sum(0).clamp(min=0).sqrt()
        found = TokenGradients(head.statistics, head.logit_grad_norm, head.size[:, None] * act, total, norms, scaled)
        return [_change(found, lambda values, ends=ends: values[slice(*ends)]) for ends in pairwise(starts)]

    def _measure_apart(self, sequence: SequenceTokens) -> TokenGradients:
        """Measure all targets of a sequence whose graph does not fit, one gradient per token."""
        ids, targets = sequence.ids, sequence.targets
        known = {"temperature": sequence.temperature, "candidates": sequence.candidates}
        statistics, logit_norm = self.measure_cheaply(ids, targets, **known)
        each = measure_plainly(self.model, self.blocks, ids, targets, **known, metric=self.metric, of=self.of)
        found = []
        # Closed even if interrupted, which restores the model's flags.
        with self.progress.stage("norms", len(targets), "tokens") as advance, closing(each):
            for norms in each:
                found.append(norms)
                advance(1)
        as_column = logit_norm.new_tensor
        return TokenGradients(
            statistics,
            logit_norm,
            as_column([norms.act_grad_norm for norms in found]),
            as_column([norms.param_grad_norm for norms in found]),
            {name: as_column([norms.module_grad_norm[name] for norms in found]) for name in found[0].module_grad_norm},
            None if self.metric is None else as_column([norms.scaled_grad_norm for norms in found]),
        )

    def _start(self, stack: Stack) -> tuple[HeadPass | None, DecoderStack | GraphSequence | None]:
        """Run the head's pass; return it and the body's sequences, None if these go singly or a graph does not fit."""
        if self.decoder is not None:
            with self.decoder.recording(stack) as seen:
                head = self.head.measure(stack)
            followed = self.decoder.follow(stack, head, seen)
            if followed is not None or len(stack.ids) > 1:
                return head, followed
        (ids,) = stack.ids
        if not graph_fits(self.model, self.blocks, len(ids)):
            return None, None
        head = self.head.measure(stack, keep_calls=True)
        factors = Factors(len(ids))
        factors.remember(head.calls)
        return head, GraphSequence(self.graph, ids, head, factors)

    def _add_head(self, square: dict[str, Tensor], head: HeadPass) -> None:
        """Add the squared gradient norms of the head's own modules, and the head's part of a tied table."""
        table, tied_head = self.ownership.tied or (None, None)
        for name, (call, delta, inputs) in head.local.items():
            if name == tied_head:  # A tied table counts under the embedding's name, the head's bias under the head's.
                square[table] += outer_square_norms(delta, inputs, bias=False)
                if call.module.bias is not None:
                    square[name] = delta.square().sum(1)
            elif name not in square:
                square[name] = self.head.square_norms(head, name)

    def _scaled_head(self, head: HeadPass, called: set[str]) -> Float[Tensor, " m"]:
        """Return what `_add_head` adds, for scaled gradients; called: modules that the body also calls."""
        square, tied = torch.zeros_like(head.last_norm), self.ownership.tied
        for name, (call, delta, inputs) in head.local.items():
            if (tied and name == tied[1]) or name not in called:
                square += (
                    self.metric.at_one_position(call.module, delta, inputs)
                    if tied and name == tied[1]
                    else (self.head.square_norms(head, name, self.metric))
                )
        return square

    def _limits(self, body: DecoderBody | GraphBody) -> Limits:
        """Return the chunk limits: as many neighbouring tokens as fill the rows and fit into memory."""
        return body.limits(self.rows, self.memory)

    # Parameters without a rule: one autograd gradient per token.

    def _measure_general(self, sequence: SequenceTokens, picks: Tensor, scaled: Tensor | None) -> dict[str, Tensor]:
        """Return the squared gradient norms [K] by module for parameters without a rule; picks: some of the targets.

        scaled: receives those of the scaled gradients, at the picks.
        """
        if not self.ownership.general:
            return {}
        ids, temperature = sequence.ids.to(self.device), sequence.temperature
        targets = sequence.targets[picks.cpu()].to(self.device)
        parameters = [self.model.get_parameter(name) for name in self.ownership.general]
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad(), recomputing(self.model, self.blocks, int(targets[-1])):
                logits = logits_at(self.model, ids[: targets[-1]], targets - 1)
                each = logits.unbind()
            candidates = tuple(values[picks.cpu()] for values in sequence.candidates)
            given = given_at(self.of, ids[None, : targets[-1]], targets - 1, candidates)
            outputs = Outputs(logits.detach(), ids[targets], temperature, make_ready(self.of, given, logits))
            seeds = unit_errors(self.of.evaluate(outputs).slope)[0] / temperature
            square: dict[str, Tensor] = defaultdict(lambda: seeds.new_zeros(len(picks)))
            for k in range(len(picks) if logits.requires_grad else 0):  # This prefix may not use these parameters.
                gradients = torch.autograd.grad(
                    each[k], parameters, seeds[k].to(logits.dtype), retain_graph=k + 1 < len(picks), allow_unused=True
                )
                for module, parameter, gradient in zip(
                    self.ownership.general.values(), parameters, gradients, strict=True
                ):
                    if gradient is not None:
                        square[module][k] += gradient.to(seeds.dtype).square().sum().to(seeds.device)
                    if gradient is not None and scaled is not None:
                        own = self.metric.of(parameter).to(gradient) * gradient
                        scaled[picks[k]] += own.to(seeds.dtype).square().sum().to(scaled)
            return square
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def _rules_hold(self, ids: Int[Tensor, " n"], seen: Recorder | None) -> bool:
        """Return whether rules and autograd agree on two tokens each of a short sequence and of a prefix of it."""
        lengths, here = (len(ids), max(2, 3 * len(ids) // 4)), ids.cpu()
        targets = [torch.tensor(sorted({n // 2, n - 1})) for n in lengths]
        both = [SequenceTokens(here[:n], at, torch.arange(len(at))) for n, at in zip(lengths, targets, strict=True)]
        stack = Stack.of(both, torch.promote_types(self.model.dtype, torch.float32), self.device)
        with self.decoder.recording(stack) as recorded:
            head = self.head.measure(stack)
        rules = self.decoder.follow(stack, head, recorded)
        if rules is None:
            return False
        # One sequence is a prefix of the other, so a single graph holds all tokens at their positions.
        everything = torch.arange(len(stack.positions))
        graph = GraphSequence(self.graph, ids, head, Factors(len(ids)), seen or self.graph.record(ids))
        picks = everything.split([len(at) for at in targets])
        span = Span(tuple(slice(0, len(at)) for at in targets), stack.ids.shape[1])
        chunks = (
            Chunk.of(span, picks, targets_before(both), self.device),
            Chunk(everything[None].to(self.device), stack.positions[None], None, span.length),
        )
        tolerance = 1e-3 if arithmetic_dtype(self.model) in (torch.float32, torch.float64) else 0.15
        found = []
        for body, chunk in zip((rules, graph), chunks, strict=True):
            (measured,) = body.measure([chunk])
            square: dict[str, Tensor] = defaultdict(lambda: torch.zeros_like(head.last_norm))
            square |= {name: chunk.values(values) for name, values in measured.squares.items()}
            self._add_head(square, head)
            found.append(
                (chunk.values(measured.layers), {name: values.clamp(min=0).sqrt() for name, values in square.items()})
            )
        (layers, norms), (expected_layers, expected) = found
        # The norm of a module with nearly no gradient is rounding.
        slack = torch.stack(list(expected.values())).norm(dim=0) / 100
        if norms.keys() != expected.keys():
            return False
        same = [((layers - expected_layers).abs() <= tolerance * expected_layers).all()]
        same += [((norms[name] - norm).abs() <= tolerance * (norm + slack)).all() for name, norm in expected.items()]
        return bool(torch.stack(same).all())


@torch.no_grad()
def _is_finite(model: nn.Module, ids: Int[Tensor, " n"]) -> bool:
    """Return whether the logits are finite. NaN is reported where it is first used."""
    return bool(model(input_ids=ids[None], use_cache=False).logits.isfinite().all())


def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory for reuse, for the rest of the process.

    glibc returns large blocks to the system at once and faults them in again page by page, which takes a fifth of the
    time for small policies. It learns the threshold from the largest block freed so far, up to 32 MiB (mallopt(3)).
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def _scatter(gradients: TokenGradients, sequence: SequenceTokens) -> TokenGradients:
    """Scatter the measured tokens' norms among all targets, NaN elsewhere."""
    if len(sequence.measured) == len(sequence.targets):
        return gradients

    def spread(values: Tensor) -> Tensor:
        out = values.new_full((len(sequence.targets), *values.shape[1:]), float("nan"))
        out[places] = values
        return out

    places = sequence.measured.to(gradients.param_grad_norm.device, non_blocking=True)
    return _change(gradients, spread)


def _change(gradients: TokenGradients, change: Callable[[Tensor], Tensor]) -> TokenGradients:
    """Apply `change` to every tensor of the result."""
    statistics = (change(getattr(gradients.statistics, f.name)) for f in fields(TokenStatistics))
    return TokenGradients(
        TokenStatistics(*statistics),
        change(gradients.logit_grad_norm),
        change(gradients.act_grad_norm),
        change(gradients.param_grad_norm),
        {name: change(norms) for name, norms in gradients.module_grad_norm.items()},
        None if gradients.scaled_grad_norm is None else change(gradients.scaled_grad_norm),
    )
