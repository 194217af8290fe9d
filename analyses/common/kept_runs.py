"""What is kept of runs, read alike from the folder of a run and from the tables of packed tracks.

    RUNS/SCALE/TRACK/VARIANT/seedN/     a run of a track that is still being made: the files of `make_run`
    RUNS/SCALE/                         packed tracks (analyses/common/pack_runs.py)
        runs.parquet                        a row per run: track, variant, seed, and the JSON of config and manifest
        metrics.parquet, test.parquet, …    the runs' tables of that name, one after the other, with these three columns

A folder goes before what is packed of the same run. A column that none of a packed track's runs has a value for is left
out, since other tracks of the scale may have it. `level` is text in every table.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from analyses.common.experiments import RUNS, Run, place_of
from analyses.common.tables import read_whole
from gradscope.runs import parse_json, read_json

SEED = re.compile(r"seed(0|[1-9]\d*)")
"""Name of a run's folder; others, such as copies, are ignored."""
KEYS = ["track", "variant", "seed"]
"""Columns that tell a packed run."""
ABOUT = "runs"
"""Packed table that lists the runs; a run that is in it is whole."""
TABLES = (".csv.gz", ".csv", ".parquet")
"""How the names of tables end in a run's folder."""
LAST = "responses"
"""Table that is written last: a folder that has it is that of a finished run."""


def is_finished(run: Run) -> bool:
    """Return whether everything is kept of the run that is to be."""
    return run.seed in list_seeds(run.scale, run.track, run.variant, LAST)


def list_seeds(scale: str, track: str, variant: str, name: str) -> list[int]:
    """Return the seeds of the runs whose table of this name, such as "test", is kept."""
    packed = read_packed(scale, track, ABOUT)
    own = packed.loc[packed["variant"] == variant, "seed"]
    return sorted({*own, *(seed for seed, folder in _folders(scale, track, variant) if find_table(folder, name))})


def read_tables(scale: str, track: str, variant: str, name: str) -> dict[int, pd.DataFrame]:
    """Return {seed: the run's table of this name, such as "metrics"}, by ascending seed.

    Raises InputError if a file is damaged or a run's table has no rows.
    """
    packed = read_packed(scale, track, name)
    own = packed[packed["variant"] == variant].groupby("seed")
    found = {seed: rows.drop(columns=KEYS).reset_index(drop=True) for seed, rows in own}
    for seed, folder in _folders(scale, track, variant):
        if file := find_table(folder, name):
            found[seed] = text_levels(read_whole(file, remedy(place_of(scale, track, variant, seed))))
    return dict(sorted(found.items()))


def read_about(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json and manifest.json of the run at this place (`Run.place`); empty if missing or damaged."""
    if (RUNS / place).is_dir():
        return tuple(read_json(RUNS / place / name) or {} for name in ("config.json", "manifest.json"))
    scale, track, variant, seed = place.parts
    packed = read_packed(scale, track, ABOUT).astype({"seed": str})
    [row] = packed[(packed["variant"] == variant) & ("seed" + packed["seed"] == seed)].to_dict("records")
    return parse_json(row["config"]), parse_json(row["manifest"])


def remedy(place: Path) -> str:
    """Say how to mend what is kept of the run at this place."""
    if not (RUNS / place).is_dir():
        return f"restore what {RUNS / place.parts[0]} has of it"
    command = f"python -m analyses.reproduce --scale {place.parts[0]}"
    return f"restore {RUNS / place}, or remove it and make the run again: {command}"


def find_table(folder: Path, name: str) -> Path | None:
    """Return the file of a run's folder that holds the table of this name."""
    return next((file for end in TABLES if (file := folder / f"{name}{end}").is_file()), None)


def read_packed(scale: str, track: str, name: str) -> pd.DataFrame:
    """Return the rows of a packed track, with KEYS in front; none if it is not packed."""
    file = packed_file(scale, name)
    return _read_packed(file, file.stat().st_mtime_ns, track) if file.is_file() else pd.DataFrame(columns=KEYS)


def packed_file(scale: str, name: str) -> Path:
    """Return the packed tables' file."""
    return RUNS / scale / f"{name}.parquet"


def text_levels(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its levels, if any, as text: a benchmark's has a name, a puzzle's a number."""
    return table.astype({"level": str}) if "level" in table else table


@lru_cache(maxsize=8)
def _read_packed(file: Path, _written: int, track: str) -> pd.DataFrame:
    """Read the file, once while it stays as it was written."""
    whole = read_whole(file, f"restore {file}")
    own = whole[whole["track"] == track]
    return own[[name for name in own if name in KEYS or own[name].notna().any()]]


def _folders(scale: str, track: str, variant: str) -> list[tuple[int, Path]]:
    found = (RUNS / scale / track / variant).glob("seed*")
    return [(int(match[1]), folder) for folder in found if (match := SEED.fullmatch(folder.name))]
