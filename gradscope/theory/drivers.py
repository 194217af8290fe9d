"""Other drivers of norms and movements than probability: entropy, position, advantage sign, token class.

`add_drivers` adds them as columns for the `by=` of every statistic; `regress_norms` separates the correlated effects of
probability and entropy on norms.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import pandas as pd

from gradscope.errors import InputError, checked
from gradscope.gradients import PARAMETERS, sampling_weights
from gradscope.intervals import assign_intervals, interval_labels
from gradscope.resampling import Seed, bootstrap, prompt_clusters
from gradscope.theory.gains import FLOOR, is_measured, quantities, require_columns

Number = int | float

CLASSES = ("word", "digit", "punctuation", "space", "special")
DRIVERS = ("log_one_minus_prob", "entropy")
POOLED = "layers"
"""The quantity that combines the activation norms of all layers."""

_FEWEST = 4
"""Fewest tokens: two drivers and an intercept fit three exactly."""
_CONSTANT = 1e-12
"""Variance of a standardised driver below which it counts as constant in a resample."""


def token_classes(tokens: pd.Series, special: Set[str] = frozenset()) -> pd.Series:
    """Classify decoded tokens: special, else word (contains a letter), digit, space (nothing else), or punctuation
    (also symbols and fragments of characters).

    special: the tokenizer's special tokens, as decoded. Raises InputError for values that are not strings.

    >>> token_classes(pd.Series([" knight", "12", " (", "\\n", "</s>"]), {"</s>"}).tolist()
    ['word', 'digit', 'punctuation', 'space', 'special']
    """
    unique = tokens.unique()
    if strange := [token for token in unique if not isinstance(token, str)]:
        raise InputError(f"{strange[0]!r} is not a token; give the decoded tokens as strings, as in the column `token`")
    classes = {token: "special" if token in special else _class(token) for token in unique}
    return pd.Series(pd.Categorical(tokens.map(classes), CLASSES), index=tokens.index, name="token_class")


@checked
def add_drivers(table: pd.DataFrame, *, classes: int = 4, special: Set[str] = frozenset()) -> pd.DataFrame:
    """Add categorical columns for `by=`: entropy_class, position_class, length_class, advantage_sign, token_class,
    teacher_class.

    Classes are [lo, hi) with equally many tokens, the last one closed; ties lead to fewer classes. entropy_class is in
    nats, length_class in tokens of the response in the table, advantage_sign "negative", "zero" or "positive".
    teacher_class is of log ν − log π, in nats, where a teacher's log ν is known. length_class and token_class need
    columns `response` and `token`, as from `measure`. NaN gets no category.
    """
    needed = ["entropy", "position", "advantage"]
    if missing := [c for c in needed if c not in table]:
        raise InputError(f"the table has no column {', '.join(missing)}; drivers are made of {', '.join(needed)}")
    if classes < 1:
        raise InputError(f"classes is {classes}; give 1 or more")
    signs = table["advantage"].map(np.sign).map({-1: "negative", 0: "zero", 1: "positive"})
    columns = {f"{name}_class": _quantile_classes(table[name], classes) for name in ("entropy", "position")}
    columns["advantage_sign"] = pd.Categorical(signs, ["negative", "zero", "positive"])
    if "teacher_logprob" in table and table["teacher_logprob"].notna().any():
        gap = (table["teacher_logprob"] - table["logprob"]).rename("teacher_gap")
        columns["teacher_class"] = _quantile_classes(gap, classes)
    if "response" in table:
        lengths = table.groupby("response")["position"].transform("size")
        columns["length_class"] = _quantile_classes(lengths, classes)
    if "token" in table:
        columns["token_class"] = token_classes(table["token"], special)
    return table.assign(**columns)


@checked
def regress_norms(
    table: pd.DataFrame,
    *,
    seed: Seed = 0,
    floor: float = FLOOR,
    max_vif: Number = 10,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Regress the log norm on log(1−π) and entropy by OLS, to see whether norms follow probability or entropy.

    table: from `measure`; uses tokens with 1−π > floor and a measured norm, weighted by 1 / p if sampled. A quantity is
    the activation norm of a layer, param_grad_norm, or "layers": all layers together, with an intercept each.
    Rows per quantity: the drivers log_one_minus_prob and entropy; difference, the first |coefficient| minus the second;
    for "layers" also layer. Columns:
    coefficient: standardised, in standard deviations of the log norm per one of the driver, holding the other driver
    (and layer) fixed; lower, upper: bootstrap percentiles over prompts, re-standardised in each draw; r2_alone: R² of
    this driver alone; r2: of all together; vif: variance inflation 1 / (1 − R² of the driver on the rest); collinear:
    vif > max_vif, in which case coefficients and bounds are NaN; tokens, prompts: in the fit (tokens × layers if
    pooled).
    NaN with fewer than 4 tokens or for a constant driver; bounds are NaN with one prompt. Raises InputError if no
    quantity has 4 tokens to fit.
    """
    names = quantities(table)
    require_columns(table, ["entropy"])
    layers = [name for name in names if name != PARAMETERS]
    parts = []
    for quantity, columns in [*((name, [name]) for name in names), (POOLED, layers)]:
        values, layer, prompts, counts = _fitted_tokens(table, columns, floor)
        fit = _fit(
            values, layer, prompts, counts, max_vif, {"seed": seed, "confidence": confidence, "resamples": resamples}
        )
        fit.insert(0, "quantity", quantity)
        fit = fit.assign(tokens=len(values), prompts=len(np.unique(prompts)))
        parts.append(fit if quantity == POOLED else fit[fit["driver"] != "layer"])
    regression = pd.concat(parts, ignore_index=True)
    if regression["tokens"].max() < _FEWEST:
        raise InputError(
            f"fewer than {_FEWEST} tokens with 1−π > {floor:g} have a measured norm and an entropy; "
            "measure more tokens or lower floor="
        )
    return regression


