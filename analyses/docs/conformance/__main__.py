"""Whose gradient is what? One real step of each trainer, audited against its documentation.

    make conformance [VERL=.venv-verl/bin/python OPENRLHF=PYTHON SKYRL=PYTHON]
    python -m analyses.docs.conformance [--out figures/verdicts/data/conformance.csv] [--only own] [--verl PYTHON]

TRL's GRPOTrainer (every pair of levels of seven settings, some settings alone, and some in two processes), SFTTrainer,
DPOTrainer and KTOTrainer, and the trainer here take a real step on a tiny policy. `gradscope.updates.audit` holds the
gradient before clipping against the documented loss with the documented denominators (agrees) and, without these,
against every reading (reading, factor, cause, fault, distance); those of DistillationTrainer and GKDTrainer are held
against exact gradients of divergences. The loss functions of verl, OpenRLHF and SkyRL are differentiated on random
log-probabilities, each in an environment of its own that can import gradscope too. Minutes on one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro

from analyses.common.script import exit_with
from analyses.docs.conformance import own, trl_distillation, trl_grpo, trl_texts
from analyses.docs.conformance.row import COLUMNS, judge
from gradscope.errors import InputError
from gradscope.runs import write_text
from tests.support.trl_runs import save_policy


@dataclass(frozen=True)
class Options:
    """The table of trainers' gradients."""

    out: Path = Path("figures/verdicts/data/conformance.csv")
    """File to write."""
    verl: Path | None = None
    """Python of an environment with verl; none: its rows stay as they are in the file."""
    openrlhf: Path | None = None
    """The same of OpenRLHF."""
    skyrl: Path | None = None
    """The same of SkyRL."""
    only: tuple[str, ...] = ()
    """Parts to remake, of grpo, processes, texts, distillation, own, verl, openrlhf, skyrl; none: all."""


def rows(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the rows, each as it is made."""
    checkpoint = save_policy(folder / "policy")
    parts: dict[str, tuple[Callable[..., Iterator], Callable[[Any], dict[str, Any]]]] = {
        "grpo": (trl_grpo.steps, judge),
        "processes": (trl_grpo.rows_of_processes, dict),
        "texts": (trl_texts.steps, judge),
        "distillation": (trl_distillation.steps, trl_distillation.judge),
        "own": (lambda _, folder: own.steps(folder), judge),
    }
    others = {"verl": options.verl, "openrlhf": options.openrlhf, "skyrl": options.skyrl}
    for name in options.only or (*parts, *others):
        if name in others:
            yield from [] if others[name] is None else foreign_rows(name, others[name])
            continue
        cases, judged = parts[name]
        for (trainer, case, documented), run in cases(checkpoint, folder):
            started = time.perf_counter()
            row = {"trainer": trainer, "version": version(trainer.split()[0].lower()), "case": case}
            row |= {"documented": documented, **_make(run, judged)}
            yield row | {"seconds": f"{time.perf_counter() - started:.1f}"}


def _make(run: Callable[[], Any], judged: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        with redirect_stdout(None):
            return judged(run())
    except Exception as error:  # one case must not end the table: its row says what happened
        traceback.print_exc()
        return {"agrees": "not run", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def foreign_rows(name: str, python: Path) -> list[dict[str, Any]]:
    """Return the rows of a trainer's loss functions, made in its own environment. Raises InputError if that fails."""
    command = [str(python), "-m", f"analyses.docs.conformance.{name}_losses"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode:
        raise InputError(f"{python} cannot run {name}: {found.stderr.strip().splitlines()[-1]}; install it there")
    return json.loads(next(line for line in found.stdout.splitlines() if line.startswith("[")))


def main(options: Options) -> None:
    """Make the rows; write the table after each, so that `--only` can continue it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names, made = [*COLUMNS, "date", "torch"], {"date": datetime.now(UTC).date().isoformat()}
    made["torch"] = torch.__version__.partition("+")[0]
    table = pd.DataFrame(columns=names, dtype=str)
    if options.out.is_file():
        table = pd.read_csv(options.out, dtype=str, keep_default_na=False)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options, Path(folder)):
            print(f"{row['trainer']}: {row['case']}: {row['agrees']}", flush=True)
            new = pd.DataFrame([{name: (row | made).get(name, "") for name in names}], dtype=str)
            table = pd.concat([table, new]).drop_duplicates(["trainer", "case"], keep="last")
            write_text(options.out, table.to_csv(index=False))
    print(table.groupby(["trainer", "agrees"]).size().to_string())


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options)))
