"""Which α and η are worth a run: a screening that selects on some batches and confirms on others.

A setting's **score** on a batch is its right-direction share (see `directions`), averaged over the interval × sign
cells that count: those in which at least `min_tokens` tokens moved in every batch under every setting. It is the mean
of the cells, so that likely tokens, which are most, do not drown the others; over several batches, the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from gradscope.errors import InputError, checked
from gradscope.intervals import interval_labels
from gradscope.resampling import Seed, draw_clusters, percentiles, short_of, students_t
from gradscope.updates.directions import SIGNS
from gradscope.updates.tuning.counts import NUM_INTERVALS, SHARES
from gradscope.updates.tuning.linear import PLAIN, Setting

Kind = Literal["predicted", "actual"]
Number = int | float

MIN_TOKENS = 10
PAIRS = "reweight-lopti"
"""The method of a setting of α and η, the plain loss among them."""
ENOUGH_BATCHES = 3
"""Held-out batches that a verdict takes: it rests on how updates vary, so that intervals are Student's t over batches.
Of fewer batches an interval is a bootstrap over the prompts within them, which says nothing about other updates."""
CELLS = [f"{label}{'+' if sign == 'positive' else '−'}" for label in interval_labels() for sign in SIGNS]
"""Names of the interval × sign cells; + is Â > 0."""


@dataclass(frozen=True)
class Spearman:
    """A rank correlation over the settings, with bounds; NaN where all scores are equal.

    Of ENOUGH_BATCHES held-out batches or more: the mean of each batch's, with Student's t over them. Of fewer: of their
    mean scores, with percentiles over redrawn prompts, which are pulled towards 0.
    """

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.lower:.2f}, {self.upper:.2f}]"


@dataclass(frozen=True)
class Screening:
    """Every setting against the plain loss, and whether the one that looked best is worth a run."""

    settings: pd.DataFrame
    """A row per setting, the plain loss first: setting, alpha, eta (NaN: off), method (PAIRS: α and η say all),
    candidate. On the selection batches: predicted_score, and predicted_difference to the plain loss's with
    predicted_lower, predicted_upper. On the held-out batches: predicted_held_out, actual_score, and difference of
    the actual ones with lower, upper, and verdict: "better" or "worse" where that excludes 0, else "no difference";
    "undecided" for fewer than ENOUGH_BATCHES held-out batches; "" without actual updates. Means over all batches:
    steps, cosine, gradient_share.0, …"""
    by_interval: pd.DataFrame
    """A row per batch, setting, interval and sign: batch, held_out, setting, interval, sign, counted (in the score),
    num_tokens, predicted_tied, predicted_share, actual_tied, actual_share."""
    prompts: list[int]
    """Prompts of each batch."""
    held_out: list[bool]
    """Whether each batch confirms; the others select."""
    cells: list[str]
    """Those of CELLS that count."""
    min_tokens: int
    confidence: Number
    eta_judged: bool
    """False where on the selection batches every η's two steps add up to the one without η, so that the prediction is
    the same for all of them."""
    rankings: dict[str, Spearman]
    """Rank correlations of the actual scores on the held-out batches with predicted ones: "selection", on the selection
    batches; "held-out", on the same. Empty without actual updates."""

    @property
    def candidate(self) -> pd.Series:
        """The setting with the best predicted score on the selection batches, the first of equal ones.

        The plain loss may be it.
        """
        return self.settings[self.settings["candidate"]].iloc[0]

    @property
    def worth_a_run(self) -> bool:
        """Whether the candidate's actual score on the held-out batches beats the plain loss's."""
        return self.candidate["verdict"] == "better"


@checked
def screen(
    parts: Sequence[pd.DataFrame],
    grid: Sequence[Setting],
    *,
    seed: Seed = 0,
    min_tokens: int = MIN_TOKENS,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Screening:
    """Screen a grid, PLAIN first, by what `tune_batch` counted on two batches or more.

    Every second batch selects: the candidate is the setting with the best predicted score on these. The others are held
    out. There every setting's actual score is compared with the plain loss's, batch by batch, and the candidate is
    worth a run only if it is "better", which takes ENOUGH_BATCHES held-out batches. Raises InputError for fewer than
    two batches, and where no cell counts.
    """
    if len(parts) < 2:
        raise InputError(f"{len(parts)} batch: one has to select and another to confirm; give two or more")
    if grid[0] != PLAIN or any(sorted(part["setting"].unique()) != list(range(len(grid))) for part in parts):
        raise InputError("the counts are not of this grid, PLAIN first; give the grid that tune_batch counted")
    held_out = [is_held_out(batch) for batch in range(len(parts))]
    confirm, select = ([b for b, out in enumerate(held_out) if out is wanted] for wanted in (True, False))
    tally = _Tally(parts, len(grid), min_tokens, seed, confidence, resamples)
    known = all(parts[b]["actual_right"].notna().all() for b in confirm)
    table = pd.DataFrame({"setting": [s.name for s in grid]})
    for name in ("alpha", "eta"):
        table[name] = np.array([getattr(s, name) for s in grid], dtype=float)
    table["method"] = [PAIRS if s.weighting is None else s.name for s in grid]
    table["predicted_score"] = tally.scores("predicted", select)
    table["candidate"] = table.index == table["predicted_score"].argmax()
    bounds = ("difference", "lower", "upper")
    table[[f"predicted_{name}" for name in bounds]] = tally.differences("predicted", select).T
    table["predicted_held_out"] = tally.scores("predicted", confirm)
    table["actual_score"] = tally.scores("actual", confirm)
    table[[*bounds]] = tally.differences("actual", confirm).T
    enough = len(confirm) >= ENOUGH_BATCHES
    table["verdict"] = (_verdicts(table["lower"], table["upper"]) if enough else "undecided") if known else ""
    means = pd.concat(parts).groupby("setting")[["steps", "cosine", *SHARES]].mean()
    chosen = pd.concat([parts[b] for b in select])
    adds_up = chosen.loc[chosen["steps"] > 1, "adds_up"]
    return Screening(
        settings=table.join(means),
        by_interval=_by_interval(parts, grid, held_out, tally.cells),
        prompts=[draws.shape[1] for draws in tally.draws],
        held_out=held_out,
        cells=[name for name, counts in zip(CELLS, tally.cells, strict=True) if counts],
        min_tokens=min_tokens,
        confidence=confidence,
        eta_judged=adds_up.empty or not adds_up.all(),
        rankings=tally.rankings(select, confirm) if known else {},
    )


def is_held_out(batch: int) -> bool:
    """Whether the batch of this number confirms; the others select."""
    return batch % 2 == 0


def spearman(x: Float[np.ndarray, "D N"], y: Float[np.ndarray, "D N"]) -> Float[np.ndarray, " D"]:
    """Rank correlation of each row, equal values by their mean rank; NaN where one of both is constant or NaN.

    >>> spearman(np.array([[1.0, 2.0, 3.0]]), np.array([[0.1, 0.3, 0.2]])).tolist()
    [0.5]
    """
    from scipy.stats import rankdata

    x, y = (rankdata(values, axis=-1) - (values.shape[-1] + 1) / 2 for values in (x, y))
    with np.errstate(invalid="ignore"):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


class _Tally:
    """Right and moved tokens by setting, prompt and cell, with which cells count, and how often prompts are redrawn."""

    def __init__(
        self,
        parts: Sequence[pd.DataFrame],
        num_settings: int,
        min_tokens: int,
        seed: Seed,
        confidence: float,
        resamples: int,
    ) -> None:
        self.confidence = confidence
        kinds: tuple[Kind, ...] = ("predicted", "actual")
        self.counts = {kind: [_counts(part, num_settings, kind) for part in parts] for kind in kinds}
        """[right or moved, setting, prompt, cell] of each batch."""
        moved = [counts[1].sum(1) for kind in kinds for counts in self.counts[kind]]
        self.cells = np.nanmin(np.concatenate(moved), axis=0) >= min_tokens
        if not self.cells.any():
            raise InputError(
                f"no interval and sign has {min_tokens} tokens that move in every batch; give more responses per batch,"
                " or ask for fewer tokens"
            )
        sizes = [counts.shape[2] for counts in self.counts["predicted"]]
        self.draws = [draw_clusters(n, resamples, seed).astype(float) for n in sizes]
        """For each batch, how often each prompt is drawn [resamples, prompts]: of too few, unknown."""
        for draws in self.draws:
            if short_of(draws.shape[1]):
                draws[:] = np.nan

    def scores(self, kind: Kind, batches: Sequence[int]) -> Float[np.ndarray, " N"]:
        """Score of each setting, mean over these batches."""
        return np.mean(self._each(kind, batches), axis=0)

    def differences(self, kind: Kind, batches: Sequence[int]) -> Float[np.ndarray, "3 N"]:
        """To the first setting's score: mean over batches, and bounds."""
        each = self._each(kind, batches)
        each = each - each[:, :1]
        if len(batches) >= ENOUGH_BATCHES:
            return students_t(each, self.confidence)
        drawn = self._drawn(kind, batches)
        return np.vstack([each.mean(0), percentiles(drawn - drawn[:, :1], self.confidence)])

    def rankings(self, select: Sequence[int], confirm: Sequence[int]) -> dict[str, Spearman]:
        """Rank correlations of the actual scores on `confirm` with the predicted ones on either."""
        if len(confirm) >= ENOUGH_BATCHES:
            return self._rankings_by_batch(select, confirm)
        found, actual, drawn = {}, self.scores("actual", confirm), self._drawn("actual", confirm)
        for name, batches in (("selection", select), ("held-out", confirm)):
            value = spearman(self.scores("predicted", batches)[None], actual[None])
            bounds = percentiles(spearman(self._drawn("predicted", batches), drawn)[:, None], self.confidence)
            found[name] = Spearman(*np.concatenate([value, bounds[:, 0]]).tolist())
        return found

    def _rankings_by_batch(self, select: Sequence[int], confirm: Sequence[int]) -> dict[str, Spearman]:
        found, actual = {}, self._each("actual", confirm)
        chosen = np.broadcast_to(self.scores("predicted", select), actual.shape)
        for name, predicted in (("selection", chosen), ("held-out", self._each("predicted", confirm))):
            mean_and_bounds = students_t(spearman(predicted, actual)[:, None], self.confidence)[:, 0]
            found[name] = Spearman(*mean_and_bounds.clip(-1, 1).tolist())
        return found

    def _each(self, kind: Kind, batches: Sequence[int]) -> Float[np.ndarray, "b N"]:
        everyone = [np.ones((1, self.draws[b].shape[1])) for b in batches]
        return np.concatenate([self._share(kind, b, w) for b, w in zip(batches, everyone, strict=True)])

    def _drawn(self, kind: Kind, batches: Sequence[int]) -> Float[np.ndarray, "D N"]:
        return np.mean([self._share(kind, b, self.draws[b]) for b in batches], axis=0)

    def _share(self, kind: Kind, b: int, weights: Float[np.ndarray, "D n"]) -> Float[np.ndarray, "D N"]:
        """Score of each setting on one batch, its prompts weighted; a cell of which no token was drawn is left out."""
        right, moved = np.einsum("dn,ksnc->kdsc", weights, self.counts[kind][b][..., self.cells])
        drawn = moved > 0
        shares = np.divide(right, moved, out=np.zeros_like(right), where=drawn)
        with np.errstate(invalid="ignore"):  # 0/0 where nothing is known
            return shares.sum(-1) / drawn.sum(-1)


