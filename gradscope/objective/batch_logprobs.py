"""log π of a batch's tokens under a model, with logits only where they are needed and no padding more than that.

Rows are sorted by length before they are cut into micro-batches, moved to start at column 0, and end with their last
token that is asked for: what comes after it cannot change it. The head of the model sees the asked tokens alone. Where
`shared_prompts.can_pack` allows it, groups stay together and a prompt is computed once for its responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.objective.logprobs import (
    TokenStatistics,
    gather_logprobs,
    rows_at_once,
    token_statistics,
    trained_logprobs,
    widen,
)
from gradscope.objective.shared_prompts import attending, can_pack, packed_inputs, packing_for
from gradscope.policy import without_cudnn_attention
from gradscope.rollouts import TokenBatch
from gradscope.runs import ALONE, Processes

Piece = tuple[Int[Tensor, " _"], TokenBatch]
"""Rows of a batch, and the micro-batch that they make."""

Quantity = Literal["logprob", "entropy"]
"""Of a token's distribution, in nats at its temperature."""

LOGITS = {"cpu": 1 << 30, "cuda": 8 << 30}
"""Bytes that a micro-batch's logits may take on a device, with all that is made of them and is as large."""


def micro_batches(batch: TokenBatch, size: int, *, by_group: bool = False) -> list[Piece]:
    """Cut the batch into micro-batches of at most `size` responses, longest first; without those of no kept token.

    by_group: responses of a group stand together, the group of the longest one first.
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


def fitting_size(model: nn.Module, batch: TokenBatch, size: int, *, copies: int, device: str | None = None) -> int:
    """Return how many responses to take together: `size`, or as many as LOGITS allows; one at least.

    copies: how many tensors as large as the logits of all kept tokens exist at once. At a vocabulary of 150,000, the
    logits of a thousand tokens are 0.6 GB in float32. device: its type; None: the model's.
    """
    head = getattr(model, "module", model).get_output_embeddings()
    longest = int(batch.response_mask.sum(1).max())
    one = copies * longest * getattr(head, "out_features", 0) * max(4, next(model.parameters()).element_size())
    return max(1, min(size, LOGITS.get(device or _device(model).type, size * one) // max(1, one)))


def empty_piece(batch: TokenBatch) -> Piece:
    """Make a micro-batch of no kept token, which a process without work runs to keep in step with the others."""
    first = batch.select([0]).left_aligned()[0].narrow(2)
    return torch.zeros(1, dtype=torch.long), replace(first, response_mask=torch.zeros_like(first.response_mask))


def kept_logprobs(model: nn.Module, piece: TokenBatch) -> Float[Tensor, " K"]:
    """Compute differentiable log π of the kept tokens, row by row, in nats at their temperature.

    The piece starts at column 0, as `micro_batches` makes it. The result is on the model's device.
    """
    logits, ids, temperatures = _kept_logits(model, piece)
    return gather_logprobs(logits, ids, temperature=temperatures)


def kept_numbers(model: nn.Module, piece: TokenBatch, names: Sequence[Quantity]) -> Float[Tensor, "K Q"]:
    """Compute what is named of every kept token, differentiable and from one forward pass; else as `kept_logprobs`."""
    logits, ids, temperatures = _kept_logits(model, piece)

    def entropies() -> Float[Tensor, " K"]:
        logprobs = (widen(logits) / temperatures[:, None]).log_softmax(-1)
        # A finite floor makes the term of an impossible token 0 · finite = 0.
        return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)

    made = {"logprob": lambda: gather_logprobs(logits, ids, temperature=temperatures), "entropy": entropies}
    return torch.stack([made[name]() for name in names], -1)


def loss_logprobs(model: nn.Module, piece: TokenBatch) -> Float[Tensor, "b n"]:
    """Compute `kept_logprobs` where each token stands, 0 elsewhere; in less memory, for a single backward pass."""
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
    found = [_statistics(*_kept_logits(model, piece)) for _, piece in dealt]
    return gather_statistics(model, batch, dealt, found, device, processes)


def gather_statistics(
    model: nn.Module,
    batch: TokenBatch,
    pieces: Sequence[Piece],
    found: Sequence[TokenStatistics],
    device: torch.device,
    processes: Processes,
) -> TokenStatistics:
    """Put what each process found for its pieces' kept tokens [K] where they stand in the batch [B, S]; 0 elsewhere."""
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
    stats = [token_statistics(z, i, temperature=t) for z, i, t in chunks]
    return TokenStatistics(*(torch.cat([getattr(s, f.name) for s in stats]) for f in fields(TokenStatistics)))


def _kept_logits(
    model: nn.Module, piece: TokenBatch
) -> tuple[Float[Tensor, "K N"], Int[Tensor, " K"], Float[Tensor, " K"]]:
    """Compute the logits at the kept tokens, row by row, with the tokens' ids and temperatures."""
    device, width = _device(model), piece.input_ids.shape[1]
    # Places are made on the CPU, where a micro-batch comes from: a GPU would have to be waited for.
    piece = piece.to(torch.device("cpu"))
    row, column = piece.response_mask.nonzero().unbind(1)
    packing = packing_for(model, piece)
    source = column - 1  # column s is predicted at column s − 1
    if packing is None:
        ids = piece.input_ids.to(device, non_blocking=True)
        # All ones: padding comes last, where causal attention hides it; and without padding sdpa needs no mask.
        inputs, places = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, row * width + source
    else:
        inputs, places = packed_inputs(packing, device), packing.places(row, source)
    with (
        choosing_places(model, places.to(device, non_blocking=True)),
        nullcontext() if packing is None else attending(model, packing),
    ):
        logits = model(**inputs, use_cache=False).logits
    kept = (piece.input_ids[row, column], piece.temperature[row])
    # Not logits[0], whose backward pass would copy the gradient into zeros.
    return logits.flatten(0, 1), *(values.to(device, non_blocking=True) for values in kept)


@contextmanager
def choosing_places(model: nn.Module, places: Int[Tensor, " K"]) -> Iterator[None]:
    """Show the head only the hidden states at these places of all [b, n, hidden], as one row [1, K, hidden]."""
    head = getattr(model, "module", model).get_output_embeddings()  # .module: what DistributedDataParallel wraps
    if head is None:
        raise InputError(f"{type(model).__name__} names no output embeddings, so its head is not known; it needs them")

    def choose(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0].flatten(0, 1)[places.to(args[0].device)][None], *args[1:]

    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _spread(values: Float[Tensor, " K"], where: Bool[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Return the values at these places, row by row; 0 elsewhere."""
    return values.new_zeros(where.shape).masked_scatter(where.to(values.device, non_blocking=True), values)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _ends(aligned: TokenBatch) -> Int[Tensor, " B"]:
    """Return one past the last kept column of each row; 0 where none is kept."""
    columns = torch.arange(1, aligned.input_ids.shape[1] + 1)
    return (columns * aligned.response_mask).amax(1)
