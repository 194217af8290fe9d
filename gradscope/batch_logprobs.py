"""log π of a batch's tokens under a model, with logits only where they are needed and no padding more than that.

Rows are sorted by length before they are cut into micro-batches, moved to start at column 0, and end with their last
token that is asked for: what comes after it cannot change it. The head of the model sees the asked tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.batch import TokenBatch
from gradscope.errors import InputError
from gradscope.logprobs import TokenStatistics, gather_logprobs, token_statistics
from gradscope.processes import ALONE, Processes

Piece = tuple[Int[Tensor, " b"], TokenBatch]
"""Rows of a batch, and the micro-batch that they make."""

CHUNK = 2048
"""Tokens whose statistics are computed at a time: what that needs beside the logits is several copies of these."""


def micro_batches(batch: TokenBatch, size: int) -> list[Piece]:
    """Pieces of at most `size` responses, longest first; one of which response_mask keeps nothing is left out."""
    aligned, _ = batch.left_aligned()
    ends = _ends(aligned)
    order = ends.argsort(descending=True, stable=True)
    kept = order[ends[order] > 0]
    return [(rows, aligned.select(rows).narrow(int(ends[rows].max()))) for rows in kept.split(size) if len(rows)]


def empty_piece(batch: TokenBatch) -> Piece:
    """One response none of whose tokens is asked for: what a process without work runs, to keep in step with others."""
    first = batch.select([0]).left_aligned()[0].narrow(2)
    return torch.zeros(1, dtype=torch.long), replace(first, response_mask=torch.zeros_like(first.response_mask))


def kept_logprobs(model: nn.Module, piece: TokenBatch) -> Float[Tensor, "b n"]:
    """Differentiable log π of the tokens that response_mask keeps, in nats at their temperature; 0 elsewhere.

    The piece starts at column 0, as `micro_batches` makes it, and is on the model's device.
    """
    logits, ids, temperatures = _kept_logits(model, piece)
    logprobs = gather_logprobs(logits, ids, temperature=temperatures)
    return torch.zeros(piece.input_ids.shape).to(logprobs).masked_scatter(piece.response_mask, logprobs)


@torch.no_grad()
def batch_statistics(
    model: nn.Module, batch: TokenBatch, *, micro_batch_size: int, device: torch.device, processes: Processes = ALONE
) -> TokenStatistics:
    """log π, log(1−π) and entropy of every kept token of the batch, [B, S] each and on the CPU; 0 elsewhere."""
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    found = torch.zeros(3, *batch.input_ids.shape, dtype=dtype)
    start = batch.attention_mask.int().argmax(1)
    for rows, piece in processes.deal(micro_batches(batch, micro_batch_size), empty_piece(batch)):
        logits, ids, temperatures = _kept_logits(model, piece.to(device))
        chunks = zip(*(t.split(CHUNK) for t in (logits, ids, temperatures)), strict=True)
        stats = [token_statistics(z, i, temperature=t) for z, i, t in chunks]
        row, column = piece.response_mask.nonzero().unbind(1)
        for index, name in enumerate(("logprob", "log_one_minus_prob", "entropy")):
            values = torch.cat([getattr(s, name) for s in stats])
            found[index, rows[row], start[rows[row]] + column] = values.to(found)
    return TokenStatistics(*processes.sum(found.to(device)).cpu())


def _kept_logits(
    model: nn.Module, piece: TokenBatch
) -> tuple[Float[Tensor, "K N"], Int[Tensor, " K"], Float[Tensor, " K"]]:
    """Logits at the kept tokens, row by row, with the tokens' ids and temperatures."""
    keep = piece.response_mask
    source = keep.roll(-1, dims=1)  # column s is predicted at column s − 1
    with _choosing(model, source):
        # All ones: padding comes last, where causal attention hides it; and without padding sdpa needs no mask.
        everything = torch.ones_like(piece.attention_mask, dtype=torch.long)
        logits = model(input_ids=piece.input_ids, attention_mask=everything, use_cache=False).logits
    temperatures = piece.temperature[:, None].expand(keep.shape)[keep]
    return logits[0], piece.input_ids[keep], temperatures


@contextmanager
def _choosing(model: nn.Module, where: Bool[Tensor, "b n"]) -> Iterator[None]:
    """Show the head only the hidden states [b, n, hidden] at these places, as one row [1, K, hidden]."""
    head = getattr(model, "module", model).get_output_embeddings()  # .module: what DistributedDataParallel wraps
    if head is None:
        raise InputError(f"{type(model).__name__} names no output embeddings, so its head is not known; it needs them")
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][where][None], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def _ends(aligned: TokenBatch) -> Int[Tensor, " B"]:
    """One past the last kept column of each row; 0 where none is kept."""
    columns = torch.arange(1, aligned.input_ids.shape[1] + 1)
    return (columns * aligned.response_mask).amax(1)
