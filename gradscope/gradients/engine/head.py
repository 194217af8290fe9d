"""The head: everything that acts on each position separately, so that one backward pass serves every token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.norms import diagonal_square_norms, outer_square_norms
from gradscope.gradients.engine.ownership import Ownership, parameter_slopes
from gradscope.gradients.engine.recording import Call, Recorder, streams_last
from gradscope.gradients.engine.stack import Stack
from gradscope.objective import (
    LOGPROB,
    Given,
    Outputs,
    Quantity,
    TokenStatistics,
    choosing_places,
    finish,
    given_at,
    join_statistics,
    make_ready,
    parts_at_once,
)
from gradscope.policy import Policy, takes

LOGIT_BYTES = 5 * 4
"""Bytes per logit: up to five float32 arrays (logit and gradient), if logits are capped and rows gathered."""


@dataclass(frozen=True)
class HeadPass:
    """Results of the head's backward pass that the body needs; rows are the targets of all sequences in turn."""

    statistics: TokenStatistics
    size: Float[Tensor, " m"]
    """Largest entry of e − π. The other gradients are divided by it, so that squares do not underflow as π → 1."""
    logit_grad_norm: Float[Tensor, " m"]
    last_norm: Float[Tensor, " m"]
    """‖δ_L‖."""
    split_cotangents: list[Tensor]
    """Gradient at each split point, at the target's position, [m, width]."""
    local: dict[str, tuple[Call, Tensor, Tensor]]
    """Module → (call without inputs, gradient at its output, its input), both at the target's position, [m, width]."""
    calls: list[Call]
    """Calls of every claimed module over the whole stack, if requested."""


