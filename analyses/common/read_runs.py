"""The repository's runs as tables: a row per step, per judged checkpoint, or per response.

Every table has the columns track, variant, label and seed. Missing runs are skipped: a figure counts, and states, the
seeds that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analyses.common.experiments import RUNS, labels, needs, place_of
from analyses.common.kept_runs import list_seeds, read_about, read_tables, remedy
from analyses.common.tables import check_columns, read_whole
from gradscope.errors import InputError

UNTRAINED = Path("measured", "untrained", "untrained.csv")
"""File in a scale's folder: the untrained policy's results."""
PLANNED = "as planned"
"""Entry in the manifest of a run that did not diverge."""
ANSWERS = ("group", "level", "response", "reward", "correct", "greedy", "tokens", "logprob")
"""Columns of responses that figures need."""


def read_metrics(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run and step with the trainer's metrics (see README); lists become their mean.

    Raises InputError for a run whose steps end early, unless it is recorded as diverged there.
    """
    metrics = _read(variants, scale, track, "metrics", ["step", "reward_mean"])
    for (variant, seed), last in metrics.groupby(["variant", "seed"])["step"].max().items():
        place = place_of(scale, track, variant, seed)
        config, manifest = read_about(place)
        if last < (config.get("steps") or 0) and manifest.get("ended", PLANNED) == PLANNED:
            raise InputError(f"{place} ends at step {last} of {config['steps']}; {remedy(place)}")
    return metrics


def read_tests(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run, judged checkpoint (`step`) and level ("all" too): `evaluate`'s table.

    Raises InputError if a checkpoint was judged at fewer levels than others.
    """
    tests = _read(variants, scale, track, "test", ["level", "greedy_accuracy", "step"])
    levels = tests.groupby(["variant", "seed", "step"])["level"].nunique()
    if levels.nunique() > 1:
        variant, seed, step = levels.idxmin()
        place = place_of(scale, track, variant, seed)
        found = f"{levels.min()} levels at step {step}, others {levels.max()}"
        raise InputError(f"{place}: test has {found}; {remedy(place)}")
    return tests


def read_responses(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """Return a row per run and answer of its last checkpoint to the test's questions, at most the first `Test.kept`."""
    return _read(variants, scale, track, "responses", ANSWERS)


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
        if any(list_seeds(scale, track, variant, "metrics") for variant in variants)
    ]
    if not found:
        raise InputError(
            f"{RUNS / scale} has none of the runs of {figure}; make them: "
            f"python -m analyses.reproduce --scale {scale} --only {figure}"
        )
    return found


def has_runs(scale: str, track: str) -> bool:
    """Return whether a run of the track was judged."""
    return any(list_seeds(scale, track, variant, "test") for variant in labels())


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
        for seed, table in read_tables(scale, track, variant, name).items():
            place = place_of(scale, track, variant, seed)
            check_columns(table, columns, f"{place}: {name}", remedy(place))
            if name != "responses":
                _check_numbers(table, f"{place}: {name}", remedy(place))
            frames.append(table.assign(track=track, variant=variant, label=words[variant], seed=seed))
    if not frames:
        raise InputError(
            f"{RUNS / scale / track} has no run of {', '.join(variants)}; make them: "
            f"python -m analyses.reproduce --scale {scale}"
        )
    return pd.concat(frames, ignore_index=True)


def _check_numbers(table: pd.DataFrame, name: str, remedy: str) -> None:
    """Raise InputError unless all columns but the level are numeric."""
    for column in table.columns.drop("level", errors="ignore"):
        if not pd.api.types.is_numeric_dtype(table[column]):
            [value, *_] = table[column][pd.to_numeric(table[column], errors="coerce").isna()].dropna()
            raise InputError(f"{name} has {value!r} for a number in {column!r}; {remedy}")
