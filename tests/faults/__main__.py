"""A storm of faults over gradscope's long commands: `python -m tests.faults --storm 1000 --seed 0`.

Each fault is done to one command on tiny work: a signal at a random moment or at its n-th operation on its folder, a
full disk or missing rights from there on, a second run beside it, a damaged file before it is taken up again. Then the
same command is started again. The table counts what became of it, by command and kind of fault:

    same      the bytes of an undisturbed run, and nothing left behind but `.partial`
    refused   one line with exit status 2; what it advises led to the same bytes
    left      only the damaged file differs: the command did not read it, or (metrics.jsonl) kept what it says
    LOST      anything else, such as other bytes, half a file under its final name, a traceback: must be 0

Compared are all files but trackers/; without seconds in manifest.json and metrics.jsonl, and without what
random_states.pt says, the state of generators that no run draws from.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro

NAMED = ("python", "torch", "transformers", "pandas")


@dataclass(frozen=True)
class Options:
    """Settings of the storm."""

    storm: int = 112
    """How many faults; 112: one of each kind for each command."""
    seed: int = 0
    """Draws them."""
    only: tuple[str, ...] = ()
    """Commands, and kinds of faults; none: all."""
    out: Path | None = None
    """The table as a CSV; none: it is printed alone."""
    verbose: bool = False
    """A line for every fault, not only where something is lost."""


def main(options: Options) -> int:
    """Exit status 1 where something is lost."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tests.faults import work
    from tests.faults.storm import Storm, draw

    disable_progress_bar()
    torch.set_num_threads(1)  # what is forked from a process whose OpenMP has threads waits for them for ever
    work.import_all(work.MODULES)
    counts: dict[tuple[str, str], Counter] = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        work.make_inputs(Path(folder, "inputs"))
        storm = Storm(Path(folder))
        with suppress(KeyboardInterrupt):  # the table is of what was done
            for number, fault in enumerate(draw(options.storm, options.seed, options.only)):
                trial = storm.suffer(fault)
                counts.setdefault((fault.command, fault.kind), Counter())[trial.outcome] += 1
                if trial.outcome == "LOST" or options.verbose:
                    told = f"{number}. {fault.command}, {fault.kind}, {trial.where}: {trial.outcome} {trial.why}"
                    print(told.rstrip(), flush=True)
    rows = table(counts)
    for row in rows:
        print(f"{row[0]:<10} {row[1]:<22}", *(f"{cell:>8}" for cell in row[2:]))
    print(f"{time.monotonic() - begun:.0f} s")
    if options.out is not None:
        write(rows, options)
    return int(any(count["LOST"] for count in counts.values()))


def table(counts: Mapping[tuple[str, str], Counter]) -> list[list[object]]:
    """Its lines, the heading first and the sums last."""
    from tests.faults.storm import OUTCOMES

    def line(command: str, kind: str, count: Counter) -> list[object]:
        return [command, kind, count.total(), *(count[outcome] for outcome in OUTCOMES)]

    rows = [line(*cell, count) for cell, count in sorted(counts.items())]
    return [["command", "kind", "faults", *OUTCOMES], *rows, line("all", "all", sum(counts.values(), Counter()))]


def write(rows: list[list[object]], options: Options) -> None:
    """The table, below a line that says how it was made."""
    from gradscope.runs import provenance

    made = provenance()
    versions = ", ".join(f"{name} {made['versions'][name]}" for name in NAMED)
    command = " ".join(["python -m tests.faults", f"--storm {options.storm}", f"--seed {options.seed}", *options.only])
    with options.out.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {rows[-1][2]} faults of {command}; {date.today()}; gradscope {made['gradscope']}, {versions}\n")
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