class Head:
    """Runs a policy's head, cut at its split point (see `recording`), with at most `memory` bytes of logits a pass."""

    def __init__(self, policy: Policy, ownership: Ownership, split_point: str | None, memory: int) -> None:
        self.model, self.blocks, self.ownership, self.split_point = policy.model, policy.blocks, ownership, split_point
        self._keeps_logits = takes(self.model, "logits_to_keep")
        self._vocabulary, self._memory = policy.vocab_size, memory
        self.of: Quantity = LOGPROB
        """The quantity whose gradient is measured; e − π stands for its slope at logits / T."""

    @property
    def rows(self) -> int:
        """Number of positions whose logits fit into memory, with those of a teacher."""
        return logit_rows(self._vocabulary * (6 if self.of.teacher is not None else 5) // 5, self._memory)

    def measure(self, stack: Stack, *, keep_calls: bool = False) -> HeadPass:
        """Run one pass for all targets, or several if logits would not fit; keep_calls: return all modules' calls."""
        everything = torch.arange(len(stack.positions), device=stack.ids.device)
        places = len(stack.positions.unique()) if self._keeps_logits else stack.ids.shape[1]
        fits = len(stack.ids) * places <= self.rows
        split = [everything] if fits else everything.split(max(1, self.rows // len(stack.ids)))
        parts = [self._measure_part(stack, part, keep_calls=keep_calls) for part in split]
        if len(parts) == 1:
            return parts[0]
        return HeadPass(
            join_statistics([p.statistics for p in parts]),
            torch.cat([p.size for p in parts]),
            torch.cat([p.logit_grad_norm for p in parts]),
            torch.cat([p.last_norm for p in parts]),
            [torch.cat(rows) for rows in zip(*(p.split_cotangents for p in parts), strict=True)],
            {
                name: (call, torch.cat([p.local[name][1] for p in parts]), torch.cat([p.local[name][2] for p in parts]))
                for name, (call, _, _) in parts[0].local.items()
            },
            parts[0].calls,
        )

    @torch.no_grad()
    def measure_cheaply(
        self, ids: Int[Tensor, " n"], targets: Int[Tensor, " m"], *, temperature: float, candidates: Given = ()
    ) -> tuple[TokenStatistics, Float[Tensor, " m"]]:
        """Compute the targets' log π, log(1−π), entropy and ‖e − π‖, which need no backward pass."""
        reach, statistics, norms = int(targets[-1]), [], []
        ids, targets = (values.to(self.model.device, non_blocking=True) for values in (ids[: reach + 1], targets))
        prefix, parts = ids[:reach], targets.split(self.rows)
        hidden = [None]
        if len(parts) > 1:  # all parts share one pass through the blocks
            with choosing_places(self.model, targets - 1, keep=True) as found:
                self.model(input_ids=prefix[None], use_cache=False)
            hidden = found[0].split(self.rows)
        beside = given_at(self.of, prefix[None], targets - 1, candidates)
        beside = [*zip(*(values.split(self.rows) for values in beside), strict=True)] or [()] * len(parts)
        for part, states, own in zip(parts, hidden, beside, strict=True):
            logits = logits_at(self.model, prefix, part - 1) if states is None else finish(self.model, states)
            outputs = Outputs(logits, ids[part], temperature, make_ready(self.of, own, logits))
            for few in parts_at_once(logits):
                found, errors = self.of.statistics_and_slope(outputs[few])
                statistics.append(found)
                norms.append(_norms(*unit_errors(errors)))
        return join_statistics(statistics), torch.cat(norms)

    def square_norms(self, head: HeadPass, name: str, metric: Metric | None = None) -> Float[Tensor, " m"]:
        """Return squared gradient norms of a head's module, one position per token; metric: scaled norms."""
        call, delta, inputs = head.local[name]
        if self.ownership.rules[name] == "diagonal":
            width = call.inputs.shape[-1]
            slopes = (slope.reshape(len(delta), -1, width) for slope in inputs.unbind(1))
            scales = [None if metric is None else metric.of(p) for p in call.module.parameters(recurse=False)]
            pairs = zip(slopes, scales, strict=True)
            return sum(diagonal_square_norms(delta.reshape(s.shape), s, scale) for s, scale in pairs)
        if metric is not None:
            return metric.at_one_position(call.module, delta, inputs)
        return outer_square_norms(delta, inputs, bias=call.module.bias is not None)

    def _measure_part(self, stack: Stack, part: Int[Tensor, " k"], *, keep_calls: bool) -> HeadPass:
        """Measure some of the stack's targets."""
        sequences, positions, token_ids, temperature = (
            values[part] for values in (stack.sequences, stack.positions, stack.token_ids, stack.temperature)
        )
        targets_at = _TargetRows(sequences, positions, length=stack.ids.shape[1])
        parts = self.model, self.blocks, self.ownership, self.split_point
        with Recorder(*parts, "head", keep_all=keep_calls) as recorder:
            kept = {"logits_to_keep": targets_at.kept} if self._keeps_logits else {}
            logits = targets_at.rows(self.model(input_ids=stack.ids, use_cache=False, **kept).logits)
        places = sequences * stack.ids.shape[1] + positions
        candidates = tuple(values[part] for values in stack.candidates)
        given = make_ready(self.of, given_at(self.of, stack.ids, places, candidates), logits)
        outputs = Outputs(logits, token_ids, temperature, given)
        seeds, found, sizes, norms = torch.empty_like(logits, requires_grad=False), [], [], []
        for few in parts_at_once(logits):
            statistics, errors = self.of.statistics_and_slope(outputs[few])
            unit, size = unit_errors(errors)
            found.append(statistics)
            sizes.append(size)
            norms.append(_norms(unit, size))
            seeds[few] = unit.div_(temperature[few, None])
        statistics, size, logit_norm = join_statistics(found), torch.cat(sizes), torch.cat(norms)
        calls = [call for call in recorder.calls if call.edge is not None]
        edges = [*recorder.splits, recorder.block_edges[0], *(call.edge for call in calls)]
        deltas = torch.autograd.grad([logits], edges, [seeds], allow_unused=True)
        splits, length = len(recorder.splits), stack.ids.shape[1]
        hidden = [streams_last(d, length) for d in deltas[: splits + 1]]
        rows = [None if d is None else targets_at.rows(d).to(size) for d in (*hidden, *deltas[splits + 1 :])]
        # Release the graph and the inputs over the whole stack.
        local = {
            call.name: (
                replace(call, inputs=call.inputs.new_empty(0, call.inputs.shape[-1]), edge=None),
                row,
                self._local_inputs(call, targets_at).to(size),
            )
            for call, row in zip(calls, rows[splits + 1 :], strict=True)
            if row is not None
        }
        last = rows[splits].norm(dim=1)
        return HeadPass(statistics, size, logit_norm, last, rows[:splits], local, recorder.calls if keep_calls else [])

    def _local_inputs(self, call: Call, targets_at: _TargetRows) -> Tensor:
        """Return the inputs of a head's module [m, width], or a diagonal one's slopes [m, parameters, width]."""
        if self.ownership.rules[call.name] != "diagonal":
            return targets_at.rows(call.inputs)
        return torch.stack([targets_at.rows(s) for s in parameter_slopes(call.module, call.inputs)], 1)


class _TargetRows:
    """The positions of the targets' logits in a stack of a given length."""

    def __init__(self, sequences: Int[Tensor, " m"], positions: Int[Tensor, " m"], *, length: int) -> None:
        self._sequences, self._positions, self._length = sequences, positions, length
        self.kept, self._columns = positions.unique(return_inverse=True)
        """Positions at which any sequence has a target, ascending."""

    def rows(self, values: Tensor) -> Float[Tensor, "m width"]:
        """Gather the targets' rows from [B, n, …] or, if only kept positions exist, [B, u, …]; B may be missing."""
        rows = values.flatten(2) if values.ndim > 2 else values[None]
        columns = self._positions if rows.shape[1] == self._length else self._columns
        if rows.shape[0] * rows.shape[1] == len(columns):  # all rows, in order
            return rows.flatten(0, 1)
        return rows[self._sequences.to(rows.device), columns.to(rows.device)]


def logits_at(model: nn.Module, ids: Int[Tensor, " n"], positions: Int[Tensor, " m"]) -> Float[Tensor, "m vocab"]:
    """Return one sequence's logits at these positions."""
    if takes(model, "logits_to_keep"):
        return model(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[0]
    return model(input_ids=ids[None], use_cache=False).logits[0, positions]


def logit_rows(vocab: int, memory: int) -> int:
    """Return the number of positions whose logits fit into memory, with the copies that their gradient needs."""
    return max(1, memory // (LOGIT_BYTES * vocab))


def unit_errors(errors: Float[Tensor, "m vocab"]) -> tuple[Float[Tensor, "m vocab"], Float[Tensor, " m"]]:
    """Divide e − π by its largest entry, in place; return both."""
    # On a CPU, the norm of order inf takes ten times as long.
    size = torch.maximum(errors.amax(1), -errors.amin(1)).abs()  # avoids −0
    return errors.div_(size.clamp(min=torch.finfo(size.dtype).tiny)[:, None]), size


def _norms(unit: Float[Tensor, "m vocab"], size: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Return ‖e − π‖ from `unit_errors`, without underflow."""
    return size * torch.linalg.vector_norm(unit, dim=1)
