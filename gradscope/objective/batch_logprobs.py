"""log π of a batch's tokens under a model, with logits computed only where needed and minimal padding.

Rows are sorted by length, cut into micro-batches, shifted to start at column 0 and truncated after their last kept
token. The head is applied to kept tokens only, a few at a time if all of their logits would take too much memory. If
`shared_prompts.can_pack` allows it, groups stay together and each prompt is computed once for all of its responses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.errors import InputError
from gradscope.objective.logprobs import (
    TokenStatistics,
    gather_logprobs,
    rows_at_once,
    token_statistics,
    trained_logprobs,
)
from gradscope.objective.quantities import Given, Outputs, Quantity
from gradscope.objective.shared_prompts import attending, can_pack, packed_inputs, packing_for
from gradscope.policy import without_cudnn_attention
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes

Piece = tuple[Int[Tensor, " _"], TokenBatch]
"""A micro-batch, with its rows in the batch."""

LOGITS = {"cpu": 1 << 30, "cuda": 8 << 30}
"""Bytes for a micro-batch's logits and all tensors of that size, by device."""

Found = TypeVar("Found", Tensor, TokenStatistics)


def micro_batches(batch: TokenBatch, size: int, *, by_group: bool = False) -> list[Piece]:
    """Cut the batch into micro-batches of at most `size` responses, longest first, dropping those without kept tokens.

    by_group: keep the responses of a group together, the group with the longest response first.
    """
    aligned, _ = batch.left_aligned()
    ends = _ends(aligned)
    order = ends.argsort(descending=True, stable=True)
    if by_group:
        _, group = batch.group_ids.unique(return_inverse=True)
        longest = torch.zeros_like(ends).scatter_reduce_(0, group, ends, "amax")[group]
        order = order[group[order].argsort(stable=True)]
        order = order[longest[order].argsort(descending=True, stable=True)]
    kept = order[ends[order] > 0]
    return [(rows, aligned.select(rows).narrow(int(ends[rows].max()))) for rows in kept.split(size) if len(rows)]


