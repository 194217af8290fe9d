"""Which tokens get a backward pass, and which responses are measured together for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool

from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.rollouts import TokenBatch
from gradscope.runs import Processes, deal_by_cost

if TYPE_CHECKING:
    from gradscope.gradients.engine.meter import TokenGradientMeter


@dataclass(frozen=True)
class Selection:
    """Tokens that get a backward pass, and the groups of responses that share their passes."""

    measured: Bool[np.ndarray, " n"]
    """Mask over all tokens, in the table's order."""
    sequences: list[SequenceTokens]
    """One per response."""
    groups: list[list[int]]
    """Responses that are measured together; one without kept tokens is in a group of its own."""

    def share(self, rows: Sequence[int], processes: Processes) -> list[list[int]]:
        """Return the groups with any of `rows` that this process measures; all processes compute the same split.

        They cost about the same, as far as whole groups allow. A response is taken to cost what its measured tokens
        have before them, in tokens.
        """
        wanted = set(rows)
        indices = [index for index, group in enumerate(self.groups) if wanted & set(group)]
        costs = [float(sum(sum(self.sequences[row].lengths) for row in self.groups[index])) for index in indices]
        mine = deal_by_cost(indices, costs, processes.count)[processes.rank]
        return [self.groups[index] for index in mine]


def select(meter: TokenGradientMeter, batch: TokenBatch, measured: Bool[np.ndarray, " n"]) -> Selection:
    """Group the responses for the engine, given the mask of the tokens to measure."""
    sequences = cut_sequences(batch, measured)
    filled = [row for row, sequence in enumerate(sequences) if len(sequence.targets)]
    groups = meter.group([sequences[row] for row in filled])
    empty = [[row] for row, sequence in enumerate(sequences) if not len(sequence.targets)]
    return Selection(measured, sequences, sorted([*empty, *([filled[i] for i in g] for g in groups)], key=min))


def cut_sequences(batch: TokenBatch, measured: Bool[np.ndarray, " n"]) -> list[SequenceTokens]:
    """Cut a batch into sequences for the engine, each with its measured tokens."""
    out, counts = [], batch.response_mask.sum(1).tolist()
    for row, mine in enumerate(torch.from_numpy(measured).split(counts)):
        out.append(SequenceTokens(*batch.sequence(row), mine.nonzero()[:, 0], float(batch.temperature[row])))
    return out
