"""The body of any decoder-only model: autograd carries several tokens' gradients back, and rules turn them into norms.

The body is everything that mixes positions (see `recording`). A chunk of tokens costs one forward pass over its prefix,
and one batched vector-Jacobian product for all of its tokens.
What the rules need to know about a sequence's inputs is computed once for all of its prefixes (`Factors`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradscope.errors import InputError
from gradscope.gradients.engine.embeddings import TableNorms
from gradscope.gradients.engine.grouping import ROWS, Chunk, Limits
from gradscope.gradients.engine.head import HeadPass
from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import diagonal_square_norms, linear_square_norms, prefix_factor
from gradscope.gradients.engine.ownership import Ownership, parameter_slopes
from gradscope.gradients.engine.recording import Call, Recorder, streams_last
from gradscope.gradients.engine.results import ChunkNorms
from gradscope.policy import Policy, takes


class Factors:
    """Factors and slopes of one sequence's inputs, computed on first use and shared by all of its prefixes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._whole: dict[str, list[Call]] = {}
        self._made: dict[object, object] = {}
        self._first: set[int] = set()

    def remember(self, calls: list[Call]) -> None:
        """Store the calls of a forward pass over the whole sequence; later passes must repeat it."""
        if not self._whole:
            for call in calls:
                self._whole.setdefault(call.name, []).append(call)

    def compare(self, calls: list[Call]) -> None:
        """Find the calls whose inputs are the first rows of the whole sequence's call; synchronises with the device."""
        asked, same = [], []
        for call in calls:
            whole = self._whole.get(call.name, [])
            if len(whole) != 1 or not whole[0].by_position(self.length) or call.inputs.ndim != whole[0].inputs.ndim:
                continue
            first = whole[0].inputs[:, : call.inputs.shape[1]]
            if first.shape == call.inputs.shape:  # Otherwise its second axis is equally long by chance.
                tolerance = 1e-4 if first.dtype in (torch.float32, torch.float64) else 0.05
                asked.append(call)
                same.append((first - call.inputs).norm() <= tolerance * first.norm())
        told = torch.stack([one.to(same[0].device) for one in same]).tolist() if same else []
        self._first = {id(call) for call, holds in zip(asked, told, strict=True) if holds}

    def factor(self, flow: list[tuple[Call, Tensor]]) -> Tensor:
        """Return the factor of a linear module's inputs, over the rows of these calls."""
        call, bias = flow[0][0], flow[0][0].module.bias is not None
        whole = self._whole_call(call) if len(flow) == 1 else None
        if whole is None:
            return prefix_factor(torch.cat([c.inputs.flatten(0, -2) for c, _ in flow]), bias=bias)
        key = (whole.input_key, bias)
        if key not in self._made:
            self._made[key] = prefix_factor(whole.inputs.flatten(0, -2), bias=bias)
        rows, made = call.inputs.shape[:-1].numel(), self._made[key]
        return made[:rows, :rows]  # Triangular: the other columns are zero.

    def slopes(self, call: Call) -> list[Tensor]:
        """Return ∂output/∂parameter of a diagonal module over the call's rows, for each parameter."""
        whole = self._whole_call(call)
        if whole is None:
            return list(parameter_slopes(call.module, call.inputs))
        if call.name not in self._made:
            self._made[call.name] = list(parameter_slopes(call.module, whole.inputs))
        return [slope[:, : call.inputs.shape[1]] for slope in self._made[call.name]]

    def _whole_call(self, call: Call) -> Call | None:
        """Return the whole sequence's call of the same module, if this call sees its first rows."""
        return self._whole[call.name][0] if id(call) in self._first else None


