"""What the repository keeps of the runs, as tables: a row per step, per judged checkpoint, per response.

Every table has the columns track, variant, label and seed. Runs that are not there are left out: how many seeds a
figure rests on is counted from what was read, and said in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from analyses.experiments import RUNS, labels, needs
from gradscope.errors import InputError

UNTRAINED = Path("measured", "untrained", "untrained.csv")
"""Of a scale's folder: what its policy answers before training."""


def read_metrics(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """A row per run and step: what the trainer logs (README's table of metrics), lists by their mean."""
    return _read(variants, scale, track, "metrics.csv", pd.read_csv)


def read_tests(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """A row per run, judged checkpoint (`step`) and level ("all" too): `evaluate`'s table."""
    return _read(variants, scale, track, "test.csv", lambda file: pd.read_csv(file, dtype={"level": str}))


def read_responses(variants: Sequence[str], *, scale: str = "cpu", track: str = "puzzles") -> pd.DataFrame:
    """A row per run and answer of its last checkpoint to the test's questions (see analyses/make_run.py)."""
    return _read(variants, scale, track, "responses.parquet", pd.read_parquet)


def read_untrained(scale: str = "cpu") -> pd.DataFrame:
    """A row per temperature and level: the policy before training on the test's questions.

    Raises InputError where it was not measured.
    """
    file = RUNS / scale / UNTRAINED
    if not has_untrained(scale):
        raise InputError(f"{file} is not there; measure it: python -m analyses.measurements untrained --scale {scale}")
    return pd.read_csv(file, dtype={"level": str})


def has_untrained(scale: str) -> bool:
    """Whether the scale's policy was judged before training."""
    return (RUNS / scale / UNTRAINED).is_file()


def pages(figure: str, scale: str) -> list[tuple[str, str, list[str]]]:
    """What a figure has a page for: name of its files, track, variants; a track of which no run is there has none.

    The page of the track "puzzles" bears the figure's name, that of another one its own behind it. Raises InputError
    if there is no page.
    """
    tracks: dict[str, list[str]] = {}
    for track, variant in needs(figure, scale):
        tracks.setdefault(track, []).append(variant)
    found = [
        (figure if track == "puzzles" else f"{figure}_{track}", track, variants)
        for track, variants in tracks.items()
        if any(file for variant in variants for file in (RUNS / scale / track / variant).glob("seed*/metrics.csv"))
    ]
    if not found:
        raise InputError(
            f"{RUNS / scale} has none of the runs of {figure}; make them: python -m analyses.reproduce --scale {scale}"
        )
    return found


def last_checkpoints(tests: pd.DataFrame) -> pd.DataFrame:
    """A row per run and level: numbers averaged over the judged checkpoints, as the paper averages its last three."""
    keys = ["track", "variant", "label", "seed", "level"]
    return tests.drop(columns="step").groupby(keys, sort=False).mean(numeric_only=True).reset_index()


def _read(
    variants: Sequence[str], scale: str, track: str, name: str, read: Callable[[Path], pd.DataFrame]
) -> pd.DataFrame:
    frames, words = [], labels()
    for variant in variants:
        files = sorted((RUNS / scale / track / variant).glob(f"seed*/{name}"), key=lambda file: _seed(file.parent))
        for file in files:
            named = {"track": track, "variant": variant, "label": words[variant], "seed": _seed(file.parent)}
            frames.append(read(file).assign(**named))
    if not frames:
        raise InputError(
            f"{RUNS / scale / track} has no run of {', '.join(variants)}; make them: "
            f"python -m analyses.reproduce --scale {scale}"
        )
    return pd.concat(frames, ignore_index=True)


def _seed(folder: Path) -> int:
    return int(folder.name.removeprefix("seed"))
