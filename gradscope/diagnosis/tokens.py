"""Measure dominance in a token table: shares of squared norms against shares of tokens, by interval and by kind.

The **dominance index** of an interval is log₂(its share of Σ‖w·g‖² / its share of the tokens), in bits. 0: proportional
to its tokens; 1: twice that; it cannot exceed −log₂(share of the tokens). The predicted index uses Σ(w·(1−π))² instead,
as if every token's norm were 1−π times one constant (Prop. 4.2 of arXiv:2505.12929 up to a factor √2, at the logits).
Their difference is the network's contribution.

Σ‖w·g‖² sums over single tokens, without cancellation; for shares of the summed gradient see `gradients`. In a sampled
interval, each measured token counts for 1 / p tokens, p being its sampling probability (`gradients.sample`); with equal
probabilities, the sum is the number of tokens times the mean over measured ones. 95 % intervals cover the choice of
prompts and of measured tokens. `resampling` defines them and the prompts and measured tokens they require;
`PromptSums.short_of` says which are lacking.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.diagnosis.result import BoundMargins, join_rows, make_rows
from gradscope.gradients import (
    LAYER,
    LOGITS,
    PARAMETERS,
    sampling_probabilities,
    stands_for,
)
from gradscope.intervals import interval_shares, summarize
from gradscope.policy import Policy, float_parameters, module_groups
from gradscope.resampling import (
    BITS,
    SHARE,
    Resampling,
    Seed,
    Shortage,
    bound,
    odds_of_largest,
    prompt_clusters,
    redraw,
    sample_worth,
    short_of,
    widen,
    worth_of_shares,
)
from gradscope.theory import add_drivers, logit_grad_bounds, rounding_tolerance

Number = int | float
PRINTABLE = 10
"""Fewest measured tokens for a kind of token to have its own row."""
OTHER = "other"
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
    expected: Matrix | None = None
    """Σp over all tokens; None: p is 1."""
    worth: Float[np.ndarray, " A"] | None = None
    """`resampling.sample_worth` of each interval's sample for Σ‖w·g‖²; None without a sample."""

    def short_of(self) -> list[Shortage | None]:
        """Return, by interval, what a confidence interval on the share of Σ‖w·g‖² lacks."""
        reached, worth, measured = (self.squares > 0).sum(0), self._worth_of_shares(), self.measured.sum(0)
        prompts = reached if self.worth is None else ((self.predicted > 0) & (self.tokens > 0)).sum(0)
        return [short_of(*each) for each in zip(prompts, worth, measured.astype(int), reached, strict=True)]

    def _worth_of_shares(self) -> Float[np.ndarray, " A"]:
        if self.worth is None:
            return np.full(self.tokens.shape[1], np.inf)
        return worth_of_shares(self.predicted.sum(0), self.worth)

    def drawn(self) -> Float[np.ndarray, " A"] | None:
        """Return the number of measured tokens by interval, infinity if all were; None without a sample."""
        return None if self.worth is None else np.where(np.isinf(self.worth), np.inf, self.measured.sum(0))


def weighted_norms(table: pd.DataFrame, norm: str = PARAMETERS) -> Float[np.ndarray, " n"]:
    """Return ‖w·g‖ of each token in float64; NaN if weight or norm is unknown. norm: the column of ‖g‖."""
    return np.abs(table["weight"].to_numpy(np.float64)) * table[norm].to_numpy(np.float64)


def sum_by_prompt(table: pd.DataFrame, num_intervals: int, norm: str = PARAMETERS) -> PromptSums:
    """Sum a token table with known weights by prompt and interval. norm: the column of ‖g‖."""
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
    measured, squares = total(known.astype(float)), np.where(known, squares, 0.0)
    if probabilities is None and known.all():
        return PromptSums(tokens, measured, total(squares), predicted)
    if probabilities is None:  # tokens chosen by the user: treated as drawn with equal probabilities
        with np.errstate(invalid="ignore"):
            chances = (measured.sum(0) / tokens.sum(0))[table["interval"].to_numpy(np.int64)]
        worth = sample_worth(amounts, chances, table["interval"].to_numpy(np.int64), num_intervals)
        return PromptSums(tokens, measured, total(squares), predicted, worth=worth)
    worth = sample_worth(amounts, probabilities, table["interval"].to_numpy(np.int64), num_intervals)
    return PromptSums(tokens, measured, total(squares / probabilities), predicted, total(probabilities), worth)


