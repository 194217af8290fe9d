"""J = ∂ log π(o_t)/∂θ as an object: the one thing that gradscope asks of a network.

A row per kept token of a batch, a column per measured parameter, never formed. Summed gradients of any token weighting
are wᵀ·J (`vjp`), what a step does to every token is J·v (`jvp`), and how sums by prompt lie to each other is
w·J·Jᵀ·wᵀ (`gram`). Every weighting, interval and optimizer is arithmetic on these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.products import Precision
from gradscope.gradients.forward_mode import Changes, KeptNumbers, changes_along, refuse_narrow_arithmetic
from gradscope.gradients.gram import Gram, GroupSums, Pairs, Piece, SumsPlan, Way
from gradscope.gradients.hooks import measuring
from gradscope.gradients.resources import Resources
from gradscope.gradients.reverse_mode import add_gradients, differentiable, stream_gradients
from gradscope.gradients.row_norms import RowNorms
from gradscope.gradients.sweep import Sweep
from gradscope.gradients.vectors import Vectors, vector_bytes, zero_vectors
from gradscope.objective import (
    Quantity,
    TokenStatistics,
    batch_statistics,
    fitting_size,
    kept_logprobs,
    kept_numbers,
    micro_batches,
)
from gradscope.policy import AdamWState, Policy, find_blocks, refuse_shards
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, check_room, track


class TokenJacobian:
    """∂ log π(o_t)/∂θ [K, P] of the K tokens that a batch's response_mask keeps, response by response.

    log π is in nats at each response's temperature; θ are all measured parameters, flat, frozen ones too. The model is
    in eval mode, with plain attention, inside a call only: flags, modes, weights and `.grad` are as they were after it.

    Args:
        model: a Policy, or a module of transformers with output embeddings.
        statistics: of the batch's tokens under these weights, where they are known.
        precision: to which `row_norms` rounds the factors of its matrix products, where it knows the decoder.

    Raises:
        InputError: the batch keeps no token, or this process does not have all weights.
    """

    def __init__(
        self,
        model: Policy | nn.Module,
        batch: TokenBatch,
        resources: Resources | None = None,
        *,
        statistics: TokenStatistics | None = None,
        precision: Precision = "exact",
    ) -> None:
        self.policy = model if isinstance(model, Policy) else None
        self.model: nn.Module = model.model if isinstance(model, Policy) else model
        refuse_shards(self.model)
        self.batch = batch
        self.device = next(self.model.parameters()).device
        self.resources = (resources or Resources()).settle(self.device)
        self._known, self._precision = statistics, precision
        if batch.num_tokens == 0:
            raise InputError(
                "response_mask keeps no token, so there is no gradient; give responses with sampled tokens"
            )
        self._places = torch.full(batch.input_ids.shape, -1)
        self._places[batch.response_mask] = torch.arange(batch.num_tokens)

    @property
    def num_tokens(self) -> int:
        """K."""
        return self.batch.num_tokens

    @cached_property
    def prompts(self) -> Int[Tensor, " n"]:
        """Ids of the prompts with a kept token, ascending."""
        return self.batch.group_ids[self.batch.response_mask.any(1)].unique()

    @cached_property
    def statistics(self) -> TokenStatistics:
        """log π, log(1−π) and entropy of every kept token [B, S], nats, on the CPU; 0 elsewhere.

        A policy's responses are scored each by itself, which gives the digits of its token table; a bare module's in
        micro-batches.
        """
        if self._known is not None:
            return self._known
        size = fitting_size(self.model, self.batch, self.resources.micro_batch, copies=2) if self.policy is None else 1
        settings = {"micro_batch_size": size, "device": self.device, "processes": self.resources.processes}
        with self.resources.progress.stage("scoring"), self.frozen():
            return batch_statistics(self.model, self.batch, **settings)

    def select(self, rows: Sequence[int] | Int[Tensor, " b"]) -> TokenJacobian:
        """Return the Jacobian of some responses' tokens, in this order; itself if they are all."""
        if torch.equal(torch.as_tensor(rows), torch.arange(len(self.batch))):
            return self
        known = self._found_statistics
        if known is not None:
            known = TokenStatistics(*(getattr(known, name)[rows] for name in vars(known)))
        return self._share_meter(self._like(self.batch.select(rows), self.resources, known))

    def of_prompts(self, prompts: Sequence[int] | Int[Tensor, " p"]) -> TokenJacobian:
        """Return the Jacobian of some prompts' tokens; every response stays in its row of the batch."""
        return self._share_meter(self._like(self.batch.of_prompts(prompts), self.resources, self._found_statistics))

    def moved(self) -> TokenJacobian:
        """The same tokens at the weights as they are now."""
        return self._like(self.batch, self.resources)

    def alone(self) -> TokenJacobian:
        """The same tokens, for this process by itself."""
        if self.resources.processes.count == 1:
            return self
        return self._share_meter(self._like(self.batch, replace(self.resources, processes=ALONE), self._known))

    def until(self, deadline: float | None) -> TokenJacobian:
        """Return the same Jacobian, whose sums by group end when `time.monotonic` gets there; None: when all is done.
        """
        resources = replace(self.resources, deadline=deadline)
        return self._share_meter(self._like(self.batch, resources, self._found_statistics))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep the model in eval mode, with plain attention and no parameter that requires a gradient."""
        # Gradients flow, whatever the caller switched off.
        with torch.inference_mode(False), measuring(self.model, self.batch.width):
            yield

    @cached_property
    def meter(self) -> TokenGradientMeter:
        """The engine of `row_norms`, which learns the model's structure from the longest sequence."""
        if self.policy is None:
            raise InputError("row norms need a Policy, which knows its blocks; load it with load_policy")
        probe = self.batch.sequence(int(self.batch.attention_mask.sum(1).argmax()))[0].to(self.policy.device)
        with self.frozen():
            memory = self.resources.activations
            return TokenGradientMeter(self.policy, probe, precision=self._precision, memory=memory)

    def kept(self, values: Float[Tensor, "*R B S"]) -> Float[Tensor, "*R K"]:
        """Of numbers for every column of the batch those of the kept tokens."""
        return values[..., self.batch.response_mask]

    def spread(self, values: Float[Tensor, "*R K"]) -> Float[Tensor, "*R B S"]:
        """The kept tokens' numbers at their columns of the batch, 0 elsewhere."""
        out = values.new_zeros(*values.shape[:-1], *self.batch.input_ids.shape)
        out[..., self.batch.response_mask] = values
        return out

    def row_norms(
        self, tokens: Bool[Tensor, " K"] | None = None, *, scale: Float[Tensor, " P"] | None = None
    ) -> RowNorms:
        """Choose rows to be measured: exact norms over all parameters, by module and at every layer's activations.

        Args:
            tokens: which are measured; None: all. The others are NaN.
            scale: what each entry of a row is multiplied by for `scaled_grad_norm`, such as AdamW's metric.

        Raises:
            InputError: the model is a bare module, whose blocks are not known, or the engine cannot measure the model.
        """
        return RowNorms(self, torch.ones(self.num_tokens, dtype=torch.bool) if tokens is None else tokens, scale)

    def vjp(self, weights: Float[Tensor, "R K"], of: Quantity = "logprob") -> Vectors:
        """Sum weighted token gradients: row r is Σ_t weights[r, t]·∇ log π_t, or of entropies.

        With weights −w_t/num_tokens (Eq. 2) it is the gradient of the loss. One forward pass serves every row; each row
        costs a backward pass where it weighs a token of a micro-batch. R + 1 vectors lie in memory or, where that is
        over `resources.vectors`, R in a scratch file; the numbers are the same.

        Raises:
            InputError: the weights are not K a row, or a scratch file finds no room.
        """
        _check_quantities([of])
        weights = self._check(weights)
        whole = (len(weights) + 1) * vector_bytes(self.model) <= self.resources.vectors
        sums = Vectors.zeros(self.model, len(weights), None if whole else 0)

        def take(row: int, name: str, gradient: Float[Tensor, " p"]) -> None:
            sums.rows[row, sums.slices[name]] += gradient.to(sums.rows)

        with differentiable(self.model, self.batch.width):
            for places, piece in self._pieces(self._responses_at_once, 4 if of == "logprob" else 6):
                if self._sweep is not None and self._sweep.is_needed(piece):
                    self._sweep.pass_back(piece, weights[:, places], take, of)
                elif whole:
                    if of == "logprob":  # in less memory
                        numbers = kept_logprobs(self.model, piece)
                    else:
                        numbers = kept_numbers(self.model, piece, [of])[:, 0]
                    add_gradients(self.model, numbers, weights[:, places].to(numbers), sums.rows)
                else:
                    stream_gradients(self.model, piece, weights[:, places], take, of)
        self.resources.processes.sum(sums.rows)
        return sums

    def jvp(self, vectors: Vectors, of: Sequence[Quantity] = ("logprob",)) -> Changes:
        """Differentiate every log π along vectors, ⟨∇ log π_t, vector⟩, or every entropy, or both by the same passes.

        If the parameters move by a vector, each changes by that much to first order. A vector that is not zero
        costs about three forward passes in forward mode. Where an operation of the model has none, a UserWarning says
        so and all changes are central differences, which cost 2 to 16 forward passes and agree to about 2e-4 of the
        root mean square change, in float32, unless they send a token to other experts.

        Raises:
            InputError: the vectors do not fit the model, or its arithmetic is below float32, in which a tangent keeps
                two or three digits.
        """
        _check_quantities(of)
        refuse_narrow_arithmetic(self.model)
        if vectors.rows.shape[1] != (size := zero_vectors(self.model, 0).shape[1]):
            raise InputError(
                f"vectors have {vectors.rows.shape[1]} entries, the model {size} parameters; give one each"
            )
        changes, how = changes_along(
            KeptNumbers(self.model, of), vectors, self.batch, self.resources.micro_batch, self._pieces
        )
        everyone = self.resources.processes.gather([how])
        how = "central differences" if "central differences" in everyone else "forward mode"
        changes = self.resources.processes.sum(changes)
        return Changes(how, **{name: changes[..., q] for q, name in enumerate(of)})

    def gram(
        self,
        weights: Float[Tensor, "R K"],
        *,
        groups: Int[Tensor, " B"] | None = None,
        pairs: Pairs = "all",
        metric: AdamWState | None = None,
        sketch: bool = False,
        totals: bool = False,
        way: Way | None = None,
    ) -> Gram:
        """Multiply sums of token gradients by group with each other: u_{p,r} = Σ_t weights[r, t]·∇ log π_t, t in p.

        One pass over the batch, a backward pass for each row where it weighs a token. Vectors are whole where they fit
        into `resources.vectors`, else sketches. Where not even the inner products of all pairs fit, as many groups as
        fit are drawn at random, and their weights are multiplied by (tokens of all groups) / (tokens of these). The
        processes share the groups.

        Args:
            groups: id of each response's group; None: its prompt's. One without a kept token is none.
            pairs: of every two groups, for which n·R vectors are kept, or within each group alone.
            metric: also in AdamW's metric, whose v̂ takes in the square of Σ_{p,r} u_{p,r}: the loss's gradient.
            sketch: keep a sketch of each vector, for inner products between groups.
            totals: keep the sums over groups as vectors, in a scratch file where the groups' are sketches.
            way: this one, whatever it costs.

        Raises:
            InputError: the weights are not K a row, or the budget does not hold the vectors.
        """
        sums = self._group_sums(self._check(weights), groups)
        plan = sums.plan(pairs, metric=metric is not None, way=way)
        return sums.multiply(plan, pairs, metric=metric, sketch=sketch, totals=totals)

    def plan_gram(self, rows: int, *, pairs: Pairs = "all", metric: bool = False, way: Way | None = None) -> SumsPlan:
        """Tell how `gram` makes so many rows of weights by prompt. Raises InputError where memory is too little."""
        return self._group_sums(torch.zeros(rows, self.num_tokens), None).plan(pairs, metric=metric, way=way)

    def rows_at_once(self, most: int, *, metric: bool = False) -> int:
        """Tell how many rows of weights `gram` makes within groups at a time, beside one more row that is always there.

        Each takes its sum and a group's vector; autograd takes another, and so does a metric.
        """
        beside = 3 + metric  # the row's that is always there, and autograd's
        return int(min(most, max(1, (self.resources.vectors // vector_bytes(self.model) - beside) // 2)))

    def check_room(self, count: int) -> None:
        """Raise InputError where so many vectors fit neither into `resources.vectors` nor on the disk."""
        if (size := count * vector_bytes(self.model)) > self.resources.vectors:
            check_room(size)

    def _group_sums(self, weights: Float[Tensor, "R K"], groups: Int[Tensor, " B"] | None) -> GroupSums:
        pieces = self._prompt_pieces if groups is None else self._group_pieces(groups)
        return GroupSums(self.model, self._blocks, weights, pieces, self.resources)

    def _like(
        self, batch: TokenBatch, resources: Resources, statistics: TokenStatistics | None = None
    ) -> TokenJacobian:
        model = self.policy or self.model
        return TokenJacobian(model, batch, resources, statistics=statistics, precision=self._precision)

    def _share_meter(self, some: TokenJacobian) -> TokenJacobian:
        if "meter" in vars(self):  # it was made
            some.meter = self.meter
        return some

    @property
    def _found_statistics(self) -> TokenStatistics | None:
        return self._known if self._known is not None else vars(self).get("statistics")

    @property
    def _blocks(self) -> nn.ModuleList:
        return self.policy.blocks if self.policy is not None else self.model.get_submodule(find_blocks(self.model))

    @cached_property
    def _sweep(self) -> Sweep | None:
        """The network block by block; None where the blocks of a bare module are not known."""
        try:
            return Sweep(self.model, self._blocks)
        except InputError:
            return None

    @property
    def _responses_at_once(self) -> int:
        """Most responses of a micro-batch whose graph fits."""
        most = self.resources.micro_batch
        return most if self._sweep is None else self._sweep.most_responses(self.batch.width, most)

    def _check(self, weights: Float[Tensor, "R K"]) -> Float[Tensor, "R K"]:
        if weights.dim() != 2 or weights.shape[1] != self.num_tokens:
            given = " × ".join(str(size) for size in weights.shape)
            raise InputError(
                f"weights are {given}; give rows with one number for each of {self.num_tokens} kept tokens"
            )
        return weights

    def _pieces(self, micro_batch: int, copies: int) -> Iterator[Piece]:
        """This process's micro-batches of at most so many responses, longest first; copies: see `fitting_size`."""
        size, processes = fitting_size(self.model, self.batch, micro_batch, copies=copies), self.resources.processes
        pieces = micro_batches(self.batch, size)[processes.rank :: processes.count]
        for rows, piece in track(pieces, "gradients", self.resources.progress, unit="micro-batches"):
            yield self._place(rows, piece), piece

    @cached_property
    def _prompt_pieces(self) -> dict[int, list[Piece]]:
        return self._group_pieces(self.batch.group_ids)

    def _group_pieces(self, ids: Int[Tensor, " B"]) -> dict[int, list[Piece]]:
        """Micro-batches by group id, ascending."""
        found: dict[int, list[Piece]] = {}
        size = fitting_size(self.model, self.batch, self._responses_at_once, copies=4)
        for group in ids[self.batch.response_mask.any(1)].unique().tolist():
            own = (ids == group).nonzero()[:, 0]
            pieces = micro_batches(self.batch.select(own), size)
            found[group] = [(self._place(own[rows], piece), piece) for rows, piece in pieces]
        return found

    def _place(self, rows: Int[Tensor, " b"], piece: TokenBatch) -> Int[Tensor, " k"]:
        """Where a piece's kept tokens stand among all."""
        row, column = piece.response_mask.nonzero().unbind(1)
        start = self.batch.attention_mask[rows].int().argmax(1)
        return self._places[rows[row], start[row] + column]


def _check_quantities(of: Sequence[str]) -> None:
    if unknown := [name for name in of if name not in get_args(Quantity)]:
        raise InputError(f"of names {unknown[0]!r}; known are {' and '.join(map(repr, get_args(Quantity)))}")
