"""Measurements of policies, made once and kept in slim tables from which figures are drawn.

    python -m analyses.common.measurements [NAME ...] [--scale cpu]

makes the missing ones among those named (default: all of analyses/runs.toml), one after the other on one thread. A
module that measures has a function ``measure(out)``, which writes its tables and a manifest.json into the folder `out`;
a script that draws reads them with `read_table` and loads no policy. An interrupted measurement resumes after its last
finished part. `analyses.common.pack_runs NAME` moves a manifest into the one file MANIFESTS of its scale.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from analyses.common.experiments import RUNS, check_scale, read
from analyses.common.script import exit_with
from analyses.common.tables import read_whole, write_csv, write_parquet
from gradscope.errors import InputError
from gradscope.runs import MANIFEST, library_versions, read_json, replacing, write_text

MEASURED = "measured"
"""Folder below RUNS, beside a scale's tracks."""
MANIFESTS = "manifests.json"
"""File in that folder: {measurement: its manifest}, of those that are packed."""
PARTS = ".parts"


@dataclass(frozen=True)
class Measurement:
    """An entry of [measurements]."""

    name: str
    module: str
    """Module with `measure(out: Path)`, which takes a keyword `scale` if it serves several."""
    after: tuple[str, ...]
    """TRACK/VARIANT of the runs whose checkpoints it reads, and measurements that it needs."""
    figures: tuple[str, ...]
    """Figures drawn from it."""
    scales: tuple[str, ...]
    seeds: tuple[int, ...] = ()
    """Seeds of the runs whose checkpoints it reads; none: the module decides."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords for `measure`."""


def list_measurements(scale: str = "cpu") -> list[Measurement]:
    """Return a scale's measurements in the file's order. Raises InputError for an unknown scale."""
    check_scale(scale)
    entries = read().get("measurements", {})
    found = [
        Measurement(
            name,
            entry["module"],
            *(tuple(entry[key]) for key in ("after", "figures", "scales")),
            seeds=tuple(entry.get("seeds", {}).get(scale, ())),
            settings=entry.get("settings", {}),
        )
        for name, entry in entries.items()
    ]
    return [measurement for measurement in found if scale in measurement.scales]


def make_measurement(measurement: Measurement, scale: str = "cpu") -> None:
    """Measure, or resume, and keep the tables."""
    measure = importlib.import_module(measurement.module).measure
    settings = {"scale": scale} if len(measurement.scales) > 1 else {}
    measure(folder(measurement.name, scale), **settings, **measurement.settings)


def folder(name: str, scale: str = "cpu") -> Path:
    """Return the folder of a measurement's tables."""
    return RUNS / scale / MEASURED / name


def is_measured(name: str, scale: str = "cpu") -> bool:
    """Return whether all of its tables exist."""
    return read_manifest(name, scale) is not None


def read_manifest(name: str, scale: str = "cpu") -> dict[str, Any] | None:
    """Return a measurement's manifest, {} if it is damaged; None if it is not measured."""
    own = folder(name, scale)
    if (own / MANIFEST).is_file():
        return read_json(own / MANIFEST)
    packed = (read_json(own.with_name(MANIFESTS)) or {}).get(name)
    return packed if packed and all((own / table).is_file() for table in packed["columns"]) else None


def part(out: Path, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Make a part of a measurement, or read it if an interrupted measurement has made it.

    A name stands for one table, so its inputs must not change before the measurement is finished.
    """
    file = out / PARTS / f"{name}.parquet"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as beside:
            make().to_parquet(beside)
    return pd.read_parquet(file)


def keep(out: Path, tables: Mapping[str, pd.DataFrame], **facts: Any) -> None:
    """Write tables under their names (.csv, or .parquet for many rows), then manifest.json with provenance and facts.

    CSVs have all digits. A folder with a manifest is complete; its parts are removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    for name, table in tables.items():
        write = write_parquet if name.endswith(".parquet") else write_csv
        write(table, out / name)
    write_manifest(out, {name: table.columns for name, table in tables.items()}, **facts)
    shutil.rmtree(out / PARTS, ignore_errors=True)


def write_manifest(out: Path, columns: Mapping[str, Iterable[str]], **facts: Any) -> None:
    """Mark a measurement as complete: provenance, facts, and the columns of each table."""
    facts["columns"] = {name: [str(column) for column in of_table] for name, of_table in columns.items()}
    write_text(out / MANIFEST, json.dumps(describe_machine() | facts, indent=2) + "\n")


def describe_machine() -> dict[str, Any]:
    """Return versions, commit and processor."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    command, here = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    commit = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    processor = found[1] if found else platform.processor()
    return {"versions": library_versions(), "commit": commit.stdout.strip(), "processor": processor}


def read_table(name: str, table: str, *, scale: str = "cpu") -> pd.DataFrame:
    """Read a measurement's table. Raises InputError with the command that makes it if it is damaged or missing."""
    file = folder(name, scale) / table
    if not file.is_file():
        raise InputError(f"{file} is not there; {_remedy(name, scale)}")
    found = read_whole(file, _remedy(name, scale))
    columns = (read_manifest(name, scale) or {}).get("columns", {}).get(table, [])
    if absent := [column for column in columns if column not in found]:
        raise InputError(f"{file} has no column {absent[0]!r}; {_remedy(name, scale)}")
    return found


def _remedy(name: str, scale: str) -> str:
    """Say how to make the tables. With a manifest they count as measured, so they have to be removed first."""
    scales = read()["measurements"][name]["scales"]
    if scale not in scales:
        return f"{name} is measured at scale {' and '.join(scales)} alone"
    whole = is_measured(name, scale)
    first = f"restore {folder(name, scale)}, or remove it and measure again" if whole else "measure it"
    return f"{first}: python -m analyses.common.measurements {name}" + ("" if scale == "cpu" else f" --scale {scale}")


def read_facts(name: str, *, scale: str = "cpu") -> dict[str, Any]:
    """Read a measurement's manifest. Raises InputError with the command that makes it if it is damaged or missing."""
    if not (facts := read_manifest(name, scale)):
        raise InputError(f"{folder(name, scale)} has no {MANIFEST} that can be read; {_remedy(name, scale)}")
    return facts


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = (), scale: str = "cpu") -> None:
    known = {measurement.name: measurement for measurement in list_measurements(scale)}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no measurement is called {unknown[0]!r}; give some of {', '.join(known)}")
    import torch

    torch.set_num_threads(1)
    for name in names or known:
        if is_measured(name, scale):
            print(f"{name}: is there")
            continue
        print(f"{name}: {known[name].module}", flush=True)
        make_measurement(known[name], scale)


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main, description=__doc__))