def fitting_size(model: nn.Module, batch: TokenBatch, size: int, *, copies: int) -> int:
    """Return how many responses to take together: at most `size` and as many as LOGITS allows, but at least one.

    copies: number of tensors of the size of all kept tokens' logits that exist at once. At a vocabulary of 150,000, the
    logits of a thousand tokens are 0.6 GB in float32.
    """
    one = copies * int(batch.response_mask.sum(1).max()) * _logit_bytes(model)
    return max(1, min(size, LOGITS.get(_device(model).type, size * one) // max(1, one)))


def empty_piece(batch: TokenBatch) -> Piece:
    """Make a micro-batch without kept tokens, for a process without work to stay in step with the others."""
    first = batch.select([0]).left_aligned()[0].narrow(2)
    return torch.zeros(1, dtype=torch.long), replace(first, response_mask=torch.zeros_like(first.response_mask))


def kept_logprobs(model: nn.Module, piece: TokenBatch) -> Float[Tensor, " K"]:
    """Compute differentiable log π of the kept tokens, row by row, in nats at their temperature.

    The piece must start at column 0, like those of `micro_batches`. The result is on the model's device.
    """
    return _compute_kept(model, piece, lambda logits, ids, at: gather_logprobs(logits, ids, temperature=at), copies=4)


def kept_numbers(model: nn.Module, piece: TokenBatch, quantities: Sequence[Quantity]) -> Float[Tensor, "K Q"]:
    """Compute quantities of every kept token, differentiably, in one forward pass; see `kept_logprobs`."""
    given = [given_for(quantity, piece) for quantity in quantities]
    ends = [0, *accumulate(map(len, given))]

    def compute(logits: Float[Tensor, "k N"], ids: Tensor, at: Tensor, *given: Tensor) -> Float[Tensor, "k Q"]:
        own = (make_ready(q, given[a:b], logits) for q, (a, b) in zip(quantities, pairwise(ends), strict=True))
        return torch.stack([q.numbers(Outputs(logits, ids, at, g)) for q, g in zip(quantities, own, strict=True)], -1)

    copies = max(quantity.copies for quantity in quantities)
    return _compute_kept(model, piece, compute, copies=copies, given=[tensor for own in given for tensor in own])


def evaluate_kept(model: nn.Module, piece: TokenBatch, quantity: Quantity) -> Float[Tensor, "K 2"]:
    """Compute a quantity of every kept token, and 1 where a clamp leaves it no gradient, else 0."""

    def compute(logits: Float[Tensor, "k N"], ids: Tensor, at: Tensor, *given: Tensor) -> Float[Tensor, "k 2"]:
        value, _, clamped = quantity.evaluate(Outputs(logits, ids, at, make_ready(quantity, given, logits)))
        return torch.stack([value, torch.zeros_like(value) if clamped is None else clamped.to(value)], -1)

    return _compute_kept(model, piece, compute, copies=quantity.copies, given=given_for(quantity, piece))


@torch.no_grad()
def given_for(quantity: Quantity, piece: TokenBatch) -> Given:
    """Return `given_at` of a piece's kept tokens; the piece must start at column 0."""
    if quantity.teacher is not None:
        return (_kept_logits(quantity.teacher_model, piece, hidden=True)[0],)
    return tuple(values[piece.response_mask] for values in piece.candidates) if quantity.asks_teacher else ()


@torch.no_grad()
def given_at(quantity: Quantity, ids: Int[Tensor, "b n"], places: Int[Tensor, " k"], candidates: Given) -> Given:
    """Return what a quantity is given of the tokens whose logits are at these indices of [b · n].

    That is the input of the teacher's head [k, hidden], less than its logits, or else the logged candidates.
    """
    if quantity.teacher is None:
        return candidates if quantity.asks_teacher else ()
    teacher = quantity.teacher_model
    ids = ids.to(_device(teacher))
    with choosing_places(teacher, places, keep=True) as found:
        teacher(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return (found[0],)


@torch.no_grad()
def make_ready(quantity: Quantity, given: Given, logits: Float[Tensor, "k N"]) -> Given:
    """Turn what `given_at` returns into what `Quantity.evaluate` takes, beside these logits."""
    ready = given if quantity.teacher is None else (finish(quantity.teacher_model, *given),)
    return tuple(values.to(logits.device) for values in ready)


def loss_logprobs(model: nn.Module, piece: TokenBatch) -> Float[Tensor, "b n"]:
    """Compute `kept_logprobs` as [b, n], 0 elsewhere; takes less memory, but supports a single backward pass."""
    return _spread(trained_logprobs(*_kept_logits(model, piece)), piece.response_mask)


def scored_loss_logprobs(model: nn.Module, piece: TokenBatch) -> tuple[Float[Tensor, "b n"], TokenStatistics]:
    """Compute `loss_logprobs` and the statistics of the kept tokens [K] in one forward pass."""
    logits, ids, temperatures = _kept_logits(model, piece)
    found = _statistics(logits.detach(), ids, temperatures)
    return _spread(trained_logprobs(logits, ids, temperatures), piece.response_mask), found


@without_cudnn_attention()
@torch.no_grad()
def batch_statistics(
    model: nn.Module, batch: TokenBatch, *, micro_batch_size: int, device: torch.device, processes: Processes = ALONE
) -> TokenStatistics:
    """Compute log π, log(1−π) and entropy of every kept token, [B, S] each and on the CPU; 0 elsewhere."""
    pieces = micro_batches(batch, micro_batch_size, by_group=can_pack(model))
    dealt = processes.deal(pieces, empty_piece(batch))
    found = [_compute_kept(model, piece, _statistics, copies=2) for _, piece in dealt]
    return gather_statistics(model, batch, dealt, found, device, processes)


def gather_statistics(
    model: nn.Module,
    batch: TokenBatch,
    pieces: Sequence[Piece],
    found: Sequence[TokenStatistics],
    device: torch.device,
    processes: Processes,
) -> TokenStatistics:
    """Gather the statistics of all processes' pieces [K] into the batch's shape [B, S], 0 elsewhere."""
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    table = torch.zeros(3, *batch.input_ids.shape, dtype=dtype)
    start = batch.attention_mask.int().argmax(1)
    for (rows, piece), statistics in zip(pieces, found, strict=True):
        row, column = piece.response_mask.nonzero().unbind(1)
        values = torch.stack([getattr(statistics, field.name) for field in fields(statistics)])
        table[:, rows[row], start[rows[row]] + column] = values.to(table)
    return TokenStatistics(*(table if processes.count == 1 else processes.sum(table.to(device)).cpu()))


def _statistics(
    logits: Float[Tensor, "K N"], ids: Int[Tensor, " K"], temperatures: Float[Tensor, " K"]
) -> TokenStatistics:
    size = rows_at_once(logits.shape[-1], logits.device.type)
    chunks = zip(*(t.split(size) for t in (logits, ids, temperatures)), strict=True)
    return join_statistics([token_statistics(z, i, temperature=t) for z, i, t in chunks])


def join_statistics(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    """Concatenate the statistics of parts of the tokens."""
    return TokenStatistics(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenStatistics)))


def _compute_kept(
    model: nn.Module, piece: TokenBatch, compute: Callable[..., Found], *, copies: int, given: Sequence[Tensor] = ()
) -> Found:
    """Apply `compute` to (logits [k, N], ids, temperatures, *given) of the kept tokens, as many at a time as fit."""
    size = most_logits(model, copies)
    if piece.num_tokens <= size:
        return compute(*_kept_logits(model, piece), *given)
    parts = zip(*(v.split(size) for v in (*_kept_logits(model, piece, hidden=True), *given)), strict=True)

    def go_on(hidden: Float[Tensor, "k hidden"], *of_part: Tensor) -> Found:
        return compute(finish(model, hidden), *of_part)

    if torch.is_grad_enabled():  # the backward pass also holds one part's logits at a time
        return torch.cat([checkpoint(go_on, *part, use_reentrant=False) for part in parts])
    found = [go_on(*part) for part in parts]
    return torch.cat(found) if isinstance(found[0], Tensor) else join_statistics(found)


def most_logits(model: nn.Module, copies: int) -> int:
    """Return how many tokens' logits fit into LOGITS bytes; copies: see `fitting_size`."""
    size = copies * _logit_bytes(model)
    return max(1, LOGITS.get(_device(model).type, LOGITS["cuda"]) // size) if size else sys.maxsize


def finish(model: nn.Module, hidden: Float[Tensor, "k hidden"]) -> Float[Tensor, "k N"]:
    """Return the logits of hidden states at the head's input, by a one-token pass with that input replaced."""
    with _showing(model, lambda _: hidden):
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=_device(model)), use_cache=False).logits[0]


def _kept_logits(
    model: nn.Module, piece: TokenBatch, *, hidden: bool = False
) -> tuple[Float[Tensor, "K N"], Int[Tensor, " K"], Float[Tensor, " K"]]:
    """Compute the kept tokens' logits, ids and temperatures; hidden: the head's inputs [K, hidden] instead."""
    device, width = _device(model), piece.input_ids.shape[1]
    # Computed on the CPU, where the micro-batch is, to avoid synchronising with a GPU.
    piece = piece.to(torch.device("cpu"))
    row, column = piece.response_mask.nonzero().unbind(1)
    packing = packing_for(model, piece)
    source = column - 1  # column s is predicted at column s − 1
    if packing is None:
        ids = piece.input_ids.to(device, non_blocking=True)
        # All ones: padding is on the right, where causal attention hides it, and sdpa needs no mask without padding.
        inputs, places = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, row * width + source
    else:
        inputs, places = packed_inputs(packing, device), packing.places(row, source)
    with (
        choosing_places(model, places.to(device, non_blocking=True), keep=hidden) as kept_hidden,
        nullcontext() if packing is None else attending(model, packing),
    ):
        logits = model(**inputs, use_cache=False).logits
    kept = (piece.input_ids[row, column], piece.temperature[row])
    # Not logits[0], whose backward pass copies the gradient into zeros.
    first = kept_hidden[0] if hidden else logits.flatten(0, 1)
    return first, *(values.to(device, non_blocking=True) for values in kept)


@contextmanager
def choosing_places(
    model: nn.Module, places: Int[Tensor, " K"], *, keep: bool = False
) -> Iterator[list[Float[Tensor, "K hidden"]]]:
    """Restrict the head's input [b, n, hidden] to the hidden states at these indices, as one row [1, K, hidden].

    keep: collect them in the yielded list instead, and give the head none.
    """
    kept: list[Tensor] = []

    def choose(hidden: Float[Tensor, "b n hidden"]) -> Float[Tensor, "k hidden"]:
        chosen = hidden.flatten(0, 1)[places.to(hidden.device)]
        if not keep:
            return chosen
        kept.append(chosen)
        return chosen[:0]

    with _showing(model, choose):
        yield kept


@contextmanager
def _showing(model: nn.Module, choose: Callable[[Tensor], Float[Tensor, "k hidden"]]) -> Iterator[None]:
    """Replace the head's input by the chosen states, as one row."""
    head = getattr(model, "module", model).get_output_embeddings()  # .module: what DistributedDataParallel wraps
    if head is None:
        raise InputError(f"{type(model).__name__} has no output embeddings; define get_output_embeddings")

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return choose(args[0])[None], *args[1:]

    hook = head.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        hook.remove()


def _spread(values: Float[Tensor, " K"], where: Bool[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Scatter the values to these places, row by row, with 0 elsewhere."""
    return values.new_zeros(where.shape).masked_scatter(where.to(values.device, non_blocking=True), values)


def _logit_bytes(model: nn.Module) -> int:
    """Return the bytes of a token's logits, in float32 or wider; 0 if the head's width is unknown."""
    head = getattr(model, "module", model).get_output_embeddings()
    return getattr(head, "out_features", 0) * max(4, next(model.parameters()).element_size())


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _ends(aligned: TokenBatch) -> Int[Tensor, " B"]:
    """Return one past the last kept column of each row; 0 for rows without kept tokens."""
    columns = torch.arange(1, aligned.input_ids.shape[1] + 1)
    return (columns * aligned.response_mask).amax(1)
