"""Shares of squared token norms by interval of π, against shares of the tokens.

The **dominance index** of an interval is log₂(its share of Σ‖w·g‖² / its share of the tokens), in bits. 0: proportional
to its tokens; 1: twice that; it cannot exceed −log₂(share of the tokens). The predicted index uses Σ(w·(1−π))² instead,
as if every token's norm were 1−π times one constant (Prop. 4.2 of arXiv:2505.12929 up to a factor √2, at the logits).
Their difference is the network's contribution.

Σ‖w·g‖² sums over single tokens, without cancellation; for shares of the summed gradient see `sums`. In a sampled
interval it is the ratio estimate from the measured tokens with the proxy (w·‖e − π‖)² (`gradients.sample`). 95 %
intervals cover the choice of prompts and of measured tokens. `resampling` defines them and the prompts and measured
tokens they require; `PromptSums.short_of` says which are lacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.diagnosis.rows import join_rows, make_rows
from gradscope.diagnosis.terms import scaled_squares, weighted_norms
from gradscope.gradients import (
    LOGITS,
    PARAMETERS,
    sampling_probabilities,
)
from gradscope.intervals import interval_shares
from gradscope.resampling import (
    SHARE,
    Resampling,
    Seed,
    Shortage,
    bound,
    bound_bits,
    effective_sample_size,
    effective_size_of_shares,
    effective_tokens,
    odds_of_largest,
    prompt_clusters,
    redraw,
    short_of,
    widen,
)

STATISTICS = (
    ("token_share", "none", "tokens", 0, None), ("squared_share", "raw", "measured", 1, None),
    ("predicted_share", "none", "predicted", 2, None), ("dominance_index", "raw", "measured", 1, 0),
    ("predicted_index", "none", "predicted", 2, 0), ("added_index", "raw", "measured", 1, 2),
)  # fmt: skip
"""Name, metric, what is counted, and the place of a share, or of the two that an index compares."""
Matrix = Float[np.ndarray, "n A"]


@dataclass(frozen=True)
class PromptSums:
    """Sums over the tokens of each prompt and interval, [prompts, intervals]."""

    tokens: Matrix
    """Number of tokens."""
    measured: Matrix
    """Number of tokens with a known norm."""
    squares: Matrix
    """Σ‖w·g‖²/p over measured tokens, p being their sampling probability, or 1 if equal throughout an interval."""
    predicted: Matrix
    """Σ(w·(1−π))² over all tokens."""
    proxies: Matrix | None = None
    """Σ(w·‖e−π‖)² over all tokens; None: every token is measured."""
    measured_proxies: Matrix | None = None
    """Σ(w·‖e−π‖)²/p over measured tokens."""
    worth: Float[np.ndarray, " A"] | None = None
    """`resampling.effective_sample_size` of each interval's sample for Σ‖w·g‖²; None without a sample."""

    def short_of(self) -> list[Shortage | None]:
        """Return, by interval, what a confidence interval on the share of Σ‖w·g‖² lacks."""
        reached, worth, measured = (self.squares > 0).sum(0), self._worth_of_shares(), self.measured.sum(0)
        prompts = reached if self.worth is None else ((self.predicted > 0) & (self.tokens > 0)).sum(0)
        return [short_of(*each) for each in zip(prompts, worth, measured.astype(int), reached, strict=True)]

    def _worth_of_shares(self) -> Float[np.ndarray, " A"]:
        if self.worth is None:
            return np.full(self.tokens.shape[1], np.inf)
        return effective_size_of_shares(self.predicted.sum(0), self.worth)

    def totals(self, weights: Float[np.ndarray, "draws n"]) -> Float[np.ndarray, "draws A"]:
        """Return Σ‖w·g‖² over all tokens by interval, with the prompts' weights; NaN where none is measured."""
        squares = weights @ self.squares
        if self.proxies is None:
            return squares
        proxies = weights @ self.proxies
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(proxies > 0, proxies * squares / (weights @ self.measured_proxies), 0.0)

    def drawn(self) -> Float[np.ndarray, " A"] | None:
        """Return `resampling.effective_tokens` by interval; None without a sample."""
        return None if self.worth is None else effective_tokens(self.worth, self.measured.sum(0))


def sum_by_prompt(table: pd.DataFrame, num_intervals: int, norm: str = PARAMETERS) -> PromptSums:
    """Sum a token table with known weights by prompt and interval. norm: the column of ‖g‖.

    A sample without `sampling_probability` counts as drawn with equal chances within `interval`; for other groupings
    see `group_shares`.
    """
    cell = prompt_clusters(table) * num_intervals + table["interval"].to_numpy(np.int64)
    size = (int(cell.max()) // num_intervals + 1) * num_intervals

    def total(values: np.ndarray) -> Matrix:
        return np.bincount(cell, values, minlength=size).reshape(-1, num_intervals)

    weight = table["weight"].to_numpy(np.float64)
    tokens = total(np.ones(len(table)))
    amounts = (weight * np.exp(table["log_one_minus_prob"].to_numpy(np.float64))) ** 2
    predicted = total(amounts)
    squares = weighted_norms(table, norm) ** 2
    known, probabilities = ~np.isnan(squares), sampling_probabilities(table)
    measured, interval = total(known.astype(float)), table["interval"].to_numpy()
    squares = np.where(known, squares, 0.0)
    if probabilities is None and known.all():
        return PromptSums(tokens, measured, total(squares), predicted)
    if probabilities is None:  # tokens chosen by the user: treated as drawn with equal probabilities
        with np.errstate(invalid="ignore"):
            probabilities = (measured.sum(0) / tokens.sum(0))[interval]
    proxies = (weight * table[LOGITS].to_numpy(np.float64)) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):  # none of an interval is measured
        scaled = [total(np.where(known, part / probabilities, 0.0)) for part in (squares, proxies)]
    worth = effective_sample_size(amounts, probabilities, interval, num_intervals)
    return PromptSums(tokens, measured, scaled[0], predicted, total(proxies), scaled[1], worth)


