"""What a log says of the run that trained on its responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradscope.runs import parquet_metadata, parse_json

RUN_KEY = b"gradscope.run"
"""Key of a TrainedRun's fields, a JSON object, in a parquet file's schema metadata."""
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TrainedRun:
    """What a log says of the run besides its responses."""

    precision: Precision | None = None
    """Of the trainer's passes; None: not logged."""
    trained: frozenset[str] | None = None
    """Names of the parameters that are trained; None: all but the frozen ones."""
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that are not trained, if `trained` is None."""

    def trains(self, name: str) -> bool:
        """Return whether a parameter is trained, as far as logged."""
        return name not in self.frozen if self.trained is None else name in self.trained


def read_run(files: Iterable[Path]) -> TrainedRun:
    """Read what the first of a log's parquet files that has RUN_KEY says of the run; nothing if none has it."""
    told = (parquet_metadata(file).get(RUN_KEY) for file in files if file.suffix == ".parquet")
    if (entry := next(filter(None, told), None)) is None:
        return TrainedRun()
    try:
        found = parse_json(entry)
    except ValueError:  # another program's
        return TrainedRun()
    if not isinstance(found, dict):
        return TrainedRun()
    precision = found.get("precision")
    trained, frozen = (_names(found.get(name)) for name in ("trained", "frozen"))
    return TrainedRun(precision if precision in get_args(Precision) else None, trained, frozen or frozenset())


def _names(values: Any) -> frozenset[str] | None:
    known = isinstance(values, list) and all(isinstance(name, str) for name in values)
    return frozenset(values) if known else None
