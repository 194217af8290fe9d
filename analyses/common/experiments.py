"""The runs that analyses/runs.toml lists: their settings, and which figure needs which."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from gradscope.errors import InputError
from gradscope.trainer import TrainConfig, get_preset

FILE = Path(__file__).parents[1] / "runs.toml"
KEPT = Path(__file__).parents[1] / "runs"
"""The repository's folder of runs."""
RUNS = Path(os.environ.get("GRADSCOPE_RUNS") or KEPT)
"""Folder of what is kept of runs, and of the figures' data: the repository's or the user's."""
WORK = Path("runs")
"""Folder of whole runs, with checkpoints and optimizer states."""


@dataclass(frozen=True)
class Test:
    """How a checkpoint is judged: greedily and by samples, on questions that training never draws."""

    task: str
    temperature: float
    max_new_tokens: int
    checkpoints: int
    """Number of newest checkpoints to judge."""
    questions: int | None = None
    """Number of questions; None: all in `data`'s files."""
    samples: int = 0
    """Sampled responses per question, in addition to a greedy one."""
    kept: int | None = None
    """Number of questions whose responses are kept; None: all."""
    people: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    benchmarks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """{name: changes to the above}: several sets of questions, each a level of the results."""

    def parts(self) -> dict[str | None, Test]:
        """Questions that are asked together: {benchmark: questions}, or {None: the whole test}."""
        whole = replace(self, benchmarks={})
        parts = {name: replace(whole, **_tuples(changes)) for name, changes in self.benchmarks.items()}
        return parts or {None: whole}


@dataclass(frozen=True)
class Run:
    """One training run: a variant of a track at a seed."""

    scale: str
    track: str
    variant: str
    seed: int
    config: TrainConfig
    test: Test
    launch: Mapping[str, Any] = field(default_factory=dict)
    """The scale's `launch`; see `launch_of`."""
    judged_further: str | None = None
    """Module whose `judge_further(run, checkpoints, folder)` keeps more of the finished run."""

    @property
    def place(self) -> Path:
        """Its folder, relative to RUNS and to WORK."""
        return place_of(self.scale, self.track, self.variant, self.seed)


def place_of(scale: str, track: str, variant: str, seed: int) -> Path:
    """Return a run's folder, relative to RUNS and to WORK."""
    return Path(scale) / track / variant / f"seed{seed}"


