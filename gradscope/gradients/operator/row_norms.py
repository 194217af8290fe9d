"""Exact norms of chosen rows of J, measured in groups of responses that share their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

from gradscope.gradients.engine.metric import Metric
from gradscope.gradients.engine.results import TokenGradients
from gradscope.gradients.engine.stack import SequenceTokens
from gradscope.gradients.operator.teachers import teaching
from gradscope.objective import Quantity
from gradscope.runs import deal_by_cost

if TYPE_CHECKING:
    from gradscope.gradients.engine.meter import TokenGradientMeter
    from gradscope.gradients.operator.jacobian import TokenJacobian


class RowNorms:
    """The norms of some rows of J: over all parameters, by module and at every layer's activations.

    Iterating measures this process's share and yields (row of the batch, norms of its kept tokens).
    """

    def __init__(
        self, J: TokenJacobian, tokens: Bool[Tensor, " K"], scale: Float[Tensor, " P"] | None, of: Quantity
    ) -> None:
        self._jacobian, self._metric, self._of = J, None if scale is None else Metric(J.model, scale), of
        self.sequences: list[SequenceTokens] = []
        """The engine's input for each response."""
        for row, mine in enumerate(tokens.split(J.batch.response_mask.sum(1).tolist())):
            known = mine.nonzero()[:, 0], float(J.batch.temperature[row])
            candidates = tuple(values[row][J.batch.response_mask[row]] for values in J.batch.candidates)
            self.sequences.append(SequenceTokens(*J.batch.sequence(row), *known, candidates))
        J.meter.use(of, self._metric)
        filled = [row for row, sequence in enumerate(self.sequences) if len(sequence.targets)]
        groups = [[filled[i] for i in group] for group in J.meter.group([self.sequences[row] for row in filled])]
        empty = [[row] for row, sequence in enumerate(self.sequences) if not len(sequence.targets)]
        self.groups: list[list[int]] = sorted([*empty, *groups], key=min)
        """Responses to measure together; those without kept tokens are in groups of their own."""

    def __iter__(self) -> Iterator[tuple[int, TokenGradients]]:
        for group in self.share(range(len(self.sequences))):
            yield from zip(group, self.measure(group), strict=True)

    def share(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the groups containing any of `rows` that this process measures; all processes compute the same split.

        The split balances cost as far as whole groups allow. A response costs the summed prefix lengths of its measured
        tokens.
        """
        wanted, processes = set(rows), self._jacobian.resources.processes
        indices = [index for index, group in enumerate(self.groups) if wanted & set(group)]
        costs = [float(sum(sum(self.sequences[row].lengths) for row in self.groups[index])) for index in indices]
        return [self.groups[index] for index in deal_by_cost(indices, costs, processes.count)[processes.rank]]

    def measure(self, group: Sequence[int]) -> list[TokenGradients]:
        """Measure some responses together; results do not depend on the grouping, up to rounding."""
        with self.engine() as meter:
            return meter.measure_together([self.sequences[row] for row in group])

    @contextmanager
    def engine(self) -> Iterator[TokenGradientMeter]:
        """Yield the engine that measures these rows, with the model frozen and the rows' scale in use."""
        with self._jacobian.frozen(), teaching([self._of], self._jacobian.batch.width):
            self._jacobian.meter.use(self._of, self._metric)
            self._jacobian.meter.progress = self._jacobian.resources.progress
            yield self._jacobian.meter
