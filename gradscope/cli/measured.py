"""What a measurement was made with, once its table is in its folder."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from gradscope.gradients import AFTERWARDS, SumsPlan, TableMeasurement, largest_share, own_rows
from gradscope.policy import Policy
from gradscope.rollouts import Dump
from gradscope.runs import Processes, RunFolder

TABLE = "tokens.parquet"


@dataclass(frozen=True)
class Measured:
    """A policy, its rollouts, the measurement of their tokens, and the folder that holds the table."""

    policy: Policy
    dump: Dump
    measurement: TableMeasurement
    folder: RunFolder
    gradient_memory: int
    """Bytes for summed gradients, the same in all processes."""
    sums: SumsPlan | None
    """How that budget lets summed gradients be made; None: none are asked for, or no token has a weight."""

    @property
    def processes(self) -> Processes:
        return self.measurement.processes

    @property
    def pass_seconds(self) -> float | None:
        """Seconds of a forward pass over the batch in one process, maybe of an earlier run; None: not known."""
        return self.measurement.pass_seconds or (self.folder.manifest or {}).get("pass_seconds")

    @property
    def sums_seconds(self) -> float | None:
        """Seconds that the summed gradients take as planned; None: not known, or there are none."""
        if self.sums is None or self.pass_seconds is None:
            return None
        share = largest_share(len(own_rows(self.measurement.batch)), self.processes.count)
        return self.sums.forward_passes * self.pass_seconds * share

    @property
    def sums_limit(self) -> float:
        """Seconds that the summed gradients may take; infinite without a limit in minutes."""
        minutes = self.measurement.settings.minutes
        return float("inf") if minutes is None else 60 * AFTERWARDS * minutes

    def read_table(self) -> pd.DataFrame:
        """Raises InputError for a table that is not what was written."""
        self.folder.check(TABLE)
        return pd.read_parquet(self.folder.folder / TABLE)