def join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate, without a copy if there is only one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class GraphBody:
    """Measures the body of a policy by autograd; probe_ids is a short sequence to try it on, `seen` its recorded pass,
    if any.

    batched: whether several tokens are carried back at once; False if vmap does not support an operation of the model.
    """

    def __init__(
        self,
        policy: Policy,
        ownership: Ownership,
        split_point: str | None,
        probe_ids: Int[Tensor, " n"],
        seen: Recorder | None = None,
    ) -> None:
        self.model, self.blocks, self.ownership, self.split_point = policy.model, policy.blocks, ownership, split_point
        self.batched, self.bytes_per_row = self._probe(seen or self.record(probe_ids), len(probe_ids))
        """Bytes of the gradients for one token at one position."""
        self.metric: Metric | None = None
        """Scales of the gradients, if scaled norms are measured too."""

    def limits(self, rows: int | None, memory: int) -> Limits:
        """Return the chunk limits; chunks end only at wide gaps, as each costs a forward pass."""
        return Limits(min(ROWS if rows is None else rows, max(1, memory // self.bytes_per_row)), start=None)

    def record(self, ids: Int[Tensor, " n"]) -> Recorder:
        """Record the body's forward pass."""
        body = self.model.base_model
        with Recorder(self.model, self.blocks, self.ownership, self.split_point, "body") as recorder:
            # Without a mask, transformers synchronises with the device to detect packed sequences.
            masked = {"attention_mask": torch.ones_like(ids)[None]} if takes(body, "attention_mask") else {}
            body(input_ids=ids[None], use_cache=False, **masked)
        return recorder

    def _probe(self, recorder: Recorder, length: int) -> tuple[bool, int]:
        splits = 1 if self.split_point is None else 2
        once = len(recorder.block_edges) == len(self.blocks) and len(recorder.splits) == splits
        if not once or len({id(block) for block in self.blocks}) != len(self.blocks):
            raise InputError(
                f"{type(self.model).__name__} runs a block of its ModuleList more than once or never, so a layer's "
                "gradient is not defined; name the list whose blocks run once each with --blocks"
            )
        edges = [*recorder.block_edges, *(call.edge for call in recorder.calls)]
        seeds = [torch.stack([torch.ones_like(tensor)] * 2) for tensor in recorder.splits]
        numbers = sum(call.width for call in recorder.calls) + recorder.splits[0].numel() * len(recorder.block_edges)
        flow = 2 * numbers * max(4, recorder.splits[0].element_size()) // length
        try:
            _vjp(recorder.splits, edges, seeds, batched=True, again=True)
        except RuntimeError:  # vmap does not support some operation: take one gradient after the other.
            return False, flow
        return True, flow


@dataclass(frozen=True)
class GraphSequence:
    """One sequence that a GraphBody measures."""

    body: GraphBody
    ids: Int[Tensor, " n"]
    head: HeadPass
    factors: Factors
    seen: Recorder | None = None
    """The body's forward pass, if already made; not modified."""

    wave_rows = 0
    """Positions × tokens of chunks carried through a block together; 0: one chunk at a time."""

    def measure(self, chunks: Sequence[Chunk]) -> list[ChunkNorms]:
        """Measure ‖δ_ℓ‖ for ℓ = 0 … L − 1, and squared gradient norms."""
        return [self._measure(chunk) for chunk in chunks]

    def _measure(self, chunk: Chunk) -> ChunkNorms:
        picks, positions = chunk.picks[0], chunk.positions[0]
        recorder = self.seen or self.body.record(self.ids[: chunk.length])
        self.factors.compare(recorder.calls)
        # With several devices, gradients live on their module's device; norms are joined at the end.
        last, dtype = self.head.last_norm, self.head.last_norm.dtype
        token = torch.arange(len(picks), device=positions.device)
        seeds = [tensor.new_zeros(len(picks), *tensor.shape) for tensor in recorder.splits]
        for seed, rows in zip(seeds, self.head.split_cotangents, strict=True):
            seed = streams_last(seed, chunk.length, axis=1)
            at = token.to(seed.device), 0, positions.to(seed.device)
            seed[at] = rows[picks].reshape(len(picks), *seed.shape[3:]).to(seed)
        edges = [*recorder.block_edges, *(call.edge for call in recorder.calls)]
        deltas = _vjp(recorder.splits, edges, seeds, batched=self.body.batched, again=self.seen is not None)
        depth = len(recorder.block_edges)
        act = torch.stack([delta.flatten(1).to(dtype).norm(dim=1).to(last.device) for delta in deltas[:depth]], 1)
        by_module: dict[str, list[tuple[Call, Tensor]]] = defaultdict(list)
        for call, delta in zip(recorder.calls, deltas[depth:], strict=True):
            if delta is not None:
                delta = delta.to(dtype)
                if call.name in self.head.local:  # Called in both parts: add the head's gradient, at one position.
                    rows = self.head.local[call.name][1][picks]
                    at = token.to(delta.device), 0, positions.to(delta.device)
                    delta[at] += rows.reshape(len(picks), *delta.shape[3:]).to(delta)
                by_module[call.name].append((call, delta))
        squares = {name: self._square_norms(name, flow, picks) for name, flow in by_module.items()}
        scaled = None
        if self.body.metric is not None:
            found = (self._square_norms(name, flow, picks, self.body.metric) for name, flow in by_module.items())
            scaled = sum((values.to(last.device) for values in found), torch.zeros_like(act[:, 0]))[None]
        return ChunkNorms(act[None], {name: values.to(last.device)[None] for name, values in squares.items()}, scaled)

    def _square_norms(
        self, name: str, flow: list[tuple[Call, Tensor]], picks: Tensor, metric: Metric | None = None
    ) -> Tensor:
        """Return the squared norms [K] of one module's gradient over all its calls; metric: of the scaled gradient."""
        rule, module = self.body.ownership.rules[name], flow[0][0].module
        deltas = join([delta.flatten(1, -2) for _, delta in flow], 1)
        by_position = deltas.transpose(0, 1)[None]
        if rule in ("linear", "conv1d"):
            if metric is None:
                return linear_square_norms(by_position, self.factors.factor(flow)[None])[0]
            inputs = join([call.inputs.flatten(0, -2) for call, _ in flow], 0)[None]
            return metric.linear(module, by_position, inputs.to(deltas))[0]
        if rule == "diagonal":
            slopes = zip(*(self.factors.slopes(call) for call, _ in flow), strict=True)
            joined = (join([slope.flatten(0, -2) for slope in own], 0).to(deltas.dtype) for own in slopes)
            scales = [None if metric is None else metric.of(p) for p in module.parameters(recurse=False)]
            return sum(diagonal_square_norms(deltas, *one) for one in zip(joined, scales, strict=True))
        table, ids = TableNorms(self.body.ownership, name, module, self.head), flow[0][0].inputs.flatten()[None]
        return table.squares(ids, by_position, picks[None], metric)[0]


def _vjp(
    outputs: list[Tensor],
    edges: list[GradientEdge],
    seeds: list[Float[Tensor, "K ..."]],
    *,
    batched: bool,
    again: bool = False,
) -> list[Tensor | None]:
    """Return the VJPs of K seeds, [K, *shape] per edge, None without a gradient; again: keep the graph for later."""
    if batched:
        found = torch.autograd.grad(outputs, edges, seeds, is_grads_batched=True, retain_graph=again, allow_unused=True)
        return list(found)
    each = [
        torch.autograd.grad(outputs, edges, list(seed), retain_graph=True, allow_unused=True)
        for seed in zip(*seeds, strict=True)
    ]
    return [None if rows[0] is None else torch.stack(rows) for rows in zip(*each, strict=True)]
