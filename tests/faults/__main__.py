"""A storm of faults over gradscope's long commands: `python -m tests.faults --storm 1000 --seed 0`.

The table has a row for each command and kind of fault: how many there were, how many ended, by the same command started
again, in the bytes of an undisturbed run, how many were refused in one line whose advice led to them, how many left a
damaged file as it was because nobody reads it; and how many results were lost.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro


@dataclass(frozen=True)
class Options:
    """Settings of the storm."""

    storm: int = 100
    """How many faults."""
    seed: int = 0
    """Draws them."""
    out: Path | None = None
    """The table, a CSV; none: it is printed alone."""
    only: tuple[str, ...] = ()
    """Commands, or kinds of faults; none: all."""
    verbose: bool = False
    """A line for each fault, not for lost results alone."""


def main(options: Options) -> int:
    from faults import work
    from faults.storm import KINDS, OUTCOMES, Storm, draw

    work.import_all(work.MODULES)
    counts: dict[tuple[str, str], Counter] = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        inputs = Path(folder, "inputs")
        work.make_inputs(inputs)
        storm = Storm(inputs, Path(folder))
        for number, fault in enumerate(draw(options.storm, options.seed, options.only)):
            trial = storm.suffer(fault)
            counts.setdefault((fault.command, fault.kind), Counter())[trial.outcome] += 1
            if trial.outcome == "LOST" or options.verbose:
                print(f"{number}. {fault.command}, {fault.kind}, {trial.where}: {trial.outcome} {trial.why}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s")
    rows = [[*cell, count.total(), *(count[outcome] for outcome in OUTCOMES)] for cell, count in sorted(counts.items())]
    table = pd.DataFrame(rows, columns=["command", "kind", "faults", *OUTCOMES])
    print(table.to_string(index=False))
    return int(table["LOST"].sum() > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