def _counts(part: pd.DataFrame, num_settings: int, kind: Kind) -> Float[np.ndarray, "2 N n C"]:
    columns = (part[f"{kind}_right"], part["num_tokens"] - part[f"{kind}_tied"])
    return np.stack([c.to_numpy(float).reshape(num_settings, -1, len(CELLS)) for c in columns])


def _verdicts(lower: pd.Series, upper: pd.Series) -> np.ndarray:
    return np.select([lower > 0, upper < 0], ["better", "worse"], "no difference")


def _by_interval(
    parts: Sequence[pd.DataFrame], grid: Sequence[Setting], held_out: Sequence[bool], cells: Bool[np.ndarray, " C"]
) -> pd.DataFrame:
    names = dict(enumerate(setting.name for setting in grid))
    counted = {(a, sign): cells[2 * a + s] for a in range(NUM_INTERVALS) for s, sign in enumerate(SIGNS)}
    tables = []
    for batch, (part, out) in enumerate(zip(parts, held_out, strict=True)):
        keys = ["setting", "interval", "sign"]
        numbers = ["num_tokens", "predicted_tied", "predicted_right", "actual_tied", "actual_right"]
        sums = part.groupby(keys, sort=False)[numbers].sum(min_count=1).reset_index()
        for kind in ("predicted", "actual"):
            sums[f"{kind}_share"] = sums[f"{kind}_right"] / (sums["num_tokens"] - sums[f"{kind}_tied"])
        sums["setting"] = sums["setting"].map(names)
        sums["counted"] = [counted[pair] for pair in zip(sums["interval"], sums["sign"], strict=True)]
        tables.append(sums.assign(batch=batch, held_out=out))
    columns = ["batch", "held_out", *keys, "counted", "num_tokens"]
    columns += ["predicted_tied", "predicted_share", "actual_tied", "actual_share"]
    return pd.concat(tables, ignore_index=True)[columns]