def _class(token: str) -> str:
    if any(character.isalpha() for character in token):
        return "word"
    if any(character.isnumeric() for character in token):
        return "digit"
    return "punctuation" if token.strip() else "space"


def _quantile_classes(column: pd.Series, classes: int) -> pd.Categorical:
    """Cut a column into classes of equal counts, at existing values; a constant column is one class."""
    values = column.to_numpy(np.float64)
    known = ~np.isnan(values)
    if not known.any():
        raise InputError(f"{column.name} is unknown for every token, so it has no classes; measure it first")
    edges = np.unique(np.quantile(values[known], np.arange(classes + 1) / classes, method="higher"))
    code = np.full(len(values), -1)
    if len(edges) == 1:
        code[known] = 0
        return pd.Categorical.from_codes(code, [f"{edges[0]:.3g}"])
    code[known] = assign_intervals(values[known], edges)
    return pd.Categorical.from_codes(code, interval_labels(edges), ordered=True)


def _fitted_tokens(table: pd.DataFrame, columns: list[str], floor: float) -> tuple[np.ndarray, ...]:
    """Return the tokens to fit in each column: log(1−π), entropy, log norm [n, 3]; column; prompt; 1/p."""
    known, clusters = np.isfinite(table["entropy"].to_numpy(np.float64)), prompt_clusters(table)
    values, layers, prompts, counts, weights = [], [], [], [], sampling_weights(table)
    for layer, name in enumerate(columns):
        keep = is_measured(table, name, floor) & known
        x, norm = table.loc[keep, list(DRIVERS)].to_numpy(np.float64), table.loc[keep, name].to_numpy(np.float64)
        values.append(np.column_stack([x, np.log(norm)]))
        layers.append(np.full(len(x), layer))
        prompts.append(clusters[keep])
        counts.append(weights[keep])
    return tuple(np.concatenate(parts) for parts in (values, layers, prompts, counts))


def _fit(
    values: np.ndarray, layer: np.ndarray, prompts: np.ndarray, tokens: np.ndarray, max_vif: Number, settings: dict
) -> pd.DataFrame:
    """Return the rows of one quantity, with the layer's last."""
    fit = pd.DataFrame({"driver": [*DRIVERS, "difference", "layer"]})
    if len(values) < _FEWEST:
        unknown = dict.fromkeys(("coefficient", "lower", "upper", "r2_alone", "r2", "vif"), np.nan)
        return fit.assign(**unknown, collinear=False)
    sums = _cluster_sums(values, layer, prompts, tokens)

    def evaluate(weights: np.ndarray) -> np.ndarray:
        first, second = _coefficients(*_moments(weights, *sums)).T
        return np.stack([first, second, np.abs(first) - np.abs(second)], axis=1)

    answers = np.full((3, 4), np.nan)
    answers[:, :3] = bootstrap(evaluate, len(sums[0]), **settings)
    [within], [overall] = _moments(np.ones((1, len(sums[0]))), *sums)
    alone, together = _explained(within, overall)
    inflation = _inflation(within, overall)
    collinear = inflation > max_vif
    answers[:, [*collinear, collinear.any(), False]] = np.nan
    fit["coefficient"], fit["lower"], fit["upper"] = answers
    fit["r2_alone"], fit["r2"] = [*alone[:2], np.nan, alone[2]], together
    return fit.assign(vif=[*inflation, np.nan, np.nan], collinear=[*collinear, collinear.any(), False])


