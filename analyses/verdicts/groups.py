"""Counts how often the bounds on other prompts' part of groups of tokens hold the truth.

    python -m analyses.verdicts.groups [--draws 1000] [--out FILE.csv]

A planted token has a gradient of independent noise, of noise that all tokens of its prompt share, and of a signal along
one direction, whose strength belongs to its token string and grows with 1−π; a prompt's terms have a common size. Each
batch is asked for other prompts' part of its probability intervals, of its kinds of tokens, and of a grouping made
afterwards: a random half of the token strings, another one in each batch. A row is a cell, a grouping and a statistic:
others, Σ_t w_t⟨g_t, G − G_p⟩, of which the truth is n(n−1)⟨μ_a, μ⟩; and share, ⟨μ_a, μ⟩/‖μ‖², which the report gives
where the whole is three standard errors from 0. printed: the fraction of the batches that give bounds; coverage: the
fraction of these that hold the truth; worst: that of the worst group. Without signal only what is printed counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from tqdm import tqdm

from analyses.common.script import exit_with
from gradscope.diagnosis import PARTS
from gradscope.gradients import Contributions

WANTED = PARTS["wanted"]
"""The part of the report whose bounds these are."""
STRINGS, KINDS, INTERVALS, DIMENSIONS, FOLDS = 40, 4, 4, 48, 8
CHANCES = np.array([0.2, 0.1, 0.1, 0.6])
"""Of the intervals; 1−π is that of their middle."""
REST = 1 - (np.arange(INTERVALS) + 0.5) / INTERVALS


@dataclass(frozen=True)
class Cell:
    """A world, and a number of prompts."""

    prompts: int
    signal: float
    """Mean of a token's signal over the standard deviation of its noise, where 1−π is 1."""
    common: float
    """The standard deviation of a prompt's common noise, in that of a token's."""
    spread: float
    """Standard deviation of the logarithm of a prompt's size."""
    tokens: int = 60


@dataclass(frozen=True)
class World:
    """What is true of the population of prompts."""

    strengths: np.ndarray
    """[STRINGS], of the signal; some are negative."""
    kinds: np.ndarray
    """[STRINGS]."""

    @staticmethod
    def draw(rng: np.random.Generator) -> World:
        return World(1 + 0.7 * rng.standard_normal(STRINGS), rng.integers(KINDS, size=STRINGS))

    def share(self, strings: np.ndarray | None = None, interval: int | None = None) -> float:
        """Return ⟨μ_a, μ⟩/‖μ‖² of these strings or this interval: the signal is along one direction."""
        by_interval, by_string = CHANCES * REST, self.strengths / self.strengths.sum()
        if interval is not None:
            return float(by_interval[interval] / by_interval.sum())
        return float(by_string[strings].sum())

    def mean(self, cell: Cell) -> float:
        """Return ‖μ‖, of one prompt's gradient; a prompt's size has the mean 1."""
        return cell.tokens * cell.signal * float(self.strengths.mean() * (CHANCES * REST).sum())


def sample(world: World, cell: Cell, rng: np.random.Generator) -> tuple[Contributions, np.ndarray, np.ndarray]:
    """Return a batch's contributions, and its tokens' intervals and strings."""
    n, each = cell.prompts, cell.tokens
    group = np.repeat(np.arange(n), each)
    interval, string = rng.choice(INTERVALS, n * each, p=CHANCES), rng.integers(STRINGS, size=n * each)
    terms = rng.standard_normal((n * each, DIMENSIONS)) / np.sqrt(DIMENSIONS)
    terms += cell.common * (rng.standard_normal((n, DIMENSIONS)) / np.sqrt(DIMENSIONS))[group]
    terms[:, 0] += cell.signal * world.strengths[string]
    size = np.exp(cell.spread * rng.standard_normal(n) - cell.spread**2 / 2)
    terms *= (REST[interval] * size[group])[:, None]
    by_prompt = terms.reshape(n, each, DIMENSIONS).sum(1)
    folds = rng.permutation(n) % FOLDS
    by_fold = np.stack([terms @ by_prompt[folds == fold].sum(0) for fold in range(FOLDS)])
    columns = by_fold.sum(0), (terms * by_prompt[group]).sum(1), group
    known = *map(torch.tensor, columns), n, 0.0, torch.tensor(by_fold), torch.tensor(folds)
    return Contributions(*known), interval, string


