"""Attention probabilities in a decoder's block, stored or recomputed for a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.gradients.attention import Band
from gradscope.gradients.engine.decoder.rules import Rows
from gradscope.gradients.engine.norms import strips


class Probabilities:
    """softmax(scaling · q kᵀ) for B sequences with causal attention.

    Each query sees all its keys at once, so no normaliser has to be stored, unlike in FlashAttention's tiles.
    mask: [1 or B, 1 or H, n, n], added to the scores or True at visible keys; None: causal. cap: soft cap of the
    scores, cap · tanh(score / cap). keep: store the probabilities, B · H · n² numbers (twice as many with a cap).
    """

    def __init__(
        self,
        queries: Float[Tensor, "B n H c"],
        keys: Float[Tensor, "B n G c"],
        mask: Tensor | Band | None,
        *,
        scaling: float,
        cap: float | None,
        keep: bool,
    ) -> None:
        self._queries, self._keys, self._scaling, self._cap = queries, keys, scaling, cap
        self._mask = Band() if mask is None else mask
        self._kept: Rows | None = None
        if keep:
            self._kept = self.strip(len(queries), 0, queries.shape[1])

    def strip(self, batch: int, start: int, end: int) -> Rows:
        """Return queries start … end − 1 of the first `batch` sequences, over the last keys before `end`."""
        first = 0
        if isinstance(self._mask, Band) and self._mask.window is not None:
            first = max(0, start - self._mask.window + 1)
        if self._kept is not None:
            return _change(self._kept, lambda values: values[:batch, :, start:end, first:end])
        scores, slopes = self._score(self._queries[:batch, start:end], first, end)
        if isinstance(self._mask, Band):
            # Without a window, only keys at the queries' own positions are hidden.
            since = start if self._mask.window is None else first
            hidden = self._mask.hides(slice(start, end), slice(since, end), scores.device)
            scores[..., since - first :].masked_fill_(hidden, -torch.inf)
        else:
            scores = _hide(scores, self._mask[:batch, :, start:end, :end])
        return scores.softmax(-1), slopes

    def at(self, positions: Int[Tensor, "B K"], n: int) -> Rows:
        """Return one query's row per token, over the first n keys."""
        sequences = torch.arange(len(positions), device=positions.device)[:, None]
        if self._kept is not None:
            return _change(self._kept, lambda values: values[sequences, :, positions, :n].transpose(1, 2))
        scores, slopes = self._score(self._queries[sequences, positions], 0, n)
        if isinstance(self._mask, Band):
            distance = positions[:, None, :, None] - torch.arange(n, device=positions.device)
            window = n if self._mask.window is None else self._mask.window
            seen = (distance >= 0) & (distance < window)
        else:
            whole = self._mask.expand(max(len(positions), len(self._mask)), -1, -1, -1)
            seen = whole[sequences, :, positions, :n].transpose(1, 2)
        return _hide(scores, seen).softmax(-1), slopes

    def attend(self, values: Float[Tensor, "B n G c"]) -> Float[Tensor, "B n H c"]:
        """Return the values averaged with these probabilities."""
        (batch, n, groups, _), parts = values.shape, []
        for start, end in strips(n, values.device):
            probs = self.strip(batch, start, end)[0].unflatten(1, (groups, -1))
            seen = values[:, end - probs.shape[-1] : end].transpose(1, 2)
            parts.append((probs.flatten(2, 3) @ seen).view(*probs.shape[:4], -1))
        return torch.cat(parts, 3).flatten(1, 2).transpose(1, 2)

    def _score(self, queries: Float[Tensor, "B m H c"], first: int, end: int) -> Rows:
        """Return the scores of queries over a range of keys, and the derivatives of capped ones."""
        batch, groups, slopes = len(queries), self._keys.shape[2], None
        rows = queries.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (rows @ self._keys[:batch, first:end].permute(0, 2, 3, 1)).mul_(self._scaling)
        if self._cap is not None:
            scores = scores.div_(self._cap).tanh_()
            slopes = (1 - scores.square()).view(batch, -1, queries.shape[1], end - first)
            scores = scores.mul_(self._cap)
        return scores.view(batch, -1, queries.shape[1], end - first), slopes


def _hide(scores: Float[Tensor, "B H m n"], mask: Tensor) -> Float[Tensor, "B H m n"]:
    """Apply a mask that is added, or True at visible keys."""
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _change(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    probs, slopes = rows
    return change(probs), None if slopes is None else change(slopes)
