"""Response tokens of sequences, and sequences stacked to share one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.objective import Given


@dataclass(frozen=True)
class SequenceTokens:
    """Response tokens of one unpadded sequence, and which of them to measure; on the CPU."""

    ids: Int[Tensor, " n"]
    targets: Int[Tensor, " m"]
    """Indices in the sequence of the response tokens, ascending, none 0."""
    measured: Int[Tensor, " k"]
    """Indices into `targets`, ascending, of those that get a backward pass."""
    temperature: float = 1.0
    candidates: Given = ()
    """A teacher's logged candidates at each target and their log ν, [m, c] each; or nothing."""

    @property
    def lengths(self) -> list[int]:
        """Length of each measured token's prefix."""
        return self.targets[self.measured].tolist()

    @property
    def asked(self) -> SequenceTokens:
        """Return the same sequence with only its measured targets."""
        return replace(
            self,
            targets=self.targets[self.measured],
            measured=torch.arange(len(self.measured)),
            candidates=tuple(values[self.measured] for values in self.candidates),
        )

    @property
    def reach(self) -> int:
        """Length of the prefix of the last target."""
        return int(self.targets[-1])


@dataclass(frozen=True)
class Stack:
    """Sequences with m targets in all, cut after the last target's prefix, padded on the right with the last id."""

    ids: Int[Tensor, "B n"]
    sequences: Int[Tensor, " m"]
    """Index of each target's sequence."""
    positions: Int[Tensor, " m"]
    """Position of each target's logits, one before the token."""
    token_ids: Int[Tensor, " m"]
    temperature: Float[Tensor, " m"]
    candidates: Given = ()

    @classmethod
    def of(
        cls, sequences: Sequence[SequenceTokens], dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Stack:
        """Stack sequences. dtype: of the temperatures; None as device: the CPU."""
        prefixes, longest = [s.ids[: s.reach] for s in sequences], max(s.reach for s in sequences)
        filled = [torch.cat([ids, ids[-1:].expand(longest - len(ids))]) for ids in prefixes]
        counts = torch.tensor([len(s.targets) for s in sequences])
        values = (
            torch.stack(filled),
            torch.arange(len(sequences)).repeat_interleave(counts),
            targets_before(sequences),
            torch.cat([s.ids[s.targets] for s in sequences]),
            torch.tensor([s.temperature for s in sequences], dtype=dtype).repeat_interleave(counts),
        )
        candidates = (torch.cat(each) for each in zip(*(s.candidates for s in sequences), strict=True))
        values, candidates = (tuple(v.to(device, non_blocking=True) for v in each) for each in (values, candidates))
        return cls(*values, candidates)


def targets_before(sequences: Sequence[SequenceTokens]) -> Int[Tensor, " m"]:
    """Return the positions of the targets' logits, one before each target, on the CPU."""
    return torch.cat([s.targets - 1 for s in sequences])
