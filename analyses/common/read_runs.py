"""The repository's runs as tables: a row per step, per judged checkpoint, or per response.

Every table has the columns track, variant, label and seed. Missing runs are skipped: a figure counts, and states, the
seeds that were read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses.common.experiments import RUNS, labels, needs
from analyses.common.tables import read_whole
from gradscope.errors import InputError
from gradscope.runs import read_json

SEED = re.compile(r"seed(0|[1-9]\d*)")
"""Name of a run's folder; others, such as copies, are ignored."""
UNTRAINED = Path("measured", "untrained", "untrained.csv")
"""File in a scale's folder: the untrained policy's results."""
METRICS = "metrics.csv*"
"""File in a run's folder: the trainer's metrics, compressed (.gz) or not."""
PLANNED = "as planned"
"""Entry in the manifest of a run that did not diverge."""
ANSWERS = ("group", "level", "response", "reward", "correct", "greedy", "tokens", "logprob")
"""Columns of responses that figures need."""


def read_metrics(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run and step with the trainer's metrics (see README); lists become their mean.

    Raises InputError for a run whose steps end early, unless it is recorded as diverged there.
    """
    metrics = _read(variants, scale, track, METRICS, ["step", "reward_mean"])
    for (variant, seed), last in metrics.groupby(["variant", "seed"])["step"].max().items():
        folder = RUNS / scale / track / variant / f"seed{seed}"
        config, manifest = (read_json(folder / name) or {} for name in ("config.json", "manifest.json"))
        if last < (config.get("steps") or 0) and manifest.get("ended", PLANNED) == PLANNED:
            found = f"ends at step {last} of {config['steps']}"
            raise InputError(f"{folder} {found}; {_again(folder, scale)}")
    return metrics


def read_tests(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run, judged checkpoint (`step`) and level ("all" too): `evaluate`'s table.

    Raises InputError if a checkpoint was judged at fewer levels than others.
    """
    tests = _read(variants, scale, track, "test.csv", ["level", "greedy_accuracy", "step"])
    levels = tests.groupby(["variant", "seed", "step"])["level"].nunique()
    if levels.nunique() > 1:
        variant, seed, step = levels.idxmin()
        folder = RUNS / scale / track / variant / f"seed{seed}"
        found = f"{levels.min()} levels at step {step}, others {levels.max()}"
        raise InputError(f"{folder / 'test.csv'} has {found}; {_again(folder, scale)}")
    return tests


def read_responses(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run and answer of its last checkpoint to the test's questions, at most the first `Test.kept`."""
    return _read(variants, scale, track, "responses.parquet", ANSWERS)


def read_untrained(scale: str = "cpu") -> pd.DataFrame:
    """Return a row per temperature and level: the untrained policy on the test's questions.

    Raises InputError if it was not measured.
    """
    file = RUNS / scale / UNTRAINED
    command = f"python -m analyses.common.measurements untrained --scale {scale}"
    if not has_untrained(scale):
        raise InputError(f"{file} is not there; measure it: {command}")
    columns = ("temperature", "level", "entropy", "sampled", "greedy")
    return read_whole(file, f"restore {file.parent}, or remove it and measure again: {command}", columns=columns)


def has_untrained(scale: str) -> bool:
    """Return whether the scale's untrained policy was judged."""
    return (RUNS / scale / UNTRAINED).is_file()


def pages(figure: str, scale: str) -> list[tuple[str, str, list[str]]]:
    """Return a figure's pages: file name, track, variants; tracks without runs have none.

    The page of the track "puzzles" has the figure's name; other tracks append theirs. Raises InputError if there is no
    page.
    """
    tracks: dict[str, list[str]] = {}
    for track, variant in needs(figure, scale):
        tracks.setdefault(track, []).append(variant)
    found = [
        (figure if track == "puzzles" else f"{figure}_{track}", track, variants)
        for track, variants in tracks.items()
        if any(file for variant in variants for file in (RUNS / scale / track / variant).glob(f"seed*/{METRICS}"))
    ]
    if not found:
        raise InputError(
            f"{RUNS / scale} has none of the runs of {figure}; make them: "
            f"python -m analyses.reproduce --scale {scale} --only {figure}"
        )
    return found


def has_runs(scale: str, track: str) -> bool:
    """Return whether a run of the track was judged."""
    return any((RUNS / scale / track).glob("*/seed*/test.csv"))


def last_checkpoints(tests: pd.DataFrame, steps: Sequence[int] | None = None) -> pd.DataFrame:
    """Return a row per run and level, averaged over the judged checkpoints, as the paper averages its last three.

    steps: where each run has to be judged, if that was named beforehand. Raises InputError for a run judged elsewhere,
    such as one that diverged.
    """
    keys = ["track", "variant", "label", "seed", "level"]
    for key, own in tests.groupby(keys[:4], sort=False)["step"] if steps is not None else ():
        if sorted(own.unique()) != sorted(steps):
            found, named = (", ".join(map(str, sorted(at))) for at in (own.unique(), steps))
            place = f"{key[0]}/{key[1]}/seed{key[3]}"
            raise InputError(
                f"{place} was judged at steps {found}, not {named}, which were named beforehand; decide how it counts"
            )
    return tests.drop(columns="step").groupby(keys, sort=False).mean(numeric_only=True).reset_index()


def _read(variants: Sequence[str], scale: str, track: str, name: str, columns: Sequence[str]) -> pd.DataFrame:
    frames, words = [], labels()
    for variant in variants:
        folders = [path for path in (RUNS / scale / track / variant).glob("seed*") if SEED.fullmatch(path.name)]
        for folder in sorted(folders, key=_seed):
            for file in sorted(folder.glob(name))[-1:]:
                table = read_whole(file, _again(folder, scale), columns=columns)
                if file.suffix != ".parquet":
                    _check_numbers(table, file, _again(folder, scale))
                named = {"track": track, "variant": variant, "label": words[variant], "seed": _seed(folder)}
                frames.append(table.assign(**named))
    if not frames:
        raise InputError(
            f"{RUNS / scale / track} has no run of {', '.join(variants)}; make them: "
            f"python -m analyses.reproduce --scale {scale}"
        )
    return pd.concat(frames, ignore_index=True)


def _check_numbers(table: pd.DataFrame, file: Path, remedy: str) -> None:
    """Raise InputError unless all columns but the level are numeric."""
    for column in table.columns.drop("level", errors="ignore"):
        if not pd.api.types.is_numeric_dtype(table[column]):
            [value, *_] = table[column][pd.to_numeric(table[column], errors="coerce").isna()].dropna()
            raise InputError(f"{file} has {value!r} for a number in {column!r}; {remedy}")


def _again(folder: Path, scale: str) -> str:
    return f"restore {folder}, or remove it and make the run again: python -m analyses.reproduce --scale {scale}"


def _seed(folder: Path) -> int:
    return int(folder.name.removeprefix("seed"))
