"""The runs that analyses/runs.toml lists: which there are, with which settings, and which a figure needs."""

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
RUNS = Path(os.environ.get("GRADSCOPE_RUNS") or Path(__file__).parents[1] / "runs")
"""What is kept of the runs, and what figures are drawn from: the repository's, or one's own."""
WORK = Path("runs")
"""Where runs are made, whole: with checkpoints and optimizer states."""


@dataclass(frozen=True)
class Test:
    """How a checkpoint is judged: greedily and by samples, on questions that no training draws."""

    task: str
    temperature: float
    max_new_tokens: int
    checkpoints: int
    """The newest so many are judged."""
    questions: int | None = None
    """How many; None: all that the files of `data` hold."""
    samples: int = 0
    """Sampled responses to each question; one more is greedy."""
    kept: int | None = None
    """Of how many of the questions the responses are kept; None: of all."""
    people: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    benchmarks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name → what is different of the above: several sets of questions, each a level of the results under its name."""

    def parts(self) -> dict[str | None, Test]:
        """What is asked together: each benchmark by its name, or the whole test under None."""
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
    """The scale's, see `launch_of`."""

    @property
    def place(self) -> Path:
        """Its folder, below RUNS and below WORK alike."""
        return Path(self.scale) / self.track / self.variant / f"seed{self.seed}"


@cache
def read() -> dict[str, Any]:
    """The file, as it is. Raises InputError if it is no TOML."""
    try:
        return tomllib.loads(FILE.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{FILE} is no TOML: {error}") from error


def check_scale(scale: str) -> None:
    """Raises InputError for an unknown scale."""
    if scale not in (scales := read()["scales"]):
        raise InputError(f"no scale is called {scale!r}; give one of {', '.join(scales)}")


def labels() -> dict[str, str]:
    """Variant → its name in figures, in the order in which figures show them."""
    return {name: _has(variant, f"variant {name}", "label")["label"] for name, variant in read()["variants"].items()}


def list_runs(scale: str) -> list[Run]:
    """The scale's runs, in the order in which they are made. Raises InputError for an unknown scale."""
    check_scale(scale)
    return [run for track in read()["scales"][scale]["tracks"] for run in _runs_of(scale, track)]


def test_of(scale: str, track: str) -> Test:
    """How the track's runs are judged."""
    return next(run.test for run in list_runs(scale) if run.track == track)


def needs(figure: str, scale: str) -> list[tuple[str, str]]:
    """The (track, variant) pairs of a scale that a figure, or what is measured for it, is made from.

    A page's own name does for that of what draws it: fig7 for fig7_8. Raises InputError for a scale or a figure that
    is unknown.
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
    """The name under which a page of the paper is drawn: fig7 is a part of fig7_8."""
    return next((name for name, drawn in read().get("pages", {}).items() if page in drawn), page)


def launch_of(scale: str) -> dict[str, Any]:
    """On what the scale's runs are made, where the file says: processes of each, sharded or not."""
    return read()["scales"][scale].get("launch", {})


def of_the_paper(scale: str, track: str) -> dict[str, int]:
    """What the paper says of its own run of this track: about how many steps, and optimizer steps of a batch."""
    return _track(scale, track).get("paper", {})


def tracks_of(kind: str, scale: str) -> list[str]:
    """The scale's tracks that have this name, or are of this kind."""
    return [track for track in read()["scales"][scale]["tracks"] if kind in (track, _track(scale, track).get("kind"))]


def _track(scale: str, track: str) -> dict[str, Any]:
    """A track's table, filled up, settings too, from the one that it is `like`. InputError where something lacks."""
    table = read()["scales"][scale]["tracks"][track]
    if "like" in table:
        where, _, name = table["like"].rpartition("/")
        other = _track(where or scale, name)
        table = other | table | {"settings": other["settings"] | table.get("settings", {})}
    return _has(table, f"track {track} of scale {scale}", "preset", "settings", "stages", "test")


def _has(table: dict[str, Any], place: str, *names: str) -> dict[str, Any]:
    """The table. Raises InputError where it lacks one of the names."""
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
                yield Run(scale, track, variant, seed, config, test, launch_of(scale))


def configure(scale: str, track: str, variant: str) -> TrainConfig:
    """The settings of a variant in a track: the preset, the track's settings, the variant's, and the track's own of it.

    Raises InputError for a variant, a track or a setting that there is not.
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
    """The table as arguments of a dataclass. Raises InputError for a name that it does not have."""
    known = [each.name for each in fields(kind)]
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{FILE}, {place}: {unknown[0]!r} is no setting; give some of {', '.join(known)}")
    return _tuples(table)


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has lists where settings have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
