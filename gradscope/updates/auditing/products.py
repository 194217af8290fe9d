"""Inner products, by parameter, of a trainer's gradient with an exact one, and what they say of the two."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

FLOAT32 = 2e-3
"""Relative distance above which two float32 sums are not of the same terms."""
TIGHT = 2e-4
"""Relative distance up to which float32 sums of the same terms usually are of each other: 1e-6 to 2e-5 as measured."""
CLUSTER = 0.01
"""Least share of ‖ours‖² in parameters where theirs is ours that shows that it is wrong in the others."""
APART = 10.0
"""A parameter's distance, in those of rounding, from which its gradient differs."""
ALL, OUTSIDE = "all", "outside"
"""Instead of a layer or a group: over all of them; not in a layer."""


def products_of(
    ours: Mapping[str, Float[Tensor, " p"]], theirs: Mapping[str, Float[Tensor, " p"]] | None
) -> pd.DataFrame:
    """Return inner products by parameter, in float64: own (ours), cross, other (theirs; None: unknown, NaN)."""
    rows = []
    for name, own in ours.items():
        a = own.double().cpu()
        row = {"parameter": name, "own": float(a @ a), "cross": np.nan, "other": np.nan}
        if theirs is not None:
            b = theirs[name].double().cpu()
            row |= {"cross": float(a @ b), "other": float(b @ b)}
        rows.append(row)
    return pd.DataFrame(rows)


def distances(products: pd.DataFrame, factor: float) -> np.ndarray:
    """Return ‖theirs − factor·ours‖ over the larger of the two norms, by parameter."""
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    square = np.clip(other - 2 * factor * cross + factor**2 * own, 0, None)
    return np.sqrt(square / np.maximum(np.maximum(other, factor**2 * own), 1e-300))


def summarize(products: pd.DataFrame) -> dict[str, float]:
    """Return a reading's columns of `Audit.readings`.

    The factor is the trainer's gradient over ours in half of the gradient; but 1 if it is that in some parameters and
    far from it in all others, for then these are wrong, however large they are.
    """
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    if not own.sum():
        nothing = {"norm": 0.0, "ratio": np.inf, "factor": np.nan, "cosine": np.nan}
        return nothing | {"distance": 1.0, "typical": 1.0, "fitting": 0.0}
    share = own / own.sum()
    at_one = distances(products, 1.0)
    equal, apart = share[at_one <= FLOAT32].sum(), share[at_one > APART * FLOAT32].sum()
    moved = (own > 0) & (other > 0)
    if equal >= CLUSTER and equal + apart >= 1 - CLUSTER:
        factor = 1.0
    else:
        factor = _median(cross[moved] / own[moved], own[moved])
    square = max(0.0, float(other.sum() - 2 * factor * cross.sum() + factor**2 * own.sum()))
    away = distances(products, factor)
    return {
        "norm": float(np.sqrt(own.sum())),
        "ratio": float(np.sqrt(other.sum() / own.sum())),
        "factor": factor,
        "cosine": float(cross.sum() / np.sqrt(own.sum() * other.sum())),
        "distance": float(np.sqrt(square / other.sum())),
        "typical": _median(away[own > 0], own[own > 0]),
        "fitting": float(share[away <= FLOAT32].sum()),
    }


def tabulate(products: pd.DataFrame, factor: float) -> pd.DataFrame:
    """Return norm (ours), ratio, cosine and distance of each row of products."""
    own, cross, other = (products[name].to_numpy() for name in ("own", "cross", "other"))
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {"norm": np.sqrt(own), "ratio": np.sqrt(other / own), "cosine": cross / np.sqrt(own * other)}
    return pd.DataFrame(numbers | {"distance": distances(products, factor)}, index=products.index)


def by_group(
    products: pd.DataFrame, homes: Mapping[str, tuple[int | None, str]], factor: float, *, parts: pd.Series
) -> pd.DataFrame:
    """Make `Audit.groups`: over all layers, over all groups of a layer, and each by itself; parts: by parameter."""
    layers, groups = zip(*(homes[name] for name in products["parameter"]), strict=True)
    layers = [OUTSIDE if n is None else str(n) for n in layers]
    told = products[["own", "cross", "other"]].assign(parameters=1, parts=parts.astype(int), layer=layers, group=groups)
    told = pd.concat([told.assign(layer=ALL), told.assign(group=ALL), told])
    sums = told.groupby(["layer", "group"], sort=False).sum().reset_index()
    found = sums[["layer", "group", "parameters"]].join(tabulate(sums, factor))
    return found.assign(parts=sums["parts"] > 0)


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted median, one of the given values: `weighted_quantiles` would interpolate with outliers."""
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(values[order][min(place, len(values) - 1)])
