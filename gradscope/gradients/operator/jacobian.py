"""The token Jacobian J = ∂ log π(o_t)/∂θ as a linear operator: all that gradscope asks of a network.

J has a row per kept token of a batch and a column per measured parameter, and is never formed. `vjp` gives wᵀ·J, the
summed gradient under any token weighting; `jvp` gives J·v, the effect of a step on every token; `gram` gives
w·J·Jᵀ·wᵀ, the inner products of sums by prompt. Every weighting, interval and optimizer is arithmetic on these.

`of` names another quantity of the same tokens than log π, whose gradients are then the rows: entropy, or a divergence
from a teacher (`objective.quantities`). Only what is seeded at the logits is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError, normal_tensors
from gradscope.gradients.engine.meter import TokenGradientMeter
from gradscope.gradients.engine.products import Precision
from gradscope.gradients.frozen import measuring
from gradscope.gradients.operator.contributions import Contributions
from gradscope.gradients.operator.forward_mode import Changes, KeptNumbers, changes_along, refuse_narrow_arithmetic
from gradscope.gradients.operator.gram import Gram, GroupSums, Pairs, Piece, SumsPlan, Way
from gradscope.gradients.operator.prompt_parts import PromptParts
from gradscope.gradients.operator.reverse_mode import add_gradients, differentiable, stream_gradients
from gradscope.gradients.operator.row_norms import RowNorms
from gradscope.gradients.operator.sweep import Sweep
from gradscope.gradients.operator.teachers import settle_quantity, teaching
from gradscope.gradients.operator.vectors import Vectors, vector_bytes, zero_vectors
from gradscope.gradients.resources import Resources
from gradscope.objective import (
    LOGPROB,
    Quantity,
    TokenStatistics,
    batch_statistics,
    can_pack,
    evaluate_kept,
    fitting_size,
    kept_numbers,
    micro_batches,
)
from gradscope.policy import AdamWState, Policy, find_blocks, refuse_shards, weights_version
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, check_room, track


class TokenJacobian:
    """The Jacobian ∂ log π(o_t)/∂θ [K, P] of the K tokens that a batch's response_mask keeps, response by response.

    log π is in nats, at each response's temperature; θ are all measured parameters, flattened, including frozen ones.
    Methods put the model into eval mode with plain attention and restore everything (modes, flags, weights, `.grad`).

    Args:
        model: a Policy, or a transformers model with output embeddings.
        batch: the tokens.
        resources: limits on memory, processes, time and progress.
        statistics: of the batch's tokens under the current weights, if already known.
        precision: of the matrix products in `row_norms`, for decoders with analytic rules.

    Raises:
        InputError: the batch keeps no token, this process does not hold all weights, or these were made in
            `torch.inference_mode`.
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
        if any(parameter.is_inference() for parameter in self.model.parameters()):
            raise InputError("the model was made inside torch.inference_mode, and has no gradients; make it outside")
        self.batch = batch
        self.device = next(self.model.parameters()).device
        self.resources = (resources or Resources()).settle(self.device)
        self._statistics = None if statistics is None else (statistics, weights_version(self.model))
        self._precision = precision
        self._settled: list[Quantity] = []
        """Quantities that fit the model and the batch."""
        if batch.num_tokens == 0:
            raise InputError(
                "response_mask keeps no token, so there is no gradient; give responses with sampled tokens"
            )
        self._places = torch.full(batch.input_ids.shape, -1)
        self._places[batch.response_mask] = torch.arange(batch.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of kept tokens, K."""
        return self.batch.num_tokens

    @cached_property
    def prompts(self) -> Int[Tensor, " n"]:
        """Ids of the prompts with kept tokens, ascending."""
        return self.batch.group_ids[self.batch.response_mask.any(1)].unique()

    @property
    def statistics(self) -> TokenStatistics:
        """log π, log(1−π) and entropy [B, S] of every kept token, in nats, on the CPU; 0 elsewhere.

        They are kept until a weight changes, as its version counter says; a write through `.data` goes unnoticed, and
        needs `moved`. A policy scores one response at a time, to reproduce the digits of its token table; a bare module
        scores micro-batches.
        """
        if (found := self._found_statistics) is not None:
            return found
        size = fitting_size(self.model, self.batch, self.resources.micro_batch, copies=2) if self.policy is None else 1
        settings = {"micro_batch_size": size, "device": self.device, "processes": self.resources.processes}
        with self.resources.progress.stage("scoring"), self.frozen():
            found = batch_statistics(self.model, self.batch, **settings)
        self._statistics = found, weights_version(self.model)
        return found

    def select(self, rows: Sequence[int] | Int[Tensor, " b"]) -> TokenJacobian:
        """Return the Jacobian of the given responses, in the given order; `self` if these are all of them."""
        if torch.equal(torch.as_tensor(rows), torch.arange(len(self.batch))):
            return self
        known = self._found_statistics
        if known is not None:
            known = TokenStatistics(*(getattr(known, name)[rows] for name in vars(known)))
        return self._share_structure(self._like(self.batch.select(rows), self.resources, known))

    def of_prompts(self, prompts: Sequence[int] | Int[Tensor, " p"]) -> TokenJacobian:
        """Return the Jacobian of the tokens of some prompts; every response keeps its row of the batch."""
        return self._share_structure(self._like(self.batch.of_prompts(prompts), self.resources, self._found_statistics))

    def moved(self) -> TokenJacobian:
        """Return the Jacobian of the same tokens at the model's current weights."""
        return self._like(self.batch, self.resources)

    def alone(self) -> TokenJacobian:
        """Return the same Jacobian for this process alone."""
        return self if self.resources.processes.count == 1 else self.within(replace(self.resources, processes=ALONE))

    def until(self, deadline: float | None) -> TokenJacobian:
        """Return the same Jacobian with a deadline on `time.monotonic` for its sums by group; None: no deadline."""
        return self.within(replace(self.resources, deadline=deadline))

    def within(self, resources: Resources) -> TokenJacobian:
        """Return the same Jacobian with other resources."""
        return self._share_structure(self._like(self.batch, resources, self._found_statistics))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep the model in eval mode, with plain attention and no parameter that requires a gradient."""
        with normal_tensors(), measuring(self.model, self.batch.width):
            yield

    @cached_property
    def meter(self) -> TokenGradientMeter:
        """The engine behind `row_norms`; it learns the model's structure from the longest sequence."""
        if self.policy is None:
            raise InputError("row norms need a Policy, which knows its blocks; load it with load_policy")
        probe = self.batch.sequence(int(self.batch.attention_mask.sum(1).argmax()))[0].to(self.policy.device)
        with self.frozen():
            memory = self.resources.activations
            return TokenGradientMeter(self.policy, probe, precision=self._precision, memory=memory)

    def kept(self, values: Float[Tensor, "*R B S"]) -> Float[Tensor, "*R K"]:
        """Select the kept tokens' entries of an array over the batch."""
        return values[..., self.batch.response_mask]

    def spread(self, values: Float[Tensor, "*R K"]) -> Float[Tensor, "*R B S"]:
        """Scatter the kept tokens' values to an array over the batch, 0 elsewhere: the inverse of `kept`."""
        out = values.new_zeros(*values.shape[:-1], *self.batch.input_ids.shape)
        out[..., self.batch.response_mask] = values
        return out

    @normal_tensors()
    def evaluate(self, of: Quantity | str) -> tuple[Float[Tensor, " K"], Bool[Tensor, " K"]]:
        """Compute a quantity of every kept token, in nats, and whether a clamp of its loss leaves it no gradient."""
        of, found = self._settle(of), torch.zeros(self.num_tokens, 2, dtype=torch.float64)
        with torch.no_grad(), self.frozen(), teaching([of], self.batch.width):
            for places, piece in self._pieces(self.resources.micro_batch, of.copies):
                found[places] = evaluate_kept(self.model, piece, of).to(found)
        value, clamped = self.resources.processes.sum(found).unbind(1)
        return value, clamped > 0

    @normal_tensors()
    def row_norms(
        self,
        tokens: Bool[Tensor, " K"] | None = None,
        *,
        scale: Float[Tensor, " P"] | None = None,
        of: Quantity | str = LOGPROB,
    ) -> RowNorms:
        """Select rows for exact norms: over all parameters, by module, and at every layer's activations.

        Args:
            tokens: mask of the tokens to measure, the others get NaN; None: all.
            scale: factor on each entry of a row for `scaled_grad_norm`, such as AdamW's metric.
            of: the quantity whose gradients are the rows.

        Returns:
            An iterable that measures on demand.

        Raises:
            InputError: the model is a bare module, whose blocks are unknown, the engine cannot measure it, or a teacher
                does not fit.
        """
        chosen = torch.ones(self.num_tokens, dtype=torch.bool) if tokens is None else tokens
        return RowNorms(self, chosen, scale, self._settle(of))

    @normal_tensors()
    def vjp(self, weights: Float[Tensor, "R K"], of: Quantity | str = LOGPROB) -> Vectors:
        """Compute weighted sums of token gradients: row r is Σ_t weights[r, t]·∇ log π_t.

        Weights −w_t/num_tokens (Eq. 2) give the gradient of the loss. All rows share one forward pass per micro-batch;
        each row with a nonzero weight in it adds a backward pass. R + 1 vectors are held in memory or, beyond
        `resources.vectors`, R in a scratch file, with identical results.

        Args:
            weights: a row of token weights per vector.
            of: the quantity to differentiate, by default each token's log π.

        Returns:
            R vectors as long as the parameters.

        Raises:
            InputError: the weights do not have K columns, or the disk has no room for the scratch file.
        """
        of, weights = self._settle(of), self._check(weights)
        whole = (len(weights) + 1) * vector_bytes(self.model) <= self.resources.vectors
        sums = Vectors.zeros(self.model, len(weights), None if whole else 0)

        def take(row: int, name: str, gradient: Float[Tensor, " p"]) -> None:
            sums.rows[row, sums.slices[name]] += gradient.to(sums.rows)

        with differentiable(self.model, self.batch.width), teaching([of], self.batch.width):
            for places, piece in self._pieces(self._responses_at_once, of.copies):
                if self._sweep is not None and self._sweep.is_needed(piece):
                    self._sweep.pass_back(piece, weights[:, places], take, of)
                elif whole:
                    numbers = kept_numbers(self.model, piece, [of])[:, 0]
                    add_gradients(self.model, numbers, weights[:, places].to(numbers), sums.rows)
                else:
                    stream_gradients(self.model, piece, weights[:, places], take, of)
        self.resources.processes.sum(sums.rows)
        return sums

    @normal_tensors()
    def jvp(self, vectors: Vectors, of: Sequence[Quantity | str] = (LOGPROB,), *, exact: bool = False) -> Changes:
        """Compute the directional derivatives ⟨∇ log π_t, v⟩ of every kept token along each vector v.

        This is the first-order change of log π_t (or of other quantities, all from the same passes) when the parameters
        move by v. Each nonzero vector costs about three forward passes in forward mode. If an operation of the model
        does not support forward mode, a UserWarning says so and central differences are used: 2 to 16 forward passes,
        accurate to about 2e-4 of the root mean square change in float32, unless they route a token to other experts.

        Args:
            vectors: R vectors as long as the parameters.
            of: the quantities to differentiate.
            exact: refuse central differences.

        Returns:
            The changes [R, K], in nats.

        Raises:
            InputError: the vectors do not fit the model, it computes below float32, where a tangent would keep only two
                or three digits, or it does not support forward mode and `exact` is set.
        """
        of = tuple(map(self._settle, of))
        refuse_narrow_arithmetic(self.model)
        if vectors.rows.shape[1] != (size := zero_vectors(self.model, 0).shape[1]):
            raise InputError(
                f"vectors have {vectors.rows.shape[1]} entries, the model {size} parameters; give one each"
            )
        settings = self.resources.micro_batch, self._pieces
        with teaching(of, self.batch.width):
            changes, how = changes_along(KeptNumbers(self.model, of), vectors, self.batch, *settings, exact=exact)
        everyone = self.resources.processes.gather([how])
        how = "central differences" if "central differences" in everyone else "forward mode"
        return Changes(how, of, self.resources.processes.sum(changes))

    @normal_tensors()
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
        """Compute inner products of token gradients summed by group: u_{p,r} = Σ_{t in p} weights[r, t]·∇ log π_t.

        Takes one pass over the batch, with a backward pass per row and micro-batch as in `vjp`. Vectors are kept whole
        if they fit into `resources.vectors`, else as sketches. If not even the inner products of all pairs fit, a
        random subset of groups is used, with weights multiplied by (tokens of all groups) / (tokens of the subset).
        Processes share the groups.

        Args:
            weights: a row of token weights per sum.
            groups: group id of each response; None: its prompt. Groups without kept tokens are dropped.
            pairs: "all" pairs of groups, which keeps n·R vectors, or only pairs "within" a group.
            metric: compute inner products in AdamW's metric too; its v̂ includes the square of the loss's gradient,
                Σ_{p,r} u_{p,r}.
            sketch: keep a sketch of each vector, for inner products between groups.
            totals: keep the sums over groups as vectors, in a scratch file if the groups' vectors are sketches.
            way: force this way of keeping the vectors, whatever it costs.

        Raises:
            InputError: the weights do not have K columns, or the vectors exceed the budget.
        """
        sums = self._group_sums(self._check(weights), groups)
        plan = sums.plan(pairs, metric=metric is not None, way=way)
        return sums.multiply(plan, pairs, metric=metric, sketch=sketch, totals=totals)

    @normal_tensors()
    def contributions(
        self,
        weights: Float[Tensor, " K"],
        *,
        groups: Int[Tensor, " B"] | None = None,
        scale: Float[Tensor, " P"] | AdamWState | None = None,
        folds: int | None = None,
        generator: torch.Generator | None = None,
        of: Quantity | str = LOGPROB,
    ) -> Contributions:
        """Compute what each token holds of ‖G‖², G = Σ_t w_t·g_t: of its own prompt's part, and of the others'.

        Prompt by prompt a `vjp` gives G_p and a `jvp` along it its tokens' products with G_p; a `jvp` along G gives all
        tokens' products with G. This costs nine forward passes (at most three more for each fold but one), and none for
        responses without weights. Three vectors are held in memory, with folds up to seven more if they are small, or,
        beyond `resources.vectors`, two in scratch files. Processes share the prompts. Σ_{t in p} w_t⟨g_t, G_p⟩ = ‖G_p‖²
        is checked for every prompt.

        Args:
            weights: w_t of each kept token.
            groups: id of each response's prompt; None: the batch's. Prompts without kept tokens are dropped.
            scale: factor D on each entry of g_t: all products are ⟨D ∘ g_t, D ∘ G⟩. An AdamWState: its metric, with v
                as saved, without this batch's square.
            folds: number of folds for bounds of any grouping; None: no bounds. Eight give bounds about a fifth wider
                than leaving out every prompt.
            generator: deals the prompts to folds.
            of: the quantity whose gradient is g_t.

        Raises:
            InputError: there is not one finite weight for each token, no such number of folds, or the model does not
                support forward mode, beside which central differences are too coarse to part own from other prompts.
            SelfCheckError: forward and reverse mode disagree about a prompt by more than rounding.
        """
        weights = self._check(weights[None])[0].double().cpu()
        if not weights.isfinite().all():
            raise InputError("weights hold NaN or infinity; give every kept token a finite weight, such as 0")
        if isinstance(scale, AdamWState):
            scale = scale.turn_into_scale(self.model, zero_vectors(self.model, 1)[0])
        groups = self.batch.group_ids if groups is None else groups
        parts = PromptParts(self, weights, groups, scale, self._settle(of))
        return parts.contribute(folds, generator or torch.Generator().manual_seed(0))

    def plan_gram(self, rows: int, *, pairs: Pairs = "all", metric: bool = False, way: Way | None = None) -> SumsPlan:
        """Return how `gram` would compute this many rows by prompt. Raises InputError if memory does not suffice."""
        return self._group_sums(torch.zeros(rows, self.num_tokens), None).plan(pairs, metric=metric, way=way)

    def rows_at_once(self, most: int, *, metric: bool = False) -> int:
        """Return how many rows `gram` computes at a time with pairs="within" (two vectors each), beside a fixed one."""
        beside = 3 + metric  # the fixed row's two, one for autograd, one for the metric
        return int(min(most, max(1, (self.resources.vectors // vector_bytes(self.model) - beside) // 2)))

    def check_room(self, count: int) -> None:
        """Raise InputError if this many vectors fit neither into `resources.vectors` nor on the disk."""
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

    def _share_structure(self, some: TokenJacobian) -> TokenJacobian:
        """Give another Jacobian of the same model what is known of its structure."""
        some._sweep, some._settled = self._sweep, self._settled
        if "meter" in vars(self):  # it was made
            some.meter = self.meter
        return some

    @property
    def _found_statistics(self) -> TokenStatistics | None:
        """The statistics, if they are known under the current weights."""
        known = self._statistics
        return None if known is None or known[1] != weights_version(self.model) else known[0]

    @property
    def _blocks(self) -> nn.ModuleList:
        return self.policy.blocks if self.policy is not None else self.model.get_submodule(find_blocks(self.model))

    @cached_property
    def _sweep(self) -> Sweep | None:
        """The network block by block; None if the blocks of a bare module cannot be found."""
        try:
            return Sweep(self.model, self._blocks)
        except InputError:
            return None

    @property
    def _responses_at_once(self) -> int:
        """Largest micro-batch whose graph fits into memory."""
        most = self.resources.micro_batch
        return most if self._sweep is None else self._sweep.most_responses(self.batch.width, most)

    def _settle(self, of: Quantity | str) -> Quantity:
        """Return the quantity, whose teacher is looked at once."""
        if not any(of is known for known in self._settled):
            of = settle_quantity(of, self.policy or self.model, self.batch)
            self._settled.append(of)
        return of

    def _check(self, weights: Float[Tensor, "R K"]) -> Float[Tensor, "R K"]:
        if weights.dim() != 2 or weights.shape[1] != self.num_tokens:
            given = " × ".join(str(size) for size in weights.shape)
            raise InputError(
                f"weights are {given}; give rows with one number for each of {self.num_tokens} kept tokens"
            )
        return weights.clone() if weights.is_inference() else weights

    def _pieces(self, micro_batch: int, copies: int) -> Iterator[Piece]:
        """Yield this process's micro-batches of at most `micro_batch` responses, longest first."""
        size, processes = fitting_size(self.model, self.batch, micro_batch, copies=copies), self.resources.processes
        pieces = micro_batches(self.batch, size, by_group=can_pack(self.model))[processes.rank :: processes.count]
        for rows, piece in track(pieces, "gradients", self.resources.progress, unit="micro-batches"):
            yield self._place(rows, piece), piece

    @cached_property
    def _prompt_pieces(self) -> dict[int, list[Piece]]:
        return self._group_pieces(self.batch.group_ids)

    def _group_pieces(self, ids: Int[Tensor, " B"]) -> dict[int, list[Piece]]:
        """Return micro-batches by group id, ascending."""
        found: dict[int, list[Piece]] = {}
        size = fitting_size(self.model, self.batch, self._responses_at_once, copies=4)
        for group in ids[self.batch.response_mask.any(1)].unique().tolist():
            own = (ids == group).nonzero()[:, 0]
            pieces = micro_batches(self.batch.select(own), size)
            found[group] = [(self._place(own[rows], piece), piece) for rows, piece in pieces]
        return found

    def _place(self, rows: Int[Tensor, " b"], piece: TokenBatch) -> Int[Tensor, " k"]:
        """Return the indices of a piece's kept tokens among all K."""
        row, column = piece.response_mask.nonzero().unbind(1)
        start = self.batch.attention_mask[rows].int().argmax(1)
        return self._places[rows[row], start[row] + column]