def _cluster_sums(
    values: np.ndarray, layer: np.ndarray, prompts: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sums of the standardised values per prompt: counts [C, L] and sums [C, L, 3] by layer, sums of products
    [C, 3, 3].

    tokens: the weight of each token.
    """
    part = (tokens / tokens.mean())[:, None]
    middle = (part * values).mean(0)
    deviation = np.sqrt((part * (values - middle) ** 2).mean(0))
    spread = np.where(np.ptp(values, axis=0) > 0, deviation, np.inf)  # constants become 0
    z = ((values - middle) / spread).T
    labels, cluster = np.unique(prompts, return_inverse=True)
    shape = (len(labels), layer.max() + 1)
    cell = cluster * shape[1] + layer
    counts = np.bincount(cell, part[:, 0], minlength=shape[0] * shape[1]).reshape(shape)
    sums = np.stack([np.bincount(cell, part[:, 0] * v, minlength=counts.size).reshape(shape) for v in z], axis=-1)
    products = np.stack([np.bincount(cluster, part[:, 0] * v * w) for v in z for w in z], axis=-1)
    return counts, sums, products.reshape(-1, 3, 3)


def _moments(
    weights: np.ndarray, counts: np.ndarray, sums: np.ndarray, products: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return covariances (÷ n) of log(1−π), entropy and log norm by draw [draws, 3, 3], within layers and overall.

    Within: about each layer's mean, which is what an intercept per layer leaves to the drivers.
    """
    drawn, sums, products = (np.tensordot(weights, part, 1) for part in (counts, sums, products))
    n, whole = drawn.sum(1)[:, None, None], sums.sum(1)
    between = np.einsum("rli,rlj->rij", sums / np.where(drawn > 0, drawn, 1)[:, :, None], sums)
    return (products - between) / n, products / n - (whole / n[:, 0])[:, :, None] * (whole / n[:, 0])[:, None, :]


def _slopes(within: np.ndarray) -> np.ndarray:
    """Fit the log norm on both drivers by least squares [draws, 2]; the shortest solution if collinear."""
    inverse = np.linalg.pinv(within[:, :2, :2], 1e-10, hermitian=True)
    return (inverse @ within[:, :2, 2:])[:, :, 0]


def _coefficients(within: np.ndarray, overall: np.ndarray) -> np.ndarray:
    """Return standardised slopes [draws, 2]; NaN if driver or norm are constant."""
    variance = np.diagonal(overall, axis1=1, axis2=2)
    known = (np.diagonal(within, axis1=1, axis2=2)[:, :2] > _CONSTANT) & (variance[:, 2:] > _CONSTANT)
    scale = np.divide(variance[:, :2], variance[:, 2:], out=np.full(known.shape, np.nan), where=known)
    return _slopes(within) * np.sqrt(scale)


def _explained(within: np.ndarray, overall: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the R² [3] of each driver alone and of the layer alone, and the R² of all together."""
    total = overall[2, 2] if overall[2, 2] > _CONSTANT else np.nan
    variance = np.where(np.diagonal(overall)[:2] > _CONSTANT, np.diagonal(overall)[:2], np.nan)
    explained = _slopes(within[None])[0] @ within[:2, 2]
    layer = 1 - within[2, 2] / total
    return np.append(overall[:2, 2] ** 2 / (variance * total), layer), layer + explained / total


def _inflation(within: np.ndarray, overall: np.ndarray) -> np.ndarray:
    """Return the variance inflation of both drivers, each given the other and the layer; infinite if redundant."""
    factors = np.full(2, np.nan)
    for driver, other in ((0, 1), (1, 0)):
        if overall[driver, driver] > _CONSTANT:
            shared = within[0, 1] ** 2 / within[other, other] if within[other, other] > _CONSTANT else 0.0
            own = within[driver, driver] - shared
            factors[driver] = overall[driver, driver] / own if own > _CONSTANT else np.inf
    return factors