@cache
def read() -> dict[str, Any]:
    """Parse the file. Raises InputError if it is not TOML."""
    try:
        return tomllib.loads(FILE.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{FILE} is no TOML: {error}") from error


def check_scale(scale: str) -> None:
    """Raise InputError for an unknown scale."""
    if scale not in (scales := read()["scales"]):
        raise InputError(f"no scale is called {scale!r}; give one of {', '.join(scales)}")


def labels() -> dict[str, str]:
    """Return {variant: its name in figures}, in the figures' order."""
    return {name: _has(variant, f"variant {name}", "label")["label"] for name, variant in read()["variants"].items()}


def list_runs(scale: str) -> list[Run]:
    """Return the scale's runs in the order in which they are made. Raises InputError for an unknown scale."""
    check_scale(scale)
    return [run for track in read()["scales"][scale]["tracks"] for run in _runs_of(scale, track)]


def find_run(scale: str, track: str, variant: str | None = None, seed: int | None = None) -> Run:
    """Return a track's first run, of this variant and with this seed where given."""
    runs = [run for run in list_runs(scale) if run.track == track]
    return next(run for run in runs if variant in (None, run.variant) and seed in (None, run.seed))


def test_of(scale: str, track: str) -> Test:
    """Return how the track's runs are judged."""
    return find_run(scale, track).test


def needs(figure: str, scale: str) -> list[tuple[str, str]]:
    """Return the scale's (track, variant) pairs that a figure, or its measurements, needs.

    A page's name stands for its figure: fig7 for fig7_8. Raises InputError for an unknown scale or figure.
    """
    check_scale(scale)
    figure, figures = drawn_as(figure), read()["figures"]
    measured = [entry for entry in read().get("measurements", {}).values() if scale in entry["scales"]]
    known = dict.fromkeys([*figures, *(name for entry in measured for name in entry["figures"])])
    if figure not in known:
        raise InputError(f"no figure is called {figure!r}; give one of {', '.join(known)}")
    wanted = figures.get(figure, {}).items()
    pairs = [(track, variant) for kind, names in wanted for track in tracks_of(kind, scale) for variant in names]
    if unknown := [variant for _, variant in pairs if variant not in labels()]:
        raise InputError(f"{FILE}, {figure}: no variant is called {unknown[0]!r}; give some of {', '.join(labels())}")
    after = [place for entry in measured if figure in entry["figures"] for place in entry["after"]]
    return list(dict.fromkeys(pairs + [tuple(place.split("/")) for place in after if "/" in place]))


def drawn_as(page: str) -> str:
    """Return the figure that contains a page of the paper: fig7_8 for fig7."""
    return next((name for name, drawn in read().get("pages", {}).items() if page in drawn), page)


def launch_of(scale: str) -> dict[str, Any]:
    """Return the scale's `launch`, if any: processes per run, sharded or not."""
    return read()["scales"][scale].get("launch", {})


def of_the_paper(scale: str, track: str) -> dict[str, int]:
    """Return the paper's approximate number of steps of this track, and its optimizer steps per batch."""
    return _track(scale, track).get("paper", {})


def tracks_of(kind: str, scale: str) -> list[str]:
    """Return the scale's tracks of this name or kind."""
    return [track for track in read()["scales"][scale]["tracks"] if kind in (track, _track(scale, track).get("kind"))]


def _track(scale: str, track: str) -> dict[str, Any]:
    """Return a track's table, filled up from the track named in `like`. Raises InputError for gaps."""
    table = read()["scales"][scale]["tracks"][track]
    if "like" in table:
        where, _, name = table["like"].rpartition("/")
        other = _track(where or scale, name)
        table = other | table | {"settings": other["settings"] | table.get("settings", {})}
    return _has(table, f"track {track} of scale {scale}", "preset", "settings", "stages", "test")


def _has(table: dict[str, Any], place: str, *names: str) -> dict[str, Any]:
    """Return the table. Raises InputError unless it has all of the names."""
    if absent := [name for name in names if name not in table]:
        raise InputError(f"{FILE}: {place} has no {absent[0]!r}")
    return table


def _runs_of(scale: str, track: str) -> Iterator[Run]:
    table = _track(scale, track)
    test = Test(**_arguments(Test, table["test"], f"the test of {scale}/{track}"))
    for stage in table["stages"]:
        _has(stage, f"a stage of {scale}/{track}", "variants", "seeds")
        for seed in stage["seeds"]:
            for variant in stage["variants"]:
                config = replace(configure(scale, track, variant), seed=seed)
                yield Run(scale, track, variant, seed, config, test, launch_of(scale), table.get("judged_further"))


def configure(scale: str, track: str, variant: str) -> TrainConfig:
    """Return the settings of a variant in a track: the preset, the track's, the variant's, the track's for the variant.

    Raises InputError for an unknown variant, track or setting.
    """
    tracks, variants = read()["scales"][scale]["tracks"], read()["variants"]
    if track not in tracks or variant not in variants:
        raise InputError(f"{FILE.name} has no {track}/{variant} at scale {scale}; give a track and a variant of it")
    table = _track(scale, track)
    changes = _has(variants[variant], f"variant {variant}", "label")
    settings = table["settings"] | changes | table.get("variants", {}).get(variant, {})
    settings.pop("label")
    return replace(get_preset(table["preset"]), **_arguments(TrainConfig, settings, f"{scale}/{track}/{variant}"))


def _arguments(kind: type, table: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the table as arguments of a dataclass. Raises InputError for an unknown name."""
    known = [each.name for each in fields(kind)]
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{FILE}, {place}: {unknown[0]!r} is no setting; give some of {', '.join(known)}")
    return _tuples(table)


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    """Convert TOML's lists to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