def token_shares(sums: PromptSums, labels: Sequence[str], *, seed: Seed = 0, resamples: int = 1000) -> pd.DataFrame:
    """Compute by interval token_share, squared_share (of Σ‖w·g‖²) and predicted_share (of Σ(w·(1−π))²).

    Also dominance_index, predicted_index and their difference added_index (bits; see the module), and largest_share:
    the fraction of redrawn batches in which the interval has the largest squared_share (without bounds). NaN: values of
    intervals without tokens; all shares of Σ‖w·g‖² if an interval has tokens but none measured; and bounds if
    `PromptSums.short_of` names a shortage, or too few prompts have tokens of the interval.
    """

    def evaluate(weights: np.ndarray) -> Float[np.ndarray, "draws 3 A"]:
        tokens = weights @ sums.tokens
        parts = np.stack([tokens, sums.totals(weights), weights @ sums.predicted], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):  # weights that are all 0
            shares = parts / parts.sum(-1, keepdims=True)
        return np.where(np.isfinite(shares) & (tokens > 0)[:, None], shares, np.nan)

    prompts = len(sums.tokens)
    draws = redraw(evaluate, prompts, seed, resamples)
    largest = odds_of_largest(widen(evaluate, prompts, draws, sampled=sums.worth is not None)[:, 1])
    own = {"tokens": sums.tokens, "predicted": sums.predicted}
    short = {of: [short_of(served) for served in (part > 0).sum(0)] for of, part in own.items()}
    short["measured"] = sums.short_of()
    counts = {"tokens": sums.tokens.sum(0), "predicted": sums.tokens.sum(0), "measured": sums.measured.sum(0)}
    parts, found = [], {}
    for name, metric, of, over, under in STATISTICS:
        measured = sums.drawn() if of == "measured" else None
        if under is None:
            args = (lambda w, n=over: evaluate(w)[:, n], prompts, draws[:, over])
            numbers = bound(*args, scale=SHARE, measured=measured)
            found[over] = numbers
        else:
            pair = [over, under]
            args = (lambda w, pair=pair: evaluate(w)[:, pair], prompts, draws[:, pair], [found[n] for n in pair])
            numbers = bound_bits(*args, measured=measured)
        unit = "share" if under is None else "bits"
        named = {"unit": unit, "metric": metric, "intervals": labels, "short": () if seed is None else short[of]}
        parts.append(make_rows(name, numbers, counts[of], **named))
    alone = np.vstack([largest, np.full((2, len(labels)), np.nan)])
    odds = make_rows("largest_share", alone, counts["measured"], unit="share", metric="raw", intervals=labels)
    return join_rows([*parts, odds])


def group_shares(
    table: pd.DataFrame, codes: np.ndarray, names: Sequence[object], *, seed: Seed = 0, resamples: int = 1000
) -> pd.DataFrame:
    """Compute the shares of the tokens and of Σ‖w·g‖² by any grouping of a token table, a row per name.

    codes: place in `names` of each token's group; negative: of none. Columns: value (the name); num_tokens,
    token_share, token_lower, token_upper; num_measured, squared_share, squared_lower, squared_upper. Bounds are
    simultaneous 95 % bounds on all shares, since the largest is picked. Measured tokens are scaled as in
    `scaled_squares`.
    """
    known, squares, drawn = codes >= 0, scaled_squares(table), sampling_probabilities(table)
    amounts = (table["weight"] * np.exp(table["log_one_minus_prob"])).to_numpy(np.float64) ** 2
    sample = {} if drawn is None else {"probabilities": drawn[known], "sizes": amounts[known]}
    args, settings = (codes[known], table["group"].to_numpy()[known]), {"edges": range(len(names) + 1)}
    settings["resampling"] = Resampling(seed, 1 - 0.05 / len(names), resamples)
    found = {"token": interval_shares(*args, **settings)}
    found["squared"] = interval_shares(*args, values=squares[known], **sample, **settings)
    columns = {"value": [str(name) for name in names], "num_tokens": found["token"]["num_tokens"]}
    for name, own in found.items():
        columns |= {} if name == "token" else {"num_measured": own["num_measured"]}
        columns |= {f"{name}_share": own["value"], f"{name}_lower": own["lower"], f"{name}_upper": own["upper"]}
    return pd.DataFrame(columns)