def token_shares(
    sums: PromptSums,
    labels: Sequence[str],
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Compute by interval token_share, squared_share (of Σ‖w·g‖²) and predicted_share (of Σ(w·(1−π))²).

    Also dominance_index, predicted_index and their difference added_index (bits; see the module), and largest_share:
    the fraction of redrawn batches in which the interval has the largest squared_share (without bounds). NaN: values of
    intervals without tokens; all shares of Σ‖w·g‖² if an interval has tokens but none measured; and bounds if
    `PromptSums.short_of` names a shortage, or too few prompts have tokens of the interval.
    """

    each = sums.tokens if sums.expected is None else sums.expected

    def evaluate(weights: np.ndarray) -> np.ndarray:
        tokens, expected, measured, squares, predicted = (
            weights @ part for part in (sums.tokens, each, sums.measured, sums.squares, sums.predicted)
        )
        with np.errstate(invalid="ignore", divide="ignore"):  # an empty interval, weights that are all 0
            totals = np.where(tokens > 0, expected * squares / measured, 0.0)
            shares = [part / part.sum(-1, keepdims=True) for part in (tokens, totals, predicted)]
            shares = [np.where(tokens > 0, share, np.nan) for share in shares]
            indices = [np.log2(share / shares[0]) for share in shares[1:]]
            difference = np.log2(shares[1] / shares[2])
        parts = np.hstack([*shares, *indices, difference])
        return np.where(np.isfinite(parts), parts, np.nan)

    size = len(labels)
    draws = redraw(evaluate, len(sums.tokens), seed, resamples)
    energies = slice(size, 2 * size)
    wide = widen(evaluate, len(sums.tokens), draws, sampled=sums.worth is not None)
    largest = odds_of_largest(wide[:, energies])
    own = {"tokens": sums.tokens, "predicted": sums.predicted}
    short = {of: [short_of(prompts) for prompts in (part > 0).sum(0)] for of, part in own.items()}
    short["measured"] = sums.short_of()
    counts = {"tokens": sums.tokens.sum(0), "predicted": sums.tokens.sum(0), "measured": sums.measured.sum(0)}
    kinds = {
        "token_share": ("none", "tokens", "share"), "squared_share": ("raw", "measured", "share"),
        "predicted_share": ("none", "predicted", "share"), "dominance_index": ("raw", "measured", "bits"),
        "predicted_index": ("none", "predicted", "bits"), "added_index": ("raw", "measured", "bits"),
    }  # fmt: skip
    parts = []
    for column, (name, (metric, of, unit)) in enumerate(kinds.items()):
        own = slice(column * size, (column + 1) * size)
        scale, drawn = SHARE if unit == "share" else BITS, sums.drawn() if of == "measured" else None
        numbers = bound(
            lambda weights, own=own: evaluate(weights)[:, own],
            len(sums.tokens),
            draws[:, own],
            confidence=confidence,
            scale=scale,
            measured=drawn,
        )
        named = {"unit": unit, "metric": metric, "intervals": labels, "short": () if seed is None else short[of]}
        parts.append(make_rows(name, numbers, counts[of], **named))
    alone = np.vstack([largest, np.full((2, len(labels)), np.nan)])
    odds = make_rows("largest_share", alone, counts["measured"], unit="share", metric="raw", intervals=labels)
    return join_rows([*parts, odds])


def layer_norms(table: pd.DataFrame, edges: Sequence[Number], *, seed: Seed = 0, resamples: int = 1000) -> pd.DataFrame:
    """Compute mean norms of the unweighted token gradients by layer and interval, logits first.

    Columns: quantity (logit_grad_norm, act_grad_norm.0, …, param_grad_norm), then those of `intervals.summarize`.
    """
    layers = sorted((c for c in table if c.startswith(LAYER)), key=lambda c: int(c.removeprefix(LAYER)))
    parts, settings = [], {"resampling": Resampling(seed, resamples=resamples), "edges": edges}
    drawn = sampling_probabilities(table)
    for name in (LOGITS, *layers, PARAMETERS):
        # At the logits, every token is measured.
        own = settings | {"probabilities": None if name == LOGITS else drawn, "sizes": table[LOGITS]}
        part = summarize(table[name], table["interval"], table["group"], **own)
        part.insert(0, "quantity", name)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def shares_by(
    table: pd.DataFrame,
    *,
    classes: int = 4,
    special: Set[str] = frozenset(),
    seed: Seed = 0,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Compute shares of Σ‖w·g‖²: a row per value of each driver of `add_drivers`.

    Columns: driver, value; num_tokens, token_share, token_lower, token_upper; num_measured, squared_share,
    squared_lower, squared_upper. Bounds are simultaneous 95 % bounds on all of a driver's shares, since the largest is
    picked. Measured tokens are scaled as in `scaled_squares`. Square columns are NaN if weights or norms are unknown.
    special: the tokenizer's special tokens, as decoded.

    A row has at least `PRINTABLE` measured tokens: rarer kinds become "other", and the number of classes is reduced.
    """
    squares, drawn = scaled_squares(table), sampling_probabilities(table)
    amounts = (table["weight"] * np.exp(table["log_one_minus_prob"])).to_numpy(np.float64) ** 2

    def sample(known: np.ndarray) -> dict[str, np.ndarray]:
        return {} if drawn is None else {"probabilities": drawn[known], "sizes": amounts[known]}

    classes = max(1, min(classes, int(np.isfinite(squares).sum()) // PRINTABLE))
    table = add_drivers(table, classes=classes, special=special)
    parts = []
    for driver in ("token_class", "position_class", "length_class", "entropy_class", "advantage_sign"):
        if driver not in table:
            continue
        column = table[driver].astype("category").cat.remove_unused_categories()
        if driver == "token_class":
            few = column[np.isfinite(squares)].value_counts() < PRINTABLE
            column = column.astype(object).replace(dict.fromkeys(few.index[few], OTHER)).astype("category")
        names, known = [str(name) for name in column.cat.categories], column.notna().to_numpy()
        if not names:
            continue
        args = (column.cat.codes.to_numpy()[known], table["group"].to_numpy()[known])
        resampling = Resampling(seed, 1 - 0.05 / len(names), resamples)
        settings = {"resampling": resampling, "edges": range(len(names) + 1)}
        tokens = interval_shares(*args, **settings)
        square = interval_shares(*args, values=squares[known], **sample(known), **settings)
        part = {"driver": driver, "value": names, "num_tokens": tokens["num_tokens"], "token_share": tokens["value"]}
        part |= {"token_lower": tokens["lower"], "token_upper": tokens["upper"]}
        part |= {"num_measured": square["num_measured"], "squared_share": square["value"]}
        part |= {"squared_lower": square["lower"], "squared_upper": square["upper"]}
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


def module_shares(table: pd.DataFrame, policy: Policy) -> pd.DataFrame | None:
    """Compute shares of Σ‖w·g‖² by module group; None unless measured with `measure(module_groups=True)`.

    Columns: module, a group of `policy.module_groups`; parameter_share, of the measured parameters; squared_share; and
    low_share, of the sum over the tokens of the lowest interval alone.
    """
    parameters, sizes = dict(float_parameters(policy.model)), {}
    for name, (_, group) in module_groups(policy).items():
        if f"{PARAMETERS}.{group}" in table:
            sizes[group] = sizes.get(group, 0) + parameters[name].numel()
    if not sizes:
        return None
    squares = table[[f"{PARAMETERS}.{group}" for group in sizes]].to_numpy(np.float64) ** 2
    squares *= (stands_for(table, table[PARAMETERS].notna().to_numpy()) * table["weight"] ** 2).to_numpy()[:, None]
    columns: dict[str, object] = {"module": [*sizes]}
    lowest = squares[table["interval"].to_numpy() == 0]
    sums = {"parameter_share": np.array([*sizes.values()]), "squared_share": np.nansum(squares, 0)}
    sums |= {"low_share": np.nansum(lowest, 0)}
    with np.errstate(invalid="ignore"):  # no token there
        columns |= {name: values / values.sum() for name, values in sums.items()}
    return pd.DataFrame(columns).sort_values("squared_share", ascending=False, kind="stable", ignore_index=True)


def scaled_squares(table: pd.DataFrame) -> Float[np.ndarray, " n"]:
    """Return ‖w·g‖² of each measured token times the number of tokens it represents; NaN for the others."""
    squares = weighted_norms(table) ** 2
    return squares * stands_for(table, ~np.isnan(squares))


def total_squares(table: pd.DataFrame) -> float:
    """Return Σ‖w·g‖² over all tokens (estimated, if a sample with known probabilities was drawn)."""
    sampled = sampling_probabilities(table) is not None
    return float(np.nansum(scaled_squares(table) if sampled else weighted_norms(table) ** 2))


def add_weighted_norms(table: pd.DataFrame) -> pd.DataFrame:
    """Add weighted_norm, ‖w·g‖, and squared_share, its square's percentage of `total_squares` (NaN if that is 0)."""
    norm, total = weighted_norms(table), total_squares(table)
    return table.assign(weighted_norm=norm, squared_share=100 * norm**2 / total if total > 0 else np.nan)


def add_estimated_norms(table: pd.DataFrame) -> pd.DataFrame:
    """Add weighted_norm_estimate if some tokens were measured and others not; otherwise return the table unchanged.

    This is ‖w·g‖ if known, and otherwise |w|·‖e − π‖ times the ratio of the two quantities' sums over the interval's
    measured tokens, scaled by `stands_for`.
    """
    if not {"weighted_norm", "weight", LOGITS} <= {*table}:
        return table
    exact, cheap = table["weighted_norm"].astype(float), table["weight"].abs() * table[LOGITS].astype(float)
    known = exact.notna()
    if known.all() or not known.any():
        return table
    counts = stands_for(table, known.to_numpy())
    both = pd.DataFrame({"exact": counts * exact, "cheap": counts * cheap.where(known)})
    sums = both.groupby(table["interval"]).sum()
    ratio = (sums["exact"] / sums["cheap"].where(sums["cheap"] > 0)).reindex(table["interval"]).to_numpy()
    return table.assign(weighted_norm_estimate=exact.where(known, cheap * ratio))


def largest_tokens(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """Return the n measured tokens with the largest ‖w·g‖, in descending order.

    Columns of the table, then weighted_norm, ‖w·g‖, and squared_share, of `total_squares`.
    """
    norm, whole = weighted_norms(table), total_squares(table)
    columns = ["response", "position", "token", "prob", "entropy", "advantage", "weight", "interval", PARAMETERS]
    chosen = table[[c for c in columns if c in table]].assign(weighted_norm=norm, squared_share=norm**2 / whole)
    return chosen[norm > 0].nlargest(n, "weighted_norm").reset_index(drop=True)


def bound_margins(table: pd.DataFrame, vocab_size: int) -> BoundMargins:
    """Compare every token's `logit_grad_norm` with √(N/(N−1))·(1−π) and √2·(1−π), ignoring NaN."""
    import torch

    known = table[table[LOGITS].notna()]
    norms, log_rest = (torch.tensor(known[c].to_numpy(np.float32)) for c in (LOGITS, "log_one_minus_prob"))
    lower, upper = (bound.double() for bound in logit_grad_bounds(log_rest, vocab_size))
    slack, norms = rounding_tolerance(log_rest).double(), norms.double()
    outside = (norms < lower * (1 - slack)) | (norms > upper * (1 + slack))
    open_ = lower > 0
    margins = [(norms[open_] / lower[open_] - 1), (1 - norms[open_] / upper[open_])]
    least = [margin.min().item() if len(margin) else float("nan") for margin in margins]
    return BoundMargins(len(norms), int(outside.sum()), *least, slack.max().item() if len(slack) else 0.0)