def cover(cell: Cell, draws: int, seed: int = 0) -> list[dict]:
    """Return a cell's rows; each batch is of a world of its own."""
    own = [cell.prompts, *(int(1000 * value) for value in (cell.signal, cell.common, cell.spread))]
    rng = np.random.default_rng([seed, *own])
    hits: dict[tuple[str, str], list[np.ndarray]] = {}
    for _ in range(draws):
        world = World.draw(rng)
        found, interval, string = sample(world, cell, rng)
        half = rng.permutation(STRINGS) < STRINGS // 2
        kinds = [np.flatnonzero(world.kinds == kind) for kind in range(KINDS)]
        asked = {
            "intervals": (interval, [world.share(interval=place) for place in range(INTERVALS)]),
            "kinds": (world.kinds[string], [world.share(strings=own) for own in kinds]),
            "half of the strings": (half[string].astype(int), [world.share(np.flatnonzero(half == x)) for x in (0, 1)]),
        }
        for name, (codes, truth) in asked.items():
            signals = found.grouped(codes, len(truth))
            _, others, error = WANTED.group_parts(found, signals)
            whole = cell.prompts * (cell.prompts - 1) * world.mean(cell) ** 2 / found.square_norm
            wanted = np.append(truth, 1.0)
            given = others[0, -1] >= WANTED.TOLD * error
            shares = signals.share_bounds() if given else np.full((3, len(truth)), np.nan)
            hits.setdefault((name, "others"), []).append(_held(others[1:], wanted * whole))
            hits.setdefault((name, "share"), []).append(_held(shares[1:], wanted[:-1]))
    return [_row(cell, *key, np.array(held)) for key, held in hits.items()]


def _held(bounds: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return whether bounds [2, k] hold the truth [k]; NaN where there are none."""
    return np.where(np.isnan(bounds[0]), np.nan, (bounds[0] <= truth) & (truth <= bounds[1]))


def _row(cell: Cell, grouping: str, statistic: str, held: np.ndarray) -> dict:
    printed = ~np.isnan(held)
    row = vars(cell) | {"grouping": grouping, "statistic": statistic, "draws": len(held), "printed": printed.mean()}
    if statistic == "share" and not cell.signal:  # of nothing, there are no shares
        return row | {"coverage": np.nan, "worst": np.nan}
    each = [held[printed[:, a], a].mean() for a in np.flatnonzero(printed.sum(0) >= 0.1 * len(held))]
    return row | {"coverage": held[printed].mean() if printed.any() else np.nan, "worst": min(each, default=np.nan)}


def list_cells() -> Iterator[Cell]:
    for prompts in (12, 32, 128):
        for signal in (0.0, 0.05, 0.15, 0.5):
            for common, spread in ((0.0, 0.0), (0.3, 0.5)):
                yield Cell(prompts, signal, common, spread)


def main(out: Path = Path("figures/verdicts/data/verdicts_groups.csv"), draws: int = 1000, processes: int = 2) -> None:
    with Pool(processes) as pool:
        jobs = [pool.apply_async(partial(cover, cell, draws)) for cell in list_cells()]
        rows = [row for job in tqdm(jobs, "cells") for row in job.get()]
    table = pd.DataFrame(rows)
    table.to_csv(out, index=False, float_format="%.4f")
    print(table.to_string(index=False))


if __name__ == "__main__":
    exit_with(lambda: tyro.cli(main))
