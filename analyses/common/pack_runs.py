"""Pack what is kept of finished tracks: one table of each kind per scale, instead of five files and more per run.

    python -m analyses.common.pack_runs [NAME ...] [--scale cpu]

NAME is a track, or a measurement, whose manifest.json is moved into the one file of its scale; default: every track
whose planned runs are all finished. A track that is not, or a run's folder that is not whole, is refused. Folders are
removed once their rows are written, so that the command can be stopped and repeated (layout: `kept_runs`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro

from analyses.common.experiments import RUNS, Run, list_runs
from analyses.common.kept_runs import ABOUT, KEYS, TABLES, find_table, is_finished, packed_file, remedy, text_levels
from analyses.common.measurements import MANIFESTS, folder, list_measurements, read_facts
from analyses.common.read_runs import read_metrics, read_tests
from analyses.common.script import exit_with
from analyses.common.tables import read_whole, write_parquet
from gradscope.errors import InputError
from gradscope.runs import MANIFEST, read_json, write_text

ALWAYS = ("config.json", "manifest.json", "metrics.csv.gz", "test.csv", "responses.parquet")
"""Files of every finished run."""


def pack_track(scale: str, track: str) -> int:
    """Pack the folders of a track's runs; returns their number. Raises InputError unless every planned run is whole."""
    runs = [run for run in list_runs(scale) if run.track == track]
    if left := [run for run in runs if not is_finished(run)]:
        raise InputError(f"{scale}/{track}: {len(left)} of {len(runs)} runs are not finished, such as {left[0].place}")
    loose = [run for run in runs if (RUNS / run.place).is_dir()]
    if not loose:
        return 0
    names = sorted({*ALWAYS, *(file.name for run in loose for file in (RUNS / run.place).iterdir())})
    if other := [name for name in names if not name.endswith((*TABLES, ".json"))]:
        raise InputError(f"{scale}/{track}: {other[0]} is no table, and cannot be packed")
    for run in loose:
        if absent := [name for name in names if not (RUNS / run.place / name).is_file()]:
            raise InputError(f"{RUNS / run.place} has no {absent[0]}; {remedy(run.place)}")
    for read in (read_metrics, read_tests):
        read(list(dict.fromkeys(run.variant for run in runs)), scale=scale, track=track)
    for name in (name.split(".")[0] for name in names if name.endswith(TABLES)):
        _add(scale, name, loose, [text_levels(_read(run, name)) for run in loose])
    _add(scale, ABOUT, loose, [_describe(RUNS / run.place) for run in loose])
    for run in loose:
        shutil.rmtree(RUNS / run.place)
    for emptied in (*{(RUNS / run.place).parent for run in loose}, RUNS / scale / track):
        if not any(emptied.iterdir()):
            emptied.rmdir()
    return len(loose)


def pack_manifest(scale: str, name: str) -> int:
    """Move a measurement's manifest into the scale's file of them. Raises InputError if it is not measured."""
    facts, own = read_facts(name, scale=scale), folder(name, scale)
    if not (own / MANIFEST).is_file():
        return 0
    packed = own.with_name(MANIFESTS)
    write_text(packed, json.dumps((read_json(packed) or {}) | {name: facts}, indent=2, sort_keys=True) + "\n")
    (own / MANIFEST).unlink()
    return 1


def _read(run: Run, name: str) -> pd.DataFrame:
    return read_whole(find_table(RUNS / run.place, name), remedy(run.place), empty=True)


def _describe(own: Path) -> pd.DataFrame:
    return pd.DataFrame([{name: (own / f"{name}.json").read_text(encoding="utf-8") for name in ("config", "manifest")}])


def _add(scale: str, name: str, runs: Sequence[Run], tables: Sequence[pd.DataFrame]) -> None:
    """Put the runs' tables into the packed one, instead of what it has of the same runs."""
    file, frames = packed_file(scale, name), []
    if file.is_file():
        packed = read_whole(file, f"restore {file}")
        again = {(run.track, run.variant, run.seed) for run in runs}
        frames.append(packed[[key not in again for key in packed[KEYS].itertuples(index=False, name=None)]])
    for run, table in zip(runs, tables, strict=True):
        if len(table):
            keys = pd.DataFrame({"track": run.track, "variant": run.variant, "seed": run.seed}, index=table.index)
            frames.append(pd.concat([keys, table], axis=1))
    if frames:
        write_parquet(pd.concat(frames).sort_values(KEYS, kind="stable", ignore_index=True), file)


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = (), scale: str = "cpu") -> None:
    unfinished = {run.track for run in list_runs(scale) if not is_finished(run)}
    tracks = list(dict.fromkeys(run.track for run in list_runs(scale)))
    measurements = [measurement.name for measurement in list_measurements(scale)]
    if unknown := [name for name in names if name not in (*tracks, *measurements)]:
        raise InputError(f"scale {scale} has no {unknown[0]!r}; give some of {', '.join((*tracks, *measurements))}")
    for name in names or [track for track in tracks if track not in unfinished]:
        packed = pack_track(scale, name) if name in tracks else 0
        packed += pack_manifest(scale, name) if name in measurements else 0
        print(f"{scale}/{name}: {packed} packed" if packed else f"{scale}/{name}: is packed")


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main, description=__doc__))
